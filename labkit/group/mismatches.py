"""Finds completed operations to which ranks gave mismatched arguments.

A backend moves bytes. It reports no error when a message is shorter than its receive, when one rank reduces float32 and
another int32, or when one rank sums and another takes the maximum: the results are silently wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from labkit.errors.exceptions import MismatchError
from labkit.errors.lists import counted
from labkit.group.deadlock_words import mismatch_in_words, place
from labkit.recording.group_keys import Exchange, GroupKind, exchange_of, kind_of, ranks_of, with_elements, without_ones
from labkit.recording.operations import RECV, SEND, Traffic, type_of
from labkit.recording.schema import COMMUNICATION, OPEN, Pending

_ANY_OTHER: Final = -1  # stands for all groups whose operations are not compared

# Operations of these groups have no counterpart on another rank whose arguments must agree.
UNCOMPARED: Final = (GroupKind.ALONE, GroupKind.CALL, GroupKind.TENSORFLOW)


class ProgramLine(NamedTuple):
    """The place of an operation's record: a rank, one of its chunks, and a row of that chunk."""

    rank: int
    chunk: int
    row: int


def first_unequal(
    chunks: Sequence[Sequence[Any]], names: Callable[[int], Sequence[str]]
) -> tuple[list[ProgramLine], list[ProgramLine]]:
    """Find the first operations to which ranks gave mismatched arguments.

    `chunks` has by rank its records, in chunks: arrays of `recording.ring_buffer.record_dtype()`; `names` returns its
    interned strings. Return the records of the first operation whose result is wrong, and of the first that reduced
    tensors of different shapes with the same number of elements, which may be intended; [] for none.
    """
    texts: dict[str, int] = {}
    # A column for each record. Its rows: 0-2 rank, chunk and row; 3-4 group and match; 5 name; 6 dtype and number of
    # elements; 7 when it was issued; 8 shape.
    parts = []
    for rank, of_rank in enumerate(chunks):
        own = names(rank) if of_rank else []
        for number, chunk in enumerate(of_rank):
            complete = (chunk["kind"] == COMMUNICATION) & (chunk["flags"] & OPEN == 0)
            at = np.flatnonzero(complete & (chunk["signature"] != 0) & (chunk["match"] != 0))
            if not len(at):
                continue
            rows = chunk[at]
            group = _numbers(rows["group"], own, texts, _compared)
            name, signature = _numbers(rows["name"], own, texts, _alike), _numbers(rows["signature"], own, texts, with_elements)
            shape = _numbers(rows["signature"], own, texts, without_ones)
            place = np.full_like(at, rank), np.full_like(at, number), at
            match, start_ns = rows["match"].astype(at.dtype), rows["start_ns"].astype(at.dtype)
            parts.append(np.stack([*place, group, match, name, signature, start_ns, shape]))
    if not parts:
        return [], []
    every = np.concatenate(parts, axis=1)
    every = every[:, every[3] != _ANY_OTHER]
    every = every[:, np.lexsort((every[0], every[4], every[3]))]
    left, right = every[:, :-1], every[:, 1:]
    together = (left[3:5] == right[3:5]).all(axis=0)
    differ = together & (left[5:7] != right[5:7]).any(axis=0)
    words = list(texts)
    pairwise = [number for text, number in texts.items() if type_of(text).traffic is Traffic.PAIRWISE]
    if pairwise:
        differ &= ~(np.isin(left[5], pairwise) & (left[5] == right[5]))
    found = _earliest(every, differ)
    if pairwise:
        found += _misfit(every, np.isin(every[5], pairwise), words)
    reductions = [number for text, number in texts.items() if type_of(text).reduces]
    transposed = together & np.isin(left[5], reductions) & (left[8] != right[8])
    return _places(found), _places(_earliest(every, transposed))


def _earliest(every: Any, differ: Any) -> list[Any]:
    """Return the earliest operation with neighbouring columns that `differ`, in a list; [] if there is none."""
    suspects = np.flatnonzero(differ)
    return [] if not len(suspects) else [_operation(every, suspects[every[7, suspects].argmin()])]


def _places(found: Sequence[Any]) -> list[ProgramLine]:
    first = min(found, key=lambda columns: columns[7].min(), default=None)
    return [] if first is None else [ProgramLine(*column) for column in first[:3].T.tolist()]


def _numbers(column: Any, names: Sequence[str], texts: dict[str, int], make: Callable[[str], str | None]) -> Any:
    """Return a column in which equal texts have equal numbers.

    `make` turns an interned string into the text to compare, or None, which becomes `_ANY_OTHER`. `texts` has the
    number of each text so far; new texts are added.
    """
    found, inverse = np.unique(column, return_inverse=True)
    made = [make(names[number]) for number in found.tolist()]
    return np.array([_ANY_OTHER if text is None else texts.setdefault(text, len(texts)) for text in made], np.int64)[inverse]


def _compared(group: str) -> str | None:
    return group if kind_of(group) not in UNCOMPARED else None


