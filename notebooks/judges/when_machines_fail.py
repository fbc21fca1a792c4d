"""The exercises of lesson 17: how often to save, useful time, a file that survives, all that a training needs."""

from __future__ import annotations

import copy
import os
import sys
import tempfile
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from random import Random
from typing import Any, Final
from unittest import mock

import torch
from torch import nn

from labkit.teaching.exercises.comparisons import expect, expect_numbers, wrong_if
from labkit.teaching.exercises.exercise import Results, exercise
from labkit.teaching.exercises.random_state import case_seed

LESSON = "17_when_machines_fail"


@exercise(
    LESSON, "A job on more GPUs fails more often, and saves more often: by the square root.",
    [(60.0, 50_000, 1_024), (60.0, 50_000, 16_384), (5.0, 10_000, 8)],
    other=lambda random: (random.uniform(10, 90), random.randint(10_000, 90_000), random.randint(4, 900)),
)
def save_interval(answer: Any, save_s: float, gpu_hours: float, gpus: int) -> None:
    """save_interval(save_s, gpu_hours, gpus) returns the best interval between two saves, in seconds: a save takes
    `save_s` seconds, a single GPU fails every `gpu_hours` hours, and any failure stops the job."""
    failure_s = 3600 * gpu_hours / gpus
    expect_numbers(answer(save_s, gpu_hours, gpus), sqrt(2 * save_s * failure_s), [
        (sqrt(2 * save_s * 3600 * gpu_hours), "that is the interval of a job on one GPU: how often does one of many fail?",
         "divide the GPU's time between failures by their number"),
        (sqrt(2 * save_s * failure_s / 3600), "save_s is in seconds, gpu_hours in hours", "one hour has 3,600 seconds"),
        (sqrt(save_s * failure_s), "a factor is missing: a failure costs half an interval on average",
         "the share of time lost is save/interval + interval/(2 · failure)"),
        (2 * save_s * failure_s, "that is the square of the interval", "take the square root"),
        (sqrt(2 * save_s * 3600 * gpu_hours * gpus), "more GPUs make failures more frequent, not rarer",
         "divide the GPU's time between failures by their number"),
    ], "set the derivative of save/interval + interval/(2 · failure) to zero")


Attempts = list[tuple[float, float, int, int]]


def _attempts(random: Random) -> tuple[Attempts, float]:
    attempts, start, first = [], random.uniform(0, 9), random.randint(0, 9)
    for _ in range(random.randint(2, 5)):
        last = first + random.randint(5, 60)
        end = start + 0.3 * (last - first) + random.uniform(0, 5)
        attempts.append((start, end, first, last))
        start, first = end + random.uniform(1, 5), last - random.randint(1, 5)
    return attempts, 0.25


@exercise(
    LESSON, "A step counts if no later attempt computes it again; the time includes saves and gaps.",
    [([(5.0, 26.0, 10, 50), (32.0, 50.0, 40, 75), (55.0, 66.0, 60, 80)], 0.5), ([(0.0, 10.0, 0, 16)], 0.5)],
    other=_attempts,
)
def goodput(answer: Any, attempts: Attempts, step_s: float) -> None:
    """goodput(attempts, step_s) returns the share of a job's time in which it computed steps that count. An attempt
    (start_s, end_s, first, last) computed the steps from first up to, but not including, last."""
    done, whole = attempts[-1][3] - attempts[0][2], attempts[-1][1] - attempts[0][0]
    computed, running = sum(a[3] - a[2] for a in attempts), sum(a[1] - a[0] for a in attempts)
    expect_numbers(answer(attempts, step_s), done * step_s / whole, [
        (computed * step_s / whole, "here, steps that were computed twice count twice",
         "what comes after the next attempt's first step is lost"),
        (done * step_s / running, "the gaps between the attempts are part of the whole time",
         "from the first start to the last end"),
        (attempts[-1][3] * step_s / whole, "the job did not begin with step 0", "subtract the first attempt's first step"),
        (done * step_s / attempts[-1][1], "the job did not begin at second 0", "subtract the first attempt's start"),
        (1 - done * step_s / whole, "that is the share that is lost", "1 minus this"),
    ], "useful steps times step_s, divided by the time from the first start to the last end")


class _Disk:
    """What would be on the disk after a power failure: of each file, by inode, only what fsync has waited for."""

    def __init__(self, path: Path, old: bytes, new: bytes) -> None:
        self.path, self.new, self.wrong = path, new, ""
        self.durable = {path.stat().st_ino: old}
        self.watching = True
        self._fsync = os.fsync
        sys.addaudithook(self._happens)  # sees each way to open or rename a file

    def _happens(self, event: str, details: tuple[Any, ...]) -> None:
        if not self.watching or event not in ("open", "os.rename") or isinstance(details[0], int):
            return
        if event == "os.rename" and os.path.abspath(details[1]) == str(self.path):
            if os.path.exists(details[0]) and self.durable.get(os.stat(details[0]).st_ino) != self.new:
                self.wrong = self.wrong or "renamed"
        elif event == "open" and details[2] & (os.O_WRONLY | os.O_RDWR) and os.path.abspath(details[0]) == str(self.path):
            self.wrong = self.wrong or "in place"

    def fsync(self, file: Any) -> None:
        """Wait for a file: what the system has of it is on the disk. Python's own buffer is not."""
        self._fsync(file)
        inode = os.fstat(file).st_ino if isinstance(file, int) else os.fstat(file.fileno()).st_ino
        for name in self.path.parent.iterdir():
            if name.stat().st_ino == inode:
                self.durable[inode] = name.read_bytes()


