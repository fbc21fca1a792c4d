"""Operations of a process group are recorded, and their results are unchanged."""

from __future__ import annotations

import datetime
import faulthandler
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import comm_cases as cases
import pytest
import torch
import torch.distributed as dist
from python_programs import ROOT, python

from labkit.costs.link import Link
from labkit.group.group import Group
from labkit.group.run import Run
from labkit.plots.flows import flows_of
from labkit.recording.schema import Span
from labkit.worker.comm.process_group import HALVES

pytestmark = pytest.mark.processes

FLOAT = 4  # bytes
ROOTS = {"broadcast": 1, "gather": 0, "reduce": 0, "scatter": 0}  # in `cases.collectives`


@pytest.fixture(scope="module")
def pair() -> Iterator[Group]:
    with Group(2, timeout_s=200) as group:
        yield group


def communications(run: Run, rank: int = 0) -> list[Span]:
    """The communications of a rank in a run, by start."""
    return [span for span in run.trace if span.kind == "communication" and span.rank == rank]


def names(run: Run, rank: int = 0) -> list[str]:
    return [span.name for span in communications(run, rank)]


def equal(a: Any, b: Any) -> bool:
    """Whether two results are the same, bit by bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def same_as_torchs_own(pair: Group, case: Callable[..., Any], *args: Any) -> Run:
    """Run a case on both kinds of group and check that the results are equal."""
    run = pair.run(cases.watched_and_bare, case, *args)
    for watched, bare in run.results:
        assert watched  # there is a result
        assert equal(watched, bare)
    return run


def test_collectives(pair: Group) -> None:
    run = same_as_torchs_own(pair, cases.collectives)
    expected = [
        ("all_reduce", 4), ("broadcast", 4), ("reduce", 4), ("all_gather", 8), ("all_gather_into_tensor", 8), ("gather", 8),
        ("scatter", 8), ("reduce_scatter", 4), ("reduce_scatter_tensor", 4), ("all_to_all_single", 4), ("barrier", 0),
        ("monitored_barrier", 0),
    ]  # fmt: skip
    root, other = communications(run, 0), communications(run, 1)
    assert [(s.name, s.nbytes // FLOAT) for s in root] == expected
    # Ranks other than the root send or receive only their part.
    assert [(s.name, s.nbytes // FLOAT) for s in other] == [
        (n, 4 if n in ("gather", "scatter") else size) for n, size in expected
    ]
    for spans in (root, other):
        assert [s.match for s in spans] == list(range(1, len(expected) + 1))
        assert {s.group for s in spans} == {root[0].group}
        assert all(s.root == ROOTS.get(s.name, -1) and s.done and s.line.startswith("comm_cases.py, line") for s in spans)
        # Each was waited for at once, unless it had completed, and ends with the wait.
        waited = [s for s in spans if s.wait_start_ns]
        assert all(s.start_ns <= s.wait_start_ns < s.wait_end_ns == s.end_ns for s in waited)
        assert len(waited) > len(spans) / 2


without_lists = pytest.mark.skipif(torch.__version__ < "2.12", reason="until torch 2.11, gloo exchanges no lists")
# The operations of a case, on each rank, with the number of floats.
ISSUED: dict[Callable[..., Any], list[tuple[str, Any]]] = {
    cases.exchange: [("all_to_all", 4)],
    cases.objects: [(name, ANY) for name in ["all_gather"] * 2 + ["broadcast"] * 3 + ["scatter"] * 2],
    cases.asynchronous: [("all_reduce", 3)] * 3,
    cases.functional: [
        ("all_reduce", 4), ("all_gather_into_tensor", 8), ("reduce_scatter_tensor", 4), ("all_to_all_single", 4),
        ("broadcast", 4), ("all_reduce_coalesced", 8), ("all_reduce_coalesced", 8),
    ],
    cases.gradients_by_hand: [("all_reduce", ANY)] * 8,
}  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(case, marks=without_lists if case is cases.exchange else ()) for case in ISSUED])
def test_each_operation_is_recorded_with_its_size(pair: Group, case: Callable[..., Any]) -> None:
    run = same_as_torchs_own(pair, case)
    for rank in (0, 1):
        spans = communications(run, rank)
        assert [(s.name, s.nbytes // FLOAT) for s in spans] == ISSUED[case]
        assert all(s.start_ns <= s.wait_start_ns or s.wait_start_ns == 0 for s in spans)


def test_a_group_is_named_with_its_ranks(pair: Group) -> None:
    def in_both() -> str:
        x = torch.ones(1)
        dist.all_reduce(x)
        dist.all_reduce(x, group=dist.new_group(group_desc="mesh"))
        return "done"

    run = pair.run(in_both)
    world, mesh = communications(run, 1)
    assert world.group == "world"
    assert mesh.group.endswith(" mesh of ranks 0,1")


def test_messages(pair: Group) -> None:
    run = same_as_torchs_own(pair, cases.ring_of_messages)
    for rank in (0, 1):
        spans = communications(run, rank)
        assert all(s.peer == 1 - rank and s.nbytes == 3 * FLOAT and s.done for s in spans)
        for name, source in (("send", rank), ("recv", 1 - rank)):
            ends = f"p2p {source}>{1 - source}"
            plain = [s.match for s in spans if s.name == name and s.group.startswith(f"{ends} tag 0 group")]
            tagged = [s.match for s in spans if s.name == name and s.group.startswith(f"{ends} tag 7 group")]
            assert (plain, tagged) == ([1, 2, 3], [1])
    of_each = [{s.group for s in communications(run, rank)} for rank in (0, 1)]
    assert of_each[0] == of_each[1], "the two ends of a message are one operation"


def test_peers_are_global_ranks() -> None:
    def among_the_last_two() -> list[Any]:
        group = dist.new_group([1, 2])
        return cases.ring_of_messages(group) if dist.get_rank() else []

    with Group(3) as trio:
        run = trio.run(among_the_last_two)
    assert communications(run, 0) == []
    for rank in (1, 2):
        spans = communications(run, rank)
        assert {s.peer for s in spans} == {3 - rank}
        assert {s.group.split(" tag")[0] for s in spans} == {"p2p 1>2", "p2p 2>1"}
        assert {s.group.split(" of ")[1] for s in spans} == {"ranks 1,2"}


def test_roots_are_global_ranks() -> None:
    def among_all_and_some() -> None:
        me, some = dist.get_rank(), dist.new_group([1, 2, 3])
        for root, group, size in ((2, None, 4), (3, some, 3)):
            if me == 0 and group is some:
                continue
            parts = [torch.ones(10) for _ in range(size)] if me == root else None
            dist.broadcast(torch.ones(10), root, group=group)
            dist.scatter(torch.ones(10), parts, root, group=group)
            dist.gather(torch.ones(10), parts, root, group=group)
            dist.reduce(torch.ones(10), root, group=group, async_op=True).wait()

    with Group(4) as four:
        run = four.run(among_all_and_some)
    of_all, of_some = ([(name, root) for name in ("broadcast", "scatter", "gather", "reduce")] for root in (2, 3))
    for rank in range(4):
        found = [(s.name, s.root) for s in communications(run, rank)]
        assert found == of_all + (of_some if rank else [])
    # A broadcast and a scatter from the root, a gather and a reduce to it, of 40 bytes from or to each other rank.
    matrix = flows_of(run.trace).matrix()
    assert matrix.tolist() == [[0, 0, 80, 0], [0, 0, 80, 80], [80, 80, 0, 80 + 80], [0, 80, 80 + 80, 0]]


def test_the_root_in_an_error_is_the_one_that_the_student_gave() -> None:
    def in_a_part() -> list[str]:
        me, part = dist.get_rank(), dist.new_group([1, 2])
        if me == 1:
            work = dist.broadcast(torch.ones(3), src=2, group=part, async_op=True)
            words = [operation.signature for operation in cases.operations()]
            dist.send(torch.ones(1), 2)
            work.wait()
            return words
        if me == 2:
            dist.recv(torch.ones(1), 1)
            dist.broadcast(torch.ones(3), src=2, group=part)
        return []

    with Group(3) as trio:
        assert trio.run(in_a_part).results[1] == ["float32 [3], root 2"]


def test_torchs_other_form_names_the_root_too() -> None:
    def by_method() -> None:
        world = dist.group.WORLD
        assert world is not None
        world.broadcast(torch.ones(10), 2).wait()
        world.reduce(torch.ones(10), root=1).wait()
        world.broadcast([torch.ones(10)]).wait()

    with Group(3) as trio:
        run = trio.run(by_method)
    for rank in range(3):
        assert [s.root for s in communications(run, rank)] == [2, 1, 0]


def test_torch_refuses_a_missing_root(pair: Group) -> None:
    def beyond() -> str:
        world = dist.group.WORLD
        assert world is not None
        try:
            world.broadcast(torch.ones(1), 5).wait()
        except Exception as error:  # noqa: BLE001  # whichever it is
            return type(error).__name__
        return ""

    assert set(pair.run(beyond).results) <= {"ValueError", "RuntimeError"}


def test_a_message_that_nobody_waits_for_yet_is_seen_to_arrive(pair: Group) -> None:
    run = pair.run(cases.watched_and_bare, cases.late_wait)
    assert run.results[1][0] == ["[1.0, 1.0]", "[1.0, 1.0]"]
    assert run.results[1][1][1] == "[1.0, 1.0]"
    (receive,) = communications(run, 1)
    assert receive.done
    assert receive.wait_start_ns == receive.wait_end_ns == 0  # it had arrived before the wait


@pytest.mark.parametrize("how", ["plain", "no_sync", "static_graph", "find_unused", "allreduce_hook", "fp16_hook"])
def test_data_parallel(pair: Group, how: str) -> None:
    run = same_as_torchs_own(pair, cases.data_parallel, how)
    # The network has 504 parameters, 20 of them in the last layer; unused ones are reduced as zeros.
    steps = 2 if how == "no_sync" else 3
    width = 2 if how == "fp16_hook" else FLOAT
    flags = 32 if how == "find_unused" else 0  # which of the 8 parameters each rank has used
    for rank in (0, 1):
        reduced = [s for s in communications(run, rank) if s.name == "all_reduce"]
        unused_map = 32 * (how == "static_graph")  # that is exchanged once
        assert sum(s.nbytes for s in reduced) == steps * (504 * width + flags) + unused_map
        for s in reduced:
            assert s.line.startswith("comm_cases.py, line")
            if s.wait_start_ns:  # operations under way at the end of the backward pass were waited for until they completed
                assert s.start_ns <= s.wait_start_ns < s.wait_end_ns
                assert s.wait_end_ns == s.end_ns or s.nbytes == 32


@pytest.mark.parametrize("divide", [True, False])
def test_uneven_inputs(pair: Group, divide: bool) -> None:
    """Without a fixed divisor, C++ waits in the backward pass for an operation that the forward pass has issued."""
    run = same_as_torchs_own(pair, cases.uneven_inputs, divide)
    announced = [[s for s in communications(run, rank) if (s.name, s.nbytes) == ("all_reduce", FLOAT)] for rank in (0, 1)]
    assert all(s.done for of_rank in announced for s in of_rank)
    assert len(announced[0]) == len(announced[1]) >= 3


def test_a_rank_waits_visibly_at_the_end_of_its_backward_pass(pair: Group) -> None:
    run = pair.run(cases.backward_beside_a_late_rank)
    assert run.results == [[True], []]
    (reduced,) = (s for s in communications(run, 0) if s.name == "all_reduce")
    (of_the_other,) = (s for s in communications(run, 1) if s.name == "all_reduce")
    assert reduced.start_ns <= reduced.wait_start_ns < of_the_other.start_ns < reduced.wait_end_ns == reduced.end_ns


def test_backward_passes_that_fail_and_nest(pair: Group) -> None:
    run = pair.run(cases.backward_passes_that_fail_and_nest)
    assert run.results == [("the student's own", [4.0] * 3)] * 2  # twice the sum over two ranks
    assert names(run) == ["all_reduce"] * 3


def test_fully_sharded(pair: Group) -> None:
    run = same_as_torchs_own(pair, cases.fully_sharded)
    training = [s for s in communications(run) if s.nbytes in (864, 1152)]
    a_step = ["all_gather_into_tensor"] * 3 + ["reduce_scatter_tensor"] * 2
    assert [s.name for s in training] == a_step * 2


def test_tensor_parallel(pair: Group) -> None:
    run = same_as_torchs_own(pair, cases.tensor_parallel)
    activations = 4 * 8 * FLOAT  # the sum of the row layer, and in the backward pass of the column layer
    assert [s.nbytes for s in communications(run) if s.name == "all_reduce"].count(activations) >= 1
    assert {"scatter", "broadcast", "all_gather_into_tensor"} <= set(names(run))


def test_sharded_optimizer(pair: Group) -> None:
    run = same_as_torchs_own(pair, cases.sharded_optimizer)
    parameters = [s.nbytes for s in communications(run) if s.name == "broadcast" and s.nbytes in (1024, 512, 128, 64, 16)]
    assert sum(parameters) == 2 * 504 * FLOAT  # each rank sends those that it has updated


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_pipelines(pair: Group, schedule: str) -> None:
    run = same_as_torchs_own(pair, cases.pipelined, schedule)
    a_micro_batch = 2 * 6 * FLOAT
    for rank in (0, 1):
        assert [s.name for s in communications(run, rank) if s.nbytes == a_micro_batch].count("send") == 4
        assert [s.name for s in communications(run, rank) if s.nbytes == a_micro_batch].count("recv") == 4


def test_a_group_behaves_like_torchs_own(pair: Group) -> None:
    def look(group: Any) -> list[Any]:
        import copy
        import pickle

        seen: list[Any] = [
            repr(type(group)), isinstance(group, dist.ProcessGroup), dist.get_backend(group), dist.get_backend_config(group),
            group.rank(), group.size(), group.name(), dist.get_process_group_ranks(group), dist.get_group_rank(group, 1),
            dist.get_global_rank(group, 1), str(group._device_types), str(type(group._get_backend(torch.device("cpu")))),
            group._get_backend_name(), str(type(group.get_group_store())), group.bound_device_id,
        ]  # fmt: skip
        for copied in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError, match="cannot pickle"):
                copied(group)
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        assert work is not None
        work.wait()
        return [*seen, repr(type(work)), isinstance(work, dist.Work), work.is_completed()]

    same_as_torchs_own(pair, look)


def test_what_carries_out_each_method_of_a_group() -> None:
    by_half: dict[str, set[str]] = {}
    for method, half in HALVES.items():
        by_half.setdefault(half, set()).add(method)
    print("\n".join(f"{half}: {', '.join(sorted(found))}" for half, found in by_half.items()))
    made = {"send", "recv", "recv_anysource", "monitored_barrier", "split_group", "set_timeout", "shutdown"}
    made |= {"_get_backend", "_start_coalescing", "_end_coalescing"}
    assert by_half["ours"] - {"start_coalescing", "end_coalescing"} == made  # which torch after 2.13 has, too
    assert by_half["both halves"] == {"_register_backend", "_set_default_backend", "_set_group_desc", "_set_group_name"}
    assert {"allreduce", "broadcast", "barrier", "allgather", "_allgather_base"} <= by_half["recorded"]
    assert {"abort", "name", "group_name", "bound_device_id"} <= by_half["delegated"]


def test_a_group_split_from_another_is_recorded(pair: Group) -> None:
    def split() -> list[Any]:
        parent: Any = dist.new_group()
        with cases.unwatched():
            part = dist.new_group(group_desc="kids")

        class Splits:  # gloo itself sometimes hangs when it splits a group (torch 2.13, also with torch's own groups)
            def split_group(self, *_: Any) -> Any:
                return part

        parent._real = Splits()
        child = parent.split_group([0, 1])
        x = torch.ones(2)
        child.allreduce([x]).wait()
        name_is_kept = child.group_name == part.group_name
        return [x.tolist(), name_is_kept, child.group_desc, child.rank(), child.name(), isinstance(child, dist.ProcessGroup)]

    run = pair.run(split)
    assert run.results == [[[2.0, 2.0], True, "kids", rank, "gloo", True] for rank in (0, 1)]
    (reduced,) = communications(run)
    assert reduced.group.endswith(" kids of ranks 0,1")


def test_a_part_of_a_group_is_named_by_its_ranks_in_the_world(pair: Group) -> None:
    """Not by their numbers in the part, nor by the address that torch puts into the description."""

    def split() -> None:
        with cases.unwatched():
            part = dist.new_group([1], group_desc=f"half:split:{9 + dist.get_rank()}")
        if dist.get_rank() == 1:
            parent: Any = dist.group.WORLD
            real, parent._real = parent._real, type("Splits", (), {"split_group": lambda *_: part})()  # as above
            try:
                child = parent.split_group([1])
            finally:
                parent._real = real
            child.allreduce([torch.ones(2)]).wait()

    (reduced,) = communications(pair.run(split), rank=1)
    assert reduced.group.endswith(" half of ranks 1")


def test_a_refused_operation_is_not_recorded(pair: Group) -> None:
    def refused() -> list[str]:
        said = []
        x = torch.ones(2)
        for wrong in (
            lambda: dist.all_gather([torch.zeros(1)], x),
            lambda: dist.scatter(x, [x] * 3 if dist.get_rank() == 0 else None) if dist.get_rank() == 0 else None,
            lambda: dist.isend(x.to_sparse(), 1 - dist.get_rank()),
            lambda: dist.send(x, 2),  # gloo would wait for ever
            lambda: dist.group.WORLD.recv([x], -1, 0),
        ):
            try:
                wrong()
            except (RuntimeError, ValueError) as error:
                said.append(str(error))
        dist.all_reduce(x)
        return [*said, str(cases.pending())]

    run = pair.run(refused)
    assert "invalid output tensor list" in run.results[0][0]
    assert "Incorrect input list size 3" in run.results[0][1]
    assert run.results[0][3:5] == [f"{m} with rank {p}: this group has the ranks 0 to 1" for m, p in (("send", 2), ("recv", -1))]
    for rank in (0, 1):
        assert run.results[rank][-1] == "[]"
        (reduced,) = communications(run, rank)
        assert reduced.name == "all_reduce"
    assert communications(run, 0)[0].match == communications(run, 1)[0].match


def test_an_operation_that_fails_during_its_wait(pair: Group) -> None:
    def alone() -> list[str]:

        group = dist.new_group()  # creating it may take longer on a busy machine
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=0.2), group)
        if dist.get_rank() == 0:
            return ["", "[]"]
        try:
            dist.all_reduce(torch.ones(2), group=group)
        except RuntimeError as error:
            return [str(error), str(cases.pending())]
        return ["no error", ""]

    run = pair.run(alone)
    message, pending = run.results[1]
    assert "Timed out" in message
    assert pending == "[]"
    (reduced,) = communications(run, 1)
    assert not reduced.done
    assert reduced.wait_start_ns


@pytest.mark.parametrize("attended", [False, True])
def test_a_wait_with_a_limit(pair: Group, attended: bool) -> None:
    def limited() -> list[str]:

        group = dist.new_group()
        if dist.get_rank() == 0:
            return []
        work: Any = dist.irecv(torch.zeros(1), 0, group=group)
        while attended and not work._taken.locked():  # until a helper thread waits for it
            pass
        with pytest.raises(RuntimeError) as error:
            work.wait(datetime.timedelta(seconds=0.1))
        return [str(error.value), str(cases.pending())]

    run = pair.run(limited)
    message, pending = run.results[1]
    assert "Timed out waiting 100ms" in message
    assert pending == "[]"
    (receive,) = communications(run, 1)
    assert not receive.done


@pytest.mark.slow
def test_the_end_of_a_process(tmp_path: Path) -> None:
    """In whatever state a rank leaves its operations, its process ends as it would without labkit."""
    answer = python(str(ROOT / "tests" / "helpers" / "comm_exits.py"), str(tmp_path))
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines() == [
        "received never: 0 0",
        "received never, group destroyed: 0 0",
        "not waited for, group destroyed: 0 0",
        "kept: 0 0",
        "kept for a late rank: 0 0",
        "fifty under way: 0 0",
        "data parallel, group destroyed: 0 0",
        "not waited for, group destroyed at exit: 0 0",
        "group destroyed after the last wait: 0 0",
        "group destroyed then forked: 0 0",
    ], answer.stderr


@pytest.mark.parametrize("link", [None, Link(gbit_per_s=1, latency_us=50)], ids=["", "link"])
def test_a_group_is_destroyed_before_its_last_callback(link: Link | None) -> None:
    """The reducer, whose model ends with the function, has the last reference to the group."""

    def train() -> None:
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
        sys.setswitchinterval(10)  # the main thread does not hand over Python's lock while it computes
        model(torch.ones(4, 64)).sum().backward()
        dist.destroy_process_group()

    def bounded() -> str:
        faulthandler.dump_traceback_later(60, exit=True)
        train()
        sys.setswitchinterval(0.005)
        faulthandler.cancel_dump_traceback_later()
        return "ended"

    with Group(2, link=link) as group:
        assert group.run(bounded).results == ["ended", "ended"]


def test_nothing_waits_when_a_group_is_destroyed() -> None:
    """Rank 1 comes to the operation only after rank 0 has destroyed the group; torch allows that."""

    def in_turn() -> float:
        faulthandler.dump_traceback_later(60, exit=True)
        part, ones, token = dist.new_group(), torch.ones(4), torch.ones(1)
        if dist.get_rank() == 0:
            work = dist.all_reduce(ones, group=part, async_op=True)
            dist.destroy_process_group(part)
            dist.send(token, 1)
            work.wait()
        else:
            dist.recv(token, 0)
            dist.all_reduce(ones, group=part)
            dist.destroy_process_group(part)
        faulthandler.cancel_dump_traceback_later()
        return float(ones.sum())

    with Group(2) as group:
        assert group.run(in_turn).results == [8, 8]


def test_a_group_is_destroyed_when_its_operations_have_completed() -> None:
    """As without labkit, where Python has the last reference."""

    def late() -> list[float]:
        dist.destroy_process_group()
        dist.init_process_group("gloo")  # labkit refers to the one before
        x = torch.ones(4)
        if dist.get_rank() == 1:
            time.sleep(0.5)
        dist.all_reduce(x, async_op=True)
        dist.destroy_process_group()
        return x.tolist()

    with Group(2) as group:
        assert group.run(late).results == [[2.0] * 4] * 2


def test_a_callback_refers_to_its_own_future(pair: Group) -> None:
    def own() -> float:
        faulthandler.dump_traceback_later(60, exit=True)
        future = dist.all_reduce(torch.ones(4), async_op=True).get_future()
        child = future.then(lambda _: float(future.value()[0].sum()))
        faulthandler.cancel_dump_traceback_later()
        return float(child.wait())

    run = pair.run(own)
    assert run.results == [8, 8]
    assert len(communications(run, 0)) == 1


def test_nothing_is_computed_while_a_call_issues_an_operation_and_waits_for_it(pair: Group) -> None:
    def blocking() -> None:
        rank, tensor = dist.get_rank(), torch.ones(1 << 20)
        dist.all_reduce(tensor)
        if rank == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)

    spans = list(pair.run(blocking).trace.filter(kind="communication"))
    assert len(spans) == 4
    assert all(span.wait_start_ns == span.start_ns for span in spans)


def test_a_rank_sends_no_message_to_itself(pair: Group) -> None:
    def to_itself() -> str:
        try:
            dist.recv(torch.zeros(1), dist.get_rank())
        except ValueError as error:
            return str(error)
        return ""

    assert pair.run(to_itself).results == [
        f"recv with rank {rank}: a rank cannot exchange messages with itself" for rank in (0, 1)
    ]
