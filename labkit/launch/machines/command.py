"""`SSH` and `Slurm`: a command starts the agent on a machine, and connects it by stdin and stdout: no port opens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final

from labkit.errors.exceptions import LabError
from labkit.errors.lists import counted
from labkit.errors.wrong_calls import public_api
from labkit.launch.machines.engines import AGENT, Connection, Engine
from labkit.launch.machines.line import READ_BYTES

CONNECT_S: Final = 10  # for ssh to connect
OPTIONS: Final = ("-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}")
_HINTS: Final = {
    "Permission denied": "Set up a key, so that `ssh {name} true` works without a password (ssh-keygen, ssh-copy-id {name}).",
    "Host key verification failed": "Connect once by hand, `ssh {name}`, and confirm the key of that machine.",
    "Could not resolve": "Is the name right? `ssh {name} true` must work in a terminal.",
    "No module named": "labkit must be installed there, in {python}; name another Python with python=...",
    "No such file": "There is no {python} there: name that machine's Python with python=...",
    "not found": "There is no {python} there: name that machine's Python with python=...",
}
QUEUE_S: Final = 7 * 86400.0  # a job may wait for days; Stop ends that
# Each agent gets all that the job has on its node: cores, memory, GPUs; its ranks share these.
STEP: Final = "--overlap --nodes=1 --ntasks=1 --cpu-bind=none --mem=0 --unbuffered --kill-on-bad-exit=0 --export=ALL"
# A job that labkit asks for, queued or running, ends when the guard's stdin does: when the relay ends, however it does.
# Not by a signal to `salloc`: one that has its nodes may then run on for ever, without a job.
GUARD: Final = 'cat; exec scancel --quiet --name="$1"'


class SSH(Engine):
    """Machines that `ssh` reaches without a password.

    Args:
        machines: their names, as for `ssh`; the ranks are spread evenly, the first ones on the first machine. Or one
            dict of names and numbers of ranks.
        python: the path of Python on the machines; default: the notebook's.

    Example:
        `lab.Group(4, on=lab.SSH("pc1", "pc2"))` has ranks 0 and 1 on pc1, and 2 and 3 on pc2.
    """

    @public_api
    def __init__(self, *machines: str | Mapping[str, int], python: str | None = None) -> None:
        counts: Mapping[str, int] = {}
        if len(machines) == 1 and isinstance(machines[0], Mapping):
            counts, machines = machines[0], tuple(machines[0])
        if not machines or not all(isinstance(m, str) and m and not m.startswith("-") for m in machines):
            raise ValueError(f"SSH{machines!r}: expected names of machines, as in lab.SSH('pc1', 'pc2') or lab.SSH({{'pc1': 3}})")
        if len(set(machines)) < len(machines):
            raise ValueError(f"SSH{machines!r}: each machine can be given once; for numbers of ranks: lab.SSH({{'pc1': 3}})")
        if not all(isinstance(n, int) and n > 0 for n in counts.values()):
            raise ValueError(f"SSH({dict(counts)!r}): expected a number of ranks above 0 for each machine")
        self.names = tuple(map(str, machines))
        self.ranks, self.python = tuple(counts.values()), python or sys.executable

    @property
    def key(self) -> Hashable:
        """See `Engine`."""
        return self.names, self.ranks, self.python

    def __repr__(self) -> str:
        python = "" if self.python == sys.executable else f", python={self.python!r}"
        names = repr(dict(zip(self.names, self.ranks, strict=True))) if self.ranks else ", ".join(map(repr, self.names))
        return f"SSH({names}{python})"

    def check(self, ranks: int) -> None:
        """See `Engine`."""
        if self.ranks and sum(self.ranks) != ranks:
            raise ValueError(f"{self} has places for {counted(sum(self.ranks), 'rank')}, and the group {ranks}")

    def counts(self, ranks: int, machines: Sequence[str]) -> list[int]:
        """See `Engine`."""
        if not self.ranks:
            return super().counts(ranks, machines)
        places = dict(zip(self.names, self.ranks, strict=True))
        counts = [places[machine] for machine in machines]
        if sum(counts) < ranks:
            raise LabError(f"{', '.join(machines)} has places for {counted(sum(counts), 'rank')} of {ranks}")
        return counts

    async def machines(self, say: Callable[[str], None]) -> Sequence[str]:
        """See `Engine`."""
        say(f"connecting to {', '.join(self.names)}")
        return self.names

    async def connect(self, machine: str, limit_s: float) -> Connection:  # noqa: ARG002  # the command is killed
        """See `Engine`."""
        command = f"exec {shlex.quote(self.python)} -u -m {AGENT}"
        hints = {sign: text.format(name=machine, python=self.python) for sign, text in _HINTS.items()}
        return await over_command(["ssh", *OPTIONS, "--", machine, command], hints)


class Slurm(Engine):
    """The nodes of a Slurm allocation; or of a job that labkit asks for, which ends with the notebook's process.

    Args:
        nodes: the number of nodes to ask for; None: those of the allocation in which the notebook runs.
        gpus_per_node, partition, time: what else to ask for, as for `salloc`.
        options: more options of `salloc`, such as "--account=physics".
        python: the path of Python on the nodes; default: the notebook's.

    Examples:
        `lab.Slurm()` in a JupyterLab inside an allocation; on a login node
        `lab.Slurm(nodes=4, gpus_per_node=4, partition="gpu", time="1:00:00")`.
    """

    ready_limit_s = QUEUE_S

    @public_api
    def __init__(
        self,
        nodes: int | None = None,
        *,
        gpus_per_node: int | None = None,
        partition: str | None = None,
        time: str | None = None,
        options: Sequence[str] = (),
        python: str | None = None,
    ) -> None:
        asked = {"nodes": nodes, "gpus-per-node": gpus_per_node, "partition": partition, "time": time}
        if nodes is None and (options or any(value is not None for value in asked.values())):
            raise ValueError("Slurm(...): expected nodes=..., the number of nodes to ask for, with the other options")
        if nodes is not None and (not isinstance(nodes, int) or nodes < 1):
            raise ValueError(f"Slurm(nodes={nodes!r}): expected a number of nodes above 0")
        self._asked = (*(f"--{name}={value}" for name, value in asked.items() if value is not None), *options)
        self._python = python or sys.executable
        self._allocation = "" if nodes is not None else os.environ.get("SLURM_JOB_ID", "")
        self._job = self._allocation
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def key(self) -> Hashable:
        """See `Engine`."""
        return self._asked, self._python, self._allocation

    def __repr__(self) -> str:
        return f"Slurm({', '.join(self._asked).replace('--', '')})"

    async def machines(self, say: Callable[[str], None]) -> Sequence[str]:
        """See `Engine`."""
        nodes = os.environ.get("SLURM_JOB_NODELIST", "")
        if self._asked:
            say("Slurm has not given the nodes yet; squeue --me tells why")
            nodes = await self._ask_for_nodes()
        elif not self._allocation:
            raise LabError(
                "lab.Slurm(): this notebook does not run inside an allocation of Slurm. Start JupyterLab in one (salloc, "
                "sbatch), or say what to ask for: lab.Slurm(nodes=2, time='1:00:00')"
            )
        listed = await _output("scontrol", "show", "hostnames", nodes)
        return listed.split()

    async def _ask_for_nodes(self) -> str:
        if shutil.which("salloc") is None:
            raise LabError("there is no salloc here: this is no machine of a cluster with Slurm")
        name = f"labkit-{os.getpid()}-{secrets.token_hex(4)}"
        self._guard = subprocess.Popen(["sh", "-c", GUARD, "sh", name], stdin=subprocess.PIPE, start_new_session=True)  # noqa: ASYNC220
        command = ["salloc", "--no-shell", f"--job-name={name}", *self._asked]
        said = (await (await _started(*command, stderr=asyncio.subprocess.PIPE)).communicate())[1].decode(errors="replace")
        granted = re.search(r"Granted job allocation (\d+)", said)
        if granted is None:
            raise LabError(f"Slurm gives no nodes: {said.strip().splitlines()[-1] if said.strip() else 'salloc ended'}")
        self._job = granted[1]
        return (await _output("squeue", "--noheader", f"--jobs={self._job}", "--format=%N")).strip()

    async def connect(self, machine: str, limit_s: float) -> Connection:  # noqa: ARG002  # the command is killed
        """See `Engine`."""
        os.environ.pop("SLURM_EXACT", None)  # of the notebook's own job step: the agent would get one core
        command = ["srun", f"--jobid={self._job}", *STEP.split(), f"--nodelist={machine}", self._python, "-u", "-m", AGENT]
        return await over_command(command, {})


async def _started(*command: str, **streams: Any) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(*command, **streams, start_new_session=True)
    except FileNotFoundError:
        raise LabError(f"there is no {command[0]} here: this is no machine of a cluster with Slurm") from None


async def _output(*command: str) -> str:
    process = await _started(*command, stdout=asyncio.subprocess.PIPE)
    return (await process.communicate())[0].decode()


async def over_command(command: Sequence[str], hints: Mapping[str, str]) -> Connection:
    """Return the connection to an agent that a command starts, and that ends when its stdin does.

    After the end, the connection says the last line of stderr, and the hint whose sign that contains.
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
        text = ""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 1)
            text = await asyncio.wait_for(asyncio.shield(said), 1)
        if process.returncode is None:
            return ""
        last = text.strip().splitlines()[-1] if text.strip() else f"{command[0]} ended with exit code {process.returncode}"
        hint = next((hint for sign, hint in hints.items() if sign in last), "")
        return f"{last.rstrip('.')}. {hint}".strip()

    def close() -> None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()

    return Connection(process.stdout, process.stdin, ended, close)


async def _tail(stream: asyncio.StreamReader | None) -> str:
    kept = b""
    while stream is not None and (data := await stream.read(1 << 12)):
        kept = (kept + data)[-(1 << 12) :]
    return kept.decode(errors="replace")
