"""One run: under way (`Flight`: frames, prints, spans and failures come in) and over (`Run`: plain data)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final, Protocol

from labkit import wire
from labkit.channel import Frame
from labkit.crew import Crew, Member
from labkit.errors import LabError, RankError, RankFailure, Stopped
from labkit.exits import explain_exit
from labkit.output import Output
from labkit.ring import COMMUNICATION, Pending
from labkit.stuck import doing
from labkit.trace import Trace, from_records

__all__ = ["Flight", "Picture", "Run"]

LOOK_EVERY_S: Final = 0.05  # at rings and prints; the fastest writer takes seven times as long to fill a ring
FULL_BYTES: Final = 1 << 15  # a rank that has printed so much since the last look may soon be blocked: look again at once
GRACE_S: Final = 0.1  # after a failure, the others may come back by themselves before they are stopped


class Picture(Protocol):
    """What a run tells a watcher, on the thread that called `watch`."""

    interval_s: float

    def begin(self, ranks: tuple[str, ...], title: str, start_ns: int, called: Sequence[int]) -> None:
        """The ranks start now; those with the numbers `called` call the function, the others serve."""

    def update(self, now_ns: int, new: Trace, pending: Sequence[Sequence[Pending]]) -> None:
        """`new` holds what was completed since the last update, `pending` what each rank has under way."""

    def end(self, trace: Trace, failed: bool) -> None:
        """The run is over."""


class Run:
    """What a run leaves behind.

    Attributes:
        results: what the function returned on each rank that called it, in rank order.
        output: what the ranks printed, a line each, in rank order.
        ranks: the names of the ranks that called it.
    """

    def __init__(self, name: str, ranks: tuple[str, ...], results: list[Any], output: str, records: _Records) -> None:
        self._name, self.ranks, self.results, self.output = name, ranks, results, output
        self._records = records
        self._trace: Trace | None = None

    @property
    def trace(self) -> Trace:
        """The spans of all ranks on one clock."""
        if self._trace is None:
            self._trace = self._records.trace()
        return self._trace

    def __repr__(self) -> str:
        return f"<Run of {self._name} on {_these(self.ranks)}>"


def _these(ranks: Sequence[str]) -> str:
    return ranks[0] if len(ranks) == 1 else f"{len(ranks)} ranks"


def _names(members: Sequence[Member]) -> str:
    return " and ".join(m.name for m in members) if len(members) < 4 else f"{len(members)} others"


class _Records:
    """The raw records of a run, by rank, until somebody asks for the trace."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = [m.name for m in members]
        self._readers = [m.reader for m in members]
        self._chunks: list[list[Any]] = [[] for _ in members]
        self._dropped = [r.dropped for r in self._readers]
        self._names: list[list[str]] = [[] for _ in members]
        for reader in self._readers:
            reader.read()  # what a rank did between the runs

    def drain(self) -> list[Any]:
        """Read what is new; per rank, the records."""
        new = [reader.read() for reader in self._readers]
        for chunks, records in zip(self._chunks, new, strict=True):
            if len(records):
                chunks.append(records)
        return new

    def freeze(self) -> None:
        """Read for the last time: the rings serve the next run."""
        self.drain()
        self._names = [list(r.names()) for r in self._readers]
        self._dropped = [r.dropped - before for r, before in zip(self._readers, self._dropped, strict=True)]
        self._readers = []

    def part(self, new: list[Any]) -> Trace:
        """A trace of some records alone."""
        return from_records(new, [r.names() for r in self._readers], self._members)

    def communicated(self) -> bool:
        """Whether any rank has finished a communication."""
        return any((chunk["kind"] == COMMUNICATION).any() for chunks in self._chunks for chunk in chunks)

    def trace(self) -> Trace:
        """All of it; once frozen."""
        import numpy as np

        joined = [np.concatenate(c) if c else np.empty(0, _dtype()) for c in self._chunks]
        return from_records(joined, self._names, self._members, dropped=self._dropped)


def _dtype() -> Any:
    from labkit.ring import record_dtype

    return record_dtype()


