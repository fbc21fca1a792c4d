"""A submitted notebook as statements: which answers it submits, and which statements an answer needs.

An answer is a function, a class or a number. It seldom needs what the rest of the notebook does: training runs, figures
and guesses. Only the statements are run that define the names which the answer refers to, directly or through others.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from labkit.ipc.code_names import assigned, names_read

__all__ = ["Program", "Statement", "parsed", "without_magics"]

_MAGIC: Final = re.compile(r"\s*[%!]")


@dataclass(frozen=True)
class Statement:
    """A statement at the top level of a cell.

    Args:
        cell: the number of its cell, from 1, among the cells with code.
        node: its syntax tree.
        answers: by exercise, the expression that it submits: `average` in `lab.check("average_gradients", average)`.
        gives: the names that it assigns, or whose values it changes by `name[...] = ...` or `name.x = ...`.
        reads: the global names that it reads, also in functions that it defines.
    """

    cell: int
    node: ast.stmt
    answers: dict[str, ast.expr]
    gives: frozenset[str]
    reads: frozenset[str]


@dataclass
class Program:
    """The statements of a notebook.

    Attributes:
        statements: in the order of the notebook.
        lines: the source of each cell by its number; magics are blank.
        errors: by cell, why it is no Python. Its statements are missing.
    """

    statements: list[Statement] = field(default_factory=list)
    lines: dict[int, list[str]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)

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
        """Return the positions of the statements that names need.

        Args:
            until: the position at which the names are used; later statements do not count.
            names: the names.
        """
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
    """Return a cell with blank lines in place of magics and shell commands; nothing of a cell that is a whole magic."""
    lines = [] if source.lstrip().startswith("%%") else source.splitlines()
    return "\n".join("" if _MAGIC.match(line) else line for line in lines)


def parsed(cells: Sequence[str], python: Callable[[str], str] = without_magics) -> Program:
    """Parse the code cells of a notebook.

    Args:
        cells: their sources.
        python: turns a cell into Python.
    """
    program = Program()
    for number, source in enumerate(cells, 1):
        source = python(source)
        program.lines[number] = [f"{line}\n" for line in source.splitlines()]
        try:
            tree = ast.parse(source)
            program.statements += [_statement(number, node) for node in tree.body]
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # ValueError: a null byte
            program.errors[number] = f"{type(error).__name__}: {error}"
    return program


def _statement(cell: int, node: ast.stmt) -> Statement:
    code = compile(ast.fix_missing_locations(ast.Module([node], [])), f"cell {cell}", "exec", dont_inherit=True)
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
    """Yield the names of the objects of which a statement sets an item or an attribute."""
    for part in ast.walk(node):
        if isinstance(part, (ast.Subscript, ast.Attribute)) and isinstance(part.ctx, ast.Store):
            inner: ast.expr = part
            while isinstance(inner, (ast.Subscript, ast.Attribute)):
                inner = inner.value
            if isinstance(inner, ast.Name):
                yield inner.id
