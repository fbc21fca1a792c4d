"""What a rank writes down: `span`, `steps`, `record`. Outside a group they do nothing and cost next to nothing."""

from __future__ import annotations

import functools
import inspect
import operator
import os
import reprlib
import sys
import sysconfig
import threading
import time
import warnings
from _thread import get_ident
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat, starmap
from types import FrameType
from typing import Any, Generic, TypeVar

from labkit.errors.own_code import LABKIT
from labkit.errors.wrong_calls import WrongTypeError, WrongValueError
from labkit.recording.ring_buffer import RingWriter
from labkit.recording.ring_layout import KIND_SHIFT, SPAN_HEAD
from labkit.recording.schema import CALL, KINDS, STEP, STEPS_IN_ALL

__all__ = ["Recorder", "SpanStack", "here", "is_students", "label", "not_begun", "record", "span", "steps", "student_line"]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

clock = time.perf_counter_ns


class Recorder:
    """Writes what this rank does into its ring; any thread may call it.

    Args:
        ring: where to.
        rank: this rank's number.
        size: how many ranks there are.
    """

    def __init__(self, ring: RingWriter, rank: int = 0, size: int = 1) -> None:
        self.ring, self.rank, self.size = ring, rank, size
        self.name = ""  # as a worker of RPC, once it is one
        self.graph_spans: Any = None  # set in a TensorFlow rank: spans in a tf.function are marked in its graph
        self.device_clock: Any = None  # set by `labkit.comm` in a rank with its own GPU: spans are timed by CUDA events

    def call(self, name: str, start_ns: int, end_ns: int) -> None:
        """Keep the whole of one call of the student's function."""
        self.ring.write(name, CALL, start_ns, end_ns)


