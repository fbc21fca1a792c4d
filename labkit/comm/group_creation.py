"""Records the creation of sub-groups as pending operations, since it blocks until all members have entered it.

torch numbers the groups in each process. A rank that has created one group more than the others, perhaps in an earlier
run, waits for the next group's members under another number than they do. So the record of a creation has its number,
and the line of the previous one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed.distributed_c10d as c10d

from labkit.comm.futures import in_place_of
from labkit.comm.operation import Operation
from labkit.comm.time_limits import ends_by_itself
from labkit.recording.group_keys import creation_key
from labkit.recording.record import Recorder, clock, student_line
from labkit.recording.schema import TIMED, UNSHOWN

__all__ = ["watch_creation"]


def watch_creation(recorder: Recorder) -> None:
    """Record from now on when this rank waits for the members of a new group."""
    before: list[str] = []  # the lines that created a group
    helper = c10d._new_process_group_helper
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
        group = creation_key(given["group_name"], ranks)
        operation = Operation(recorder.ring, "new_group", clock(), group=group, match=1, line=f"{line}; {order}")
        operation.wait_begins(TIMED if ends_by_itself(given.get("timeout")) else 0)
        try:
            created = original(*args, **kwargs)
            # A member may return while another still waits for a third: keep that it has entered the creation.
            recorder.ring.write_communication("new_group", operation.start_ns, clock(), group=group, match=1, flags=UNSHOWN)
        finally:
            operation.withdrawn()  # no span: like all preparation of communication, it counts as the program's own time
        return created

    c10d._new_process_group_helper = in_place_of(helper, create)
