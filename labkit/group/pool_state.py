"""`PoolState`: the state of a pool of ranks, and whether its processes may serve another run: decided here.

A pool is starting until its ranks are set up; then it is idle and running in turn. It is spent when no run may use it
any more, and closed when its processes have been ended:

    starting ──> idle <──> running ──> spent ──> closed      every state may be followed by closed

The definitions of cells stay in the processes as long as possible. A run leaves them unusable if a rank has died or was
stopped, or if ranks may disagree about what they have communicated (`group/unfinished.py`). Some frameworks wear out
without that: TensorFlow computes in a process under one configuration only, and torch's RPC starts only once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from labkit.worker.runtimes.base import Runtime


class Phase(Enum):
    """What a pool is doing."""

    STARTING = "starting"
    IDLE = "idle"
    RUNNING = "running"
    SPENT = "spent"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Request:
    """What a run needs of the processes.

    Args:
        cell: whether it runs a cell, which may use what earlier cells have left, rather than call a function.
        starts_rpc: whether it calls `init_rpc` itself.
    """

    cell: bool
    starts_rpc: bool


class PoolState:
    """The state of a pool.

    Args:
        kind: the runtime.
        starts_rpc: whether the processes are for a program that calls `init_rpc` itself.

    Attributes:
        phase: what the pool is doing.
        framework_spent: whether the framework has computed in the processes and cannot be initialized again.
    """

    def __init__(self, kind: type[Runtime], *, starts_rpc: bool) -> None:
        self._kind, self._starts_rpc = kind, starts_rpc
        self.phase = Phase.STARTING
        self._used = False  # whether a run has begun
        self._called = False  # whether a run of a function, as opposed to a cell, has begun
        self.framework_spent = False

    @property
    def spent(self) -> bool:
        """Whether no run may use the processes any more."""
        return self.phase in (Phase.SPENT, Phase.CLOSED)

    def may_serve(self, request: Request) -> bool:
        """Whether the processes may serve a run.

        If the framework cannot be initialized again, each function call gets new processes, and cells share theirs
        until a function is called.
        """
        if self.phase is not Phase.IDLE:
            return False
        if self._kind.fresh_each_run:
            return not self._used or (request.cell and not self._called)
        if request.starts_rpc and not request.cell:
            return self._starts_rpc and not self._used
        return not self.framework_spent or (request.cell and not request.starts_rpc)

    def set_up(self) -> None:
        """The ranks are set up, and wait for a run."""
        self._follow(Phase.STARTING, Phase.IDLE)

    def begin(self, request: Request) -> None:
        """A run begins."""
        self._used, self._called = True, self._called or not request.cell
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
