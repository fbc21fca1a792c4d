"""Makes steps of a `DistributedOptimizer` visible on the owner of the parameters.

There torch calls a script function, which runs in C++ and cannot be recorded. It is replaced by a Python function that
calls the same script of the same optimizer. The computation is the same, and still runs without the GIL.
"""

from __future__ import annotations

from typing import Any

from labkit.comm.torch_internals import REMOTE_STEPS


def step_in_python() -> None:
    """Replace the script function; needed in each process that calls steps."""
    if REMOTE_STEPS.found:
        REMOTE_STEPS.set(_script_local_optimizer_step.__name__, _script_local_optimizer_step)


def _script_local_optimizer_step(local_optim_rref: Any, autograd_ctx_id: int) -> None:
    """Run a step; the name is torch's, by which the call is recognized."""
    local_optim_rref.local_value().step(autograd_ctx_id)
