"""`guess`, `reveal` and `guesses`: the student commits to a value before the measurement, and compares it afterwards.

A guess that is still `...` is not kept, so a lesson that runs without a student leaves no file.
"""

from __future__ import annotations

import contextlib
import html
import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from labkit.costs.prediction import Prediction
from labkit.errors.exceptions import LabError
from labkit.errors.lists import listed
from labkit.errors.wrong_calls import one_number, public_api
from labkit.group.output import encodable, notebook_path
from labkit.plots.guess_charts import Outcome, draw_calibration, draw_outcome
from labkit.tracing.step_times import UNITS_OF_TIME, Measurement, busy_machine, is_run, measurement_of
from labkit.tracing.trace_file import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# A quantity's name ends with its unit: "step_ms". For each ending, the unit as it is shown.
UNITS: Final = {
    "_gbit_per_s": "Gbit/s", "_percent": "%",
    "_gib": "GiB", "_mib": "MiB", "_kib": "KiB", "_gb": "GB", "_mb": "MB", "_kb": "kB", "_bytes": "B",
    "_ms": "ms", "_us": "µs", "_s": "s",
}  # fmt: skip
PER_SECOND: Final = "_per_s"
ALIKE: Final = "compare numbers with numbers, texts with texts"
LONGEST_CHOICE: Final = 200  # characters
FILE: Final = "my_guesses.json"
VERSION: Final = 1
CLEARLY: Final = 1.33  # if all others take so many times as long, spreads included, a busy machine does not matter
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


@dataclass(frozen=True, repr=False)
class Note:
    """A line under the cell: which guess is sealed, or whether a choice was right."""

    text: str
    symbol: str  # what the line begins with: "●" sealed, "○" no guess yet, "✓" right, "✗" wrong

    def __repr__(self) -> str:
        return encodable(f"{self.symbol} {self.text}")

    def _repr_html_(self) -> str:
        return f"<div><b>{self.symbol}</b> {html.escape(self.text)}</div>"


@dataclass(frozen=True, repr=False)
class Notes:
    """Several notes, one below the other."""

    notes: tuple[Note, ...]

    def __repr__(self) -> str:
        return "\n".join(map(repr, self.notes))

    def _repr_html_(self) -> str:
        return "".join(note._repr_html_() for note in self.notes)


@public_api
def guess(**values: Any) -> Note | Notes:
    """Seal what you expect, before you measure it.

    A quantity's name ends with its unit: `guess(step_ms=12, sent_mb=3)`. Without a unit it is a plain number:
    `guess(speed_up=1.7)`. A text is a choice: `guess(waits="rank 1")`. A value that is still `...` is no guess yet. You
    may change a guess until it is revealed; a later change does not count, and the figure of `reveal` shows it.

    Args:
        values: one or more quantities, each with a number from 0, a text or `...`.

    Returns:
        a line for each, which the notebook shows.

    Raises:
        TypeError: no quantity is given, a value is neither a number nor a text, or a quantity with a unit has a text.
        ValueError: a negative number or one above 1e30, a long or empty text, or the name of an argument of `reveal`.
        LabError: the file of guesses cannot be read or written; or a text for a number that was revealed, or the other
            way round.
    """
    if not values:
        raise TypeError("guess(): expected what you guess and its value, as in lab.guess(step_ms=12)")
    if taken := {"predicted", "ax"} & values.keys():
        raise ValueError(f"guess({taken.pop()}=...): this is the name of an argument of reveal; expected another name")
    checked = {name: value if value is ... else _checked("guess", name, value) for name, value in values.items()}
    notes = tuple(_seal(name, value) for name, value in checked.items())
    return notes[0] if len(notes) == 1 else Notes(notes)


