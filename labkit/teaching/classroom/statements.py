"""A submitted notebook as statements: which answers it submits, and which statements an answer needs.

An answer is a function, a class or a number. It seldom needs what the rest of the notebook does: training runs, figures
and guesses. Only the statements are run that define the names which the answer refers to, directly or through others.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Final

from labkit.ipc.code_names import assigned, names_read

_MAGIC: Final = re.compile(r"(\s*)([%!?]|[\w, ]+=\s*[%!]|.*[\w)\]]\?\??\s*$)")
_ADDING: Final = ("append", "extend", "insert", "add", "update", "setdefault")  # methods of lists, sets and dictionaries
_AROUND_PYTHON: Final = ("%%time", "%%capture", "%%prun")


@dataclass(frozen=True)
class Statement:
    """A statement at the top level of a cell."""

    cell: int  # the number of its cell, from 1, among the cells with code
    node: ast.stmt
    answers: dict[str, ast.expr]  # by exercise, what it submits: `average` in `lab.check("average_gradients", average)`
    gives: frozenset[str]  # names that it assigns, or whose values it changes: `name[...] = ...`, `name.append(...)`
    reads: frozenset[str]  # global names that it reads, also in functions that it defines


@dataclass
class SubmittedProgram:
    """The statements of a notebook, in its order."""

    statements: list[Statement] = field(default_factory=list)
    lines: dict[int, list[str]] = field(default_factory=dict)  # the source of each cell by its number; magics are blank
    errors: dict[int, str] = field(default_factory=dict)  # by cell, why it is no Python; its statements are missing

    def answers(self) -> Iterator[tuple[int, str]]:
        """Yield the position of each statement that submits an answer, and the exercise."""
        for position, statement in enumerate(self.statements):
            for exercise in statement.answers:
                yield position, exercise

    def submitted_by_name(self, exercises: Collection[str]) -> dict[str, int]:
        """Return where exercises that no `lab.check` mentions are defined under their names: after which statement."""
        checked = {exercise for _, exercise in self.answers()}
        found = {}
        for position, statement in enumerate(self.statements):
            for name in statement.gives & set(exercises) - checked:
                found[name] = position
        return found

    def needed(self, until: int, names: Collection[str]) -> set[int]:
        """Return the positions of the statements, before another, that names need."""
        before = self.statements[:until]
        needed: set[int] = set()
        wanted, new = set(names), set(names)
        while new:
            found = {i for i, s in enumerate(before) if s.gives & new or "*" in s.gives} - needed
            needed |= found
            new = {name for i in found for name in before[i].reads} - wanted
            wanted |= new
        return needed


def without_magics(source: str) -> str:
    """Return a cell with `pass` in place of magics and shell commands; nothing of a cell in another language."""
    lines = source.splitlines()
    if (magic := source.split()[:1]) and magic[0].startswith("%%"):
        if magic[0] not in _AROUND_PYTHON:
            return ""
        lines[: next(i for i, line in enumerate(lines) if line.strip()) + 1] = [""]
    try:
        ast.parse("\n".join(lines))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # magics are no Python; a line may begin with a modulo
        lines = [f"{found[1]}pass" if (found := _MAGIC.match(line)) else line for line in lines]
    return "\n".join(lines)


def parsed(cells: Sequence[str], python: Callable[[str], str] = without_magics) -> SubmittedProgram:
    """Parse the code cells of a notebook; `python` turns a cell into Python."""
    program = SubmittedProgram()
    for number, source in enumerate(cells, 1):
        source = python(source)
        program.lines[number] = [f"{line}\n" for line in source.splitlines()]
        try:
            tree = ast.parse(source)
            program.statements += [_statement(number, part) for node in tree.body for part in _parts(node)]
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # ValueError: a null byte
            program.errors[number] = f"{type(error).__name__}: {error}".replace("(<unknown>, line", "(line")
    return program


def _parts(node: ast.stmt) -> Iterator[ast.stmt]:
    """Yield a statement, and after it the checks inside it, such as in `print(lab.check(...))`."""
    if not dict(_checks(node)):
        inner = _InnerChecks()
        node = inner.visit(node)
        yield node
        yield from inner.found
    else:
        yield node


class _InnerChecks(ast.NodeTransformer):
    """Takes the checks out of a statement, but not out of functions and classes."""

    def __init__(self) -> None:
        self.found: list[ast.stmt] = []

    def visit(self, node: ast.AST) -> Any:
        """Replace a check by None."""
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            return node
        if isinstance(node, ast.Call) and dict(_checks(check := ast.copy_location(ast.Expr(node), node))):
            self.found.append(check)
            return ast.copy_location(ast.Constant(None), node)
        return self.generic_visit(node)


def compiled(node: ast.stmt, cell: int) -> CodeType:
    """Compile a statement, in which `await` may be outside of a function."""
    module = ast.fix_missing_locations(ast.Module([node], []))
    code: CodeType = compile(module, f"cell {cell}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    return code


def _statement(cell: int, node: ast.stmt) -> Statement:
    code = compiled(node, cell)
    stars = {"*"} if isinstance(node, ast.ImportFrom) and node.names[0].name == "*" else set()
    return Statement(
        cell, node, dict(_checks(node)), frozenset(assigned(code) | set(_changed(node)) | stars), frozenset(names_read(code))
    )


def _checks(node: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """Yield the exercises that a statement checks, with their answers."""
    call = getattr(node, "value", None) if isinstance(node, (ast.Expr, ast.Assign)) else None
    if not isinstance(call, ast.Call):
        return
    called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    arguments = dict(zip(("name", "answer"), call.args, strict=False)) | given
    name, answer = arguments.get("name"), arguments.get("answer")
    if called == "check" and isinstance(name, ast.Constant) and isinstance(name.value, str) and answer is not None:
        yield name.value, answer


def _changed(node: ast.stmt) -> Iterator[str]:
    """Yield the names of the objects of which a statement sets an item or an attribute, or which it adds to."""
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr in _ADDING:
            yield from (name.id for name in ast.walk(part.func.value) if isinstance(name, ast.Name))
        if isinstance(part, (ast.Subscript, ast.Attribute)) and isinstance(part.ctx, ast.Store):
            inner: ast.expr = part
            while isinstance(inner, (ast.Subscript, ast.Attribute)):
                inner = inner.value
            if isinstance(inner, ast.Name):
                yield inner.id
