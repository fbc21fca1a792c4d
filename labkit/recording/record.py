"""The recording functions `span`, `steps` and `record`. Outside groups and traced scripts they do almost nothing.

Without `lab.steps`, a step ends with the optimizer's step. The first begins with the run's first forward pass, backward
pass or batch; each other step where the one before ended, so that evaluations and logging count too. Programs with
several optimizers, such as a GAN, step each of them in turn: a step ends when one of them is about to step a second
time, at the end of the latest optimizer's step. An optimizer that has been deleted steps no more: it also ends the
step, for programs that create one for each step.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
import reprlib
import sys
import sysconfig
import time
import warnings
from _thread import get_ident
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, Generic, TypeVar
from weakref import ref

from labkit.errors.exceptions import OWN_CODE
from labkit.errors.wrong_calls import WrongTypeError, WrongValueError
from labkit.recording.ring_buffer import SPAN_RECORD, RingWriter
from labkit.recording.schema import AUTOMATIC, CALL, COMPUTE, CPU, KINDS, STEP, STEPS_IN_ALL


class AutomaticSteps:
    """Records one rank's steps by `write`: their start and end, which are moments that `now` returned, and flags."""

    def __init__(self, now: Callable[[], Any], write: Callable[[Any, Any, int], None]) -> None:
        self._now, self._write = now, write
        self.begin_run()

    def begin_run(self) -> None:
        """Forget the previous run."""
        self._marked = False  # whether `lab.steps` marks this run's steps
        self._start = self._end = None  # of the step in progress; None: not yet
        self._stepped: list[ref[Any]] = []  # the optimizers that have stepped in it

    def marked(self) -> None:
        """Note that the program marks its steps itself."""
        self._marked = True

    def working(self) -> None:
        """Note that a step is in progress, if none was."""
        if self._start is None:
            self._start = self._now()

    def optimizer_begins(self, optimizer: Any) -> None:
        """Note that an optimizer begins to step."""
        if any(stepped() in (None, optimizer) for stepped in self._stepped):
            self.end_step()
        self.working()

    def optimizer_ends(self, optimizer: Any) -> None:
        """Note that an optimizer has stepped."""
        self._stepped.append(ref(optimizer))
        self._end = self._now()

    def end_step(self) -> None:
        """Record the step in progress; at the end of the run, no optimizer will step again."""
        if self._stepped:
            if not self._marked:
                self._write(self._start, self._end, AUTOMATIC)
            self._start, self._stepped = self._end, []


F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

clock = time.perf_counter_ns
pack_span = SPAN_RECORD.pack_into


class Recorder:
    """Writes what this rank does to its ring; thread-safe."""

    def __init__(self, ring: RingWriter, rank: int = 0, size: int = 1) -> None:
        self.ring, self.rank, self.size = ring, rank, size
        self.name = ""  # its name as an RPC worker, once it is one
        self.graph_spans: Any = None  # set in a TensorFlow rank: spans in a tf.function are marked in its graph
        self.device_clock: Any = None  # set by `labkit.worker.comm` in a rank with a GPU: spans are timed by CUDA events
        self.facts: Any = None  # set by `labkit.worker.comm`: what is compared with other ranks after a run
        self.automatic_steps = AutomaticSteps(self.now, self.step)
        self._begin_delay_ns = 0  # how long the main thread had waited for a core when the call began

    def now(self) -> Any:
        """Return the present moment, for `step`: on a GPU, the end of the work enqueued so far."""
        return clock() if self.device_clock is None else self.device_clock.mark()

    def step(self, start: Any, end: Any, flags: int) -> None:
        """Record a step between two moments that `now` returned."""
        if self.device_clock is None:
            self.ring.write_part("step", STEP, start, end, flags=flags)
        else:
            self.device_clock.ended("step", "", start, flags, kind=STEP, end=end)

    def begin_run(self, *, check: bool = False) -> None:
        """Note that a call of the student's function begins; with `check`, tensors are compared afterwards."""
        self.automatic_steps.begin_run()
        if self.facts is not None:
            self.facts.begin_run(check=check)
        if self.device_clock is not None:
            self.device_clock.begin_run()
        self._begin_delay_ns = self.ring.thread_delay()()

    def call(self, name: str, start_ns: int, end_ns: int) -> None:
        """Record one complete call of the student's function."""
        self.automatic_steps.end_step()
        self.ring.write_part(name, CALL, start_ns, end_ns, begin_delay_ns=self._begin_delay_ns)