class Flight:
    """One run while it is under way. Everything happens on the thread that called `run`.

    Args:
        crew: the processes.
        on: the numbers of the ranks that call the function.
        name: what the function is called.
        picture: who watches, or None.
        show: whether prints are shown.

    Attributes:
        intact: False once the processes must not be used again.
        moved: whether results were copied from a GPU.
    """

    def __init__(self, crew: Crew, on: Sequence[int], name: str, picture: Picture | None, *, show: bool) -> None:
        self._crew, self._members, self._selector = crew, crew.members, crew.selector
        self._on, self._name, self._picture = tuple(on), name, picture
        self._names = tuple(m.name for m in self._members)
        self._output = Output(self._names, show=show)
        self._records = _Records(self._members)
        self._results: dict[int, Any] = {}
        self._failures: dict[int, RankFailure] = {}
        self._dead: set[int] = set()
        self.moved = False
        self.intact = True

    def wait(self, deadline_s: float | None) -> Run:
        """Take what comes until every rank that was called has answered.

        Args:
            deadline_s: on `time.monotonic`, when to give up; None waits as long as it takes.

        Raises:
            RankError: a rank failed.
            LabError: the time is over.
            Stopped: the student pressed Stop.
        """
        start_ns = time.perf_counter_ns()
        picture = self._picture
        for member in self._members:
            if member.unshown:
                self._output.feed(member.rank, member.unshown)
                member.unshown = b""
        if picture is not None:
            title = f"{self._name} on {_these([self._names[i] for i in self._on])}"
            picture.begin(self._names, title, start_ns, self._on)
        try:
            self._collect(picture, deadline_s)
        except KeyboardInterrupt:
            doings = self._doings(time.perf_counter_ns())
            self.intact = False
            self._finish(failed=True)
            raise Stopped(self._name, doings) from None
        except BaseException:
            self.intact = False
            self._finish(failed=True)
            raise
        if self._failures:
            error = self._error()
            self._finish(failed=True)
            raise error
        text = self._finish(failed=False)
        return Run(self._name, tuple(self._names[i] for i in self._on), [self._results[i] for i in self._on], text, self._records)

    def _collect(self, picture: Picture | None, deadline_s: float | None) -> None:
        looked = pictured = time.monotonic()
        hurry = False
        grace_until: float | None = None
        new: list[list[Any]] = [[] for _ in self._members]
        while len(self._results) + len(self._failures) < len(self._on):
            now = time.monotonic()
            if grace_until is not None and now > grace_until:
                return
            if deadline_s is not None and now > deadline_s:
                lines = self._doings(time.perf_counter_ns())
                raise LabError(
                    "\n".join([f"{self._name} took longer than the group's timeout_s; the ranks were stopped.", *lines])
                )
            if now - looked > LOOK_EVERY_S or hurry:
                looked = now
                hurry = max(self._read_output(m) for m in self._members) >= FULL_BYTES
                records = self._records.drain()
                if picture is not None:
                    for mine, fresh in zip(new, records, strict=True):
                        mine.append(fresh)
                self._look_for_deserted()
            if picture is not None and now - pictured > picture.interval_s:
                self._show(picture, new)
                new = [[] for _ in self._members]
                pictured = time.monotonic()
            self._output.refresh()
            self._take(0 if hurry else LOOK_EVERY_S if grace_until is None else GRACE_S / 10)
            if self._failures and grace_until is None:
                grace_until = time.monotonic() + GRACE_S

    def _look_for_deserted(self) -> None:
        """A rank that has returned takes part in nothing any more: if all others are blocked for long, it came back too early."""
        limit_s = self._crew.plan.kind.deserted_after_s
        if limit_s is None or not self._results or self._failures:
            return
        now_ns = time.perf_counter_ns()
        others = [m for m in self._members if m.rank in self._on and m.rank not in self._results]
        for member in others:
            waits = [p.wait_start_ns for p in member.reader.pending() if p.wait_start_ns]
            if not waits or now_ns - min(waits) < limit_s * 1e9:
                return
        first = next(iter(self._results))
        del self._results[first]
        headline = f"returned while {_names(others)} still waited for it: what one rank takes part in, all must, equally often"
        self._failures[first] = RankFailure(first, self._names[first], headline, at_ns=now_ns)

    def _show(self, picture: Picture, new: list[list[Any]]) -> None:
        import numpy as np

        part = self._records.part([np.concatenate(n) if n else np.empty(0, _dtype()) for n in new])
        picture.update(time.perf_counter_ns(), part, [m.reader.pending() for m in self._members])

    def _take(self, limit_s: float) -> None:
        """Wait for anything from any rank and take it."""
        events = self._selector.select(limit_s)
        # Reports before deaths: a failing rank's own words tell more than the fact that it ended.
        for kind in ("frame", "end"):
            for key, _ in events:
                what, member = key.data
                if what == kind and member.rank not in self._dead:
                    # A rank that has answered says nothing more: if there is something to read, it is the end.
                    self._take_frame(member) if what == "frame" and not self._answered(member) else self._ended(member)

    def _answered(self, member: Member) -> bool:
        return member.rank in self._results or member.rank in self._failures

    def _take_frame(self, member: Member) -> None:
        try:
            self._answer(member, member.channel.receive())
        except (EOFError, OSError):
            self._ended(member)

    def _answer(self, member: Member, frame: Frame) -> None:
        self._read_output(member)
        if frame.kind == "raised":
            self._failures[member.rank] = frame.data
            return
        assert frame.kind == "done" and frame.parcel is not None, f"an unexpected frame {frame.kind!r}"
        self.moved |= frame.parcel.moved
        self._results[member.rank] = wire.unpack(frame.parcel)[0]
        if frame.parcel.lender:
            member.channel.send("read")

    def _ended(self, member: Member) -> None:
        """A rank's process is no more: take its last words, if it had time for some."""
        self._dead.add(member.rank)
        self.intact = False
        self._crew.forget(member)
        try:
            while not self._answered(member):
                self._answer(member, member.channel.receive())
        except (EOFError, OSError):
            pass
        self._read_output(member)
        if member.rank not in self._failures:  # even one that has answered: a dead rank serves nobody
            headline = explain_exit(self._crew.bury(member))
            self._failures[member.rank] = RankFailure(member.rank, member.name, headline, at_ns=time.perf_counter_ns())

    def _read_output(self, member: Member) -> int:
        """Take what a rank has printed; how many bytes that was."""
        count = 0
        for data in self._crew.printed(member):
            self._output.feed(member.rank, data)
            count += len(data)
        return count

    def _doings(self, now_ns: int) -> list[str]:
        rest = [m for m in self._members if m.rank not in self._failures and m.rank in self._on]
        return [
            doing(m.name, m.reader.pending(), now_ns, returned=m.rank in self._results, names=self._names) for m in rest
        ]  # fmt: skip

    def _error(self) -> RankError:
        now_ns = time.perf_counter_ns()
        pending = any(m.reader.pending() for m in self._members)
        answered = len(self._results) + len(self._failures) == len(self._on)
        self._records.drain()
        quiet = not pending and not self._records.communicated() and not self._crew.plan.kind.fresh_each_run
        self.intact = self.intact and answered and quiet
        # A death is never the consequence of another rank's exception, but the cause of many; it is only noticed a little later.
        ordered = sorted(self._failures.values(), key=lambda f: (f.rank not in self._dead, f.at_ns))
        causes = ordered[:1] + sorted((f for f in ordered[1:] if not _lost_connection(f)), key=lambda f: f.rank)
        # Where several failed alike, the lowest speaks for them: a checked cell must read the same each time.
        causes.sort(key=lambda f: (f.headline != ordered[0].headline, f.rank))
        victims = [f"{f.name} lost the connection" for f in ordered[1:] if _lost_connection(f)]
        return RankError(causes, victims + self._doings(now_ns), stopped=not self.intact)

    def _finish(self, *, failed: bool) -> str:
        if not self.intact:
            self._crew.kill()  # before the picture is drawn, which takes a moment
        for member in self._members:
            if member.rank not in self._results or failed:  # else that was read with the answer
                self._read_output(member)
        self._records.freeze()
        if self._picture is not None:
            self._picture.end(self._records.trace(), failed)
        return self._output.finish()


def _lost_connection(failure: RankFailure) -> bool:
    """Whether a rank failed because another one was gone: gloo's, NCCL's, RPC's and TensorFlow's words for it."""
    words = (
        "Connection closed by peer",
        "Connection reset by peer",
        "Broken pipe",
        "UnavailableError",
        "connection was aborted",
        "eof (this error",
    )
    return any(w in failure.headline for w in words)
