"""Traces made by hand that look like real runs, for the tests of figures: no processes, no clock."""

import itertools
import random
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from labkit.recording.events import COLUMNS, Columns, Scalar
from labkit.recording.schema import COMMUNICATION, COMPUTE, MEMORY, Pending, Span
from labkit.tracing.trace import Trace

MS = 1_000_000  # ns
ALONE = {"group": "", "match": 0}  # of an operation in `made` that belongs to no other


class Book:
    """Collects spans whose times are given in milliseconds."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.scalars: list[Scalar] = []

    def compute(self, rank: int, name: str, start: float, end: float, **more: Any) -> float:
        self.spans.append(Span(rank, name, "compute", int(start * MS), int(end * MS), **more))
        return end

    def whole(self, rank: int, kind: str, start: float, end: float, **more: Any) -> None:
        self.spans.append(Span(rank, "train" if kind == "call" else kind, kind, int(start * MS), int(end * MS), **more))

    def travel(
        self, rank: int, name: str, start: float, end: float, *, wait: tuple[float, float] | None = None, **more: Any
    ) -> float:
        waits = {"wait_start_ns": int(wait[0] * MS), "wait_end_ns": int(wait[1] * MS)} if wait else {}
        self.spans.append(Span(rank, name, "communication", int(start * MS), int(end * MS), **waits, **more))
        return end

    def scalar(self, rank: int, name: str, at: float, value: float) -> None:
        self.scalars.append(Scalar(rank, name, int(at * MS), value))

    def trace(self, ranks: int | tuple[str, ...], **window: int) -> Trace:
        names = tuple(f"rank {i}" for i in range(ranks)) if isinstance(ranks, int) else ranks
        return Trace(self.spans, self.scalars, ranks=names, **window)


def made(*ranks: list[Any], end_ms: float | None = None, **more: Any) -> Trace:
    """A trace in which each rank has these spans: name, start and end in ms, and perhaps a dict with more values.

    With a fourth entry, when the rank waits or None, a span is an operation; those that end together are one. With
    `end_ms`, the trace lasts from 0 until then.
    """
    book, window = Book(), {} if end_ms is None else {"start_ns": 0, "end_ns": int(end_ms * MS)}
    for rank, spans in enumerate(ranks):
        for name, start, end, *values in spans:
            if values and not isinstance(values[0], dict):
                wait, *own = values
                book.travel(rank, name, start, end, wait=wait, **{"group": "g", "match": int(end)} | dict(*own))
            elif name in ("call", "step"):
                book.whole(rank, name, start, end, **dict(*values))
            else:
                book.compute(rank, name, start, end, **dict(*values))
    return book.trace(len(ranks), **window, **more)


def in_steps(count: int, *parts: Any, ranks: int = 2, **more: Any) -> Trace:
    """Steps in which each rank does these things one after another, given as a name and its ms, or the ms of each rank.

    In an operation ("all_reduce", "broadcast"), which takes its time after the last rank has come, each rank waits from
    when it came; `more` are values of all operations, a part's third entry those of its own. "" is a pause. A part may
    be a function of the step's number.
    """
    book, at, matches = Book(), [0.0] * ranks, itertools.count()
    for step in range(count):
        begun = at[0]
        for part in parts:
            name, ms, *own = part(step) if callable(part) else part
            lengths = ms if isinstance(ms, tuple) else (ms,) * ranks
            if name in ("all_reduce", "broadcast"):
                key, end = {"group": "world", "match": next(matches)} | more | dict(*own), max(at) + lengths[0]
                at = [book.travel(rank, name, came, end, wait=(came, end), **key) for rank, came in enumerate(at)]
                continue
            for rank, length in enumerate(lengths):
                if name and length:
                    book.compute(rank, name, at[rank], at[rank] + length)
                at[rank] += length
        at = [max(at)] * ranks
        for rank in range(ranks):
            book.whole(rank, "step", begun, at[0])
    return book.trace(ranks)


def chrome(trace: Trace) -> list[dict[str, Any]]:
    """The events of the file that `Trace.save` writes."""
    return list(trace._chrome())


def run_of(*lengths_ms: float, load: float = 0.0) -> SimpleNamespace:
    """A run whose steps last so long, after a first one that does not count; a single one is repeated."""
    lengths = (50.0, *lengths_ms * (1 + (len(lengths_ms) == 1)))
    return SimpleNamespace(trace=in_steps(len(lengths), lambda step: ("forward", lengths[step]), ranks=1), load=load)


def data_parallel(ranks: int = 4, steps: int = 3, seed: int = 0, slow: int = 1) -> Trace:
    """DistributedDataParallel: three buckets travel while backward goes on; one rank is a little slower than the
    others."""
    book, rng = Book(), random.Random(seed)
    at = [0.4 * rng.random() for _ in range(ranks)]
    begun, match = list(at), 0
    for rank in range(ranks):
        book.scalar(rank, "steps in all", at[rank], steps)
    for step in range(steps):
        pace = [(1.25 if rank == slow else 1.0) * rng.uniform(0.96, 1.06) for rank in range(ranks)]
        start, backward = list(at), []
        for rank in range(ranks):
            t = book.compute(rank, "data", at[rank], at[rank] + 0.9)
            t = book.compute(rank, "forward", t + 0.1, t + 0.1 + 5 * pace[rank])
            backward.append(t + 0.05)
        issued = [[backward[r] + part * 9 * pace[r] for r in range(ranks)] for part in (0.35, 0.7, 1.0)]
        free, ends = 0.0, []
        for bucket, size in zip(issued, (1.2, 3.0, 1.6), strict=True):
            free = max(free, *bucket) + size
            ends.append(free)
        for rank in range(ranks):
            over = ends[-1] + 0.05 * rank
            book.compute(rank, "backward", backward[rank], over)
            for number, (bucket, end) in enumerate(zip(issued, ends, strict=True)):
                end += 0.05 * rank
                wait = (bucket[rank] + 0.02, end) if number == 2 else None
                book.travel(
                    rank, "all_reduce", bucket[rank], end, wait=wait, nbytes=(4 << 20) >> number,
                    group="default", match=match + number, line="cell 5, line 12",
                )  # fmt: skip
            t = book.compute(rank, "optimizer", over + 0.05, over + 0.05 + 1.4 * pace[rank])
            book.scalar(rank, "loss", t, 2.3 * 0.9**step + 0.01 * rank)
            at[rank] = t + 0.1
            book.whole(rank, "step", start[rank], at[rank])
        match += 3
    for rank in range(ranks):
        book.whole(rank, "call", begun[rank], at[rank] + 0.2)
    return book.trace(ranks)


def model_parallel(steps: int = 2) -> Trace:
    """Two stages of one model: while one computes, the other waits for it."""
    book, at = Book(), 0.0
    for match in range(steps):
        start = at
        t = book.compute(0, "data", at, at + 0.8)
        forward = book.compute(0, "forward", t, t + 6)
        there = forward + 1.0
        book.travel(0, "send", forward, there, wait=(forward, there), nbytes=1 << 20, peer=1, group="0→1", match=match)
        book.travel(1, "recv", at, there, wait=(at, there), nbytes=1 << 20, peer=0, group="0→1", match=match)
        t = book.compute(1, "forward", there, there + 5)
        t = book.compute(1, "backward", t, t + 9)
        back = t + 1.0
        book.travel(1, "send", t, back, wait=(t, back), nbytes=1 << 20, peer=0, group="1→0", match=match)
        book.travel(0, "recv", there, back, wait=(there, back), nbytes=1 << 20, peer=1, group="1→0", match=match)
        end_1 = book.compute(1, "optimizer", back, back + 1)
        t = book.compute(0, "backward", back, back + 11)
        at = book.compute(0, "optimizer", t, t + 1)
        book.whole(0, "step", start, at)
        book.whole(1, "step", start, end_1)
    for rank in range(2):
        book.whole(rank, "call", 0, at)
    return book.trace(2)


def master_and_workers(steps: int = 2) -> Trace:
    """RPC: a master cuts the batch in two; each call's other end is the compute on the worker."""
    book, at = Book(), 0.0
    for _ in range(steps):
        start = at
        t = book.compute(0, "forward", at, at + 3)
        ends = []
        for worker in (1, 2):
            issued = t + 0.2 * worker
            done = book.compute(worker, "forward", issued + 0.8, issued + 0.8 + 5 + worker)
            ends.append(done + 0.8)
            name, back = "rpc_async NetShard2.forward", done + 0.8
            book.travel(0, name, issued, back, wait=(t + 0.5, back), nbytes=300_000, peer=worker)
        t = book.compute(0, "backward", max(ends), max(ends) + 2)
        for worker in (1, 2):
            book.compute(worker, "backward", t + 0.5, t + 8)
        book.travel(0, "rpc backward", t, t + 8.6, wait=(t, t + 8.6), peer=1)
        t = book.compute(0, "optimizer", t + 8.6, t + 10)
        book.whole(0, "step", start, t)
        at = t
    book.whole(0, "call", 0, at)
    return book.trace(("master", "worker1", "worker2"))


