"""The report of `lab.doctor(on=...)`: what each machine has, and what is missing there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from labkit.errors.exceptions import LabError
from labkit.errors.lists import counted
from labkit.errors.units import in_words
from labkit.group.open_groups import notebook
from labkit.machines.engines import Engine
from labkit.machines.facts import Facts, KnownMachine, differences
from labkit.notebook.findings import Finding, Report

__all__ = ["machines_report"]

FRAMEWORKS: Final = ("torch", "tensorflow")
PORTS: Final = (
    "labkit opens none. torch, gloo and TensorFlow connect ranks at random ports of these addresses, and authenticate nobody: "
    "only the machines themselves should reach them"
)


def machines_report(on: Engine) -> Report:
    """Connect to machines, and report what they have.

    Args:
        on: what a group gets as `on`.
    """
    starter = notebook.starter("bare", "fork", on)
    try:
        return Report(tuple(_findings(Facts.here(), starter.survey())))
    except LabError as error:
        return Report(tuple(_problem(line, "machines") for line in str(error).splitlines()))


def _findings(here: Facts, machines: Sequence[KnownMachine]) -> Iterator[Finding]:
    for machine in machines:
        name, facts = machine.name, machine.facts
        gpus = counted(facts.gpus, "GPU") if facts.gpus else "no GPU"
        memory = f"{in_words(facts.memory_bytes, 'iB')} of memory free"
        yield Finding(f"{facts.address}: {facts.cores:g} cores, {memory}, {gpus}", subject=name)
        versions = ", ".join(f"{package} {version}" for package, version in facts.versions.items())
        yield Finding(f"{versions}; {facts.python}", subject=name)
        trip, error = in_words(machine.round_trip_ns / 1e9, "s"), in_words(machine.clock_error_ns / 1e9, "s")
        yield Finding(f"a round trip takes {trip}; its clock is known to within {error}", subject=name)
        for package in FRAMEWORKS:
            if package in here.versions:
                yield from (_problem(line, name) for line in differences(package, here, name, facts))
    yield Finding(PORTS, subject="ports")


def _problem(line: str, subject: str) -> Finding:
    """A problem, and behind its first sentence what to do about it."""
    found, _, remedy = line.partition(". ")
    return Finding(found, ok=False, remedy=remedy.removesuffix("."), subject=subject)
