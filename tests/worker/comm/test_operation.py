"""The life of an operation, without processes: what is recorded, when, and that it is recorded once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from labkit.recording.ring_buffer import RING_BYTES, RingReader, RingWriter
from labkit.recording.schema import Pending, Span
from labkit.tracing.trace import Trace, from_records
from labkit.worker.comm import operation as module
from labkit.worker.comm.backward import Backwards, in_backward
from labkit.worker.comm.futures import Futures
from labkit.worker.comm.operation import Operation, blocked
from labkit.worker.comm.work import Attendant, RecordedWork


class Rank:
    """A ring, its two ends, and a clock that the test advances."""

    def __init__(self) -> None:
        memory = bytearray(RING_BYTES)
        self.ring, self._reader = RingWriter(memory), RingReader(memory)
        self.now_ns = 0

    def issue(self, now_ns: int, name: str = "all_reduce", **details: Any) -> Operation:
        self.now_ns = now_ns
        return Operation(self.ring, name, now_ns, **details)

    def at(self, now_ns: int, happens: Callable[..., object], *args: object) -> None:
        self.now_ns = now_ns
        happens(*args)

    def pending(self) -> list[Pending]:
        return self._reader.pending()

    def trace(self) -> Trace:
        return from_records([self._reader.read()], [self._reader.names()], ["rank 0"])

    def written(self) -> list[Span]:
        return list(self.trace())


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    rank = Rank()
    monkeypatch.setattr(module, "clock", lambda: rank.now_ns)
    return rank


def times(span: Span) -> tuple[int, int, int, int]:
    return span.start_ns, span.wait_start_ns, span.wait_end_ns, span.end_ns


def test_waited_for_at_once(rank: Rank) -> None:
    operation = rank.issue(10, nbytes=8, peer=3, group="world", match=7, line="cell 5, line 2")
    (pending,) = rank.pending()
    assert (pending.name, pending.start_ns, pending.wait_start_ns, pending.nbytes) == ("all_reduce", 10, 0, 8)
    rank.at(20, operation.wait_begins)
    assert rank.pending()[0].wait_start_ns == 20
    rank.at(50, operation.wait_ends)
    assert rank.pending() == []
    (span,) = rank.written()
    assert times(span) == (10, 20, 50, 50)
    assert (span.nbytes, span.peer, span.group, span.match, span.line, span.done) == (8, 3, "world", 7, "cell 5, line 2", True)


IN_TORCH = partial(Operation.wait_begins, in_torch=True)
# What happens, and when; and the times that are recorded.
LIVES: dict[str, tuple[list[tuple[int, Callable[[Operation], object]]], list[tuple[int, int, int, int]]]] = {
    "completed while it is waited for": (
        [(20, Operation.wait_begins), (40, Operation.completed), (45, Operation.wait_ends)],
        [(10, 20, 45, 40)],
    ),
    "completed before anybody waits": (
        [(30, Operation.completed), (60, Operation.wait_begins), (61, Operation.wait_ends), (70, Operation.completed)],
        [(10, 0, 0, 30)],
    ),
    "completed as the wait begins": ([(25, IN_TORCH), (25, Operation.completed)], [(10, 0, 0, 25)]),
    "waited for in C++": ([(25, IN_TORCH), (40, Operation.completed)], [(10, 25, 40, 40)]),
    "a second wait changes nothing": (
        [(20, Operation.wait_begins), (30, Operation.wait_begins), (35, IN_TORCH), (40, Operation.wait_ends)],
        [(10, 20, 40, 40)],
    ),
    "held by no link": ([(20, Operation.wait_begins), (30, Operation.hold), (50, Operation.wait_ends)], [(10, 20, 50, 50)]),
    "failed": ([(20, Operation.wait_begins), (40, Operation.failed)], [(10, 20, 40, 40)]),
    "withdrawn": ([(15, Operation.withdrawn), (20, Operation.completed)], []),
}


@pytest.mark.parametrize("life", LIVES)
def test_the_life_of_an_operation(rank: Rank, life: str) -> None:
    events, recorded = LIVES[life]
    operation = rank.issue(10)
    for now_ns, happens in events:
        rank.at(now_ns, happens, operation)
        if happens is Operation.completed and operation.waited_for:
            assert rank.written() == [], "the waiter records it when it continues"
        if happens is IN_TORCH and recorded[0][1] != 20:
            assert rank.pending()[0].wait_start_ns == now_ns
    written = rank.written()
    assert [times(span) for span in written] == recorded
    assert all(span.done is (life != "failed") for span in written)
    assert all((s.backend_ns, s.issue_delay_ns, s.wait_delay_ns) == (0, 0, 0) for s in written), "no link and no delays"
    assert operation.done
    assert rank.pending() == []


def on_a_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def waits(trace: Trace) -> list[tuple[str, int, int]]:
    """The waits for what was complete already: group, number and time."""
    return [(trace.columns.names[group], match, time_ns) for _, group, match, time_ns in trace.waits.tolist()]


@pytest.mark.parametrize("begins", [Operation.wait_begins, IN_TORCH])
def test_a_wait_for_a_completed_operation(rank: Rank, begins: Callable[[Operation], None]) -> None:
    operation = rank.issue(10, group="world", match=7)
    rank.at(30, operation.completed)
    rank.at(60, begins, operation)
    rank.at(70, begins, operation)
    trace = rank.trace()
    assert waits(trace) == [("world", 7, 60), ("world", 7, 70)]
    assert [times(s) for s in trace] == [(10, 0, 0, 30)]


@pytest.mark.parametrize("group", ["world", ""])
def test_waits_that_are_not_recorded_by_themselves(rank: Rank, group: str) -> None:
    """A wait that lasts is part of its operation; for an operation without a group, nobody could tell for which."""
    operation = rank.issue(10, group=group, match=7)
    if group:
        rank.at(20, operation.wait_begins)
        rank.at(25, operation.wait_begins)
    rank.at(30, operation.completed)
    rank.at(31, operation.wait_ends if group else operation.wait_begins)
    assert len(rank.trace().waits) == 0


def test_whose_waits_are_recorded(rank: Rank) -> None:
    """Those of the main thread, and of threads that run its backward pass, but not those of other threads."""
    operation = rank.issue(10, group="world", match=7)
    rank.at(30, operation.completed)

    def serve() -> None:
        rank.ring.serving_threads.add(threading.get_ident())
        rank.at(70, operation.wait_begins)

    on_a_thread(lambda: rank.at(40, operation.wait_begins))
    rank.at(50, operation.wait_begins)
    rank.ring.in_backward = lambda: True
    on_a_thread(lambda: rank.at(60, operation.wait_begins))
    on_a_thread(serve)
    assert waits(rank.trace()) == [("world", 7, 50), ("world", 7, 60)]


def test_a_future_of_two_operations_of_which_one_is_complete(rank: Rank) -> None:
    futures, both = Futures(), torch.futures.Future()
    operations = [rank.issue(10, group="world", match=number) for number in (1, 2)]
    futures.tie(both, operations)
    rank.at(20, operations[0].completed)

    def ends(_: object) -> None:
        rank.at(50, operations[1].completed)
        both.set_result(None)

    rank.now_ns = 40
    futures._wait(ends, both)
    trace = rank.trace()
    assert waits(trace) == [("world", 1, 40)]
    assert [times(s) for s in trace] == [(10, 0, 0, 20), (10, 40, 50, 50)]
    rank.now_ns = 70
    futures._wait(lambda _: None, both)
    assert waits(rank.trace()) == [("world", 1, 70), ("world", 2, 70)]


def test_a_wait_for_a_future_that_completes_before_its_callback_is_called(rank: Rank) -> None:
    futures, future = Futures(), torch.futures.Future()
    operation = rank.issue(10, group="world", match=1)
    futures.tie(future, [operation])
    future.set_result(None)
    rank.now_ns = 30
    futures._wait(lambda _: None, future)
    rank.at(31, operation.on_completion, future)
    trace = rank.trace()
    assert waits(trace) == [("world", 1, 30)]
    assert [times(s) for s in trace] == [(10, 0, 0, 31)]


@pytest.mark.parametrize("first", ["the callback", "the waiting thread"])
@pytest.mark.parametrize("fail", [True, False])
def test_a_wait_for_a_future_that_fails(rank: Rank, first: str, fail: bool) -> None:
    """`fail=False`: a function of the program has raised the error, after the operation."""
    futures, future = Futures(), torch.futures.Future()
    operation = rank.issue(10, group="world", match=1)
    futures.tie(future, [operation], fail=fail)
    reported = torch.futures.Future() if not fail else future

    def ends(waited: Any) -> None:
        future.set_exception(RuntimeError("connection closed"))
        if reported is not future:
            reported.set_result(None)
        rank.now_ns = 50
        if first == "the callback":
            operation.on_completion(reported)
        waited.value()

    rank.now_ns = 40
    with pytest.raises(RuntimeError, match="connection closed"):
        futures._wait(ends, future)
    rank.at(60, operation.on_completion, reported)
    assert [(*times(s), s.done) for s in rank.written()] == [(10, 40, 50, 50, not fail)]


class Held:
    """A booking on an emulated link. Sleeping until its end moves the rank's clock."""

    def __init__(self, rank: Rank, due_ns: int, error: RuntimeError | None = None) -> None:
        self._rank, self.due_ns, self.error = rank, due_ns, error

    def hold(self) -> None:
        self._rank.now_ns = max(self._rank.now_ns, self.due_ns)

    def then(self, action: Callable[[], None]) -> None:
        self.hold()
        action()


