"""Records the operations of a `dist.ProcessGroupGloo` that the program's own code constructs over a store."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.distributed import ProcessGroup  # the original, which `comm.install` replaces later

from labkit.comm.torch_internals import PROCESS_GROUPS
from labkit.recording.operations import methods


def watched_gloo(group_class: Any) -> Any:
    """Return a subclass of torch's `ProcessGroupGloo` whose collectives and messages use a recorded process group.

    torch itself calls a group's backend in C++, without this class. Groups that torch constructs by this name
    synchronize the workers of RPC, and are not recorded.

    Args:
        group_class: the class of recorded process groups.
    """
    gloo: Any = torch.distributed.ProcessGroupGloo

    class Watched(gloo):  # type: ignore[misc]  # a class of C++
        def __init__(self, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> None:
            super().__init__(store, rank, size, *args, **kwargs)
            self._watched = None
            if sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
                return
            real = ProcessGroup(store, rank, size)
            PROCESS_GROUPS["_set_default_backend"](real, ProcessGroup.BackendType.GLOO)
            PROCESS_GROUPS["_register_backend"](real, torch.device("cpu"), ProcessGroup.BackendType.GLOO, self)
            self._watched = group_class(store, rank, size, real=real)

    for method in methods():
        if hasattr(gloo, method) and hasattr(ProcessGroup, method):
            setattr(Watched, method, _through_group(method, getattr(gloo, method)))
    Watched.__name__, Watched.__qualname__, Watched.__module__ = gloo.__name__, gloo.__qualname__, gloo.__module__
    return Watched


def _through_group(method: str, torchs: Any) -> Any:
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        return torchs(self, *args, **kwargs) if self._watched is None else getattr(self._watched, method)(*args, **kwargs)

    return called
