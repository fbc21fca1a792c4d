"""Numbers the functions and classes that a notebook has sent, so that a result can refer to them.

A name would not be enough: the notebook may have redefined it since, while objects of the old class still exist. Both
sides hold weak references. When the notebook's definition is gone, the ranks are notified and send theirs by value.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from labkit.errors.exceptions import LabError


class Sent:
    """The functions and classes that the notebook has sent to the ranks of one group."""

    def __init__(self) -> None:
        self._next = itertools.count(1)
        self._numbers: dict[int, int] = {}  # by identity
        self._references: dict[int, weakref.ref[Any]] = {}  # by number
        self._gone: deque[int] = deque()  # numbers; the garbage collector appends to it at any time, on any thread

    def number_of(self, definition: Any) -> int:
        """Return the number of a definition; assign a new one if it has none yet."""
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

    def look_up(self, number: int, name: str) -> Any:
        """Return the definition with this number.

        Raises:
            LabError: it was deleted while a result that refers to it was on its way.
        """
        reference = self._references.get(number)
        definition = None if reference is None else reference()
        if definition is None:
            raise LabError(f"the result refers to {name}, which is no longer defined; run the cell that defines it again")
        return definition

    def take_gone(self) -> list[int]:
        """Return the numbers of the definitions that were deleted since the last call."""
        gone = []
        while self._gone:  # other threads only append
            gone.append(self._gone.popleft())
        return gone


class Received:
    """The definitions that a rank has received from the notebook."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}  # by identity

    def add(self, definitions: Mapping[int, Any]) -> None:
        """Add definitions by number. A function is sent with every run; all its copies have the same number."""
        for number, definition in definitions.items():
            identity = id(definition)

            def forget(reference: weakref.ref[Any], identity: int = identity) -> None:
                if self._known.get(identity, (None,))[0] is reference:
                    del self._known[identity]

            self._known[identity] = weakref.ref(definition, forget), number

    def number_of(self, definition: Any) -> int | None:
        """Return the number of a definition; None if the notebook has not sent it or has deleted its own."""
        known = self._known.get(id(definition))
        return None if known is None else known[1]

    def forget(self, numbers: Iterable[int]) -> None:
        """Remove definitions that the notebook has deleted."""
        gone = set(numbers)
        self._known = {identity: known for identity, known in self._known.items() if known[1] not in gone}
