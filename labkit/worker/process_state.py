"""The state that ranks copy from the notebook's process: folder, import path, environment, warning filters.

A rank works in the notebook's folder, or in a temporary one on a machine that does not have that. Python imports a
module only once, so a rank keeps the version that it has imported, as the notebook's process does; modules of the
student's that were edited since are found here.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from labkit.errors.exceptions import LabError
from labkit.ipc.options import Place, belongs_to_machine
from labkit.ipc.protocol import Changes, ImportedModule
from labkit.recording.record import is_students

PREFIX: Final = "labkit-rank-"


class WorkingFolder:
    """Has a rank follow the notebook into its working folders."""

    def __init__(self, place: Place) -> None:
        self._place, self._own = place, ""

    def enter(self, folder: str) -> list[str]:
        """Enter the notebook's working folder, or the rank's own one on another machine that does not have that.

        Returns remarks for the student, the same on all ranks of a machine.
        """
        try:
            os.chdir(folder)
            return []
        except OSError as error:
            if not self._place.elsewhere:
                raise
            why = "has no folder" if isinstance(error, FileNotFoundError) else "does not let ranks into the folder"
        if not self._own:
            remove_leftovers()
            self._own = _new_folder()
        os.chdir(self._own)
        instead = "each rank there works in a temporary folder of its own; files of the notebook are not there."
        return [f"{self._place.machine} {why} {folder}: {instead}"]


def _new_folder() -> str:
    """Create a folder that is locked until this process has ended, and those that it has forked.

    Another rank may take a folder for a leftover until it is locked; then this one creates another.
    """
    while True:
        folder = tempfile.mkdtemp(prefix=PREFIX)
        locked = _lock(folder)
        if locked >= 0 and os.path.isdir(folder):
            return folder


def remove_leftovers() -> None:
    """Remove the folders of ranks that have ended, which nobody has locked."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        locked = _lock(folder)
        if locked >= 0:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(locked)


def _lock(folder: str | Path) -> int:
    """Lock a folder of this user, until the returned file descriptor is closed; return -1 if another process has."""
    try:
        fd = os.open(folder, os.O_RDONLY)
    except OSError:  # another user's, or removed
        return -1
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return -1
    return fd


class Imports:
    """In a rank: finds the student's modules that have been imported or reloaded.

    Modules that were imported before are not examined. Their names are in memory that ranks share until they touch it,
    and copying it would take a fifth of the time in which a group starts.
    """

    def __init__(self, machine: str = "") -> None:
        self._machine = machine
        self._last = next(reversed(sys.modules), "")  # modules are in the order of their import
        self._specs: dict[str, Any] = {}  # of the student's modules; `importlib.reload` replaces it

    def new(self) -> list[ImportedModule]:
        """Return the modules imported or reloaded since the last call."""
        names = [name for name, spec in self._specs.items() if getattr(sys.modules.get(name), "__spec__", None) is not spec]
        new = list(itertools.takewhile(self._last.__ne__, reversed(sys.modules)))  # atomic: other threads may import
        self._last = next(iter(new), self._last)
        names += [name for name in new if name not in self._specs]
        found = []
        for name in names:
            module = sys.modules.get(name)
            file = getattr(module, "__file__", None)
            if not isinstance(file, str) or not file.endswith(".py") or not is_students(file):
                self._specs.pop(name, None)
                continue
            self._specs[name] = getattr(module, "__spec__", None)
            try:
                found.append(ImportedModule(name, file, os.stat(file).st_mtime_ns, _digest(file), self._machine))
            except OSError:  # removed since
                continue
        return found


def edited(modules: Iterable[ImportedModule]) -> list[str]:
    """Return a line for each module of which ranks have another version than its file.

    A file with the same modification time is not read. Another one need not have been edited: a copy on another machine
    has a time of its own.
    """
    lines = []
    for module in modules:
        try:
            modified_ns = os.stat(module.file).st_mtime_ns
            if modified_ns == module.modified_ns or _digest(module.file) == module.digest:
                continue
        except OSError:  # removed: there is no newer version
            continue
        at = time.strftime("%H:%M:%S", time.localtime(modified_ns / 1e9))
        file = os.path.basename(module.file)
        have = f"the ranks still have {module.name} as it was when they imported it. Close"
        if there := module.machine:  # new ranks would import an old copy again
            have = f"the ranks on {there} have another version of {module.name}. If {there} has a copy, copy it again; then close"
        lines.append(
            f"{file} was edited at {at}, and {have} the group and make a new one, or call importlib.reload({module.name}) in the "
            "function."
        )
    return lines


def _digest(file: str) -> bytes:
    return hashlib.blake2b(Path(file).read_bytes(), digest_size=16).digest()


def apply(changes: Changes, kept: Collection[str], *, elsewhere: bool) -> None:
    """In a rank: apply changes of the notebook's process, except that of the folder.

    Entries that the rank's code has added to the import path stay, at its end. Variables in `kept` do not change; if
    the rank may be elsewhere, on another machine, those that describe a machine do not either.
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
    """A snapshot of this process's state."""

    folder: str  # the working folder
    path: tuple[str, ...]  # the import path
    variables: Mapping[Any, Any]  # the environment, not decoded: that takes ten times as long as everything else here

    @classmethod
    def now(cls) -> ProcessState:
        """Return the current state; a `LabError` if the working folder no longer exists."""
        return cls(_folder(), tuple(map(str, sys.path)), dict(_environment()))

    def holds(self) -> bool:
        """Whether this process is certainly still in this state; takes half the time of `now`."""
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


class NotebookFilters:
    """Reads this process's filters of warnings, for the ranks of one group."""

    def __init__(self) -> None:
        self._last: Any = None

    def news(self) -> list[Any] | None:
        """Return the filters, with a `_category_to_send` in each; None if they are those of the last call."""
        filters = list(warnings.filters)
        if filters == self._last:
            return None
        self._last = filters
        return [(*f[:2], _category_to_send(f[2]), *f[3:]) for f in filters]


class AppliedFilters:
    """Applies the notebook's filters of warnings in a rank."""

    def __init__(self) -> None:
        self._own = list(warnings.filters)

    def apply(self, sent: list[Any]) -> None:
        """Apply filters in place of those applied before."""
        filters = []
        for action, message, category, module, line in sent:
            # A class of a library that is not imported here is left out: libraries set their own filters on import.
            known = category if isinstance(category, type) else getattr(sys.modules.get(category[0]), category[1], None)
            if known is not None:
                filters.append((action, message, known, module, line))
        warnings.filters[:] = filters + [f for f in self._own if f not in filters]  # type: ignore[index]
        warnings.simplefilter("default", append=True)  # Python's default; the call invalidates its cache


def _category_to_send(category: Any) -> Any:
    """Return a library's class as its module and name: sending the class would import the library in each rank."""
    module = category.__module__
    if module.partition(".")[0] in ("builtins", "__main__") or module not in sys.modules or "." in category.__qualname__:
        return category
    return module, category.__name__
