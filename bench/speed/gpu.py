"""A short benchmark for machines with GPUs, a stage of `make gpu`: `python -m bench.speed.gpu FOLDER`.

labkit's own spans time everything, by CUDA events on a GPU. FOLDER gets figures.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import torch
from torch import nn

import labkit as lab
from bench.page import about

REHEARSAL: Final = os.environ.get("LABKIT_GPU_REHEARSAL") == "1"
DEVICES: Final = "cpu" if REHEARSAL else "cuda"
MIB: Final = 1 << 20
WARM_UP_STEPS: Final = 5
WIDTH: Final = 256 if REHEARSAL else 4096
WATCH_LIMIT_S: Final = 15.0  # of the stage's 90; it comes last, so that what is measured before it is kept in any case
DPI: Final = 110


def step_in_a_picture(folder: Path) -> list[str]:
    """Two ranks train with DistributedDataParallel: the timeline of two steps, its parts, and memory."""
    with lab.Group(2, devices=DEVICES) as group:
        run = group.run(train, 20 if REHEARSAL else 40)
    save(lab.timeline(run, step=quickest(run.trace)), folder / "timeline.png")
    save(lab.breakdown(run), folder / "breakdown.png")
    save(lab.traffic(run), folder / "traffic.png")
    with lab.Group(1, devices=DEVICES) as group:
        save(lab.memory(group.run(fill_memory)), folder / "memory.png")
    bounds = run.trace.step_bounds()
    lengths = bounds[WARM_UP_STEPS:]
    step_ms = statistics.median((lengths[:, 1] - lengths[:, 0]).tolist()) / 1e6
    gradients = sum(s.nbytes for s in run.trace.filter(rank=0, name="all_reduce")) / len(bounds) / MIB
    on_gpu = sum(s.device == "cuda" for s in run.trace)
    return [
        f"A step of two ranks: {step_ms:.1f} ms, with {gradients:.0f} MiB of gradients all-reduced.",
        f"{on_gpu} of {len(run.trace)} spans were timed by the GPU.",
    ]


def train(steps: int) -> None:
    """In a rank."""
    device = lab.device()
    torch.manual_seed(0)
    width = 256 if REHEARSAL else 2048
    layers = [module for _ in range(4) for module in (nn.Linear(width, width), nn.ReLU())]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(64 if REHEARSAL else 8192, width)
    for _ in lab.steps(range(steps)):
        with lab.span("copy to the device"):
            batch = x.to(device)
        with lab.span("forward"):
            loss = model(batch).square().mean()
        with lab.span("backward"):
            optimizer.zero_grad()
            loss.backward()
        with lab.span("optimizer"):
            optimizer.step()


def fill_memory() -> None:
    """In a rank."""
    device = lab.device()
    model = nn.Sequential(*[module for _ in range(4) for module in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    with lab.track_memory(model, optimizer):
        for _ in lab.steps(range(2)):
            optimizer.zero_grad()
            model(torch.randn(1024, WIDTH, device=device)).square().mean().backward()
            optimizer.step()


def quickest(trace: lab.Trace) -> range:
    """The two neighbouring steps that took the least time, after those that warm up."""
    bounds = trace.step_bounds()[WARM_UP_STEPS:]
    lengths = (bounds[1:, 1] - bounds[:-1, 0]).tolist()
    first = lengths.index(min(lengths)) + WARM_UP_STEPS
    return range(first, first + 2)


def save(axes: Any, path: Path) -> None:
    """Write the figure of some axes."""
    axes.figure.savefig(path, dpi=DPI, bbox_inches="tight")


def watch_beside_run() -> list[str]:
    """The cost of the live picture for a training run."""
    if importlib.util.find_spec("ipykernel") is None or importlib.util.find_spec("jupyter_client") is None:
        return ["`watch` beside `run` was not measured: there is no ipykernel."]
    from bench.kernel import Kernel
    from bench.speed import live_picture

    with Kernel() as kernel:
        run_s, ratio = live_picture.compare(kernel, 5 if REHEARSAL else 100, rounds=5, limit_s=WATCH_LIMIT_S)
    return [f"Training takes {ratio:.2f} times as long with `watch` as with `run` ({run_s:.2f} s)."]


def main(folder: Path) -> int:
    """Measure, print and draw; returns how many parts failed, and says at the end which."""
    mpl.use("agg")
    print(*about(), sep="\n")
    parts: dict[str, Callable[[], Iterable[str]]] = {
        "step": lambda: step_in_a_picture(folder),
        "watch": watch_beside_run,
    }
    failed = []
    for name, part in parts.items():
        try:
            print(*part(), sep="\n", flush=True)
        except Exception as error:  # noqa: BLE001  # whatever it is, the other parts are measured
            traceback.print_exc()
            failed.append(f"{name} failed: {type(error).__name__}: {error}")
    print(*failed, sep="\n")
    return len(failed)


if __name__ == "__main__":
    sys.exit(min(main(Path(sys.argv[1])), 1))
