"""Makes a program's own calls of `init_process_group` and `destroy_process_group` work in a rank.

A rank of a group is initialized before its function runs. If the program initializes the same default group again,
there is nothing to do; if size, rank or backend differ, labkit's group is detached, and torch creates the program's.
After `destroy_process_group`, the program has no default group, as it expects; labkit's group is kept, and restored
when the program initializes again or the next run starts.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any, Final

import torch.distributed.distributed_c10d as c10d
from torch.distributed import rpc

from labkit.recording.record import Recorder
from labkit.worker.comm.default_group import DefaultGroup
from labkit.worker.comm.rendezvous import Address, Rendezvous
from labkit.worker.comm.time_limits import ends_by_itself
from labkit.worker.comm.torch_internals import DEFAULT_GROUP, DTENSOR_CACHE, in_place_of


class Initialization:
    """Replaces the functions by which a rank's program starts and ends communication.

    Args:
        watch_rpc: starts recording remote calls; called before the program starts RPC, unless the group has.
        machines: the names and addresses of the group's machines, as in `Place`.
        connect: opens a new connection to the group's store; None if it has none: then torch uses the program's
            address.
        rpc_given: the name and the options with which the group has initialized RPC.
        rpc_unused: whether no call has been made since.
    """

    def __init__(
        self,
        recorder: Recorder,
        rank: int,
        size: int,
        watch_rpc: Callable[[], None],
        machines: Collection[str] = (),
        connect: Callable[[], Any] | None = None,
        rpc_given: tuple[str, Any] | None = None,
        rpc_unused: bool = False,
    ) -> None:
        self._notes: list[str] = []
        rendezvous = Rendezvous(recorder, rank, connect, machines)
        if connect is not None:
            rendezvous.install()
        self._process_group = ProcessGroupInitialization(rank, size, rendezvous, self._notes.append)
        self._process_group.install()
        self._rpc = None
        if rpc.is_available():
            from labkit.worker.comm.rpc_initialization import RpcInitialization  # not every build of torch has RPC

            self._rpc = RpcInitialization(recorder, rank, size, rendezvous, self._notes.append, watch_rpc, rpc_given, rpc_unused)
            self._rpc.install()

    def begin_run(self, *, keep: bool, all_called: bool) -> None:
        """Prepare for a run of a function or a cell; see `worker.runtimes.base.Runtime.begin_run`."""
        self._process_group.begin_run(keep=keep)
        if self._rpc is not None:
            self._rpc.begin_run(keep=keep, all_called=all_called)

    @property
    def spent(self) -> bool:
        """Whether another program would need new processes."""
        return self._process_group.spent or (self._rpc is not None and self._rpc.spent)

    def notes(self) -> list[str]:
        """Return the notes for the student since the last call."""
        notes, self._notes[:] = list(self._notes), []
        return notes


HOMES: Final = ("torch.distributed", "torch.distributed.distributed_c10d", "torch.distributed.device_mesh")
NOTHING_TO_DO: Final = (
    "init_process_group had nothing to do: the ranks of a group are initialised already, with this rank and world size."
)
INSTEAD: Final = "init_process_group({!r}): there is no GPU for each rank here, so all communication goes through gloo."
ENVIRONMENT: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class ProcessGroupInitialization:
    """Replaces the functions by which a rank's program initializes and destroys the default process group."""

    def __init__(self, rank: int, size: int, rendezvous: Rendezvous, tell: Callable[[str], None]) -> None:
        self._rank, self._size, self._rendezvous, self._tell = rank, size, rendezvous, tell
        self._own: DefaultGroup | None = None  # None in a rank of RPC or a bare rank
        self._given: Any = None  # the group's default group, if it cannot be detached
        self._initialised = False  # by this run's program, and not yet destroyed
        self._destroy: Callable[..., None] = functools.partial(_destroy, c10d.destroy_process_group)
        self._environment: dict[str, str] = {}
        self._used = False  # by this run's program

    def install(self) -> None:
        """Replace torch's functions; torch's current default group, if any, is labkit's."""
        if c10d.GroupMember.WORLD is not None and DEFAULT_GROUP.found:
            self._own = DefaultGroup()
        else:
            self._given = c10d.GroupMember.WORLD
        self._environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
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
        if not self._used:
            return
        self._initialised = False
        if not keep:
            self._used = False
            os.environ |= self._environment
        if c10d.GroupMember.WORLD not in (None, self._given) and not self._own_in_place:
            if keep:
                return
            self._destroy()
        if self._own is not None:
            if not self._own.in_place:
                self._own.restore()
            if not keep:
                self._own.set_timeout(None)

    @property
    def spent(self) -> bool:
        """Whether the next program could read this program's store, which rank 0 still serves at the same address.

        Ranks destroy this program's group when they start the next program. Ranks that start it before rank 0 does
        would find stale addresses in the old store.
        """
        if self._given is not None and self._given is not c10d.GroupMember.WORLD:
            return True  # the group's own default group is gone
        return not self._rendezvous.in_groups_store and c10d.GroupMember.WORLD not in (None, self._given)

    @property
    def _own_in_place(self) -> bool:
        return self._own is not None and self._own.in_place

    def _init(self, init: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Replace torch's `init_process_group`."""
        self._used = True
        try:
            given = inspect.signature(init).bind(*args, **kwargs).arguments
        except TypeError:
            init(*args, **kwargs)  # raises torch's error
            return
        if not self._initialised:
            asked = _asked(given)
            if (asked.rank, asked.size) == self._present() and self._suits(given):
                self._keep(given.get("timeout"))
                return
            if self._own_in_place:
                assert self._own is not None
                self._own.unset(self._destroy)
            elif c10d.GroupMember.WORLD is not None:  # created in an earlier cell
                self._destroy()
            timed = ends_by_itself(given.get("timeout")) or self._rendezvous.others_may_come(asked)
            with self._rendezvous.waiting("init_process_group", asked.where, asked.size, timed):
                init(*args, **kwargs)
            self._initialised = True
        else:
            init(*args, **kwargs)  # raises torch's error about a second call

    def _present(self) -> tuple[int, int]:
        """Return the rank and the size of the current default group, or of the detached one; -1 for none."""
        world = c10d.GroupMember.WORLD
        if world is not None:
            return world.rank(), world.size()
        return (self._rank, self._size) if self._own is not None else (-1, -1)

    def _suits(self, given: dict[str, Any]) -> bool:
        """Whether the current group can stand in for one with the backends that a program asks for."""
        if self._own is None or (c10d.GroupMember.WORLD is not None and not self._own.in_place):
            return True
        wanted = c10d.BackendConfig(c10d.Backend(given.get("backend") or "undefined")).get_device_backend_map()
        if self._own.moves_by_nccl:
            return wanted == {"cuda": "nccl"}
        if not set(wanted.values()) <= {"gloo", "nccl", "xccl"} or wanted.get("cpu", "gloo") != "gloo":
            return False
        if "cpu" not in wanted:
            self._tell(INSTEAD.format(str(given["backend"])))
        return True

    def _keep(self, timeout: timedelta | None) -> None:
        if self._own is not None and not self._own.in_place and c10d.GroupMember.WORLD is None:
            self._own.restore()
        if self._own_in_place and timeout is not None:
            assert self._own is not None
            self._own.set_timeout(timeout)
        self._initialised = True
        self._tell(NOTHING_TO_DO)

    def _destroyed(self, _: Callable[..., None], group: Any = None) -> None:
        """Replace torch's `destroy_process_group`."""
        self._used = True
        world = c10d.GroupMember.WORLD
        if group is None or group is world:
            self._initialised = False
            if world is not None and self._own_in_place:
                assert self._own is not None
                self._own.unset(self._destroy)
                return
        self._destroy(group)


def _destroy(destroy: Callable[..., None], group: Any = None) -> None:
    """Call torch's `destroy_process_group`, and clear DTensor's cache.

    DTensor caches which groups to use, by an operation's shapes and mesh. The next program's mesh equals the old one,
    so that the same model would use destroyed groups.
    """
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
