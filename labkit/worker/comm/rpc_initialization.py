"""Makes a program's own calls of `init_rpc` and `shutdown` work in a rank.

A rank of an RPC group is initialized before its function runs. All ranks that call `init_rpc` wait for one another, as
in torch. If names, numbers and options equal the group's, there is nothing to do; otherwise RPC is restarted with the
program's. `shutdown` is torch's own, and waits for all ranks; the next run starts new ranks.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from torch.distributed import rpc

from labkit.errors.exceptions import LabError
from labkit.ipc.stdio import quiet_stderr
from labkit.recording.operations import RPC_SHUTDOWN
from labkit.recording.record import Recorder, clock, student_line
from labkit.recording.schema import UNSHOWN
from labkit.worker.comm.rendezvous import Address, Rendezvous
from labkit.worker.comm.torch_internals import RPC_START, RPC_TRANSPORTS, in_place_of

# Not shared memory, TensorPipe's first choice on one machine: it has a polling thread in each rank, which takes a whole
# core even if the rank is idle.
TRANSPORTS: Final = ["uv"]
NOTHING_TO_DO: Final = "init_rpc had nothing to do: the ranks of this group are initialised already, under these names."


class RpcOptions(NamedTuple):
    """The options of TensorPipe that a program can choose; the defaults are torch's."""

    num_worker_threads: int = 16
    rpc_timeout: float = 60.0

    @classmethod
    def of(cls, given: Any) -> RpcOptions:
        """Return the options in torch's `TensorPipeRpcBackendOptions`."""
        return cls(given.num_worker_threads, given.rpc_timeout)

    def for_torch(self, init_method: str, device_maps: Any = None, devices: Any = None) -> Any:
        """Return torch's `TensorPipeRpcBackendOptions` with these options."""
        return rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=self.num_worker_threads, rpc_timeout=self.rpc_timeout, init_method=init_method,
            device_maps=device_maps, devices=devices, **({"_transports": TRANSPORTS} if RPC_TRANSPORTS.found else {}),
        )  # fmt: skip


