"""What ranks take over from the notebook's process at each run: working folder, import path and environment variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from labkit.errors.exceptions import LabError

__all__ = ["Changes", "ProcessState"]


@dataclass(frozen=True, slots=True)
class Changes:
    """What the notebook has changed since a rank was told; None: not that.

    Args:
        folder: the working folder.
        path: the import path, `sys.path`.
        path_before: what it was.
        variables: environment variables that are new or have another value; None removes one.
    """

    folder: str | None = None
    path: tuple[str, ...] | None = None
    path_before: tuple[str, ...] = ()
    variables: Mapping[str, str | None] = field(default_factory=dict)

    def apply(self, kept: Collection[str]) -> None:
        """In a rank: take them over. What the rank's own code has added to the import path stays, behind the notebook's.

        Args:
            kept: names of variables that are the rank's own, such as RANK.

        Raises:
            OSError: the folder cannot be entered.
        """
        for name, value in self.variables.items():
            if name in kept:
                continue
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if self.path is not None:
            sys.path[:] = [*self.path, *(p for p in sys.path if p not in self.path_before and p not in self.path)]
        if self.folder is not None:
            os.chdir(self.folder)


@dataclass(frozen=True, slots=True)
class ProcessState:
    """The state of this process at one moment.

    Args:
        folder: the working folder.
        path: the import path.
        variables: the environment, as the system has it: decoding it would take ten times as long as all the rest.
    """

    folder: str
    path: tuple[str, ...]
    variables: Mapping[Any, Any]

    @classmethod
    def now(cls) -> ProcessState:
        """How it is now.

        Raises:
            LabError: the working folder is no more.
        """
        return cls(_folder(), tuple(map(str, sys.path)), dict(_environment()))

    def holds(self) -> bool:
        """Whether this process is still in this state: where it is, which is usual, found out in half the time of `now`.

        False where it may be.

        Raises:
            LabError: as for `now`.
        """
        return _folder() == self.folder and tuple(sys.path) == self.path and _environment() == self.variables

    def since(self, before: ProcessState) -> Changes | None:
        """What has changed since another moment; None where nothing has."""
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
