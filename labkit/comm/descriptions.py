"""A rank's arguments to a collective: their size, and as text what must agree on all ranks, to explain mismatches."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from labkit.recording.operations import Form, OperationType, Traffic

__all__ = ["first_tensor", "most_nbytes", "nbytes_of", "root_of", "signature_of", "tensor_in_words"]


def signature_of(kind: OperationType, form: Form, arguments: tuple[Any, ...], root: int = -1) -> str:
    """For example "float32 [4, 3], product, root 1"; "" for an operation that asks for nothing of the kind.

    Args:
        kind: of the operation.
        form: in which it is called.
        arguments: what it is called with.
        root: its global rank, as the student knows it; -1 where there is none.
    """
    place = form.alike
    if place is None or len(arguments) <= place:
        return _between_pairs(arguments) if kind.traffic is Traffic.PAIRWISE else ""
    options, given = arguments[-1], arguments[place]
    tensor = first_tensor((given,))
    if tensor is None:
        return ""
    operation = getattr(getattr(options, "reduceOp", None), "op", None) if kind.reduces else None
    if form.parts is not None and (parts := arguments[form.parts]) and _uneven(parts[0]):
        return _in_words(tensor.dtype, tuple(t.numel() for t in parts[0]), operation, root, "parts of ")
    words = _in_words(tensor.dtype, tensor.shape, operation, root)
    if isinstance(given, list) and len(given) > 1:
        words = " and ".join([words, *(_in_words(t.dtype, t.shape, None, -1) for t in given[1:])])
    return words


def _uneven(parts: Any) -> bool:
    """Whether a list has tensors of different sizes."""
    return isinstance(parts, list) and len({t.numel() for t in parts if isinstance(t, torch.Tensor)}) > 1


def _between_pairs(arguments: tuple[Any, ...]) -> str:
    """The elements that a rank exchanges with each other rank in an all-to-all: "float32 2,6 sent, 4,4 received"."""
    if len(arguments) < 2:
        return ""
    output, given = arguments[:2]
    tensor = first_tensor((given,))
    if tensor is None:
        return ""
    if isinstance(given, list):
        sizes = [t.numel() for t in given], [t.numel() for t in output]
    else:
        of_output, of_input = arguments[2:4] if len(arguments) > 3 else ([], [])
        if not of_output and not of_input:
            return _in_words(tensor.dtype, tensor.shape, None, -1)
        sizes = _elements(given, of_input, len(of_output)), _elements(output, of_output, len(of_input))
    sent, received = (",".join(map(str, numbers)) for numbers in sizes)
    return f"{str(tensor.dtype).removeprefix('torch.')} {sent} sent, {received} received"


def _elements(tensor: torch.Tensor, splits: Sequence[int], count: int) -> list[int]:
    """How many elements each part of a tensor has, cut along its first dimension; without sizes, into equal ones."""
    if not splits:
        return [tensor.numel() // count] * count
    in_a_row = tensor.numel() // tensor.shape[0] if tensor.dim() and tensor.shape[0] else 0
    return [rows * in_a_row for rows in splits]


def tensor_in_words(value: Any) -> str:
    """Type and shape of a tensor, or of the first in a list: "float32 [4, 3]"."""
    tensor = first_tensor((value,))
    return "" if tensor is None else _in_words(tensor.dtype, tensor.shape, None, -1)


def root_of(arguments: tuple[Any, ...]) -> int:
    """The root of a collective as a rank within its group, in whichever of torch's two forms it is called."""
    for argument in reversed(arguments):
        root = getattr(argument, "rootRank", argument)  # of its options, or by itself
        if isinstance(root, int):
            return root
    return 0  # torch's default


def most_nbytes(arguments: tuple[Any, ...]) -> int:
    """The bytes of what goes in or of what comes out, whichever is more."""
    nbytes = 0
    for argument in arguments[:2]:
        nbytes = max(nbytes, nbytes_of(argument))
    return nbytes


def nbytes_of(value: Any) -> int:
    """The bytes of a tensor, or of all in a list."""
    if isinstance(value, list):
        return sum(map(nbytes_of, value))
    if isinstance(value, torch.Tensor):
        return value.nbytes if not value.is_sparse else value._values().nbytes + value._indices().nbytes
    return 0


def first_tensor(values: Iterable[Any]) -> torch.Tensor | None:
    """The first tensor among values, and in lists of lists of them; None where there is none."""
    for value in values:
        found = value if isinstance(value, torch.Tensor) else first_tensor(value) if isinstance(value, (list, tuple)) else None
        if found is not None:
            return found
    return None


@functools.lru_cache(maxsize=1024)
def _in_words(dtype: torch.dtype, shape: Sequence[int], operation: Any, root: int, before: str = "") -> str:
    sizes = f"{before}{', '.join(map(str, shape))}" if before else str(list(shape))
    parts = [f"{str(dtype).removeprefix('torch.')} {sizes}"]
    if operation not in (None, c10d.ReduceOp.SUM):
        parts.append(getattr(operation, "name", str(operation)).lower())
    if root >= 0:
        parts.append(f"root {root}")
    return ", ".join(parts)
