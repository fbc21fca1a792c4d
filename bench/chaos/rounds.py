"""Random faults at random moments, and whether a group survives them: `python -m bench.chaos --rounds 300 --seed 7`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from bench.chaos.faults import FAULTS, FROZEN_S, RUNTIMES, Round
from bench.chaos.judge import Outcome, closing_line, named, rows
from bench.chaos.leftovers import MARK, Traces
from bench.page import about, say

ROOT: Final = Path(__file__).resolve().parents[2]
GONE_LIMIT_S: Final = 2.0  # the promise, for a killed kernel as for failed ranks
ANSWER_LIMIT_S: Final = 100.0  # for the notebook's process; TensorFlow from a cold disk takes half of that
SAID_S: Final = 0.7  # a rank that is frozen for this long is reported


class Arena:
    """A notebook's process, restarted when it has been killed, and its judge, with a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._temporary, self._moments = folder / "temporary", folder / "moments"
        for made in (self._temporary, self._moments):
            made.mkdir(parents=True)
        self._mark = str(folder)
        self.traces = Traces(self._mark, self._temporary)
        self._process: subprocess.Popen[bytes] | None = None
        self._answers = b""

    def play(self, turn: Round) -> Outcome:
        """One round."""
        for file in self._moments.iterdir():
            file.unlink()
        if self._process is None:
            self._start()
        self._send(turn)
        before = self._answer()
        files = self.traces.files()
        self.traces.processes()  # so that it is known which ones were ours
        start_ns = self._answer()["start_ns"]
        if FAULTS[turn.fault].expect == "gone":
            time.sleep(turn.delay_s)
            return self._kill(turn, files)
        pressed_ns = self._press(turn)
        reported = self._answer()
        after = self._answer()
        # What is left on a frozen machine ends when it continues.
        limit_s = GONE_LIMIT_S + FROZEN_S * (turn.fault == "machine frozen")
        left, _ = self.traces.left(after["kept"], files, limit_s)
        if after["files"] > before["files"]:
            left.append(f"{after['files'] - before['files']} open files")
        moment_ns = pressed_ns or self._moment(turn) or (start_ns if turn.fault == "unpicklable argument" else None)
        report_s = None if moment_ns is None else (reported["at_ns"] - moment_ns) / 1e9
        words = f"{reported['kind']} {reported['text']}"
        return Outcome(turn, after["problem"], named(turn, reported), report_s, left, words)

    def close(self) -> None:
        """End the notebook's process."""
        if self._process is not None:
            os.close(self._commands)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            os.close(self._from)
            self._process = None

    def _start(self) -> None:
        reads, self._commands = os.pipe()
        self._from, writes = os.pipe()
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        variables = {MARK: self._mark, "TMPDIR": str(self._temporary), "PYTHONPATH": path} | self._machines(path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.chaos.notebook_process", str(reads), str(writes)], env=os.environ | variables,
            pass_fds=(reads, writes), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        os.close(reads)
        os.close(writes)
        self._answers = b""

    def _machines(self, path: str) -> dict[str, str]:
        """Variables for a stand-in for ssh, whose machines are this one, and for their Python."""
        folder = Path(self._mark) / "bin"
        folder.mkdir(exist_ok=True)
        fake_ssh = ROOT / "tests" / "helpers" / "fake_ssh.py"
        for name, text in (
            ("ssh", f'exec {sys.executable} {fake_ssh} {folder} "$@"'),
            ("python", f'export {MARK}="{self._mark}" PYTHONPATH="{path}"; exec {sys.executable} "$@"'),
        ):
            (folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / name).chmod(0o755)
        return {"PATH": f"{folder}:{os.environ['PATH']}", "CHAOS_PYTHON": str(folder / "python")}

    def _send(self, turn: Round) -> None:
        os.write(self._commands, (json.dumps([str(self._moments), dataclasses.asdict(turn)]) + "\n").encode())

    def _answer(self) -> dict[str, Any]:
        """The next line of the notebook's process.

        Raises:
            TimeoutError: it did not answer and was ended.
        """
        until = time.monotonic() + ANSWER_LIMIT_S
        while b"\n" not in self._answers:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until - time.monotonic()))
            data = os.read(self._from, 1 << 16) if ready else b""
            if not data:
                assert self._process is not None
                self._process.kill()
                self._lose()
                raise TimeoutError("the notebook's process " + ("has ended" if ready else f"hung for {ANSWER_LIMIT_S:.0f} s"))
            self._answers += data
        line, _, self._answers = self._answers.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _lose(self) -> None:
        assert self._process is not None
        self._process.wait()
        self._process = None
        os.close(self._commands)
        os.close(self._from)

    def _press(self, turn: Round) -> int:
        """Press Stop, once or twice, if the round says so; returns when."""
        expect = FAULTS[turn.fault].expect
        if expect not in ("stop", "line"):
            return 0
        assert self._process is not None
        if expect == "line":
            self._await_moment(turn)
            time.sleep(SAID_S)
        else:
            time.sleep(turn.delay_s)
        pressed_ns = time.perf_counter_ns()
        self._process.send_signal(signal.SIGINT)
        if turn.fault == "two interrupts":
            time.sleep(turn.delay_s / 10)
            self._process.send_signal(signal.SIGINT)
        return pressed_ns

    def _await_moment(self, turn: Round) -> None:
        until = time.monotonic() + ANSWER_LIMIT_S
        while not self._moment(turn) and time.monotonic() < until:
            time.sleep(0.01)

    def _moment(self, turn: Round) -> int:
        """When the fault happened, as recorded by the ranks; 0 if they did not record it."""
        ranks = range(turn.size) if FAULTS[turn.fault].expect == "pair" else [turn.victim]
        noted = [file.read_text() for rank in ranks if (file := self._moments / str(rank)).exists()]
        return max((int(text) for text in noted if text), default=0)

    def _kill(self, turn: Round, files: set[str]) -> Outcome:
        """The kernel is killed: nothing of it is left."""
        assert self._process is not None
        self._process.kill()
        self._lose()
        left, took_s = self.traces.left((), files, GONE_LIMIT_S)
        return Outcome(turn, "", True, took_s, left)


