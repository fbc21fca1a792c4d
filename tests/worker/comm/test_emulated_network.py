"""Ranks on two emulated nodes: results are right, and each operation takes the level that its ranks use, or longer."""

from __future__ import annotations

from collections.abc import Iterator

import comm_cases as cases
import comm_rpc_cases as rpc_cases
import pytest
import torch
import torch.distributed as dist
from link_starts import link_starts

import labkit as lab
from labkit.group.group import Group
from labkit.group.run import Run
from labkit.recording.group_keys import GroupKind, kind_of, ranks_of

pytestmark = pytest.mark.processes

INSIDE = lab.Link(gbit_per_s=1, latency_us=100)
BETWEEN = lab.Link(gbit_per_s=0.1, latency_us=20_000)  # slower than anything that gloo does on a busy machine
NETWORK = lab.Network(nodes=2, inside=INSIDE, between=BETWEEN)
FOUR = NETWORK.of(4)


@pytest.fixture(scope="module")
def four() -> Iterator[Group]:
    with Group(4, link=NETWORK) as group:
        yield group


def nothing_was_early(run: Run) -> set[tuple[int, ...]]:
    """The ranks of all operations, none of which ended sooner than over its level."""
    seen = set()
    for span, begun_ns in zip(run.trace, link_starts(run.trace), strict=True):
        if span.kind != "communication" or span.name == "store.wait":  # the store is not on the emulated network
            continue
        pair = kind_of(span.group) is GroupKind.PAIR
        ranks = (span.rank, span.peer) if pair else ranks_of(span.group) or range(4)
        seen.add(tuple(sorted(ranks)))
        took_s = (span.end_ns - begun_ns) / 1e9
        assert took_s >= FOUR.seconds(span.name, span.nbytes, list(ranks)) - 1e-9, span
    return seen


def test_the_results_on_two_nodes_of_one_rank_are_right() -> None:
    with Group(2, link=NETWORK) as pair:
        for case in (cases.collectives, cases.functional, cases.ring_of_messages):
            run = pair.run(cases.watched_and_bare, case)
            for over_network, bare in run.results:
                assert cases.same(over_network, bare)


def test_results_and_bytes_are_those_without_a_network(four: Group) -> None:
    def everything() -> list[float]:
        rank, x = dist.get_rank(), torch.arange(8.0)
        other, parts = torch.zeros(8), [torch.zeros(2) for _ in range(4)]
        mine = x[:2] * rank
        found = []
        for action in (
            lambda: dist.all_reduce(x),
            lambda: dist.broadcast(x, 1),
            lambda: dist.all_gather(parts, mine),
            lambda: dist.reduce_scatter(mine, parts),
            lambda: dist.all_to_all_single(other, x * rank),
            lambda: dist.scatter(mine, parts if rank == 2 else None, src=2),
            lambda: dist.gather(mine, parts if rank == 0 else None),
            lambda: dist.reduce(other, 3),
            dist.barrier,
        ):
            action()
            found.append(float(sum(t.sum() for t in (x, other, mine, *parts) if rank == 3 or t is not other)))
        return found

    run = four.run(everything)
    with Group(4) as plain:
        without = plain.run(everything)
    assert run.results[3] == without.results[3]  # the root of the reduction; elsewhere, `other` is not defined
    carried = [sorted((s.name, s.nbytes, s.rank) for s in r.trace if s.kind == "communication") for r in (run, without)]
    assert carried[0] == carried[1]
    for span, begun_ns in zip(run.trace, link_starts(run.trace), strict=True):
        if span.kind == "communication" and span.name not in ("gather", "scatter"):  # whose n is the root's
            assert (span.end_ns - begun_ns) / 1e9 >= FOUR.seconds(span.name, span.nbytes) - 1e-9, span


def test_a_late_rank_delays_only_those_that_need_it(four: Group) -> None:
    """A leaf of gloo's broadcast arrives once the root has gone on: each takes the link's time from its start."""

    def late() -> float:
        rank, x = dist.get_rank(), torch.full((8,), float(dist.get_rank()))
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            store.wait(["the root has gone on"])
        dist.broadcast(x, 1)
        if rank == 1:
            store.set("the root has gone on", "")
        return float(x[0])

    run = four.run(late)
    assert run.results == [1.0] * 4
    root, leaf = (run.trace.filter(name="broadcast", rank=rank).spans[0] for rank in (1, 0))
    assert leaf.start_ns > root.end_ns
    assert nothing_was_early(run) == {(0, 1, 2, 3)}


