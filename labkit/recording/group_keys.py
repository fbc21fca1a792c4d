"""Keys of communication groups, and signatures of operations, which must match on all ranks that take part.

Only this module builds and parses them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import lru_cache
from typing import Final, NamedTuple

_SHAPE: Final = re.compile(r"\[([\d, ]*)\]")
_EXCHANGE: Final = re.compile(r"(?P<dtype>\w+) (?P<sent>[\d,]*) sent, (?P<received>[\d,]*) received(, in rows of (?P<row>\d+))?")
_EVEN: Final = re.compile(r"(?P<dtype>\w+) (?P<elements>\d+)")


def of_tensor(dtype: str, shape: Sequence[int], reduction: str = "", root: int = -1) -> str:
    """The signature of an operation on a tensor: "float32 [4, 3], product, root 1"."""
    return _with_rest(f"{dtype} {list(shape)}", reduction, root)


def of_parts(dtype: str, elements: Sequence[int], reduction: str = "", root: int = -1) -> str:
    """The signature of an operation on parts of different sizes: "float32 parts of 4, 2"."""
    return _with_rest(f"{dtype} parts of {', '.join(map(str, elements))}", reduction, root)


def of_exchange(dtype: str, sent: Sequence[int], received: Sequence[int], row: int = 1) -> str:
    """The signature of one rank's side of an all-to-all, in elements by rank: "float32 2,6 sent, 4,4 received"."""
    rows = f", in rows of {row}" if row > 1 else ""
    return f"{dtype} {','.join(map(str, sent))} sent, {','.join(map(str, received))} received{rows}"


def _with_rest(text: str, reduction: str, root: int) -> str:
    return ", ".join(filter(None, (text, reduction, f"root {root}" if root >= 0 else "")))


def with_elements(signature: str) -> str:
    """The same text for tensors of as many elements: a backend sends elements, so [4] fits [2, 2]; both become 4."""
    return _SHAPE.sub(lambda shape: str(math.prod(_sizes(shape))), signature)


def without_ones(signature: str) -> str:
    """The signature without dimensions of size 1, which do not change the layout in memory: [4, 1] becomes [4]."""
    return _SHAPE.sub(lambda shape: str([n for n in _sizes(shape) if n != 1]), signature)


def _sizes(shape: re.Match[str]) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", shape[1])]


class Exchange(NamedTuple):
    """One rank's side of an all-to-all: how many elements it sends to and receives from each, and those of a row."""

    dtype: str
    sent: list[int]
    received: list[int]
    row: int = 1


def exchange_of(signature: str, size: int) -> Exchange | None:
    """One rank's side of an all-to-all in a group of `size` ranks; None if the signature does not say it.

    The signature is one of `of_exchange`, or of a tensor in equal parts: `with_elements(of_tensor(...))`.
    """
    if parts := _EXCHANGE.fullmatch(signature):
        sent, received = ([int(n) for n in parts[side].split(",") if n] for side in ("sent", "received"))
        return Exchange(parts["dtype"], sent, received, int(parts["row"] or 1))
    if even := _EVEN.fullmatch(signature):
        each = [math.ceil(int(even["elements"]) / size)] * size
        return Exchange(even["dtype"], each, each)
    return None


class GroupKind(Enum):
    """The kind of communication that a key identifies."""

    ALONE = "one rank alone: no key"
    COLLECTIVE = "a process group"
    PAIR = "messages from one rank to another"
    CALL = "remote calls from one rank to another"
    RENDEZVOUS = "a call that returns once a given number of ranks have entered it"
    CREATION = "the creation of a sub-group, which waits for all its members"
    BACKWARD = "a distributed backward pass"
    TENSORFLOW = "a wait inside TensorFlow, which alone knows the participants"


TENSORFLOW: Final = "tensorflow"
# The other ranks never enter this group: torch's own C++ threads run their part, even on a rank that waits in
# rpc.shutdown. They appear neither in Python frames nor among the pending operations.
DIST_BACKWARD: Final = "dist_autograd.backward"

_WHOLE: Final = {"": GroupKind.ALONE, TENSORFLOW: GroupKind.TENSORFLOW, DIST_BACKWARD: GroupKind.BACKWARD}
_BEGIN: Final = {
    GroupKind.PAIR: "p2p ",
    GroupKind.CALL: "rpc ",
    GroupKind.RENDEZVOUS: "rendezvous at ",
    GroupKind.CREATION: "new group ",
}


def pair_key(source: int, destination: int, tag: int, group: str = "world") -> str:
    """The key of messages with one tag from one rank to another; `group` is the key of their process group."""
    return f"{_BEGIN[GroupKind.PAIR]}{source}>{destination} tag {tag}" + ("" if group == "world" else f" {group}")


def call_key(caller: int, callee: int) -> str:
    """The key of the remote calls from one rank to another."""
    return f"{_BEGIN[GroupKind.CALL]}{caller}>{callee}"


def rendezvous_key(where: str, size: int) -> str:
    """The key of the calls by which `size` ranks meet at an address."""
    return f"{_BEGIN[GroupKind.RENDEZVOUS]}{where} of {size} ranks"


def creation_key(name: str, ranks: Iterable[int]) -> str:
    """Return the key of the creation of a sub-group that torch calls `name`."""
    return of_ranks(f"{_BEGIN[GroupKind.CREATION]}{name}", ranks)


def of_ranks(name: str, ranks: Iterable[int]) -> str:
    """Return the key of a process group that consists of the given ranks only."""
    return f"{name} of ranks {','.join(map(str, ranks))}"


@lru_cache(maxsize=1 << 12)
def kind_of(key: str) -> GroupKind:
    """The kind of communication that a key identifies."""
    return _WHOLE.get(key) or next((kind for kind, begin in _BEGIN.items() if key.startswith(begin)), GroupKind.COLLECTIVE)


def ranks_of(key: str) -> list[int] | None:
    """Return the ranks of a process group that exists or is being created; None for all ranks."""
    listed = re.search(r" of ranks ([\d,]+)$", key)
    return [int(number) for number in listed[1].split(",")] if listed else None


@lru_cache(maxsize=1 << 12)
def axis_of(key: str) -> str:
    """Return the axis of a device mesh along which a group or a pair communicates; "" if torch names none.

    torch describes the groups of a mesh by their axes, as "mesh_tp". A mesh with a single axis may consist of the whole
    world, whose group has no axis ("mesh_default" on a machine with GPUs).
    """
    named = re.search(r" mesh_(?!default\b)(\S+)", key)
    return named[1] if named else ""


def ends_of(key: str) -> tuple[int, int, int]:
    """Return the sending rank, the receiving rank and the tag, given the key of a pair."""
    source, destination, tag = re.findall(r"\d+", key.removeprefix(_BEGIN[GroupKind.PAIR]) + " tag 0")[:3]
    return int(source), int(destination), int(tag)


def size_of(key: str) -> int:
    """Return the number of ranks that meet, given the key of a rendezvous."""
    return int(key.split()[-2])


def where_of(key: str) -> str:
    """Return where ranks meet, or a message's tag, in words after the call's name, or ""."""
    kind = kind_of(key)
    if kind is GroupKind.PAIR:
        tag = ends_of(key)[2]
        return f"with tag {tag}" if tag else ""
    return key.removeprefix("rendezvous ") if kind is GroupKind.RENDEZVOUS else ""
