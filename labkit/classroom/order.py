"""What `python -m labkit assign` was asked for, as every form needs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from labkit.classroom.handout import Exercise, Handout
from labkit.errors.exceptions import LabError


@dataclass(frozen=True)
class Order:
    """What to write.

    Args:
        handouts: the lessons.
        folder: where to write; it exists.
        seed: of the hidden inputs.
        install: what a hosted kernel installs; "" for the default.
        wheel: labkit's wheel, for graders that install it.
        repository: "owner/name" of a copy of labkit's repository on GitHub, or "".
        branch: its branch.
    """

    handouts: Sequence[Handout]
    folder: Path
    seed: int
    install: str = ""
    wheel: Path | None = None
    repository: str = ""
    branch: str = "main"

    def exercises(self) -> list[Exercise]:
        """Return the exercises of all lessons."""
        return [exercise for one in self.handouts for exercise in one.exercises]

    def wheel_for(self, grader: str) -> Path:
        """Return the wheel.

        Raises:
            LabError: none was given, or there is no such file.
        """
        if self.wheel is None:
            raise LabError(f"--for {grader} needs --wheel FILE, labkit's wheel, which `make wheel` builds")
        if not self.wheel.is_file():
            raise LabError(f"--wheel {self.wheel}: no such file; `make wheel` builds one in dist")
        return self.wheel

    def extras(self) -> str:
        """Return the extras of labkit that answers to these lessons need, such as "torch,hosted"."""
        tensorflow = any("_tf_" in one.name for one in self.handouts)
        return "torch,hosted,tf" if tensorflow else "torch,hosted"
