"""The report of `lab.doctor(on=...)`: what each machine has, and what is missing there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from labkit.errors.exceptions import LabError
from labkit.errors.lists import counted
from labkit.errors.units import in_words
from labkit.launch.machines.engines import Engine
from labkit.launch.machines.facts import Facts, differences
from labkit.launch.machines.relay_starter import survey
from labkit.launch.server_requests import Surveyed
from labkit.notebook.findings import Finding, Report
from labkit.worker.runtimes.registry import FRAMEWORKS

PORTS: Final = (
    "labkit opens none, except for ten seconds at a start, to see whether the machines can connect. torch and gloo connect ranks "
    "at random ports of these addresses, TensorFlow of all addresses. These authenticate nobody: only the machines themselves "
    "should reach them"
)


def machines_report(on: Engine) -> Report:
    """Connect to machines, and report what they have."""
    if (instead := on.instead()) is not None:
        return Report((Finding(instead[1], ok=False, subject="machines"),))
    try:
        return Report(tuple(_findings(Facts.here(), survey(on))))
    except LabError as error:
        return Report((_problem(str(error), "machines"),))


def _findings(here: Facts, surveyed: Surveyed) -> Iterator[Finding]:
    compared = [package for package in ("Python", "labkit", *FRAMEWORKS) if package in here.versions]
    known = {machine.name: machine for machine in surveyed.machines}
    for name in surveyed.names:
        if name in surveyed.problems:
            yield _problem(surveyed.problems[name], name)
        if name not in known:
            continue
        machine, facts = known[name], known[name].facts
        gpus = counted(facts.gpus, "GPU") if facts.gpus else "no GPU"
        memory = f"{in_words(facts.memory_bytes, 'iB')} of memory free"
        yield Finding(f"{facts.address}: {facts.cores:g} cores, {memory}, {gpus}", subject=name)
        versions = ", ".join(f"{package} {version}" for package, version in facts.versions.items())
        yield Finding(f"{versions}; {facts.python}", subject=name)
        trip, error = in_words(machine.round_trip_ns / 1e9, "s"), in_words(machine.clock_error_ns / 1e9, "s")
        yield Finding(f"a round trip takes {trip}; its clock is known to within {error}", subject=name)
        yield from (_problem(line, name) for line in differences(compared, here, name, facts))
    if "" in surveyed.problems:
        yield _problem(surveyed.problems[""], "network")
    yield Finding(PORTS, subject="ports")


def _problem(line: str, subject: str) -> Finding:
    """A problem, and behind its first sentence what to do about it."""
    found, _, remedy = line.partition(". ")
    return Finding(found, ok=False, remedy=remedy.removesuffix("."), subject=subject)
