"""`RelayStarter`: starts ranks on other machines through a relay, with the interface of every other starter."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from labkit.errors.exceptions import LabError
from labkit.ipc.options import AT_IMPORT
from labkit.ipc.pickling import shared_memory
from labkit.launch.machines.engines import Engine
from labkit.launch.machines.relayed_rank import read_state
from labkit.launch.rank_process import End, RankProcess, Status
from labkit.launch.resource_usage import Load
from labkit.launch.server_requests import Answered, Ask, Ended, Reap, Survey, Surveyed
from labkit.launch.starters import Question, ServerStarter
from labkit.recording.clock import Clock
from labkit.recording.ring_buffer import RING_BYTES

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class _HasThread:
    """A question: does a rank have a living thread with this native id besides its main thread?"""

    number: int

    def answer(self, processes: Sequence[RankProcess]) -> list[bool]:
        """Return whether each has it."""
        return [process.has_thread(self.number) for process in processes]

    def unknown(self) -> bool:
        """Return what stands for the answer for a rank that cannot be asked."""
        return False


class _MachinesClock(Clock):
    """The clock of a rank's machine, as the relay follows it."""

    def __init__(self, process: RelayedRankProcess) -> None:
        super().__init__()
        self._process = process

    @property
    def error_ns(self) -> int:
        """See `Clock`."""
        return read_state(self._process.memory)[2] if self._process.memory >= 0 else 0

    def here(self, ns: int) -> int:
        """See `Clock`."""
        return ns + read_state(self._process.memory)[1] if self._process.memory >= 0 else ns


class RelayedRankProcess(RankProcess):
    """The notebook's end of a rank on another machine."""

    def __init__(self, starter: RelayStarter, number: int, ring_bytes: int, make_shared: Callable[[int], int]) -> None:
        super().__init__(number, ring_bytes, make_shared)
        self._starter = starter
        self.clock = _MachinesClock(self)

    def started(self, pid: int) -> None:
        """See `RankProcess`: the end of its socket reports the end of a process there."""
        self.pid = pid
        self._close_far()

    @property
    def readable(self) -> bool:
        """Whether its memory may be read: its agent has started it."""
        return True

    def status(self) -> Status:
        """Return its state as its agent has last reported it."""
        if self.memory < 0 or self.ended is not None:
            return Status("gone", exiting=True, cpu_s=0.0)
        return read_state(self.memory)[0].status

    def reported_ns(self, now_ns: int) -> int:
        """See `RankProcess`."""
        return (read_state(self.memory)[3] if self.memory >= 0 else 0) or now_ns

    def load(self) -> Load:
        """Return the resources that it uses, as its agent has last reported them."""
        return read_state(self.memory)[0].load if self.memory >= 0 else Load()

    def has_thread(self, number: int) -> bool:
        """See `RankProcess`."""
        return self._starter.ask(_HasThread(number), [self])[0]


class _ReportedLoads:
    """The loads of ranks as their agents report them; see `launch.resource_usage.Monitor`."""

    def __init__(self, processes: Sequence[RankProcess]) -> None:
        self._processes = [process for process in processes if isinstance(process, RelayedRankProcess)]

    def sample(self, now_ns: int) -> tuple[Load, ...]:  # noqa: ARG002  # the agents decide when
        """Return the latest load of each rank."""
        return tuple(process.load() for process in self._processes)


class RelayStarter(ServerStarter):
    """Starts ranks on other machines.

    Args:
        engine: where they are.
        runtime: the name of the runtime; "" for none, and then no ranks start.
        ring_bytes, make_shared: as for `Starter`.
    """

    def __init__(self, engine: Engine, runtime: str, ring_bytes: int, make_shared: Callable[[int], int]) -> None:
        super().__init__(ring_bytes, make_shared)
        self._failed = False
        self.ready_limit_s = engine.ready_limit_s
        self._run("labkit.launch.machines.relay:relay", [pickle.dumps(engine), runtime, os.getpid()], self.environment)
        self.environment = dict(AT_IMPORT)  # agents do not inherit it, but ranks get what has changed since

    def alive(self) -> bool:
        """See `Starter`. A relay that has failed takes a moment to end, and must not get the next group meanwhile."""
        return not self._failed and super().alive()

    def _wait_until_ready(self) -> None:
        try:
            super()._wait_until_ready()
        except LabError:
            self._failed = True
            raise

    def _new_rank(self) -> RankProcess:
        return RelayedRankProcess(self, next(self._numbers), self._ring_bytes, self._make_shared)

    def ask(self, question: Question[_Answer], processes: Sequence[RankProcess]) -> Sequence[_Answer]:
        """Ask a question about living ranks where they are; return the answer for each."""
        answers = self._answers(question, processes)
        return [answers[p.number] if p.number in answers else question.unknown() for p in processes]

    def catch_up(self, processes: Sequence[RankProcess]) -> bool:
        """See `Starter`."""
        return len(self._answers(None, processes)) == len(processes)

    def _answers(self, question: Question[_Answer] | None, processes: Sequence[RankProcess]) -> Mapping[int, _Answer]:
        if not processes:
            return {}
        with self._lock:
            answered = self._ask(Ask(question, [process.number for process in processes]))
        assert isinstance(answered, Answered)
        return answered.answers

    def monitor(self, processes: Sequence[RankProcess], devices: str) -> _ReportedLoads:  # noqa: ARG002  # there it is known
        """See `Starter`."""
        return _ReportedLoads(processes)

    def survey(self) -> Surveyed:
        """Return what is known of the machines."""
        with self._lock:
            self._wait_until_ready()
            surveyed = self._ask(Survey())
        assert isinstance(surveyed, Surveyed)
        return surveyed

    def _kill(self, processes: Sequence[RankProcess]) -> Mapping[int, End]:
        with self._lock:
            try:
                ended = self._ask(Reap([process.number for process in processes]))
            except LabError as error:  # the relay has ended, and so have the agents and their ranks
                return {process.number: End(None, lost=f"is lost: {error}") for process in processes}
        assert isinstance(ended, Ended)
        return ended.ends


def survey(engine: Engine) -> Surveyed:
    """Connect to machines for a moment; return what is known of each, and all problems.

    Raises:
        LabError: the engine has no machines.
    """
    starter = RelayStarter(engine, "", RING_BYTES, shared_memory)
    try:
        return starter.survey()
    finally:
        starter.close()
