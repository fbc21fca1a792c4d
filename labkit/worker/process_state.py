"""The state that ranks copy from the notebook's process before a run: working folder, import path, environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from labkit.errors.exceptions import LabError
from labkit.ipc.machine_variables import belongs_to_machine
from labkit.ipc.protocol import Changes


def apply(changes: Changes, kept: Collection[str], *, elsewhere: bool) -> None:
    """In a rank: apply changes, except that of the folder.

    Entries that the rank's code has added to the import path stay, at its end.

    Args:
        changes: the changes of the notebook's process.
        kept: names of variables that belong to the rank, such as RANK; they do not change.
        elsewhere: whether the rank may be on another machine: then those that describe a machine do not change either.
    """
    for name, value in changes.variables.items():
        if name in kept or (elsewhere and belongs_to_machine(name)):
            continue
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if changes.path is not None:
        sys.path[:] = [*changes.path, *(p for p in sys.path if p not in changes.path_before and p not in changes.path)]


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A snapshot of this process's state.

    Args:
        folder: the working folder.
        path: the import path.
        variables: the environment variables, not decoded; decoding takes ten times as long as everything else here.
    """

    folder: str
    path: tuple[str, ...]
    variables: Mapping[Any, Any]

    @classmethod
    def now(cls) -> ProcessState:
        """Return the current state.

        Raises:
            LabError: the working folder no longer exists.
        """
        return cls(_folder(), tuple(map(str, sys.path)), dict(_environment()))

    def holds(self) -> bool:
        """Whether this process is certainly still in this state; takes half the time of `now`.

        Raises:
            LabError: as for `now`.
        """
        return _folder() == self.folder and tuple(sys.path) == self.path and _environment() == self.variables

    def since(self, before: ProcessState) -> Changes | None:
        """Return the changes since an earlier state; None if there are none."""
        if self == before:
            return None
        names = {n for n in self.variables.keys() | before.variables.keys() if self.variables.get(n) != before.variables.get(n)}
        decoded = [n if isinstance(n, str) else os.fsdecode(n) for n in names]
        return Changes(
            self.folder if self.folder != before.folder else None,
            self.path if self.path != before.path else None,
            before.path,
            {name: os.environ.get(name) for name in decoded},
        )


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise LabError(
            "the notebook's working folder has been deleted or moved, and ranks would work in the same folder; "
            "go to one that exists (%cd ~ in a cell, os.chdir(...) in a script) and run again"
        ) from None


def _environment() -> Mapping[Any, Any]:
    return getattr(os.environ, "_data", os.environ)
