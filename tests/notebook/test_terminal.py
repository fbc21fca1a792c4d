"""In a terminal: the plain interpreter and IPython, with typed input through a pseudo-terminal."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from doings import computing, returned

pytestmark = pytest.mark.processes

pexpect = pytest.importorskip("pexpect", reason="pexpect is not installed: IPython brings it")

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 200
SHELLS = {
    "python": (["-q", "-i"], r">>> "),
    "IPython": (["-m", "IPython", "--simple-prompt", "--no-banner", "--colors=NoColor"], r"In \[\d+\]: "),
}
TYPED = (
    "import os; import labkit as lab",
    "group = lab.Group(2, runtime='bare')",
    "f = lambda: 1 // int(os.environ['RANK'])",
    "group.run(f)",
    "group.run(lambda: int(os.environ['RANK'])).results",
)


@pytest.mark.parametrize("shell", SHELLS)
def test_an_error_is_shown_once_and_the_next_line_works(shell: str, tmp_path: Path) -> None:
    arguments, prompt = SHELLS[shell]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path), "TERM": "dumb"}
    terminal = pexpect.spawn(sys.executable, arguments, env=environment, encoding="utf-8", timeout=LIMIT_S, dimensions=(60, 140))
    try:
        terminal.expect(prompt)
        said = []
        for line in TYPED:
            terminal.sendline(line)
            terminal.expect(prompt)
            said.append(terminal.before)
        error, result = said[-2:]
    finally:
        # `close(force=True)` alone raises an error if the process has not ended a tenth of a second after the signal.
        terminal.kill(signal.SIGKILL)
        terminal.wait()
        terminal.close()
    assert error.count("ZeroDivisionError: integer division or modulo by zero") == 2, "in the headline, and below the traceback"
    assert error.count("rank 0 failed") == 1
    # A rank that is late by more than a tenth of a second is reported as computing.
    assert (returned("rank 1") in error) != (computing("rank 1") in error)
    assert error.count('File "') <= 3, "no wall of frames: the line typed, and that of the function"
    assert "[0, 1]" in result
