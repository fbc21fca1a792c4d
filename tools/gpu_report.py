"""The page that `make gpu` writes: machine, what failed, stages, results, and pictures."""

from __future__ import annotations

import datetime
import os
import re
import shutil
import textwrap
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tools.gpu_machine import ROOT, Machine

__all__ = ["about", "failures", "in_one_line", "read_tests", "write"]

GIB: Final = 1 << 30
WIDTH: Final = 120  # characters in a line of prose, as in all docs
TAIL_LINES: Final = 15  # of a log
PICTURES: Final = {  # of the benchmark, with their captions and alternative texts
    "timeline": (
        "Two steps of DistributedDataParallel on two ranks.",
        "Timeline of two training steps on two ranks.",
    ),
    "memory": ("Two steps with Adam on one rank.", "Memory of one rank over two training steps, by kind."),
}


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


def read_tests(folder: Path) -> dict[str, Any] | None:
    """The results of the tests: number of passes, failures, skips with reasons, and the test that had not ended.

    They are in pytest's report. If pytest was ended before it wrote one, its log has them, without the reasons; None if
    there is neither.
    """
    try:
        cases = list(ET.parse(folder / "tests.xml").getroot().iter("testcase"))
    except (OSError, ET.ParseError):
        return _tests_in_log(folder / "tests.log")
    failed, skipped = [], []
    for case in cases:
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        left_out = case.find("skipped")
        if bad is not None:
            failed.append([name, in_one_line(bad.get("message") or "")])
        elif left_out is not None:
            skipped.append([name, left_out.get("message") or ""])
    return {"passed": len(cases) - len(failed) - len(skipped), "failed": failed, "skipped": skipped, "running": ""}


def _tests_in_log(log: Path) -> dict[str, Any] | None:
    """`pytest -v` writes a test's name before it, and how it ended, with the progress in per cent, after it."""
    if not log.exists():
        return None
    passed, failed, running = 0, [], ""
    for text in re.split(r"^tests/(?=\S+::)", log.read_text(errors="replace"), flags=re.MULTILINE)[1:]:
        name = text.split()[0]
        state = re.search(r"\b(PASSED|FAILED|ERROR|SKIPPED)\b.*\[ *\d+%\]", text)
        if state is None:
            running = name
        elif state[1] == "PASSED":
            passed += 1
        elif state[1] != "SKIPPED":
            failed.append([name, "see the log"])
    return {"passed": passed, "failed": failed, "skipped": [], "running": running}


def failures(outcomes: Sequence[Mapping[str, Any]], results: Mapping[str, Any], folder: Path) -> dict[str, list[str]]:
    """What failed: for each stage that did not run through, a heading, and lines with its failures and its log's end.

    Args:
        outcomes: of the stages, in their order: `stage`, `state`, `seconds`, `missing`.
        results: by stage; None if a stage left nothing.
        folder: where the logs are.
    """
    found = {}
    for outcome in outcomes:
        stage, log = outcome["stage"], folder / f"{outcome['stage']}.log"
        if outcome["missing"]:
            found[f"{stage}: {outcome['state']}"] = [f"pip install {' '.join(outcome['missing'])}"]
        elif outcome["state"] != "ran":
            tail = log.read_text(errors="replace").splitlines()[-TAIL_LINES:] if log.exists() else []
            heading = f"The last lines of build/gpu/{log.name}:" if tail else f"build/gpu/{log.name} is empty."
            found[f"{stage}: {outcome['state']} after {outcome['seconds']:.0f} s"] = [
                *_failed(stage, results.get(stage)), heading, *(f"  {line[:300]}" for line in tail),
            ]  # fmt: skip
    return found


def _failed(stage: str, result: Any) -> list[str]:
    """The failures in a stage's result, a line each."""
    if stage == "smoke":
        return [line for line in (result or "").splitlines() if line.startswith("FAILED")]
    if stage == "tests" and result:
        running = [f"{result['running']}: had not ended"] * bool(result["running"])
        return [*(f"{name}: {message}" for name, message in result["failed"]), *running]
    if stage == "lessons":
        return [f"{lesson['lesson']}: {text}" for lesson in result or [] for text in lesson["failed"]]
    return []


