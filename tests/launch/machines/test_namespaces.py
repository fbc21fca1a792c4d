"""Groups on two machines made of namespaces, each with a real sshd, a clock and a network of its own; needs root.

`tests/helpers/two_machines.py` makes them. Cables are pulled, and lines are slow.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from two_machines import TwoMachines, missing_for_machines, two_machines

import labkit as lab
from labkit.errors.exit_reasons import Cause
from labkit.group.open_groups import notebook
from labkit.launch.machines.relay_starter import RelayStarter

REASON = missing_for_machines()
pytestmark = [pytest.mark.processes, pytest.mark.skipif(bool(REASON), reason=REASON or "can be had")]


def end_relays() -> None:
    for key, starter in list(notebook.starters.items()):
        if isinstance(starter, RelayStarter):
            starter.close()
            del notebook.starters[key]


@pytest.fixture(scope="module")
def machines(ssh_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoMachines]:  # which changes PATH, too
    with pytest.MonkeyPatch.context() as patch, two_machines(tmp_path_factory.mktemp("machines")) as two:
        patch.setenv("PATH", f"{two.bin}:{os.environ['PATH']}")
        end_relays()  # of other tests: machines with the same names would share them
        yield two
        end_relays()


@pytest.fixture
def cables(machines: TwoMachines) -> Iterator[TwoMachines]:
    """The machines, whose cables are in and fast again after the test."""
    yield machines
    machines.delay(0)
    machines.limit(0)
    for name in machines.addresses:
        machines.mend(name)


@pytest.fixture(scope="module")
def on(machines: TwoMachines, ssh_python: str) -> lab.SSH:
    return lab.SSH("pc1", "pc2", python=ssh_python)


@pytest.fixture(scope="module")
def group(on: lab.SSH) -> Iterator[lab.Group]:
    pytest.importorskip("torch")
    with lab.Group(4, on=on, timeout_s=200) as four:
        yield four


def ours_on(machines: TwoMachines, name: str) -> set[int]:
    """The numbers, on a machine, of labkit's processes there."""
    found = subprocess.run(machines.command(name, "pgrep", "-f", "labkit.(machines|launch)"), capture_output=True, check=False)
    return {int(pid) for pid in found.stdout.split()}


def summed(times: int) -> tuple[str, float]:
    """Add up the ranks' numbers, again and again; returns the machine's name and the sum."""
    import torch
    import torch.distributed as dist

    for _ in range(times):
        x = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(x)
        time.sleep(0.01)
    return os.uname().nodename, x.item()


def test_ranks_on_two_machines_work_together_on_one_clock(group: lab.Group) -> None:
    run = group.run(summed, 20)
    assert run.results == [("pc1", 6.0), ("pc1", 6.0), ("pc2", 6.0), ("pc2", 6.0)]
    trace = run.trace
    assert trace.ranks == ("rank 0 · pc1", "rank 1 · pc1", "rank 2 · pc2", "rank 3 · pc2")
    assert trace.nodes == (0, 0, 1, 1)
    assert 0 < trace.clock_error_ns < 100e6
    spans = sorted((s for s in trace.spans if s.name == "all_reduce"), key=lambda s: s.match)
    for i in range(0, len(spans), 4):  # nobody has the sum before all have given their numbers
        last_ns = max(s.start_ns for s in spans[i : i + 4])
        assert all(s.end_ns >= last_ns - trace.clock_error_ns for s in spans[i : i + 4])


def test_a_large_array_over_a_slow_line_is_not_taken_for_silence(group: lab.Group, cables: TwoMachines) -> None:
    group.run(int)
    cables.limit(4)  # 10 s for 40 MB
    array = np.random.default_rng(0).integers(0, 255, 40_000_000, dtype=np.uint8)
    assert group.run(lambda a: int(a.sum(dtype=np.int64)), array).results == [int(array.sum(dtype=np.int64))] * 4


