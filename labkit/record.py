"""What a rank writes down: `span`, `steps`, `record`. Outside a group they do nothing and cost next to nothing."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from labkit.ring import CALL, CAPACITY, COMMUNICATION, COMPUTE, HEAD, KINDS, RECORD_BYTES, RECORDS_AT, SCALAR, STEP, RingWriter

__all__ = ["Recorder", "here", "record", "span", "steps"]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

clock = time.perf_counter_ns


class Recorder:
    """Writes what this rank does into its ring.

    Args:
        ring: where to.
        threads: True where several threads run the student's functions at once, as in an RPC rank.
    """

    def __init__(self, ring: RingWriter, *, threads: bool = False) -> None:
        self.ring = ring
        self.threads = threads
        self.device_clock: Any = None  # set by `labkit.comm` in a rank with its own GPU: spans are timed by CUDA events

    def call(self, name: str, start_ns: int, end_ns: int) -> None:
        """Keep the whole of one call of the student's function."""
        self.ring.write(name, CALL, start_ns, end_ns)


class _Here:
    """This process as a rank sees it: the one place that says whether, and where, things are written down."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.files: dict[str, str] = {}  # the student's cells and files as the notebook names them: "cell 5", "train.py"

    def start(self, recorder: Recorder | None) -> None:
        """From now on write to `recorder` (None: nowhere)."""
        self.recorder = recorder
        span.cache_clear()  # an open and an unused span are made of different stuff


here = _Here()


class _Off:
    """A span outside a group. `"".format` takes anything and returns "", which is false: `with` then runs no Python code at all."""

    __slots__ = ("kind", "name")
    __enter__ = "".format
    __exit__ = "".format

    def __init__(self, name: str, kind: str) -> None:
        self.name, self.kind = name, kind

    def __call__(self, function: F) -> F:
        return _decorated(function, self.name, self.kind)


@functools.lru_cache(maxsize=4096)
def span(name: str, kind: str = "compute") -> Any:
    """Time a stretch of code under a name: `with span("forward"): ...`, or `@span("forward")` above a function.

    Args:
        name: what the timeline calls it. "forward", "backward", "optimizer" and "data" have colours of their own.
        kind: "compute", or "communication" for what travels without labkit seeing it (a TensorFlow all-reduce, a file).

    Recording costs about two clock reads and one write to memory; outside a group nothing is recorded. On a GPU the span is timed
    by CUDA events, because the host only enqueues the work.

    Raises:
        TypeError: `name` is not a string.
        ValueError: `kind` is neither "compute" nor "communication".
    """
    if not isinstance(name, str):
        raise TypeError(f"span({name!r}): the name must be a string, such as 'forward'")
    if kind not in KINDS[:2]:
        raise ValueError(f"span({name!r}, kind={kind!r}): expected 'compute' or 'communication'")
    recorder = here.recorder
    if recorder is None:
        return _Off(name, kind)
    if recorder.device_clock is not None and kind == "compute":
        return _decorable(recorder.device_clock.span(name), name, kind)
    return _open_span(recorder, name, kind)


def _open_span(recorder: Recorder, name: str, kind: str) -> Any:
    """A span that is recorded. Everything it touches is a local, and the methods take no self: 330 ns against 500 as a plain class."""
    ring, code = recorder.ring, KINDS.index(kind)
    if kind == "communication":
        enter, leave = _communication_pair(ring, name)
        return _decorable((enter, leave), name, kind)
    buffer, pack, next_record, now = ring.buffer, HEAD.pack_into, ring.next_record, clock
    number, mask, size, base = ring.name(name), CAPACITY - 1, RECORD_BYTES, RECORDS_AT
    if recorder.threads:
        stacks: dict[int, list[int]] = defaultdict(list)  # spans of several threads do not nest
        me = threading.get_ident

        def enter() -> None:
            stacks[me()].append(now())

        def leave(*_: object) -> None:
            end_ns = now()
            i = next_record()
            pack(buffer, base + (i & mask) * size, stacks[me()].pop(), end_ns, number, code, i)

    else:
        starts: list[int] = []  # a list: a span may contain itself
        push, pop = starts.append, starts.pop

        def enter() -> None:
            push(now())

        def leave(*_: object) -> None:
            end_ns = now()
            i = next_record()
            pack(buffer, base + (i & mask) * size, pop(), end_ns, number, code, i)

    return _decorable((enter, leave), name, kind)


def _communication_pair(ring: RingWriter, name: str) -> tuple[Callable[[], None], Callable[..., None]]:
    open_spans: dict[int, list[tuple[int, int]]] = defaultdict(list)

    def enter() -> None:
        start_ns = clock()
        slot = ring.pend(name, start_ns, line=student_line())
        ring.waiting(slot, start_ns)
        open_spans[threading.get_ident()].append((start_ns, slot))

    def leave(*_: object) -> None:
        start_ns, slot = open_spans[threading.get_ident()].pop()
        end_ns = clock()
        ring.unpend(slot)
        ring.write_communication(name, start_ns, end_ns, wait_start_ns=start_ns, wait_end_ns=end_ns)

    return enter, leave


def _decorable(pair: tuple[Callable[[], None], Callable[..., None]], name: str, kind: str) -> Any:
    """An object whose type holds enter and leave as static methods: `with` then calls them without binding."""
    enter, leave = pair
    members = {
        "__slots__": (),
        "__enter__": staticmethod(enter),
        "__exit__": staticmethod(leave),
        "__call__": lambda _, function: _decorated(function, name, kind),
    }
    return type("span", (), members)()


def _decorated(function: F, name: str, kind: str) -> F:
    """The function inside a span that is looked up at each call, since a function decorated in the notebook runs in the ranks."""

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with span(name, kind):
            return function(*args, **kwargs)

    return timed  # type: ignore[return-value]  # wraps() keeps the signature, which mypy cannot see


def steps(iterable: Iterable[T]) -> Iterable[T]:
    """Go through the batches of a training loop: marks where each step begins and ends, and drives the progress bar of `watch`.

    Args:
        iterable: the batches. Where it has a length, the bar knows how much is left.

    Returns:
        the same items. Outside a group: `iterable` itself.
    """
    recorder = here.recorder
    return iterable if recorder is None else _steps(iterable, recorder.ring)


def _steps(iterable: Iterable[T], ring: RingWriter) -> Iterator[T]:
    try:
        ring.write_scalar("steps in all", clock(), float(len(iterable)))  # type: ignore[arg-type]  # not all have a length
    except TypeError:
        pass
    start_ns = clock()
    for item in iterable:
        yield item
        end_ns = clock()
        ring.write("step", STEP, start_ns, end_ns)
        start_ns = end_ns


def record(**scalars: float) -> None:
    """Write down values as they are now: `record(loss=loss.item())`. Each name becomes a curve over time.

    Raises:
        TypeError: a value is not a number (a tensor of one element is one).
    """
    recorder = here.recorder
    if recorder is None:
        return
    now = clock()
    for name, value in scalars.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise TypeError(f"record({name}={value!r}): expected a number, or a tensor with one element") from None
        recorder.ring.write_scalar(name, now, number)


_LIBRARIES = tuple({os.path.normcase(sysconfig.get_path(p)) for p in ("stdlib", "platstdlib", "purelib", "platlib")})
_LABKIT = os.path.dirname(os.path.abspath(__file__))


@functools.lru_cache(maxsize=4096)
def is_students(filename: str) -> bool:
    """Whether code of that file is the student's: a cell, or a file outside Python, its packages and labkit."""
    if filename in here.files:
        return True
    if filename.startswith("<"):
        return filename.startswith("<ipython-input") or filename == "<stdin>"
    path = os.path.normcase(os.path.abspath(filename))
    return not path.startswith((*_LIBRARIES, _LABKIT)) and "site-packages" not in path and os.path.basename(path) != "runpy.py"


def student_line() -> str:
    """Where the innermost of the student's functions on this thread's stack is now: "cell 5, line 12"; "" if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        if is_students(frame.f_code.co_filename):
            return f"{label(frame.f_code.co_filename)}, line {frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    return ""


def label(filename: str) -> str:
    """A file's name as the student knows it: "cell 5" for a cell, else the base name."""
    return here.files.get(filename) or os.path.basename(filename)
