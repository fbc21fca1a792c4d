"""Finds names in code: those it reads, those a cell assigns, and the name of a function."""

from __future__ import annotations

import dis
import functools
import inspect
import linecache
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

_READ = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")
_ASSIGN_GLOBAL = ("STORE_GLOBAL", "DELETE_GLOBAL")
_ASSIGN_HERE = ("STORE_NAME", "DELETE_NAME")  # globals in a module's code; in a class body these assign attributes


def name_of(function: Callable[..., Any]) -> str:
    """Return the name by which the student knows a function or another callable."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def parameters_of(function: Callable[..., Any]) -> Collection[str]:
    """Return the names of a function's parameters; () if they are not known."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # of C
        return ()


def mentions(name: str, function: Callable[..., Any], pickled: bytes) -> bool:
    """Whether a name occurs in the source file of a function, or in the code that was pickled with it."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    lines = linecache.getlines(code.co_filename) if code is not None else []
    return name.encode() in pickled or any(name in line for line in lines)


def names_read(code: types.CodeType) -> set[str]:
    """Return the global names that code reads, also in nested functions and classes; attributes do not count."""
    return {name for inner in _nested(code) for name in _names(inner, _READ)}


def assigned(code: types.CodeType) -> set[str]:
    """Return the global names that a cell's code assigns or deletes."""
    return _names(code, _ASSIGN_HERE) | {name for inner in _nested(code) for name in _names(inner, _ASSIGN_GLOBAL)}


def reads(code: types.CodeType, home: Mapping[str, Any]) -> set[str]:
    """Return the names of a namespace that a cell's code reads, also if it assigns them before.

    The names that the functions and classes among them read in turn count as well.
    """
    found: set[str] = set()
    new = names_read(code) & home.keys()
    while new:
        found |= new
        new = {n for name in new for code in _codes(home[name]) for n in names_read(code)} & home.keys() - found
    return found


def _names(code: types.CodeType, operations: tuple[str, ...]) -> set[str]:
    return {i.argval for i in dis.get_instructions(code) if i.opname in operations}


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code and that of all functions and classes inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _codes(value: Any) -> Iterator[types.CodeType]:
    """Yield the code of a function or class that was defined in the notebook."""
    if getattr(value, "__module__", None) != "__main__":
        return
    if isinstance(value, type):
        for member in vars(value).values():
            yield from _codes(getattr(member, "fget", getattr(member, "__func__", member)))  # properties, class methods
    while value is not None:
        if isinstance(value, types.FunctionType):
            yield value.__code__
        value = getattr(value, "__wrapped__", None)
