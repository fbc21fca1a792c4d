"""Remote procedure calls are recorded on both ends, and their results are unchanged."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import comm_rpc_cases as cases
import pytest
import torch
from python_programs import environment, python
from synthetic import chrome

from labkit.group.group import Group
from labkit.group.run import Run
from labkit.plots.bars import style_of
from labkit.plots.flows import flows_of
from labkit.recording.ring_buffer import RING_BYTES, RingWriter
from labkit.recording.schema import Span
from labkit.worker.comm.futures import Futures
from labkit.worker.comm.operation import Operation

# torch's own call in a distributed optimizer; the ranks have the filters of their first run.
pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")]

MASTER, WORKER = 0, 1
X = 1000 * 4  # bytes of the tensor that is sent


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    with Group(["master", "worker"], runtime="rpc") as group:
        yield group


def spans(run: Run, rank: int, kind: str = "communication") -> list[Span]:
    return [span for span in run.trace if span.kind == kind and span.rank == rank]


def ends(run: Run) -> dict[tuple[str, int], list[Span]]:
    """The spans of the two ends of each call that has a number."""
    found: dict[tuple[str, int], list[Span]] = {}
    for span in run.trace:
        if span.kind == "communication" and span.group:
            found.setdefault((span.group, span.match), []).append(span)
    return found


@pytest.fixture(scope="module")
def run(group: Group) -> Run:
    return group["master"].run(cases.calls)


def test_results(run: Run) -> None:
    expected = [3, 4, 1, 2, 6, 6, 2, 1, 4]
    assert [t.unique().tolist() for t in run.results[0]] == [[float(value)] for value in expected]


def test_the_caller(run: Run) -> None:
    calls = spans(run, MASTER)
    assert [s.name for s in calls] == [
        "rpc_async add", "rpc_async add", "rpc_sync add", "rpc_async add", "rpc_async add", "remote add", "to_here",
        "rpc_sync add", "received reply add", "remote mul", "to_here", "rpc_sync add_later",
    ]  # fmt: skip
    assert all(s.peer == WORKER and s.done and s.line.startswith("comm_rpc_cases.py, line") for s in calls)
    # Python functions are pickled with their arguments, torch's are not; `to_here` fetches a tensor.
    pickled = [s.nbytes for s in calls if s.nbytes not in (X, 2 * X)]
    assert len(pickled) == 7
    assert all(X < nbytes < X + 300 for nbytes in pickled)
    assert [s.nbytes for s in calls if s.name in ("to_here", "remote mul", "received reply add")] == [X, X, 2 * X, X]


def test_a_wait_for_a_reply_that_is_there(group: Group) -> None:
    run = group["master"].run(cases.late_waits)
    (call,) = [s for s in spans(run, MASTER) if s.group]
    waits = [(run.trace.columns.names[wait["group"]], wait["match"]) for wait in run.trace.waits]
    assert call.wait_start_ns == 0
    assert waits == [(call.group, call.match)], "a call of torch's own function has no number"


def test_spans_in_a_function_that_is_called(group: Group) -> None:
    run = group["master"].run(cases.call_timed)
    inner = {s.name: (s.served, s.own_thread) for s in run.trace.filter(rank=WORKER)}
    assert inner.items() >= {"inside": (True, False), "a file": (True, False)}.items()
    (outer,) = [s for s in run.trace.filter(rank=MASTER) if s.name == "outside"]
    assert not outer.served


def test_what_a_function_of_torchs_own_replies_is_counted(run: Run) -> None:
    flows = flows_of(run.trace)
    ways = zip(flows.operation, flows.source, flows.destination, flows.nbytes, strict=True)
    assert [way[1:] for way in ways if flows.name[way[0]] == "received reply add"] == [(WORKER, MASTER, X)]


def test_the_callee(run: Run) -> None:
    served = [s.name for s in spans(run, WORKER, "compute")]
    assert served.count("serve add") == 7  # one of them for `add_later`
    assert served.count("serve add_later") == 1
    replies = [s for s in spans(run, WORKER) if s.name.startswith("reply")]
    assert all(X < s.nbytes < X + 300 for s in replies)
    assert [s.peer for s in replies].count(MASTER) == 6
    assert [s.peer for s in replies].count(WORKER) == 1  # `add_later` calls its own worker


def test_both_ends_are_one_operation(run: Run) -> None:
    numbered = ends(run)
    assert len(numbered) == 8  # calls of torch's own functions, which C++ runs, have no number
    for both in numbered.values():
        call, answer = sorted(both, key=lambda s: s.name.startswith(("reply", "value")))
        assert answer.name.split()[0] == ("value" if call.name == "to_here" else "reply")
        assert answer.start_ns < call.end_ns
        assert call.start_ns < answer.start_ns or call.name == "to_here", "a value may be there before it is asked for"


def test_a_trace_file_leads_from_each_call_to_what_serves_it_and_back(run: Run) -> None:
    events = chrome(run.trace)
    arrows = [e["name"] for e in events if e["ph"] == "f"]
    replies = [both for both in ends(run).values() if any(s.name.startswith("reply") for s in both)]
    later = [both for both in replies if any(s.name == "reply add_later" for s in both)]  # replies after it was served
    across = [both for both in replies if len({s.rank for s in both}) == 2]
    assert arrows.count("call") == len(across) - len(later) > 0
    assert arrows.count("reply") == len([both for both in ends(run).values() if len({s.rank for s in both}) == 2])


def test_nothing_is_sent_while_the_callee_computes(run: Run) -> None:
    ready = dict(zip(run.trace.spans, run.trace.ready().tolist(), strict=True))
    answers = {key: next(s for s in both if s.name.startswith(("reply", "value"))) for key, both in ends(run).items()}
    calls = [s for s in spans(run, MASTER) if s.group]
    assert {s.name.split()[0] for s in calls} == {"rpc_sync", "rpc_async", "to_here"}
    for call in calls:
        assert ready[call] >= answers[call.group, call.match].start_ns


def test_a_remote_call_is_over_when_it_is_sent(run: Run) -> None:
    remote, fetched = (next(s for s in spans(run, MASTER) if s.name == name) for name in ("remote add", "to_here"))
    assert remote.done
    assert remote.end_ns <= fetched.start_ns


def test_a_forwarded_reference_still_belongs_to_its_call() -> None:
    with Group(["master", "worker", "other"], runtime="rpc") as group:
        run = group["master"].run(cases.passed_on, "other")
    assert run.results[0].unique().tolist() == [2.0]
    call = next(s for s in spans(run, MASTER) if s.name == "remote add")
    fetched = next(s for s in spans(run, 2) if s.name == "to_here")
    value = next(s for s in spans(run, WORKER) if s.name == "value add")
    assert call.group == ""
    assert (fetched.group, fetched.match) == (value.group, value.match)
    assert (call.peer, fetched.peer, value.peer) == (WORKER, WORKER, MASTER)


def test_replies_of_a_shared_future_are_recorded_on_any_thread() -> None:
    with Group(["master", "worker"], runtime="rpc") as group:
        run = group["master"].run(cases.two_callers)
    assert [value.sum() for value in run.results[0]] == [1000, 1000]
    replies = [s for s in spans(run, WORKER) if s.name == "reply batched"]
    assert len({s.match for s in replies}) == 2
    assert all(s.nbytes >= X for s in replies)


def test_a_reply_that_torch_sends_before_the_callback_is_recorded_once() -> None:
    with Group(["master", "worker"], runtime="rpc") as group:
        run = group["master"].run(cases.call_soon)
    assert run.results[0] == 1000
    (reply,) = (s for s in spans(run, WORKER) if s.name == "reply soon")
    assert reply.nbytes >= X


def test_methods_by_reference(group: Group) -> None:
    run = group["master"].run(cases.by_reference)
    shard = cases.Shard()
    *outputs, owner = run.results[0]
    assert owner == "worker"
    assert all(torch.equal(y, shard(torch.ones(2, 8))) for y in outputs)
    assert [s.name for s in spans(run, MASTER)] == [
        "remote Shard", "rpc_async type of an RRef", "rpc_sync Shard.forward", "rpc_async Shard.forward", "remote Shard.forward",
        "to_here",
    ]  # fmt: skip
    by_helper = next(s for s in spans(run, MASTER) if s.name == "rpc_async Shard.forward")
    assert by_helper.wait_start_ns  # although torch's helper made its future
    assert "serve Shard.forward" in [s.name for s in spans(run, WORKER, "compute")]


def test_failures_reach_the_caller(group: Group) -> None:
    run = group["master"].run(cases.failing)
    raised, nobody, refused, later, pending = run.results[0]
    assert raised.startswith("ValueError: ValueError: On WorkerInfo(id=1, name=worker)")
    assert "could not find destination" in nobody
    assert refused.startswith("RuntimeError")
    assert later.startswith("ValueError")
    assert pending == "[]"
    assert [s.name for s in spans(run, MASTER)] == ["rpc_sync fail", "rpc_async fail"]  # the others never were
    assert [s.name for s in spans(run, WORKER)] == ["reply fail"] * 2


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, cases.Descent], ids=["script", "python"])
def test_distributed_training(group: Group, optimizer: Any) -> None:
    run = group["master"].run(cases.train, optimizer, 2)
    for ours, alone in zip(run.results[0], cases.train_alone(2), strict=True):
        assert torch.allclose(ours, alone, atol=1e-6)
    master, worker = spans(run, MASTER), spans(run, WORKER, "compute")
    assert [s.name for s in spans(run, MASTER, "compute")] == ["dist_autograd.backward"] * 2
    assert [s.name for s in master].count("rpc_async optimizer step") == 2
    parts = [s for s in worker if s.name == "backward of Shard.forward"]
    assert len(parts) == 2
    assert all(s.own_thread and not s.served for s in parts)
    # In the end the master waits for the worker's part.
    passes = [s for s in master if s.name == "dist_autograd.backward"]
    gradients = [s for s in spans(run, WORKER) if s.name == "gradients"]
    for whole, part, gradient in zip(passes, parts, gradients, strict=True):
        assert (whole.group, whole.match) == (gradient.group, gradient.match)
        assert part.end_ns == gradient.start_ns <= whole.end_ns
    steps = [s for s in worker if s.name == "serve optimizer step"]
    called = [s for s in master if s.name == "rpc_async optimizer step"]
    assert [style_of(s.name) for s in steps] == ["optimizer"] * 2
    for step, call in zip(steps, called, strict=True):
        assert call.start_ns <= step.start_ns <= step.end_ns <= call.end_ns
    assert all(s.nbytes > 0 for s in called)
    assert not spans(run, WORKER, "step"), "an optimizer's step that a rank serves is no step of its own program"


def test_gradients_have_the_size_of_their_tensors(group: Group) -> None:
    run = group["master"].run(cases.both_ways)
    rows, features = 4, 8
    received = [s.nbytes for s in spans(run, WORKER) if s.name == "received gradients"]
    sent = [s.nbytes for s in spans(run, WORKER) if s.name == "gradients"]
    assert received == [4 * rows * features] * 2
    assert sent == [4 * rows * features, 0], "the second shard's input is the first one's output; the first one's needs none"
    flows = flows_of(run.trace)
    moved = dict(zip(flows.name, flows.matrix().tolist(), strict=False))
    assert {"received gradients", "gradients"} <= set(flows.name)
    assert moved


def test_gradients_of_a_fetched_value_go_to_its_owner() -> None:
    with Group(["master", "one", "two"], runtime="rpc") as group:
        run = group["master"].run(cases.pass_references_on)
    found = {
        (s.name, s.rank, s.peer): s.nbytes for rank in range(3) for s in spans(run, rank) if "gradients" in s.name and s.nbytes
    }
    assert found == {("received gradients", 2, 0): 4 * 4 * 2, ("gradients", 2, 1): 4 * 4 * 16}
    flows = flows_of(run.trace)
    of_gradients = [flows.name.index("gradients"), flows.name.index("received gradients")]
    ways = {
        (int(s), int(d)): n
        for s, d, n, o in zip(flows.source, flows.destination, flows.nbytes, flows.operation, strict=True) if o in of_gradients
    }  # fmt: skip
    assert ways == {(2, 1): 256, (0, 2): 32}


@pytest.mark.parametrize("how", ["by the method", "by its name"])
def test_calls_through_a_helper_are_named_by_the_method(group: Group, how: str) -> None:
    run = group["master"].run(cases.through_a_helper, how)
    served = [s.name for s in spans(run, WORKER, "compute")]
    assert [name for name in served if name.endswith("forward")] == ["serve Embedding.forward", "serve Decoder.forward"], served
    assert [style_of(name) for name in served if name.endswith("forward")] == ["forward"] * 2, served
    if how == "by the method":  # from a name alone the caller does not know the class
        assert [s.name for s in spans(run, MASTER)][-2:] == ["rpc_sync Embedding.forward", "rpc_sync Decoder.forward"]


def test_an_argument_that_is_not_a_method_is_not_shown_as_one(group: Group) -> None:
    run = group["master"].run(cases.call_helpers_that_call_no_method)
    assert run.results[0] == ["Decoder adam", "Decoder SGD", torch.Size([2, 10])]
    called = [s.name for s in spans(run, MASTER)]
    assert [name for name in called if name.startswith("rpc_sync")][-2:] == ["rpc_sync scaled", "rpc_sync made"]
    assert called[-1] == "rpc_async RemoteModule.forward"
    served = [s.name for s in spans(run, WORKER, "compute")]  # several threads serve: `remote` may create its object late
    assert [name for name in served if name in ("serve scaled", "serve made")] == ["serve scaled", "serve made"], served
    assert served[-1] == "serve Decoder.forward", served


def test_a_rank_without_spans_computes_also_after_it_has_served(group: Group) -> None:
    run = group.run(cases.call_each_other)
    assert run.trace.labelled == frozenset()
    for rank, share in enumerate(run.trace.shares()):
        blocked = sum(end - start for start, end in run.trace.blocked(rank).tolist())
        (call,) = spans(run, rank, "call")
        assert share.compute_ns >= call.duration_ns - blocked > 0


def test_torchs_own_calls_are_not_shown(tmp_path: Path) -> None:
    """To end together, torch's workers call each other; these calls are internal."""
    program = """
import json, mmap, os, sys
from torch.distributed import rpc
from labkit.worker.comm import install
from labkit.recording.record import Recorder, here
from labkit.recording.ring_buffer import RingReader, RingWriter
from labkit.recording.ring_buffer import RING_BYTES
rank = 0 if (child := os.fork()) else 1
memory = mmap.mmap(-1, RING_BYTES)
recorder = Recorder(RingWriter(memory))
here.start(recorder)
install.watch(recorder, given=False)
options = rpc.TensorPipeRpcBackendOptions(init_method="file://" + sys.argv[1])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
lengths = [rpc.rpc_sync("worker1", len, args=([1, 2],))] if rank == 0 else []
rpc.shutdown()
reader = RingReader(memory)
rows = reader.read()
found = [lengths, [reader.names()[i] for i in rows["name"]] + [p.name for p in reader.pending()]]
with open(f"{sys.argv[1]}.{rank}", "w") as file:
    json.dump(found, file)
if rank == 0:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    store = tmp_path / "store"
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    answer = python("-c", program, str(store), env=environment(TP_SOCKET_IFNAME=loopback))
    assert answer.returncode == 0, answer.stderr
    caller, callee = (json.loads(Path(f"{store}.{rank}").read_text()) for rank in (0, 1))
    assert caller == [[2], ["rpc_sync len"]]
    assert callee == [[], ["serve len", "reply len"]]


@pytest.mark.filterwarnings("ignore:.*torch.jit.fork. is deprecated:DeprecationWarning")
def test_futures_that_only_python_completes() -> None:
    futures = Futures()
    assert futures.known(torch.futures.Future())
    assert not futures.known(torch.jit.fork(lambda: 1)), "C++ computes it"


class Late:
    """A future whose callbacks come only after the thread that waits for it went on."""

    def __init__(self, *, done: bool) -> None:
        self.callbacks: list[Any] = []
        self.done = lambda: done
        self.add_done_callback = self.callbacks.append


@pytest.mark.parametrize("done", [True, False])
def test_a_reply_is_written_down_once_and_before_its_caller_goes_on(done: bool) -> None:
    futures, future, reported = Futures(), Late(done=done), []
    operation = Operation(RingWriter(bytearray(RING_BYTES)), "rpc_sync add", 1)
    operation.also = lambda: reported.append("reply")
    futures.tie(future, [operation])
    futures.tell(future, operation.completed)
    assert futures._wait(lambda _: "value", future) == "value"
    assert reported == ["reply"]
    for callback in future.callbacks:
        callback(future)
    assert reported == ["reply"]


def test_the_waiting_rank_of_a_call_is_known() -> None:
    with Group(["master", cases.WORKER, "other"], runtime="rpc") as three:
        run = three["master"].run(cases.passed_on, "other")
    blocked = [s for rank in range(3) for s in spans(run, rank) if s.wait_start_ns]
    assert {(s.rank, s.name): s.served for s in blocked} == {(0, "rpc_sync fetch"): False, (2, "to_here"): True}
    assert all(s.served for rank in range(3) for s in spans(run, rank, "compute"))