def test_long_round_trips_are_no_deadlock(group: lab.Group, cables: TwoMachines) -> None:
    """Each rank waits in turn for one that computes for longer than the monitor watches."""
    cables.delay(20)

    def relay_race() -> float:
        import torch
        import torch.distributed as dist

        x, rank = torch.zeros(1), dist.get_rank()
        for _ in range(3):
            if rank:
                dist.recv(x, rank - 1)
            time.sleep(0.4)
            dist.send(x + 1, (rank + 1) % 4)
            if not rank:
                dist.recv(x, 3)
        return x.item()

    assert group.run(relay_race).results[0] == 12.0


def test_a_cable_that_is_out_for_two_seconds(group: lab.Group, cables: TwoMachines) -> None:
    timers = [threading.Timer(0.5, cables.cut, ["pc2"]), threading.Timer(2.5, cables.mend, ["pc2"])]
    for timer in timers:
        timer.start()
    try:
        assert group.run(summed, 400).results[3] == ("pc2", 6.0)
    finally:
        for timer in timers:
            timer.join()


def test_a_cable_that_stays_out(group: lab.Group, cables: TwoMachines, on: lab.SSH) -> None:
    assert ours_on(cables, "pc2")
    threading.Timer(0.5, cables.cut, ["pc2"]).start()
    with pytest.raises(lab.RankError) as caught:
        group.run(summed, 10_000)
    assert [(f.rank, f.cause) for f in caught.value.failures] == [(2, Cause.LOST_MACHINE), (3, Cause.LOST_MACHINE)]
    assert "its machine pc2 is lost: it has not answered" in str(caught.value)
    assert {name for name, _ in group.run(summed, 1).results} == {"pc1"}  # the machine that is left
    until = time.monotonic() + 60
    while (left := ours_on(cables, "pc2")) and time.monotonic() < until:  # its agent ends its ranks, though nobody can tell it to
        time.sleep(0.2)
    assert not left
    cables.mend("pc2")
    with lab.Group(4, on=on, timeout_s=200) as again:
        assert [name for name, _ in again.run(summed, 1).results] == ["pc1", "pc1", "pc2", "pc2"]


def test_nothing_is_left_on_any_machine_when_the_notebook_is_killed(
    machines: TwoMachines, ssh_python: str, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(f"""
        import time
        import labkit as lab

        def f():
            print("running", flush=True)
            time.sleep(600)

        lab.Group(4, runtime="bare", on=lab.SSH("pc1", "pc2", python={ssh_python!r})).run(f)
        """)
    )
    before = {name: ours_on(machines, name) for name in machines.addresses}
    environment = os.environ | {"PYTHONPATH": str(Path(lab.__file__).parents[1])}
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, env=environment, text=True) as notebook:
        assert notebook.stdout is not None
        for _ in range(4):
            assert "running" in notebook.stdout.readline()
        assert all(ours_on(machines, name) - before[name] for name in before)
        notebook.send_signal(signal.SIGKILL)
    for name, others in before.items():
        until = time.monotonic() + 60
        while (left := ours_on(machines, name) - others) and time.monotonic() < until:
            time.sleep(0.1)
        assert not left


def test_machines_that_cannot_connect_to_each_other(machines: TwoMachines, ssh_python: str) -> None:
    """Each reaches the notebook, and a firewall stops what goes from pc1 to pc2."""
    python = Path(ssh_python).with_name("other_python")
    python.write_text(Path(ssh_python).read_text())  # another path, so that the agents are new ones
    python.chmod(0o755)
    block = ("ip", "route", "add", "blackhole", f"{machines.addresses['pc2']}/32")
    subprocess.run(machines.command("pc1", *block), check=True)
    try:
        group = lab.Group(2, runtime="bare", on=lab.SSH("pc1", "pc2", python=str(python)), timeout_s=200)
        there = machines.addresses["pc2"]
        with group, pytest.raises(lab.LabError, match=rf"pc1 cannot connect to pc2 at {there} \(port \d+\): "):
            group.run(int)
    finally:
        subprocess.run(machines.command("pc1", "ip", "route", "del", *block[3:]), check=True)
