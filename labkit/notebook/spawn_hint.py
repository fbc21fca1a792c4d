"""Hints for cells that were written for a launcher: at `group.spawn`, and at `%%ranks`.

A cell that fails gets its hint at its end. One that has forked processes which all wait for ever gets it meanwhile.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType
from typing import Any, Final

SPAWN: Final = (
    "labkit: the processes of mp.spawn have no function that is defined in a notebook. On the ranks of a group: "
    "group.spawn(f, args=(...)) calls f(rank, ...), too."
)
FORK: Final = (
    "labkit: processes that are forked have none of the notebook's threads, and wait for ever where torch needs one. On the "
    "ranks of a group: group.spawn(f, args=(...)) calls f(rank, ...), too."
)
NO_RANK: Final = (
    "labkit: the notebook's own process is no rank. Run the cell on the ranks of a group = lab.Group(2), by `%%ranks group` as "
    "its first line."
)
# What torch says where init_process_group finds no launcher's environment variables.
NOT_SET: Final = ("environment variable RANK expected", "environment variable WORLD_SIZE expected")
LAUNCHER: Final = "torch.multiprocessing.spawn"
LOOK_EVERY_S: Final = 10.0
IDLE_S: Final = 1.0  # for how long processes that hang use no processor


class SpawnHints:
    """Prints hints below a cell that calls for one."""

    def __init__(self) -> None:
        self._ended = threading.Event()  # of the current cell

    def before(self, _: Any) -> None:
        """Begin to look, now and then, at the processes that a cell forks; IPython calls this before each cell."""
        self._ended.set()
        self._ended = threading.Event()
        threading.Thread(target=_look, args=(self._ended,), daemon=True).start()

    def after(self, result: Any) -> None:
        """Print a hint if the cell's error calls for one; IPython calls this after each cell.

        `mp.spawn` fails since its processes exit if they cannot find their function. An exception that the function
        raises in such a process is another error.
        """
        self._ended.set()
        spawn, error = sys.modules.get(LAUNCHER), result.error_in_exec
        if spawn is not None and isinstance(error, spawn.ProcessExitedException) and error.exit_code == 1:
            print(SPAWN, file=sys.stderr)
        elif isinstance(error, ValueError) and any(words in str(error) for words in NOT_SET):
            print(NO_RANK, file=sys.stderr)
        elif isinstance(error, KeyboardInterrupt) and _forked(frame for frame, _ in traceback.walk_tb(error.__traceback__)):
            print(FORK, file=sys.stderr)


def _look(ended: threading.Event) -> None:
    """Print the hint once all processes that the main thread has forked sleep, and compute nothing."""
    main = threading.main_thread().ident or 0
    while not ended.wait(LOOK_EVERY_S):
        forked = _forked(frame for frame, _ in traceback.walk_stack(sys._current_frames().get(main)))
        before = _states(forked)
        asleep = bool(before) and all(status == "sleeping" for status, _ in before.values())
        if asleep and not ended.wait(IDLE_S) and _states(forked) == before:
            print(FORK, file=sys.stderr)
            return


def _forked(frames: Iterable[FrameType]) -> list[int]:
    """The processes that torch's launcher, which is among some frames, has forked and waits for."""
    for frame in frames:
        if frame.f_globals.get("__name__") == LAUNCHER and frame.f_locals.get("start_method") == "fork":
            return [process.pid for process in frame.f_locals["processes"] if process is not None]
    return []


def _states(pids: Iterable[int]) -> dict[int, tuple[str, float]]:
    """The state of each process that has not ended, and how long it has used a processor, in seconds."""
    import psutil  # not when labkit is imported

    found = {}
    for pid in pids:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            times = process.cpu_times()
            found[pid] = process.status(), times.user + times.system
    return {pid: state for pid, state in found.items() if state[0] != psutil.STATUS_ZOMBIE}
