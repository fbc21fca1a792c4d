"""The rows of `bench.machines` by torchrunx: a program that prints what it measured. Each run has new processes.

Arguments: a folder, this machine's address as the others see it, ssh's configuration, and the others' addresses.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torchrunx

NBYTES = 64 << 20


def nothing(_: Any = None) -> None:
    """On a worker: an empty function."""


def back(nbytes: int) -> Any:
    """On a worker: return an array."""
    return np.ones(nbytes, np.uint8)


def die(folder: str) -> None:
    """On a worker: the last one is killed."""
    import os
    import signal

    if os.environ["RANK"] == "3":
        time.sleep(0.3)
        Path(folder, "died").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def main(folder: str, here: str, ssh_config: str, *hosts: str) -> None:
    """Measure, and print."""
    socket.getfqdn = lambda *_: here  # where agents connect back
    launcher = torchrunx.Launcher(hostnames=list(hosts), workers_per_host=2, backend="gloo", ssh_config_file=ssh_config)
    launcher.set_logging_handlers(None)

    def seconds(*call: Any) -> float:
        begin = time.perf_counter()
        launcher.run(*call)
        return time.perf_counter() - begin

    found = {"the first group": seconds(nothing)}
    found["a new group"] = found["a run of an empty function"] = statistics.median(seconds(nothing) for _ in range(3))
    found["64 MiB to each rank"] = seconds(nothing, np.ones(NBYTES, np.uint8))
    found["64 MiB from each rank"] = seconds(back, NBYTES)
    try:
        launcher.run(die, folder)
    except Exception:  # noqa: BLE001  # whatever it raises, it has noticed
        found["a rank is killed"] = time.time() - float(Path(folder, "died").read_text())
    print("found", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