def reported(operation: Operation) -> None:
    future: Any = torch.futures.Future()
    future.set_result(None)
    operation.on_completion(future)


@pytest.mark.parametrize(
    "events",
    [
        pytest.param([(20, Operation.wait_begins), (30, Operation.hold), (50, Operation.wait_ends)], id="waited for"),
        pytest.param([(30, reported)], id="reported"),
        pytest.param([(30, Operation.backend_completed), (40, Operation.hold), (50, Operation.completed)], id="polled before"),
    ],
)
def test_the_first_end_of_the_backend_is_recorded_and_the_link_holds_it(
    rank: Rank, events: list[tuple[int, Callable[[Operation], object]]]
) -> None:
    operation = rank.issue(10)
    operation.booking = Held(rank, 50)  # type: ignore[assignment]
    for now_ns, happens in events:
        rank.at(now_ns, happens, operation)
    assert [(span.backend_ns, span.end_ns) for span in rank.written()] == [(30, 50)]


def test_the_backend_completes_a_batch_before_the_link_holds_any_of_it(rank: Rank) -> None:
    operations = [rank.issue(10), rank.issue(10)]
    for operation, due_ns in zip(operations, (50, 80), strict=True):
        operation.booking = Held(rank, due_ns)  # type: ignore[assignment]
    rank.now_ns = 20
    with blocked(*operations):
        rank.now_ns = 30
    assert [(span.backend_ns, span.end_ns) for span in rank.written()] == [(30, 80), (30, 80)]