def remote_calls() -> Trace:
    """RPC as it is recorded: the caller's operation, the call that the callee serves, and its reply, linked by
    number."""
    book, t = Book(), 0.0
    for number in (1, 2):
        book.compute(0, "forward", t, t + 2)
        ends = []
        for worker in (1, 2):
            begun = t + 2 + 0.3 * worker
            served = book.compute(worker, "serve shard", begun + 0.7, begun + 4 + worker)
            shared: dict[str, Any] = {"group": f"rpc 0>{worker}", "match": number}
            book.travel(worker, "reply shard", served, served + 0.1, nbytes=40_000, peer=0, **shared)
            end, waits = served + 0.9, max(begun + 0.2, *ends) if ends else begun + 0.4
            book.travel(0, "rpc_async shard", begun, end, wait=(waits, end), nbytes=200_000, peer=worker, **shared)
            ends.append(end)
        t = ends[-1]
    book.whole(0, "call", 0, t)
    return book.trace(("master", "worker1", "worker2"))


def gpu_and_cpu(steps: int = 2) -> Trace:
    """Each rank's GPU trains while its CPU loads the next batch, and agrees with the others on something small."""
    book = Book()
    for rank in range(2):
        for step in range(steps):
            t = 30.0 * step
            book.whole(rank, "step", t, t + 29)
            book.compute(rank, "data", t + 0.5, t + 2.5)
            book.compute(rank, "data", t + 10, t + 13)
            book.compute(rank, "forward", t + 3, t + 9, device="cuda")
            book.compute(rank, "backward", t + 9, t + 21, device="cuda")
            size = {"nbytes": 4 << 20, "group": "world", "match": step}
            book.travel(rank, "all_reduce", t + 12, t + 23, wait=(t + 21, t + 23), device="cuda", **size)
            book.compute(rank, "optimizer", t + 23, t + 27, device="cuda")
            book.travel(rank, "broadcast", t + 24 + rank, t + 28, wait=(t + 24 + rank, t + 28), group="gloo", match=step)
        book.whole(rank, "call", 0, 30 * steps)
    return book.trace(2)


