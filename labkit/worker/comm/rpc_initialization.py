"""Makes a program's own calls of `init_rpc` and `shutdown` work in a rank.

A rank of an RPC group is initialized before its function runs, unless the function calls `init_rpc` itself: then its
call is the first. All ranks that call it wait for one another, as in torch. `shutdown` is torch's own, and waits for
all ranks. torch cannot start RPC twice in a process, since the context of remote references keeps the first agent; so
the next run starts new ranks.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any, Final

from torch.distributed import rpc

from labkit.errors.exceptions import LabError
from labkit.recording.operations import RPC_SHUTDOWN
from labkit.recording.record import Recorder
from labkit.recording.torch_internals import RPC_TRANSPORTS, in_place_of
from labkit.worker.comm.rendezvous import Address, Rendezvous

# Not shared memory, TensorPipe's first choice on one machine: it has a polling thread in each rank, which takes a whole
# core even if the rank is idle.
TRANSPORTS: Final = ["uv"]
OPTIONS: Final = (16, 60.0)  # torch's defaults: threads that serve calls, and the time limit of a call in seconds
NOTHING_TO_DO: Final = "init_rpc had nothing to do: the ranks of this group are initialised already, under these names."


def torchs_options(threads: int, timeout_s: float, init_method: str, device_maps: Any = None, devices: Any = None) -> Any:
    """Return torch's `TensorPipeRpcBackendOptions`."""
    return rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=threads, rpc_timeout=timeout_s, init_method=init_method, device_maps=device_maps, devices=devices,
        **({"_transports": TRANSPORTS} if RPC_TRANSPORTS.found else {}),
    )  # fmt: skip


class RpcInitialization:
    """Replaces the functions by which a rank's program starts and ends RPC.

    Args:
        tell: prints a note for the student, once per group.
        name: the name under which the group has initialized RPC; "" if it has not.
    """

    def __init__(self, recorder: Recorder, rendezvous: Rendezvous, tell: Callable[[str], None], name: str) -> None:
        self._ring, self._rank, self._size = recorder.ring, recorder.rank, recorder.size
        self._rendezvous, self._tell = rendezvous, tell
        self._name = name
        self._workers = recorder.size  # of RPC; -1 if the program does not say how many
        self.spent = False  # whether the program has started or ended RPC
        if name:
            self._ring.serving(OPTIONS[0])

    def install(self) -> None:
        """Replace torch's functions."""
        rpc.init_rpc = in_place_of(rpc.init_rpc, self._init)
        rpc.shutdown = rpc.api.shutdown = in_place_of(rpc.shutdown, self._shut_down)

    def _init(self, init: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Replace torch's `init_rpc`."""
        try:
            given = inspect.signature(init).bind(*args, **kwargs).arguments
        except TypeError:
            init(*args, **kwargs)  # raises torch's error
            return
        options = given.get("rpc_backend_options")
        address = Address.of(
            getattr(options, "init_method", "env://"), int(given.get("rank", -1)), int(given.get("world_size") or -1)
        )
        if self._name and not self.spent:
            self._check_same(given["name"], options, address)
            self._tell(NOTHING_TO_DO)
        elif is_running():
            init(*args, **kwargs)  # raises torch's error about a second call
        else:
            timed = self._rendezvous.others_may_come(address)
            with self._rendezvous.waiting("init_rpc", address.where, address.size, timed):
                self._start(init, given, options)
            self._workers = address.size

    def _wanted(self, given: Any) -> tuple[int, float]:
        return OPTIONS if given is None else (given.num_worker_threads, given.rpc_timeout)

    def _check_same(self, name: str, options: Any, asked: Address) -> None:
        """Check that the group has initialized RPC as the program asks for.

        Raises:
            LabError: it has not, and RPC cannot be started again.
        """
        wanted = self._wanted(options)
        mapped = getattr(options, "device_maps", None) or getattr(options, "devices", None)
        if mapped or (name, asked.rank, asked.size, wanted) != (self._name, self._rank, self._size, OPTIONS):
            raise LabError(
                f"init_rpc({name!r}, rank={asked.rank}, world_size={asked.size}) is not what this group has initialised, and "
                "torch starts RPC only once in a process. Call it in a function that group.run runs on all ranks: it gets fresh "
                "ranks, without RPC."
            )

    def _start(self, init: Callable[..., None], given: dict[str, Any], options: Any) -> None:
        """Let torch start RPC with the program's options."""
        self.spent = True
        wanted = self._wanted(options)
        if options is None or isinstance(options, rpc.TensorPipeRpcBackendOptions):
            given["rpc_backend_options"] = torchs_options(
                *wanted,
                getattr(options, "init_method", "env://"),
                getattr(options, "device_maps", None),
                getattr(options, "devices", None) or None,
            )
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch warns of a constructor that it calls itself
            init(**given)
        self._ring.serving(wanted[0])

    def _shut_down(self, shutdown: Callable[..., None], graceful: bool = True, *args: Any, **kwargs: Any) -> None:
        """Replace torch's `shutdown`."""
        if not is_running():
            shutdown(graceful, *args, **kwargs)  # raises torch's error
            return
        self.spent = True
        if graceful:
            timed = bool(args or kwargs.get("timeout")) or self._workers < 1  # without a number, others may still join
            with self._rendezvous.waiting(RPC_SHUTDOWN.name, RPC_SHUTDOWN.name, self._workers, timed):
                shutdown(graceful, *args, **kwargs)
        else:
            shutdown(graceful, *args, **kwargs)
        self._ring.serving(0)


def is_running() -> bool:
    """Whether RPC is initialized in this process."""
    try:
        rpc.get_worker_info()
    except RuntimeError:
        return False
    return True
