"""Rendezvous and waits for a store's key: which ranks are missing, and the usual mistake behind an endless wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from labkit.recording.group_keys import GroupKind, kind_of, size_of

HINTS: Final = {  # the usual mistake behind an endless wait
    GroupKind.RENDEZVOUS: "Ranks meet where address, port and world size agree, and each must come with a rank of its own.",
    GroupKind.STORE: "A wait for a key ends when a rank sets it: look for a key of another name, or a rank that returned before.",
}


def absent_ranks(group: str, match: int, entered: Sequence[int]) -> list[int]:
    """The numbers of the ranks that such a wait still needs; -1 stands for any rank.

    Args:
        group: the key of the rendezvous, or of the wait for a store's key.
        match: the number of this rendezvous, counted from 1.
        entered: how many times each rank has entered it.
    """
    if kind_of(group) is GroupKind.STORE:
        return [-1]
    size = size_of(group)
    absent = [rank for rank, number in enumerate(entered) if number < match]
    if size == len(entered):
        return absent
    return [-1] if len(entered) - len(absent) < size else []


def hint_of(group: str, size: int) -> str:
    """The usual mistake behind an endless wait.

    Args:
        group: the key of the rendezvous, or of the wait for a store's key.
        size: the number of ranks in the group.
    """
    kind = kind_of(group)
    if kind is GroupKind.RENDEZVOUS and size_of(group) > size:
        asked = size_of(group)
        return f"It asks for {asked} ranks, and this group has {size}: give it world_size {size}, or make a lab.Group of {asked}."
    return HINTS[kind]
