"""Maps the ranks of process groups to processes, also if the program numbers the ranks itself.

torch numbers the ranks of a group from 0. In labkit's default group they equal the processes' numbers; groups of
`new_group` are defined by ranks of the default group. But a program may create another default group, with only some of
the processes, or construct a group itself over a store. Then each process writes its number to the group's store, and
reads the others' numbers when the group is first used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch.distributed.distributed_c10d as c10d

from labkit.recording.group_keys import of_ranks

KEY: Final = "labkit: process of rank {}"


class Numbering:
    """The numbers of the processes, and the groups that this process joins.

    `given`: whether the first default group is created for the program, so that its ranks are the processes' numbers.
    """

    def __init__(self, process: int, size: int, *, given: bool) -> None:
        self.process, self.size = process, size
        self._given = given
        self._worlds = 0
        self._world = Members(self, 1)

    def join(self, store: Any, rank: int, size: int) -> Members:
        """Register a new group, and return its members; to be called from the constructor of `ProcessGroup`."""
        if c10d.GroupMember.WORLD is None:  # this is the default group
            self._worlds += 1
            given, self._given = self._given, False
            if given:
                self.size = size
            else:
                self._world = Exchanged(self, self._worlds, store, rank, size)
        return self._world


def numbers_of(group: Any) -> list[int]:
    """Return a group's ranks as ranks of the default group."""
    try:
        return c10d.get_process_group_ranks(group)
    except KeyError:  # torch does not list it
        return list(group.numbers or range(group.size()))


class Members:
    """The processes of the default group that is created for the program, and of the groups that torch makes from it.

    `world` is the number of the default group, since a program may create several.
    """

    def __init__(self, numbering: Numbering, world: int) -> None:
        self._numbering, self._world = numbering, world

    def processes(self) -> Sequence[int]:
        """Return the process of each rank."""
        return range(self._numbering.size)

    def of(self, group: Any) -> tuple[str, list[int]]:
        """Return a group's name, equal in all its processes and unique among groups, and the process of each rank."""
        processes = self.processes()  # first, since it may change `_world`
        ranks = [processes[number] for number in numbers_of(group)]
        if group is c10d.GroupMember.WORLD:
            name = "world" if self._world == 1 else f"world {self._world}"
            return name if ranks == list(range(self._numbering.size)) else of_ranks(name, ranks), ranks
        # torch's description of a split group contains a memory address of its parent, which differs between ranks.
        desc = group.group_desc.partition(":split:")[0]
        desc = "" if desc == "undefined" else f" {desc}"
        world = "" if self._world == 1 else f" of world {self._world}"
        return of_ranks(f"group {group.group_name}{desc}{world}", ranks), ranks


class Exchanged(Members):
    """The members of a default group that the program creates over a store."""

    def __init__(self, numbering: Numbering, world: int, store: Any, rank: int, size: int) -> None:
        super().__init__(numbering, world)
        self._store, self._size = store, size
        self._processes: list[int] = []
        store.set(KEY.format(rank), f"{numbering.process} {world}")

    def processes(self) -> Sequence[int]:
        """Return the process of each rank; to be called when the group is first used, since then all have joined it."""
        if not self._processes:
            replies = [self._store.get(KEY.format(rank)).decode().split() for rank in range(self._size)]
            self._processes = [int(process) for process, _ in replies]
            self._world = max(int(world) for _, world in replies)  # processes may have joined different numbers of groups
            self._store = None
        return self._processes


def check_peer(method: str, peer: int, me: int | None, size: int) -> None:
    """Check the other rank of a message; `me` is None if the backend delivers messages to oneself, as NCCL does.

    Raises:
        ValueError: the group has no such rank, for which gloo would wait for ever; or it is this rank, for which gloo's
            error names only addresses.
    """
    if not 0 <= peer < size:
        raise ValueError(f"{method} with rank {peer}: this group has the ranks 0 to {size - 1}")
    if peer == me:
        raise ValueError(f"{method} with rank {peer}: a rank cannot exchange messages with itself")
