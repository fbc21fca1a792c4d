"""`lab.fault`: short programs with a fault that somebody has reported, to be found, fixed and proved right."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from labkit.errors.exceptions import LabError
from labkit.errors.lists import listed
from labkit.errors.wrong_calls import public_api
from labkit.group.run import Run
from labkit.notebook.watched_group import Group
from labkit.teaching.lessons import ORIGINALS

PROGRAMS: Final = ORIGINALS / "faults"  # a file for each; tools/faults.toml says what is wrong with it


@dataclass(frozen=True, repr=False)
class Fault:
    """A program with a fault. A notebook shows its text at the end of a cell; `print` shows it, too."""

    path: Path  # its file, which runs under torchrun, too

    @property
    def source(self) -> str:
        """The program's text."""
        return self.path.read_text("utf-8")

    @property
    def ranks(self) -> int:
        """The number of ranks with which its first lines say to start it."""
        (number,) = re.findall(r"--nproc-per-node (\d+)", self.source)
        return int(number)

    @property
    def train(self) -> Callable[..., Any]:
        """The program's function, for `group.run`, `lab.same_as_serial` and the like; it returns a tensor."""
        function: Callable[..., Any] = runpy.run_path(str(self.path), run_name=self.path.stem)["train"]
        function.__name__ = self.path.stem  # the title of its pictures
        return function

    def run(self, *args: Any, ranks: int | None = None, check: bool = True) -> Run:
        """Run the program on CPUs, on new ranks.

        Args:
            *args: arguments of its function, if it has any.
            ranks: how many; by default as many as the fault needs. With 1, most programs are right: the serial oracle.
            check: whether to compare the ranks, for `lab.verdict`.

        Raises:
            RunError: the program failed.
        """
        with Group(ranks or self.ranks, devices="cpu") as group:
            return group.run(self.train, *args, check=check)

    def watch(self, *args: Any, ranks: int | None = None, check: bool = True) -> Run:
        """`run` with the live picture."""
        with Group(ranks or self.ranks, devices="cpu") as group:
            return group.watch(self.train, *args, check=check)

    def __repr__(self) -> str:
        return self.source.partition("\n\n\nif __name__")[0]  # what starts it under torchrun has no place in a cell

    def _repr_markdown_(self) -> str:
        return f"```python\n{self!r}\n```"


@public_api
def fault(name: str) -> Fault:
    """Return a program with a fault: `lab.fault("sentences")` shows it, `lab.fault("sentences").watch()` runs it.

    Each program is shorter than forty lines, plain PyTorch, and names in its first line who reported the fault, and
    when. docs/faults.md explains all of them, for teachers.

    Args:
        name: the program's name.

    Raises:
        LabError: there is no such program; the message lists all names.
    """
    path = PROGRAMS / f"{name}.py"
    if not path.is_file():
        raise LabError(f"no fault is called {name!r}; there are: {listed(sorted(p.stem for p in PROGRAMS.glob('*.py')))}")
    return Fault(path)