def alone(steps: int = 4) -> Trace:
    """One process without communication; between its spans it does unnamed work."""
    book, at = Book(), 0.5
    for _ in range(steps):
        start = at
        t = book.compute(0, "data", at, at + 1.2)
        t = book.compute(0, "forward", t, t + 4)
        t = book.compute(0, "backward", t, t + 8)
        at = book.compute(0, "optimizer", t, t + 1.5) + 0.8
        book.whole(0, "step", start, at)
    book.whole(0, "call", 0, at + 1)
    return book.trace(1)


def lasting(seconds: float) -> Trace:
    """One rank that computes for so long."""
    return Trace([Span(0, "forward", "compute", 0, int(seconds * 1e9))], ranks=["rank 0"])


def sharded(ranks: int = 2, steps: int = 3) -> Trace:
    """What fills the memory of ranks that gather each layer's parameters before they use it."""
    book = Book()

    def fill(rank: int, at: float, kind: str, mib: float) -> None:
        book.scalar(rank, MEMORY + kind, at, mib * 2**20)

    for rank in range(ranks):
        at = 4.0 + rank

        fill(rank, at, "parameters", 60)
        for step in range(steps):
            start = at
            for layer in range(6):
                fill(rank, at, "gathered parameters", 20)
                at += 2
                fill(rank, at, "gathered parameters", 0)
                fill(rank, at, "activations", 12 * (layer + 1))
                at += 0.5
            for layer in range(6):
                fill(rank, at, "gathered parameters", 20)
                at += 3 + 0.3 * rank
                fill(rank, at, "gathered parameters", 0)
                fill(rank, at, "gradients", 10 * (layer + 1))
                fill(rank, at, "activations", 60 - 12 * layer)
                at += 0.5
            book.scalar(rank, "loss", at, 2.3 * 0.8**step + 0.1 * rank)
            fill(rank, at, "optimizer state", 120)
            at += 3
            fill(rank, at, "gradients", 0)
            book.whole(rank, "step", start, at)
        book.whole(rank, "call", 0, at)
    return book.trace(ranks, start_ns=0)


