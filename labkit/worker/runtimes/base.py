"""What all runtimes share: the two rounds of a rank's start, and torchrun's environment variables.

A group starts in two rounds, so that no port has to be guessed: each rank offers what the others need, such as a port
that it has found or holds, and then gets the offers of all ranks.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, ClassVar, Final

from labkit.ipc.protocol import Offer, RankConfig
from labkit.recording.import_hook import when_imported
from labkit.recording.record import here
from labkit.worker.network_namespace import INTERFACES, PrivateNetwork

if TYPE_CHECKING:
    from labkit.worker.comm.process_group_initialization import Initialization

MIB: Final = 1 << 20


class Released(BaseException):
    """Ends the function of a rank that serves others without end, after these have returned; the result is None."""


class Runtime:
    """The runtime "bare": processes without a framework. The other runtimes are subclasses that add one."""

    package: ClassVar[str] = ""  # that must be installed
    extra: ClassVar[str] = ""  # labkit's extra that installs it
    # Modules that are imported before ranks are forked, or "module:function", which is called then, too.
    preload: ClassVar[tuple[str, ...]] = ("labkit.worker.main_loop",)
    environment: ClassVar[dict[str, str]] = {}  # variables that are set before these imports
    rank_bytes: ClassVar[int] = 20 * MIB  # the least memory that a working rank needs
    serving_threads: ClassVar[int] = 0  # of a rank, that serve calls of others, besides that of the student's function
    observes_runs: ClassVar[bool] = False  # whether ranks that are not called must know when a run begins and ends
    fresh_each_run: ClassVar[bool] = False  # whether each run needs processes in which the framework has not computed yet
    certain_after_s: ClassVar[float] = 0.5  # how long ranks must be blocked before the deadlock monitor examines them
    emulates_links: ClassVar[bool] = False  # whether a group's `link` can slow down what its ranks send
    has_rpc: ClassVar[bool] = False  # whether ranks call each other by torch's RPC
    has_jobs: ClassVar[bool] = False  # whether ranks may be given as a dict of TensorFlow's jobs
    has_logical_devices: ClassVar[bool] = False  # whether a rank may have several, `devices_per_rank`
    has_torch_profiler: ClassVar[bool] = False  # whether `lab.profile` can record them
    rank_name: ClassVar[str] = "rank {}"  # of ranks given by their number
    valid_name: ClassVar[re.Pattern[str] | None] = None  # the names that ranks may have; None if any
    name_error: ClassVar[str] = ""  # what is wrong with another name, which stands in place of the braces
    resting_is_waiting: bool = False  # whether, once set up, a process that hardly computes in its framework must be waiting

    @classmethod
    def serves(cls, jobs: Sequence[tuple[str, int]], rank: int) -> int:
        """Return the number of a rank's threads that work for other ranks, even after its function has returned."""
        return cls.serving_threads or int(has_server([job for job, _ in jobs], jobs[rank][0]))

    @classmethod
    def replaceable(cls, jobs: Sequence[tuple[str, int]], rank: int) -> bool:  # noqa: ARG003  # no rank by default
        """Return whether the others take over a rank's work if its process ends, as long as one like it is left."""
        return False

    def __init__(self, rank_config: RankConfig, network: PrivateNetwork, wait_for_release: Callable[[], None]) -> None:
        self.rank_config, self.options, self.place = rank_config, rank_config.options, rank_config.place
        self.network = network
        # On the main thread: waits until the ranks that were called and do not serve have returned.
        self.wait_for_release = wait_for_release
        self._initialization: Initialization | None = None  # set when torch is imported

    @property
    def threads(self) -> int:
        """The number of threads with which the framework may compute."""
        return self.options.threads or max(1, int(self.place.cores // self.place.local_size))

    def offer(self) -> Offer:
        """In the rank: return what the other ranks must know before they set up."""
        if self.rank_config.rank != 0:
            return Offer(self.place.listening)
        with socket.socket() as probe:  # the port is not reserved: bare ranks that bind it may have to try again
            probe.bind((self.place.listening, 0))
            return Offer(self.place.listening, probe.getsockname()[1])

    def set_up(self, offers: Sequence[Offer]) -> list[str]:
        """In the rank: prepare it for the student's function, and have what the framework does recorded.

        Returns remarks for the student, each shown once.
        """
        self._torchrun_environment(offers[0])
        when_imported("torch", lambda _: self._watch_torch())
        return []

    def _watch_torch(self) -> None:
        """Record what a program does with torch, and let it set torch up and end it itself."""
        from labkit.worker.comm import install
        from labkit.worker.comm.process_group_initialization import Initialization

        assert here.recorder is not None
        install.watch_script(here.recorder, given=False)
        self._initialization = Initialization(here.recorder, self.place.names)
        self._initialization.install()

    def begin_run(self, *, keep: bool, all_called: bool) -> None:  # noqa: ARG002  # TensorFlow needs it
        """In the rank: called before a function or a cell runs; `all_called`: whether all ranks of the group run it.

        `keep` keeps what the previous run has set up, as from one cell to the next.
        """
        if self._initialization is not None:
            self._initialization.begin_run(keep=keep)

    @property
    def spent(self) -> bool:
        """In the rank: whether its program has left it in a state from which no other program can start."""
        return self._initialization is not None and self._initialization.spent

    def notes(self) -> list[str]:
        """In the rank, after a run: return remarks for the student, each shown once."""
        return [] if self._initialization is None else self._initialization.notes()

    def begin_recording(self) -> None:
        """In the rank: called before a run in which it computes or serves."""

    def end_recording(self) -> list[str]:
        """In the rank: called after such a run; return remarks for the student."""
        return []

    def _torchrun_environment(self, master: Offer) -> None:
        """Set torchrun's environment variables, so that a function does not depend on how its rank was started.

        Source: "Environment Variables", PyTorch's documentation of torchrun.
        """
        rank_config, place = self.rank_config, self.place
        os.environ |= {
            "RANK": str(rank_config.rank),
            "LOCAL_RANK": str(place.local_rank),
            "WORLD_SIZE": str(rank_config.size),
            "LOCAL_WORLD_SIZE": str(place.local_size),
            "GROUP_RANK": str(place.node),
            "GROUP_WORLD_SIZE": str(place.nodes),
            "MASTER_ADDR": master.address,
            "MASTER_PORT": str(master.port),
            "OMP_NUM_THREADS": str(self.threads),
            "LABKIT_RANK": str(rank_config.rank),  # so that `Group` can refuse to start inside a rank
        }
        if place.nodes > 1 and place.interface:  # else gloo takes the one of the host's name, often the loopback's
            for variable in (*INTERFACES, "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(variable, place.interface)


def has_server(jobs: Collection[str], job: str) -> bool:
    """Whether a TensorFlow rank with this job runs a server, on which the chief computes."""
    return "ps" in jobs and job in ("worker", "ps")
