"""The page that `make gpu` writes: stages, machine, results, and pictures."""

from __future__ import annotations

import datetime
import os
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tools.gpu_machine import Machine

__all__ = ["about", "read_junit", "write"]

GIB: Final = 1 << 30
PICTURES: Final = {  # of the benchmark, with their captions and alternative texts
    "timeline": (
        "Two steps of DistributedDataParallel on two ranks.",
        "Timeline of two training steps on two ranks.",
    ),
    "memory": ("Two steps with Adam on one rank.", "Memory of one rank over two training steps, by kind."),
}


def about(machine: Machine) -> str:
    """The machine in one or two lines."""
    gpus = [f"{name}, {nbytes / GIB:.0f} GiB, compute capability {capability}" for name, nbytes, capability in machine.gpus]
    counted = [f"{gpus.count(gpu)} × {gpu}" for gpu in dict.fromkeys(gpus)] or ["no GPU"]
    versions = [f"Python {machine.version}", f"torch {machine.torch}"]
    versions += [f"CUDA {machine.cuda}"] * bool(machine.cuda) + [f"NCCL {machine.nccl}"] * bool(machine.nccl)
    versions += [f"driver {machine.driver}"] * bool(machine.driver)
    return f"{'; '.join(counted)}\n{', '.join(versions)}"


def read_junit(path: Path) -> dict[str, Any] | None:
    """The content of pytest's report: number of passes, failures, and reasons of skips; None if there is no report."""
    try:
        cases = list(ET.parse(path).getroot().iter("testcase"))
    except (OSError, ET.ParseError):
        return None
    failed, skipped = [], []
    for case in cases:
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        left_out = case.find("skipped")
        if bad is not None:
            failed.append([name, (bad.get("message") or "").split("\n")[0][:200]])
        elif left_out is not None:
            skipped.append([name, left_out.get("message") or ""])
    return {"passed": len(cases) - len(failed) - len(skipped), "failed": failed, "skipped": skipped}


def write(
    page: Path,
    machine: Machine,
    outcomes: Sequence[Mapping[str, Any]],
    results: Mapping[str, Any],
    figures: Path,
    *,
    rehearsal: bool,
) -> None:
    """Write the page and its pictures.

    Args:
        page: the file.
        machine: the machine that it ran on.
        outcomes: of the stages, in their order: `stage`, `state`, `seconds`, `missing`.
        results: by stage; None if a stage left nothing.
        figures: the folder that the stages drew into.
        rehearsal: whether all of it ran on the CPU.
    """
    title = "# A rehearsal of `make gpu`, on the CPU" if rehearsal else "# What ran on GPUs"
    lines = [title, ""]
    lines += [f"Written by `make gpu` on {datetime.datetime.now(datetime.UTC):%Y-%m-%d}. The machine:", ""]
    lines += [f"- {line}" for line in about(machine).splitlines()]
    lines += ["", "| stage | | seconds |", "|---|---|---|"]
    for outcome in outcomes:
        missing = f": `pip install {' '.join(outcome['missing'])}`" if outcome["missing"] else ""
        lines.append(f"| {outcome['stage']} | {outcome['state']}{missing} | {outcome['seconds']:.0f} |")
    lines += (
        _doctor(results.get("doctor"))
        + _tests(results.get("tests"))
        + _lessons(results.get("lessons"))
        + _benchmark(results.get("benchmark"))
    )
    lines += _pictures(page, figures)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _doctor(report: str | None) -> list[str]:
    return [] if report is None else ["", "## What `lab.doctor()` says", "", "```text", report, "```"]


def _tests(found: Mapping[str, Any] | None) -> list[str]:
    if found is None:
        return []
    total = found["passed"] + len(found["failed"])
    lines = ["", "## Tests", "", f"{found['passed']} of {total} tests passed; {len(found['skipped'])} were skipped."]
    lines += [""] * bool(found["failed"]) + [f"- **failed**: `{name}`: {message}" for name, message in found["failed"]]
    reasons: dict[str, int] = {}
    for _, reason in found["skipped"]:
        reasons[reason] = reasons.get(reason, 0) + 1
    return lines + [""] * bool(reasons) + [f"- skipped, {count}: {reason}" for reason, count in reasons.items()]


def _lessons(found: Sequence[Mapping[str, Any]] | None) -> list[str]:
    if not found:
        return []
    lines = ["", "## Lessons", "", "| lesson | seconds | cells | figures | cells that failed |", "|---|---|---|---|---|"]
    for lesson in found:
        failed = "; ".join(_in_table(text) for text in [*lesson["failed"], lesson["ended_by"]] if text) or "none"
        lines.append(
            f"| {lesson['lesson']} | {lesson['seconds']:.0f} | {lesson['cells']} | {len(lesson['figures'])} | {failed} |"
        )
    return lines


def _benchmark(found: Mapping[str, Any] | None) -> list[str]:
    if found is None:
        return []
    lines = ["", "## Benchmark", ""]
    if "step" in found:
        step = found["step"]
        lines.append(
            f"- A step of two ranks: {step['step_ms']:.1f} ms, with {step['gradients_mib']:.0f} MiB of gradients all-reduced; "
            f"{step['spans_on_gpu']} of {step['spans']} spans were timed by the GPU."
        )
    if "clocks" in found:
        clocks = found["clocks"]
        if clocks["kernels"]:
            ratio = clocks["by_events_ms"] / clocks["by_profiler_ms"] if clocks["by_profiler_ms"] else float("nan")
            lines.append(
                f"- The same kernels took {clocks['by_events_ms']:.2f} ms by labkit's CUDA events and "
                f"{clocks['by_profiler_ms']:.2f} ms by torch's profiler: {ratio:.3f} times as long. "
                f"{clocks['kernels_within']} of {clocks['kernels']} kernels are inside their spans."
            )
        else:
            lines.append("- torch's profiler saw no kernels.")
    if "watch" in found:
        watch = found["watch"]
        lines.append(
            f"- Training takes {watch['ratio'] - 1:+.1%} longer with `watch` than with `run` ({watch['run_s']:.2f} s)."
            if watch
            else "- `watch` beside `run` was not measured: there is no ipykernel."
        )
    if "predictions" in found:
        lines += ["", "| case | rate | predicted | measured | ratio |", "|---|---|---|---|---|"]
        for row in found["predictions"]:
            predicted_s, measured_s = row["predicted_s"], row["measured_s"]
            ratio = f"{measured_s / predicted_s:.2f}" if predicted_s else "–"
            lines.append(f"| {row['case']} | {row['rate']} | {predicted_s * 1e3:.3f} ms | {measured_s * 1e3:.3f} ms | {ratio} |")
    return lines


def _pictures(page: Path, figures: Path) -> list[str]:
    lines: list[str] = []
    for name, (caption, alternative) in PICTURES.items():
        drawn = figures / f"{name}.png"
        if not drawn.exists():
            continue
        shown = page.parent / "pictures" / f"gpu_{name}.png"
        shown.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(drawn, shown)
        lines += ["", f"![{alternative}]({os.path.relpath(shown, page.parent)})", "", caption]
    return ["", "## Pictures", *lines] if lines else []


def _in_table(text: str) -> str:
    """Text that is safe inside a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")[:200]
