"""`SSH`: machines that `ssh` reaches without a password; no port opens, since stdin and stdout are the connection."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Final

from labkit.errors.exceptions import LabError
from labkit.errors.lists import counted
from labkit.errors.wrong_calls import public_api
from labkit.launch.machines.command import over_command
from labkit.launch.machines.engines import AGENT, Connection, Engine

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
        return await over_command(machine, ["ssh", *OPTIONS, "--", machine, command], self._explain)

    def _explain(self, machine: str, said: str, code: int) -> str:
        said = said.strip().splitlines()[-1] if said.strip() else f"ssh ended with exit code {code}"
        hint = next((text for sign, text in _HINTS.items() if sign in said), "")
        return f"{said.rstrip('.')}. {hint.format(name=machine, python=self.python)}".strip()
