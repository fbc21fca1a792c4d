"""Emulated machines: a network each, slow cables that can be pulled, and what stands in where there are none."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from processes import children_of

import labkit as lab
from labkit.launch.machines import emulated
from labkit.launch.machines.emulated_network import _shares

pytest.importorskip("torch")

LINK = lab.Link(gbit_per_s=0.1, latency_us=20_000)


@pytest.fixture(scope="module")
def machines() -> Iterator[lab.EmulatedMachines]:
    made = lab.EmulatedMachines("pc1", "pc2", link=LINK)
    if reason := made.missing:
        pytest.skip(reason)
    yield made
    del made
    gc.collect()


def addresses() -> list[str]:
    return [a.address for name in ("lo", "eth0") for a in psutil.net_if_addrs().get(name, []) if a.family == socket.AF_INET]


def quickest_round_trip_s() -> float:
    import torch
    import torch.distributed as dist

    x, rank, taken = torch.ones(1), dist.get_rank(), []
    for _ in range(3):
        began = time.perf_counter()
        if rank == 0:
            dist.send(x, 1)
            dist.recv(x, 1)
        elif rank == 1:
            dist.recv(x, 0)
            dist.send(x, 0)
        taken.append(time.perf_counter() - began)
    return min(taken)


def sum_for_ever() -> None:
    import torch
    import torch.distributed as dist

    while True:
        dist.all_reduce(torch.ones(10))


@pytest.mark.processes
def test_each_machine_has_a_network_of_its_own(machines: lab.EmulatedMachines) -> None:
    with lab.Group(3, on=machines, runtime="bare") as group:
        assert group.run(addresses).results == [["127.0.0.1", "198.18.0.2"]] * 2 + [["127.0.0.1", "198.18.0.3"]]


@pytest.mark.processes
def test_messages_take_at_least_the_latency(machines: lab.EmulatedMachines) -> None:
    with lab.Group(2, on=machines) as group:
        assert group.run(quickest_round_trip_s).results[0] >= 2 * LINK.latency_s


@pytest.mark.processes
def test_a_pulled_cable(machines: lab.EmulatedMachines, capsys: pytest.CaptureFixture[str]) -> None:
    with lab.Group(2, on=machines) as group:
        group.run(os.getpid)
        machines.pull("pc2", after_s=0.2)
        with pytest.raises(lab.RankError, match="its machine pc2 is lost"):
            group.run(sum_for_ever)
        assert group.run(addresses).results == [["127.0.0.1", "198.18.0.2"]] * 2
        assert "All ranks are on pc1.\nTo try pc2 again, make a new group." in capsys.readouterr().out
        machines.plug_in("pc2")
        assert [found[1] for found in group.run(addresses).results] == ["198.18.0.2", "198.18.0.3"]
        ranks = group.run(os.getpid).results
        machines.plug_in("pc2")
        assert group.run(os.getpid).results == ranks, "no machine had been missing"


@pytest.mark.processes
def test_bare_ranks_meet_at_the_machines_addresses(machines: lab.EmulatedMachines) -> None:
    def summed() -> float:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        x = torch.ones(1)
        dist.all_reduce(x)
        dist.destroy_process_group()
        return x.item()

    with lab.Group(2, on=machines, runtime="bare") as group:
        assert group.run(summed).results == [2.0, 2.0]


@pytest.mark.processes
def test_agents_end_with_the_machines_object() -> None:
    before = children_of("machines.relay")
    machines = lab.EmulatedMachines("pc1", link=LINK)
    if machines.missing:
        pytest.skip(machines.missing)
    with lab.Group(1, on=machines, runtime="bare") as group:
        group.run(os.getpid)
        assert len(children_of("machines.relay")) == len(before) + 1
    del machines, group
    gc.collect()
    assert children_of("machines.relay") <= before


def test_a_fork_of_the_notebook_does_not_end_them(machines: lab.EmulatedMachines) -> None:
    program = (
        "import os, labkit as lab; m = lab.EmulatedMachines('pc1', link=lab.Link(gbit_per_s=1, latency_us=1))\n"
        "child = os.fork()\n"
        "if child: os.waitpid(child, 0); m.pull('pc1'); print('pulled')\n"  # the child ends with its finalizers
    )
    environment = os.environ | {"PYTHONPATH": str(Path(lab.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert done.stdout == "pulled\n", done.stderr


def test_machines_divide_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 3, 5, 7})
    assert _shares(2) == [[0, 2], [3, 5]]
    assert _shares(3) == [[0, 2, 3, 5, 7]] * 3


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="different names"):
        lab.EmulatedMachines("pc1", "pc1", link=LINK)
    for name in ("a\nb", "../x", "x" * 300, "", "pc 1", ".", "-o", 5, ["pc1"]):
        with pytest.raises(ValueError, match="at most 63 letters") as caught:
            lab.EmulatedMachines("pc1", name, link=LINK)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    with pytest.raises(TypeError, match=r"lab\.Link"):
        lab.EmulatedMachines("pc1", link=lab.Network(nodes=2, inside=LINK, between=LINK))  # type: ignore[arg-type]


def test_a_machine_that_is_not_there(machines: lab.EmulatedMachines) -> None:
    with pytest.raises(ValueError, match="pc1, pc2"):
        machines.pull("pc3")


@pytest.mark.parametrize("after_s", [-1, float("nan"), float("inf")])
def test_a_moment_that_does_not_come(machines: lab.EmulatedMachines, after_s: float) -> None:
    with pytest.raises(ValueError, match="expected seconds from 0"):
        machines.pull("pc2", after_s=after_s)


@pytest.mark.processes
def test_without_namespaces_the_ranks_are_here_over_the_same_network(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(emulated, "READY", "never said")
    machines = lab.EmulatedMachines("pc1", "pc2", link=LINK)
    with lab.Group(2, on=machines) as group:
        assert "no emulated machines" in capsys.readouterr().out
        assert group.on is None
        assert isinstance(group.link, lab.Network)
        assert (group.link.nodes, group.link.between) == (2, LINK)
        assert group.run(quickest_round_trip_s).results[0] >= 2 * LINK.latency_s
    with pytest.raises(lab.LabError, match="there is no cable"):
        machines.pull("pc2")
    assert "no emulated machines" in str(lab.doctor(on=machines))


def test_its_process_ends_with_the_object() -> None:
    before = children_of("emulated_network")
    machines = lab.EmulatedMachines("pc1", link=LINK)
    assert machines.missing or len(children_of("emulated_network")) == len(before) + 1
    del machines
    gc.collect()
    assert children_of("emulated_network") == before