def many(spans: int = 1_000_000, ranks: int = 4) -> Trace:
    """A very large trace: spans of microseconds in which forward, backward and all_reduce follow one another."""
    each = spans // ranks
    start = np.arange(each, dtype=np.int64) * 10_000
    parts = []
    for rank in range(ranks):
        rows = np.zeros(each, COLUMNS)
        rows["rank"], rows["peer"] = rank, -1
        rows["start_ns"] = start + 300 * rank
        rows["end_ns"] = rows["start_ns"] + 9_000
        rows["name"] = 1 + np.arange(each) % 3
        travels = rows["name"] == 3
        rows["kind"] = np.where(travels, COMMUNICATION, COMPUTE)
        for name in ("wait_start_ns", "wait_end_ns"):
            rows[name][travels] = rows[name.replace("wait_", "")][travels]
        rows["group"][travels], rows["match"][travels] = 4, np.flatnonzero(travels)
        parts.append(rows)
    names = ["", "forward", "backward", "all_reduce", "default"]
    return Trace(Columns(np.concatenate(parts), names), ranks=[f"rank {i}" for i in range(ranks)])


def feed(trace: Trace, moments_ms: Iterable[float]) -> Iterator[tuple[int, Trace, list[list[Pending]]]]:
    """What a live view of this run would have received: time, completed spans, operations under way."""
    data, before = trace.columns.data, trace.start_ns
    names = trace.columns.names
    for moment in moments_ms:
        now = int(moment * MS)
        new = Columns(data[(data["end_ns"] > before) & (data["end_ns"] <= now)], names)
        scalars = [s for s in trace.scalars if before < s.time_ns <= now or before == trace.start_ns == s.time_ns]
        under_way = data[(data["kind"] == COMMUNICATION) & (data["start_ns"] <= now) & (data["end_ns"] > now)]
        pending: list[list[Pending]] = [[] for _ in trace.ranks]
        for r in under_way:
            wait = int(r["wait_start_ns"]) if r["wait_start_ns"] <= now else 0
            texts = {"name": names[r["name"]], "line": names[r["line"]], "group": names[r["group"]]}
            numbers = {name: int(r[name]) for name in ("start_ns", "nbytes", "match", "peer")}
            pending[r["rank"]].append(Pending(wait_start_ns=wait, **numbers, **texts))
        yield now, Trace(new, scalars, ranks=trace.ranks, start_ns=before, end_ns=now), pending
        before = now