class _Here:
    """The recording state of this process: the one place that says whether, and where, it records."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.files: dict[str, str] = {}  # the notebook's names for the student's cells and files: "cell 5", "train.py"
        self.spans: dict[str, Any] = {}  # the compute spans that `span` has created, by name
        self.communication_spans: dict[str, Any] = {}
        self.opened: list[TimedSpan] = []  # all compute spans that `span` has created, also those that have ended

    def start(self, recorder: Recorder | None) -> None:
        """Record with `recorder` from now on; None stops recording."""
        self.recorder = recorder
        self.forget_spans()  # a span that records and one that does not are different objects

    def forget_spans(self) -> None:
        """Discard all cached spans, so that each is created anew at its next use."""
        self.spans.clear()
        self.communication_spans.clear()
        self.opened.clear()

    def in_span(self) -> bool:
        """Whether this thread is in a compute span of the program's own."""
        return any(span.is_open() for span in self.opened)


here = _Here()
MOST_SPANS = 4096  # that are cached per kind
if hasattr(os, "register_at_fork"):
    # What a process that a rank forks records, such as a DataLoader worker, nobody would read: see `keep_from_forks`.
    os.register_at_fork(after_in_child=lambda: here.start(None))


class UnrecordedSpan:
    """A span where nothing is recorded. It decorates functions, and can be pickled, like all spans."""

    __slots__ = ("kind", "name")

    def __init__(self, name: str, kind: str) -> None:
        self.name, self.kind = name, kind

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, function: F) -> F:
        """Return the function, each of whose calls is a span."""
        return _decorated(function, self.name, self.kind)

    def __reduce__(self) -> tuple[Any, ...]:
        return span, (self.name, self.kind)  # created in the notebook, it records once it is in a rank


class TimedSpan(UnrecordedSpan):
    """A span that records. Threads may be in it at the same time, and a thread several times.

    Subclasses define `begin`, which returns what `end` is called with.
    """

    __slots__ = ("_begun",)

    def __init__(self, name: str, kind: str) -> None:
        super().__init__(name, kind)
        self._begun: defaultdict[int, list[Any]] = defaultdict(list)  # by thread, what `begin` returned
        if kind == "compute":
            here.opened.append(self)

    def begin(self) -> Any:
        """Note that the span begins."""
        raise NotImplementedError

    def end(self, begun: Any) -> None:
        """Record the span."""
        raise NotImplementedError

    def __enter__(self) -> None:
        self._begun[get_ident()].append(self.begin())

    def __exit__(self, *_: object) -> None:
        if begun := self._begun[get_ident()]:
            self.end(begun.pop())
        else:
            self._not_begun()

    def is_open(self) -> bool:
        """Whether this thread is in the span."""
        return bool(self._begun.get(get_ident()))

    def _not_begun(self) -> None:
        """Warn that this thread has ended the span without beginning it; nothing is recorded."""
        warnings.warn(
            f"span({self.name!r}) was ended by a thread in which it was not open, so it is not recorded: `with` ends it once, "
            "in the thread that began it",
            RuntimeWarning,
            stacklevel=3,
        )


class _ComputeSpan(TimedSpan):
    """A compute span that the host times. As the most frequent span it writes its record itself, a third faster."""

    __slots__ = ("_buffer", "_line", "_main_thread", "_name", "_next_slot", "_thread_flags")

    def __init__(self, ring: RingWriter, name: str, line: str) -> None:
        super().__init__(name, "compute")
        self._buffer, self._next_slot = ring.buffer, ring.next_slot
        self._main_thread, self._thread_flags = ring.main_thread, ring.thread_flags
        self._name, self._line = ring.span_name(name), ring.span_line(line)

    def __enter__(self) -> None:
        self._begun[get_ident()].append(clock())

    def __exit__(self, *_: object) -> None:
        end_ns, thread = clock(), get_ident()
        begun = self._begun[thread]
        if not begun:
            self._not_begun()
            return
        start_ns = begun.pop()
        flags = 0 if thread == self._main_thread else self._thread_flags()
        number, at = self._next_slot()  # not earlier: readers wait for a record whose number is taken
        pack_span(self._buffer, at, start_ns, end_ns, self._name, self._line, flags, COMPUTE, CPU, number)


