"""What `lab.doctor(on=...)` says about machines: made up here; two agents in `tests/launch/machines/test_relay.py`."""

from __future__ import annotations

from dataclasses import replace

from labkit.launch.machines.facts import Facts, KnownMachine
from labkit.launch.server_requests import Surveyed
from labkit.notebook.doctor import _findings
from labkit.notebook.findings import Report

HERE = Facts(
    host="laptop", address="10.0.0.9", interface="wlan0", addresses=("10.0.0.9",), python="/usr/bin/python3",
    versions={"Python": "3.11", "labkit": "0.1.0", "torch": "2.13.0"}, layout="a", cores=8.0, memory_bytes=8 << 30, gpus=0,
)  # fmt: skip


def known(name: str = "pc1", **changes: object) -> KnownMachine:
    there = replace(HERE, host=name, address=f"10.0.0.{name[-1]}", **changes)  # type: ignore[arg-type]
    return KnownMachine(name, there, 200_000, 150_000)


def report(**changes: object) -> Report:
    return Report(tuple(_findings(HERE, Surveyed(["pc1"], [known(**changes)], {}))))


def test_a_machine_that_has_all() -> None:
    found = report(gpus=2)
    assert found.ok
    assert str(found).splitlines()[:3] == [
        "  pc1    10.0.0.1: 8 cores, 8 GiB of memory free, 2 GPUs",
        "  pc1    Python 3.11, labkit 0.1.0, torch 2.13.0; /usr/bin/python3",
        "  pc1    a round trip takes 200 µs; its clock is known to within 150 µs",
    ]


def test_a_machine_with_another_torch() -> None:
    found = report(versions=HERE.versions | {"torch": "2.12.0"})
    (problem,) = [f for f in found.findings if not f.ok]
    assert problem.found == "pc1 has torch 2.12.0, and this notebook torch 2.13.0: they must be the same"
    assert problem.remedy == "On pc1: /usr/bin/python3 -m pip install torch==2.13.0"


def test_a_machine_without_torch() -> None:
    found = report(versions={"Python": "3.11", "labkit": "0.1.0"})
    assert [f.found for f in found.findings if not f.ok] == [
        "pc1 has no torch, and this notebook torch 2.13.0: they must be the same"
    ]


def test_a_labkit_of_the_same_version_that_stores_records_differently() -> None:
    found = report(layout="b")
    assert [f.remedy for f in found.findings if not f.ok] == ["Install the same one on both"]


def test_each_difference_is_told_once() -> None:
    here = replace(HERE, versions=HERE.versions | {"tensorflow": "2.21.0"})
    there = known(versions={"Python": "3.12", "labkit": "0.2.0", "torch": "2.13.0"})
    found = Report(tuple(_findings(here, Surveyed(["pc1"], [there], {})))).findings
    assert [f.found.partition(",")[0] for f in found if not f.ok] == [
        "pc1 has Python 3.12",
        "pc1 has labkit 0.2.0",
        "pc1 has no tensorflow",
    ]


def test_a_machine_that_cannot_be_used_does_not_hide_the_others() -> None:
    problems = {"pc2": "pc2 cannot be used: Permission denied. Set up a key.", "": "pc3 cannot connect to pc1. A firewall?"}
    surveyed = Surveyed(["pc1", "pc2", "pc3"], [known("pc1"), known("pc3")], problems)
    found = Report(tuple(_findings(HERE, surveyed))).findings
    assert [(f.subject, f.ok) for f in found] == [
        *[("pc1", True)] * 3, ("pc2", False), *[("pc3", True)] * 3, ("network", False), ("ports", True),
    ]  # fmt: skip
    assert (found[3].found, found[3].remedy) == ("pc2 cannot be used: Permission denied", "Set up a key")
