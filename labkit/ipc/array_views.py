"""Keeps numpy arrays that share memory sharing it after they are sent; pickle alone would copy each of them.

The first pickling collects the arrays. If views of one array share memory with one another or with that array, the
value is pickled a second time: the shared block of memory is then sent once, with the position of each view in it.
"""

from __future__ import annotations

import sys
from typing import Any, Final

__all__ = ["SharedArrays"]

MAX_WORK: Final = 10_000  # `max_work` of numpy.shares_memory; two views that need more are taken to overlap


class SharedArrays:
    """Collects the arrays of one pickling, by the array that owns their memory.

    Args:
        blocks: the result of `found` after the first pickling; None in the first.
    """

    def __init__(self, blocks: dict[int, tuple[Any, Any]] | None = None) -> None:
        self._numpy = sys.modules.get("numpy")
        self._array_type = getattr(self._numpy, "ndarray", None)
        self._blocks = blocks or {}
        self._of_owner: dict[int, list[Any]] = {}

    def reduce(self, obj: Any) -> Any:
        """Return how to reduce an array that shares memory with another; None for any other object."""
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
        """Return the arrays that share memory with another array of this pickling.

        Returns:
            by the array's `id`, the array and the block of memory that holds it. The array is kept alive, so that no
            new object gets its `id`: some objects create arrays only while they are pickled.
        """
        blocks: dict[int, tuple[Any, Any]] = {}
        for arrays in self._of_owner.values():
            distinct = list({id(array): array for array in arrays}.values())
            owner = _owner(distinct[0])
            if len(distinct) < 2 or not (owner.flags.c_contiguous or owner.flags.f_contiguous):
                continue
            assert self._numpy is not None
            whole = owner.ravel(order="K").view(self._numpy.uint8)
            for low, high, views in self._overlapping(distinct, owner):
                block = whole[low - _address(whole) : high - _address(whole)]
                blocks |= {id(view): (view, block) for view in views}
        return blocks

    def _overlapping(self, arrays: list[Any], owner: Any) -> list[tuple[int, int, list[Any]]]:
        """Group the arrays that share memory: first and last address of each group, and its arrays."""
        numpy = self._numpy
        assert numpy is not None
        bounds = sorted(((*numpy.lib.array_utils.byte_bounds(a), a) for a in arrays), key=lambda b: b[:2])
        if any(a is owner for a in arrays):
            return [(bounds[0][0], max(high for _, high, _ in bounds), arrays)]
        groups: list[tuple[int, int, list[Any]]] = []
        for low, high, array in bounds:
            touched = [group for group in groups if low < group[1] and any(self._share(array, other) for other in group[2])]
            groups = [group for group in groups if not any(group is t for t in touched)]
            first, last = min([low, *(t[0] for t in touched)]), max([high, *(t[1] for t in touched)])
            groups.append((first, last, [array, *(a for t in touched for a in t[2])]))
        return [group for group in groups if len(group[2]) > 1]

    def _share(self, one: Any, other: Any) -> bool:
        assert self._numpy is not None
        try:
            return bool(self._numpy.shares_memory(one, other, max_work=MAX_WORK))
        except self._numpy.exceptions.TooHardError:
            return True


def _owner(array: Any) -> Any:
    """Return the array that owns the memory, as far as numpy knows."""
    while type(array.base) is type(array):
        array = array.base
    return array


def _address(array: Any) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _array_at(block: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any, writeable: bool) -> Any:
    """Rebuild an array in the receiver, in the block's memory."""
    array = type(block)(shape, dtype, block, offset, strides)
    array.flags.writeable = writeable and block.flags.writeable
    return array