def test_subgroups_take_their_level(four: Group) -> None:
    """`new_group`, a mesh and `new_subgroups`: inside a node quickly, between nodes slowly, with right sums."""

    def reduced() -> dict[str, float]:
        from torch.distributed.device_mesh import init_device_mesh

        rank, found = dist.get_rank(), {}
        by_hand = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
        local, _ = dist.new_subgroups(2)
        groups = {"by hand": by_hand, "local": mesh.get_group("local"), "subgroup": local, "node": mesh.get_group("node")}
        for name, group in groups.items():
            x = torch.full((250,), float(rank))
            dist.all_reduce(x, group=group)
            found[name] = float(x[0])
        return found

    run = four.run(reduced)
    for rank, found in enumerate(run.results):
        near = 1.0 if rank < 2 else 5.0
        assert found == {"by hand": near, "local": near, "subgroup": near, "node": 2.0 * (rank % 2) + 2}
    assert {(0, 1), (2, 3), (0, 2), (1, 3)} <= nothing_was_early(run)


def test_a_group_inside_a_node_does_not_wait_for_the_network(four: Group) -> None:
    def inside() -> float:
        from torch.distributed.device_mesh import init_device_mesh

        x = torch.ones(10)
        mesh = init_device_mesh("cpu", (2, 2))
        for _ in range(20):
            dist.all_reduce(x, group=mesh.get_group(1))
        return float(x[0])

    run = four.run(inside)
    assert run.results == [2.0**20] * 4
    fastest_ns = min(span.end_ns - span.start_ns for span in run.trace.filter(name="all_reduce"))
    assert fastest_ns < BETWEEN.latency_s * 1e9  # the fastest of eighty: one message between nodes would take longer


def test_two_messages_that_leave_a_node_share_its_connection(four: Group) -> None:
    def send(nbytes: int) -> None:
        rank, x = dist.get_rank(), torch.ones(nbytes // 4)
        dist.send(x, rank + 2) if rank < 2 else dist.recv(x, rank - 2)

    nbytes = 1_000_000  # 80 ms each
    run = four.run(send, nbytes)
    begin_ns = min(begun_ns for begun_ns, span in zip(link_starts(run.trace), run.trace, strict=True) if span.name == "recv")
    took_s = (max(span.end_ns for span in run.trace.filter(name="recv")) - begin_ns) / 1e9
    assert took_s >= 2 * nbytes / BETWEEN.bytes_per_s  # from the first one's begin, however late the other is
    assert nothing_was_early(run) == {(0, 2), (1, 3)}


def test_an_all_reduce_by_level_with_messages(four: Group) -> None:
    """As a student writes it: the leaders of the nodes collect, exchange and return the sums."""

    def by_level(nbytes: int) -> float:
        rank = dist.get_rank()
        x, other = torch.full((nbytes // 4,), float(rank)), torch.empty(nbytes // 4)
        leader = rank // 2 * 2
        if rank != leader:
            dist.send(x, leader)
            dist.recv(x, leader)
            return float(x.sum())
        dist.recv(other, rank + 1)
        x += other
        across = (rank + 2) % 4
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, across), dist.P2POp(dist.irecv, other, across)]):
            work.wait()
        x += other
        dist.send(x, rank + 1)
        return float(x.sum())

    run = four.run(by_level, 4000)
    assert run.results == [6000.0] * 4
    assert nothing_was_early(run) == {(0, 1), (2, 3), (0, 2)}


def test_remote_calls() -> None:
    with Group(["master", "near", "worker", "other"], runtime="rpc", link=NETWORK) as group:
        run = group["master"].run(rpc_cases.calls)
        expected = [3, 4, 1, 2, 6, 6, 2, 1, 4]
        assert [t.unique().tolist() for t in run.results[0]] == [[float(value)] for value in expected]

        def fastest_s(to: str) -> float:
            import time

            from torch.distributed import rpc

            took = []
            for _ in range(9):
                begin = time.perf_counter()
                rpc.rpc_sync(to, torch.add, args=(torch.ones(2), 1))
                took.append(time.perf_counter() - begin)
            return min(took)

        near_s, far_s = (group["master"].run(fastest_s, to).results[0] for to in ("near", "worker"))
    assert near_s < 2 * BETWEEN.latency_s <= far_s
