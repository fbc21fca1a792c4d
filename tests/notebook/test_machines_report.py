"""What `lab.doctor(on=...)` says about machines: made up here; two agents in `tests/machines/test_relay.py`."""

from __future__ import annotations

from dataclasses import replace

from labkit.machines.facts import Facts, KnownMachine
from labkit.notebook.findings import Report
from labkit.notebook.machines_report import _findings

HERE = Facts(
    host="laptop", boot="1", address="10.0.0.9", interface="wlan0", addresses=("10.0.0.9",), python="/usr/bin/python3",
    versions={"Python": "3.11", "labkit": "0.1.0", "torch": "2.13.0"}, layout="a", cores=8.0, memory_bytes=8 << 30, gpus=0,
)  # fmt: skip


def report(**changes: object) -> Report:
    there = replace(HERE, host="pc1", address="10.0.0.1", **changes)  # type: ignore[arg-type]
    return Report(tuple(_findings(HERE, [KnownMachine("pc1", there, 200_000, 150_000)])))


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
