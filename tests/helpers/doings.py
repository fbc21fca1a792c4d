"""Failed runs, and the lines of a report that say what ranks were doing, as `deadlock_words.doing` words them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import labkit as lab
from labkit.group.deadlock_words import doing
from labkit.recording.schema import Pending


def failure(group: Any, function: Callable[..., Any], *args: Any) -> lab.RankError:
    """The error of a run that fails."""
    with pytest.raises(lab.RankError) as caught:
        group.run(function, *args)
    return caught.value


def computing(name: str) -> str:
    """The line about a rank that is in no operation."""
    return doing(name, [], 0)


def returned(name: str) -> str:
    """The line about a rank whose function has returned."""
    return doing(name, [], 0, returned=True)


def waiting(
    name: str, operation: str, line: str, names: Sequence[str] = (), peer: int = -1, signature: str | None = None
) -> re.Pattern[str]:
    """A pattern for the line about a rank that waits for any time.

    Args:
        name: the rank's name.
        operation: the operation's name.
        line: the student's line that issued it.
        names: the names of all ranks, if the operation has a peer.
        peer: the peer's number.
        signature: its signature, if the line has the operation's number and signature.
    """
    pending = Pending(operation, 1, 1, 0, peer, "world", 1, line, signature or "", 0)
    return re.compile(
        re.escape(doing(name, [pending], 1, names=names, closely=signature is not None)).replace(r"0\.0", r"\d+\.\d")
    )
