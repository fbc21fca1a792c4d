"""Maps the ranks of process groups to processes, and records the creation of sub-groups.

torch numbers the ranks of a group from 0. In labkit's default group they equal the processes' numbers; groups of
`new_group` are defined by ranks of the default group. But a program may create another default group, with only some of
the processes. Then each process writes its number to the group's store, and reads the others' numbers when the group is
first used.

Creating a group blocks until all members have entered it, as a pending operation. torch numbers the groups in each
process. A rank that has created one group more than the others, perhaps in an earlier run, waits for the next group's
members under another number than they do. So the record of a creation has its number, and the line of the previous one.

If ranks give one number to groups with other members, as each half of them that creates only its own group does, torch
connects ranks of different groups, or waits for ever. So the members are compared first, in the default group's store.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch.distributed.distributed_c10d as c10d

from labkit.errors.lists import listed
from labkit.recording.group_keys import creation_key, of_ranks
from labkit.recording.record import Recorder, clock, is_students, student_line
from labkit.recording.schema import TIMED, UNSHOWN
from labkit.recording.torch_internals import GROUP_CREATION
from labkit.worker.comm.operation import Operation, ends_by_itself

KEY: Final = "labkit: process of rank {}"
HELPER: Final = "_new_process_group_helper"


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
                self._world = Members(self, self._worlds, store, size)
                store.set(KEY.format(rank), f"{self.process} {self._worlds}")
        return self._world


def numbers_of(group: Any) -> list[int]:
    """Return a group's ranks as ranks of the default group."""
    try:
        return c10d.get_process_group_ranks(group)
    except KeyError:  # torch does not list it
        return list(group.numbers or range(group.size()))


class Members:
    """The processes of a default group, and of the groups that torch makes from it.

    `world` is the number of the default group, since a program may create several. `store` has the processes' numbers
    if the program creates the group, whose size is `size`.
    """

    def __init__(self, numbering: Numbering, world: int, store: Any = None, size: int = 0) -> None:
        self._numbering, self._world, self._store, self._size = numbering, world, store, size
        self._processes: list[int] = []

    def of(self, group: Any) -> tuple[str, list[int]]:
        """Return a group's name, equal in all its processes and unique among groups, and the process of each rank.

        To be called when the group is first used, since then all have joined it.
        """
        if self._store is not None:
            replies = [self._store.get(KEY.format(rank)).decode().split() for rank in range(self._size)]
            self._processes = [int(process) for process, _ in replies]
            self._world = max(int(world) for _, world in replies)  # processes may have joined different numbers of groups
            self._store = None
        processes = self._processes or range(self._numbering.size)
        ranks = [processes[number] for number in numbers_of(group)]
        if group is c10d.GroupMember.WORLD:
            name = "world" if self._world == 1 else f"world {self._world}"
            return name if ranks == list(range(self._numbering.size)) else of_ranks(name, ranks), ranks
        # torch's description of a split group contains a memory address of its parent, which differs between ranks.
        desc = group.group_desc.partition(":split:")[0]
        desc = "" if desc == "undefined" else f" {desc}"
        world = "" if self._world == 1 else f" of world {self._world}"
        return of_ranks(f"group {group.group_name}{desc}{world}", ranks), ranks


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


def watch_creation(recorder: Recorder) -> None:
    """Record from now on when this rank waits for the members of a new group."""
    before: list[str] = []  # the lines that created a group
    if not GROUP_CREATION.found:
        return
    helper = GROUP_CREATION[HELPER]
    torchs = getattr(helper, "__labkit_original__", helper)
    place = inspect.unwrap(torchs).__code__.co_varnames.index("global_ranks_in_group")

    def create(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        ranks = args[place] if len(args) > place else kwargs["global_ranks_in_group"]
        # `init_process_group` records its own wait. If the program has created the default group itself, its ranks may
        # be other processes than labkit's.
        known = bool(ranks) and (c10d.get_rank(), c10d.get_world_size()) == (recorder.rank, recorder.size)
        if not known:
            return original(*args, **kwargs)
        given = inspect.signature(torchs).bind(*args, **kwargs).arguments  # slow: a thirtieth of a rank's start
        line = student_line()
        order = f"its group number {len(before) + 1}" + (f", after that of {before[-1]}" if before else "")
        before.append(line)
        _agree_on_members(given["group_name"], len(before), ranks, line)
        group = creation_key(given["group_name"], ranks)
        name = _called()
        operation = Operation(recorder.ring, name, clock(), group=group, match=1, line=f"{line}; {order}")
        operation.wait_begins(TIMED if ends_by_itself(given.get("timeout")) else 0)
        try:
            created = original(*args, **kwargs)
            # A member may return while another still waits for a third: keep that it has entered the creation.
            recorder.ring.write_communication(name, operation.start_ns, clock(), group=group, match=1, flags=UNSHOWN)
        finally:
            operation.withdrawn()  # no span: like all preparation of communication, it counts as the program's own time
        return created

    GROUP_CREATION.replace(HELPER, create)


def _called() -> str:
    """The name of torch's function that the program has called to create groups, such as init_device_mesh."""
    name, frame = "new_group", sys._getframe(2)
    while frame is not None and not is_students(frame.f_code.co_filename):
        first = frame.f_code.co_qualname.partition(".")[0]
        if frame.f_globals["__name__"].startswith("torch.") and first in frame.f_globals.get("__all__", ()):
            name = first
        frame = frame.f_back  # type: ignore[assignment]  # None after the last
    return name


def _agree_on_members(name: str, number: int, ranks: Sequence[int], line: str) -> None:
    """Compare a new group's members with those that other ranks give to the group with this name and number, at a line.

    Raises:
        ValueError: they differ. Groups of one rank may, since they look for nobody in the store. Beside a larger group,
            they may not: all write their addresses into the store under the same name.
    """
    mine = ",".join(map(str, ranks))
    found = f"{mine} {line}"
    world: Any = c10d.GroupMember.WORLD
    with contextlib.suppress(RuntimeError, NotImplementedError):  # a store that cannot compare
        found = world.get_group_store().compare_set(f"labkit's new group {number} {name}", "", found).decode()
    theirs, _, where = found.partition(" ")
    if theirs != mine and "," in mine + theirs:
        one, other = (f"{'the ranks' if ',' in text else 'rank'} {listed(text.split(','))}" for text in (mine, theirs))
        raise ValueError(
            f"new_group of {one}: for another rank, this group has {other}{where and f' ({where})'}. Every rank must call "
            "new_group for each group, in the same order, including ranks that do not belong to it"
        )
