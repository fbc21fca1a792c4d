"""Runs a Python process within limits of time, memory, processes and output, and leaves nothing of it behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Final

import psutil

from labkit.launch.descendants import adopt_orphans, end_all

CHECK_EVERY_S: Final = 0.2
MOST_OUTPUT: Final = 20_000  # characters of what it prints that are kept
MOST_RESULT: Final = 1 << 26  # bytes of its result


@dataclass(frozen=True)
class Limits:
    """What a process and those that it starts may use together.

    Args:
        time_s: seconds.
        memory_mb: resident memory in megabytes; pages that processes share count several times.
        processes: how many there may be at a time.
    """

    time_s: float
    memory_mb: float = 4000
    processes: int = 64


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Args:
        result: what it wrote into its result.
        output: the beginning of what it printed.
        why: which limit ended it, or its exit code if that is not 0; "" if it ended by itself.
    """

    result: str
    output: str
    why: str


def run_bounded(command: Sequence[str], text: str, limits: Limits, folder: str, environment: Mapping[str, str]) -> Ended:
    """Run `python -m MODULE ARGUMENT ... FD` in a session of its own, and wait for it.

    Args:
        command: the module, and arguments.
        text: its standard input.
        limits: what it may use.
        folder: its working folder.
        environment: its environment variables.
    """
    adopt_orphans()  # what it leaves behind becomes a child of this process, and is found
    read_end, write_end = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-m", *command, str(write_end)], cwd=folder, env=dict(environment), pass_fds=[write_end],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    ) as process:  # fmt: skip
        os.close(write_end)
        assert process.stdin is not None
        assert process.stdout is not None
        readers = [_Reader(os.fdopen(read_end, "rb", buffering=0), MOST_RESULT), _Reader(process.stdout, MOST_OUTPUT)]
        known: dict[int, psutil.Process] = {}
        try:
            feeding = threading.Thread(target=_feed, args=(process.stdin, text), daemon=True)
            feeding.start()
            why = _supervised(process, limits, known)
        finally:
            _end(process, known)
        result, output = (reader.kept() for reader in readers)  # before `Popen` closes the streams
    return Ended(result, output, why)


class _Reader:
    """Reads a stream to its end on a thread of its own, and keeps the beginning."""

    def __init__(self, stream: IO[bytes], most: int) -> None:
        self._stream, self._most = stream, most
        self._kept = bytearray()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while data := os.read(self._stream.fileno(), 1 << 16):
            self._kept += data[: self._most - len(self._kept)]

    def kept(self) -> str:
        """Return the beginning of what was read."""
        self._thread.join(timeout=5)  # all writers have ended, but for one in the middle of a system call
        with contextlib.suppress(OSError):
            self._stream.close()
        return bytes(self._kept).decode(errors="replace")


def _feed(stream: IO[bytes], text: str) -> None:
    with contextlib.suppress(OSError):  # it has ended without reading
        stream.write(text.encode())
        stream.close()


def _supervised(process: subprocess.Popen[bytes], limits: Limits, known: dict[int, psutil.Process]) -> str:
    """Wait for the end of a process, and note its descendants. Return why it has to be ended, or its exit code."""
    until = time.monotonic() + limits.time_s
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(CHECK_EVERY_S)
            return f"it ended with exit code {code}" if code else ""
        family = _family(process.pid)
        known.update({one.pid: one for one in family})
        if time.monotonic() > until:
            return f"it was not finished after {limits.time_s:.0f} s"
        if len(family) > limits.processes:
            return f"it started more than {limits.processes} processes"
        if (used := sum(map(_memory_mb, family))) > limits.memory_mb:
            return f"it used {used:.0f} MB of memory; allowed are {limits.memory_mb:.0f}"


def _family(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    return []


def _memory_mb(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        info: Any = process.memory_info()
        return float(info.rss - getattr(info, "shared", 0)) / 1e6
    return 0.0


def _end(process: subprocess.Popen[bytes], known: dict[int, psutil.Process]) -> None:
    """End the process and all that it has started, also what has left its session."""
    known.update({one.pid: one for one in _family(process.pid)})
    process.kill()
    process.wait()
    end_all([one for one in known.values() if one.pid != process.pid])
