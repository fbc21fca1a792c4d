"""The functions and classes that a notebook has sent: each has a number, by which a result refers to it.

A name would not do: the notebook may have given it to something else since, and an object that was made from the former class
still belongs to that one. Both sides hold the definitions weakly. Where the notebook's own is gone, the ranks are told, and send
theirs by value.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from labkit.errors.exceptions import LabError

__all__ = ["Received", "Sent"]


class Sent:
    """What the notebook has sent to the ranks of one group."""

    def __init__(self) -> None:
        self._next = itertools.count(1)
        self._numbers: dict[int, int] = {}  # by identity
        self._references: dict[int, weakref.ref[Any]] = {}  # by number
        self._gone: deque[int] = deque()  # filled by the garbage collector, at any moment and on any thread

    def number_of(self, definition: Any) -> int:
        """Its number; a new one where it has none yet."""
        number = self._numbers.get(id(definition))
        if number is None:
            number, identity = next(self._next), id(definition)

            def forget(_: object) -> None:
                self._numbers.pop(identity, None)
                self._references.pop(number, None)
                self._gone.append(number)

            self._references[number] = weakref.ref(definition, forget)
            self._numbers[identity] = number
        return number

    def named(self, number: int, name: str) -> Any:
        """What has this number.

        Raises:
            LabError: it is gone, and went while a result that refers to it was under way.
        """
        reference = self._references.get(number)
        definition = None if reference is None else reference()
        if definition is None:
            raise LabError(f"{name}, which the ranks know, is no longer defined here; run the cell that defines it again")
        return definition

    def take_gone(self) -> list[int]:
        """The numbers of what is gone since this was asked before."""
        gone = []
        while self._gone:  # other threads only add to it
            gone.append(self._gone.popleft())
        return gone


class Received:
    """What a rank has of the notebook's definitions."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}  # by identity

    def learn(self, definitions: Mapping[int, Any]) -> None:
        """These have come, by number. A function comes anew with each run, and all its forms have the same number."""
        for number, definition in definitions.items():
            identity = id(definition)

            def forget(reference: weakref.ref[Any], identity: int = identity) -> None:
                if self._known.get(identity, (None,))[0] is reference:
                    del self._known[identity]

            self._known[identity] = weakref.ref(definition, forget), number

    def number_of(self, definition: Any) -> int | None:
        """What the notebook knows it by; None where it does not."""
        known = self._known.get(id(definition))
        return None if known is None else known[1]

    def forget(self, numbers: Iterable[int]) -> None:
        """The notebook does not have these any more."""
        gone = set(numbers)
        self._known = {identity: known for identity, known in self._known.items() if known[1] not in gone}
