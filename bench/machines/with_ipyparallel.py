"""The rows of `bench.machines` by ipyparallel: a program that prints what it measured.

Arguments: a folder, this machine's address as the others see it; others are ignored.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ipyparallel as ipp
import numpy as np

RANKS = 4
NBYTES = 64 << 20
LIMIT_S = 60


def nothing(_: Any = None) -> None:
    """On an engine: an empty function."""


def back(nbytes: int) -> Any:
    """On an engine: return an array."""
    import numpy

    return numpy.ones(nbytes, numpy.uint8)


def die(folder: str) -> None:
    """On an engine: it is killed."""
    import os
    import signal
    import time

    time.sleep(0.3)
    with open(f"{folder}/died", "w") as file:
        file.write(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def seconds(action: Callable[[], object]) -> float:
    """How long an action takes."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def median(times: int, action: Callable[[], object]) -> float:
    """The same, median of several."""
    return statistics.median(seconds(action) for _ in range(times))


def main(folder: str, here: str, *_: str) -> None:
    """Measure, and print."""
    profile = Path(folder, "ipyparallel")
    python = [sys.executable, "-m"]
    begin = time.perf_counter()
    controller = subprocess.Popen([*python, "ipyparallel.controller", f"--ip={here}", f"--profile-dir={profile}"])
    connection = profile / "security" / "ipcontroller-{}.json"
    while not Path(str(connection).format("engine")).exists():
        time.sleep(0.05)

    def engines() -> list[subprocess.Popen[bytes]]:
        engine = f"{sys.executable} -m ipyparallel.engine --file={str(connection).format('engine')}"
        return [
            subprocess.Popen(["ssh", "-T", f"pc{1 + i * 2 // RANKS}", engine], stdin=subprocess.DEVNULL) for i in range(RANKS)
        ]

    started = engines()
    client = ipp.Client(str(connection).format("client"))
    client.wait_for_engines(RANKS, timeout=LIMIT_S)
    view = client[:]
    with view.sync_imports(quiet=True):
        import torch.distributed  # noqa: F401
    found = {"the first group": time.perf_counter() - begin}

    def again() -> float:
        client.shutdown(block=True)
        for engine in started:
            engine.wait(LIMIT_S)
        while client.ids:
            time.sleep(0.05)
        begin = time.perf_counter()
        started[:] = engines()
        client.wait_for_engines(RANKS, timeout=LIMIT_S)
        with client[:].sync_imports(quiet=True):
            import torch.distributed  # noqa: F401
        return time.perf_counter() - begin

    found["a new group"] = statistics.median(again() for _ in range(3))
    view = client[:]
    array = np.ones(NBYTES, np.uint8)
    found["a run of an empty function"] = median(50, lambda: view.apply_sync(nothing))
    found["64 MiB to each rank"] = median(3, lambda: view.apply_sync(nothing, array))
    found["64 MiB from each rank"] = median(3, lambda: view.apply_sync(back, NBYTES))
    victim = client[client.ids[-1]]
    try:
        victim.apply_async(die, folder).get(timeout=LIMIT_S)
    except ipp.error.RemoteError:  # of the controller, which misses the heartbeats
        found["a rank is killed"] = time.time() - float(Path(folder, "died").read_text())
    except TimeoutError:
        pass
    print("found", json.dumps(found), flush=True)
    for process in (*started, controller):
        process.terminate()
    os._exit(0)


main(*sys.argv[1:])
