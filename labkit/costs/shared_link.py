"""The emulated links of a group, shared by its ranks: what goes over them and until when, so that all agree on each end.

It lies in memory that all ranks share, and the clock is one for all. Whoever issues an operation enters when; the last of its
ranks books it: it begins once all have come and their links are free, takes the model's time, and keeps the links meanwhile. What
the backend really does has no say in it.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import zlib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final, NamedTuple

from labkit.recording.fork_isolation import keep_from_forks

__all__ = ["SHARED_LINK_BYTES", "Cost", "SharedLink"]

FREE: Final = struct.Struct("<q")  # when a direction of a link is free, ns
# Key, ranks that came, (unused), last of them, cost and occupied in ns, due (0: not booked).
ENTRY: Final = struct.Struct("<QiIqqqq")
ENTRIES: Final = 1 << 14  # more than are ever under way: an entry is kept until another operation takes its place
MAX_RANKS: Final = 1024
ENTRIES_AT: Final = 2 * MAX_RANKS * FREE.size
SHARED_LINK_BYTES: Final = ENTRIES_AT + ENTRIES * ENTRY.size  # untouched pages cost nothing


class Cost(NamedTuple):
    """What an operation asks of the links.

    Args:
        cost_ns: from its begin to its end.
        busy_ns: how long the links of its ranks carry nothing else from its begin on.
        senders, receivers: the ranks whose links are taken, by direction.
        of: how many ranks must have come.
    """

    cost_ns: int
    busy_ns: int
    senders: Sequence[int]
    receivers: Sequence[int]
    of: int


class SharedLink:
    """One rank's view of the book. Any thread may use it.

    Args:
        fd: the shared memory, `SHARED_LINK_BYTES` of zeros at first; kept. No other descriptor of it may be closed in this
            process: that would give up the lock.
    """

    def __init__(self, fd: int) -> None:
        import fcntl  # not every system has it, and who only asks how large the book is does not need it

        self._fd = fd
        self._take, self._give = partial(fcntl.lockf, fd, fcntl.LOCK_EX), partial(fcntl.lockf, fd, fcntl.LOCK_UN)
        self._book = mmap.mmap(fd, SHARED_LINK_BYTES)
        self._mine = threading.Lock()  # the lock of the file is one for all threads of a process

    def keep_from_forks(self) -> None:
        """What this process forks enters nothing. The book stays open from now on."""
        keep_from_forks(self._book)

    def come(self, group: str, match: int, at_ns: int, cost: Cost) -> None:
        """A rank has issued an operation; the last one books it.

        Args:
            group: what its ranks call the group or pair, as in `recording.events.Span`.
            match: its number there.
            at_ns: when it was issued.
            cost: what it asks for; where ranks disagree, as in an uneven all-to-all, the most.
        """
        key, at = _place(group, match)
        with self:
            known, came, _, last_ns, cost_ns, busy_ns, due_ns = ENTRY.unpack_from(self._book, at)
            if known != key or came >= cost.of:  # another operation's place; or the same name once more
                came = last_ns = cost_ns = busy_ns = due_ns = 0
            came, last_ns = came + 1, max(last_ns, at_ns)
            cost_ns, busy_ns = max(cost_ns, cost.cost_ns), max(busy_ns, cost.busy_ns)
            if came == cost.of:
                start_ns = max(last_ns, self._free_ns(cost.senders, 0), self._free_ns(cost.receivers, 1))
                due_ns = start_ns + cost_ns
                self._keep(cost.senders, 0, start_ns + busy_ns)
                self._keep(cost.receivers, 1, start_ns + busy_ns)
            ENTRY.pack_into(self._book, at, key, came, 0, last_ns, cost_ns, busy_ns, due_ns)

    def leave(self, group: str, match: int) -> None:
        """A rank was refused what it had issued: it never came."""
        key, at = _place(group, match)
        with self:
            known, came, _, last_ns, cost_ns, busy_ns, _ = ENTRY.unpack_from(self._book, at)
            if known == key:
                ENTRY.pack_into(self._book, at, key, came - 1, 0, last_ns, cost_ns, busy_ns, 0)

    def due_ns(self, group: str, match: int) -> int:
        """When an operation ends; 0 where it is not known.

        A rank that is done although another has not come yet, such as the root of a broadcast, did not need that one: for it the
        operation begins with the last of those that have come.
        """
        key, at = _place(group, match)
        with self:
            known, _, _, last_ns, cost_ns, _, due_ns = ENTRY.unpack_from(self._book, at)
        return 0 if known != key else due_ns or last_ns + cost_ns

    def __enter__(self) -> None:
        self._mine.acquire()
        self._take()  # which the system gives back when a rank is killed

    def __exit__(self, *_: object) -> None:
        self._give()
        self._mine.release()

    def close(self) -> None:
        """Let go of the memory."""
        self._book.close()
        os.close(self._fd)

    def _free_ns(self, ranks: Iterable[int], direction: int) -> int:
        free = (FREE.unpack_from(self._book, (2 * rank + direction) * FREE.size)[0] for rank in ranks)
        return max(free, default=0)

    def _keep(self, ranks: Iterable[int], direction: int, until_ns: int) -> None:
        for rank in ranks:
            FREE.pack_into(self._book, (2 * rank + direction) * FREE.size, until_ns)


def _place(group: str, match: int) -> tuple[int, int]:
    """What an operation is called in the book, and where it stands: those of one group side by side."""
    crc = zlib.crc32(group.encode())
    return (crc << 32 | match & 0xFFFFFFFF) or 1, ENTRIES_AT + (crc + match) % ENTRIES * ENTRY.size