@pytest.mark.parametrize("end", ["waits", "completed while it waits in C++", "completed as it waits", "nobody waits"])
def test_the_delays_of_the_threads_that_issue_and_wait(rank: Rank, end: str) -> None:
    main = threading.get_ident()
    rank.ring.thread_delay = lambda: lambda: 100
    issued: list[Operation] = []
    on_a_thread(lambda: issued.append(rank.issue(10, group="world", match=1)))
    (operation,) = issued
    rank.ring.thread_delay = lambda: (lambda: 150 + rank.now_ns) if threading.get_ident() == main else (lambda: 9999)
    if end == "waits":
        rank.at(20, operation.wait_begins)
        rank.at(50, operation.wait_ends)
    elif end != "nobody waits":
        rank.at(20, partial(operation.wait_begins, in_torch=True))
    rank.now_ns = 20 if end == "completed as it waits" else 50
    on_a_thread(operation.completed)
    (span,) = rank.written()
    waits = end in ("waits", "completed while it waits in C++")
    assert (span.issue_delay_ns, span.wait_delay_ns) == (100, 200 if waits else 0)
    assert bool(span.wait_start_ns) is waits


def test_the_thread_that_issues_an_operation(rank: Rank) -> None:
    def serve() -> None:
        rank.ring.serving_threads.add(threading.get_ident())
        rank.issue(10, "issued by a call").completed()
        waited_for = rank.issue(10, "waited for by a call")
        rank.at(20, waited_for.wait_begins)
        rank.at(30, waited_for.wait_ends)

    rank.issue(10, "main").completed()
    on_a_thread(lambda: rank.issue(10, "own").completed())
    on_a_thread(serve)
    assert {s.name: (s.own_thread, s.served) for s in rank.written()} == {
        "main": (False, False), "own": (True, False), "issued by a call": (False, False), "waited for by a call": (False, True),
    }  # fmt: skip


