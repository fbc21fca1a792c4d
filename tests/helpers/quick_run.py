"""A check that a quick run, `pytest -m "not processes and not slow"`, starts no processes."""

from __future__ import annotations

import sys
from typing import Any

EVENTS = frozenset({"os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"})
HARMLESS = frozenset({"fc-list"})  # matplotlib asks for the fonts once in the life of a machine

started: list[str] = []


def note_started_processes() -> None:
    """From now on, `started` has a line for each process that this one starts."""
    sys.addaudithook(_note)


def _note(event: str, args: tuple[Any, ...]) -> None:
    if event in EVENTS and not (args and args[0] in HARMLESS):
        started.append(f"{event} {' '.join(map(str, args[:2]))[:200]}".strip())