def main() -> None:
    """Play the rounds, print the table, and exit with 1 if any of them failed."""
    parser = argparse.ArgumentParser("python -m bench.chaos", description=__doc__)
    parser.add_argument("--rounds", type=int, default=300, help="how many (default: 300)")
    parser.add_argument("--seed", type=int, default=7, help="the same seed draws the same rounds (default: 7)")
    parser.add_argument("--round", type=int, metavar="N", help="this round alone")
    parser.add_argument("--machines", type=int, default=0, choices=(0, 2), help="2: ranks on two machines, made of this one")
    parser.add_argument("--jobs", type=int, default=2, help="how many notebooks at a time (default: 2)")
    parser.add_argument("--only", nargs="+", metavar="FAULT", choices=list(FAULTS), help="of the rounds, those with these faults")
    parser.add_argument("--runtimes", nargs="+", choices=list(RUNTIMES), default=list(RUNTIMES), help="and in these runtimes")
    arguments = parser.parse_args()

    for number in (signal.SIGTERM, signal.SIGHUP):  # so that started processes end with this one
        signal.signal(number, lambda *_: sys.exit("stopped"))  # and none inherits from nohup that SIGHUP is ignored
    print("\n".join(about()), "\n")
    numbers = range(arguments.rounds) if arguments.round is None else [arguments.round]
    turns = [Round.of(arguments.seed, number, arguments.machines) for number in numbers]
    turns = [t for t in turns if t.fault in (arguments.only or FAULTS) and t.runtime in arguments.runtimes]
    outcomes = play(turns, arguments.jobs)
    print(rows(outcomes), "\n")
    counted = Counter((o.turn.runtime, o.turn.start) for o in outcomes)
    print(", ".join(f"{count} rounds {runtime} ({start})" for (runtime, start), count in sorted(counted.items())))
    print(closing_line(outcomes))
    sys.exit(not all(outcome.good for outcome in outcomes))


def play(turns: Sequence[Round], jobs: int = 1) -> list[Outcome]:
    """Play rounds in some notebooks at a time; failed ones are printed at once, with the command that repeats them."""
    waiting = deque(turns)
    outcomes: list[Outcome] = []

    def play_some(folder: Path) -> None:
        arena = Arena(folder)
        try:
            while waiting:
                turn = waiting.popleft()
                start = time.monotonic()
                try:
                    outcome = arena.play(turn)
                except TimeoutError as error:
                    outcome = Outcome(turn, str(error), False, None, [])
                took = f"{turn.number}: {turn.fault}, {turn.runtime}, {turn.start}, {time.monotonic() - start:.1f} s"
                say(took if outcome.good else f"{took}, WRONG")
                if not outcome.good:
                    print(f"{_story(outcome)}\n", flush=True)
                outcomes.append(outcome)
        finally:
            arena.close()

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        folders = [Path(folder, str(number)) for number in range(jobs)]
        try:
            for ended in [pool.submit(play_some, own) for own in folders]:
                ended.result()
        finally:
            waiting.clear()  # whoever stops this waits only for the rounds under way
    return sorted(outcomes, key=lambda outcome: outcome.turn.number)


def _story(outcome: Outcome) -> str:
    turn, machines = outcome.turn, " --machines 2" * bool(outcome.turn.machines)
    lines = [
        f"FAILED --seed {turn.seed} --round {turn.number}{machines}: {turn.fault}, {turn.runtime}, {turn.start}",
        f"  {turn.name_of(turn.victim)}, after {turn.delay_s:.3f} s",
        f"  the next run: {outcome.problem or 'succeeded'}",
        f"  reported {'correctly' if outcome.named else 'WRONGLY'}: {outcome.reported}",
        *(f"  left: {thing}" for thing in outcome.left),
    ]
    return "\n".join(lines)