@public_api
def reveal(*, predicted: Any = None, ax: Axes | None = None, **measured: Any) -> Axes | Note:
    """Compare a sealed guess with the measurement, and both with a formula's prediction.

    The first reveal counts for `guesses`, unless other programs kept the machine busy, or the measurements differ so
    much that they do not decide. Then the guess stays sealed: measure again. Of possible answers, one may be so clearly
    the fastest that a busy machine does not matter. Give runs where you can. The spread of a plain number is not known,
    and only a very busy machine is noticed, for times and speed-ups.

    Args:
        predicted: the formula's value, in the quantity's unit; a `lab.predict` result is converted to it. A replayed
            run, or a tuple of a run and its replay, counts as below.
        ax: where to draw; default: a figure of its own.
        measured: the quantity and what was measured:

            - a number, `step_ms=11.3`; or a run, for `step_ms` of it, with the quartiles of its steps as its spread;
            - a list of several such measurements of the same: their median, from the smallest to the largest;
            - a tuple of two runs, before and after a change, each of which may be a list of several: how many times as
              fast the second is, or, of a quantity in per cent, what share of a step it saves;
            - for a choice, the right answer as a text; or each possible answer with a run or a number, of which the
              smallest is right: `better_fix={"log": run_a, "data": run_b}`;
            - None: the measurement found nothing; a sealed guess stays sealed.

    Returns:
        the matplotlib Axes; for a choice, and where nothing was found, a line.

    Raises:
        TypeError: not exactly one quantity, a value that is no number, or a run for a quantity that is no time.
        ValueError: a negative or infinite number, fewer than two possible answers, or a prediction in a unit that does
            not fit the quantity's.
        LabError: the guess was a number and the answer is a text, or the other way round; the file of guesses cannot be
            read or written.
    """
    if len(measured) != 1:
        given = f"{len(measured)} quantities ({', '.join(measured)})" if measured else "no quantity"
        raise TypeError(f"reveal(): {given}; expected one, as in lab.reveal(step_ms=11.3, predicted=10.8)")
    (name, given), *_ = measured.items()
    formula = None
    if _holds_runs(predicted):
        formula = max(_measured(name, predicted).value, 0.0)
    elif predicted is not None:
        formula = _number("reveal", "predicted", _in_unit(name, predicted))
    if isinstance(given, Mapping):
        return _smallest(name, given)
    if isinstance(given, str):
        answer = str(_checked("reveal", name, given))
        return _choice(_reveal(name, answer, formula), answer)
    if given is None:
        return _unmeasured(name, formula, "nothing was measured")
    found = _measured(name, given)
    if found.value < 0:
        return _unmeasured(name, formula, "nothing is saved, since a step takes longer after the change")
    outcome = _outcome(_kept(name, found.value), found.value, formula, found)
    if not outcome.undecided:
        outcome = _outcome(_reveal(name, found.value, formula), found.value, formula, found)
    return draw_outcome(outcome, ax)


@public_api
def guesses(ax: Axes | None = None) -> Axes:
    """Draw how close your guesses were over the whole course.

    Each revealed guess is a row: guess divided by measurement, on a logarithmic scale. Delete `my_guesses.json` beside
    the notebooks to begin anew.

    Args:
        ax: where to draw; default: a figure of its own.

    Raises:
        LabError: the file of guesses cannot be read.
    """
    revealed = [e for e in entries(Path.cwd()) if e.measured is not None]
    choices = [e for e in revealed if isinstance(e.measured, str) and e.guess is not None]
    outcomes = [_outcome(e, e.measured, e.predicted) for e in revealed if not isinstance(e.measured, str | None)]
    return draw_calibration(outcomes, sum(_same(e) for e in choices), len(choices), ax)


def _seal(name: str, value: Any) -> Note:
    quantity, _ = _parts(name)
    if value is ...:
        return Note(f"{quantity}: no guess yet. Replace the ... with your guess and run the cell again.", "○")
    with entry_for_update(Path.cwd(), _lesson(), name) as entry:
        if entry.measured is not None and isinstance(value, str) != isinstance(entry.measured, str):
            raise LabError(f"guess({name}={value!r}): {_in_words(name, entry.measured)} was revealed; {ALIKE}")
        if entry.measured is None:
            entry.guess, entry.guessed_at = value, time.time()
        elif value != entry.guess:
            entry.changed = value
        else:
            entry.changed = None
        late = entry.changed is not None
    words = value if isinstance(value, str) else _in_words(name, value)
    if late:
        return Note(f"{quantity}: {words}. It was already revealed, so this guess does not count.", "●")
    return Note(f"{quantity}: {words}, sealed.", "●")


def _unmeasured(name: str, formula: float | None, why: str) -> Note:
    quantity, _ = _parts(name)
    says = "" if formula is None else f" The formula says {_in_words(name, formula)}."
    return Note(f"{quantity}: {why}.{says} A sealed guess stays sealed.", "○")