class _Here:
    """This process as a rank sees it: the one place that says whether, and where, things are written down."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.files: dict[str, str] = {}  # the student's cells and files as the notebook names them: "cell 5", "train.py"
        self.spans: dict[str, Any] = {}  # by name, those that `span` has made
        self.communication_spans: dict[str, Any] = {}

    def start(self, recorder: Recorder | None) -> None:
        """From now on write to `recorder` (None: nowhere)."""
        self.recorder = recorder
        self.forget_spans()  # one that records and one that does not are different objects

    def forget_spans(self) -> None:
        """Make all spans anew when they are used next."""
        self.spans.clear()
        self.communication_spans.clear()


here = _Here()
MOST_SPANS = 4096  # of one kind that are kept
if hasattr(os, "register_at_fork"):
    # A process that a rank forks, such as a DataLoader's worker, has the same ring and its own record counter: it would
    # write over what the rank writes.
    os.register_at_fork(after_in_child=lambda: here.start(None))


class _Off:
    """A span outside a group: `with` calls C methods and no Python. The first takes nothing, the second anything."""

    __slots__ = ("kind", "name")
    __enter__ = "".isupper
    __exit__ = "".format

    def __init__(self, name: str, kind: str) -> None:
        self.name, self.kind = name, kind

    def __call__(self, function: F) -> F:
        return _decorated(function, self.name, self.kind)

    def __reduce__(self) -> tuple[Any, ...]:
        return span, (self.name, self.kind)  # made in the notebook, it is a recorded one in a rank


def span(name: str, kind: str = "compute") -> Any:
    """Time a stretch of code under a name: `with span("forward"): ...`, or `@span("forward")` above a function.

    Spans may lie within each other, also within one of the same name; an exception that leaves the block ends its span.

    Args:
        name: what the timeline calls it. "forward", "backward", "optimizer" and "data" have colours of their own.
        kind: "compute", or "communication" for what travels without labkit seeing it (a TensorFlow all-reduce, a file).

    Recording costs about two clock reads and one write to memory; outside a group nothing is recorded. On a GPU the
    span is timed by CUDA events, because the host only enqueues the work. The line of code is noted once a run, where
    it first uses the name.

    Raises:
        TypeError: `name` is not a string, or what stands below `@span(...)` is not a plain function.
        ValueError: `kind` is neither "compute" nor "communication".
    """
    try:  # faster than `functools.lru_cache`, which moreover answers "unhashable type" to a list
        if kind == "compute":
            return here.spans[name]
    except (KeyError, TypeError):
        pass
    if not isinstance(name, str):
        raise WrongTypeError(f"span({reprlib.repr(name)}): expected a name, as in span('forward')")
    if kind not in KINDS[:2]:
        raise WrongValueError(f"span({name!r}, kind={kind!r}): expected 'compute' or 'communication'")
    kept = here.spans if kind == "compute" else here.communication_spans
    if (made := kept.get(name)) is None:
        made = _new_span(name, kind)
        if len(kept) >= MOST_SPANS:
            kept.clear()
        kept[name] = made
    return made


def _new_span(name: str, kind: str) -> Any:
    """A span as this process uses it now."""
    recorder = here.recorder
    if recorder is None:
        return _Off(name, kind)
    if recorder.device_clock is not None and kind == "compute":
        return _decorable(recorder.device_clock.span(recorder.ring.placed(name, student_line())), name, kind)
    return _open_span(recorder, name, kind)


class SpanStack(threading.local):
    """What the open spans of one name began with: a span may contain itself, and each thread has its own."""

    def __init__(self) -> None:
        begun: list[Any] = []
        self.push = begun.append
        self.pop = begun.pop  # IndexError where this thread has none open


def not_begun(name: str) -> None:
    """Warn that a thread ends a span that it has not begun. Nothing is recorded, and other records stay."""
    warnings.warn(
        f"span({name!r}) was ended by a thread in which it was not open, so that it is not recorded: `with` ends it once, "
        "in the thread that began it",
        RuntimeWarning,
        stacklevel=3,
    )


def _open_span(recorder: Recorder, name: str, kind: str) -> Any:
    """A span that is recorded. All it touches is a local, its methods take no self: a third faster than a plain class.

    To enter it runs no Python: `map` has the list take the next pair of `zip`, for which `starmap` calls both
    functions.
    """
    ring, code = recorder.ring, KINDS.index(kind)
    if kind == "communication":
        return _decorable(_communication_pair(ring, ring.placed(name)), name, kind)
    buffer, pack, next_slot, now, this_thread = ring.buffer, SPAN_HEAD.pack_into, ring.next_slot, clock, get_ident
    name_and_kind = ring.name(ring.placed(name, student_line())) | code << KIND_SHIFT
    begun: list[tuple[int, int]] = []  # by all threads: which of them, and when
    enter = map(begun.append, zip(starmap(this_thread, repeat(())), starmap(now, repeat(())), strict=False)).__next__

    def leave(_type: object, _value: object, _traceback: object) -> None:
        end_ns, thread = now(), this_thread()
        try:
            whose, start_ns = begun[0]
        except IndexError:
            not_begun(name)
            return
        if whose == thread and len(begun) == 1:
            del begun[0]  # it is still there, whatever other threads have done meanwhile: they take their own alone
        elif (newest := _taken_from(begun, thread)) is not None:
            start_ns = newest
        else:
            not_begun(name)
            return
        number, at = next_slot()  # only now: readers wait for a record whose number was taken
        pack(buffer, at, start_ns, end_ns, name_and_kind, number)

    if recorder.graph_spans is not None:
        return _decorable(recorder.graph_spans.around(name, enter, leave), name, kind)
    return _decorable((enter, leave), name, kind)


def _taken_from(begun: list[tuple[int, int]], thread: int) -> int | None:
    """The start of the thread's newest open span, which is removed; None if it has none."""
    for own in reversed(begun.copy()):
        if own[0] == thread:
            begun.remove(own)
            return own[1]
    return None


def _communication_pair(ring: RingWriter, name: str) -> tuple[Callable[[], None], Callable[..., None]]:
    """What the student calls a communication: pending while it lasts, and the rank is blocked in it all the while."""
    stack = SpanStack()

    def enter() -> None:
        line, start_ns = student_line(), clock()
        slot = ring.pend(name, start_ns, line=line)
        ring.waiting(slot, start_ns)
        stack.push((slot, line, start_ns))

    def leave(*_: object) -> None:
        end_ns = clock()
        try:
            slot, line, start_ns = stack.pop()
        except IndexError:
            not_begun(name)
            return
        ring.unpend(slot)
        ring.write_communication(name, start_ns, end_ns, wait_start_ns=start_ns, wait_end_ns=end_ns, line=line)

    return enter, leave


def _decorable(pair: tuple[Callable[[], None], Callable[..., None]], name: str, kind: str) -> Any:
    """An object whose type holds enter and leave as static methods: `with` then calls them without binding."""
    enter, leave = pair
    members = {
        "__slots__": (),
        "__enter__": staticmethod(enter),
        "__exit__": staticmethod(leave),
        "__call__": lambda _, function: _decorated(function, name, kind),
        "__reduce__": lambda _: (span, (name, kind)),
    }
    return type("span", (), members)()


