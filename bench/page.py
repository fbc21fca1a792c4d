"""What every benchmark prints: the machine, numbers in suitable units, Markdown tables, and sections of a page."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from labkit.recording.cores import usable_cores
from labkit.worker.runtimes.devices import gpu_count


def about() -> list[str]:
    """The machine, the installed versions, the load and the date, as items of a list."""
    models = re.findall(r"^model name\s*: (.*)", _text("/proc/cpuinfo"), re.MULTILINE) or [platform.machine()]
    memory_gib, gpus = psutil.virtual_memory().total / 2**30, gpu_count()
    versions = [f"{name} {_version(name)}" for name in ("torch", "numpy", "ipykernel")]
    return [
        f"- {models[0]}, {usable_cores():g} cores for this process, {memory_gib:.0f} GiB of memory, "
        + (f"{gpus} GPU{'s' * (gpus > 1)}" if gpus else "no GPU"),
        f"- {platform.system()} {platform.release()}, Python {platform.python_version()}, {', '.join(versions)}",
        f"- load before the start (1, 5, 15 min): {_load()}",
        f"- {datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
    ]


def load_afterwards() -> str:
    """The load, as an item of the same list."""
    return f"- load afterwards (1, 5, 15 min): {_load()}"


def _load() -> str:
    return ", ".join(f"{x:.1f}" for x in os.getloadavg())


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _text(path: str) -> str:
    return Path(path).read_text() if Path(path).exists() else ""


def duration(seconds: float | None) -> str:
    """A duration in a suitable unit."""
    if seconds is None:
        return "–"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.{0 if seconds / size >= 100 else 1 if seconds / size >= 10 else 2}f} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def mib(size: float | None) -> str:
    """A size in MiB."""
    return "–" if size is None else f"{size / 2**20:.0f} MiB"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows as a Markdown table, padded for reading as plain text."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines]
    return "\n".join([text[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *text[1:]])


def options(program: str, description: str | None, tries: int = 0) -> argparse.Namespace:
    """The options of a program that measures cases and prints a section of a page: `write`, `only` and `tries`."""
    parser = argparse.ArgumentParser(f"python -m {program}", description=description)
    parser.add_argument("--write", metavar="FILE", type=Path, help="put the section into this page, in place of the old one")
    parser.add_argument("--only", default="", help="the cases whose names contain this")
    if tries:
        parser.add_argument("--tries", type=int, default=tries, help="of each case (default: %(default)s)")
    return parser.parse_args()


def publish(lines: Sequence[str], write: Path | None) -> None:
    """Print a section, whose first line is its heading, and put it into a page if there is one."""
    text = "\n".join(lines)
    print(text)
    if write:
        write.write_text(with_section(write.read_text(encoding="utf-8") if write.exists() else "", text), encoding="utf-8")


def with_section(page: str, new: str) -> str:
    """The page with a section, which begins with its heading, in place of the old one, or at the end."""
    heading = new.partition("\n")[0]
    before, _, old = f"\n{page}".partition(f"\n{heading}\n")
    _, second, others = old.partition("\n## ")
    parts = [before.strip(), new.strip(), (second + others).strip()]
    return "\n\n".join(filter(None, parts)) + "\n"


def say(line: str) -> None:
    """What is measured now, on stderr."""
    print(line, file=sys.stderr, flush=True)
