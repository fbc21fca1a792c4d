"""Figures of real runs: arrows and bytes of torch's messages and remote calls."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed import rpc

from labkit.group.group import Group
from labkit.plots.flows import flows_of, messages
from labkit.plots.timeline import timeline
from labkit.plots.traffic import traffic

pytestmark = pytest.mark.processes


def to_and_fro():
    there, back = torch.ones(1000), torch.ones(250)
    me = dist.get_rank()
    for _ in range(2):
        (dist.send if me == 0 else dist.recv)(there, 1 - me)
        work = (dist.isend if me == 1 else dist.irecv)(back, 1 - me)
        work.wait()
    dist.all_reduce(there)


def double(x):
    return 2 * x


def calls():
    x = torch.ones(1000)
    rpc.rpc_sync("worker", double, args=(x,))
    rpc.remote("worker", double, args=(x,)).to_here()


def test_messages_between_two_ranks():
    with Group(2) as group:
        run = group.run(to_and_fro)
    found = messages(run.trace)
    assert sorted((m.source, m.destination) for m in found) == [(0, 1)] * 2 + [(1, 0)] * 2
    assert all(m.sent_ns < m.arrived_ns for m in found)
    # 2 · (n - 1)/n of the all-reduce's 4000 bytes, from each to the other
    assert flows_of(run.trace).matrix().tolist() == [[0, 2 * 4000 + 4000], [2 * 1000 + 4000, 0]]
    assert [p for p in timeline(run).patches if p.get_label() == "message"]
    assert "12.0" in {t.get_text() for t in traffic(run).figure.axes[1].texts}


def test_remote_calls():
    with Group(["master", "worker"], runtime="rpc") as group:
        run = group["master"].run(calls)
    found = messages(run.trace)
    assert [(m.source, m.destination, m.call) for m in sorted(found, key=lambda m: m.sent_ns)] == [
        (0, 1, True),
        (1, 0, False),
        (1, 0, False),
    ]
    matrix = flows_of(run.trace).matrix()
    assert 8000 < matrix[0, 1] < 16_000  # the tensor twice, and what else is pickled
    assert 8000 < matrix[1, 0] < 12_000
