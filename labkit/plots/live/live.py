"""`Live`: the live picture of a run, which leaves the finished timeline behind.

A run calls `begin`, `update` (with newly completed spans and pending operations) and `end`, on the thread that called
`watch`. `Live` keeps a bounded memory of the run (`recent`), draws frames from it (`drawing`), and replaces the last
frame with each new one. After the run, an image of the timeline takes the place of the frames, so that a saved notebook
contains one picture, which every viewer can show.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TextIO

from labkit.errors.units import time_in_words
from labkit.launch.resource_usage import Load
from labkit.plots.image import as_image
from labkit.plots.live.curves import Curves, draw_below
from labkit.plots.live.drawing import SINCE, Curve, Detail, LiveFrame, LiveRow, Past, page
from labkit.plots.live.recent import Progress, Recent
from labkit.recording.schema import Pending
from labkit.tracing.trace import Trace

SHARE: Final = 1 / 30  # of one core's time for drawing: the more a frame costs, the fewer frames are drawn
FEW_STEPS: Final = 12  # up to this many steps, the whole run is drawn; beyond, one step
SLOW_STEP_NS: Final = 400_000_000  # a longer step is shown while it runs
HOLD_NS: Final = 600_000_000  # how long a step stays in the picture, so that the eye can follow
ENDED_HERE: Final = "✕ ended"  # the status of a rank whose process has ended, with the mark in its row
LONG_WAIT_NS: Final = 500_000_000  # a longer wait is shown with its duration


class Screen:
    """Shows frames; this one shows nothing."""

    def begin(self, alt_text: str) -> None:
        """Open the display; a viewer without images shows `alt_text` throughout the run."""

    def show(self, frame: LiveFrame) -> None:
        """Replace the last frame."""

    def end(self, trace: Trace, title: str) -> None:
        """Replace the last frame with the finished timeline."""


class Live:
    """The live picture of a run; implements `group.collector.Picture`.

    It is shown on `screen`, by default the cell's output in a notebook, one line in a terminal, else nowhere. `clock`
    returns this thread's CPU time in ns, to measure the cost of drawing.
    """

    interval_s = 0.2  # five frames a second look like movement

    def __init__(self, screen: Screen | None = None, clock: Callable[[], int] = time.thread_time_ns) -> None:
        self._given, self._clock = screen, clock

    def begin(self, ranks: tuple[str, ...], title: str, start_ns: int, called: Sequence[int] | None = None) -> None:
        """Start the picture of a run, such as "train on 4 ranks"; ranks other than `called` only serve."""
        self._title, self._start_ns = title, start_ns
        self._screen = self._given or _screen_here()
        self._recent, self._progress = Recent(ranks, start_ns, called), Progress(len(ranks))
        self._curves, self._loads = Curves(len(ranks), start_ns), tuple(Load() for _ in ranks)
        self._next_frame_ns = start_ns
        self._detail: Detail | None = None
        self._detail_until_ns = 0
        self._past: Past | None = None
        self._past_at_ns = 0
        self._failed = False
        self._safely(lambda: self._first_frame(ranks))

    def update(
        self, now_ns: int, new: Trace, pending: Sequence[Sequence[Pending]], loads: Sequence[Load] = (),
        silent: Mapping[int, int] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Show the state of the run; `silent` has the last report of ranks whose machine does not answer."""
        self._recent.silent = silent
        self._loads = tuple(loads) or self._loads
        self._safely(lambda: self._next_frame(now_ns, new, pending))

    def restart(self, now_ns: int) -> None:
        """Count the steps of fresh ranks from 0; the curves go on."""
        self._recent.restart(now_ns)
        self._progress = Progress(len(self._recent.ranks))
        self._detail, self._detail_until_ns = None, 0

    def hold(self, asking: Collection[int]) -> None:
        """Show the last update in a frame that stays: the ranks `asking` are at their debuggers' prompts."""
        self._safely(lambda: self._screen.show(self._frame(*self._updated, asking)))

    def end(self, trace: Trace, stopped: str) -> None:
        """Replace the frames with the timeline of the run; `stopped` says why it ended early, "" if it did not."""
        self._failed = False  # the timeline can be drawn even if a frame could not
        title = f"{self._title}, {stopped}" if stopped else self._title
        self._safely(lambda: self._screen.end(trace, title))

    def _safely(self, draw: Callable[[], None]) -> None:
        """Draw; on failure, say so once and let the run continue."""
        if self._failed:
            return
        try:
            draw()
        except Exception as error:  # noqa: BLE001  # no error of a picture may end a run
            self._failed = True
            reason = f"{type(error).__name__}: {error}"
            print(f"labkit could not draw the run. The run itself is not affected. {reason}", file=sys.stderr)

    def _first_frame(self, ranks: tuple[str, ...]) -> None:
        self._screen.begin(f"timeline of {self._title}")
        self._screen.show(self._frame(self._start_ns, [()] * len(ranks)))

    def _next_frame(self, now_ns: int, new: Trace, pending: Sequence[Sequence[Pending]]) -> None:
        before, due = self._clock(), now_ns >= self._next_frame_ns
        self._updated = now_ns, pending
        self._recent.add(new, now_ns, drawn=due)
        self._progress.add(new)
        self._curves.add(new.scalars, self._recent.shown_ns)
        if due:
            self._screen.show(self._frame(now_ns, pending))
            self._next_frame_ns = now_ns + int((self._clock() - before) / SHARE)

    def _frame(self, now_ns: int, pending: Sequence[Sequence[Pending]], asking: Collection[int] = ()) -> LiveFrame:
        recent, elapsed_ns = self._recent, now_ns - self._start_ns
        rows = []
        for rank, name in enumerate(recent.ranks):
            status, blocked = _status(pending[rank], now_ns, returned=(recent.returned_ns[rank] or 0) > self._start_ns)
            if rank in asking:
                status, blocked = "breakpoint", False
            row = LiveRow(name, status, blocked, self._loads[rank])
            if rank in recent.silent:
                row = LiveRow(name, f"unknown{SINCE}{time_in_words(now_ns - recent.silent[rank])}", False)
            if rank in recent.ended_ns:
                row = LiveRow(name, ENDED_HERE, False, ended_ns=recent.ended_ns[rank] - self._start_ns)
            rows.append(row)
        if self._past is None or (self._past_at_ns, self._past.shown_ns) != (recent.complete_ns, recent.shown_ns):
            cells = [recent.binned(rank) for rank in range(len(rows))]
            self._past, self._past_at_ns = Past(cells, recent.shown_ns), recent.complete_ns
        curve = next((Curve(name, self._curves.means(name, recent.restarts_ns)) for name in self._curves.names), None)
        return LiveFrame(
            self._title, elapsed_ns, self._progress.fraction, self._progress.parts(now_ns), rows, self._past,
            self._detail_at(now_ns, pending), curve, [ns - self._start_ns for ns in recent.restarts_ns], held=bool(asking),
        )  # fmt: skip

    def _detail_at(self, now_ns: int, pending: Sequence[Sequence[Pending]]) -> Detail | None:
        """Return the part to draw bar by bar: all of a short run; of a long one, a recent step if it is still kept."""
        recent = self._recent
        if not recent.dropped_ns and self._progress.done <= FEW_STEPS:
            return Detail(recent.trace(now_ns, pending), recent.shown_ns, "time since the start of the run")
        if now_ns < self._detail_until_ns:
            return self._detail
        last = self._progress.last_step()
        if last is None or last[0] < recent.dropped_ns:
            return None
        begin, end = last
        grows = end - begin > SLOW_STEP_NS  # for slow steps, the current step is shown, too
        extent_ns = _round_up((end - begin) * (2 if grows else 1), self._detail.extent_ns if self._detail else 0)
        # A fast step is clipped at its end, since incomplete spans after it would look like idle time.
        until = min(begin + extent_ns, now_ns) if grows else end
        self._detail = Detail(
            recent.trace(now_ns, pending).between(begin, until), extent_ns,
            f"time since the start of step {self._progress.done - 1}", (begin - self._start_ns, until - self._start_ns),
        )  # fmt: skip
        self._detail_until_ns = now_ns if grows else now_ns + HOLD_NS
        return self._detail


