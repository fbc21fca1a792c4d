"""numpy arrays that share memory keep sharing it where they are sent: by themselves, each pickles a copy of its own.

A first pickling meets the arrays. Where some of one array's views share memory, with one another or with the array itself, the
value is pickled once more, and those are taken apart into a block of memory, which goes once, and their places in it.
"""

from __future__ import annotations

import sys
from typing import Any, Final

__all__ = ["SharedArrays"]

WORK: Final = 10_000  # at most so much for finding out whether two views overlap; beyond it they are taken to


class SharedArrays:
    """The arrays that one pickling meets, by the array that owns their memory.

    Args:
        blocks: what `found` gave after the pickling before.
    """

    def __init__(self, blocks: dict[int, tuple[Any, Any]] | None = None) -> None:
        self._numpy = sys.modules.get("numpy")
        self._array_type = getattr(self._numpy, "ndarray", None)
        self._blocks = blocks or {}
        self._of_owner: dict[int, list[Any]] = {}

    def reduce(self, obj: Any) -> Any:
        """How to take an array apart that shares memory with another; None for the usual way, and for everything else."""
        if type(obj) is not self._array_type:
            return None
        known, block = self._blocks.get(id(obj), (None, None))
        if known is obj:
            offset = _address(obj) - _address(block)
            return _array_at, (block, offset, obj.shape, obj.strides, obj.dtype, obj.flags.writeable)
        if obj.nbytes and not obj.dtype.hasobject:
            self._of_owner.setdefault(id(_owner(obj)), []).append(obj)
        return None

    def found(self) -> dict[int, tuple[Any, Any]]:
        """By identity, each array that shares memory with another one of this pickling, and the block that both lie in.

        The array is held, since its identity must not become another's: some objects make arrays only to be pickled.
        """
        blocks: dict[int, tuple[Any, Any]] = {}
        for arrays in self._of_owner.values():
            distinct = list({id(array): array for array in arrays}.values())
            owner = _owner(distinct[0])
            if len(distinct) < 2 or not (owner.flags.c_contiguous or owner.flags.f_contiguous):
                continue
            assert self._numpy is not None
            whole = owner.ravel(order="K").view(self._numpy.uint8)
            for low, high, members in self._overlapping(distinct, owner):
                block = whole[low - _address(whole) : high - _address(whole)]
                blocks |= {id(member): (member, block) for member in members}
        return blocks

    def _overlapping(self, arrays: list[Any], owner: Any) -> list[tuple[int, int, list[Any]]]:
        """Those that share memory: first and last address of each lot, and its arrays."""
        numpy = self._numpy
        assert numpy is not None
        bounds = sorted(((*numpy.lib.array_utils.byte_bounds(a), a) for a in arrays), key=lambda b: b[:2])
        if any(a is owner for a in arrays):
            return [(bounds[0][0], max(high for _, high, _ in bounds), arrays)]
        lots: list[tuple[int, int, list[Any]]] = []
        for low, high, array in bounds:
            touched = [lot for lot in lots if low < lot[1] and any(self._share(array, other) for other in lot[2])]
            lots = [lot for lot in lots if not any(lot is t for t in touched)]
            first, last = min([low, *(t[0] for t in touched)]), max([high, *(t[1] for t in touched)])
            lots.append((first, last, [array, *(a for t in touched for a in t[2])]))
        return [lot for lot in lots if len(lot[2]) > 1]

    def _share(self, one: Any, other: Any) -> bool:
        assert self._numpy is not None
        try:
            return bool(self._numpy.shares_memory(one, other, max_work=WORK))
        except self._numpy.exceptions.TooHardError:
            return True


def _owner(array: Any) -> Any:
    """The array whose memory it is, as far as numpy knows."""
    while type(array.base) is type(array):
        array = array.base
    return array


def _address(array: Any) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _array_at(block: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any, writeable: bool) -> Any:
    """In the receiver: the array again, in the block's memory."""
    array = type(block)(shape, dtype, block, offset, strides)
    array.flags.writeable = writeable and block.flags.writeable
    return array
