"""Connects an agent by the stdin and stdout of a command that starts it on its machine, such as `ssh` or `srun`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from labkit.errors.exceptions import LabError
from labkit.launch.machines.engines import Connection
from labkit.launch.machines.line import READ_BYTES


async def over_command(machine: str, command: Sequence[str], explain: Callable[[str, str, int], str]) -> Connection:
    """Return the connection to an agent that a command starts, with its stdin and stdout.

    Args:
        machine: the machine's name.
        command: the command, which ends when its stdin does.
        explain: returns, after its end, why it has ended, given the machine, what it wrote to stderr and its exit code.

    Raises:
        LabError: the command does not exist.
    """
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe, limit=READ_BYTES, start_new_session=True
        )
    except FileNotFoundError:
        raise LabError(f"this machine has no {command[0]}: it connects the machines. Install it.") from None
    assert process.stdin is not None
    assert process.stdout is not None
    said = asyncio.ensure_future(_tail(process.stderr))

    async def ended() -> str:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 1)
        if process.returncode is None:
            return ""
        with contextlib.suppress(TimeoutError):
            return explain(machine, await asyncio.wait_for(asyncio.shield(said), 1), process.returncode)
        return explain(machine, "", process.returncode)

    def close() -> None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()

    return Connection(machine, process.stdout, process.stdin, ended, close)


async def _tail(stream: asyncio.StreamReader | None) -> str:
    """Read all; return the end of it."""
    kept = b""
    while stream is not None and (data := await stream.read(1 << 12)):
        kept = (kept + data)[-(1 << 12) :]
    return kept.decode(errors="replace")
