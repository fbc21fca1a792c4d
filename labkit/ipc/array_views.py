"""Keeps numpy arrays and tensors that share memory sharing it after they are sent; pickle alone would copy each one.

The first pickling collects the arrays, and the storages of tensors. If some share memory with one another, the value is
pickled a second time: the shared block of memory is then sent once, with the position of each array and storage in it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Final

MAX_WORK: Final = 10_000  # `max_work` of numpy.shares_memory; two views that need more are taken to overlap


class SharedArrays:
    """Collects the arrays and the storages of one pickling.

    Args:
        blocks: the result of `found` after the first pickling; None in the first.
    """

    def __init__(self, blocks: dict[int, tuple[Any, Any]] | None = None) -> None:
        self._numpy = sys.modules.get("numpy")
        self._array_type = getattr(self._numpy, "ndarray", None)
        self._blocks = blocks or {}
        self._seen: dict[int, tuple[Any, Any]] = {}  # by `id`: an array or storage, and its memory as an array

    def reduce(self, obj: Any) -> Any:
        """Return how to reduce an array that shares memory with another object; None for any other object."""
        if type(obj) is not self._array_type:
            return None
        if (block := self._block_of(obj)) is not None:
            offset = _address(obj) - _address(block)
            return _array_at, (block, offset, obj.shape, obj.strides, obj.dtype, obj.flags.writeable)
        if obj.nbytes and not obj.dtype.hasobject:
            self._seen[id(obj)] = obj, obj
        return None

    def reduce_storage(self, storage: Any, memory: Any) -> Any:
        """Return how to reduce the storage of a tensor that shares memory with an array; None for any other.

        Args:
            storage: an `UntypedStorage` on the CPU.
            memory: an array of bytes in the same memory.
        """
        if (block := self._block_of(storage)) is not None:
            return _storage_at, (block, _address(memory) - _address(block), memory.nbytes)
        self._seen[id(storage)] = storage, memory
        return None

    def _block_of(self, obj: Any) -> Any:
        known, block = self._blocks.get(id(obj), (None, None))
        return block if known is obj else None

    def found(self) -> dict[int, tuple[Any, Any]]:
        """Return the arrays and storages that share memory with another one of this pickling.

        Returns:
            by its `id`, the array or storage, and the block of memory that holds it. It is kept alive, so that no
            new object gets its `id`: some objects create arrays only while they are pickled.
        """
        blocks: dict[int, tuple[Any, Any]] = {}
        if len(self._seen) < 2:
            return blocks
        numpy = self._numpy
        assert numpy is not None
        parts = []
        for obj, memory in self._seen.values():
            low, high = numpy.lib.array_utils.byte_bounds(memory)
            parts.append(_Sharing(low, high, [(obj, memory)]))
        groups: list[_Sharing] = []
        near: list[_Sharing] = []  # the groups that the next part may belong to
        for part in sorted(parts, key=lambda part: (part.low, -part.high)):  # the whole before its parts
            groups += [group for group in near if group.high <= part.low]
            near = [group for group in near if group.high > part.low]
            touched = [group for group in near if any(self._share(part.objects[0][1], memory) for _, memory in group.objects)]
            for group in touched[1:]:
                touched[0].add(group)
                near.remove(group)
            if touched:
                touched[0].add(part)
            else:
                near.append(part)
        for group in (*groups, *near):
            if len(group.objects) > 1:
                block = numpy.asarray(_Block(group))
                blocks |= {id(obj): (obj, block) for obj, _ in group.objects}
        return blocks

    def _share(self, one: Any, other: Any) -> bool:
        assert self._numpy is not None
        try:
            return bool(self._numpy.shares_memory(one, other, max_work=MAX_WORK))
        except self._numpy.exceptions.TooHardError:
            return True


@dataclass(slots=True, eq=False)
class _Sharing:
    """Arrays and storages that share memory: its first and last address; each object, and its memory as an array."""

    low: int
    high: int
    objects: list[tuple[Any, Any]]

    def add(self, other: _Sharing) -> None:
        """Include another group."""
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.objects += other.objects


class _Block:
    """Shows numpy the memory of a group as one array of bytes, which keeps the group's objects alive."""

    def __init__(self, group: _Sharing) -> None:
        self._group = group
        size = (group.high - group.low,)
        self.__array_interface__ = {"data": (group.low, False), "shape": size, "typestr": "|u1", "version": 3}


def _address(array: Any) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _array_at(block: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any, writeable: bool) -> Any:
    """Rebuild an array in the receiver, in the block's memory."""
    array = type(block)(shape, dtype, block, offset, strides)
    array.flags.writeable = writeable
    return array


def _storage_at(block: Any, offset: int, nbytes: int) -> Any:
    """Rebuild the storage of a tensor in the receiver, in the block's memory."""
    import torch

    return torch.from_numpy(block[offset : offset + nbytes]).untyped_storage()
