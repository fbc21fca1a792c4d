"""Warnings of a rank go to the notebook as such, so that what all ranks say can be shown once."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any, Final, TextIO

from labkit.ipc.tracebacks import warning

__all__ = ["RankWarnings"]

MOST: Final = 20  # different ones that a rank tells in a run
MOST_CHARACTERS: Final = 2_000


class RankWarnings:
    """Tells the notebook each warning when it is first raised in a run, and at the end how often it came again.

    Args:
        tell: what takes a warning's text, and how often it was raised, to the notebook.
    """

    def __init__(self, tell: Callable[[tuple[str, int]], None]) -> None:
        self._tell, self._rank_pid = tell, os.getpid()
        self._again: dict[str, int] = {}
        self._left_out = 0

    def install(self) -> None:
        """From now on this process shows its warnings so."""
        warnings.formatwarning = warning
        warnings.showwarning = self._show

    def end(self) -> None:
        """A run ends."""
        again, self._again = self._again, {}
        for text, count in again.items():
            if count:
                self._tell((text, count))
        if self._left_out:
            self._tell((f"... {self._left_out:,} other warnings left out ...", 1))
            self._left_out = 0

    def _show(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> Any:
        text = warnings.formatwarning(message, category, filename, lineno, line)[:MOST_CHARACTERS]
        if file is not None or os.getpid() != self._rank_pid:  # what the rank has forked is no rank
            file = file if file is not None else sys.stderr
            if file is not None:
                file.write(text)
        elif text in self._again:
            self._again[text] += 1
        elif len(self._again) >= MOST:
            self._left_out += 1
        else:
            self._again[text] = 0
            self._tell((text, 1))
