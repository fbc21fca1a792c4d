"""Sends a rank's warnings to the notebook, which shows a warning of several ranks only once."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any, Final, TextIO

from labkit.ipc.protocol import Warned
from labkit.ipc.tracebacks import warning

MOST: Final = 20  # different warnings that a rank sends in a run
MOST_CHARACTERS: Final = 2_000


class RankWarnings:
    """Sends each warning to the notebook when it is first issued in a run, and at the end the number of repetitions."""

    def __init__(self, send: Callable[[Warned], None]) -> None:
        self._send, self._rank_pid = send, os.getpid()
        self._repetitions: dict[str, int] = {}
        self._left_out = 0

    def install(self) -> None:
        """Replace the function with which this process shows warnings."""
        warnings.formatwarning = warning
        warnings.showwarning = self._show

    def end(self) -> None:
        """Send the numbers of repetitions at the end of a run."""
        repetitions, self._repetitions = self._repetitions, {}
        for text, count in repetitions.items():
            if count:
                self._send(Warned(text, count))
        if self._left_out:
            self._send(Warned(f"... {self._left_out:,} other warnings left out ...", 1))
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
        if file is not None or os.getpid() != self._rank_pid:  # processes that the rank has forked are no ranks
            file = file if file is not None else sys.stderr
            if file is not None:
                file.write(text)
        elif text in self._repetitions:
            self._repetitions[text] += 1
        elif len(self._repetitions) >= MOST:
            self._left_out += 1
        else:
            self._repetitions[text] = 0
            self._send(Warned(text, 1))
