"""What TensorFlow sends from device to device, as spans: between ranks, and between the devices of one process.

A send carries a key with both devices, a receive does not know from where it receives: the two are tied by the step's number and
the tensor's name. Outside of a tf.function TensorFlow copies inputs of operations itself; the event's name has both devices.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final

from labkit.recording.schema import Span
from labkit.worker.runtimes.tensorflow.session import Event

__all__ = ["COPIED", "MESSAGES", "copy_of", "ends_of", "messages_of", "within_the_rank"]

MESSAGES: Final = "TensorFlow messages"  # the group of sends and receives between ranks
COPIES: Final = "TensorFlow copies"  # and between the devices of a rank, with its number
COPIED: Final = "_Send input "  # how the event of a copy outside of a tf.function begins
DEVICE: Final = re.compile(r"/job:(\w+)/replica:\d+/task:(\d+)/device:\w+:(\d+)")
NUMBERED: Final = re.compile(r"(.*)/_(\d+)$")
End = tuple[str, int, int]  # of a message: job, task and device


def ends_of(send: Event) -> tuple[End | None, End | None]:
    """From where to where."""
    source, _, target, *_ = [*str(send.stats["key"]).split(";"), "", "", ""]
    found = [DEVICE.match(text) for text in (source, target)]
    ends = [(m[1], int(m[2]), int(m[3])) if m else None for m in found]
    return ends[0], ends[1]


def messages_of(
    operations: Iterable[Event], ends: Mapping[int, int], rank: int, ranks: Mapping[tuple[str, int], int], *, step: int,
    device: str, nbytes: Callable[[str, int, bool], int],
) -> list[Span]:  # fmt: skip
    """What one executor sends to other devices and receives from them.

    Args:
        operations: that it ran.
        ends: by the context of an asynchronous operation, when it was over.
        rank: whose.
        ranks: by TensorFlow's job and task number, the number of the rank.
        step: the number of the call in all processes.
        device: that it runs on.
        nbytes: as `spans_of` takes it.
    """
    found = []
    for event in operations:
        kind = event.name.rpartition(":")[2]
        tensor, number = _tensor(event.name.rpartition(":")[0])
        if kind == "_Send" and "key" in event.stats:
            source, target = ends_of(event)
            if source is None or target is None or source == target:
                continue
            peer, size = ranks.get(target[:2], rank), nbytes(tensor, -1, False)
            found.append(
                Span(
                    rank, "send", "communication", event.start_ns, event.end_ns, nbytes=max(size, 0), peer=peer,
                    group=MESSAGES if peer != rank else _copies(rank), match=_match(step, tensor, number), device=device,
                    sized=bool(size),
                )
            )  # fmt: skip
        elif kind == "_Recv" and event.stats.get("_p") in ends:
            end_ns, size = ends[event.stats["_p"]], nbytes(tensor, -1, False)
            found.append(
                Span(
                    rank, "recv", "communication", event.start_ns, end_ns, event.start_ns, end_ns, nbytes=max(size, 0),
                    group=MESSAGES, match=_match(step, tensor, number - 1), device=device, sized=bool(size),
                )
            )  # fmt: skip
    return found


def within_the_rank(messages: Iterable[Span]) -> list[Span]:
    """All of a rank's messages; those that it has received from itself know it now."""
    messages = list(messages)
    own = {s.match for s in messages if s.name == "send" and s.peer == s.rank}
    return [replace(s, group=_copies(s.rank), peer=s.rank) if s.name == "recv" and s.match in own else s for s in messages]


def copy_of(event: Event, rank: int, name: Callable[[int], str]) -> list[Span]:
    """A copy outside of a tf.function.

    Args:
        event: of the copy.
        rank: whose.
        name: of a device, by its number.
    """
    devices = [int(m[3]) for m in DEVICE.finditer(event.name)]
    if len(devices) != 2 or devices[0] == devices[1]:
        return []
    return [Span(rank, "copy", "communication", event.start_ns, event.end_ns, peer=rank, device=name(devices[0]), sized=False)]


def _copies(rank: int) -> str:
    return f"{COPIES} of rank {rank}"


def _tensor(name: str) -> tuple[str, int]:
    """What is sent, and the number that TensorFlow gave the send; its receive has the next one."""
    numbered = NUMBERED.match(name)
    return (numbered[1], int(numbered[2])) if numbered else (name, 0)


def _match(step: int, tensor: str, number: int) -> int:
    """The same on both sides: the step has one number in all processes."""
    return (step & 0x7FFFFFFF) << 32 | zlib.crc32(f"{tensor} {number}".encode())