class RpcInitialization:
    """Replaces the functions by which a rank's program starts and ends RPC.

    Args:
        tell: prints a note for the student, once per group.
        watch: starts recording calls; called before RPC starts for the first time.
        given: the name and the options with which the group has initialized RPC; None if it has not.
        unused: whether no call has been made since.

    Attributes:
        spent: whether RPC is no longer in its initial state. torch cannot restore it: the context of remote references
            keeps the first agent.
    """

    def __init__(
        self,
        recorder: Recorder,
        rank: int,
        size: int,
        rendezvous: Rendezvous,
        tell: Callable[[str], None],
        watch: Callable[[], None],
        given: tuple[str, RpcOptions] | None = None,
        unused: bool = False,
    ) -> None:
        self._ring, self._rank, self._size = recorder.ring, rank, size
        self._rendezvous, self._tell, self._watch, self._given = rendezvous, tell, watch, given
        self._initialised = False  # by this run's program, and not yet shut down
        self._watched = given is not None
        self._all_called = True
        self._shutdown: Callable[..., None] = rpc.shutdown
        self._autograd = None if given is None else rank
        self._workers = size  # of RPC; -1 if the program does not say how many
        self._unused = self._anew = unused
        self.spent = False

    def install(self) -> None:
        """Replace torch's functions."""
        rpc.init_rpc = in_place_of(rpc.init_rpc, self._init)
        rpc.shutdown = rpc.api.shutdown = in_place_of(rpc.shutdown, self._shut_down)
        if RPC_START.found:
            RPC_START.replace("_init", self._init_autograd)

    def begin_run(self, *, keep: bool, all_called: bool) -> None:
        """Prepare for a run of a function or a cell; `keep` what the previous cell has initialized."""
        self._all_called = all_called
        self._initialised = False
        self._anew, self._unused = self._unused, False
        if self._given is None and not keep and _is_running():
            self._shutdown(graceful=False)  # the previous program did not shut it down

    def _init(self, init: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Replace torch's `init_rpc`."""
        try:
            given = inspect.signature(init).bind(*args, **kwargs).arguments
        except TypeError:
            init(*args, **kwargs)  # raises torch's error
            return
        if self._initialised:
            init(*args, **kwargs)  # raises torch's error about a second call
            return
        options = given.get("rpc_backend_options")
        address = Address.of(
            getattr(options, "init_method", "env://"), int(given.get("rank", -1)), int(given.get("world_size") or -1)
        )
        timed = self._rendezvous.others_may_come(address)
        with self._rendezvous.waiting("init_rpc", address.where, address.size, timed):
            if _is_running():
                if self._nothing_to_do(given["name"], options, address):
                    self._initialised = True
                    self._tell(NOTHING_TO_DO)
                    return
                self._make_way(given["name"], address)
            self._start(init, given, options)
            self._workers = address.size

    def _nothing_to_do(self, name: str, options: Any, asked: Address) -> bool:
        """Whether RPC is already initialized as the program wants, on all ranks that call `init_rpc`."""
        if self._given is None:
            return False
        own_name, own_options = self._given
        wanted = own_options if options is None else RpcOptions.of(options)
        mapped = bool(getattr(options, "device_maps", None) or getattr(options, "devices", None))
        same = (name, wanted, asked.rank, asked.size, mapped) == (own_name, own_options, self._rank, self._size, False)
        same = same and not self.spent
        if same and not self._all_called:
            return True
        _, others = self._rendezvous.meet(f"{asked.where} for RPC", asked.size, same)
        return all(others)

    def _make_way(self, name: str, asked: Address) -> None:
        """Shut down RPC as the group has started it, so that the program can start it.

        Raises:
            LabError: the ranks have already used RPC.
        """
        if not (self._anew and RPC_START.found):
            raise LabError(
                f"init_rpc({name!r}, rank={asked.rank}, world_size={asked.size}) is not what this group has initialised, and its "
                "ranks have used RPC. Call it in a function of group.run, which gets fresh ranks for it."
            )
        # The same as torch's `shutdown`, without the steps that cannot be undone in a process. torch's context of
        # remote references keeps for ever the agent that exists when it is first used. Since no call has been made, it
        # has not been used.
        with quiet_stderr():
            RPC_START["_get_current_rpc_agent"]().shutdown()
            RPC_START["_cleanup_python_rpc_handler"]()
            RPC_START["_reset_current_rpc_agent"]()

    def _start(self, init: Callable[..., None], given: dict[str, Any], options: Any) -> None:
        """Let torch start RPC with the program's options, and record the calls."""
        if not self._watched:
            self._watch()
            self._watched = True
        wanted = RpcOptions() if options is None else RpcOptions.of(options)
        if options is None or isinstance(options, rpc.TensorPipeRpcBackendOptions):
            given["rpc_backend_options"] = wanted.for_torch(
                getattr(options, "init_method", "env://"),
                getattr(options, "device_maps", None),
                getattr(options, "devices", None) or None,
            )
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch warns of a constructor that it calls itself
            init(**given)
        self._ring.serving(wanted.num_worker_threads)
        self._initialised = self.spent = True

    def _shut_down(self, shutdown: Callable[..., None], graceful: bool = True, *args: Any, **kwargs: Any) -> None:
        """Replace torch's `shutdown`."""
        if not _is_running():
            shutdown(graceful, *args, **kwargs)  # raises torch's error
            return
        self._initialised, self.spent = False, True
        if graceful:
            timed = bool(args or kwargs.get("timeout")) or self._workers < 1  # without a number, others may still join
            with self._rendezvous.waiting(RPC_SHUTDOWN.name, RPC_SHUTDOWN.name, self._workers, timed):
                shutdown(graceful, *args, **kwargs)
        else:
            now, name = clock(), RPC_SHUTDOWN.name  # no span: it waits for nobody
            self._ring.write_communication(name, now, now, line=student_line(), flags=UNSHOWN)
            shutdown(graceful, *args, **kwargs)
        self._ring.serving(0)

    def _init_autograd(self, init: Callable[[int], None], worker: int) -> None:
        """Replace torch's `_init`, which cannot be called again with another number.

        torch derives the ids of contexts and messages from this number. It only has to be unique among processes, so
        the first number that this process was given is used each time.
        """
        if self._autograd is None:
            self._autograd = worker
        init(self._autograd)


def _is_running() -> bool:
    try:
        rpc.get_worker_info()
    except RuntimeError:
        return False
    return True
