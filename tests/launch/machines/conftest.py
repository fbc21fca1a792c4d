"""Two machines, pc1 and pc2: agents on this one, which a stand-in for ssh starts, as `tests/helpers/fake_ssh.py` tells.

The clock of pc2 is an hour ahead and runs 20 µs/s fast.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ssh_server import SshServer, missing_for_ssh, ssh_server

import labkit as lab

ROOT = Path(__file__).resolve().parents[3]
HELPERS = ROOT / "tests" / "helpers"

SSH = """#!/bin/sh
exec {python} {helpers}/fake_ssh.py {homes} "$@"
"""
PYTHON = """#!/bin/sh
export PYTHONPATH={root}
case "$SSH_CONNECTION" in *127.0.0.3*) export GROUP_RANK=1 PYTHONPATH={root}:{helpers}/another_machine;; esac
exec {python} "$@"
"""


@pytest.fixture(scope="session")
def ssh_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Put the stand-in for ssh first in PATH; return the Python of the machines."""
    folder = tmp_path_factory.mktemp("ssh")
    for name, text in (("ssh", SSH), ("python", PYTHON)):
        script = folder / name
        script.write_text(text.format(python=sys.executable, helpers=HELPERS, homes=folder / "homes", root=ROOT))
        script.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        yield str(folder / "python")


@pytest.fixture(scope="session")
def two(ssh_python: str) -> lab.SSH:
    """Two machines."""
    return lab.SSH("pc1", "pc2", python=ssh_python)


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    """Return a real sshd on this machine, and the `ssh` that reaches it as pc1 and as pc2."""
    if reason := missing_for_ssh():
        pytest.skip(reason)
    with ssh_server(tmp_path_factory.mktemp("sshd")) as server:
        yield server
