"""What every kind of rank has: its place in the group, the two rounds of its start, and the environment that torchrun gives.

A group starts in two rounds, so that no port is ever guessed: every rank says what it offers (a port it already holds), and then
gets what all of them offered.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from labkit.costs.link import Link
from labkit.ipc.stdio import quiet_stderr
from labkit.recording.import_hook import when_imported
from labkit.recording.record import Recorder
from labkit.worker.network_namespace import Network

if TYPE_CHECKING:
    from labkit.comm.launch import Launch

__all__ = ["LOOPBACK", "MIB", "Ending", "RankConfig", "Released", "Runtime", "has_server", "quiet_stderr"]

LOOPBACK: Final = "127.0.0.1"
MIB: Final = 1 << 20


class Released(BaseException):
    """Ends the function of a rank that serves others for ever, once those have returned; its result is None."""


@dataclass(frozen=True, slots=True)
class RankConfig:
    """What one rank is told when it starts.

    Args:
        rank: its number.
        names: the names of all ranks, in rank order.
        runtime: one of `RUNTIMES`.
        threads: how many threads its framework may compute with.
        devices: "auto", "cpu" or "cuda".
        devices_per_rank: logical devices of a TensorFlow rank.
        jobs: TensorFlow's job and task number of each rank, in rank order.
        path, folder: where it finds the student's modules and files.
        readable_memory: whether the notebook may read this rank's memory, so that large results can stay there until it does.
        environment: variables that the notebook has changed since the process that the rank comes from was started; None removes.
        link: over which what the ranks send shall seem to go; None: as it goes.
        rich: whether the notebook can show more than text.
        starts_rpc: whether the program to run calls `init_rpc` itself, so that RPC must not be used before.
        rpc_options: how many threads of an RPC rank serve calls, and the seconds that a call may take.
    """

    rank: int
    names: tuple[str, ...]
    runtime: str
    threads: int = 1
    devices: str = "auto"
    devices_per_rank: int = 1
    jobs: tuple[tuple[str, int], ...] = ()
    path: tuple[str, ...] = field(default=(), repr=False)
    folder: str = ""
    readable_memory: bool = False
    environment: dict[str, str | None] = field(default_factory=dict, repr=False)
    link: Link | None = None
    rich: bool = False
    starts_rpc: bool = False
    rpc_options: tuple[int, float] = (16, 60.0)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.names)


class Ending(NamedTuple):
    """How a run leaves its rank.

    Args:
        spent: whether the next function needs fresh processes.
        notes: what the student should be told once.
    """

    spent: bool
    notes: list[str]


class Runtime:
    """`bare`: processes and nothing else. The other runtimes add their framework to this.

    Attributes:
        package: what must be installed, and `extra`, the extra that brings it.
        preload: modules that are imported before ranks are forked.
        environment: variables set before that.
        rank_bytes: memory that one working rank needs, at the least.
        serving_threads: how many of a rank's threads run what others call, beside the one that runs the student's function.
        observes_runs: whether ranks that are not called must be told when a run begins and when it is over.
        fresh_each_run: whether a run needs processes in which the framework has not computed yet.
        certain_after_s: how long ranks have been blocked before it is asked whether that is for ever.
        resting_is_waiting: once set up, whether a process that hardly computes inside its framework must be waiting for others.
        wait_for_release: waits, on the main thread, until the ranks that were called and do not serve have returned.
    """

    package: ClassVar[str] = ""
    extra: ClassVar[str] = ""
    preload: ClassVar[tuple[str, ...]] = ("labkit.worker.main_loop",)
    environment: ClassVar[dict[str, str]] = {}
    rank_bytes: ClassVar[int] = 20 * MIB
    serving_threads: ClassVar[int] = 0
    observes_runs: ClassVar[bool] = False
    fresh_each_run: ClassVar[bool] = False
    certain_after_s: ClassVar[float] = 0.5
    resting_is_waiting: bool = False

    @classmethod
    def serves(cls, jobs: Sequence[tuple[str, int]], rank: int) -> int:
        """How many threads of a rank work for other ranks, also when its function has returned.

        Args:
            jobs: TensorFlow's job and task number of each rank, in rank order.
            rank: which one.
        """
        return cls.serving_threads or int(has_server([job for job, _ in jobs], jobs[rank][0]))

    def __init__(self, rank_config: RankConfig, network: Network, wait_for_release: Callable[[], None]) -> None:
        self.rank_config, self.network, self.wait_for_release = rank_config, network, wait_for_release
        self._launch: Launch | None = None  # once torch is there

    def offer(self) -> Any:
        """In the rank: what the other ranks must know before they set up."""
        return _free_port() if self.rank_config.rank == 0 else None

    def set_up(self, offers: Sequence[Any]) -> list[str]:
        """In the rank: make it ready for the student's function. Returns what the student should be told once."""
        self._torchrun_environment(offers[0])
        return []

    def watch_launch(self, recorder: Recorder, watch_rpc: Callable[[], None]) -> None:
        """In the rank, once it is set up: see to it that a program which sets up and ends torch itself does no harm.

        Args:
            recorder: this rank's.
            watch_rpc: has remote calls written down; to be called before RPC starts.
        """

        def watch() -> None:
            from labkit import comm
            from labkit.comm.launch import Launch

            comm.watch_script(recorder, given=False)
            self._launch = Launch(recorder, self.rank_config.rank, self.rank_config.size, watch_rpc)

        when_imported("torch", lambda _: watch())

    def begin_run(self, *, keep: bool, all_called: bool) -> None:
        """In the rank: a function, or a cell, is about to run.

        Args:
            keep: what the one before has set up, as from one cell to the next.
            all_called: whether all ranks of the group run it.
        """
        if self._launch is not None:
            self._launch.begin_run(keep=keep, all_called=all_called)

    def end_run(self) -> Ending | None:
        """In the rank: it has run; what the notebook should know, None for nothing."""
        if self._launch is None:
            return None
        notes, spent = self._launch.notes(), self._launch.spent
        return Ending(spent, notes) if notes or spent else None

    def begin_recording(self) -> None:
        """In the rank, before a run in which it computes or serves."""

    def end_recording(self) -> list[str]:
        """In the rank, when such a run is over. Returns what the student should know of it."""
        return []

    def tear_down(self) -> None:
        """In the rank, when the group closes."""

    def _torchrun_environment(self, port: int) -> None:
        """What torchrun sets, so that a function does not know who started it.

        Source: "Environment Variables", PyTorch's documentation of torchrun.
        """
        rank_config = self.rank_config
        os.environ |= {
            "RANK": str(rank_config.rank),
            "LOCAL_RANK": str(rank_config.rank),
            "WORLD_SIZE": str(rank_config.size),
            "LOCAL_WORLD_SIZE": str(rank_config.size),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": str(rank_config.threads),
            "LABKIT_RANK": str(rank_config.rank),  # tells `Group` that it is in the wrong place
        }


def has_server(jobs: Collection[str], job: str) -> bool:
    """Whether a rank of TensorFlow's has a server, which the chief has compute."""
    return "ps" in jobs and job in ("worker", "ps")


def _free_port() -> int:
    """A port that is free now. Nobody holds it: bare ranks that want one may have to try again."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
