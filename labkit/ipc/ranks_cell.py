"""Checks a `%%ranks` cell in the notebook, and runs it in a rank's `__main__`."""

from __future__ import annotations

import ast
import codeop
import re
import traceback
from typing import Any, Final

from labkit.errors.exceptions import LabError

_FILENAME: Final = "<cell {} on the ranks>"
_NUMBER: Final = re.compile(re.escape(_FILENAME).replace(re.escape("{}"), r"(\d+)"))

# IPython's own syntax: `%time f()`, `%%time`, `!ls`, `files = !ls`, `result = %timeit -o f()`, `f?`, `?f`.
_MAGIC: Final = re.compile(
    r"\s*(?:[\w.\[\], ]+=\s*)?(?P<sign>%%|%|!!|!)(?P<name>\w*)|\s*(?P<help>\?{1,2}[\w.]+|[\w.]+\?{1,2})\s*$"
)
_INSTEAD: Final = {
    "time": "To time ranks, write `with lab.span(...):` or use time.perf_counter().",
    "!": "To start a program from a rank, use subprocess.run(...).",
    "run": "To run a file, write `import runpy; runpy.run_path('train.py', run_name='__main__');`, and before it "
    "`import sys; sys.argv = ['train.py', '--epochs', '2']` if it has arguments.",
    "matplotlib": "Leave it out: the figures of ranks are shown under the cell.",
    "?": "Write help(...), or ask in a cell without %%ranks.",
    "": "Leave it out, or put it into a cell without %%ranks.",
}


class CellSyntaxError(LabError):
    """A cell with a syntax error, shown with its line and without labkit's frames."""

    def __init__(self, error: SyntaxError, label: str) -> None:
        self.lineno, self.label = error.lineno or 0, label
        error.filename = label
        super().__init__("".join(traceback.format_exception_only(error)).rstrip())

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


def cell_filename(number: int) -> str:
    """Return the file name of a `%%ranks` cell, which differs from those of the notebook's own cells."""
    return _FILENAME.format(number)


def cell_number(filename: str) -> int | None:
    """Return the number of the `%%ranks` cell with this file name; None for other file names."""
    cell = _NUMBER.fullmatch(filename)
    return int(cell[1]) if cell is not None else None


def parse(source: str, filename: str, label: str) -> ast.Module:
    """Parse a cell, and check that ranks can run it: a `LabError` says why not."""
    try:
        tree = ast.parse(source, filename)
        compile(tree, filename, "exec", dont_inherit=True)  # finds errors such as a `return` outside a function
    except SyntaxError as error:
        refused = _magic(source, error.lineno or 0, label)
        raise (refused or CellSyntaxError(error, label)) from None
    except ValueError as error:  # a null byte
        raise LabError(f"{label}: {error}") from None
    return tree


def _magic(source: str, lineno: int, label: str) -> LabError | None:
    """Return the error for a line in IPython's own syntax; None for any other line."""
    line = source.splitlines()[lineno - 1] if 0 < lineno <= len(source.splitlines()) else ""
    match = _MAGIC.match(line)
    if match is None:
        return None
    name = "?" if match["help"] else f"{match['sign'].strip('%')}{match['name']}"
    return LabError(
        f"{label}, line {lineno}: {line.strip()!r} is IPython syntax, and ranks run plain Python. {instead_of_magic(name)}"
    )


def instead_of_magic(name: str) -> str:
    """Say what to write in a rank instead of a magic, given its name; "!ls" and "?" count as names."""
    name = name.lstrip("%")
    if name[:1] == "!" or name in ("sx", "system", "pip", "conda"):
        name = "!"
    elif name in ("timeit", "prun", "lprun"):
        name = "time"
    return _INSTEAD.get(name, _INSTEAD[""])


class CellRunner:
    """Runs cells in a rank, one after another, in the same namespace."""

    def __init__(self) -> None:
        # A `__future__` import also applies to later cells, as in a notebook.
        self._compile: Any = codeop.Compile()  # it takes trees, too, which its annotations do not say

    def run(self, source: str, filename: str, space: dict[str, Any]) -> Any:
        """Run a cell; return the value of a last expression that does not end in a semicolon."""
        tree = ast.parse(source, filename)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(self._compile(tree, filename, "exec"), space)
        if not isinstance(last, ast.Expr):
            return None
        value = eval(self._compile(ast.Expression(last.value), filename, "eval"), space)
        return None if _ends_in_semicolon(source, last) else value


def _ends_in_semicolon(source: str, last: ast.Expr) -> bool:
    """Whether a semicolon follows the last expression, so that its value is not shown."""
    assert last.end_lineno is not None and last.end_col_offset is not None
    rest = source.encode().splitlines()[last.end_lineno - 1][last.end_col_offset :]  # the offset counts bytes
    return rest.lstrip().startswith(b";")
