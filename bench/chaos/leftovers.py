"""Leftovers: processes (found by an inherited variable), shared memory, temporary files."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

import psutil

MARK: Final = "LABKIT_CHAOS"  # inherited by every process that a round starts, also by one that has lost its parent
LOOK_EVERY_S: Final = 0.02
SHARED: Final = Path("/dev/shm")


class Traces:
    """Finds what the rounds of one session have left: processes with that `MARK`, temporary files in that folder."""

    def __init__(self, mark: str, folder: Path) -> None:
        self._mark, self._folder = mark, folder
        self._foreign: set[psutil.Process] = set()
        self._seen: set[int] = set()

    def processes(self) -> set[int]:
        """The process ids of this session."""
        found = set()
        for process in psutil.process_iter():
            if process in self._foreign or process.pid == os.getpid():
                continue
            try:
                if process.status() != psutil.STATUS_ZOMBIE:
                    ours = process.environ().get(MARK) == self._mark
                else:  # a zombie has no environment, so its session is unknown
                    ours = process.pid in self._seen and process.ppid() != 1
            except psutil.NoSuchProcess:
                continue
            except psutil.AccessDenied:
                ours = False
            if ours:
                found.add(process.pid)
            else:
                self._foreign.add(process)
        self._seen |= found
        return found

    def files(self) -> set[str]:
        """Temporary files, and named shared memory of labkit, torch or multiprocessing."""
        found = {str(path.relative_to(self._folder)) for path in self._folder.rglob("*")}
        numbers = {str(pid) for pid in self._seen}
        for name in os.listdir(SHARED) if SHARED.is_dir() else []:
            if name.startswith("labkit") or numbers & set(name.split("_")):
                found.add(f"{SHARED}/{name}")
        return found

    def left(self, kept: Collection[int], before: Collection[str], limit_s: float) -> tuple[list[str], float]:
        """Wait for all but some processes and files to disappear; the leftovers, and how long it took."""
        start = time.monotonic()
        while True:
            processes, files = self.processes() - set(kept), self.files() - set(before)
            took_s = time.monotonic() - start
            if not (processes or files) or took_s > limit_s:
                return [*(_describe(pid) for pid in sorted(processes)), *sorted(files)], took_s
            time.sleep(LOOK_EVERY_S)


def _describe(pid: int) -> str:
    try:
        return f"process {pid}: {' '.join(psutil.Process(pid).cmdline())[:100]}"
    except psutil.Error:
        return f"process {pid}"
