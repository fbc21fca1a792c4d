"""Names in code: what it reads, what a cell assigns, and what a function is called."""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import linecache
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

__all__ = ["assigned", "mentions", "name_of", "names_read", "reads"]

_READ = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")
_ASSIGN_GLOBAL = ("STORE_GLOBAL", "DELETE_GLOBAL")
_ASSIGN_HERE = ("STORE_NAME", "DELETE_NAME")  # in a module's code; in the body of a class these are its attributes
# After these statements their names are defined; after a `try` or a `match` they may not be.
_SURE = (ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


def name_of(function: Callable[..., Any]) -> str:
    """What the student calls something that can be called."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def mentions(name: str, function: Callable[..., Any], pickled: bytes) -> bool:
    """Whether a name stands in the file that a function comes from, or in the code that was pickled with it."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    lines = linecache.getlines(code.co_filename) if code is not None else []
    return name.encode() in pickled or any(name in line for line in lines)


def names_read(code: types.CodeType) -> set[str]:
    """The global names that code reads, the functions and classes inside it included; attributes are no names."""
    return {name for inner in _nested(code) for name in _names(inner, _READ)}


def assigned(code: types.CodeType) -> set[str]:
    """The global names that a cell's code assigns or deletes."""
    return _names(code, _ASSIGN_HERE) | {name for inner in _nested(code) for name in _names(inner, _ASSIGN_GLOBAL)}


def reads(source: ast.Module, filename: str, home: Mapping[str, Any]) -> set[str]:
    """What a cell takes from a namespace.

    That is the names it reads before it has surely assigned them, and those that the functions and classes behind them read.

    Args:
        source: the cell.
        filename: what it is called.
        home: the namespace.
    """
    found = _read_before_assigned(source.body, set(), filename)
    waiting, found = found & home.keys(), set()
    while waiting:
        found |= waiting
        waiting = {n for name in waiting for code in _codes(home[name]) for n in names_read(code)} & home.keys() - found
    return found


def _read_before_assigned(statements: Sequence[ast.stmt], own: set[str], filename: str) -> set[str]:
    """The global names that statements read and that are not in `own`, to which those are added that are defined after them."""
    found: set[str] = set()

    def look(node: ast.stmt | ast.expr, own: set[str]) -> types.CodeType:
        # In a loop of its own, because it may be a `break` or hold one.
        statement = node if isinstance(node, ast.stmt) else ast.Expr(node)
        tree = ast.Module([ast.While(ast.Constant(True), [statement], [])], [])
        code = compile(ast.fix_missing_locations(tree), filename, "exec", dont_inherit=True)
        found.update(names_read(code) - own)
        return code

    for statement in statements:
        if isinstance(statement, ast.For):
            look(statement.iter, own)
            own |= _targets(statement.target)  # though a loop over nothing does not assign it
            branches = [statement.body, statement.orelse]
        elif isinstance(statement, ast.If | ast.While):
            look(statement.test, own)
            branches = [statement.body, statement.orelse]
        elif isinstance(statement, ast.With):
            for item in statement.items:
                look(item.context_expr, own)
                own |= _targets(item.optional_vars)
            found |= _read_before_assigned(statement.body, own, filename)
            continue
        elif isinstance(statement, ast.ImportFrom) and statement.module == "__future__":  # it must stand first in its file
            own |= {alias.asname or alias.name for alias in statement.names}
            continue
        else:
            code = look(statement, own)
            if isinstance(statement, _SURE):
                own |= _names(code, _ASSIGN_HERE)
            continue
        for branch in branches:  # which one is taken, nobody knows yet
            found |= _read_before_assigned(branch, set(own), filename)
    return found


def _targets(target: ast.expr | None) -> set[str]:
    """The names in what a loop or a `with` assigns."""
    nodes = ast.walk(target) if target is not None else ()
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _names(code: types.CodeType, operations: tuple[str, ...]) -> set[str]:
    return {i.argval for i in dis.get_instructions(code) if i.opname in operations}


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code and that of all functions and classes inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _codes(value: Any) -> Iterator[types.CodeType]:
    """The code of a function or class of the notebook."""
    if getattr(value, "__module__", None) != "__main__":
        return
    if isinstance(value, type):
        for member in vars(value).values():
            yield from _codes(getattr(member, "fget", getattr(member, "__func__", member)))  # properties, class methods
    while value is not None:
        if isinstance(value, types.FunctionType):
            yield value.__code__
        value = getattr(value, "__wrapped__", None)
