"""A collective that no torch has, added to the table of operations and to nothing else: what labkit makes of it, as
JSON."""

from __future__ import annotations

import json
from typing import Any

from labkit.recording import operations
from labkit.recording.operations import Cost, Form, OperationType, Traffic

GOSSIP = OperationType(
    "gossip", Traffic.RING, (Form("gossip", ("gossip",), alike=0), Form("gossip_coalesced", alike=0)),
    Cost(lambda p: 3 * p, lambda p: p / 4, r"3p\,\alpha + \frac{p}{4}\,\frac{n}{B}", "made up"),
    "#123456", reduces=True, own_limit=True,
)  # fmt: skip
operations.OPERATION_TYPES = (*operations.OPERATION_TYPES, GOSSIP)

import torch  # noqa: E402  # labkit is imported with the table as it is now
import torch.distributed as dist  # noqa: E402
from torch._C._distributed_c10d import ProcessGroup  # noqa: E402

ProcessGroup.gossip = lambda self, tensors, options: self.allreduce(tensors, options)  # as if torch had it

import labkit as lab  # noqa: E402
from labkit.group.deadlock import RankState, find_deadlock  # noqa: E402
from labkit.group.deadlock_words import deadlock_in_words, mismatch_in_words  # noqa: E402
from labkit.group.mismatches import first_unequal  # noqa: E402
from labkit.plots.flows import flows_of  # noqa: E402
from labkit.plots.traffic import _looks  # noqa: E402
from labkit.recording.record import Recorder  # noqa: E402
from labkit.recording.ring_buffer import (  # noqa: E402
    RING_BYTES,
    RingReader,
    RingWriter,
)
from labkit.recording.schema import COMMUNICATION, Pending, Span  # noqa: E402
from labkit.tracing.trace import Trace  # noqa: E402
from labkit.worker.comm.install import watch  # noqa: E402


def recorded() -> dict[str, Any]:
    """What the record says of a call of torch's new method, on a group of one rank."""
    memory = bytearray(RING_BYTES)
    watch(Recorder(RingWriter(memory)))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.group.WORLD.gossip([torch.ones(4, 2)], dist.AllreduceOptions()).wait()
    reader = RingReader(memory)
    row = next(row for row in reader.read() if row["kind"] == COMMUNICATION)
    names = reader.names()
    dist.destroy_process_group()
    return {"name": names[row["name"]], "nbytes": int(row["nbytes"]), "signature": names[row["signature"]]}


def pending(signature: str) -> Pending:
    return Pending("gossip", 1, 1, 0, -1, "world", 1, "cell 5, line 1", signature)


def unequal() -> int:
    """How many sides the first reduction of unlike shapes has, in two ranks' records."""
    chunks, names = [], []
    for shape in ("float32 [4, 2]", "float32 [2, 4]"):
        memory = bytearray(RING_BYTES)
        RingWriter(memory).write_communication("gossip", 1, 2, nbytes=32, group="world", match=1, signature=shape)
        reader = RingReader(memory)
        chunks.append([reader.read()])
        names.append(reader.names())
    return len(first_unequal(chunks, names.__getitem__)[1])


def main() -> None:
    spans = [Span(rank, "gossip_coalesced", "communication", 1, 9, nbytes=1000, group="world", match=1) for rank in range(4)]
    flows = flows_of(Trace(spans, [], ranks=[f"rank {rank}" for rank in range(4)]))
    sides = [("rank 0", pending("float32 [4]")), ("rank 1", pending("int32 [4]"))]
    link = lab.Link(gbit_per_s=0.008, latency_us=1000)
    deadlock = find_deadlock([RankState("rank 0", (pending(""),), entered={"world": 1}), RankState("rank 1", (), returned=True)])
    print(
        json.dumps(
            {
                "recorded": recorded(), "matrix": flows.matrix().tolist(), "rings": flows.rings,
                "colour": _looks(flows.name, flows.type)[0]["facecolor"], "seconds": link.seconds("gossip", 8000, 4),
                "predicted": float(lab.predict.gossip(8000, ranks=4, link=link)), "mismatch": mismatch_in_words(sides)[0],
                "deadlock": deadlock and deadlock_in_words(deadlock, ["rank 0", "rank 1"])[0], "reduced": unequal(),
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
