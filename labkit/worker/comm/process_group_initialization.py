"""Makes a program's own calls of `init_process_group` and `destroy_process_group` work in a rank.

A rank of a group is initialized before its function runs. If the program initializes the same default group again,
there is nothing to do; if size, rank or backend differ, that group is destroyed, and torch creates the program's.
`destroy_process_group` does what torch's does. A rank whose default group is no longer that of its start is spent:
after a function, the next run starts new ranks.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Collection
from typing import Any, Final

import torch.distributed.distributed_c10d as c10d
from torch.distributed import rpc
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

from labkit.recording.record import Recorder
from labkit.recording.torch_internals import DTENSOR_CACHE, in_place_of
from labkit.worker.comm.operation import ends_by_itself
from labkit.worker.comm.rendezvous import Address, Rendezvous

HOMES: Final = ("torch.distributed", "torch.distributed.distributed_c10d", "torch.distributed.device_mesh")
NOTHING_TO_DO: Final = (
    "init_process_group had nothing to do: the ranks of a group are initialised already, with this rank and world size."
)
INSTEAD: Final = "init_process_group({!r}): there is no GPU for each rank here, so all communication goes through gloo."
ENVIRONMENT: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Initialization:
    """Replaces the functions by which a rank's program starts and ends communication.

    The arguments are those of `Rendezvous` and `RpcInitialization`.
    """

    def __init__(
        self, recorder: Recorder, machines: Collection[str] = (), connect: Callable[[], Any] | None = None, rpc_name: str = ""
    ) -> None:
        self._place = recorder.rank, recorder.size
        self._notes: list[str] = []
        self._rendezvous = Rendezvous(recorder, connect, machines)
        self._rpc = None
        if rpc.is_available():
            from labkit.worker.comm.rpc_initialization import RpcInitialization  # not every build of torch has RPC

            self._rpc = RpcInitialization(recorder, self._rendezvous, self._notes.append, rpc_name)
        self._given: Any = c10d.GroupMember.WORLD  # the group's default group; None in a rank of RPC or a bare rank
        # Whether NCCL transfers GPU tensors of this group, since each rank has its own GPU.
        self._nccl = self._given is not None and "nccl" in c10d.get_backend_config(self._given)
        self._environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        self._initialised = False  # by this run's program
        self._used = False  # by a program since the last run of a function began

    def install(self) -> None:
        """Replace torch's functions."""
        if self._rendezvous.in_groups_store:
            self._rendezvous.install()
        if self._rpc is not None:
            self._rpc.install()
        ours = (
            in_place_of(c10d.init_process_group, self._init),
            in_place_of(c10d.destroy_process_group, self._destroyed),
        )
        for module in filter(None, map(sys.modules.get, HOMES)):
            for function in ours:
                if hasattr(module, function.__name__):
                    setattr(module, function.__name__, function)

    def begin_run(self, *, keep: bool) -> None:
        """Reset the rank to the state in which a program starts; `keep` what the previous cell has initialized."""
        self._initialised = False
        if self._used and not keep:
            self._used = False
            os.environ |= self._environment
            if self._given is not None:
                self._given.set_timeout(default_pg_nccl_timeout if self._nccl else default_pg_timeout)

    @property
    def spent(self) -> bool:
        """Whether another program would need new processes, since the default group or RPC is not that of the start."""
        return c10d.GroupMember.WORLD is not self._given or (self._rpc is not None and self._rpc.spent)

    def notes(self) -> list[str]:
        """Return the notes for the student since the last call."""
        notes, self._notes[:] = list(self._notes), []
        return notes

    def _init(self, init: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Replace torch's `init_process_group`."""
        self._used = True
        try:
            given = inspect.signature(init).bind(*args, **kwargs).arguments
        except TypeError:
            init(*args, **kwargs)  # raises torch's error
            return
        world: Any = c10d.GroupMember.WORLD
        if self._initialised and world is not None:
            init(*args, **kwargs)  # raises torch's error about a second call
            return
        asked = _asked(given)
        suits = self._suits(given) or world is not self._given  # the program knows the backend of a group of its own
        if suits and world is not None and (world.rank(), world.size()) == (asked.rank, asked.size):
            if given.get("timeout") is not None:
                world.set_timeout(given["timeout"])
            self._notes.append(NOTHING_TO_DO)
        else:
            limit = given.get("timeout")
            whole = (asked.rank, asked.size) == self._place and self._rendezvous.in_groups_store
            timed = ends_by_itself(limit) or (not whole and self._rendezvous.others_may_come(asked))
            with self._rendezvous.waiting("init_process_group", asked.where, asked.size, timed):
                if world is not None:
                    c10d.destroy_process_group()
                if whole:  # at whatever address, or with whatever store
                    given.pop("init_method", None)
                    store = self._rendezvous.meet(asked.where, asked.size, limit or default_pg_timeout)
                    given |= {"store": store, "rank": asked.rank, "world_size": asked.size}
                init(**given)
        self._initialised = True

    def _suits(self, given: dict[str, Any]) -> bool:
        """Whether the group's default group has the backends that a program asks for.

        Where it has gloo alone, the program gets gloo instead of NCCL: the arguments are changed.
        """
        if self._given is None:
            return False
        wanted = c10d.BackendConfig(c10d.Backend(given.get("backend") or "undefined")).get_device_backend_map()
        if self._nccl:
            return wanted == {"cuda": "nccl"}
        if not set(wanted.values()) <= {"gloo", "nccl", "xccl"} or wanted.get("cpu", "gloo") != "gloo":
            return False
        if "cpu" not in wanted:
            self._notes.append(INSTEAD.format(str(given["backend"])))
        if set(wanted.values()) != {"gloo"}:
            given["backend"] = "gloo"
            for name in ("pg_options", "device_id"):  # they are NCCL's
                given.pop(name, None)
        return True

    def _destroyed(self, destroy: Callable[..., None], group: Any = None) -> None:
        """Replace torch's `destroy_process_group`, to clear DTensor's cache.

        DTensor caches which groups to use, by an operation's shapes and mesh. If the next cell's mesh equals the old
        one, the same model would use destroyed groups.
        """
        self._used = True
        destroy(group)
        if "torch.distributed.tensor" in sys.modules and DTENSOR_CACHE.found:
            DTENSOR_CACHE["_clear_python_sharding_prop_cache"]()
            DTENSOR_CACHE["_clear_fast_path_sharding_prop_cache"]()


def _asked(given: dict[str, Any]) -> Address:
    """Return the rank, the world size and the address that a program asks for."""
    rank, size = int(given.get("rank", -1)), int(given.get("world_size", -1))
    if given.get("store") is not None:
        return Address("store", "a store of its own", rank, size)
    return Address.of(given.get("init_method") or "env://", rank, size)
