"""`PoolState`: the state of a pool of ranks, and whether its processes may serve another run: decided here.

A pool is starting until its ranks are set up; then it is idle and running in turn. It is spent when no run may use it
any more, and closed when its processes have been ended:

    starting ──> idle <──> running ──> spent ──> closed      every state may be followed by closed

The definitions of cells stay in the processes as long as possible. A run leaves them unusable if a rank has died or was
stopped, or if ranks may disagree about what they have communicated (`group/unfinished.py`). Some frameworks wear out
without that: TensorFlow computes in a process under one configuration only, and torch's RPC starts only once.

`Member` is the notebook's view of one rank while its process is alive. Without workers of a chief with parameter
servers, a run goes on.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from labkit.errors.exceptions import RankFailure
from labkit.errors.lists import listed
from labkit.errors.units import time_in_words
from labkit.ipc import pickling
from labkit.ipc.channel import Channel
from labkit.ipc.options import Options
from labkit.ipc.protocol import Displayed, Warned
from labkit.launch.rank_process import RankProcess
from labkit.recording.ring_buffer import RingReader
from labkit.worker.runtimes.base import Runtime


class LostRanks(dict[int, RankFailure]):
    """How these ranks ended, by their numbers."""

    def __init__(self, options: Options, kind: type[Runtime]) -> None:
        super().__init__()
        self._replaceable = {r for r in range(len(options.names)) if kind.replaceable(options.jobs, r)}

    def take(self, failure: RankFailure, on: Sequence[int]) -> bool:
        """Add a rank that has ended, and return whether the run goes on without it.

        It does if a rank that uses it was called, and another one like it is left.
        """
        left = self._replaceable - self.keys() - {failure.rank}
        if failure.rank not in self._replaceable or not left or self._replaceable.issuperset(on):
            return False
        self[failure.rank] = failure
        return True

    def notes(self, start_ns: int) -> list[str]:
        """Return a line for each of these ranks, after a successful run."""
        ends = [(f, time_in_words(f.at_ns - start_ns)) for f in self.values()]
        return [f"{f.name} ended {after} after the start: {f.headline}. The others went on without it." for f, after in ends]

    def doings(self) -> dict[int, str]:
        """Return a line for each of these ranks, for the report of another one's failure."""
        return {rank: f"{f.name} had ended before: {f.headline}" for rank, f in self.items()}


READ_BYTES: Final = 1 << 16
PIPE_BYTES: Final = 1 << 20  # capacity of a rank's pipe, and so the most that is unread when reading starts