def _measured(name: str, given: Any) -> Measurement:
    """What was measured for a quantity that is a number. What two runs save may be negative: they save nothing."""
    unit = _parts(name)[1]
    if isinstance(given, tuple) and len(given) == 2 and unit in ("", "%"):
        before, after = (measurement_of(each, "ms", "reveal") if _holds_runs(each) else None for each in given)
        if before is not None and after is not None:
            return _ratio(before, after, in_percent=unit == "%")
    if not _holds_runs(given) and not isinstance(given, list | tuple):
        number = _number("reveal", name, _in_unit(name, given))
        is_time = unit in UNITS_OF_TIME or "speed_up" in name or name.endswith(PER_SECOND)
        return Measurement(number, number, number, busy_machine() if is_time else "")
    found = measurement_of(given, unit, f"reveal({name}=...)")
    if found is None:
        raise TypeError(f"reveal({name}={given!r}): expected one number from 0, a run, or a list of either")
    for number in (found.low, found.value, found.high):
        _number("reveal", name, number)
    return found


def _holds_runs(given: Any) -> bool:
    return any(map(is_run, given)) if isinstance(given, list | tuple) else is_run(given)


def _ratio(before: Measurement, after: Measurement, *, in_percent: bool) -> Measurement:
    """How many times as fast the second is, or what it saves in per cent."""
    ratios = before.value / after.value, before.low / after.high, before.high / after.low
    if in_percent:
        ratios = 100 - 100 / ratios[0], max(100 - 100 / ratios[1], 0.0), max(100 - 100 / ratios[2], 0.0)
    return Measurement(*ratios, before.busy or after.busy)


def _smallest(name: str, given: Mapping[Any, Any]) -> Note:
    """The note about a choice whose right answer is the one with the smallest measurement."""
    unit = "ms" if any(map(_holds_runs, given.values())) else ""
    found = {str(answer): measurement_of(value, unit, f"reveal({name}=...)") for answer, value in given.items()}
    measured = {answer: one for answer, one in found.items() if one is not None and math.isfinite(one.value)}
    if len(measured) < max(len(given), 2):
        raise ValueError(f"reveal({name}={given!r}): expected at least two answers, each with a run or a number")
    sealed, known = _kept(name, listed(measured, word="or")).guess, [_folded(answer) for answer in measured]
    if sealed is not None and _folded(sealed) not in known:
        return Note(f"{_parts(name)[0]}: your guess was {sealed}. Guess {listed(measured, word='or')}, and run this again.", "○")
    first = min(measured, key=lambda answer: measured[answer].value)
    close = [answer for answer, one in measured.items() if one.too_close(measured[first])]
    each = ", ".join(f"{answer} {one.in_words(lambda value: f'{value:.3g} {unit}'.strip())}" for answer, one in measured.items())
    others = [one for answer, one in measured.items() if answer != first]
    why = next((one.busy for one in measured.values() if one.busy), "")
    if all(one.low > CLEARLY * measured[first].high for one in others):
        why = ""
    elif not why and len(close) > 1:
        why = f"{listed(close)} are too close to call. Measure again"
    if why:
        stays = " Your guess stays sealed." if sealed is not None else ""
        return Note(f"{_parts(name)[0]}: {why}. Measured: {each}.{stays}", "○")
    return _choice(_reveal(name, first, None), first, f" Measured: {each}.")


def _in_words(name: str, value: Value) -> str:
    return value if isinstance(value, str) else _outcome(SavedGuess("", name), value, None).in_words(value)


def _kept(name: str, value: Value) -> SavedGuess:
    """The guess as it is kept, to be compared with `value`; an empty entry if there is none."""
    lesson = _lesson()
    entry = next((e for e in entries(Path.cwd()) if (e.lesson, e.name) == (lesson, name)), None)
    if entry is None:
        return SavedGuess(lesson, name)
    if isinstance(entry.guess, str) != isinstance(value, str):
        raise LabError(f"reveal({name}={value!r}): the guess was {entry.guess!r}; {ALIKE}")
    return entry


