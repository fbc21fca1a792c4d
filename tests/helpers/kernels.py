"""A real Jupyter kernel, and the messages that its cells have sent."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jupyter_client import BlockingKernelClient, KernelManager
from processes import GONE_LIMIT_S, below, left_after, shared

ROOT = Path(__file__).resolve().parents[2]
ANSWER_LIMIT_S = 200.0


class Cell:
    """The messages of one execution."""

    def __init__(self) -> None:
        self.stdout = self.stderr = ""
        self.displays: list[dict[str, Any]] = []  # the final states
        self.states: list[dict[str, Any]] = []  # all states in turn, of all displays
        self.result: str | None = None
        self.error: tuple[str, str, str] | None = None  # name, value, traceback as shown
        self._at: dict[str, int] = {}

    def take(self, message: dict[str, Any]) -> None:
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            setattr(self, content["name"], getattr(self, content["name"]) + content["text"])
        elif kind == "execute_result":
            self.result = content["data"]["text/plain"]
        elif kind == "error":
            self.error = content["ename"], content["evalue"], "\n".join(content["traceback"])
        elif kind in ("display_data", "update_display_data"):
            number = content["transient"].get("display_id", f"none {len(self.displays)}")
            if number not in self._at:
                self._at[number] = len(self.displays)
                self.displays.append({})
            self.displays[self._at[number]] = content["data"]
            self.states.append(content["data"])


class Kernel:
    """A kernel of this Python."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.manager = KernelManager()
        assert self.manager.kernel_spec is not None
        self.manager.kernel_spec.argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        path = {"PYTHONPATH": str(ROOT), "IPYTHONDIR": str(folder), "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}  # ipykernel warns about TCP
        self.manager.start_kernel(cwd=str(folder), env=os.environ | path | environment, **quiet)
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=ANSWER_LIMIT_S)

    def __call__(self, source: str, when: Callable[[Cell], bool] | None = None, then: Callable[[], None] | None = None) -> Cell:
        """Run a cell; as soon as `when` is true of its messages so far, call `then`."""
        # ipykernel 6 may skip a cell that follows an error at once.
        number = self.client.execute(textwrap.dedent(source), stop_on_error=False)
        cell = Cell()
        until = time.monotonic() + ANSWER_LIMIT_S
        while True:
            message = self.client.get_iopub_msg(timeout=max(0.1, until - time.monotonic()))
            if message["parent_header"].get("msg_id") != number:
                continue
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return cell
            cell.take(message)
            if when is not None and then is not None and when(cell):
                when = None
                then()

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.pid)  # type: ignore[union-attr]  # it has one while it runs

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()


@contextlib.contextmanager
def shared_kernel(folder: Path, **environment: str) -> Iterator[Kernel]:
    """A kernel for several tests, which has imported labkit. Afterwards nothing that it started is left."""
    kernel = Kernel(folder, **environment)
    shared.add(kernel.pid)
    try:
        yield kernel
    finally:
        started = {process.pid for process in below([kernel.pid])}
        shared.discard(kernel.pid)
        kernel.close()
    assert not left_after(GONE_LIMIT_S, started)
