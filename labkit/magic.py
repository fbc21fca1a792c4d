"""`%%ranks`: a cell that every rank runs, in a namespace that persists from cell to cell."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from labkit.errors import LabError
from labkit.group import Group

__all__ = ["ranks", "register"]


def register(shell: Any) -> None:
    """Make `%%ranks` known to an IPython shell."""
    shell.register_magic_function(lambda line, cell: ranks(line, cell, shell), "cell", "ranks")


def ranks(line: str, cell: str, shell: Any) -> None:
    """Run a cell on the ranks of a group: `%%ranks group`, or `%%ranks group --on 0,2` on some of them.

    Functions, classes and values of the notebook that the cell reads travel along, unless an earlier such cell has defined them.

    Raises:
        LabError: no group of that name, or no such rank.
        RankError: a rank failed.
    """
    parser = _Parser(prog="%%ranks", add_help=False)
    parser.add_argument("group")
    parser.add_argument("--on", default="")
    options = parser.parse_args(shlex.split(line))
    group = shell.user_ns.get(options.group)
    if not isinstance(group, Group):
        raise LabError(f"%%ranks {options.group}: no group of that name here; make one first: {options.group} = lab.Group(2)")
    on = None
    if options.on:
        parts = [p.strip() for p in options.on.split(",")]
        on = [group._number(int(p) if p.lstrip("-").isdigit() else p) for p in parts]
    number = shell.execution_count
    group.run_cell(cell, f"<cell {number} on the ranks>", f"cell {number}", on)


class _Parser(argparse.ArgumentParser):
    """A parser whose mistakes do not end the notebook's process."""

    def error(self, message: str) -> Any:
        raise LabError(f"%%ranks: {message}. Write: %%ranks group   or   %%ranks group --on 0,2")
