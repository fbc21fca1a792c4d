"""What the installation of one of labkit's extras would replace among the packages of this environment."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from typing import Final

from labkit.errors.exceptions import install_command
from labkit.notebook.doctor_places import Place
from labkit.notebook.findings import Finding

HOSTED: Final = "hosted"  # the extra that is made to replace nothing
_DEVELOPERS: Final = ("site", "test")  # extras that no student needs

Replaced = dict[str, dict[str, str]]  # by extra and package: the installed version and the wanted ones


def find_replaced(place: Place) -> Replaced:
    """Return what each extra would replace where the kernel comes with packages of its own; elsewhere nothing."""
    if not place.hosted:
        return {}
    try:
        metadata = importlib.metadata.metadata("labkit")
        import packaging.requirements  # noqa: F401  # part of every Jupyter, but no requirement of labkit
    except ImportError:  # no packaging; labkit is not installed, but in the import path
        return {}
    extras = ["", *(extra for extra in metadata.get_all("Provides-Extra") or [] if extra not in _DEVELOPERS)]
    return {extra: dict(_conflicts(extra)) for extra in extras}


def _conflicts(extra: str) -> Iterator[tuple[str, str]]:
    """For each installed package that does not fulfil a requirement of an extra: its name, and both versions."""
    from packaging.requirements import Requirement

    for line in importlib.metadata.requires("labkit") or []:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        if requirement.marker is None and extra:
            continue  # one of labkit itself, which is reported once
        if requirement.name == "labkit":
            for other in requirement.extras:
                yield from _conflicts(other)
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            continue  # it would be added
        if not requirement.specifier.contains(version, prereleases=True):
            yield requirement.name, f"{version} by {requirement.specifier}"


def replaced(conflicts: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    """Report the extras whose installation would replace packages, and the one that would not."""
    remedy = install_command(HOSTED) if conflicts.get(HOSTED) == {} else ""
    for extra, packages in conflicts.items():
        if packages:
            name = f"labkit[{extra}]" if extra else "labkit"
            changes = ", ".join(f"{package} {versions}" for package, versions in packages.items())
            yield Finding(f"{name} replaces {changes}", remedy=remedy, pip=bool(remedy))
            remedy = ""  # once