class _CommunicationSpan(TimedSpan):
    """A communication of the program's own: pending, and the rank blocked, from start to end."""

    __slots__ = ("_ring",)

    def __init__(self, ring: RingWriter, name: str) -> None:
        super().__init__(name, "communication")
        self._ring = ring

    def begin(self) -> tuple[int, str, int]:
        line, start_ns = student_line(), clock()
        slot = self._ring.pend(self.name, start_ns, line=line)
        self._ring.waiting(slot, start_ns)
        return slot, line, start_ns

    def end(self, begun: tuple[int, str, int]) -> None:
        end_ns, (slot, line, start_ns) = clock(), begun
        self._ring.unpend(slot)
        self._ring.write_communication(
            self.name, start_ns, end_ns, wait_start_ns=start_ns, wait_end_ns=end_ns, line=line, flags=self._ring.thread_flags()
        )


def span(name: str, kind: str = "compute") -> Any:
    """Time a block of code under a name: `with span("forward"): ...`, or `@span("forward")` above a function.

    Spans may be nested, even under the same name. An exception that leaves the block ends its span.

    Recording costs about two clock reads and one memory write; outside groups and traced scripts nothing is recorded.
    On a GPU, CUDA events time the span, because the host only enqueues the work. The line of code is recorded once per
    run, where the run first uses the name.

    Args:
        name: the name in the timeline. "forward", "backward", "optimizer" and "data" have their own colours; "data" is
            waiting for the next batch, and does not count as computing.
        kind: "compute", or "communication" for transfers that labkit does not see (a TensorFlow all-reduce, a file).

    Returns:
        a context manager that is also a decorator.

    Raises:
        TypeError: `name` is not a string, or `@span(...)` decorates something other than a plain function.
        ValueError: `kind` is neither "compute" nor "communication".
    """
    try:  # faster than `functools.lru_cache`, which would also raise "unhashable type" for a list
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
    """Create the kind of span that this process uses now."""
    recorder = here.recorder
    if recorder is None:
        return UnrecordedSpan(name, kind)
    if kind == "communication":
        return _CommunicationSpan(recorder.ring, name)
    if recorder.device_clock is not None:
        return recorder.device_clock.span(name, student_line())
    timed = _ComputeSpan(recorder.ring, name, student_line())
    return timed if recorder.graph_spans is None else recorder.graph_spans.around(timed)


# `torch.compile` would trace through the class that it returns, and fail at `__enter__`, which is no Python function.
# `torch.compiler.disable` sets this attribute, but needs torch. Test: `test_a_span_in_a_compiled_function`.
_new_span._torchdynamo_disable = True  # type: ignore[attr-defined]


def _decorated(function: F, name: str, kind: str) -> F:
    """Wrap a function in a span that is looked up at each call: functions decorated in the notebook run in ranks."""
    if isinstance(function, type) or not callable(function):
        raise WrongTypeError(f"@span({name!r}) stands above {reprlib.repr(function)}: expected a function")
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise WrongTypeError(
            f"@span({name!r}) above {function.__name__!r}, which yields or awaits, would time only its creation: "
            f"put `with span({name!r}):` around the work inside it"
        )
    here.spans.pop(name, None)  # created anew at the first call, the span gets the line of that call

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with span(name, kind):
            return function(*args, **kwargs)

    return timed  # type: ignore[return-value]  # wraps() keeps the signature, which mypy cannot see


