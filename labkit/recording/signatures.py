"""Signatures: what must match among the ranks of an operation. Only this module builds and parses them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
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
    """One rank's side of an all-to-all; None if the signature does not say it.

    Args:
        signature: one of `of_exchange`, or one of `of_tensor` that `with_elements` returned: a tensor in equal parts.
        size: the number of ranks in the group.
    """
    if parts := _EXCHANGE.fullmatch(signature):
        sent, received = ([int(n) for n in parts[side].split(",") if n] for side in ("sent", "received"))
        return Exchange(parts["dtype"], sent, received, int(parts["row"] or 1))
    if even := _EVEN.fullmatch(signature):
        each = [math.ceil(int(even["elements"]) / size)] * size
        return Exchange(even["dtype"], each, each)
    return None
