"""Calls that wait until others come: who has not come to a rendezvous, and what is usually wrong where such a wait never ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from labkit.recording.group_keys import GroupKind, kind_of, size_of

__all__ = ["HINTS", "hint_of", "not_there"]

HINTS: Final = {  # what is usually wrong where such a wait never ends
    GroupKind.RENDEZVOUS: "Ranks meet where address, port and world size agree, and each must come with a rank of its own.",
    GroupKind.STORE: "A wait for a key ends when a rank sets it: look for a key of another name, or a rank that returned before.",
}


def not_there(group: str, match: int, entered: Sequence[int]) -> list[int]:
    """Whose coming such a wait needs: ranks by their numbers, or -1 for somebody, whoever it is.

    Args:
        group: the key of the rendezvous, or of a wait for a store.
        match: how often they have met so before, and this time.
        entered: of each rank, how often it has come there.
    """
    if kind_of(group) is GroupKind.STORE:
        return [-1]
    size = size_of(group)
    absent = [rank for rank, number in enumerate(entered) if number < match]
    if size == len(entered):
        return absent
    return [-1] if len(entered) - len(absent) < size else []


def hint_of(group: str, size: int) -> str:
    """What is usually wrong where such a wait never ends.

    Args:
        group: the key of the rendezvous, or of a wait for a store.
        size: how many ranks there are.
    """
    kind = kind_of(group)
    if kind is GroupKind.RENDEZVOUS and size_of(group) > size:
        asked = size_of(group)
        return f"It asks for {asked} ranks, and this group has {size}: give it world_size {size}, or make a lab.Group of {asked}."
    return HINTS[kind]
