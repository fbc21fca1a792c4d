"""`%%ranks` and `%%rank` run a cell on ranks, in a namespace that persists from cell to cell."""

from __future__ import annotations

import argparse
import keyword
import re
import shlex
from collections.abc import Sequence
from typing import Any, NoReturn

from labkit.errors.exceptions import LabError
from labkit.group.group import Group, Ranks
from labkit.group.open_groups import notebook
from labkit.ipc.ranks_cell import cell_filename

USAGE = "Write: %%ranks group   or   %%ranks group --on 0,2 --watch --check --run name"


def ranks(line: str, cell: str, shell: Any) -> None:
    """Run a cell on the ranks of a group, or on some of them.

        %%ranks group                   on all ranks
        %%ranks group --on 0,worker1    on some, by number or name
        %%ranks group --watch           with the live picture
        %%ranks group --check           compares the ranks' tensors, for `labkit.verdict`
        %%ranks group --run run         assigns the cell's `Run` to the notebook's variable `run`; see `group.last_run`

    Functions, classes and values of the notebook that the cell reads are sent along; see `Group.run_cell`. Instead of a
    group, some of its ranks can be given (`some = group[1:]`).

    Raises:
        LabError: there is no such group or rank, or ranks cannot run the cell.
        RankError: a rank failed.
    """
    parser = _Parser(prog="%%ranks", add_help=False, allow_abbrev=False)
    parser.add_argument("group")
    parser.add_argument("--on")
    parser.add_argument("--watch", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--run", metavar="name")
    try:
        on_negative = re.sub(r"--on\s+(?=-\d)", "--on=", line)  # for argparse, "-1,0" is no number but an option
        options = parser.parse_args(shlex.split(on_negative, comments=True))
    except ValueError as error:  # a missing closing quote
        parser.error(str(error))
    group: Any = shell.user_ns.get(options.group)
    on: Sequence[int] | None = None
    if isinstance(group, Ranks):
        group, on = group.group, group.on
    if not isinstance(group, Group):
        name, bracket, _ = options.group.partition("[")
        if bracket and isinstance(shell.user_ns.get(name), Group | Ranks):
            raise LabError(
                f"%%ranks {options.group}: expected a name; to select some of a group's ranks, write %%ranks {name} --on 0,1"
            )
        given = f"of type {type(group).__name__}" if options.group in shell.user_ns else "not defined"
        opened = ", ".join(_open_groups(shell.user_ns))
        cure = f"open groups: {opened}" if opened else "create a group first: group = lab.Group(2)"
        raise LabError(f"%%ranks {options.group}: {options.group!r} is {given}; {cure}")
    if options.run is not None and (not options.run.isidentifier() or keyword.iskeyword(options.run)):
        parser.error(f"argument --run: {options.run!r} is not a valid variable name")
    if options.on is not None:
        wanted = [part.strip() for part in options.on.split(",")]
        on = group[[int(w) if w.removeprefix("-").isdecimal() and w not in group.names else w for w in wanted]].on
    number = len(shell.history_manager.input_hist_parsed) - 1  # `execution_count` may already be the next cell's
    run = group.run_cell(cell, cell_filename(number), f"cell {number}", on, watch=options.watch, check=options.check)
    if options.run is not None:
        shell.user_ns[options.run] = run


def rank(line: str, cell: str, shell: Any) -> None:
    """Run a cell on one rank: `%%rank 0` is a short form of `%%ranks group --on 0`, with the same options.

        %%rank 0             of the only open group
        %%rank worker1       by name
        %%rank 0 group       of this group; needed if several are open

    Raises:
        LabError: no group was given, and none or several are open; or as for `%%ranks`.
        RankError: the rank failed.
    """
    found = re.match(r"""\s*("[^"]*"|'[^']*'|\S+)\s*(.*)""", line)  # a rank's name may have blanks, in quotes
    if found is None or found[1].startswith("--"):
        raise LabError("%%rank: which rank? Write: %%rank 0   or   %%rank 0 group --watch --run name")
    which, rest = found.groups()
    group, _, options = rest.partition(" ")
    if not group or group.startswith(("-", "#")):
        group, options = _only_open_group(which, shell.user_ns), rest
    ranks(f"{group} --on={which} {options}", cell, shell)


def _only_open_group(which: str, names: dict[str, Any]) -> str:
    """Return the name of the notebook's only open group; an error if none is open, or several are."""
    found = _open_groups(names)
    if not found:
        raise LabError(f"%%rank {which}: no group is open; create one first: group = lab.Group(2)")
    if len(found) > 1:
        choices = "   or   ".join(f"%%rank {which} {name}" for name in found)
        raise LabError(f"%%rank {which}: several groups are open. Write: {choices}")
    return found[0]


def _open_groups(names: dict[str, Any]) -> list[str]:
    """Return a name of each of the notebook's open groups."""
    names_of: dict[int, str] = {}
    for name, value in names.items():
        if not name.startswith("_") and isinstance(value, Group) and value in notebook.groups:  # `_3` is IPython's
            names_of.setdefault(id(value), name)
    return list(names_of.values())


class _Parser(argparse.ArgumentParser):
    """A parser that raises `LabError`; argparse's own would end the notebook's process."""

    def error(self, message: str) -> NoReturn:
        raise LabError(f"%%ranks: {message}. {USAGE}")
