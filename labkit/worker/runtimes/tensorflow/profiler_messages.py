"""Converts TensorFlow's messages to spans: between ranks, and between the devices of one process.

The key of a send contains both devices; a receive does not name its source. The step's number and the tensor's name
connect the two. Outside a tf.function TensorFlow copies the inputs of operations; the event's name then contains both
devices.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final

from labkit.recording.operations import RECV, SEND
from labkit.recording.schema import Span
from labkit.worker.runtimes.tensorflow.session import Event

MESSAGES: Final = "TensorFlow messages"  # the group of sends and receives between ranks
COPIES: Final = "TensorFlow copies"  # the group of those between a rank's devices, without the rank's number
COPIED: Final = "_Send input "  # prefix of the event of a copy outside a tf.function
SENDS: Final = ("_Send", "_HostSend")  # types of operations; the second of each is for small values, such as a condition
RECEIVES: Final = ("_Recv", "_HostRecv")
DEVICE: Final = re.compile(r"/job:(\w+)/replica:\d+/task:(\d+)/device:\w+:(\d+)")
NUMBERED: Final = re.compile(r"(.*)/_(\d+)$")
End = tuple[str, int, int]  # one end of a message: job, task and device


def ends_of(send: Event) -> tuple[End | None, End | None]:
    """Return the source and the target of a send."""
    source, _, target, *_ = [*str(send.stats["key"]).split(";"), "", "", ""]
    found = [DEVICE.match(text) for text in (source, target)]
    ends = [(m[1], int(m[2]), int(m[3])) if m else None for m in found]
    return ends[0], ends[1]


def messages_of(
    operations: Iterable[Event], ends: Mapping[int, int], rank: int, ranks: Mapping[tuple[str, int], int], *, step: int,
    device: str, nbytes: Callable[..., int],
) -> list[Span]:  # fmt: skip
    """Return the messages that one executor sends to other devices and receives from them.

    Args:
        operations: the executor's operations.
        ends: the end times of asynchronous operations in ns, by their contexts.
        rank: this rank's number.
        ranks: the numbers of all ranks, by TensorFlow's job and task number.
        step: the number of the call, the same in all processes.
        device: the executor's device.
        nbytes: as for `events.spans_of`.
    """
    found = []
    times: Counter[tuple[str, int]] = Counter()  # in a loop, one message per iteration
    for event in sorted(operations, key=lambda e: e.start_ns):
        kind = event.name.rpartition(":")[2]
        if kind not in SENDS + RECEIVES:
            continue
        tensor, number = _tensor(event.name.rpartition(":")[0])
        times[tensor, number] += 1
        time = times[tensor, number]
        if kind in SENDS and "key" in event.stats:
            source, target = ends_of(event)
            if source is None or target is None or source == target:
                continue
            peer, size = ranks.get(target[:2], rank), nbytes(tensor)
            found.append(
                Span(
                    rank, SEND.name, "communication", event.start_ns, event.end_ns, nbytes=max(size, 0), peer=peer,
                    group=MESSAGES if peer != rank else _copies(rank), match=_match(step, tensor, number, time), device=device,
                    sized=bool(size),
                )
            )  # fmt: skip
        elif kind in RECEIVES and event.stats.get("_p") in ends:
            end_ns, size = ends[event.stats["_p"]], nbytes(tensor)
            found.append(
                Span(
                    rank, RECV.name, "communication", event.start_ns, end_ns, event.start_ns, end_ns, nbytes=max(size, 0),
                    group=MESSAGES, match=_match(step, tensor, number - 1, time), device=device, sized=bool(size),
                )
            )  # fmt: skip
    return found


def within_the_rank(messages: Iterable[Span]) -> list[Span]:
    """Return all of a rank's messages, with the peer set in those that it has received from itself."""
    messages = list(messages)
    own = {s.match for s in messages if s.name == SEND.name and s.peer == s.rank}
    return [replace(s, group=_copies(s.rank), peer=s.rank) if s.name == RECV.name and s.match in own else s for s in messages]


def copy_of(event: Event, rank: int, name: Callable[[int], str]) -> list[Span]:
    """Return the span of a copy between devices outside a tf.function; [] if there is only one device."""
    devices = [int(m[3]) for m in DEVICE.finditer(event.name)]
    if len(devices) != 2 or devices[0] == devices[1]:
        return []
    return [Span(rank, "copy", "communication", event.start_ns, event.end_ns, peer=rank, device=name(devices[0]), sized=False)]


def _copies(rank: int) -> str:
    return f"{COPIES} of rank {rank}"


def _tensor(name: str) -> tuple[str, int]:
    """Return the tensor's name, and the number that TensorFlow gave the send; the receive has the next number."""
    numbered = NUMBERED.match(name)
    return (numbered[1], int(numbered[2])) if numbered else (name, 0)


def _match(step: int, tensor: str, number: int, time: int) -> int:
    """Return a number that connects a send and its receive; the step's number is the same in all processes."""
    return (step & 0x7FFFFFFF) << 32 | zlib.crc32(f"{tensor} {number} {time}".encode())
