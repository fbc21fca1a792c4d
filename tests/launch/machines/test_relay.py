"""Groups on two machines work as groups on one: results, prints, errors, deaths, Stop, deadlocks."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from processes import left_after

import labkit as lab
from labkit.errors.exit_reasons import Cause
from labkit.group.open_groups import notebook
from labkit.launch.machines.relay_starter import survey
from labkit.recording.schema import UNKNOWN

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def four(two: lab.SSH) -> Iterator[lab.Group]:
    with lab.Group(4, runtime="bare", on=two, timeout_s=200) as group:
        yield group


@pytest.fixture(scope="module")
def gloo(two: lab.SSH) -> Iterator[lab.Group]:
    pytest.importorskip("torch")
    with lab.Group(4, on=two, timeout_s=200) as group:
        yield group


def relay_of(group: lab.Group) -> psutil.Process:
    return psutil.Process(notebook.starter(group.runtime, "fork", group.on)._process.pid)


def agents_of(group: lab.Group) -> list[psutil.Process]:
    """The agents, by machine."""
    found = [p for p in relay_of(group).children(recursive=True) if p.cmdline()[-1:] == ["labkit.launch.machines.agent"]]
    return sorted((p for p in found if "python" in p.name()), key=lambda p: p.environ()["SSH_CONNECTION"])


def failed(group: lab.Group, function: Callable[..., Any], *args: Any) -> lab.RankError:
    """The error of a run that fails; the group starts what it needs for the next run."""
    with pytest.raises(lab.RankError) as caught:
        group.run(function, *args)
    return caught.value


def causes(error: lab.RankError) -> list[tuple[int, Cause]]:
    return sorted((failure.rank, failure.cause) for failure in error.failures)


def works_again(group: lab.Group) -> None:
    assert group.run(int).results == [0] * len(group)


def test_ranks_are_placed_in_blocks_and_know_where_they_are(four: lab.Group) -> None:
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR")
    found = four.run(lambda: [os.environ[name] for name in names]).results
    assert found == [
        ["0", "0", "2", "0", "2", "127.0.0.2"],
        ["1", "1", "2", "0", "2", "127.0.0.2"],
        ["2", "0", "2", "1", "2", "127.0.0.2"],
        ["3", "1", "2", "1", "2", "127.0.0.2"],
    ]


def test_a_dict_gives_the_numbers_of_ranks(ssh_python: str) -> None:
    with lab.Group(4, runtime="bare", on=lab.SSH({"pc1": 3, "pc2": 1}, python=ssh_python), timeout_s=200) as group:
        assert group.run(lambda: os.environ["GROUP_RANK"]).results == ["0", "0", "0", "1"]


def test_results_and_prints_arrive(four: lab.Group) -> None:
    def f(x: int) -> int:
        print("rank", os.environ["RANK"])
        return x * int(os.environ["RANK"])

    run = four.run(f, 5)
    assert run.results == [0, 5, 10, 15]
    assert run.output.splitlines() == [f"[rank {i}] rank {i}" for i in range(4)]


def test_megabytes_of_prints_arrive_whole(four: lab.Group, capsys: pytest.CaptureFixture[str]) -> None:
    def f() -> None:
        for i in range(40_000):
            print(f"{i:06} " + "x" * 50)

    four.run(f)
    lines = capsys.readouterr().out.splitlines()
    for rank in range(4):
        shown = [line.split()[2] for line in lines if line.startswith(f"[rank {rank}]")]
        assert shown == [f"{i:06}" for i in range(40_000)]


@pytest.mark.parametrize("size", [1, 1 << 12, 3 << 20, 64 << 20])
def test_arrays_travel_there_and_back(four: lab.Group, size: int) -> None:
    array = np.random.default_rng(0).integers(0, 255, size, dtype=np.uint8)

    def f(a: Any) -> Any:
        return a + np.uint8(os.environ["RANK"])

    for rank, result in enumerate(four.run(f, array).results):
        assert (result == array + np.uint8(rank)).all()


def test_a_large_object_without_arrays_travels(four: lab.Group) -> None:
    text = "x" * (5 << 20)
    assert four.run(lambda t: t + os.environ["RANK"], text).results == [f"{text}{i}" for i in range(4)]


def test_arguments_travel_once_to_each_machine(four: lab.Group) -> None:
    """The agents receive the argument once, though each has two ranks."""
    array = np.zeros(50 << 20, np.uint8)
    four.run(len, array)
    time.sleep(2)  # until the relay has forgotten the argument
    before = [p.io_counters().read_chars for p in agents_of(four)]
    assert four.run(len, array).results == [array.nbytes] * 4
    read = [p.io_counters().read_chars - b for p, b in zip(agents_of(four), before, strict=True)]
    assert all(array.nbytes < n < 1.5 * array.nbytes for n in read), read


def test_kept_results_hold_no_descriptors(four: lab.Group) -> None:
    kept = [four.run(np.zeros, 1 << 20).results for _ in range(3)]
    before = len(os.listdir("/dev/fd"))
    kept += [four.run(np.zeros, 1 << 20).results for _ in range(10)]
    assert len(os.listdir("/dev/fd")) <= before


def test_the_folders_of_ranks_that_have_ended_are_removed(two: lab.SSH, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks work in temporary ones where the notebook's is missing."""
    monkeypatch.setattr("labkit.worker.process_state._folder", lambda: "/nowhere/course")

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with lab.Group(2, runtime="bare", on=two, timeout_s=200) as group:
        for end in (lambda: failed(group, die), group.close):
            folders = [Path(folder) for folder in group.run(os.getcwd).results]
            assert all(folder.is_dir() for folder in folders)
            end()
            assert not any(folder.exists() for folder in folders)