def test_a_completed_operation_does_not_touch_the_slot_of_the_next(rank: Rank) -> None:
    first = rank.issue(10)
    rank.at(20, first.completed)
    for _ in range(63):
        rank.issue(21).withdrawn()
    second = rank.issue(30, "barrier")  # in the slot of the first one
    first.end_ns = 0
    rank.at(40, first.wait_begins)
    assert [(p.name, p.wait_start_ns) for p in rank.pending()] == [("barrier", 0)]
    second.withdrawn()


def test_a_batch_ends_as_one(rank: Rank) -> None:
    operations = [rank.issue(10, "send"), rank.issue(11, "recv")]
    rank.now_ns = 20
    with blocked(*operations):
        rank.now_ns = 30
    assert [(s.name, *times(s)) for s in rank.written()] == [("send", 10, 20, 30, 30), ("recv", 11, 20, 30, 30)]
    with pytest.raises(ValueError, match="no"), blocked(rank.issue(40), rank.issue(40)):
        raise ValueError("no")
    assert [s.done for s in rank.written()] == [False, False]


@pytest.mark.parametrize("due_ns", [0, 80])
def test_a_batch_is_completed_when_the_link_holds_none_of_it(rank: Rank, due_ns: int) -> None:
    class Done:
        def is_completed(self) -> bool:
            return True

    operations = [rank.issue(60), rank.issue(60)]
    if due_ns:
        operations[1].booking = Held(rank, due_ns)  # type: ignore[assignment]
    work = RecordedWork(Done(), operations, Futures())
    for now_ns in (70, 90):
        rank.now_ns = now_ns
        assert work.is_completed() is (now_ns > due_ns)
    end_ns = 90 if due_ns else 70
    assert [s.end_ns for s in rank.written()] == [end_ns, end_ns]


class At:
    """A GPU event that has happened."""

    def __init__(self, ns: int | None) -> None:
        self._ns = ns

    def time_ns(self) -> int | None:
        return self._ns


def test_waiting_begins_after_the_gpu_has_computed_the_data(rank: Rank) -> None:
    operation = rank.issue(10, ready=At(35))
    rank.at(20, operation.wait_begins)
    rank.at(50, operation.wait_ends)
    rank.issue(60, ready=At(None)).failed()  # it failed before the GPU reached it
    late, failed = rank.written()
    assert times(late) == (35, 35, 50, 50)
    assert late.device == "cuda"
    assert failed.start_ns == 60


def futures_of(rank: Rank) -> tuple[Futures, Any, Operation]:
    """A future, the operation behind it, and its registry."""
    futures, future = Futures(), torch.futures.Future()  # type: ignore[var-annotated]
    operation = rank.issue(10)
    futures.tie(future, [operation])
    futures.tell(future, operation.on_completion)
    return futures, future, operation


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores torch's own futures after the test."""
    for name in ("wait", "then"):
        monkeypatch.setattr(torch._C.Future, name, getattr(torch._C.Future, name))
    monkeypatch.setattr(torch._C, "_collect_all", torch._C._collect_all)


@pytest.mark.parametrize("fails", [False, True])
def test_a_future_reports_to_its_operation(rank: Rank, fails: bool) -> None:
    _, future, _ = futures_of(rank)
    rank.at(30, future.set_exception if fails else future.set_result, ValueError("no"))
    (span,) = rank.written()
    assert (times(span), span.done) == ((10, 0, 0, 30), not fails)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("made", ["itself", "then", "collect_all", "wait_all", "set by a callback"])
