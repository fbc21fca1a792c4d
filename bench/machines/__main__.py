"""`python -m bench.machines`: starts, runs, arguments, results and faults of four ranks on two machines."""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

import labkit as lab
from bench.machines.places import PLACES, Place, place
from bench.page import about, duration, say, table

RANKS: Final = 4
NBYTES: Final = 64 << 20
ROWS: Final = (
    "the first group", "a new group", "a run of an empty function", "64 MiB to each rank", "64 MiB from each rank", "Stop",
    "a rank is killed", "a machine is lost", "clock error, at most",
)  # fmt: skip


def _nothing(_: Any = None) -> None:
    """In a rank: an empty function."""


def _back(nbytes: int) -> Any:
    return np.ones(nbytes, np.uint8)


def _die(folder: str) -> None:
    if os.environ["RANK"] == str(RANKS - 1):
        time.sleep(0.3)
        Path(folder, "died").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def _median(times: int, action: Callable[[], object]) -> float:
    took = []
    for _ in range(times):
        begin = time.perf_counter()
        action()
        took.append(time.perf_counter() - begin)
    return statistics.median(took)


def _after(moment: Callable[[], object], action: Callable[[], object]) -> float:
    """How long an action goes on after something that happens in its midst."""
    at: list[float] = []

    def act() -> None:
        at.append(time.perf_counter())
        moment()

    threading.Timer(0.5, act).start()
    try:
        action()
    except (lab.RunError, KeyboardInterrupt):
        pass
    return time.perf_counter() - at[0]


def measured(at: Place, folder: str) -> dict[str, float]:
    """Measure groups there, in seconds."""

    def made() -> lab.Group:
        group = lab.Group(RANKS, on=at.on)
        group.run(_nothing)
        return group

    begin = time.perf_counter()
    group = made()
    found = {"the first group": time.perf_counter() - begin}
    group.close()
    found["a new group"] = _median(7, lambda: made().close())
    group = made()
    array = np.ones(NBYTES, np.uint8)
    found["a run of an empty function"] = _median(200, lambda: group.run(_nothing))
    found["64 MiB to each rank"] = _median(5, lambda: group.run(_nothing, array))
    found["64 MiB from each rank"] = _median(5, lambda: group.run(_back, NBYTES))
    main_thread = threading.main_thread().ident or 0
    found["Stop"] = _after(lambda: signal.pthread_kill(main_thread, signal.SIGINT), lambda: group.run(time.sleep, 60))
    group.run(_nothing)
    try:
        group.run(_die, folder)
    except lab.RankError:
        found["a rank is killed"] = time.time() - float(Path(folder, "died").read_text())
    found["clock error, at most"] = group.run(_nothing).trace.clock_error_ns / 1e9
    if at.lose is not None:
        found["a machine is lost"] = _after(at.lose, lambda: group.run(time.sleep, 60))
    group.close()
    return found


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser("python -m bench.machines", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PLACES), default=list(PLACES), help="only these engines")
    arguments = parser.parse_args()
    print("\n".join(about()), "\n")
    columns = {}
    for name in arguments.only:
        try:
            with place(name) as at, tempfile.TemporaryDirectory() as folder:
                columns[name] = measured(at, folder)
        except RuntimeError as error:
            say(f"{name}: {error}")
    rows = [[row, *(duration(column.get(row)) for column in columns.values())] for row in ROWS]
    print(table(["", *columns], rows))


if __name__ == "__main__":
    main()
