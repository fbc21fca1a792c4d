"""`%%ranks`: a cell that every rank runs, in a namespace that persists from cell to cell."""

from __future__ import annotations

import argparse
import shlex
from typing import Any, NoReturn

from labkit.errors import LabError
from labkit.group import Group

__all__ = ["ranks"]

USAGE = "Write: %%ranks group   or   %%ranks group --on 0,2"


def ranks(line: str, cell: str, shell: Any) -> None:
    """Run a cell on the ranks of a group: `%%ranks group`, or `%%ranks group --on 0,2` on some of them, by number or name.

    Functions, classes and values of the notebook that the cell reads travel along; see `Group.run_cell`.

    Raises:
        LabError: no group of that name, or no such rank.
        SyntaxError: the cell is no Python.
        RankError: a rank failed.
    """
    parser = _Parser(prog="%%ranks", add_help=False)
    parser.add_argument("group")
    parser.add_argument("--on")
    try:
        options = parser.parse_args(shlex.split(line))
    except ValueError as error:  # a quotation that does not end
        parser.error(str(error))
    group = shell.user_ns.get(options.group)
    if not isinstance(group, Group):
        given = f"of type {type(group).__name__}" if options.group in shell.user_ns else "not defined"
        raise LabError(
            f"%%ranks {options.group}: {options.group!r} is {given}; make a group first: {options.group} = lab.Group(2)"
        )
    on = None
    if options.on is not None:
        wanted = [part.strip() for part in options.on.split(",")]
        on = group[[int(w) if w.removeprefix("-").isdecimal() and w not in group.names else w for w in wanted]].on
    number = len(shell.history_manager.input_hist_parsed) - 1  # `execution_count` may be that of the next cell already
    group.run_cell(cell, f"<cell {number} on the ranks>", f"cell {number}", on)


class _Parser(argparse.ArgumentParser):
    """A parser whose mistakes do not end the notebook's process."""

    def error(self, message: str) -> NoReturn:
        raise LabError(f"%%ranks: {message}. {USAGE}")
