"""Finds names in code: those it reads, those a cell assigns, and the name of a function."""

from __future__ import annotations

import dis
import functools
import inspect
import pickle
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


def function_mentions(name: str, function: Callable[..., Any], pickled: bytes) -> bool:
    """Whether a name occurs in a function's code, or in that of the functions and classes that it uses.

    These are the ones of its module, and those that were pickled with it.
    """
    if pickle.SHORT_BINUNICODE + bytes([len(name)]) + name.encode() in pickled:  # the whole of a string, not part of one
        return True
    function = inspect.unwrap(function)
    return hasattr(function, "__code__") and mentions(name, function.__code__, function.__globals__)


def mentions(name: str, code: types.CodeType, home: Mapping[str, Any]) -> bool:
    """Whether a name occurs in code, or in that of the functions and classes that it reads in turn."""
    codes = [code, *(inner for read in reads(code, home) for inner in _codes(home[read], home))]
    return any(name in inner.co_names for outer in codes for inner in _nested(outer))


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
        new = {n for name in new for code in _codes(home[name], home) for n in names_read(code)} & home.keys() - found
    return found


def _names(code: types.CodeType, operations: tuple[str, ...]) -> set[str]:
    return {i.argval for i in dis.get_instructions(code) if i.opname in operations}


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code and that of all functions and classes inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _codes(value: Any, home: Mapping[str, Any]) -> Iterator[types.CodeType]:
    """Yield the code of a function or class that was defined in a namespace."""
    if getattr(value, "__module__", None) != home.get("__name__", "__main__"):
        return
    if isinstance(value, type):
        for member in vars(value).values():
            yield from _codes(getattr(member, "fget", getattr(member, "__func__", member)), home)  # properties, class methods
    while value is not None:
        if isinstance(value, types.FunctionType):
            yield value.__code__
        value = getattr(value, "__wrapped__", None)