def _reveal(name: str, value: Value, formula: float | None) -> SavedGuess:
    if _kept(name, value).guess is None:
        return SavedGuess(_lesson(), name)  # there was no guess: nothing is written
    with entry_for_update(Path.cwd(), _lesson(), name) as entry:
        if entry.measured is None:
            entry.measured, entry.predicted, entry.revealed_at = value, formula, time.time()
    return entry


def _choice(entry: SavedGuess, answer: str, measured: str = "") -> Note:
    quantity, _ = _parts(entry.name)
    if entry.guess is None:
        return Note(f"{quantity}: {answer}.{measured}", "○")
    changed = f" (later changed to {entry.changed})" if entry.changed is not None else ""
    first = f" At the first reveal it was {entry.measured}, which counts." if _folded(entry.measured) != _folded(answer) else ""
    right = _folded(entry.guess) == _folded(answer)
    return Note(f"{quantity}: {answer}. Your guess was {entry.guess}{changed}.{first}{measured}", "✓" if right else "✗")


def _outcome(entry: SavedGuess, measured: Any, formula: float | None, found: Measurement | None = None) -> Outcome:
    quantity, unit = _parts(entry.name)
    return Outcome(
        entry.lesson, quantity, unit, float(measured),
        guess=None if entry.guess is None else float(entry.guess),
        predicted=formula,
        changed=None if entry.changed is None else float(entry.changed),
        spread=None if found is None or found.low == found.high else (found.low, found.high),
        busy="" if found is None else found.busy,
    )  # fmt: skip


def _same(entry: SavedGuess) -> bool:
    return _folded(entry.guess) == _folded(entry.measured)


def _folded(text: Any) -> str:
    return " ".join(str(text).casefold().split())


def _parts(name: str) -> tuple[str, str]:
    """The quantity's name and unit as they are shown: "step_ms" is ("step", "ms")."""
    if name.endswith(PER_SECOND) and not name.endswith("_gbit_per_s"):  # tokens_per_s: the name says what is counted
        return f"{_spoken(name.removesuffix(PER_SECOND))} per second", ""
    for ending, unit in UNITS.items():
        if name.endswith(ending) and name != ending:
            return _spoken(name.removesuffix(ending)), unit
    return _spoken(name), ""


def _spoken(name: str) -> str:
    return name.replace("_", " ").replace("speed up", "speed-up")


def _in_unit(name: str, predicted: Any) -> Any:
    """A prediction in the quantity's unit; plain numbers are in it already."""
    if not isinstance(predicted, Prediction):
        return predicted
    try:
        return predicted.in_unit(_parts(name)[1])
    except ValueError as error:
        raise ValueError(f"reveal({name}=..., predicted=...): {error}") from None


def _checked(function: str, name: str, value: Any) -> Value:
    if isinstance(value, str):
        if not value.strip() or len(value) > LONGEST_CHOICE:
            raise ValueError(f"{function}({name}={value[:20]!r}): expected a text of 1 to {LONGEST_CHOICE} characters")
        if unit := _parts(name)[1]:
            raise TypeError(f"{function}({name}={value!r}): expected one number, in {unit}")
        if "speed_up" in name:
            raise TypeError(f"{function}({name}={value!r}): expected one number, as in {function}({name}=2)")
        return value.strip()
    return _number(function, name, _in_unit(name, value))


def _number(function: str, name: str, value: Any) -> float:
    number = one_number(value)
    if number is None:
        raise TypeError(f"{function}({name}={value!r}): expected one number from 0, a text or ...")
    if not 0 <= number <= LARGEST:
        raise ValueError(f"{function}({name}={value!r}): expected a number from 0{' to 1e30' * (number > LARGEST)}")
    return number


def _lesson() -> str:
    """The notebook's name without ".ipynb"; "" if no notebook is open."""
    return Path(notebook_path()).name.removesuffix(".ipynb")


def entries(folder: Path) -> list[SavedGuess]:
    """Read all guesses, in the order in which they were first sealed or revealed; none if there is no file."""
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
        return [SavedGuess(**{key: value for key, value in each.items() if key in known}) for each in content["guesses"]]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise LabError(f"{path}: not a file of guesses; repair or delete it") from None


@contextlib.contextmanager
def entry_for_update(folder: Path, lesson: str, name: str) -> Iterator[SavedGuess]:
    """Give one guess to the caller, who changes it; afterwards the file is written, unless nothing changed.

    The file is replaced in one step, so that a crash leaves the old one.
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
