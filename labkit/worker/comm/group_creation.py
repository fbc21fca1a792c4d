"""Records the creation of sub-groups as pending operations, since it blocks until all members have entered it.

torch numbers the groups in each process. A rank that has created one group more than the others, perhaps in an earlier
run, waits for the next group's members under another number than they do. So the record of a creation has its number,
and the line of the previous one.

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
from labkit.recording.group_keys import creation_key
from labkit.recording.record import Recorder, clock, is_students, student_line
from labkit.recording.schema import TIMED, UNSHOWN
from labkit.worker.comm.operation import Operation, ends_by_itself
from labkit.worker.comm.torch_internals import GROUP_CREATION

HELPER: Final = "_new_process_group_helper"


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
        _agree_on_members(given["group_name"], len(before), ranks)
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


def _agree_on_members(name: str, number: int, ranks: Sequence[int]) -> None:
    """Compare a new group's members with those that other ranks give to the group with this name and number.

    Raises:
        ValueError: they differ. A group of one rank needs no connection, and may be another one on each rank.
    """
    if len(ranks) < 2:
        return
    mine = theirs = ",".join(map(str, ranks))
    world: Any = c10d.GroupMember.WORLD
    with contextlib.suppress(RuntimeError, NotImplementedError):  # a store that cannot compare
        theirs = world.get_group_store().compare_set(f"labkit's new group {number} {name}", "", mine).decode()
    if theirs != mine:
        one, other = (listed(text.split(",")) for text in (mine, theirs))
        raise ValueError(
            f"new_group of the ranks {one}: for another rank, this group has the ranks {other}. Every rank must call new_group "
            "for each group, in the same order, also ranks that do not belong to it"
        )