def _round_up(length_ns: int, before_ns: int) -> int:
    """Return a round length for an axis, at least `length_ns`; the previous length as long as it fits."""
    if 0.55 * before_ns <= length_ns <= before_ns:
        return before_ns
    power = 10 ** (len(str(length_ns)) - 1)
    return next(int(m * power) for m in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if m * power >= length_ns)


def _status(pending: Sequence[Pending], now_ns: int, *, returned: bool) -> tuple[str, bool]:
    """Return the status of a rank ("" if unknown), and whether it is blocked."""
    waits = [p for p in pending if p.wait_start_ns]
    if waits:
        oldest = min(waits, key=lambda p: p.wait_start_ns)
        waited_ns = now_ns - oldest.wait_start_ns
        return oldest.name + (f"{SINCE}{time_in_words(waited_ns)}" if waited_ns >= LONG_WAIT_NS else ""), True
    if pending:
        return pending[0].name, False
    return ("returned", False) if returned else ("", False)


class _Cell(Screen):
    """The output of a notebook's cell: one display, which is updated.

    The display starts with text only, and ends with the same text and the image: nbval 0.11 compares the first version
    of a display with the saved notebook, and ignores images.
    """

    def __init__(self) -> None:
        self._name = f"labkit-{uuid.uuid4().hex[:12]}"  # ids in an SVG must be unique in the page
        self._alt_text = ""
        self._first = True

    def begin(self, alt_text: str) -> None:
        self._alt_text = alt_text
        self._display({})
        # The first import takes half a second. Later, it would delay an error message or the reaction to Stop.
        threading.Thread(target=_import_matplotlib, daemon=True, name="labkit-import").start()

    def show(self, frame: LiveFrame) -> None:
        self._display({"text/html": page(frame, self._name, first=self._first)}, update=True)
        self._first = False

    def end(self, trace: Trace, title: str) -> None:
        if not len(trace):
            self._display({}, update=True)
            return
        from labkit.plots.timeline import figure_of

        figure = figure_of(trace, title)
        draw_below(figure, trace)
        data, metadata = as_image(figure, figure.alt_text)
        self._display(data, metadata, update=True)

    def _display(self, data: dict[str, Any], metadata: dict[str, Any] | None = None, *, update: bool = False) -> None:
        from IPython.display import display

        display(data | {"text/plain": self._alt_text}, raw=True, metadata=metadata or {}, display_id=self._name, update=update)


def _import_matplotlib() -> None:
    with contextlib.suppress(ImportError):  # drawing the timeline will report what is missing
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401


class _CellLine(Screen):
    """One line of a terminal, overwritten with each frame."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, frame: LiveFrame) -> None:
        waiting = [f"{row.name}: {row.status}" for row in frame.rows if row.blocked][:2]
        text = "  ·  ".join(part for part in (frame.title, frame.in_words, *waiting) if part)
        self._stream.write(f"\r{text[: shutil.get_terminal_size().columns - 1]}\x1b[K")
        self._stream.flush()

    def end(self, trace: Trace, title: str) -> None:
        self._stream.write(f"\r{title}: {time_in_words(trace.duration_ns)}\x1b[K\n")
        self._stream.flush()


def _screen_here() -> Screen:
    """Return the cell's output in a notebook kernel, a line if standard error is a terminal, otherwise nothing."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if hasattr(shell, "kernel"):
        return _Cell()
    return _CellLine(sys.stderr) if sys.stderr.isatty() else Screen()
