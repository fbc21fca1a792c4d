"""Finds names in code: those it reads, those a cell assigns, and the name of a function."""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import linecache
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

_READ = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")
_ASSIGN_GLOBAL = ("STORE_GLOBAL", "DELETE_GLOBAL")
_ASSIGN_HERE = ("STORE_NAME", "DELETE_NAME")  # globals in a module's code; in a class body these assign attributes
# These statements always define their names; a `try` or a `match` may not.
_ALWAYS_ASSIGN = (ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


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


def reads(source: ast.Module, filename: str, home: Mapping[str, Any]) -> set[str]:
    """Return the names that a cell needs from a namespace.

    These are the names that it reads before it has certainly assigned them, and the names that the functions and
    classes among them read in turn.
    """
    found = _read_before_assigned(source.body, set(), filename)
    new, found = found & home.keys(), set()
    while new:
        found |= new
        new = {n for name in new for code in _codes(home[name]) for n in names_read(code)} & home.keys() - found
    return found


def _read_before_assigned(statements: Sequence[ast.stmt], own: set[str], filename: str) -> set[str]:
    """Return the global names that statements read and that are not in `own`; add names they define to `own`."""
    found: set[str] = set()

    def examine(node: ast.stmt | ast.expr, own: set[str]) -> types.CodeType:
        # Compile it inside a loop, because it may be or contain a `break`.
        statement = node if isinstance(node, ast.stmt) else ast.Expr(node)
        tree = ast.Module([ast.While(ast.Constant(True), [statement], [])], [])
        code = compile(ast.fix_missing_locations(tree), filename, "exec", dont_inherit=True)
        found.update(names_read(code) - own)
        return code

    for statement in statements:
        if isinstance(statement, ast.For):
            examine(statement.iter, own)
            own |= _targets(statement.target)  # assumes that the loop runs at least once
            branches = [statement.body, statement.orelse]
        elif isinstance(statement, ast.If | ast.While):
            examine(statement.test, own)
            branches = [statement.body, statement.orelse]
        elif isinstance(statement, ast.With):
            for item in statement.items:
                examine(item.context_expr, own)
                own |= _targets(item.optional_vars)
            found |= _read_before_assigned(statement.body, own, filename)
            continue
        elif (
            isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        ):  # allowed only at the beginning of a file
            own |= {alias.asname or alias.name for alias in statement.names}
            continue
        else:
            code = examine(statement, own)
            if isinstance(statement, _ALWAYS_ASSIGN):
                own |= _names(code, _ASSIGN_HERE)
            continue
        for branch in branches:  # each starts from the same names, since it is unknown which one will run
            found |= _read_before_assigned(branch, set(own), filename)
    return found


def _targets(target: ast.expr | None) -> set[str]:
    """Return the names that a loop target or a `with` target assigns."""
    nodes = ast.walk(target) if target is not None else ()
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


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
