"""The page that `make gpu` writes: the machine, what failed, the end of each stage's log, and pictures."""

from __future__ import annotations

import datetime
import os
import re
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.gpu_machine import ROOT, Machine

GIB: Final = 1 << 30
WIDTH: Final = 120  # characters in a line of prose, as in all docs
TAIL_LINES, SHOWN_LINES = 15, 80  # of a log, where its stage failed, and in the stage's own section
PICTURES: Final = {  # of the benchmark, with their captions and alternative texts
    "timeline": (
        "Two steps of DistributedDataParallel on two ranks.",
        "Timeline of two training steps on two ranks.",
    ),
    "memory": ("Two steps with Adam on one rank.", "Memory of one rank over two training steps, by kind."),
}


@dataclass(frozen=True)
class Outcome:
    """The outcome of a stage."""

    stage: str  # its name
    log: Path  # its output; every stage says at the end what failed
    state: str  # "ran", "failed" (it finished, and something in it failed), "timed out", or "not run"
    seconds: float = 0.0  # how long it took
    missing: tuple[str, ...] = ()  # the packages that kept it from running

    def last(self, count: int) -> list[str]:
        """The last lines of the log."""
        return self.log.read_text(errors="replace").splitlines()[-count:] if self.log.exists() else []


def about(machine: Machine) -> str:
    """The machine in two lines."""
    gpus = [f"{name}, {nbytes / GIB:.0f} GiB, compute capability {capability}" for name, nbytes, capability in machine.gpus]
    counted = [f"{gpus.count(gpu)} × {gpu}" for gpu in dict.fromkeys(gpus)] or ["no GPU"]
    versions = [f"Python {machine.version}", f"torch {machine.torch}"]
    versions += [f"CUDA {machine.cuda}"] * bool(machine.cuda) + [f"NCCL {machine.nccl}"] * bool(machine.nccl)
    versions += [f"driver {machine.driver}"] * bool(machine.driver)
    return f"{'; '.join(counted)}\n{', '.join(versions)}"


def in_one_line(message: str) -> str:
    """The beginning of an error's message, without the lines that are only drawn."""
    return " | ".join(line.strip() for line in message.splitlines() if any(map(str.isalnum, line)))[:300]


def failures(outcomes: Sequence[Outcome]) -> dict[str, list[str]]:
    """What failed: for each stage that did not run through, a heading, and the end of its log."""
    found = {}
    for one in outcomes:
        if one.missing:
            found[f"{one.stage}: {one.state}"] = [f"pip install {' '.join(one.missing)}"]
        elif one.state != "ran":
            found[f"{one.stage}: {one.state} after {one.seconds:.0f} s"] = [
                f"The last lines of build/gpu/{one.log.name}:", *(f"  {line[:300]}" for line in one.last(TAIL_LINES)),
            ]  # fmt: skip
    return found


def write(page: Path, machine: Machine, outcomes: Sequence[Outcome], folder: Path, *, rehearsal: bool) -> None:
    """Write the page and its pictures, which are in the folder; in a rehearsal, all of it ran on the CPU."""
    lines = ["# A rehearsal of `make gpu`, on the CPU" if rehearsal else "# What ran on GPUs", ""]
    lines += [f"Written by `make gpu` on {datetime.datetime.now(datetime.UTC):%Y-%m-%d}. The machine:", ""]
    for item in [*about(machine).splitlines(), _not_shown(len(machine.gpus), rehearsal)]:
        lines.append(textwrap.fill(f"- {item}", WIDTH, subsequent_indent="  ", break_on_hyphens=False))
    failed = failures(outcomes)
    lines += ["", "## What failed"] * bool(failed)
    for heading, details in failed.items():
        lines += ["", f"### {heading}", *_block(details)]
    lines += ["", "## Stages", "", "| stage | | seconds |", "|---|---|---|"]
    lines += [f"| {one.stage} | {one.state} | {one.seconds:.0f} |" for one in outcomes]
    for one in outcomes:
        if not one.missing:
            lines += ["", f"## {one.stage.capitalize()}", *_block(one.last(SHOWN_LINES))]
    lines += _pictures(page, folder)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(_without_paths("\n".join(lines)) + "\n", encoding="utf-8")


def _not_shown(gpus: int, rehearsal: bool) -> str:
    """What this machine cannot show."""
    if rehearsal:
        return "This was a rehearsal on the CPU: nothing of CUDA, NCCL and NVML has run."
    if gpus == 1:
        return "With one GPU, NCCL between GPUs has not run: it ran with one rank, and ranks that share the GPU use gloo."
    return f"With {gpus} GPUs, groups of up to {gpus} ranks use NCCL between GPUs."


def _block(lines: Sequence[str]) -> list[str]:
    """Text as it is, but for what the checks of the docs would take for names of files and for links."""
    return ["", "```text", *(line.rstrip().replace("`", "'").replace("](", "] (") for line in lines), "```"]


def _without_paths(text: str) -> str:
    """The page without the folders of the machine that it was written on."""
    return re.sub(r"/(home|Users|root)/", "~/", text.replace(f"{ROOT}/", "").replace(str(ROOT), "."))


def _pictures(page: Path, folder: Path) -> list[str]:
    lines: list[str] = []
    for name, (caption, alternative) in PICTURES.items():
        drawn = folder / f"{name}.png"
        if not drawn.exists():
            continue
        shown = page.parent / "pictures" / f"gpu_{name}.png"
        shown.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(drawn, shown)
        lines += ["", f"![{alternative}]({os.path.relpath(shown, page.parent)})", "", caption]
    return ["", "## Pictures", *lines] if lines else []
