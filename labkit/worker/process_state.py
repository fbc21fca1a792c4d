"""The state that ranks copy from the notebook's process: folder, import path, environment, logging, warning filters.

A rank works in the notebook's folder, or in a temporary one on a machine that does not have that. Python imports a
module only once, so a rank keeps the version that it has imported, as the notebook's process does; modules of the
student's that were edited since are found here. Loggers have the notebook's levels; ranks have no other handler than
one that prints in the format of the notebook's root logger.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import logging
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from labkit.errors.exceptions import LabError
from labkit.ipc.options import Place, belongs_to_machine
from labkit.ipc.protocol import Changes, ImportedModule
from labkit.recording.record import is_students

PREFIX: Final = "labkit-rank-"
# Loggers of Jupyter and torch whose names are not those of packages.
LIBRARY_LOGGERS: Final = (
    "IPKernelApp", "TerminalIPythonApp", "strobelight_function_profiler", "strobelight_compile_time_profiler",
    "c10d-NullHandler-default",
)  # fmt: skip
# TensorFlow sets this level itself where Python is interactive; in ranks, it would print what nobody asked for.
TENSORFLOWS_OWN: Final = ("tensorflow", logging.INFO)


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


@dataclass(slots=True)
class Settings:
    """The settings of a notebook."""

    filters: list[Any] = field(default_factory=list)  # as in `warnings.filters`, with a `_category_to_send` in each
    captured: bool = False  # whether warnings go to the logger "py.warnings"
    disabled_level: int = 0  # given to `logging.disable`
    levels: dict[str, int] = field(default_factory=dict)  # of loggers, by name; "" is the root logger
    handler: tuple[int, logging.Formatter | None] | None = None  # level and format of the root logger's
    notes: list[str] = field(default_factory=list)  # for the student

    def plain(self) -> Settings:
        """Return a copy without what may fail to pickle: the handler's format, the notebook's own warnings."""
        filters = [f for f in self.filters if not isinstance(f[2], type) or f[2].__module__ != "__main__"]
        return replace(self, filters=filters, handler=self.handler and (self.handler[0], None))


class NotebookSettings:
    """Reads this process's settings, for the ranks of one group."""

    def __init__(self) -> None:
        self._last: Any = None

    def news(self) -> Settings | None:
        """Return the settings if they may have changed since the last call; else None."""
        root = logging.getLogger()
        loggers = list(root.manager.loggerDict.items())
        levels = [("", root.level), *((name, x.level) for name, x in loggers if isinstance(x, logging.Logger) and x.level)]
        handlers = [(h, h.level, h.formatter) for h in root.handlers if not isinstance(h, logging.NullHandler)]
        captured = warnings.showwarning.__module__ == "logging"
        state = list(warnings.filters), levels, handlers, root.manager.disable, captured
        if state == self._last:
            return None
        self._last = state
        settings = Settings(
            [(*f[:2], _category_to_send(f[2]), *f[3:]) for f in warnings.filters],
            captured,
            root.manager.disable,
            {name: level for name, level in levels if level and (name, level) != TENSORFLOWS_OWN},
        )
        printing = [entry for entry in handlers if type(entry[0]) is logging.StreamHandler]
        if handlers:
            settings.handler = (printing or handlers)[0][1:]
        # Without a handler, Python prints warnings and errors only.
        settings.notes = [
            f"the logging handler {h!r} is the notebook's; ranks print their messages instead."
            for h, *_ in handlers
            if type(h) is not logging.StreamHandler
        ] + [
            f"ranks have the level of the logger {name!r}, not its handlers: logging.basicConfig(...) sets the format of ranks."
            for name, x in loggers
            if isinstance(x, logging.Logger) and x.handlers and 0 < x.level < logging.WARNING and _is_students_logger(name)
        ]
        return settings


class AppliedSettings:
    """Applies the notebook's settings in a rank."""

    def __init__(self) -> None:
        self._own_filters = list(warnings.filters)
        self._own_level = logging.getLogger().level
        self._handler: logging.Handler | None = None
        self._levels: set[str] = set()

    def apply(self, settings: Settings) -> None:
        """Apply settings, and undo those applied before."""
        filters = []
        for action, message, sent, module, line in settings.filters:
            # A class of a library that is not imported here is left out: libraries set their own filters on import.
            category = sent if isinstance(sent, type) else getattr(sys.modules.get(sent[0]), sent[1], None)
            if category is not None:
                filters.append((action, message, category, module, line))
        warnings.filters[:] = filters + [f for f in self._own_filters if f not in filters]  # type: ignore[index]
        warnings.simplefilter("default", append=True)  # Python's default; the call invalidates its cache
        logging.disable(settings.disabled_level)
        logging.captureWarnings(settings.captured)
        for name in self._levels - settings.levels.keys():
            logging.getLogger(name).setLevel(logging.NOTSET if name else self._own_level)
        self._levels = set(settings.levels)
        for name, level in settings.levels.items():
            logging.getLogger(name).setLevel(level)
        root = logging.getLogger()
        if self._handler is not None:
            root.removeHandler(self._handler)
            self._handler = None
        if settings.handler is not None and not root.handlers:
            self._handler = logging.StreamHandler()
            self._handler.setLevel(settings.handler[0])
            self._handler.setFormatter(settings.handler[1])
            root.addHandler(self._handler)


def _category_to_send(category: Any) -> Any:
    """Return a library's class as its module and name: sending the class would import the library in each rank."""
    module = category.__module__
    if module.partition(".")[0] in ("builtins", "__main__") or module not in sys.modules or "." in category.__qualname__:
        return category
    return module, category.__name__


def _is_students_logger(name: str) -> bool:
    """Whether a logger is the student's; libraries set up their own in the ranks as well."""
    top = name.partition(".")[0]
    if top in LIBRARY_LOGGERS:
        return False
    if top not in sys.modules or top == "__main__":
        return True
    file = getattr(sys.modules[top], "__file__", None)
    return file is not None and is_students(file)