def _write(answer: Callable[..., object]) -> tuple[str, bool, bool, list[str]]:
    """Call the answer; return what was wrong, whether the new content is there and durable, and what else is left."""
    random = Random(case_seed(0))
    old, new = random.randbytes(700), random.randbytes(900)
    with tempfile.TemporaryDirectory() as name:
        path = Path(os.path.abspath(name)) / "saved.pt"
        path.write_bytes(old)
        disk = _Disk(path, old, new)
        with mock.patch.object(os, "fsync", disk.fsync):
            answer(str(path), new)
        disk.watching = False
        left = sorted(file.name for file in path.parent.iterdir() if file != path)
        return disk.wrong, path.read_bytes() == new, disk.durable.get(path.stat().st_ino) == new, left


@exercise(
    LESSON, "At each moment, the name stands for a complete file.",
    on_ranks=_write, ranks=1, call="write_safely(path, data)",
)
def write_safely(results: Results) -> None:
    """write_safely(path, data) replaces the content of the file `path` by the bytes `data`. After a power failure at
    any moment, the disk has the old or the new content under this name, complete."""
    wrong, written, durable, left = results[0]
    wrong_if(wrong == "in place", "the file is opened for writing under its own name: from then on the old content is gone",
             "write into a new file in the same folder, and rename it with os.replace")
    wrong_if(not written, "the file does not have the new content", "os.replace(new, path) gives the new file the name")
    wrong_if(wrong == "renamed", "the name changes before the content is on the disk: a power failure now leaves a file "
             "that is cut off", "after the write: file.flush(), os.fsync(file.fileno()); then os.replace")
    wrong_if(not durable, "the new content is never waited for", "call os.fsync before os.replace")
    wrong_if(left, f"another file is left behind: {', '.join(left)}", "os.replace moves the new file; remove any other")


class _Job:
    """A small training with all that a checkpoint needs."""

    def __init__(self) -> None:
        torch.manual_seed(case_seed(0))
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.order = torch.Generator().manual_seed(case_seed(1))
        self.step = 0

    def advance(self, steps: int) -> list[float]:
        """Train, and return the losses."""
        losses = []
        for _ in range(steps):
            batch = torch.randn(4, 6, generator=self.order, dtype=torch.float64)
            loss = self.model(batch).pow(2).mean() + 0.01 * self.step
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.step += 1
            losses.append(loss.item())
        return losses

    def load(self, name: str, part: Any) -> None:
        """Take over a part of a state."""
        if name in ("model", "optimizer", "schedule"):
            getattr(self, name).load_state_dict(part)
        elif name == "step":
            self.step = int(part)
        else:
            (self.order.set_state if name == "order" else torch.set_rng_state)(part)


PARTS: Final = ("model", "optimizer", "schedule", "order", "random", "step")
STEPS: Final = 5


def _resumed(state: dict[str, Any]) -> list[float] | str:
    """Return the losses of a job that begins with a state, or the part that is no state."""
    job = _Job()
    for name in PARTS:
        try:
            job.load(name, copy.deepcopy(state[name]))
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
            return name
    return job.advance(STEPS)


def _go_on(answer: Callable[..., object]) -> tuple[Any, ...]:
    """Return the answer's keys, and the losses of the job that went on, of one that begins with the answer's state, and
    of one that begins with tensors that have changed meanwhile."""
    job = _Job()
    job.advance(STEPS)
    random = torch.get_rng_state()
    state = answer(job)
    torch.set_rng_state(random)
    if not isinstance(state, dict) or set(state) != set(PARTS):
        return list(state) if isinstance(state, dict) else None, [], [], []
    states = {name: getattr(job, name).state_dict() for name in ("model", "optimizer", "schedule")}
    aliased = {**states, "order": job.order.get_state(), "random": random, "step": job.step}
    losses = job.advance(STEPS)  # the training goes on before the state is written
    return list(PARTS), losses, _resumed(state), _resumed(aliased)


@exercise(
    LESSON, "The resumed training has the losses of one that was never interrupted.",
    on_ranks=_go_on, ranks=1, call="everything(job)",
)
def everything(results: Results) -> None:
    """everything(job) returns a dictionary with the states of `model`, `optimizer`, `schedule`, `order`, `random` and
    `step`, which a thread writes while the training goes on."""
    keys, right, given, aliased = results[0]
    wrong_if(keys is None, "it returned no dictionary", f"return a dictionary with the keys {', '.join(PARTS)}")
    missing, extra = ([name for name in PARTS if name not in keys], [name for name in keys if name not in PARTS])
    wrong_if(missing, f"the resumed training needs more: {', '.join(missing)} is missing")
    wrong_if(extra, f"the job has no part of this name: {', '.join(extra)}", f"the keys are {', '.join(PARTS)}")
    wrong_if(isinstance(given, str), f"{given} is no state that the job can load",
             "state_dict() of the model, the optimizer and the schedule, get_state() of the generator, torch.get_rng_state()")
    expect(given, right, [
        (aliased, "the training went on, and changed the tensors that you had returned: the thread writes a mixture",
         "return copies: copy.deepcopy"),
    ], "the resumed training has other losses than the one that went on: is each part the state at the time of the call?",
       "", f"losses after the restart {given}, expected {right}")
