"""The picture that moves: `Live` watches a run from the notebook's main thread, and leaves the finished timeline behind.

A run tells it three things: `begin`, `update` (what was completed since the last time, what is under way) and `end`. It keeps
a bounded memory of that, draws a frame from it and puts it in place of the last one (`plots.live.recent` and `frame`).
When the run is over, the timeline as an image takes its place, so that a saved notebook holds one picture and every viewer
shows it.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TextIO

from labkit.errors.units import time_in_words
from labkit.plots.image import as_image
from labkit.plots.live.curves import Curves, beneath
from labkit.plots.live.frame import Curve, Detail, LiveFrame, LiveRow, Past, svg
from labkit.plots.live.progress import Progress
from labkit.plots.live.recent import Recent
from labkit.recording.ring_buffer import Pending
from labkit.tracing.trace import Trace
from labkit.worker.resource_usage import Load

__all__ = ["Live"]

SHARE: Final = 1 / 30  # of one core that drawing may take: where a frame is dear, there are fewer
FEW_STEPS: Final = 12  # up to here the whole run is drawn; beyond it, one step
SLOW_STEP_NS: Final = 400_000_000  # a step that takes longer is shown while it is made
HOLD_NS: Final = 600_000_000  # how long a step stays in the picture, so that the eye can follow
WORTH_SAYING_NS: Final = 500_000_000  # a wait that is longer is shown with its time


class Screen(Protocol):
    """Where frames go."""

    def begin(self, said: str) -> None:
        """Make room; `said` is what a reader without pictures sees, from the beginning to the end."""

    def show(self, frame: LiveFrame) -> None:
        """Show a frame in place of the last one."""

    def end(self, trace: Trace, title: str) -> None:
        """Leave the finished picture behind."""


class Live:
    """Watches a run, as `group.picture.Picture` describes it.

    Args:
        screen: where to show it; default: the cell's output in a notebook, one line in a terminal, nowhere else.
        clock: gives the processor time of this thread in ns, to know what drawing costs.
    """

    interval_s = 0.2  # five frames a second look like movement

    def __init__(self, screen: Screen | None = None, clock: Callable[[], int] = time.thread_time_ns) -> None:
        self._given, self._clock = screen, clock

    def begin(self, ranks: tuple[str, ...], title: str, start_ns: int, called: Sequence[int] | None = None) -> None:
        """The ranks start now; the first frame appears at once.

        Args:
            ranks: their names.
            title: what runs, and where: "train on 4 ranks".
            start_ns: the moment.
            called: the numbers of those that call the function, the others serve; default: all.
        """
        self._title, self._start_ns = title, start_ns
        self._screen = self._given or _screen_here()
        self._recent, self._progress = Recent(ranks, start_ns, called), Progress(len(ranks))
        self._curves, self._loads = Curves(len(ranks), start_ns), tuple(Load() for _ in ranks)
        self._next_frame_ns = start_ns
        self._detail: Detail | None = None
        self._detail_until_ns = 0
        self._past: Past | None = None
        self._past_at_ns = 0
        self._broken = False
        self._carefully(lambda: self._first_frame(ranks))

    def update(self, now_ns: int, new: Trace, pending: Sequence[Sequence[Pending]], loads: Sequence[Load] = ()) -> None:
        """Show what has happened.

        Args:
            now_ns: the moment.
            new: what was completed since the last update.
            pending: per rank, the operations under way.
            loads: per rank, what it takes of the machine.
        """
        self._loads = tuple(loads) or self._loads
        self._carefully(lambda: self._next_frame(now_ns, new, pending))

    def end(self, trace: Trace, stopped: str) -> None:
        """The run is over: the timeline takes the place of the frames.

        Args:
            trace: of the whole run.
            stopped: what ended it before its time: "stopped by an error"; "" if nothing did.
        """
        self._broken = False  # what went wrong with a frame need not go wrong with the timeline
        title = f"{self._title}, {stopped}" if stopped else self._title
        self._carefully(lambda: self._screen.end(trace, title))

    def _carefully(self, draw: Callable[[], None]) -> None:
        """A picture must not end a run; but it says so, once, when it cannot be drawn."""
        if self._broken:
            return
        try:
            draw()
        except Exception as error:  # noqa: BLE001  # whatever it is, the run is worth more
            self._broken = True
            what = f"{type(error).__name__}: {error}"
            print(f"labkit could not draw the run, which is not affected by it. {what}", file=sys.stderr)

    def _first_frame(self, ranks: tuple[str, ...]) -> None:
        self._screen.begin(f"timeline of {self._title}")
        self._screen.show(self._frame(self._start_ns, [()] * len(ranks)))

    def _next_frame(self, now_ns: int, new: Trace, pending: Sequence[Sequence[Pending]]) -> None:
        before = self._clock()
        self._recent.add(new, now_ns)
        self._progress.add(new)
        self._curves.add(new.scalars, self._recent.shown_ns)
        if now_ns >= self._next_frame_ns:
            self._screen.show(self._frame(now_ns, pending))
            self._next_frame_ns = now_ns + int((self._clock() - before) / SHARE)

    def _frame(self, now_ns: int, pending: Sequence[Sequence[Pending]]) -> LiveFrame:
        recent, elapsed_ns = self._recent, now_ns - self._start_ns
        rows = []
        for rank, name in enumerate(recent.ranks):
            status, blocked = _status(pending[rank], now_ns, returned=(recent.returned_ns[rank] or 0) > self._start_ns)
            rows.append(LiveRow(name, status, blocked, self._loads[rank]))
        if self._past is None or (self._past_at_ns, self._past.shown_ns) != (recent.whole_ns, recent.shown_ns):
            cells = [recent.binned(rank) for rank in range(len(rows))]
            self._past, self._past_at_ns = Past(cells, recent.shown_ns), recent.whole_ns
        curve = next((Curve(name, self._curves.means(name)) for name in self._curves.names), None)
        return LiveFrame(
            self._title, elapsed_ns, self._progress.fraction, self._progress.parts(), rows, self._past,
            self._detail_at(now_ns, pending), curve,
        )  # fmt: skip

    def _detail_at(self, now_ns: int, pending: Sequence[Sequence[Pending]]) -> Detail | None:
        """What is drawn bar by bar: the whole run while it is short; a late step of a long one, as long as it is remembered."""
        recent = self._recent
        if not recent.forgotten_ns and self._progress.done <= FEW_STEPS:
            return Detail(recent.trace(now_ns, pending), recent.shown_ns, "time since the start of the run")
        if now_ns < self._detail_until_ns:
            return self._detail
        last = self._progress.last_step()
        if last is None or last[0] < recent.forgotten_ns:
            return None
        begin, end = last
        grows = end - begin > SLOW_STEP_NS  # then the step under way is shown beside it
        extent_ns = _round_up((end - begin) * (2 if grows else 1), self._detail.extent_ns if self._detail else 0)
        # Of a quick step nothing beyond its end: what is not complete there would look like no work at all.
        until = min(begin + extent_ns, now_ns) if grows else end
        self._detail = Detail(
            recent.trace(now_ns, pending).between(begin, until), extent_ns,
            f"time since the start of step {self._progress.done - 1}", (begin - self._start_ns, until - self._start_ns),
        )  # fmt: skip
        self._detail_until_ns = now_ns if grows else now_ns + HOLD_NS
        return self._detail


def _round_up(length_ns: int, before_ns: int) -> int:
    """A round length for an axis on which something of this length fits; the one before, while it still serves."""
    if 0.55 * before_ns <= length_ns <= before_ns:
        return before_ns
    power = 10 ** (len(str(length_ns)) - 1)
    return next(int(m * power) for m in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if m * power >= length_ns)


def _status(pending: Sequence[Pending], now_ns: int, *, returned: bool) -> tuple[str, bool]:
    """What a rank is doing, as far as it is known, and whether it waits."""
    waits = [p for p in pending if p.wait_start_ns]
    if waits:
        oldest = min(waits, key=lambda p: p.wait_start_ns)
        waited_ns = now_ns - oldest.wait_start_ns
        return oldest.name + ("…" if waited_ns < WORTH_SAYING_NS else f"… {time_in_words(waited_ns)}"), True
    if pending:
        return f"{pending[0].name}…", False
    return ("returned", False) if returned else ("", False)


class _Cell:
    """The output of a notebook's cell: one display, which is updated.

    The display is born as text alone, and dies with that text beside the image: nbval 0.11 compares what a display was at its
    birth with what the saved notebook holds, and leaves images aside.
    """

    def __init__(self) -> None:
        self._name = f"labkit-{uuid.uuid4().hex[:12]}"  # ids in a drawing are the page's
        self._said = ""

    def begin(self, said: str) -> None:
        self._said = said
        self._display({})
        # The first import takes half a second: better now than when a student waits for the words of an error, or after Stop.
        threading.Thread(target=_import_matplotlib, daemon=True, name="labkit-import").start()

    def show(self, frame: LiveFrame) -> None:
        self._display({"text/html": svg(frame, self._name)}, update=True)

    def end(self, trace: Trace, title: str) -> None:
        if not len(trace):
            self._display({}, update=True)
            return
        from labkit.plots.timeline import figure_of

        figure = figure_of(trace, title)
        beneath(figure, trace)
        data, metadata = as_image(figure)
        self._display(data, metadata, update=True)

    def _display(self, data: dict[str, Any], metadata: dict[str, Any] | None = None, *, update: bool = False) -> None:
        from IPython.display import display

        display(data | {"text/plain": self._said}, raw=True, metadata=metadata or {}, display_id=self._name, update=update)


def _import_matplotlib() -> None:
    with contextlib.suppress(ImportError):  # the last picture says what is missing
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401


class _Line:
    """One line of a terminal, written over and over."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def begin(self, said: str) -> None:
        """Nothing yet."""

    def show(self, frame: LiveFrame) -> None:
        waiting = [f"{row.name}: {row.status}" for row in frame.rows if row.blocked][:2]
        text = "  ·  ".join(part for part in (frame.title, frame.in_words, *waiting) if part)
        self._stream.write(f"\r{text[: shutil.get_terminal_size().columns - 1]}\x1b[K")
        self._stream.flush()

    def end(self, trace: Trace, title: str) -> None:
        self._stream.write(f"\r{title}: {time_in_words(trace.duration_ns)}\x1b[K\n")
        self._stream.flush()


class _Nowhere:
    """No one is looking."""

    def begin(self, said: str) -> None:
        """Nothing."""

    def show(self, frame: LiveFrame) -> None:
        """Nothing."""

    def end(self, trace: Trace, title: str) -> None:
        """Nothing: the run keeps its trace."""


def _screen_here() -> Screen:
    """The cell's output in a notebook's kernel, a line where standard error is a terminal, else nowhere."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if hasattr(shell, "kernel"):
        return _Cell()
    return _Line(sys.stderr) if sys.stderr.isatty() else _Nowhere()
