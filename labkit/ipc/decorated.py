"""Pickles functions whose decorator keeps state that cannot be sent: the receiver decorates the function anew."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, Final

CACHED: Final = type(functools.lru_cache(len))
_COMPILER: Final = "torch._dynamo.eval_frame", "OptimizeContext"
_DISPATCHING: Final[Any] = functools.singledispatch(len)


def reduce_decorated(function: Any) -> Any:
    """Return how to reduce a function under `lru_cache`, `singledispatch` or `torch.compile`; None for any other."""
    if isinstance(function, CACHED):
        return _cached, (function.__wrapped__, function.cache_parameters())
    if not isinstance(function, FunctionType):
        return None
    if function.__code__ is _DISPATCHING.__code__:
        return _dispatching, (dict(function.registry),)  # type: ignore[attr-defined]  # set by `singledispatch`
    if hasattr(function, "__wrapped__") and (compiler := _compiler_of(function)) is not None:
        return compiler.__call__, (function.__wrapped__,)
    return None


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _dispatching(implementations: Mapping[type, Callable[..., Any]]) -> Any:
    function = functools.singledispatch(implementations[object])
    for kind, implementation in implementations.items():
        function.register(kind, implementation)
    return function


def _compiler_of(function: FunctionType) -> Any:
    """Return the object with which `torch.compile` has wrapped a function; None if something else has.

    It is a variable of the wrapper, and torch can pickle it, because a compiled module refers to it, too. Without this,
    a compiled function could not be sent. torch has no public way to ask for it (2.11 to 2.13), so it is recognized by
    the name of its class.
    """
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            kind = type(cell.cell_contents)
            if (kind.__module__, kind.__name__) == _COMPILER:
                return cell.cell_contents
    return None
