"""`group.spawn`: functions whose first argument is the rank, as for `torch.multiprocessing.spawn`."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from labkit.ipc.code_names import name_of

# Usual names of the parameter that receives the rank from mp.spawn, besides those that contain "rank".
NAMES: Final = ("gpu", "i", "idx", "index", "pid", "proc_id", "process_id", "process_index", "local_process_index", "worker_id")


class WithRank:
    """A function that is called with the rank's number before its arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self.__name__ = name_of(function)

    def __call__(self, *args: Any) -> Any:
        """In a rank: call the function."""
        return self._function(int(os.environ["LABKIT_RANK"]), *args)


def check_spawn(function: Any, args: Any, nprocs: int | None, join: bool, size: int) -> None:
    """Check the arguments of `group.spawn`, which supports less than `mp.spawn`.

    Raises:
        TypeError, ValueError: an invalid argument.
    """
    if not callable(function):
        raise TypeError(f"spawn({function!r}): expected a function, given {type(function).__name__}. Pass f, not f(rank).")
    if not isinstance(args, tuple | list):
        raise TypeError(f"spawn(..., args={args!r}): expected a tuple of arguments; a single one is written args=({args!r},)")
    if nprocs not in (None, size):
        raise ValueError(f"spawn(..., nprocs={nprocs}): this group has {size} ranks; create one with lab.Group({nprocs})")
    if not join:
        raise ValueError("spawn(..., join=False): a group always waits for its ranks; leave join out")


def hint_for_rank(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """A hint for a function that was called without the rank that its first parameter expects; else ""."""
    if isinstance(function, WithRank):
        return ""
    try:
        signature = inspect.signature(function)
        first = next(iter(signature.parameters), "")
        if "rank" not in first and first not in NAMES:
            return ""
        signature.bind(0, *args, **kwargs)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        name = name_of(function)
        return f"`group.spawn({name}, args=(...))` calls {name}({first}, ...) on each rank with its number, as mp.spawn does."
    return ""
