"""`RelayStarter`: starts ranks on other machines through a relay, with the interface of every other starter."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from labkit.errors.exceptions import LabError
from labkit.ipc.options import AT_IMPORT
from labkit.launch.machines.engines import Engine
from labkit.launch.machines.facts import read_report
from labkit.launch.rank_process import End, RankProcess, Status
from labkit.launch.resource_usage import Load
from labkit.launch.server_requests import Ask, Reap, Survey, Surveyed
from labkit.launch.starters import Question, ServerStarter
from labkit.recording.clock import Clock

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class _HasThread:
    """A question: does a rank have a living thread with this native id besides its main thread?"""

    unknown: ClassVar = False  # see `Question`
    number: int

    def answer(self, processes: Sequence[RankProcess]) -> list[bool]:
        return [process.has_thread(self.number) for process in processes]


class _MachinesClock(Clock):
    """The clock of a rank's machine, as the relay follows it."""

    def __init__(self, process: RelayedRankProcess) -> None:
        super().__init__()
        self._process = process

    @property
    def error_ns(self) -> int:
        return read_report(self._process.memory).error_ns

    def here(self, ns: int) -> int:
        return ns + read_report(self._process.memory).offset_ns


class RelayedRankProcess(RankProcess):
    """The notebook's end of a rank on another machine."""

    def __init__(self, starter: RelayStarter, number: int) -> None:
        super().__init__(number)
        self._starter = starter
        self.clock = _MachinesClock(self)

    def started(self, pid: int) -> None:
        """See `RankProcess`: the end of its socket reports the end of a process there."""
        self.pid = pid
        self._close_far()

    @property
    def readable(self) -> bool:
        """See `RankProcess`: its memory is on another machine."""
        return False

    def status(self) -> Status:
        """Return its state as its agent has last reported it."""
        if self.memory < 0 or self.ended is not None:
            return Status("gone", exiting=True, cpu_s=0.0)
        return read_report(self.memory).status

    def reported_ns(self, now_ns: int) -> int:
        """See `RankProcess`."""
        return read_report(self.memory).reported_ns or now_ns

    def has_thread(self, number: int) -> bool:
        """See `RankProcess`."""
        return self._starter.ask(_HasThread(number), [self])[0]


class RelayStarter(ServerStarter):
    """Starts ranks on the machines of an engine; with the runtime "", none start."""

    def __init__(self, engine: Engine, runtime: str) -> None:
        super().__init__()
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
        return RelayedRankProcess(self, next(self._numbers))

    def ask(self, question: Question[_Answer], processes: Sequence[RankProcess]) -> Sequence[_Answer]:
        """Ask a question about living ranks where they are; return the answer for each."""
        answers = self._answers(question, processes)
        return [answers.get(p.number, question.unknown) for p in processes]

    def catch_up(self, processes: Sequence[RankProcess]) -> bool:
        """See `Starter`."""
        return len(self._answers(None, processes)) == len(processes)

    def _answers(self, question: Question[_Answer] | None, processes: Sequence[RankProcess]) -> Mapping[int, _Answer]:
        if not processes:
            return {}
        with self._lock:
            answers: Mapping[int, _Answer] = self._ask(Ask(question, [process.number for process in processes]))
        return answers

    def monitor(self, processes: Sequence[RankProcess], devices: str) -> Callable[[int], tuple[Load, ...]]:  # noqa: ARG002
        """See `Starter`. The agents decide when they sample, and they know their devices."""
        return lambda _: tuple(read_report(process.memory).load for process in processes)

    def survey(self) -> Surveyed:
        """Return what is known of the machines."""
        with self._lock:
            self._wait_until_ready()
            surveyed: Surveyed = self._ask(Survey())
        return surveyed

    def _kill(self, processes: Sequence[RankProcess]) -> Mapping[int, End]:
        with self._lock:
            try:
                ends: Mapping[int, End] = self._ask(Reap([process.number for process in processes]))
            except LabError as error:  # the relay has ended, and so have the agents and their ranks
                return {process.number: End(None, lost=f"is lost: {error}") for process in processes}
        return ends


def survey(engine: Engine) -> Surveyed:
    """Connect to machines for a moment; return what is known of each, and all problems."""
    starter = RelayStarter(engine, "")
    try:
        return starter.survey()
    finally:
        starter.close()