def write(
    page: Path,
    machine: Machine,
    outcomes: Sequence[Mapping[str, Any]],
    results: Mapping[str, Any],
    folder: Path,
    *,
    rehearsal: bool,
) -> None:
    """Write the page and its pictures.

    Args:
        page: the file.
        machine: the machine that it ran on.
        outcomes: of the stages, in their order: `stage`, `state`, `seconds`, `missing`.
        results: by stage; None if a stage left nothing.
        folder: where the stages' logs and figures are.
        rehearsal: whether all of it ran on the CPU.
    """
    title = "# A rehearsal of `make gpu`, on the CPU" if rehearsal else "# What ran on GPUs"
    lines = [title, ""]
    lines += [f"Written by `make gpu` on {datetime.datetime.now(datetime.UTC):%Y-%m-%d}. The machine:", ""]
    lines += [_item(line) for line in [*about(machine).splitlines(), _not_shown(len(machine.gpus), rehearsal)]]
    failed = failures(outcomes, results, folder)
    lines += ["", "## What failed"] * bool(failed)
    for heading, details in failed.items():
        lines += ["", f"### {heading}", *_block("\n".join(details))]
    lines += ["", "## Stages", "", "| stage | | seconds |", "|---|---|---|"]
    for outcome in outcomes:
        lines.append(f"| {outcome['stage']} | {outcome['state']} | {outcome['seconds']:.0f} |")
    for heading, text in (("What `lab.doctor()` says", "doctor"), ("The pre-flight", "smoke")):
        if results.get(text) is not None:
            lines += ["", f"## {heading}", *_block(results[text])]
    lines += _tests(results.get("tests")) + _lessons(results.get("lessons")) + _benchmark(results.get("benchmark"))
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


def _item(text: str) -> str:
    """An item of a list, in lines of prose."""
    return textwrap.fill(f"- {text}", WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _block(text: str) -> list[str]:
    """Text as it is, but for what the checks of the docs would take for names of files and for links."""
    return ["", "```text", text.rstrip().replace("`", "'").replace("](", "] ("), "```"]


def _without_paths(text: str) -> str:
    """The page without the folders of the machine that it was written on."""
    return re.sub(r"/(home|Users|root)/", "~/", text.replace(f"{ROOT}/", "").replace(str(ROOT), "."))


def _tests(found: Mapping[str, Any] | None) -> list[str]:
    if found is None:
        return []
    passed, failed, skipped = found["passed"], len(found["failed"]), len(found["skipped"])
    counted = f"{passed} of {passed + failed} tests passed; {skipped} were skipped."
    if found["running"]:
        counted = f"{passed} of {passed + failed} tests passed before the time of the stage was over."
    lines = ["", "## Tests", "", counted]
    reasons: dict[str, int] = {}
    for _, reason in found["skipped"]:
        reasons[reason] = reasons.get(reason, 0) + 1
    return lines + [""] * bool(reasons) + [_item(f"skipped, {count}: {reason}") for reason, count in reasons.items()]


def _lessons(found: Sequence[Mapping[str, Any]] | None) -> list[str]:
    if not found:
        return []
    lines = ["", "## Lessons", "", "| lesson | seconds | cells | figures | failures |", "|---|---|---|---|---|"]
    for lesson in found:
        figures, failed = len(lesson["figures"]), len(lesson["failed"]) or "none"
        lines.append(f"| {lesson['lesson']} | {lesson['seconds']:.0f} | {lesson['cells']} | {figures} | {failed} |")
    return lines


def _benchmark(found: Mapping[str, Any] | None) -> list[str]:
    if found is None:
        return []
    lines = ["", "## Benchmark", ""]
    if "step" in found:
        step = found["step"]
        lines.append(
            _item(
                f"A step of two ranks: {step['step_ms']:.1f} ms, with {step['gradients_mib']:.0f} MiB of gradients all-reduced; "
                f"{step['spans_on_gpu']} of {step['spans']} spans were timed by the GPU."
            )
        )
    if "clocks" in found:
        lines.append(_item(_clocks(found["clocks"])))
    if "watch" in found:
        watch = found["watch"]
        lines.append(
            _item(f"Training takes {watch['ratio']:.2f} times as long with `watch` as with `run` ({watch['run_s']:.2f} s).")
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


def _clocks(found: Mapping[str, Any]) -> str:
    if not found["kernels"]:
        return "torch's profiler saw no kernels."
    ratio = found["by_events_ms"] / found["by_profiler_ms"] if found["by_profiler_ms"] else float("nan")
    return (
        f"The same kernels took {found['by_events_ms']:.2f} ms by labkit's CUDA events and "
        f"{found['by_profiler_ms']:.2f} ms by torch's profiler: {ratio:.3f} times as long. "
        f"{found['kernels_within']} of {found['kernels']} kernels are inside their spans."
    )


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