def test_waiting_for_a_derived_future(rank: Rank, made: str) -> None:
    futures, future, operation = futures_of(rank)
    futures.install()
    futures.install()
    assert not hasattr(torch._C.Future.wait.__labkit_original__, "__labkit_original__")  # doing it twice has no further effect
    other: Any = torch.futures.Future()

    def hand_on(done: Any) -> None:
        other.set_result(done.value())

    waited: Any = future
    if made == "then":
        waited = future.then(lambda f: f.value()).then(lambda f: f.value())
    elif made == "set by a callback":
        future.then(hand_on)
        waited = other
    elif made == "collect_all":
        waited = torch.futures.collect_all([future])

    rank.now_ns = 20
    begun = []
    # The wait itself would block: let the future complete at its start.
    real_begin = Operation.wait_begins

    def begin(self: Operation) -> None:
        real_begin(self)
        begun.append(rank.pending()[0].wait_start_ns)
        rank.now_ns = 40
        future.set_result(5)

    # If nothing begins, this wait in C++ would never end.
    rescue = threading.Timer(60.0, lambda: future.done() or future.set_result(5))
    rescue.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Operation, "wait_begins", begin)
        if made == "wait_all":
            assert torch.futures.wait_all([future]) == [5]
        else:
            waited.wait()
    rescue.cancel()
    assert begun == [20]
    assert operation.done
    assert [times(s) for s in rank.written()] == [(10, 20, 40, 40)]


def test_a_helper_thread_waits_for_unwatched_operations() -> None:
    class Message:
        def __init__(self) -> None:
            self.start_ns, self.claims, self.attended, self.gave_up = 0, 0, threading.Event(), threading.Event()

        def claim(self) -> bool:
            self.claims += 1
            return self.claims == 1

        def attend(self) -> None:
            self.attended.set()
            assert self.gave_up.wait(60)

        def give_up(self) -> None:
            self.gave_up.set()

    attendant = Attendant()
    with pytest.MonkeyPatch.context() as patch:  # as at the end of a script in Python 3.12

        def fail(_: threading.Thread) -> None:
            raise RuntimeError("can't create new thread at interpreter shutdown")

        patch.setattr(threading.Thread, "start", fail)
        attendant.watch(unattended := Message())
    assert not unattended.claims
    messages = [Message() for _ in range(3)]
    assert messages[1].claim()  # the student has begun to wait for this one
    for message in messages:
        attendant.watch(message)
    assert messages[0].attended.wait(60)
    assert messages[2].attended.wait(60)  # although the first is still under way
    attendant._let_go()  # as at the end of the process
    assert messages[0].gave_up.is_set()
    assert not messages[1].attended.is_set()
    late = Message()
    attendant.watch(late)
    while not attendant._messages.empty():
        pass
    assert not late.attended.is_set()


def test_operations_completed_in_a_backward_pass_end_there(rank: Rank) -> None:
    """The autograd engine is real. A callback that completes the future takes the place of
    DistributedDataParallel's."""
    backwards, done, open_ = Backwards(), rank.issue(10), rank.issue(10)
    early = rank.issue(10, group="world", match=1)
    for operation in (early, done, open_):
        operation.future, operation.has_future = torch.futures.Future(), True

    def reducer() -> None:
        rank.at(30, done.future.set_result, 0)

    def bucket(gradient: torch.Tensor) -> None:
        rank.now_ns = 20
        for operation in (early, done, open_):
            backwards.issued(in_backward(), operation)
        early.completed()
        torch.autograd.Variable._execution_engine.queue_callback(reducer)

    x = torch.ones(1, requires_grad=True)
    x.register_hook(bucket)
    x.backward()
    rank.at(90, done.completed)  # as it is reported
    trace = rank.trace()
    assert [times(span) for span in trace] == [(10, 0, 0, 20), (10, 20, 30, 30)]
    assert waits(trace) == [("world", 1, 20)]
    assert not open_.done, "a future that is not complete is not waited for by a pass that has ended"
    rank.at(95, open_.completed)
    assert [times(span) for span in rank.written()] == [(10, 20, 95, 95)]
