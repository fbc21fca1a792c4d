"""`Member`: the notebook's view of one rank while its process is alive."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final

from labkit.ipc.channel import Channel
from labkit.ipc.protocol import Displayed, Warned
from labkit.launch.rank_process import RankProcess
from labkit.recording.ring_buffer import RingReader

READ_BYTES: Final = 1 << 16
PIPE_BYTES: Final = 1 << 20  # capacity of a rank's pipe, and so the most that is unread when reading starts


class Member:
    """A rank while its process is alive: the process, and what the notebook knows about it.

    Attributes:
        label: its name in pictures; where ranks are on several machines, with that of its machine.
        unshown: the output that it printed while no run was in progress.
        unseen: what it displayed, and its warnings, while no run was in progress.
        known_files: the student's files whose names, and perhaps lines, the rank has.
        notebook_values: for `%%ranks`, the values of the notebook's names when they were last sent to the rank, or
            assigned there.
        gone: numbers of definitions that the notebook no longer has, and that the rank has not yet been told to forget.
        assigned: the names that the last cell assigned or deleted in the rank.
        made: by name, the cell that last assigned it in the rank.
    """

    def __init__(self, rank: int, name: str, process: RankProcess) -> None:
        self.rank, self.name, self.process = rank, name, process
        several = process.place is not None and process.place.nodes > 1
        self.label = f"{name} · {process.place.machine}" if several and process.place else name
        self.channel = Channel(process.sock)
        self.reader = RingReader(process.ring)
        self.unshown = b""
        self.unseen: list[Displayed | Warned] = []
        self.output_open = True
        self.known_files: dict[str, tuple[str, list[str]]] = {}
        self.notebook_values: dict[str, Any] = {}
        self.gone: list[int] = []
        self.assigned: list[str] = []
        self.made: dict[str, str] = {}

    def printed(self) -> Iterator[bytes]:
        """Yield its unread output in pieces, without what it prints meanwhile, which may be endless."""
        count = 0
        while self.output_open and count < PIPE_BYTES:
            try:
                data = os.read(self.process.output, READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                self.output_open = False
                return
            yield data
            count += len(data)
            if len(data) < READ_BYTES:
                return

    def keep_output(self) -> None:
        """Read its unread output and keep it for the next run to show."""
        self.unshown += b"".join(self.printed())
