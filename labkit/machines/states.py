"""The state of a rank on another machine, which the relay keeps up to date in shared memory behind the rank's ring."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import Any, Final

from labkit.launch.rank_process import Status
from labkit.launch.resource_usage import Load
from labkit.recording.ring_layout import RING_BYTES

# The word for the state, exiting, CPU seconds, memory in bytes, GPU load; in ns, offset and error of the clock, and the
# time of the last report.
_STATE: Final = struct.Struct("<16s?dqiqqq")
STATE_BYTES: Final = _STATE.size


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of a rank, as its agent has last reported it.

    Args:
        status: the state of its process.
        load: the resources that it uses.
    """

    status: Status
    load: Load


UNREPORTED: Final = RankState(Status("sleeping", exiting=False, cpu_s=0.0), Load())  # before the first report


def write_state(memory: Any, state: RankState, offset_ns: int, error_ns: int, reported_ns: int) -> None:
    """In the relay: store a rank's state.

    Args:
        memory: its mapped memory, of `RING_BYTES` + `STATE_BYTES` bytes.
        state: the state.
        offset_ns: what must be added to a time of the rank's machine now.
        error_ns: a bound on the error of that.
        reported_ns: when its machine reported last, on this machine's clock.
    """
    status, load = state.status, state.load
    busy = -1 if load.busy is None else load.busy
    values = status.state.encode(), status.exiting, status.cpu_s, load.nbytes, busy, offset_ns, error_ns, reported_ns
    _STATE.pack_into(memory, RING_BYTES, *values)


def read_state(memory: int) -> tuple[RankState, int, int, int]:
    """In the notebook: return a rank's state, offset and error of its clock, and when its machine reported last, in ns.

    Args:
        memory: the file descriptor of its memory.
    """
    data = os.pread(memory, _STATE.size, RING_BYTES)
    if len(data) < _STATE.size:  # the relay has not mapped it yet
        return UNREPORTED, 0, 0, 0
    word, exiting, cpu_s, nbytes, busy, offset_ns, error_ns, reported_ns = _STATE.unpack(data)
    status = Status(word.rstrip(b"\0").decode(), exiting, cpu_s)
    return RankState(status, Load(nbytes, None if busy < 0 else busy)), offset_ns, error_ns, reported_ns
