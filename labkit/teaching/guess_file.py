"""The file of a student's guesses: `my_guesses.json` beside the notebook.

The file belongs to the student and may be deleted at any time. Of two kernels that write it in the same milliseconds,
the later one wins.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from labkit.errors.exceptions import LabError
from labkit.tracing.trace_file import replacing

FILE: Final = "my_guesses.json"
VERSION: Final = 1
LARGEST: Final = 1e30  # a larger guess or measurement is a mistake, and would overflow in a figure

Value = float | str


@dataclass(slots=True)
class SavedGuess:
    """One guess; None where there is no value."""

    lesson: str  # the notebook that asked for it, without ".ipynb"; "" if unknown
    name: str  # of the quantity, with its unit: "step_ms"
    guess: Value | None = None  # the last value before the first reveal
    guessed_at: float = 0.0  # when it was sealed, in seconds since 1970
    measured: Value | None = None  # at the first reveal
    predicted: float | None = None  # the formula's value at the first reveal
    revealed_at: float = 0.0  # when it was first revealed, in seconds since 1970
    changed: Value | None = None  # a different guess that was made after the first reveal


def entries(folder: Path) -> list[SavedGuess]:
    """Read all guesses, in the order in which they were first sealed or revealed; none if there is no file.

    Raises:
        LabError: the file cannot be read as guesses.
    """
    path = folder / FILE
    try:
        written = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise LabError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        content = json.loads(written.decode("utf-8-sig"))  # editors on Windows may add a byte order mark
        if content["version"] != VERSION:
            raise LabError(f"{path}: written by another version of labkit ({content['version']}); move or delete the file")
        known = {field.name for field in fields(SavedGuess)}
        found = [SavedGuess(**{key: value for key, value in each.items() if key in known}) for each in content["guesses"]]
        if not all(map(_is_sound, found)):
            raise ValueError
        return found
    except (ValueError, KeyError, TypeError, AttributeError):
        raise LabError(f"{path}: not a file of guesses; repair or delete it") from None


def _is_sound(entry: SavedGuess) -> bool:
    """Whether a file that may have been edited by hand holds an entry as `_write` writes it."""
    compared = [value for value in (entry.guess, entry.measured, entry.changed) if value is not None]
    numbers = [*(v for v in compared if not isinstance(v, str)), *([] if entry.predicted is None else [entry.predicted])]
    return (
        isinstance(entry.lesson, str)
        and isinstance(entry.name, str)
        and len({isinstance(value, str) for value in compared}) < 2
        and all(type(n) in (int, float) and 0 <= n <= LARGEST for n in numbers)
    )


@contextlib.contextmanager
def entry_for_update(folder: Path, lesson: str, name: str) -> Iterator[SavedGuess]:
    """Give one guess to the caller, who changes it; afterwards the file is written, unless nothing changed.

    The file is replaced in one step, so that a crash leaves the old one.

    Raises:
        LabError: the file cannot be read or written.
    """
    try:
        found = entries(folder)
        entry = next((e for e in found if (e.lesson, e.name) == (lesson, name)), None)
        if entry is None:
            entry = SavedGuess(lesson, name)
            found.append(entry)
        before = asdict(entry)
        yield entry
        if asdict(entry) != before:
            _write(folder, found)
    except OSError as error:
        raise LabError(f"{folder / FILE}: cannot be written ({error.strerror})") from None


def _write(folder: Path, found: list[SavedGuess]) -> None:
    content: dict[str, Any] = {"version": VERSION, "guesses": [asdict(entry) for entry in found]}
    with replacing(folder / FILE) as new:
        new.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
