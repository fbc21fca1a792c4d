"""What `lab.simulate` says beside what was measured: real groups on this machine, and published runs on GPUs."""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import labkit as lab
from bench import machine
from bench.speed import llama
from bench.table import table

SECTION: Final = "## Measured"  # the last section of the page
LINK: Final = lab.Link(gbit_per_s=1, latency_us=50)
TRIES: Final = 5
STEPS: Final = 6
WIDTH: Final = 256
ROWS: Final = 512
PARTS: Final = 8  # micro-batches
PAUSE_S: Final = 0.004  # of a layer's forward pass, where layers sleep; the backward pass takes twice as long

# torchtitan, llama3_h100_202412_torchtitan.md: ranks; tokens/s of a GPU, eager and compiled; GiB, eager.
PUBLISHED: Final = ((8, 5762, 6667, 82.4), (128, 5605, 6514, 67.0))
THEIR_CARD: Final = lab.Device(tflop_per_s=0.70 * 989, gbyte_per_s=0.85 * 2400, name="with 2.4 TB/s")
PER_NODE: Final = 8
BATCH: Final = 2  # sequences of a GPU


class Pause(torch.autograd.Function):
    """Sleeps in both passes: compute that the other ranks do not disturb, however few cores there are."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        """Sleep, and return `x`."""
        del context
        time.sleep(PAUSE_S)
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        """Sleep twice as long, and return the gradient."""
        del context
        time.sleep(2 * PAUSE_S)
        return gradients[0]


class Layer(nn.Module):
    """A product with a matrix, then a pause or a function of its result."""

    def __init__(self, *, sleeps: bool) -> None:
        super().__init__()
        self.product, self.sleeps = nn.Linear(WIDTH, WIDTH), sleeps

    def forward(self, x: Tensor) -> Tensor:
        """Compute, or sleep."""
        y = self.product(x)
        result: Tensor = Pause.apply(y) if self.sleeps else y.relu()
        return result


def layers(count: int, *, sleeps: bool) -> nn.Sequential:
    """Equal layers, with the same parameters on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(*[Layer(sleeps=sleeps) for _ in range(count)])


def _train(model: nn.Module, rows: int) -> None:
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(rows, WIDTH)
    for _ in lab.steps(range(STEPS)):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def data_parallel(*, sleeps: bool) -> None:
    """A bucket for each layer or two."""
    _train(DistributedDataParallel(layers(6, sleeps=sleeps), bucket_cap_mb=0.5), 8 if sleeps else ROWS)


def shards(*, sleeps: bool) -> None:
    """FSDP2, each layer by itself."""
    model = layers(4, sleeps=sleeps)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    _train(model, 8 if sleeps else ROWS)


def tensor_parallel(*, sleeps: bool) -> None:
    """Columns and rows of pairs of layers."""
    model = layers(4, sleeps=sleeps)
    plan: dict[str, ParallelStyle] = {f"{i}.product": RowwiseParallel() if i % 2 else ColwiseParallel() for i in range(4)}
    _train(parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan), 64 if sleeps else ROWS)


def pipeline(*, sleeps: bool) -> None:
    """GPipe, two layers in each stage."""
    rank, size, rows = dist.get_rank(), dist.get_world_size(), (16 if sleeps else ROWS) // PARTS
    ends = torch.empty(rows, WIDTH, requires_grad=rank > 0), torch.empty(rows, WIDTH, requires_grad=True)
    model = layers(2, sleeps=sleeps)
    stage = PipelineStage(model, rank, size, torch.device("cpu"), input_args=ends[0], output_args=ends[1])
    schedule, optimizer = ScheduleGPipe(stage, PARTS, loss_fn=mse_loss), torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(PARTS * rows, WIDTH)
    given: Any = {"target": batch} if rank == size - 1 else {}
    for _ in lab.steps(range(STEPS)):
        optimizer.zero_grad()
        schedule.step(*([batch] if rank == 0 else []), **given)
        optimizer.step()


PROGRAMS: Final[tuple[Callable[..., None], ...]] = (data_parallel, shards, tensor_parallel, pipeline)


