"""Two machines, made of this computer, as each engine reaches them; `tests/helpers/` makes them."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

import labkit as lab

ROOT: Final = Path(__file__).resolve().parents[2]
HELPERS: Final = ROOT / "tests" / "helpers"


@dataclass(frozen=True, slots=True)
class Place:
    """Where ranks run."""

    on: Any  # what the group gets as `on`
    lose: Callable[[], object] | None = None  # makes the second machine disappear; None if that is not possible here


def _helper(name: str) -> Any:
    """A helper of the tests."""
    if str(HELPERS) not in sys.path:
        sys.path.append(str(HELPERS))
    return importlib.import_module(name)


def _python(folder: Path) -> str:
    """A Python that finds this labkit, also where the environment is an empty one."""
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)


@contextlib.contextmanager
def _here(_: Path) -> Iterator[Place]:
    yield Place(None)


@contextlib.contextmanager
def _ssh(folder: Path) -> Iterator[Place]:
    with (
        _helper("two_machines").two_machines(folder) as machines,
        mock.patch.dict(os.environ, PATH=f"{machines.bin}:{os.environ['PATH']}"),
    ):
        yield Place(lab.SSH("pc1", "pc2", python=_python(folder)), lambda: machines.cut("pc2"))


@contextlib.contextmanager
def _slurm(folder: Path) -> Iterator[Place]:
    with _helper("slurm_cluster").slurm_cluster(folder) as config, mock.patch.dict(os.environ, SLURM_CONF=str(config)):
        yield Place(lab.Slurm(nodes=2, time="20", python=_python(folder)))


@contextlib.contextmanager
def _ray(folder: Path) -> Iterator[Place]:
    pipe = subprocess.PIPE
    command = [sys.executable, str(HELPERS / "ray_cluster.py"), str(folder), str(ROOT)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as cluster:
        assert cluster.stdin is not None
        assert cluster.stdout is not None
        stdin, address = cluster.stdin, cluster.stdout.readline().strip()

        def remove() -> None:
            stdin.write("remove\n")
            stdin.flush()

        try:
            yield Place(lab.Ray(address), remove)
        finally:
            stdin.close()


def _missing(name: str) -> str:
    """Why an engine cannot be measured here; "" if it can."""
    if name == "ssh":
        return str(_helper("two_machines").missing_for_machines())
    return str(_helper("slurm_cluster").missing_for_slurm()) if name == "slurm" else ""


@contextlib.contextmanager
def place(name: str) -> Iterator[Place]:
    """Make the machines of an engine.

    Raises:
        RuntimeError: they cannot be made here; the text says why.
    """
    if reason := _missing(name):
        raise RuntimeError(reason)
    with tempfile.TemporaryDirectory() as folder, PLACES[name](Path(folder)) as made:
        yield made


PLACES: Final[dict[str, Callable[[Path], contextlib.AbstractContextManager[Place]]]] = {
    "this machine": _here,
    "ssh": _ssh,
    "slurm": _slurm,
    "ray": _ray,
}