def _alike(name: str) -> str:
    """Return a name that is the same on all ranks of an operation: send and receive become "message"."""
    return "message" if type_of(name) in (SEND, RECV) else name


def _operation(every: Any, at: int) -> Any:
    return every[:, (every[3] == every[3, at]) & (every[4] == every[4, at])]


def _misfit(every: Any, which: Any, words: Sequence[str]) -> list[Any]:
    """Return the first all-to-all in which a rank sends something different from what the receiver expects.

    `every` has all operations, sorted by group, match and rank; `which` says which of them belong to an all-to-all.
    """
    mine = every[:, which]
    edges = np.flatnonzero((mine[3:5, 1:] != mine[3:5, :-1]).any(axis=0)) + 1
    known: dict[tuple[int, ...], bool] = {}
    for columns in np.split(mine, edges, axis=1):
        key = tuple(columns[6].tolist())
        if key not in known:
            known[key] = _fits([words[number] for number in key])
        if not known[key]:
            return [columns]
    return []


def _fits(signatures: Sequence[str]) -> bool:
    """Whether each rank of an all-to-all sends what the others expect; signatures in the order of the group's ranks."""
    sides = [exchange_of(signature, len(signatures)) for signature in signatures]
    if None in sides or len({side.dtype for side in sides if side}) != 1:
        return None in sides  # a mismatch cannot be proved if a signature is unknown
    return not _unlike(sides)


def _unlike(sides: Sequence[Exchange | None]) -> list[int]:
    """Two ranks of an all-to-all, how much the first sends to the second, and what this expects; [] if all fit.

    If a rank sends more than is expected, which gloo does not survive, it is one of these.
    """
    pairs = [(i, j, a, b) for (i, a), (j, b) in itertools.permutations(enumerate(sides), 2) if a and b]
    known = [(i, j, a.sent[j], b.received[i]) for i, j, a, b in pairs if len(a.sent) == len(b.received) == len(sides)]
    return list(max((pair for pair in known if pair[2] != pair[3]), key=lambda pair: pair[2] > pair[3], default=()))


def unlike_exchange(operations: Sequence[tuple[int, Pending]], size: int) -> list[tuple[int, Pending]]:
    """The sides of the first all-to-all in which a rank sends something else than another expects; [] for none."""
    exchanges: dict[tuple[str, int], dict[int, Pending]] = {}
    for rank, operation in sorted(operations, key=lambda one: one[0]):
        if operation.type.traffic is Traffic.PAIRWISE:
            exchanges.setdefault((operation.group, operation.match), {})[rank] = operation
    for (group, _), sides in exchanges.items():
        complete = len(sides) == len(ranks_of(group) or range(size))
        if complete and not _fits([with_elements(side.signature) for side in sides.values()]):
            return list(sides.items())
    return []


def mismatch_hint(sides: Sequence[tuple[str, Pending]]) -> tuple[str, str]:
    """Return a sentence on how the ranks' arguments to an operation differ, and a hint at the usual mistake.

    `sides` has the name of each of its ranks, and that rank's side of the operation.
    """
    sentence, hint = mismatch_in_words(sides)
    if sentence or not sides:
        return sentence, hint
    operation = sides[0][1]
    group = "" if operation.group == "world" else f" of {operation.group}"
    exchanges = [exchange_of(with_elements(side.signature), len(sides)) for _, side in sides]
    how = "a rank sends something else than another expects"
    if unlike := _unlike(exchanges):
        sender, receiver, sent, expected = unlike
        rows = {side.row for side in exchanges if side}
        row, unit = (rows.pop(), "row") if len(rows) == 1 and rows != {1} else (1, "element")
        how = f"{sides[sender][0]} sends {counted(sent // row, unit)} to {sides[receiver][0]}, which expects {expected // row}"
    headline = f"collective number {operation.match}{group} is {operation.name}{place(operation)}: {how}"
    return headline, "What rank i sends to rank j must be what rank j receives from rank i, in number and type."


def shapes_note(sides: Sequence[tuple[str, Pending]]) -> str:
    """Return the note about a reduction of tensors of different shapes; `sides` as for `mismatch_hint`."""
    (first, mine), (other, theirs) = next((a, b) for a, b in itertools.pairwise(sides) if a[1].signature != b[1].signature)
    return (
        f"{mine.name}{place(mine)} combined {mine.signature} of {first} with {theirs.signature} of {other}, in the order in "
        "which their elements lie in memory. Give tensors of one shape."
    )


def mismatch_error(sides: Sequence[tuple[str, Pending]], parting: str = "") -> MismatchError:
    """Return the error for an operation with mismatched arguments; `sides` as for `mismatch_hint`."""
    lines = [f"{name}: {p.name} of {p.signature}{place(p)}" for name, p in sides]
    headline, hint = mismatch_hint(sides)
    return MismatchError(headline, f"{parting} {hint}".lstrip(), lines)