def steps(iterable: Iterable[T]) -> Iterable[T]:
    """Iterate over the batches of a training loop, record each step and drive the progress bar of `watch`.

    A step lasts from one request for a batch to the next; on a GPU, which may be behind, from the end of the work
    enqueued before it. A step that the loop leaves by `break`, `return` or an exception is not recorded.

    Args:
        iterable: the batches. If it has a length, the bar shows how much is left.

    Returns:
        an iterable of the same items, which can be iterated as often as `iterable`. Outside a group: `iterable` itself.

    Raises:
        TypeError: `iterable` is not iterable.
    """
    if not isinstance(iterable, Iterable) and not hasattr(type(iterable), "__getitem__"):
        raise WrongTypeError(f"steps({reprlib.repr(iterable)}): expected something to loop over, such as a list or a DataLoader")
    recorder = here.recorder
    return iterable if recorder is None else _RecordedSteps(iterable, recorder)


class _RecordedSteps(Generic[T]):
    """An iterable whose steps are recorded."""

    def __init__(self, iterable: Iterable[T], recorder: Recorder) -> None:
        self._iterable = iterable
        self._recorder = recorder

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]  # raises TypeError if there is no length, as it should

    def __iter__(self) -> Iterator[T]:
        recorder, in_all = self._recorder, operator.length_hint(self._iterable, -1)
        recorder.automatic_steps.marked()
        if in_all >= 0:
            recorder.ring.write_scalar(STEPS_IN_ALL, clock(), float(in_all))
        start = recorder.now()
        for item in self._iterable:
            yield item
            end = recorder.now()
            recorder.step(start, end, recorder.ring.thread_flags())
            start = end


def record(*nameless: float, **scalars: float) -> None:
    """Record the current value of each name: `record(loss=loss)`. Each name becomes a curve over time.

    If a GPU is still computing a value, the call waits for it.

    Args:
        nameless: not allowed; each value needs a name.
        scalars: the values by name: numbers, or tensors with one element.

    Raises:
        TypeError: a value has no name, or is neither a number nor a tensor with one element.
    """
    if nameless:
        raise WrongTypeError(f"record({reprlib.repr(nameless[0])}): expected a name for each value, as in record(loss=loss)")
    recorder = here.recorder
    if recorder is None:
        return
    now = clock()
    for name, value in scalars.items():
        try:
            if isinstance(value, (str, bytes)):  # `float` would read a number from them
                raise TypeError
            # torch warns if a tensor that requires a gradient is converted to a number
            number = float(value.detach() if getattr(value, "requires_grad", False) else value)  # type: ignore[attr-defined]
        except (TypeError, ValueError):
            got = reprlib.repr(value)
            raise WrongTypeError(f"record({name}={got}): expected a number, or a tensor with one element") from None
        recorder.ring.write_scalar(name, now, number)


_LIBRARIES = tuple({os.path.normcase(sysconfig.get_path(p)) + os.sep for p in ("stdlib", "platstdlib", "purelib", "platlib")})
# The last two: code generated by TensorFlow, and by torch's compiler.
_NOT_STUDENTS = ("site-packages", "dist-packages", "__autograph_generated_file", "torchinductor_")
# File names of code typed into an interactive Python, and of `%%ranks` cells (`ipc.ranks_cell`).
_TYPED_IN = ("<ipython-input", "<stdin>", "<python-input", "<cell ")


@functools.lru_cache(maxsize=4096)
def is_students(filename: str) -> bool:
    """Return whether a file's code is the student's: a cell, or a file outside Python, its packages and labkit.

    Cached: after a change of `here.files`, call `is_students.cache_clear()`.
    """
    if filename in here.files:
        return True
    if filename.startswith("<"):
        return filename.startswith(_TYPED_IN)
    path = os.path.normcase(os.path.abspath(filename))
    return not path.startswith((*_LIBRARIES, *OWN_CODE)) and not any(part in path for part in _NOT_STUDENTS)


def student_line(innermost: FrameType | None = None) -> str:
    """Return the current line of the innermost student function on a stack: "cell 5, line 12"; "" if there is none."""
    frame: FrameType | None = innermost or sys._getframe(1)
    while frame is not None:
        if is_students(frame.f_code.co_filename):
            return f"{label(frame.f_code.co_filename)}, line {frame.f_lineno}"
        frame = frame.f_back
    return ""


def label(filename: str) -> str:
    """Return a file's name as the student knows it: "cell 5" for a cell, else the base name."""
    return here.files.get(filename) or _base_name(filename)


_base_name = functools.lru_cache(os.path.basename)  # each span asks for it
