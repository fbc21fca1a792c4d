"""The faults of `make chaos`: what each rank does in a round in which one rank, or all, fail."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import psutil

from labkit.launch.machines.facts import SILENT_S

RUNTIMES: Final = {"torch": 3, "rpc": 3, "tensorflow": 2, "bare": 3}  # number of ranks
LIMIT_S: Final = 60.0  # a rank that waits longer than this for its fault has missed it
FROZEN_S: Final = SILENT_S + 4  # for which a machine is frozen: longer than labkit waits for it
FLOOD_LINES: Final = 200_000
SIGNALS: Final = ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS", "SIGTERM", "SIGFPE", "SIGILL", "SIGHUP")


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault.

    Attributes:
        expect: the expected report: "rank" (a `RankError` that names the victim), "pair" (a sentence that names the
            victim and the one that it waits for, or differs from), "words" (a `LabError` that says which object),
            "stop" (the prompt is back), "line" (the same, and the victim's line says what is wrong), "gone" (the
            notebook's process is killed), "machine" (a `RankError` that names a rank of the victim's machine, and says
            that this is lost), "nothing" (nothing is wrong, and nothing is reported).
    """

    name: str  # as the table shows it
    expect: str
    runtimes: tuple[str, ...] = tuple(RUNTIMES)  # those that it is tried with
    weight: float = 1.0  # how often it is drawn
    machines: bool = False  # whether it needs ranks on two machines


TORCH: Final = ("torch",)
MORTAL: Final = ("torch", "rpc", "bare")  # TensorFlow's strategies take SIGTERM as notice of a preemption, and continue
HEALTHY: Final = (  # programs of torch_programs.py
    "asynchronous", "groups", "messages", "large messages", "threads", "library threads", "time limit", "DDP", "FSDP2", "DTensor",
)  # fmt: skip
FAULTS: Final = {
    fault.name: fault
    for fault in (
        Fault("raise", "rank", weight=2),
        Fault("sys.exit", "rank"),
        Fault("os._exit", "rank"),
        *(Fault(name, "rank", MORTAL if name == "SIGTERM" else tuple(RUNTIMES), 0.7) for name in SIGNALS),
        Fault("freeze", "line", MORTAL),
        Fault("early return", "rank", ("torch", "tensorflow"), 2),
        *(Fault(f"another {part}", "pair", TORCH) for part in ("order", "shape", "dtype", "root")),
        Fault("two send", "pair", TORCH),
        Fault("two receive", "pair", TORCH),
        Fault("calls without a thread left", "pair", ("rpc",)),
        Fault("unpicklable result", "rank"),
        Fault("unpicklable argument", "words"),
        Fault("flood", "rank", ("torch", "rpc", "bare")),
        Fault("interrupt", "stop", weight=2),
        Fault("interrupt at the start", "stop", weight=1.5),
        Fault("two interrupts", "stop", weight=1.5),
        Fault("kernel killed", "gone", weight=2),
        Fault("healthy: a slow rank", "nothing", weight=1.5),
        *(Fault(f"healthy: {name}", "nothing", TORCH, 0.7) for name in HEALTHY),
        Fault("agent killed", "machine", weight=2, machines=True),
        Fault("machine frozen", "machine", weight=2, machines=True),
        Fault("cable out", "machine", weight=2, machines=True),
        Fault("healthy: cable out for 2 s", "nothing", MORTAL, 2, machines=True),
    )
}


