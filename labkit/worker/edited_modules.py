"""Finds modules of the student's that were edited after ranks had imported them.

Python imports a module only once, so a rank keeps the version that it has imported, as the notebook's process does.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from labkit.ipc.protocol import ImportedModule
from labkit.recording.record import is_students


class Imports:
    """In a rank: finds the student's modules that have been imported or reloaded.

    Modules that exist before the rank runs the student's code are not examined. Their names are in memory that ranks
    share until they touch it, and copying it would take a fifth of the time in which a group starts.

    Args:
        machine: the rank's machine, as in `Place`.
    """

    def __init__(self, machine: str = "") -> None:
        self._machine = machine
        self._before = next(reversed(sys.modules), "")  # modules are in the order of their import
        self._seen: set[str] = set()
        self._count = len(sys.modules)
        self._specs: dict[str, Any] = {}  # of the student's modules; `importlib.reload` replaces it

    def new(self) -> list[ImportedModule]:
        """Return the modules imported or reloaded since the last call; searches only if their number has changed."""
        names = [name for name, spec in self._specs.items() if getattr(sys.modules.get(name), "__spec__", None) is not spec]
        if len(sys.modules) != self._count:
            self._count = len(sys.modules)
            imported = self._since_start()
            names += [name for name in imported if name not in self._seen]
            self._seen.update(imported)
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

    def _since_start(self) -> list[str]:
        """Return the names of the modules imported since this rank started; all, if the last one before is gone."""
        length = 64
        while True:
            names = list(itertools.islice(reversed(sys.modules), length))  # atomic: other threads may import
            if self._before in names:
                return names[: names.index(self._before)]
            if len(names) < length:
                return names
            length *= 8


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
