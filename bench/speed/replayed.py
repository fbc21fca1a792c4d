"""What `lab.replay` says about changes of a program, beside the changed program really run."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import labkit as lab
from bench.page import about, load_afterwards, options, publish, say, table
from bench.speed import programs
from bench.speed.programs import Work
from labkit.recording.cores import usable_cores

TRIES: Final = 5
FAST: Final = lab.Link(gbit_per_s=1, latency_us=50)
SLOW: Final = lab.Link(gbit_per_s=0.1, latency_us=50)
FAR: Final = lab.Link(gbit_per_s=1, latency_us=2000)
Program = Callable[..., None]


@dataclass(frozen=True)
class Run:
    """A program and the group that runs it."""

    program: Program  # the program
    arguments: tuple[Any, ...]  # its arguments
    ranks: int | tuple[str, ...]  # how many ranks; if they are named, the program calls functions remotely
    link: lab.Link | None = FAST  # their link
    one_core: bool = False  # whether all ranks are kept on one core


@dataclass(frozen=True)
class Case:
    """A run, the same run after a change, and the arguments of `lab.replay` that predict it."""

    name: str  # program and change
    base: Run  # what is recorded
    changed: Run  # what is predicted
    change: dict[str, Any] = field(default_factory=dict)  # the arguments


def _named() -> dict[str, tuple[Program, tuple[Any, ...]]]:
    """The programs of the groups that communicate by collectives and messages, with arguments after the first."""
    return {
        "DDP": (programs.data_parallel, ()),
        "FSDP2": (programs.shards, ()),
        "tensor parallel": (programs.tensor_parallel, ()),
        "GPipe": (programs.pipeline, ("ScheduleGPipe",)),
        "1F1B": (programs.pipeline, ("Schedule1F1B",)),
    }


def undisturbed() -> Iterator[Case]:
    """Layers that sleep."""
    usual, lame = Work(), Work(straggler=2)
    for name, (program, more) in _named().items():
        base = Run(program, (usual, *more), 4)
        slow, far, ill = replace(base, link=SLOW), replace(base, link=FAR), replace(base, arguments=(lame, *more))
        yield Case(f"{name}, 1 → 0.1 Gbit/s", base, slow, {"link": SLOW})
        yield Case(f"{name}, 0.1 → 1 Gbit/s", slow, base, {"link": FAST})
        yield Case(f"{name}, latency 50 µs → 2 ms", base, far, {"link": FAR})
        longer = replace(base, arguments=(Work(backward=2), *more))
        yield Case(f"{name}, backward twice as slow", base, longer, {"slower": {"gradient": 2}})
        yield Case(f"{name}, rank 1 like the others", ill, base, {"like_others": 1})
    parts = Run(programs.data_parallel, (usual,), 4)
    yield Case("DDP, no link → 1 Gbit/s", replace(parts, link=None), parts, {"link": FAST})
    yield Case("DDP, one bucket", parts, replace(parts, arguments=(usual, 1000.0)), {"one_bucket": True})
    call = Run(programs.calls, (usual,), ("caller", "first", "second"))
    slow = replace(call, link=SLOW)
    yield Case("RPC, 1 → 0.1 Gbit/s", call, slow, {"link": SLOW})
    yield Case("RPC, 0.1 → 1 Gbit/s", slow, call, {"link": FAST})
    server = replace(call, arguments=(Work(forward=6),))
    yield Case("RPC, servers 6 times as slow", call, server, {"slower": {"look up": 6}})
    ill = replace(call, arguments=(Work(straggler=6),))
    yield Case("RPC, the first server 6 times as fast", ill, call, {"faster": {"look up": 6}, "rank": 1})


def computing() -> Iterator[Case]:
    """Layers that compute, with a core for each rank."""
    usual = Work(sleeps=False)
    for name, (program, more) in _named().items():
        base = Run(program, (usual, *more), 2)
        slow, ill = replace(base, link=SLOW), replace(base, arguments=(replace(usual, straggler=4), *more))
        yield Case(f"{name}, 1 → 0.1 Gbit/s", base, slow, {"link": SLOW})
        yield Case(f"{name}, 0.1 → 1 Gbit/s", slow, base, {"link": FAST})
        yield Case(f"{name}, rank 1 without extra work", ill, base, {"faster": {"extra work": 1e6}, "rank": 1})


def sharing() -> Iterator[Case]:
    """Layers that compute, two ranks on one core: as if each had its own."""
    for name, (program, more) in _named().items():
        base = Run(program, (Work(sleeps=False), *more), 2)
        yield Case(f"{name}, own_cores=True", replace(base, one_core=True), base, {"own_cores": True})


class Groups:
    """One group for each kind of run, kept until the end."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self._opened = stack, dict[Any, lab.Group]()

    def run(self, run: Run) -> lab.Run:
        """Run it once."""
        if not run.one_core:
            return self._group(run).run(run.program, *run.arguments)
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cores)})  # a group counts the cores that it may use when its ranks start
        try:
            return self._group(run).run(_on_one_core, run.program, *run.arguments)
        finally:
            os.sched_setaffinity(0, cores)

    def _group(self, run: Run) -> lab.Group:
        kind = run.ranks, run.link, run.one_core
        if kind not in self._opened:
            runtime = "torch" if isinstance(run.ranks, int) else "rpc"
            group = lab.Group(run.ranks, runtime=runtime, link=run.link, devices="cpu", threads=1)
            self._opened[kind] = self._stack.enter_context(group)
        return self._opened[kind]