@dataclass(frozen=True, slots=True)
class Round:
    """One round, drawn only from a seed and its number."""

    seed: int
    number: int
    fault: str  # a key of `FAULTS`
    runtime: str  # of the group, as `start`
    start: str
    size: int  # how many ranks
    victim: int  # the rank that goes wrong
    delay_s: float  # of the fault, from the beginning
    machines: int = 0  # how many the ranks are on; 0: they are on the notebook's own

    @classmethod
    def of(cls, seed: int, number: int, machines: int = 0) -> Round:
        """The round of that number."""
        random = Random(f"{seed} {number}")
        names = [name for name, fault in FAULTS.items() if machines or not fault.machines]
        fault = random.choices(names, [FAULTS[name].weight for name in names])[0]
        possible = FAULTS[fault].runtimes
        # A TensorFlow rank, and a spawned one, take seconds to start: they are drawn less often.
        runtime = random.choices(possible, [0.2 if name == "tensorflow" else 1.0 for name in possible])[0]
        spawned = {"bare": 0.3, "torch": 0.06, "rpc": 0.04, "tensorflow": 0.0}[runtime]
        start = "spawn" if random.random() < spawned and not machines else "fork"
        size = RUNTIMES[runtime]
        # Long enough for TensorFlow's ranks to start and work.
        delay_s = random.uniform(0, 2.5 if runtime == "tensorflow" else 0.4)
        return cls(seed, number, fault, runtime, start, size, random.randrange(size), delay_s, machines)

    def facing(self) -> tuple[int, int]:
        """The victim and its counterpart."""
        return (0, 1) if self.runtime == "rpc" else (self.victim, (self.victim + 1) % self.size)

    def beside(self) -> range:
        """The ranks of the victim's machine; the first of two machines has one more if their number is odd."""
        first = -(-self.size // 2)
        return range(first) if self.victim < first else range(first, self.size)

    def name_of(self, rank: int) -> str:
        """What the group calls a rank."""
        return f"worker{rank}" if self.runtime == "rpc" else f"rank {rank}"


def work(turn: Round, folder: str) -> Any:
    """What every rank calls in a round: the victim fails, the others keep working with it."""
    mine, moment = int(os.environ["RANK"]) == turn.victim, Path(folder, os.environ["RANK"])
    step = _step_of(turn)
    if turn.fault == "healthy: cable out for 2 s":
        if mine:
            threading.Timer(turn.delay_s, _pull_for_2_s).start()
        for _ in range(40):
            step()
            time.sleep(0.1)
        return 1.0
    if turn.fault == "healthy: a slow rank":
        step()
        time.sleep(1.3 if mine else 0)
        step()
        return 1.0
    if turn.fault.startswith("healthy: "):
        from bench.chaos.torch_programs import HEALTHY

        return HEALTHY[turn.fault.removeprefix("healthy: ")](turn.size, turn.victim)
    expect = FAULTS[turn.fault].expect
    if expect == "pair":
        from bench.chaos.torch_programs import fault_between

        step()
        moment.write_text(str(time.perf_counter_ns()))
        return fault_between(turn.fault, turn.victim, turn.facing())
    if not mine or expect in ("stop", "gone"):
        return _work_on(step, lambda: False)
    if turn.fault in ("os._exit", "freeze", *SIGNALS, *_MACHINES):  # at any moment, also in the middle of C++
        threading.Timer(turn.delay_s, _inject, (turn.fault, moment)).start()
        return _work_on(step, lambda: False)
    until = time.monotonic() + turn.delay_s
    _work_on(step, lambda: time.monotonic() > until)
    moment.write_text(str(time.perf_counter_ns()))
    return _go_wrong(turn)


def _step_of(turn: Round) -> Callable[[], object]:
    """A step of work in the round's runtime; a missing or stuck rank delays the others."""
    if turn.runtime == "tensorflow":
        return _tensorflow_step()
    if turn.runtime == "bare":
        return lambda: sum(i * i for i in range(20_000))
    from bench.chaos import torch_programs

    return lambda: (torch_programs.step if turn.runtime == "torch" else torch_programs.rpc_step)(turn.size)


def _work_on(step: Callable[[], object], enough: Callable[[], bool]) -> None:
    until = time.monotonic() + LIMIT_S
    while not enough() and time.monotonic() < until:
        step()


def _inject(fault: str, moment: Path) -> None:
    moment.write_text(str(time.perf_counter_ns()))
    if fault == "os._exit":
        os._exit(7)
    if fault in _MACHINES:
        _MACHINES[fault]()
        return
    os.kill(os.getpid(), signal.SIGSTOP if fault == "freeze" else signal.Signals[fault])


def _go_wrong(turn: Round) -> Any:
    if turn.fault == "raise":
        raise ValueError(f"round {turn.number}")
    if turn.fault == "sys.exit":
        raise SystemExit(3)
    if turn.fault == "unpicklable result":
        return [(letter for letter in "")]  # a generator holds a frame
    if turn.fault == "flood":
        for number in range(FLOOD_LINES):
            print(f"line {number} of a rank that prints and prints and prints")
        raise ValueError(f"round {turn.number}")
    assert turn.fault == "early return", turn.fault
    return None


def _tensorflow_step() -> Callable[[], object]:
    made: list[Callable[[], Any]] = []  # the strategy, with the first step

    def step() -> object:
        import tensorflow as tf

        if not made:
            strategy = tf.distribute.MultiWorkerMirroredStrategy()

            @tf.function  # type: ignore[untyped-decorator]
            def total() -> Any:
                return strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(1.0)))

            made.append(total)
        return float(made[0]())

    return step


# Faults of a machine. A rank's parent is the fork server, and its parent the agent; the parent of that is the stand-in
# for ssh: as long as that is stopped, nothing passes.


def _agent() -> psutil.Process:
    return psutil.Process(os.getppid()).parent() or psutil.Process()


def _cable() -> psutil.Process:
    return _agent().parent() or psutil.Process()


def _pull_for_2_s() -> None:
    cable = _cable()
    cable.suspend()
    time.sleep(2)
    cable.resume()


def _freeze_for_a_while() -> None:
    agent = _agent()
    agent.suspend()
    time.sleep(FROZEN_S)
    agent.resume()


_MACHINES: Final[dict[str, Callable[[], None]]] = {
    "agent killed": lambda: _agent().kill(),
    "machine frozen": _freeze_for_a_while,
    "cable out": lambda: _cable().suspend(),
}
