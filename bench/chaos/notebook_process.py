"""The notebook's process of `make chaos`, which is interrupted and killed: it plays one round after the other.

It reads rounds, a line each, and answers each with three lines: the state before the fault, the report, and the
state after the next run.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import numpy as np
import psutil

import labkit as lab
from bench.chaos.faults import FAULTS, Round, work
from labkit.group.open_groups import notebook
from labkit.launch.machines.relay_starter import RelayStarter

SPARE_FILES: Final = 5  # descriptors that a spare rank holds: they come and go in the background


class Stop:
    """What SIGINT does: `KeyboardInterrupt` while a fault is under way; before and after it nobody presses Stop."""

    armed = False  # whether one is under way

    def __call__(self, _: int, __: FrameType | None) -> None:
        """A handler for `signal.signal`."""
        if self.armed:
            raise KeyboardInterrupt


def main(commands: int, answers: int) -> None:
    """Play rounds until there are no more, from one descriptor, with answers to another."""
    stop = Stop()
    signal.signal(signal.SIGINT, stop)
    groups: dict[tuple[str, str], lab.Group] = {}
    with os.fdopen(commands) as lines, os.fdopen(answers, "w", buffering=1) as out:

        def say(**answer: Any) -> None:
            out.write(json.dumps(answer) + "\n")

        for line in lines:
            folder, fields = json.loads(line)
            _play(Round(**fields), folder, groups, stop, say)
    for group in groups.values():
        group.close()


def _play(turn: Round, folder: str, groups: dict[tuple[str, str], lab.Group], stop: Stop, say: Callable[..., None]) -> None:
    key = turn.runtime, turn.start
    if key not in groups:
        on = lab.SSH("pc1", "pc2", python=os.environ["CHAOS_PYTHON"]) if turn.machines else None
        groups[key] = lab.Group(turn.size, runtime=turn.runtime, start=turn.start, on=on)
    group = groups[key]
    group.run(os.getpid)
    say(**_inventory())
    if turn.fault == "interrupt at the start":
        group._end()  # as an earlier failure would have done; the group's next run starts ranks
    error, results, at_ns = _reported(group, turn, folder, stop, say)
    text = "" if error is None else str(error)
    rank = getattr(error, "rank", None)
    sentence = getattr(error, "headline", "") or getattr(error, "hint", "")
    say(kind=type(error).__name__, text=text, sentence=sentence, rank=rank, results=results, at_ns=at_ns)
    del error
    try:
        recovered = ""
        if sorted(group.run(_rank).results) != list(range(turn.size)):
            recovered = "another answer"
        if turn.runtime == "torch" and group.run(_sum).results != [float(turn.size)] * turn.size:
            recovered = "another sum"
    except BaseException as again:  # noqa: BLE001  # whatever it is, the judge is to hear of it
        recovered = f"{type(again).__name__}: {again}"
    say(problem=recovered, **_inventory())


def _reported(
    group: lab.Group, turn: Round, folder: str, stop: Stop, say: Callable[..., None]
) -> tuple[BaseException | None, Any, int]:
    """What the student sees, and when."""
    error: BaseException | None = None
    results = None
    try:
        try:
            stop.armed = FAULTS[turn.fault].expect in ("stop", "line")
            say(start_ns=time.perf_counter_ns())  # from now on Stop may be pressed
            if turn.fault == "unpicklable argument":
                results = group.run(work, turn, folder, odd=(letter for letter in "")).results
            elif turn.fault == "interrupt" and turn.number % 2:
                much = np.ones(1 << 20)
                while True:  # so that Stop can come while arguments and results are sent
                    group.run(_back, much)
            else:
                results = group.run(work, turn, folder).results
        except BaseException as reported:  # noqa: BLE001  # that is what the judge is to see
            error = reported
        stop.armed = False
    except KeyboardInterrupt as second:  # pressed again after the prompt was back
        stop.armed = False
        error = error or second
    return error, results, time.perf_counter_ns()


def _back(value: Any) -> Any:
    return value


def _rank() -> int:
    return int(os.environ["RANK"])


def _sum() -> float:
    import torch
    import torch.distributed as dist

    one = torch.ones(1)
    dist.all_reduce(one)
    return float(one)


def _command(process: psutil.Process | None) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline()) if process is not None else ""
    return ""


def _inventory() -> dict[str, Any]:
    """The processes that may exist, and the open files of this process."""
    gc.collect()
    starters = list(notebook.starters.values())
    spares = [spare.pid for starter in starters for spare in getattr(starter, "_spares", [])]
    pools = [getattr(group, "_pool", None) for group in notebook.groups]
    ranks = [m.process.pid for pool in pools if pool is not None for m in pool.members]
    files = []
    for number in os.listdir("/proc/self/fd"):
        try:
            files.append(os.readlink(f"/proc/self/fd/{number}").partition(":")[0])
        except FileNotFoundError:  # the listing's own descriptor
            continue
    relays = [psutil.Process(starter._process.pid) for starter in starters if isinstance(starter, RelayStarter)]
    # What connects agents, these, and their fork servers; their ranks are in `ranks`.
    agents = [
        p.pid
        for relay in relays
        for p in relay.children(recursive=True)
        if any("labkit.launch.machines" in _command(q) for q in (p, p.parent()))
    ]
    kept = [os.getpid(), *(starter._process.pid for starter in starters), *spares, *ranks, *agents]
    return {"kept": kept, "files": len(files) - SPARE_FILES * len(spares)}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
