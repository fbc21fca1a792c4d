"""`init_process_group` and `destroy_process_group` in a rank: what a program calls to start and end does no harm there.

A rank of a group is initialised before its function runs. To initialise the same again is then nothing to do; what
differs, in size, rank or backend, is done, while the group's own is set aside. After `destroy_process_group` the
program is without a default group, as it expects; the group's own is kept, and is back when the program initialises
again or the next run begins.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch.distributed.distributed_c10d as c10d

from labkit.comm.default_group import DefaultGroup
from labkit.comm.futures import in_place_of
from labkit.comm.rendezvous import Address, Rendezvous
from labkit.comm.time_limits import ends_by_itself

__all__ = ["ProcessGroupLaunch"]

HOMES: Final = ("torch.distributed", "torch.distributed.distributed_c10d", "torch.distributed.device_mesh")
NOTHING_TO_DO: Final = (
    "init_process_group had nothing to do: the ranks of a group are initialised already, with this rank and world size."
)
INSTEAD: Final = "init_process_group({!r}): there is no GPU for each rank here, so messages go through gloo."
ENVIRONMENT: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class ProcessGroupLaunch:
    """What this rank's program does with the default process group.

    Args:
        rank, size: this rank's number, and how many the group has.
        rendezvous: where it meets the others, if they are to make another group.
        tell: says something to the student, once in the life of the group.
    """

    def __init__(self, rank: int, size: int, rendezvous: Rendezvous, tell: Callable[[str], None]) -> None:
        self._rank, self._size, self._rendezvous, self._tell = rank, size, rendezvous, tell
        self._own: DefaultGroup | None = None  # None in a rank that is given no process group, of RPC or bare
        self._initialised = False  # by this run's program, and not destroyed since
        self._destroy: Callable[..., None] = functools.partial(_destroy, c10d.destroy_process_group)
        self._environment: dict[str, str] = {}
        self._used = False  # by this run's program

    def install(self) -> None:
        """From now on; what is torch's default group by now is the group's own."""
        if c10d.GroupMember.WORLD is not None:
            self._own = DefaultGroup()
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
        """A function or a cell is about to run: it finds the rank as a program finds it that has just started.

        Args:
            keep: what the program before has initialised, as from one cell to the next.
        """
        if not self._used:
            return
        self._initialised = False
        if not keep:
            self._used = False
            os.environ |= self._environment
        if c10d.GroupMember.WORLD is not None and not self._own_in_place:
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
        """Whether the next program could meet this one's: rank 0 still serves the store at the address that both name.

        Each rank would end this program's group when it begins the next one, some before rank 0 does. They would find
        the old store, and in it the addresses at which the ranks listened.
        """
        return not self._rendezvous.in_groups_store and c10d.GroupMember.WORLD is not None

    @property
    def _own_in_place(self) -> bool:
        return self._own is not None and self._own.in_place

    def _init(self, init: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """In place of torch's."""
        self._used = True
        try:
            given = inspect.signature(init).bind(*args, **kwargs).arguments
        except TypeError:
            init(*args, **kwargs)  # which says what is wrong
            return
        if not self._initialised:
            asked = _asked(given)
            if (asked.rank, asked.size) == self._present() and self._suits(given):
                self._keep(given.get("timeout"))
                return
            if self._own_in_place:
                assert self._own is not None
                self._own.unset(self._destroy)
            elif c10d.GroupMember.WORLD is not None:  # made in an earlier cell
                self._destroy()
            timed = ends_by_itself(given.get("timeout"))
            with self._rendezvous.waiting("init_process_group", asked.where, asked.size, timed):
                init(*args, **kwargs)
            self._initialised = True
        else:
            init(*args, **kwargs)  # twice: torch says so

    def _present(self) -> tuple[int, int]:
        """The rank and the size of the group that is there, or set aside."""
        world = c10d.GroupMember.WORLD
        if world is not None:
            return world.rank(), world.size()
        return (self._rank, self._size) if self._own is not None else (-1, -1)

    def _suits(self, given: dict[str, Any]) -> bool:
        """Whether the group that is there does what a program wants of the backends that it names."""
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
        """In place of torch's."""
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
    """torch's `destroy_process_group`, after which DTensor does not look for groups that are gone.

    DTensor remembers by an operation's shapes and mesh what to do, and which groups do it. A mesh of the next program's
    groups equals the old one, so that the same model would find the old groups.
    """
    destroy(group)
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


def _asked(given: dict[str, Any]) -> Address:
    """Which rank of how many a program wants to be, and where it meets the others."""
    rank, size = int(given.get("rank", -1)), int(given.get("world_size", -1))
    if given.get("store") is not None:
        return Address("store", "a store of its own", rank, size)
    return Address.of(given.get("init_method") or "env://", rank, size)
