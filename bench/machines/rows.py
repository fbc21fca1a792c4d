"""Starts, runs, arguments, results and faults of four ranks on two machines, and other tools beside them."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

import labkit as lab
from bench import machine
from bench.machines.places import PLACES, Place, place
from bench.table import duration, table

__all__ = ["main"]

RANKS: Final = 4
PEERS: Final = ("ipyparallel", "torchrunx")
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


def _timed(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def _median(times: int, action: Callable[[], object]) -> float:
    return statistics.median(_timed(action) for _ in range(times))


def _after(moment: Callable[[], object], action: Callable[[], object]) -> float:
    """How long an action goes on after something that happens in its midst."""
    at: list[float] = []

    def act() -> None:
        at.append(time.perf_counter())
        moment()

    timer = threading.Timer(0.5, act)
    timer.start()
    try:
        action()
    except (lab.RunError, KeyboardInterrupt):
        pass
    return time.perf_counter() - at[0]


def labkits(at: Place, folder: str) -> dict[str, float | None]:
    """Measure groups of labkit's."""
    found: dict[str, float | None] = dict.fromkeys(ROWS)

    def made() -> lab.Group:
        group = lab.Group(RANKS, on=at.on)
        group.run(_nothing)
        return group

    begin = time.perf_counter()
    group = made()
    found["the first group"] = time.perf_counter() - begin
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


# One actor for each rank, spread over the nodes, as Ray's users write it; in a process of its own, for Ray's driver.
ACTORS: Final = """
    import json, statistics, sys, time
    import numpy as np, ray
    from ray.exceptions import RayActorError

    ray.init(address=sys.argv[1], log_to_driver=False)

    @ray.remote(num_cpus=0.25, scheduling_strategy="SPREAD")
    class Rank:
        def __init__(self):
            import torch, torch.distributed
        def nothing(self, _=None): pass
        def back(self, nbytes): return np.ones(nbytes, np.uint8)
        def pid(self):
            import os
            return os.getpid()
        def die(self, folder):
            import os, signal, time
            time.sleep(0.3); open(folder + "/died", "w").write(str(time.time())); os.kill(os.getpid(), signal.SIGKILL)

    def made():
        ranks = [Rank.remote() for _ in range(4)]
        ray.get([r.nothing.remote() for r in ranks])
        return ranks

    def median(times, action):
        took = []
        for _ in range(times):
            begin = time.perf_counter(); action(); took.append(time.perf_counter() - begin)
        return statistics.median(took)

    begin = time.perf_counter(); ranks = made()
    found = {"the first group": time.perf_counter() - begin}
    array = np.ones(64 << 20, np.uint8)
    found["a run of an empty function"] = median(50, lambda: ray.get([r.nothing.remote() for r in ranks]))

    def there():
        one = ray.put(array); ray.get([r.nothing.remote(one) for r in ranks])

    found["64 MiB to each rank"] = median(3, there)
    found["64 MiB from each rank"] = median(3, lambda: ray.get([r.back.remote(64 << 20) for r in ranks]))
    [ray.kill(r) for r in ranks]

    def again():
        ranks = made(); [ray.kill(r) for r in ranks]

    found["a new group"] = median(3, again)
    rank = made()[0]
    folder = sys.argv[2]
    try: ray.get(rank.die.remote(folder))
    except RayActorError: found["a rank is killed"] = time.time() - float(open(folder + "/died").read())
    print("found", json.dumps(found))
"""


def actors(at: Place, folder: str) -> dict[str, float | None]:
    """Measure Ray's own actors."""
    return _said([sys.executable, "-c", textwrap.dedent(ACTORS), at.address, folder])


def peer(name: str, at: Place, python: str, folder: str) -> dict[str, float | None]:
    """Measure ipyparallel or torchrunx, started over the same ssh on the same machines.

    Raises:
        RuntimeError: its program failed.
    """
    here, config = at.machines.here, at.machines.bin.parent / "ssh_config"
    arguments = [folder, here, str(config), *at.machines.addresses.values()]
    cable = next(name for name, own in psutil.net_if_addrs().items() if any(a.address == here for a in own))
    program = Path(__file__).with_name(f"with_{name}.py")
    return _said([python, str(program), *arguments], os.environ | {"GLOO_SOCKET_IFNAME": cable})  # of torchrunx's launcher


def _said(command: Sequence[str], environment: Mapping[str, str] = os.environ) -> dict[str, float | None]:
    """Return what a program has measured."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:  # processes that outlive it hold no pipe
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, timeout=300, check=False)
        for file in (out, err):
            file.seek(0)
        lines = [line.removeprefix("found ") for line in out if line.startswith("found ")]
        if not lines:
            raise RuntimeError(err.read().strip().splitlines()[-1])
    found: dict[str, float | None] = json.loads(lines[0])
    return dict.fromkeys(ROWS) | found


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser("python -m bench.machines", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PLACES), default=list(PLACES), help="only these engines")
    parser.add_argument("--peers", metavar="PYTHON", help="the interpreter that has torch, ipyparallel and torchrunx")
    arguments = parser.parse_args()
    print("\n".join(f"- {line}" for line in [*machine.describe(), f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"]), "\n")
    columns: dict[str, dict[str, float | None]] = {}
    for name in arguments.only:
        try:
            with place(name) as at, tempfile.TemporaryDirectory() as folder:
                if at.address:
                    columns["Ray's own actors"] = actors(at, folder)
                for other in PEERS if at.machines is not None and arguments.peers else ():
                    columns[other] = peer(other, at, arguments.peers, folder)
                columns[name] = labkits(at, folder)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"{name}: {error}", file=sys.stderr)
    rows = [[row, *(duration(column[row]) for column in columns.values())] for row in ROWS]
    print(table(["", *columns], rows))
