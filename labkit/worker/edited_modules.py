"""The student's own modules that ranks have imported, and which of their files have been edited since.

Python imports a module once. A rank keeps what it has imported for as long as it lives, as the notebook's process does.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from labkit.recording.record import is_students

__all__ = ["Imported", "Imports", "edited"]


class Imported(NamedTuple):
    """A module as a rank has it.

    Args:
        name: as in `import name`.
        file: where its source lies.
        modified_ns: when that had been changed last, at the time of the import.
    """

    name: str
    file: str
    modified_ns: int


class Imports:
    """In a rank: the student's modules that have been imported, or imported again.

    What a rank has before it runs anything of the student's is none of theirs, and it is not looked at: the names of
    the modules lie in memory that ranks share until they touch it, and to copy that takes a fifth of the time in which
    a group starts.
    """

    def __init__(self) -> None:
        self._before = next(reversed(sys.modules), "")  # Python keeps modules in the order in which they came
        self._seen: set[str] = set()
        self._count = len(sys.modules)
        self._specs: dict[str, Any] = {}  # of the student's modules; `importlib.reload` makes a new one

    def new(self) -> list[Imported]:
        """Those that have come since this was asked before. Looks at all modules only where their number has changed."""
        names = [name for name, spec in self._specs.items() if getattr(sys.modules.get(name), "__spec__", None) is not spec]
        if len(sys.modules) != self._count:
            self._count = len(sys.modules)
            came = self._since_start()
            names += [name for name in came if name not in self._seen]
            self._seen.update(came)
        found = []
        for name in names:
            module = sys.modules.get(name)
            file = getattr(module, "__file__", None)
            if not isinstance(file, str) or not file.endswith(".py") or not is_students(file):
                self._specs.pop(name, None)
                continue
            self._specs[name] = getattr(module, "__spec__", None)
            try:
                found.append(Imported(name, file, os.stat(file).st_mtime_ns))
            except OSError:  # removed since
                continue
        return found

    def _since_start(self) -> list[str]:
        """The names of the modules that have come since this rank started; all names, if what came before them is gone."""
        length = 64
        while True:
            names = list(itertools.islice(reversed(sys.modules), length))  # in one step: other threads import as well
            if self._before in names:
                return names[: names.index(self._before)]
            if len(names) < length:
                return names
            length *= 8


def edited(modules: Iterable[Imported]) -> list[str]:
    """A line for each module whose file has changed since ranks imported it."""
    lines = []
    for module in modules:
        try:
            modified_ns = os.stat(module.file).st_mtime_ns
        except OSError:  # removed: what the ranks have is all there is
            continue
        if modified_ns != module.modified_ns:
            at = time.strftime("%H:%M:%S", time.localtime(modified_ns / 1e9))
            lines.append(
                f"{os.path.basename(module.file)} was edited at {at}, and the ranks still have {module.name} as it was when they "
                f"imported it. Close the group and make a new one, or call importlib.reload({module.name}) in the function."
            )
    return lines
