"""What a rank records: spans, steps and scalars, with a simulated clock; and nothing outside a group."""

import bisect
import copy
import importlib
import inspect
import mmap
import os
import pickle
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import numpy as np
import pytest

import labkit as lab
from labkit.ipc.ranks_cell import cell_filename
from labkit.recording.events import Scalar
from labkit.recording.ring_buffer import RING_BYTES, RingReader, RingWriter
from labkit.recording.schema import Span
from labkit.tracing.perfetto import write_events
from labkit.tracing.trace import Trace, from_records

recording = importlib.import_module("labkit.recording.record")  # `labkit.record` is the function
here = recording.here


class Clock:
    """Returns the time that the test set; each reading takes one nanosecond."""

    def __init__(self) -> None:
        self.ns = 1000

    def __call__(self) -> int:
        self.ns += 1
        return self.ns

    def sleep(self, ns: int) -> None:
        self.ns += ns


class Rank:
    """This process as a rank, and its records."""

    def __init__(self) -> None:
        memory = mmap.mmap(-1, RING_BYTES)
        self.reader = RingReader(memory)
        here.start(recording.Recorder(RingWriter(memory)))

    def trace(self) -> Trace:
        records = self.reader.read()
        return from_records([records], [self.reader.names()], ["rank 0"])

    def spans(self, kind: str = "compute") -> list[tuple[str, int, int]]:
        """Name, start and end of each, in the order in which they ended."""
        return sorted(((s.name, s.start_ns, s.end_ns) for s in self.trace().filter(kind=kind)), key=lambda span: span[2])


