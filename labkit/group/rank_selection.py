"""`Ranks`: selected ranks of a group, as returned by `group[0]` and `group[1:3]`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from labkit.errors.exceptions import LabError
from labkit.errors.wrong_calls import public_api
from labkit.group.run import Run


class GroupOfRanks(Protocol):
    """The group that ranks belong to."""

    names: tuple[str, ...]

    def _run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], on: Sequence[int], *, watch: bool
    ) -> Run: ...


class Ranks:
    """Selected ranks: `group[0]`, `group["master"]`, `group[1:3]`. The others keep serving while these run."""

    def __init__(self, group: GroupOfRanks, on: Sequence[int]) -> None:
        self.group, self.on = group, tuple(on)

    def __len__(self) -> int:
        return len(self.on)

    def __iter__(self) -> Iterator[Ranks]:
        """A selection of each rank alone, in rank order."""
        return (Ranks(self.group, [rank]) for rank in self.on)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranks) and (self.group, self.on) == (other.group, other.on)

    def __hash__(self) -> int:
        return hash((id(self.group), self.on))

    @public_api
    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Run:
        """Call `function(*args, **kwargs)` on these ranks; see `Group.run`."""
        return self.group._run(function, args, kwargs, self.on, watch=False)

    @public_api
    def watch(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Run:
        """`run` with the live picture; see `Group.watch`."""
        return self.group._run(function, args, kwargs, self.on, watch=True)

    def __repr__(self) -> str:
        return f"<{', '.join(self.group.names[i] for i in self.on)} of {self.group!r}>"


def chosen(names: Sequence[str], which: int | str | slice | Iterable[int | str]) -> list[int]:
    """The numbers of the selected ranks in ascending order.

    Args:
        names: names of all ranks of the group.
        which: a number, a name, a slice, or several numbers and names.

    Raises:
        LabError: the group has no such rank.
        TypeError: `which` has another type.
    """
    if isinstance(which, slice):
        on = list(range(len(names))[which])
    elif isinstance(which, Iterable) and not isinstance(which, str):
        on = sorted({_number(names, w) for w in which})
    else:
        on = [_number(names, which)]
    if not on:
        raise LabError(f"group[{_shown(which)}] selects no ranks; this group has ranks 0 to {len(names) - 1}")
    return on


def _number(names: Sequence[str], which: int | str) -> int:
    if isinstance(which, str):
        if which in names:
            return names.index(which)
        raise LabError(f"no rank is named {which!r}; this group has {', '.join(map(repr, names))}")
    try:
        number = operator.index(which)
    except TypeError:
        number = None
    if number is None or isinstance(which, bool):
        raise TypeError(f"group[{which!r}]: expected a rank's number or name")
    if -len(names) <= number < len(names):
        return number % len(names)
    raise LabError(f"no rank {number}; this group has ranks 0 to {len(names) - 1}")


def _shown(which: Any) -> str:
    if isinstance(which, slice):
        return ":".join("" if part is None else str(part) for part in (which.start, which.stop, which.step)).removesuffix(":")
    return repr(which)