def _on_one_core(program: Program, *arguments: Any) -> None:
    """In a rank: keep all of its threads on the first core, then run the program."""
    first = {min(os.sched_getaffinity(0))}
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), first)
    program(*arguments)


def rows(cases: Iterator[Case], groups: Groups, tries: int) -> Iterator[tuple[list[str], float, float]]:
    """For each case: the cells of its row, its ratio, and how far an unchanged replay is from the recorded run."""
    for case in cases:
        say(case.name)
        recorded, predicted, real, same = [], [], [], []
        for _ in range(tries):
            base = groups.run(case.base)
            recorded.append(lab.step_ms(base))
            same.append(abs(lab.step_ms(lab.replay(base)) / recorded[-1] - 1))
            predicted.append(lab.step_ms(lab.replay(base, **case.change)))
            real.append(lab.step_ms(groups.run(case.changed)))
        medians = [statistics.median(times) for times in (recorded, predicted, real)]
        ratio = medians[1] / medians[2]
        cells = [case.name, *(f"{ms:.1f}" for ms in medians), f"{min(real):.1f} to {max(real):.1f}", f"{ratio:.3f}"]
        yield cells, ratio, max(same)


def changes(ratio_by_case: dict[str, float]) -> list[list[str]]:
    """A row of the page for each change: in how many programs it was made, and predicted times over real ones."""
    by_change: dict[str, list[float]] = {}
    for case, ratio in ratio_by_case.items():
        by_change.setdefault(case.partition(", ")[2], []).append(ratio)
    cells = []
    for change, found in by_change.items():
        all_of_them = f"{min(found):.3f} to {max(found):.3f}" if len(found) > 1 else ""
        cells.append([change, f"{len(found)}", f"{statistics.median(found):.3f}", all_of_them])
    return cells


def errors_in_words(ratios: list[float]) -> str:
    """Median, 90 % and the largest."""
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    tenth = errors[round(0.9 * (len(errors) - 1))]
    return f"Errors: median {statistics.median(errors):.1%}, 90 % within {tenth:.1%}, the largest {errors[-1]:.1%}."


def main() -> None:
    """Measure and print all cases; optionally keep a row for each change in a page."""
    arguments, machine = options("bench.speed.replayed", __doc__, TRIES), about()
    lines, unchanged = [], 0.0
    for words, part in ((UNDISTURBED, undisturbed), (COMPUTING, computing), (SHARING, sharing)):
        if part is computing and usable_cores() < 2:
            break
        with ExitStack() as stack:
            cases = (case for case in part() if arguments.only in case.name)
            found = list(rows(cases, Groups(stack), arguments.tries))
        if not found:
            continue
        unchanged = max(unchanged, *(same for *_, same in found))
        print(table(ALL_HEADINGS, [cells for cells, *_ in found]), end="\n\n")
        ratios = {cells[0]: ratio for cells, ratio, _ in found}
        lines += [words, "", table(HEADINGS, changes(ratios)), "", errors_in_words([*ratios.values()]), ""]
    said = f"Without a change, a replay's steps differ by at most {unchanged:.2%} from the recorded ones."
    publish([INTRODUCTION, *machine, load_afterwards(), "", *lines, said], arguments.write)


ALL_HEADINGS: Final = ("change", "recorded [ms]", "predicted [ms]", "really run [ms]", "all tries [ms]", "ratio")
HEADINGS: Final = ("change", "programs", "predicted ÷ really run, median", "all programs")
INTRODUCTION: Final = f"""## Measured

DDP, FSDP2, tensor parallelism, GPipe, 1F1B and remote calls were recorded, changed and run again, in turns, {TRIES} times
each. Times are medians of `lab.step_ms`; the link is one of {FAST} unless another one is named.
`python -m bench.speed.replayed --write docs/replay.md` writes this section and prints each program's times.
"""
UNDISTURBED: Final = "Layers that sleep, so that ranks do not disturb one another; four ranks, for remote calls three:"
COMPUTING: Final = "Layers that compute, two ranks, a core for each:"
SHARING: Final = "Two ranks that compute on one core, replayed with `own_cores=True`, beside the same ranks on two cores:"


if __name__ == "__main__":
    main()