class Member:
    """A rank of a pool: its process, and what the notebook knows about it."""

    def __init__(self, rank: int, name: str, process: RankProcess) -> None:
        self.rank, self.name, self.process = rank, name, process
        several = process.place is not None and process.place.nodes > 1
        # In pictures: with its machine, if ranks are on several.
        self.label = f"{name} · {process.place.machine}" if several and process.place else name
        self.channel = Channel(process.sock)
        self.reader = RingReader(process.ring)
        self.unshown = b""  # what it printed while no run was in progress
        self.unseen: list[Displayed | Warned] = []  # what it displayed, and its warnings, meanwhile
        self.output_open = True
        self.known_files: dict[str, tuple[str, list[str]]] = {}  # the student's, of which it has names, perhaps lines
        # For `%%ranks`, the values of the notebook's names when they were last sent to it, or assigned there.
        self.notebook_values: dict[str, Any] = {}
        self.gone: list[int] = []  # definitions that the notebook no longer has, and that it has not been told to forget
        self.assigned: list[str] = []  # the names that the last cell assigned or deleted in it
        self.made: dict[str, str] = {}  # by name, the cell that last assigned it there

    def printed(self) -> Iterator[bytes]:
        """Yield its unread output in pieces, without what it prints meanwhile, which may be endless."""
        count = 0
        while self.output_open and count < PIPE_BYTES:
            try:
                data = os.read(self.process.output, READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                self.output_open = False
                return
            yield data
            count += len(data)
            if len(data) < READ_BYTES:
                return

    def keep_output(self) -> None:
        """Read its unread output and keep it for the next run to show."""
        self.unshown += b"".join(self.printed())


class Phase(Enum):
    """What a pool is doing."""

    STARTING = "starting"
    IDLE = "idle"
    RUNNING = "running"
    SPENT = "spent"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Request:
    """What a run needs of the processes."""

    cell: bool  # whether it runs a cell, which may use what earlier cells have left, rather than call a function
    starts_rpc: bool  # whether all ranks run it and it calls `init_rpc` itself: they must be without RPC


class PoolState:
    """The state of a pool."""

    def __init__(self, kind: type[Runtime], *, starts_rpc: bool) -> None:
        self._kind, self._starts_rpc = kind, starts_rpc
        self.phase = Phase.STARTING
        self._last: Request | None = None  # the last run that has begun
        self.framework_spent = False  # whether a run has left it in a state from which no other function can start

    @property
    def spent(self) -> bool:
        """Whether no run may use the processes any more."""
        return self.phase in (Phase.SPENT, Phase.CLOSED)

    def may_serve(self, request: Request) -> bool:
        """Whether the processes may serve a run.

        Where the framework is spent, or each run needs it afresh, cells go on until a function is called. Only where
        it is spent does a cell that starts RPC need other processes, since torch can start RPC only once in each.
        """
        if self.phase is not Phase.IDLE:
            return False
        if self._last is not None and (self.framework_spent or self._kind.fresh_each_run):
            return request.cell and self._last.cell and not (request.starts_rpc and self.framework_spent)
        return request.cell or request.starts_rpc == self._starts_rpc

    def set_up(self) -> None:
        """The ranks are set up, and wait for a run."""
        self._follow(Phase.STARTING, Phase.IDLE)

    def begin(self, request: Request) -> None:
        """A run begins."""
        self._last = request
        self._follow(Phase.IDLE, Phase.RUNNING)

    def end(self) -> None:
        """The run has ended in all ranks."""
        self._follow(Phase.RUNNING, Phase.IDLE)

    def spend(self) -> None:
        """A run has left the processes unusable."""
        if self.phase is not Phase.CLOSED:
            self.phase = Phase.SPENT

    def close(self) -> bool:
        """The processes are being ended; return whether they were not before."""
        before, self.phase = self.phase, Phase.CLOSED
        return before is not Phase.CLOSED

    def _follow(self, before: Phase, after: Phase) -> None:
        """Go on to the next phase, unless the pool has been spent or closed meanwhile."""
        if self.phase is before:
            self.phase = after


MOST_NAMES: Final = 8  # in the message about lost names


class CellNames:
    """The names sent with one cell.

    A name is sent if the notebook (`home`) assigned it after it was last sent, and after the ranks last assigned it
    themselves. The cell reads some names, and certainly assigns those `written`; `to_send` has the values that at least
    one rank lacks.
    """

    def __init__(
        self, home: Mapping[str, Any], read: Collection[str], written: Collection[str], label: str, members: Sequence[Member]
    ) -> None:
        self._home, self._written, self._label = home, written, label
        known = [m.notebook_values for m in members] or [{}]
        self.to_send = {n: home[n] for n in read if any(n not in b or b[n] is not home[n] for b in known)}

    def remove_unsendable(self) -> None:
        """Leave out names that cannot be sent and that the cell assigns, probably before it reads them."""
        for name in self.to_send.keys() & set(self._written):
            if not pickling.can_be_sent(self.to_send[name]):
                del self.to_send[name]

    def send_to(self, member: Member) -> set[str]:
        """Note that the cell is sent to a rank, and return the names in `to_send` that the rank has already."""
        known = member.notebook_values
        present = {n for n, value in self.to_send.items() if n in known and known[n] is value}
        known.update(self.to_send)
        known.update({n: self._home.get(n) for n in self._written})  # until the rank reports what it has assigned
        return present

    def learn(self, members: Iterable[Member]) -> None:
        """Note which names the cell, now finished, has assigned in the ranks."""
        for member in members:
            member.notebook_values.update({n: self._home.get(n) for n in member.assigned})
            member.made.update(dict.fromkeys(member.assigned, self._label))
            member.assigned = []


def lost_names(members: Iterable[Member]) -> str:
    """A sentence about the names that cells have assigned in ranks that have ended; "" if there are none."""
    made = {name: label for m in members for name, label in m.made.items()}
    if not made:
        return ""
    by_cell: dict[str, list[str]] = {}
    for name in list(made)[:MOST_NAMES]:
        by_cell.setdefault(made[name], []).append(name)
    names = "; ".join(f"{', '.join(names)} ({label})" for label, names in by_cell.items())
    more = f"; and {len(made) - MOST_NAMES} more" if len(made) > MOST_NAMES else ""
    cells = list(dict.fromkeys(made.values()))
    lost = f"these names of %%ranks cells are lost: {names}{more}. Run {listed(cells)} again."
    return f"the ranks have ended, so {lost}"
