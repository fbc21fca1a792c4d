"""The page that `make gpu` writes: what failed, the end of each stage's log, and pictures."""

from __future__ import annotations

import datetime
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
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
    state: str  # "ran", "failed" (it finished, and something in it failed) or "timed out"
    seconds: float = 0.0  # how long it took

    def last(self, count: int) -> list[str]:
        """The last lines of the log."""
        return self.log.read_text(errors="replace").splitlines()[-count:] if self.log.exists() else []


def in_one_line(message: str) -> str:
    """The beginning of an error's message, without the lines that are only drawn."""
    return " | ".join(line.strip() for line in message.splitlines() if any(map(str.isalnum, line)))[:300]


def failures(outcomes: Sequence[Outcome]) -> dict[str, list[str]]:
    """What failed: for each stage that did not run through, a heading, and the end of its log."""
    found = {}
    for one in outcomes:
        if one.state != "ran":
            found[f"{one.stage}: {one.state} after {one.seconds:.0f} s"] = [
                f"The last lines of build/gpu/{one.log.name}:", *(f"  {line[:300]}" for line in one.last(TAIL_LINES)),
            ]  # fmt: skip
    return found


def write(page: Path, outcomes: Sequence[Outcome], folder: Path, *, rehearsal: bool) -> None:
    """Write the page and its pictures, which are in the folder; in a rehearsal, all of it ran on the CPU."""
    lines = ["# A rehearsal of `make gpu`, on the CPU" if rehearsal else "# What ran on GPUs", ""]
    lines += [f"Written by `make gpu` on {datetime.datetime.now(datetime.UTC):%Y-%m-%d}."]
    lines += ["Nothing of CUDA, NCCL and NVML has run." if rehearsal else "On one GPU, NCCL between GPUs does not run."]
    failed = failures(outcomes)
    lines += ["", "## What failed"] * bool(failed)
    for heading, details in failed.items():
        lines += ["", f"### {heading}", *_block(details)]
    lines += ["", "## Stages", "", "| stage | | seconds |", "|---|---|---|"]
    lines += [f"| {one.stage} | {one.state} | {one.seconds:.0f} |" for one in outcomes]
    for one in outcomes:
        lines += ["", f"## {one.stage.capitalize()}", *_block(one.last(SHOWN_LINES))]
    lines += _pictures(page, folder)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(_without_paths("\n".join(lines)) + "\n", encoding="utf-8")


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
