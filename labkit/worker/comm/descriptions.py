"""Describes a rank's arguments to a collective: their size, and the part that must agree on all ranks, as text."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from labkit.costs.kernels import tensors_in
from labkit.recording.group_keys import of_exchange, of_parts, of_tensor
from labkit.recording.operations import Form, OperationType, Traffic
from labkit.recording.torch_internals import SPARSE


def signature_of(kind: OperationType, form: Form, arguments: tuple[Any, ...], root: int = -1) -> str:
    """Describe the arguments that must agree on all ranks, as in "float32 [4, 3], product, root 1"; "" if nothing must.

    `root` is the global rank of the root; -1 for none.
    """
    place = form.alike
    if place is None or len(arguments) <= place:
        return _between_pairs(arguments) if kind.traffic is Traffic.PAIRWISE else ""
    options, given = arguments[-1], arguments[place]
    tensor = first_tensor(given)
    if tensor is None:
        return ""
    operation = getattr(getattr(options, "reduceOp", None), "op", None) if kind.reduces else None
    if form.parts is not None and (parts := arguments[form.parts]) and _uneven(parts[0]):
        return of_parts(_name(tensor.dtype), [t.numel() for t in parts[0]], _reduction(operation), root)
    words = _in_words(tensor.dtype, tensor.shape, operation, root)
    if isinstance(given, list) and len(given) > 1:
        words = " and ".join([words, *(_in_words(t.dtype, t.shape, None, -1) for t in given[1:])])
    return words


def _uneven(parts: Any) -> bool:
    return isinstance(parts, list) and len({t.numel() for t in parts if isinstance(t, torch.Tensor)}) > 1


def _between_pairs(arguments: tuple[Any, ...]) -> str:
    """Describe the elements that a rank exchanges with each other one: "float32 2,6 sent, 4,4 received"."""
    if len(arguments) < 2:
        return ""
    output, given = arguments[:2]
    tensor = first_tensor(given)
    if tensor is None:
        return ""
    if isinstance(given, list):
        sizes = [t.numel() for t in given], [t.numel() for t in output]
    else:
        of_output, of_input = arguments[2:4] if len(arguments) > 3 else ([], [])
        if not of_output and not of_input:
            return _in_words(tensor.dtype, tensor.shape, None, -1)
        sizes = _elements(given, of_input, len(of_output)), _elements(output, of_output, len(of_input))
    return of_exchange(_name(tensor.dtype), *sizes, 1 if isinstance(given, list) else _row(tensor))


def _row(tensor: torch.Tensor) -> int:
    """Return the number of elements for each index of the first dimension."""
    return tensor.numel() // tensor.shape[0] if tensor.dim() and tensor.shape[0] else 0


def _elements(tensor: torch.Tensor, splits: Sequence[int], count: int) -> list[int]:
    """Return the elements of each part of a tensor that is split along its first dimension.

    These are `count` equal parts if the rows of each are not given.
    """
    if not splits:
        return [tensor.numel() // count] * count
    return [rows * _row(tensor) for rows in splits]


def tensor_in_words(value: Any) -> str:
    """Describe a tensor, or the first in a list, by dtype and shape: "float32 [4, 3]"."""
    tensor = first_tensor(value)
    return "" if tensor is None else _in_words(tensor.dtype, tensor.shape, None, -1)


def root_of(arguments: tuple[Any, ...]) -> int:
    """Return the root of a collective as a rank within its group; torch passes it in one of two ways."""
    for argument in reversed(arguments):
        root = getattr(argument, "rootRank", argument)  # in the options, or as an argument of its own
        if isinstance(root, int):
            return root
    return 0  # torch's default


def most_nbytes(arguments: tuple[Any, ...]) -> int:
    """Return the bytes of the inputs or of the outputs, whichever is larger."""
    return max(map(nbytes_of, arguments[:2]), default=0)


def nbytes_of(value: Any) -> int:
    """Return the bytes of the tensors in a value."""
    nbytes = 0
    for tensor in tensors_in(value):
        if not tensor.is_sparse:
            nbytes += tensor.nbytes
        elif SPARSE.found:
            nbytes += sum(SPARSE[part](tensor).nbytes for part in ("_values", "_indices"))
    return nbytes


def first_tensor(value: Any) -> torch.Tensor | None:
    """Return the first tensor in a value; None if there is none."""
    return next(tensors_in(value), None)


@functools.lru_cache(maxsize=1024)
def _in_words(dtype: torch.dtype, shape: Sequence[int], operation: Any, root: int) -> str:
    return of_tensor(_name(dtype), shape, _reduction(operation), root)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _reduction(operation: Any) -> str:
    """The name of a reduction; "" for the sum, which is torch's default, and for none."""
    return "" if operation in (None, c10d.ReduceOp.SUM) else getattr(operation, "name", str(operation)).lower()
