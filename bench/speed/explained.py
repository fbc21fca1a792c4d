"""What `lab.explain` says about slow programs, beside the cure really applied."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import labkit as lab
from bench.page import about, load_afterwards, options, publish, say, table
from bench.speed import slow_programs
from labkit.errors.exceptions import LabError
from labkit.tracing.patterns import pipeline_of
from labkit.tracing.replaying.gains import gains_of

GBIT: Final = lab.Link(gbit_per_s=1, latency_us=50)
SLOW: Final = lab.Link(gbit_per_s=0.1, latency_us=50)
FAR: Final = lab.Link(gbit_per_s=1, latency_us=2000)
MERGED: Final = "consecutive messages as one"
BUBBLE: Final = "twice as many micro-batches"  # by `lab.schedule`
STAGES: Final = lab.Link(gbit_per_s=1, latency_us=500)


@dataclass(frozen=True)
class Case:
    """A slow program and its cure."""

    name: str  # the program in words
    program: Callable[[bool], Any]  # takes whether it is cured
    cure: str  # the cure in words
    change: str = ""  # the change of `lab.what_helps` that is this cure; "" if none is
    ranks: int | tuple[str, ...] = 2  # how many ranks; if they are named, the program calls functions remotely
    link: lab.Link | None = GBIT  # their link
    threads: int | None = 1  # of each rank
    better: lab.Link | None = None  # the link of the cured program, if that is the cure


def cases() -> Iterator[Case]:
    """The programs."""
    p = slow_programs
    one, straggler = "all gradients in one bucket", "rank 1 as fast as the others"
    half, twice = "half the latency", "twice the bandwidth"
    yield Case("DDP, small batches", p.small_batches, "twice the bandwidth", twice, better=lab.Link(gbit_per_s=2, latency_us=50))
    yield Case("DDP, rank 1 augments more", p.straggler, "the same work on all", straggler)
    yield Case("DDP, a bucket for each tensor", p.tiny_buckets, "one bucket", one)
    yield Case("DDP, one large bucket on a slow link", p.large_bucket, "buckets of 0.5 MB", link=SLOW)
    yield Case("accumulation without no_sync", p.accumulation, "no_sync")
    yield Case("a loss is reduced and read in each part", p.logged, "once per step", link=FAR)
    yield Case("gradients averaged by hand after backward", p.by_hand, "DDP", "gradients travel beside backward, at best")
    yield Case("parameters averaged in each step", p.local_sgd, "in every fourth step")
    yield Case("200 small all-reduces over a link", p.small_ones, "one flat tensor", MERGED, 4)
    yield Case("200 small all-reduces, no link", p.small_ones, "one flat tensor", MERGED, 4, None)
    yield Case("8 small all-reduces on a far link", p.few_small, "half the latency", half, 2, FAR, better=p.NEARER)
    yield Case("sentences of unequal length", p.uneven, "equal lengths")
    yield Case("rank 0 saves, the others wait", p.checkpoint, "each saves a part")
    yield Case("rank 0 evaluates, the others wait", p.evaluation, "each evaluates a part")
    yield Case("objects gathered in each step", p.objects, "one tensor", link=FAR)
    yield Case("experts with unequal numbers of tokens", p.experts, "equal numbers", straggler)
    yield Case("FSDP2 on a slow link", p.sharded, "twice the bandwidth", twice, link=SLOW, better=p.FASTER)
    yield Case("tensor parallelism on a far link", p.split_layers, "half the latency", half, link=FAR, better=p.NEARER)
    yield Case("two halves of a model in turns", p.halves, "2 micro-batches", BUBBLE, 2, STAGES)
    yield Case("pipeline by send and recv", p.by_messages, "8 micro-batches", BUBBLE, 4, STAGES)
    yield Case("pipeline by torch.distributed.pipelining", p.by_torch, "8 micro-batches", BUBBLE, 4, STAGES)
    yield Case("pipeline, stage 1 three times as long", p.unbalanced, "equal stages", straggler, 4, STAGES)
    yield Case("a sampler that reads slowly, no workers", p.no_workers, "2 workers", link=None)
    yield Case("8 workers that compute on 2 cores", p.many_workers, "no workers", link=None)
    yield Case("two threads for each of 4 ranks", p.threads, "one thread", ranks=4, link=None, threads=2)
    yield Case("one call after the other", p.calls, "all at once", ranks=("caller", "first", "second"), link=FAR)
    yield Case("TensorFlow, a slow input", p.keras_input, "prefetch and parallel map", ranks=1, link=None, threads=None)


def rows(only: str, count: int) -> Iterator[list[str]]:
    """The cells of each case."""
    for case in cases():
        if only not in case.name:
            continue
        say(case.name)
        runtime = "tensorflow" if case.threads is None else "torch" if isinstance(case.ranks, int) else "rpc"
        options: dict[str, Any] = {"runtime": runtime, "devices": "cpu"} | ({"threads": case.threads} if case.threads else {})
        slow, fast, said = [], [], []
        with (
            lab.Group(case.ranks, link=case.link, **options) as group,
            lab.Group(case.ranks, link=case.better or case.link, **options) as cured,
        ):
            for _ in range(count):
                run = group.run(case.program, False)
                slow.append(run)
                fast.append(_ms(cured.run(case.program, case.better is None)))
                said.append(_said(run, case.change))
        middle = sorted(slow, key=_ms)[count // 2]
        text = lab.explain(middle).text
        say(text)
        gained = [_ms(run) - ms for run, ms in zip(slow, fast, strict=True)]
        known = [one for one in said if one is not None]
        predicted = _rounded(statistics.median(known)) if known else "–"
        say(f"gains measured: {min(gained):.3g} to {max(gained):.3g} ms")
        yield [case.name, _rounded(_ms(middle)), _cause(text), case.cure, predicted, _rounded(statistics.median(gained))]


def _ms(run: lab.Run) -> float:
    """The time of a step; of a run that records none, that of the whole."""
    return lab.step_ms(run) if len(run.trace.step_bounds()) else run.trace.duration_ns / 1e6


def _rounded(ms: float) -> str:
    """Three digits."""
    return f"{float(f'{ms:.3g}'):,g}"


def _said(run: lab.Run, change: str) -> float | None:
    if change == BUBBLE:
        few = pipeline_of(run.trace)
        if few is None:
            return None
        shape = {"stages": len(few.chains[0])}
        before, after = (1 - lab.schedule("gpipe", **shape, micro_batches=m * few.micro_batches).bubble for m in (1, 2))
        return _ms(run) * (1 - before / after)
    try:
        gains = gains_of(run.trace, "what_helps").gains
    except LabError as error:
        say(str(error))
        return None
    return next((gain.saved_ns / 1e6 for gain in gains if gain.change == change), None)


def _cause(text: str) -> str:
    """The sentences between what the ranks did and what replay predicts, without the explanation behind a colon."""
    sentences = text.partition(" Predicted by replay")[0].split(". ")
    began = next(i for i, sentence in enumerate(sentences) if sentence.startswith("The rank"))
    return sentences[began + 1].removesuffix(".").partition(": ")[0]


def main() -> None:
    """Measure and print; optionally keep the table in a page."""
    arguments, machine = options("bench.speed.explained", __doc__, tries=5), about()
    head = ["program", "step [ms]", "cause said", "cure", "gain said [ms]", "gain measured [ms]"]
    cells = table(head, list(rows(arguments.only, arguments.tries)))
    publish([INTRODUCTION.format(tries=arguments.tries), *machine, load_afterwards(), "", cells], arguments.write)


INTRODUCTION: Final = """## Causes that `explain` says

What `lab.explain` says about programs that are slow for a known reason, and what the cure really gains. "Gain said" is
what `lab.what_helps` says of the same change, or `lab.schedule` of more micro-batches, where they know it. Each program
of `bench/speed/slow_programs.py` runs in turns with its cure, {tries} times each; times are medians of `lab.step_ms`.
Most layers sleep instead of computing, so that ranks do not disturb one another.
`python -m bench.speed.explained --write docs/predictions.md` writes this section.
"""


if __name__ == "__main__":
    main()
