"""Drops references to values of other ranks on one thread, since torch can hang when two threads drop one each.

To drop a reference, torch tells its owner. Meanwhile it holds a lock of its own, and Python's global lock, which it may
release and take again, for the same moment can also free the tensor of an earlier message. If a second thread drops a
reference just then, each of the two has the lock that the other needs, and the process never runs again. Calls that
carry references and end at about the same time do this, over TCP in one of some hundred cases.

Steps of a `DistributedOptimizer` are made visible on the owner of the parameters, where torch calls a script function
in C++, which cannot be recorded. A Python function that calls the same script of the same optimizer takes its place.
"""

from __future__ import annotations

import sys
import threading
import time
from queue import SimpleQueue
from typing import Any, Final

from labkit.worker.comm.torch_internals import REMOTE_STEPS


def step_in_python() -> None:
    """Replace the script function; needed in each process that calls steps."""
    if REMOTE_STEPS.found:
        REMOTE_STEPS.set(_script_local_optimizer_step.__name__, _script_local_optimizer_step)


def _script_local_optimizer_step(local_optim_rref: Any, autograd_ctx_id: int) -> None:
    """Run a step; the name is torch's, by which the call is recognized."""
    local_optim_rref.local_value().step(autograd_ctx_id)


SHORTEST_S: Final = 0.002  # between two looks at which references the rank still uses, soon after a change
LONGEST_S: Final = 0.05  # and when there is none
OWN: Final = 3  # the counted uses of a reference that has no others: `held`, `rref` and the argument of `getrefcount`


class References:
    """Keeps this rank's references until nothing else uses them; then they are dropped, one after the other."""

    def __init__(self) -> None:
        self._new: SimpleQueue[Any] = SimpleQueue()

    def start(self) -> None:
        """Start the thread that drops the references."""
        threading.Thread(target=self._drop, name="labkit-references", daemon=True).start()

    def keep(self, rref: Any) -> Any:
        """Keep a reference that torch has just made, and return it."""
        self._new.put(rref)
        return rref

    def _drop(self) -> None:
        held: list[Any] = []
        wait_s = SHORTEST_S
        while True:
            if not held:
                held.append(self._new.get())
            time.sleep(wait_s)
            before = len(held)
            while not self._new.empty():
                held.append(self._new.get())
            held = [rref for rref in held if sys.getrefcount(rref) > OWN]
            wait_s = SHORTEST_S if len(held) != before else min(2 * wait_s, LONGEST_S)