def real_groups(sizes: tuple[int, ...]) -> Iterator[list[str]]:
    """A row for each program: real groups and simulations in turns, medians."""
    for size in sizes:
        with lab.Group(size, devices="cpu", threads=1, link=LINK) as group:
            for sleeps in (True, False):
                for program in PROGRAMS:
                    name = f"{program.__name__.replace('_', ' ')}, {size} ranks, {'sleeping' if sleeps else 'computing'}"
                    print(name, file=sys.stderr, flush=True)
                    real, simulated = [], []
                    for _ in range(TRIES):
                        real.append(lab.step_ms(group.run(program, sleeps=sleeps)))
                        simulated.append(lab.simulate(program, ranks=size, link=LINK, measured=True, sleeps=sleeps).step_ms)
                    medians = statistics.median(simulated), statistics.median(real)
                    spread = f"{min(real):.1f} to {max(real):.1f}"
                    yield [name, f"{medians[0]:.1f}", f"{medians[1]:.1f}", spread, f"{medians[0] / medians[1]:.2f}"]


def published() -> Iterator[list[str]]:
    """A row for each published run of Llama 3.1 8B with FSDP, and each device."""
    for ranks, eager, compiled, memory_gib in PUBLISHED:
        between = lab.Link(gbit_per_s=400 * PER_NODE, latency_us=5)
        network = lab.Network(nodes=ranks // PER_NODE, inside=lab.Link.nvlink4, between=between)
        for device in (lab.Device.h100, THEIR_CARD):
            began_s = time.monotonic()
            sim = lab.simulate(llama.train, llama.LLAMA_8B, BATCH, 2, ranks=ranks, link=network, device=device)
            tokens = BATCH * llama.LLAMA_8B.length / lab.step_ms(sim) * 1e3
            ratios = f"{tokens / eager - 1:+.0%} / {tokens / compiled - 1:+.0%}"
            found_gib = lab.memory_mb(sim) * 1e6 / 2**30
            yield [
                f"FSDP on {ranks} GPUs, {device.name}", f"{tokens:,.0f}", f"{eager:,} / {compiled:,}", ratios,
                f"{found_gib:.1f}", f"{memory_gib} ({found_gib / memory_gib - 1:+.0%})", f"{time.monotonic() - began_s:.0f}",
            ]  # fmt: skip


def main() -> None:
    """Measure and print; optionally keep the tables in a file."""
    parser = argparse.ArgumentParser("python -m bench.speed.simulated", description=__doc__)
    parser.add_argument("--write", metavar="FILE", type=Path, help="replace the last section of this file")
    parser.add_argument("--sizes", type=int, nargs="*", default=[2, 4], help="of the real groups")
    arguments = parser.parse_args()
    about = [f"- {line}" for line in [*machine.describe(), f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"]]
    groups = list(real_groups(tuple(arguments.sizes)))
    load = f"- load after the groups (1, 5, 15 min): {', '.join(f'{x:.1f}' for x in os.getloadavg())}"
    errors = sorted(abs(float(row[-1]) - 1) for row in groups)
    lines = [SECTION, "", GROUPS.strip(), "", *about, load, ""]
    lines += [table(["program", "simulated [ms]", "real [ms]", "real, all tries [ms]", "ratio"], groups), ""]
    lines += [f"Median error: {statistics.median(errors):.0%}; the largest: {errors[-1]:.0%}.", ""] if errors else []
    heads = ["run", "simulated tokens/s", "published, eager / compiled", "error", "simulated GiB", "published GiB", "took [s]"]
    lines += [RUNS.strip(), "", table(heads, list(published()))]
    print("\n".join(lines))
    if arguments.write:
        page = arguments.write.read_text(encoding="utf-8").partition(SECTION)[0].rstrip()
        arguments.write.write_text("\n".join([page, "", *lines]) + "\n", encoding="utf-8")


GROUPS: Final = f"""
`python -m bench.speed.simulated --write docs/simulate.md` writes this section. First, `measured=True` beside real
groups over an emulated link of {LINK}: {TRIES} of each in turns, medians of `step_ms`. Layers that sleep are
not disturbed by other ranks, layers that compute are: where ranks or other programs share cores, the real times are too
long.
"""
RUNS: Final = """
Then torchtitan's [published runs](https://github.com/pytorch/torchtitan/tree/main/benchmarks) of Llama 3.1 8B on H100,
December 2024: sequences of 8,192 tokens, two for each GPU, every second matrix product computed again, bfloat16, eight
GPUs in a node, 400 Gbit/s for each between nodes. The model is our own, of the same size. The simulation assumes 70 %
of 989 TFLOP/s and 85 % of the memory's rate, for both 3.35 TB/s (`Device.h100`) and the 2.4 TB/s of their cards; that
these were limited to 500 W is not considered. Memory is that of tensors, without what allocator and NCCL need.
"""


if __name__ == "__main__":
    main()