def on_a_thread(function: Callable[..., None], *arguments: Any) -> None:
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    thread.join()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(recording, "clock", clock)
    return clock


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The file "<cell>" is cell 5 of the notebook."""
    monkeypatch.setitem(here.files, "<cell>", "cell 5")
    recording.is_students.cache_clear()
    yield
    recording.is_students.cache_clear()


@pytest.fixture
def rank(clock: Clock) -> Iterator[Rank]:
    yield Rank()
    here.start(None)


def test_a_span_lasts_from_its_start_to_its_end(rank: Rank, clock: Clock) -> None:
    with lab.span("forward"):
        clock.sleep(100)
    assert rank.spans() == [("forward", 1001, 1102)]


def test_spans_nest(rank: Rank, clock: Clock) -> None:
    with lab.span("step"):
        with lab.span("forward"):
            clock.sleep(10)
        with lab.span("backward"):
            clock.sleep(20)
    assert rank.spans() == [("forward", 1002, 1013), ("backward", 1014, 1035), ("step", 1001, 1036)]


def test_a_span_may_contain_one_of_its_own_name(rank: Rank, clock: Clock) -> None:
    @lab.span("fib")
    def fib(n: int) -> int:
        clock.sleep(10)
        return n if n < 2 else fib(n - 1) + fib(n - 2)

    assert fib(3) == 2
    spans = rank.spans()
    assert len(spans) == 5
    assert spans[-1] == ("fib", 1001, clock.ns)
    assert [end - start for _, start, end in spans] == [11, 11, 35, 11, 59]


@pytest.mark.parametrize("kind", ["compute", "communication"])
def test_an_exception_ends_the_span_and_propagates(rank: Rank, clock: Clock, kind: str) -> None:
    def outer() -> None:
        with lab.span("outer", kind), lab.span("inner", kind):
            clock.sleep(10)
            raise KeyError("loss")

    for _ in range(2):
        with pytest.raises(KeyError, match="loss"):
            outer()
    assert [name for name, _, _ in rank.spans(kind)] == ["inner", "outer"] * 2
    assert rank.reader.pending() == []


def test_the_same_name_in_two_kinds(rank: Rank, clock: Clock) -> None:
    with lab.span("exchange"), lab.span("exchange", "communication"):
        clock.sleep(5)
    assert len(rank.trace().filter(name="exchange")) == 2


def test_a_communication_span_is_pending_and_blocks_the_rank(rank: Rank, clock: Clock) -> None:
    with lab.span("all_reduce", kind="communication"):
        clock.sleep(100)
        (pending,) = rank.reader.pending()
        line = inspect.currentframe().f_lineno - 3  # type: ignore[union-attr]
    assert (pending.name, pending.start_ns, pending.wait_start_ns) == ("all_reduce", 1001, 1001)
    assert pending.line == f"test_record.py, line {line}"
    assert rank.reader.pending() == []
    (span,) = rank.trace()
    assert span == Span(
        0, "all_reduce", "communication", 1001, 1102, wait_start_ns=1001, wait_end_ns=1102, line=f"test_record.py, line {line}"
    )


def test_a_decorated_function_keeps_its_name_and_signature(rank: Rank, clock: Clock) -> None:
    @lab.span("forward")
    def forward(x: int, *, scale: float = 2.0) -> float:
        """Make it larger."""
        clock.sleep(7)
        return x * scale

    assert forward(3, scale=1.5) == 4.5
    assert (forward.__name__, forward.__doc__) == ("forward", "Make it larger.")
    assert str(inspect.signature(forward)) == "(x: int, *, scale: float = 2.0) -> float"
    assert rank.spans() == [("forward", 1001, 1009)]


def test_a_method_can_be_a_communication_span(rank: Rank) -> None:
    class Net:
        @lab.span("upload", kind="communication")
        def __call__(self, x: int) -> int:
            assert [p.name for p in rank.reader.pending()] == ["upload"]
            return x + 1

    assert Net()(1) == 2
    assert [name for name, _, _ in rank.spans("communication")] == ["upload"]


def test_a_function_decorated_in_the_notebook_is_timed_in_a_rank(clock: Clock) -> None:
    @lab.span("forward")
    def forward() -> int:
        return 1

    sent = cloudpickle.dumps(forward)
    rank = Rank()
    try:
        assert forward() == 1
        assert cloudpickle.loads(sent)() == 1
        assert [name for name, _, _ in rank.spans()] == ["forward", "forward"]
    finally:
        here.start(None)
    assert forward() == 1


@pytest.mark.parametrize("carry", [copy.deepcopy, lambda span: pickle.loads(pickle.dumps(span))], ids=["copied", "pickled"])
def test_a_span_in_a_variable_records_in_the_rank_that_receives_it(carry: Callable[[Any], Any], clock: Clock) -> None:
    outside = lab.span("forward")
    rank = Rank()
    try:
        arrived = carry(outside)
        with arrived, carry(arrived):
            clock.sleep(10)
        assert [name for name, _, _ in rank.spans()] == ["forward", "forward"]
    finally:
        here.start(None)
    with carry(arrived):
        pass
    assert rank.spans() == []


def test_threads_use_the_same_name_at_the_same_time(clock: Clock) -> None:
    rank = Rank()
    entered, may_leave = threading.Event(), threading.Event()

    def slow() -> None:
        with lab.span("serve"):
            entered.set()
            assert may_leave.wait(60)

    try:
        worker = threading.Thread(target=slow)
        worker.start()
        assert entered.wait(60)
        clock.sleep(100)
        with lab.span("serve"):  # begins second and ends last, so that the two do not nest
            clock.sleep(10)
            may_leave.set()
            worker.join()
        assert rank.spans() == [("serve", 1001, 1113), ("serve", 1102, 1114)]
    finally:
        may_leave.set()
        here.start(None)


def test_what_runs_on_which_thread(rank: Rank) -> None:
    assert here.recorder is not None
    ring = here.recorder.ring

    def work() -> None:
        with lab.span("compute"), lab.span("a file", kind="communication"):
            pass
        for _ in lab.steps([0]):
            pass

    def serve() -> None:
        ring.serving_threads.add(threading.get_ident())
        work()

    def flags() -> set[tuple[bool, bool]]:
        spans = rank.trace().spans
        assert {s.kind for s in spans} == {"compute", "communication", "step"}
        return {(s.own_thread, s.served) for s in spans}

    work()
    assert flags() == {(False, False)}
    on_a_thread(work)
    assert flags() == {(True, False)}
    on_a_thread(serve)
    assert flags() == {(False, True)}
    ring.serving_threads.clear()
    ring.in_backward = lambda: True  # on a thread of torch's, while the main thread waits
    on_a_thread(work)
    assert flags() == {(False, False)}


def test_threads_that_switch_at_any_moment_record_their_own_times() -> None:
    rank = Rank()
    seen: list[tuple[int, int, int, int]] = []  # of each span: before and after its start, before and after its end

    def work() -> None:
        now = time.perf_counter_ns
        for number in range(300):
            outer = now()
            with lab.span("shared"):
                begun = now()
                if number % 3 == 0:  # inside one of its own name
                    before = now()
                    with lab.span("shared"):
                        between = now(), now()
                    seen.append((before, *between, now()))
                end = now()
            seen.append((outer, begun, end, now()))

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval_s)
        here.start(None)
    recorded = sorted((start_ns, end_ns) for _, start_ns, end_ns in rank.spans())
    assert len(recorded) == len(seen) == 1600
    for before, begun, end, after in seen:
        here_begun = recorded[bisect.bisect_left(recorded, (before, 0)) : bisect.bisect_right(recorded, (begun, after))]
        assert any(end <= end_ns <= after for _, end_ns in here_begun), "a span has another thread's times"


@pytest.mark.parametrize("kind", ["compute", "communication"])
def test_a_span_ended_twice_loses_no_other_record(rank: Rank, clock: Clock, kind: str) -> None:
    misused = lab.span("forward", kind)
    misused.__enter__()
    misused.__exit__(None, None, None)
    with pytest.warns(RuntimeWarning, match=r"span\('forward'\) was ended by a thread in which it was not open"):
        misused.__exit__(None, None, None)
    with lab.span("backward", kind):
        clock.sleep(10)
    assert [(name, end - start) for name, start, end in rank.spans(kind)] == [("forward", 1), ("backward", 11)]


def test_a_span_ended_by_another_thread_does_not_end_that_threads_span(rank: Rank, clock: Clock) -> None:
    begun_here = lab.span("forward")
    begun_here.__enter__()

    def end_it() -> None:
        with lab.span("forward"):
            clock.sleep(10)
        with pytest.warns(RuntimeWarning, match="was ended by a thread in which it was not open"):
            begun_here.__exit__(None, None, None)

    on_a_thread(end_it)
    begun_here.__exit__(None, None, None)
    assert rank.spans() == [("forward", 1002, 1013), ("forward", 1001, 1015)]


def test_spans_ended_in_another_order_keep_their_own_times(rank: Rank) -> None:
    first, second = lab.span("first"), lab.span("second")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert rank.spans() == [("first", 1001, 1003), ("second", 1002, 1004)]


def test_invalid_names_and_kinds_are_refused(rank: Rank) -> None:
    for name in (3, [1], {"forward": 1}, b"x", None):
        with pytest.raises(TypeError, match=rf"span\({re.escape(repr(name))}\): expected a name, as in span\('forward'\)"):
            lab.span(name)  # type: ignore[arg-type]
    for kind in (["compute"], "comm", "step"):
        says = rf"span\('x', kind={re.escape(repr(kind))}\): expected 'compute' or 'communication'"
        with pytest.raises(ValueError, match=says):
            lab.span("x", kind)  # type: ignore[arg-type]


def test_span_objects_are_cached_up_to_a_limit(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lab.span("forward") is lab.span("forward", kind="compute")
    assert lab.span("forward", "communication") is lab.span("forward", "communication")
    assert lab.span("forward", "communication") is not lab.span("forward")
    monkeypatch.setattr(recording, "MOST_SPANS", 10)
    for number in range(1000):
        lab.span(f"forward {number}")
        lab.span(f"forward {number}", "communication")
    assert len(here.spans) <= 10
    assert len(here.communication_spans) <= 10


def test_decorating_what_cannot_be_timed_is_refused() -> None:
    with pytest.raises(TypeError, match="expected a name"):

        @lab.span  # type: ignore[arg-type]
        def forward() -> None: ...

    with pytest.raises(TypeError, match=r"@span\('x'\) stands above 3: expected a function"):
        lab.span("x")(3)
    with pytest.raises(TypeError, match="expected a function"):

        @lab.span("x")
        class Net: ...

    with pytest.raises(TypeError, match="'batches', which yields or awaits, would time only its creation"):

        @lab.span("data")
        def batches() -> Iterator[int]:
            yield 1


def test_steps_are_recorded_one_after_the_other(rank: Rank, clock: Clock) -> None:
    seen = []
    for batch in lab.steps([10, 20, 30]):
        clock.sleep(batch)
        seen.append(batch)
    trace = rank.trace()
    assert seen == [10, 20, 30]
    assert [(s.name, s.start_ns, s.end_ns) for s in trace.filter(kind="step")] == [
        ("step", 1002, 1013), ("step", 1013, 1034), ("step", 1034, 1065),
    ]  # fmt: skip
    assert trace.scalars == (Scalar(0, "steps in all", 1001, 3.0),)
    assert trace.step_bounds().tolist() == [[1002, 1013], [1013, 1034], [1034, 1065]]


def test_a_step_includes_waiting_for_its_batch(rank: Rank, clock: Clock) -> None:
    def loader() -> Iterator[int]:
        for batch in range(2):
            clock.sleep(100)
            yield batch

    for _ in lab.steps(loader()):
        clock.sleep(1)
    assert [end - start for _, start, end in rank.spans("step")] == [102, 102]


def test_steps_without_a_length(rank: Rank) -> None:
    steps = lab.steps(i for i in range(2))
    with pytest.raises(TypeError, match=r"has no len\(\)"):
        len(steps)  # type: ignore[arg-type]
    assert list(steps) == [0, 1]
    trace = rank.trace()
    assert len(trace.filter(kind="step")) == 2
    assert trace.scalars == ()


def test_steps_can_be_iterated_in_every_epoch(rank: Rank) -> None:
    steps = lab.steps(range(3))
    assert len(steps) == 3  # type: ignore[arg-type]
    assert [list(steps), list(steps)] == [[0, 1, 2], [0, 1, 2]]
    assert len(rank.trace().filter(kind="step")) == 6


def test_a_step_that_the_loop_leaves_is_not_recorded(rank: Rank) -> None:
    for batch in lab.steps(range(5)):
        if batch == 2:
            break
    with pytest.raises(ZeroDivisionError):
        [1 // (1 - batch) for batch in lab.steps(range(5))]
    assert len(rank.spans("step")) == 2 + 1


def test_an_object_with_only_getitem_can_be_iterated(rank: Rank) -> None:
    class Dataset:
        def __getitem__(self, i: int) -> int:
            if i > 1:
                raise IndexError
            return i

    assert list(lab.steps(Dataset())) == [0, 1]  # type: ignore[arg-type]


def test_steps_refuses_a_number(rank: Rank) -> None:
    with pytest.raises(TypeError, match=r"steps\(10\): expected something to loop over"):
        lab.steps(10)  # type: ignore[arg-type]


def test_scalars_become_curves(rank: Rank, clock: Clock) -> None:
    lab.record(loss=0.5, accuracy=1)
    clock.sleep(10)
    lab.record(loss=np.float32(0.25))
    assert rank.trace().scalars == (
        Scalar(0, "loss", 1001, 0.5), Scalar(0, "accuracy", 1001, 1.0), Scalar(0, "loss", 1012, 0.25),
    )  # fmt: skip


def test_a_tensor_with_a_gradient_is_a_number_too(rank: Rank) -> None:
    torch = pytest.importorskip("torch")
    lab.record(loss=torch.tensor([0.5], requires_grad=True).sum())
    assert [s.value for s in rank.trace().scalars] == [0.5]
    with pytest.raises(TypeError, match=r"record\(loss=tensor.*expected a number, or a tensor with one element"):
        lab.record(loss=torch.zeros(2))
    with pytest.raises(RuntimeError, match="meta"):  # torch's own message, since an error of a GPU may first show here
        lab.record(loss=torch.zeros(1, device="meta"))


@pytest.mark.parametrize(
    "value",
    [None, "low", "1", b"1", [1.0], np.zeros(2), 1j],
    ids=["None", "text", "digits", "bytes", "list", "array", "complex"],
)
def test_values_that_are_not_numbers_are_refused(rank: Rank, value: Any) -> None:
    with pytest.raises(TypeError, match=r"record\(loss=.*\): expected a number, or a tensor with one element"):
        lab.record(loss=value)
    assert rank.trace().scalars == ()


def test_outside_a_group_nothing_is_recorded() -> None:
    batches = [1, 2]
    assert lab.steps(batches) is batches
    lab.record(loss=object())  # type: ignore[arg-type]  # not even looked at

    @lab.span("f")
    def double(x: int) -> int:
        return 2 * x

    with lab.span("forward"), lab.span("send", kind="communication"):
        assert double(2) == 4
    with pytest.raises(KeyError), lab.span("forward"):
        raise KeyError
    assert lab.span("forward") is lab.span("forward"), "and nothing is made for it"


def test_a_call_of_the_students_function_is_recorded(rank: Rank) -> None:
    here.recorder.call("train", 5, 9)
    assert rank.spans("call") == [("train", 5, 9)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")  # from Python 3.12
@pytest.mark.processes
def test_a_worker_that_a_rank_forks_records_nothing(rank: Rank) -> None:
    with lab.span("before"):
        pass
    child = os.fork()
    if child == 0:
        try:
            with lab.span("in the worker"):
                lab.record(loss=1.0)
        finally:
            os._exit(0 if here.recorder is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with lab.span("after"):
        pass
    assert [name for name, _, _ in rank.spans()] == ["before", "after"]


def test_the_students_code_is_recognised_by_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    students = recording.is_students
    assert students(__file__)
    assert students("<stdin>")
    assert students(cell_filename(3)), "a cell with %%ranks"
    assert students("/home/ada/lesson/train.py")
    assert not students(recording.__file__)
    assert not students(threading.__file__)
    assert not students(np.__file__)
    assert not students("<frozen importlib._bootstrap>")
    assert not students("<string>"), "what dataclasses and namedtuples generate"
    monkeypatch.setitem(here.files, "<cell>", "cell 5")
    students.cache_clear()
    assert students("<cell>")
    assert recording.label("<cell>") == "cell 5"
    assert recording.label("/home/ada/lesson/train.py") == "train.py"
    students.cache_clear()


def in_file(filename: str, source: str) -> dict[str, Any]:
    """What a piece of source defines when it is in that file."""
    space: dict[str, Any] = {}
    exec(compile(source, filename, "exec"), space)
    return space


@pytest.mark.usefixtures("cell")
def test_a_line_is_the_students_innermost_one() -> None:
    library = in_file(threading.__file__, "def call(g):\n    return g()\n")["call"]
    cell = in_file("<cell>", "def inner(call, g):\n    return call(g)\n\ndef outer(call, g):\n    return inner(call, g)\n")
    assert cell["outer"](library, recording.student_line) == "cell 5, line 2"


CELL = """
def train(span):
    with span('forward'):
        pass
    with span('backward'):
        with span('forward'):
            pass
    optimize = span('optimizer')(lambda: None)
    optimize()
    with span('all_reduce', kind='communication'):
        pass
"""


@pytest.mark.usefixtures("cell", "clock")
def test_a_span_has_the_line_where_its_name_was_first_used(rank: Rank) -> None:
    in_file("<cell>", CELL)["train"](lab.span)
    trace = rank.trace()
    assert [(s.name, s.line) for s in trace] == [
        ("forward", "cell 5, line 3"),
        ("backward", "cell 5, line 5"),
        ("forward", "cell 5, line 3"),
        ("optimizer", "cell 5, line 9"),  # a decorated function: where it was called
        ("all_reduce", "cell 5, line 10"),
    ]
    events = write_events(trace, (), trace.ranks, trace.start_ns)
    assert [e["args"]["line"] for e in events if e["name"] == "backward"] == ["cell 5, line 5"], "Perfetto shows it"


def test_without_the_students_code_on_the_stack_there_is_no_line() -> None:
    lines: list[str] = []
    run = in_file(threading.__file__, "def run(lines, line):\n    lines.append(line())\n")["run"]
    on_a_thread(run, lines, recording.student_line)
    assert lines == [""]


@pytest.mark.processes
def test_importing_it_needs_no_numpy() -> None:
    code = "import sys, labkit.recording.record; print('numpy' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert result.stdout.strip() == "False"
