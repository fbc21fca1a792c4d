"""The process-wide registry: the open groups, and the starters that groups share."""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

from labkit.errors.exceptions import LabError
from labkit.ipc.options import STARTS
from labkit.recording.cores import usable_cores
from labkit.worker import network_namespace
from labkit.worker.runtimes.registry import RUNTIMES


class Notebook:
    """The open groups of this process, and the starters of ranks."""

    def __init__(self) -> None:
        self.groups: weakref.WeakSet[Any] = weakref.WeakSet()
        # On this machine by preloaded modules, start method and LABKIT_NETWORK; on others by runtime and engine.
        self.starters: dict[tuple[Any, ...], Any] = {}
        self._lock = threading.Lock()
        self._of_parent: list[Any] = []
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._start_afresh)

    def starter(self, runtime: str, start: str, on: Any = None) -> Any:
        """The starter of a runtime's ranks, on this machine or on those of an `Engine`.

        The first call starts importing the framework, without waiting for it, where ranks are forked.
        """
        from labkit.launch.starters import ForkStarter, SpawnStarter

        kind = RUNTIMES[runtime]
        if on is not None:
            from labkit.launch.machines.relay_starter import RelayStarter

            of_machines = (runtime, type(on), on.key)

            def made() -> RelayStarter:
                if on.ends_machines:
                    weakref.finalize(on, self._forget, of_machines).atexit = False
                return RelayStarter(on, runtime)

            return self._shared(of_machines, made)
        network = network_namespace.wanted(os.environ)
        if network == network_namespace.PRIVATE and start == "spawn":
            raise LabError(
                "LABKIT_NETWORK=private needs start='fork': the private network belongs to the server that forks ranks"
            )
        make = ForkStarter if start == "fork" else SpawnStarter
        key = (",".join(kind.preload), start, network)
        return self._shared(key, lambda: make(kind.preload, kind.environment))

    def _shared(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """The starter with this key; a new one if there is none, or if its own process has ended."""
        with self._lock:
            starter = self.starters.get(key)
            if starter is None or not starter.alive():
                if starter is not None:
                    starter.close()
                starter = self.starters[key] = make()
        return starter

    def _forget(self, key: tuple[Any, ...]) -> None:
        """Close the starter of an engine that nobody refers to any more. This thread may hold the lock already."""
        starter = self.starters.pop(key, None)
        if starter is not None:
            starter.close()

    def close(self) -> None:
        """At exit: end all ranks and starters."""
        for group in list(self.groups):
            group.close()
        for starter in self.starters.values():
            starter.close()
        self.starters.clear()

    def _start_afresh(self) -> None:
        """In a fork of this process: groups and starters are the parent's, and must not be garbage-collected here."""
        self._of_parent += [self.groups, self.starters]
        self.groups, self.starters, self._lock = weakref.WeakSet(), {}, threading.Lock()


notebook: Final = Notebook()


def warm_up(runtime: str = "torch") -> None:
    """Start importing a runtime's framework in the background, so that the first group starts fast; returns at once."""
    package = RUNTIMES[runtime].package
    if os.name == "posix" and "LABKIT_RANK" not in os.environ and (not package or importlib.util.find_spec(package)):
        start = default_start()
        starter = notebook.starter(runtime, start)
        if start == "spawn":
            starter.warm(max(1, min(4, int(usable_cores()))))


def default_start() -> str:
    """The default start method: the value of LABKIT_START; or "fork" on Linux, where it is safe; "spawn" elsewhere."""
    chosen = os.environ.get("LABKIT_START") or ("fork" if sys.platform == "linux" else "spawn")
    if chosen not in STARTS:
        raise LabError(f"LABKIT_START={chosen!r}: expected 'fork' or 'spawn'")
    return chosen
