"""`Member`: one rank while its process lives, as the notebook's side knows it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final

from labkit.ipc.messages import Channel
from labkit.recording.ring_buffer import RingReader
from labkit.worker.launch import RankProcess

__all__ = ["Member"]

READ_BYTES: Final = 1 << 16
PIPE_BYTES: Final = 1 << 20  # the most that a rank's pipe holds, and so the most that it has printed when we begin to look


class Member:
    """A rank while its process lives: the process and what this side knows of it.

    Attributes:
        unshown: what it has printed while no run was under way.
        unseen: what it has shown, and warned of, meanwhile: each with its kind.
        known_files: the student's files that it has the names, and perhaps the lines, of.
        notebook_values: for `%%ranks`, what the notebook's names meant when they last travelled, or were assigned
            there.
        gone: numbers of definitions that the notebook does not have any more, which the rank has not been told.
        assigned: the names that the last cell has assigned or deleted there.
        made: by name, the cell that assigned it last there.
    """

    def __init__(self, rank: int, name: str, process: RankProcess) -> None:
        self.rank, self.name, self.process = rank, name, process
        self.channel = Channel(process.sock)
        self.reader = RingReader(process.ring)
        self.unshown = b""
        self.unseen: list[tuple[str, Any]] = []
        self.output_open = True
        self.known_files: dict[str, tuple[str, list[str]]] = {}
        self.notebook_values: dict[str, Any] = {}
        self.gone: list[int] = []
        self.assigned: list[str] = []
        self.made: dict[str, str] = {}

    def printed(self) -> Iterator[bytes]:
        """Its unread prints, in pieces; not what it prints meanwhile, which may be endless."""
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
        """Read what it has printed, and leave it for the next run to show."""
        self.unshown += b"".join(self.printed())
