"""Calls that wait until others come: who has come to a rendezvous, and how such a wait reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from labkit.recording.ring_buffer import RENDEZVOUS, STORE

__all__ = ["DIST_BACKWARD", "HINTS", "NEW_GROUP", "WAITS", "hint_of", "not_there", "waits_for"]

NEW_GROUP: Final = "new group "  # how the groups begin of the creation of a sub-group, which waits for all its members
# The group of a distributed backward pass. Nobody comes to it: torch's own threads compute it on the other ranks, in C++, where
# no Python frame and no entry of what is pending shows them, also on a rank that waits in rpc.shutdown.
DIST_BACKWARD: Final = "dist_autograd.backward"
WAITS: Final = (RENDEZVOUS, STORE)  # how their groups begin
HINTS: Final = {  # by that, what is usually wrong where such a wait never ends
    RENDEZVOUS: "Ranks meet where address, port and world size agree, and each must come with a rank of its own.",
    STORE: "A wait for a key ends when a rank sets it: look for a key of another name, or a rank that returned before.",
}


def not_there(group: str, match: int, entered: Sequence[int]) -> list[int]:
    """Whose coming such a wait needs: ranks by their numbers, or -1 for somebody, whoever it is.

    Args:
        group: what those who meet call it.
        match: how often they have met so before, and this time.
        entered: of each rank, how often it has come there.
    """
    if group.startswith(STORE):
        return [-1]
    size = _size(group)
    absent = [rank for rank, number in enumerate(entered) if number < match]
    if size == len(entered):
        return absent
    return [-1] if len(entered) - len(absent) < size else []


def waits_for(group: str) -> str:
    """What stands behind the name of such a call: the address and the size, or the key."""
    if group.startswith(STORE):
        return f"for key {group.removeprefix(STORE)!r}"
    return group.removeprefix("rendezvous ") if group.startswith(RENDEZVOUS) else ""


def hint_of(group: str, size: int) -> str:
    """What is usually wrong where such a wait never ends.

    Args:
        group: what those who meet call it.
        size: how many ranks there are.
    """
    if group.startswith(RENDEZVOUS) and _size(group) > size:
        asked = _size(group)
        return f"It asks for {asked} ranks, and this group has {size}: give it world_size {size}, or make a lab.Group of {asked}."
    return next(words for begin, words in HINTS.items() if group.startswith(begin))


def _size(group: str) -> int:
    """How many meet there: 4 in "rendezvous at localhost:29500 of 4 ranks"."""
    return int(group.split()[-2])
