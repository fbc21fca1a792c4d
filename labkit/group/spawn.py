"""Functions that are given the number of their rank first, as those are that programs hand to `torch.multiprocessing.spawn`."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from labkit.ipc.code_names import name_of

__all__ = ["WithRank", "check_spawn", "hint_for_rank"]

# What programs call the parameter by which mp.spawn tells the rank, where "rank" is no part of it.
NAMES: Final = ("gpu", "i", "idx", "index", "pid", "proc_id", "process_id", "process_index", "local_process_index", "worker_id")


class WithRank:
    """A function that is called with the number of the rank before its arguments.

    Args:
        function: the student's.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self.__name__ = name_of(function)

    def __call__(self, *args: Any) -> Any:
        """In a rank: call it."""
        return self._function(int(os.environ["LABKIT_RANK"]), *args)


def check_spawn(function: Any, args: Any, nprocs: int | None, join: bool, size: int) -> None:
    """Refuse what `mp.spawn` would take and a group cannot do.

    Raises:
        TypeError, ValueError: an invalid argument.
    """
    if not callable(function):
        raise TypeError(f"spawn({function!r}): expected a function, given {type(function).__name__}. Pass f, not f(rank).")
    if not isinstance(args, tuple | list):
        raise TypeError(f"spawn(..., args={args!r}): expected a tuple of arguments; one alone is written args=({args!r},)")
    if nprocs not in (None, size):
        raise ValueError(f"spawn(..., nprocs={nprocs}): this group has {size} ranks; lab.Group({nprocs}) makes one that fits")
    if not join:
        raise ValueError("spawn(..., join=False): a group waits for its ranks; leave join out")


def hint_for_rank(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """What to say where a function was called without the rank that its first parameter wants; "" where that is not so."""
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