def _decorated(function: F, name: str, kind: str) -> F:
    """The function inside a span, looked up at each call: functions decorated in the notebook run in ranks."""
    if isinstance(function, type) or not callable(function):
        raise WrongTypeError(f"@span({name!r}) stands above {reprlib.repr(function)}: expected a function")
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise WrongTypeError(
            f"@span({name!r}) above {function.__name__!r}, which yields or awaits, would time only its creation: "
            f"put `with span({name!r}):` around the work inside it"
        )
    here.spans.pop(name, None)  # made anew at the first call, the span has the line of that call

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with span(name, kind):
            return function(*args, **kwargs)

    return timed  # type: ignore[return-value]  # wraps() keeps the signature, which mypy cannot see


def steps(iterable: Iterable[T]) -> Iterable[T]:
    """Iterate over the batches of a training loop: records each step and drives the progress bar of `watch`.

    A step lasts from one request for a batch to the next, by the clock of the CPU. One that the loop leaves by `break`,
    `return` or an exception is not marked.

    Args:
        iterable: the batches. Where it has a length, the bar knows how much is left.

    Returns:
        the same items, as often as `iterable` gives them. Outside a group: `iterable` itself.

    Raises:
        TypeError: there is nothing to loop over.
    """
    if not isinstance(iterable, Iterable) and not hasattr(type(iterable), "__getitem__"):
        raise WrongTypeError(f"steps({reprlib.repr(iterable)}): expected something to loop over, such as a list or a DataLoader")
    recorder = here.recorder
    return iterable if recorder is None else _Steps(iterable, recorder.ring)


class _Steps(Generic[T]):
    """An iterable whose steps are marked."""

    def __init__(self, iterable: Iterable[T], ring: RingWriter) -> None:
        self._iterable = iterable
        self._ring = ring

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]  # raises TypeError where there is no length, as it should

    def __iter__(self) -> Iterator[T]:
        ring, in_all = self._ring, operator.length_hint(self._iterable, -1)
        start_ns = clock()
        if in_all >= 0:
            ring.write_scalar(STEPS_IN_ALL, start_ns, float(in_all))
        for item in self._iterable:
            yield item
            end_ns = clock()
            ring.write("step", STEP, start_ns, end_ns)
            start_ns = end_ns


def record(*nameless: float, **scalars: float) -> None:
    """Write down values as they are now: `record(loss=loss)`. Each name becomes a curve over time.

    A value that is still being computed on a GPU is waited for.

    Raises:
        TypeError: a value is not a number (a tensor of one element is one), or has no name.
    """
    if nameless:
        raise WrongTypeError(f"record({reprlib.repr(nameless[0])}): expected a name for each value, as in record(loss=loss)")
    recorder = here.recorder
    if recorder is None:
        return
    now = clock()
    for name, value in scalars.items():
        try:
            # torch warns where a tensor that has a gradient becomes a number
            number = float(value.detach() if getattr(value, "requires_grad", False) else value)  # type: ignore[attr-defined]
        except (TypeError, ValueError):
            got = reprlib.repr(value)
            raise WrongTypeError(f"record({name}={got}): expected a number, or a tensor with one element") from None
        recorder.ring.write_scalar(name, now, number)


_LIBRARIES = tuple({os.path.normcase(sysconfig.get_path(p)) + os.sep for p in ("stdlib", "platstdlib", "purelib", "platlib")})
_NOT_STUDENTS = ("site-packages", "dist-packages", "__autograph_generated_file")  # the last: what TensorFlow makes of a function
_TYPED_IN = ("<ipython-input", "<stdin>", "<python-input")  # what interactive Pythons call what is typed into them


@functools.lru_cache(maxsize=4096)
def is_students(filename: str) -> bool:
    """Whether code of that file is the student's: a cell, or a file outside Python, its packages and labkit.

    Cached: after a change of `here.files`, call `is_students.cache_clear()`.
    """
    if filename in here.files:
        return True
    if filename.startswith("<"):
        return filename.startswith(_TYPED_IN)
    path = os.path.normcase(os.path.abspath(filename))
    return not path.startswith((*_LIBRARIES, LABKIT)) and not any(part in path for part in _NOT_STUDENTS)


def student_line(innermost: FrameType | None = None) -> str:
    """Where the innermost of the student's functions on a stack is now: "cell 5, line 12"; "" if there is none.

    Args:
        innermost: where the stack ends; default: this thread's, here.
    """
    frame: FrameType | None = innermost or sys._getframe(1)
    while frame is not None:
        if is_students(frame.f_code.co_filename):
            return f"{label(frame.f_code.co_filename)}, line {frame.f_lineno}"
        frame = frame.f_back
    return ""


def label(filename: str) -> str:
    """A file's name as the student knows it: "cell 5" for a cell, else the base name."""
    return here.files.get(filename) or os.path.basename(filename)