def test_an_error_comes_with_the_students_line(four: lab.Group) -> None:
    def f() -> None:
        if os.environ["RANK"] == "2":
            raise ValueError("on pc2")

    error = failed(four, f)
    assert [(f.rank, f.headline) for f in error.failures] == [(2, "ValueError: on pc2")]
    assert 'raise ValueError("on pc2")' in str(error)
    works_again(four)


def test_of_two_failures_the_earlier_one_is_the_cause_whatever_the_clocks_say(four: lab.Group) -> None:
    """The clock of pc2 is an hour ahead."""

    def f() -> None:
        rank = int(os.environ["RANK"])
        if rank in (0, 2):
            time.sleep(0.0 if rank == 2 else 0.05)
            raise ValueError(f"rank {rank}")
        time.sleep(60)

    at_ns = {f.rank: f.at_ns for f in failed(four, f).failures}
    assert abs(at_ns[0] - at_ns[2]) < 10e9
    assert at_ns[2] < at_ns[0]


def test_the_clocks_are_known_from_the_first_moment(two: lab.SSH) -> None:
    def f() -> None:
        raise ValueError(os.environ["RANK"])

    with lab.Group(4, runtime="bare", on=two, timeout_s=200) as group:
        assert all(abs(f.at_ns - time.perf_counter_ns()) < 60e9 for f in failed(group, f).failures)
        assert group.run(int).trace.clock_error_ns > 0


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_that_is_killed(four: lab.Group, rank: int) -> None:
    def f(victim: int) -> None:
        print("before the end", flush=True)
        if os.environ["RANK"] == str(victim):
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()

    assert causes(failed(four, f, rank)) == [(rank, Cause.KILLED)]
    works_again(four)


def test_an_agent_that_is_killed(four: lab.Group) -> None:
    four.run(int)
    agent = agents_of(four)[1]
    pids = four.run(os.getpid).results
    threading.Timer(0.5, agent.kill).start()
    assert causes(failed(four, time.sleep, 60)) == [(2, Cause.LOST_MACHINE), (3, Cause.LOST_MACHINE)]
    assert not left_after(60, pids)
    assert four.run(lambda: os.environ["GROUP_RANK"]).results == ["0", "0", "1", "1"]  # the agent was started again


def test_a_machine_that_is_silent_is_lost(four: lab.Group) -> None:
    four.run(int)
    agent = agents_of(four)[0]
    threading.Timer(0.2, agent.suspend).start()
    try:
        error = failed(four, time.sleep, 60)
    finally:
        agent.kill()
    assert causes(error) == [(0, Cause.LOST_MACHINE), (1, Cause.LOST_MACHINE)]
    assert re.search(r"By its last report, 1[0-9]\.\d s earlier, it had been computing", str(error))
    trace = error.run.trace
    calls = trace.filter(kind="call").spans
    since = {s.rank: s.start_ns for s in calls if s.name == UNKNOWN}
    assert since.keys() == {0, 1}
    assert {s.rank: s.end_ns for s in calls if s.name == "sleep"} == {2: trace.end_ns, 3: trace.end_ns} | since
    works_again(four)


def test_a_machine_that_is_frozen_for_two_seconds_is_not_lost(four: lab.Group) -> None:
    four.run(int)
    agent = agents_of(four)[1]

    def freeze() -> None:
        agent.suspend()
        time.sleep(2)
        agent.resume()

    thread = threading.Thread(target=freeze)
    thread.start()
    assert four.run(lambda: time.sleep(3) or 7).results == [7] * 4
    thread.join()


def test_when_the_relay_is_killed_the_run_says_so_and_the_next_one_works(four: lab.Group) -> None:
    pids = four.run(os.getpid).results
    relay = relay_of(four)
    started = relay.children(recursive=True)
    threading.Timer(0.5, relay.kill).start()
    failed(four, time.sleep, 60)
    assert not left_after(60, [*pids, *(p.pid for p in started)])
    works_again(four)


def test_stop(four: lab.Group) -> None:
    pids = four.run(os.getpid).results
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        four.run(time.sleep, 60)
    assert not left_after(60, pids)
    works_again(four)


def test_nothing_is_left_of_a_closed_group(two: lab.SSH) -> None:
    with lab.Group(2, runtime="bare", on=two, timeout_s=200) as group:
        pids = group.run(os.getpid).results
    assert not left_after(60, pids)


