"""A real ipykernel, driven as JupyterLab does: every tool is measured from cells, as a student would use it."""

from __future__ import annotations

import ast
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self

import psutil
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

ROOT: Final = Path(__file__).resolve().parents[1]
LIMIT_S: Final = 300.0


class Kernel:
    """One kernel of this Python and its client."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._manager = KernelManager()
        assert self._manager.kernel_spec is not None
        self._manager.kernel_spec.argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))  # also for processes of Ray
        variables = os.environ | {"IPYTHONDIR": self._folder.name, "PYTHONPATH": path}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}  # ipykernel warns about TCP
        self._manager.start_kernel(cwd=str(ROOT), env=variables, **quiet)
        self.client: BlockingKernelClient = self._manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(LIMIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        provisioner: Any = self._manager.provisioner
        started = psutil.Process(provisioner.pid).children(recursive=True)
        self.client.stop_channels()
        self._manager.shutdown_kernel()
        for process in started:  # leftovers of a tool; psutil ends no process whose number was reused
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._folder.cleanup()

    def run(self, source: str, *, value: str = "None") -> Any:
        """Run a cell, wait for it, and return the value of an expression afterwards.

        Raises:
            RuntimeError: the cell failed, or took too long.
        """
        try:
            reply = self.client.execute_interactive(
                source, user_expressions={"value": value}, timeout=LIMIT_S, output_hook=lambda _: None, allow_stdin=False
            )["content"]
        except TimeoutError:
            raise RuntimeError(f"{source or value} did not end within {LIMIT_S:.0f} s") from None
        answer = reply.get("user_expressions", {}).get("value", reply)
        if reply["status"] != "ok" or answer["status"] != "ok":
            problem = reply if reply["status"] != "ok" else answer
            raise RuntimeError("\n".join(problem.get("traceback") or [str(problem)]))
        return ast.literal_eval(answer["data"]["text/plain"])

    def begin(self, source: str) -> str:
        """Send a cell without waiting; returns its number for `until`."""
        return str(self.client.execute(source, allow_stdin=False))

    def until(self, cell: str, wanted: Callable[[str, dict[str, Any]], bool]) -> int:
        """Wait for a message of a cell that `begin` began; returns its arrival time, in ns of `time.perf_counter_ns`.

        Args:
            cell: the cell's number.
            wanted: whether a message of that type and content is the one.

        Raises:
            TimeoutError: it did not arrive.
        """
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            message = self.client.get_iopub_msg(timeout=LIMIT_S)
            now_ns = time.perf_counter_ns()
            if message["parent_header"].get("msg_id") == cell and wanted(message["msg_type"], message["content"]):
                return now_ns
        raise TimeoutError(f"the kernel did not say what was waited for within {LIMIT_S:.0f} s")

    def interrupt(self) -> None:
        """What the Stop button does."""
        self._manager.interrupt_kernel()