def test_collectives_give_the_serial_result(gloo: lab.Group) -> None:
    def f() -> float:
        import torch
        import torch.distributed as dist

        x = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(x)
        return x.item()

    run = gloo.run(f)
    assert run.results == [10.0] * 4
    spans = [s for s in run.trace.spans if s.name == "all_reduce"]
    assert len(spans) == 4
    assert max(s.start_ns for s in spans) - min(s.start_ns for s in spans) < 60e9  # on one clock: pc2 is an hour ahead


def test_a_receive_without_a_send_is_a_deadlock(gloo: lab.Group) -> None:
    def f() -> None:
        import torch
        import torch.distributed as dist

        if dist.get_rank() in (0, 3):
            dist.recv(torch.zeros(1), src=3 - dist.get_rank())

    with pytest.raises(lab.DeadlockError):
        gloo.run(f)


def test_a_rank_that_returns_early_is_named(gloo: lab.Group) -> None:
    def f() -> None:
        import torch.distributed as dist

        if dist.get_rank() != 2:
            dist.barrier()

    assert causes(failed(gloo, f)) == [(2, Cause.DEADLOCK)]


def test_links_are_measured_inside_machines_and_between_them(gloo: lab.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clocks of the machines differ by an hour."""
    monkeypatch.setattr("labkit.notebook.measure_link.SIZES", (64, 1 << 16))
    measured = lab.measure_link(gloo, operations=["send", "all_reduce"])
    assert [fit.ranks for fit in measured] == [2, 2, 2, 2]
    assert all(0 < s < 10 for fit in measured for s in fit.seconds)
    assert (measured.nodes, measured.ranks) == (2, 4)


def test_traffic_tells_what_crosses_machines(gloo: lab.Group, plain: None) -> None:
    """Ranks 0 and 1 are on pc1, 2 and 3 on pc2."""

    def f() -> None:
        import torch
        import torch.distributed as dist

        rank = dist.get_rank()
        for size, to in ((500_000, 1), (2_000_000, 3)):
            if rank == 0:
                dist.send(torch.zeros(size, dtype=torch.uint8), to)
            elif rank == to:
                dist.recv(torch.zeros(size, dtype=torch.uint8), 0)
        dist.all_reduce(torch.zeros(1_000_000))  # as a ring, of which two of four messages cross: from 1 to 2, and 3 to 0

    run = gloo.run(f)
    assert run.trace.nodes == (0, 0, 1, 1)
    axes = lab.traffic(run)
    assert "14.0 MB between nodes" in axes.get_title(loc="left") + axes.get_title()  # 2 MB, and 2 times 3/2 of 4 MB


def test_doctor_describes_the_machines(two: lab.SSH) -> None:
    found = lab.doctor(on=two)
    assert found.ok
    assert [f.subject for f in found.findings] == ["pc1"] * 3 + ["pc2"] * 3 + ["ports"]


def test_doctor_describes_the_others_if_some_cannot_be_reached(ssh_python: str) -> None:
    found = lab.doctor(on=lab.SSH("unknown", "pc1", "locked", python=ssh_python)).findings
    assert [(f.subject, f.ok) for f in found] == [("unknown", False), *[("pc1", True)] * 3, ("locked", False), ("ports", True)]
    assert ["Could not resolve hostname" in found[0].found, "Permission denied" in found[4].found] == [True, True]


def test_a_reading_that_waited_for_the_agent_does_not_spoil_the_next_ones(two: lab.SSH) -> None:
    """The first reading takes as long as the agent takes to start."""
    for known in survey(two).machines:
        assert known.clock_error_ns < known.round_trip_ns + 5e6


def test_cells_share_names(four: lab.Group) -> None:
    four.run_cell("x = 5", "<cell 1>", "cell 1")
    assert four.run_cell("print(x + 1)", "<cell 2>", "cell 2").output.splitlines() == [f"[rank {i}] 6" for i in range(4)]


def test_the_group_says_where_it_runs(four: lab.Group, ssh_python: str) -> None:
    assert repr(four) == f"<Group of 4 bare ranks on SSH('pc1', 'pc2', python={ssh_python!r})>"


WITHOUT_LABKIT = f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n'


@pytest.mark.parametrize(
    ("machines", "python", "said"),
    [
        pytest.param(("pc1", "unknown"), "", "Could not resolve hostname", id="a name that cannot be resolved"),
        pytest.param(("locked", "pc2"), "", "Permission denied", id="a key that is refused"),
        pytest.param(("pc1",), "/nowhere/python", "python=", id="a Python that does not exist there"),
        pytest.param(("pc1",), WITHOUT_LABKIT, "labkit must be installed there", id="a Python without labkit"),
    ],
)
def test_a_machine_that_cannot_be_used(
    machines: tuple[str, ...], python: str, said: str, ssh_python: str, tmp_path: Path
) -> None:
    if python == WITHOUT_LABKIT:
        python = str(tmp_path / "python")
        Path(python).write_text(WITHOUT_LABKIT)
        Path(python).chmod(0o755)
    group = lab.Group(2, runtime="bare", on=lab.SSH(*machines, python=python or ssh_python), timeout_s=200)
    with group, pytest.raises(lab.LabError, match=said):
        group.run(int)
