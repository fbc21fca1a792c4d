"""Whether machines can connect to one another, as their ranks will; otherwise gloo would wait for half an hour."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Final, Protocol

from labkit.errors.exceptions import LabError
from labkit.launch.machines.agent_requests import Connect, Connected, Listen, Listening, Reply, Request
from labkit.launch.machines.facts import Facts

LIMIT_S: Final = 6.0  # for a connection, which takes two round trips, the first one for the address of the network card
OPEN_S: Final = 10.0  # for which an agent listens


class Machine(Protocol):
    """A machine, as far as this file needs it."""

    name: str
    facts: Facts

    async def ask(self, request: Request) -> Reply:
        """Send its agent a request, and return the reply."""


async def check_reachability(machines: Sequence[Machine]) -> None:
    """In the relay: let each machine connect to each other one.

    Raises:
        LabError: one cannot.
    """
    listening = await asyncio.gather(*(machine.ask(Listen()) for machine in machines))
    ports = {m.name: reply.port for m, reply in zip(machines, listening, strict=True) if isinstance(reply, Listening)}
    targets = [(m.name, m.facts.address, ports[m.name]) for m in machines]
    replies = await asyncio.gather(*(m.ask(Connect([t for t in targets if t[0] != m.name])) for m in machines))
    failed = [
        f"{machine.name} cannot connect to {name} at {address} (port {port}): {why}"
        for machine, reply in zip(machines, replies, strict=True)
        if isinstance(reply, Connected)
        for name, address, port, why in reply.failed
    ]
    if failed:
        raise LabError(
            f"{'; '.join(failed)}. Ranks connect to one another at random ports: does a firewall stop that, or is this not the "
            "address at which the machines reach each other? The variable LABKIT_ADDRESS of a machine names another."
        )


async def listen_for_a_moment(address: str) -> int:
    """In an agent: accept connections for `OPEN_S`; return the port.

    Raises:
        OSError: it is no address of this machine.
    """
    server = await asyncio.start_server(lambda _, writer: writer.close(), address, 0)
    asyncio.get_running_loop().call_later(OPEN_S, server.close)
    port: int = server.sockets[0].getsockname()[1]
    return port


async def unreached(targets: Sequence[tuple[str, str, int]]) -> list[tuple[str, str, int, str]]:
    """In an agent: return the machines to which it cannot connect, and why.

    Args:
        targets: name, address and port of each.
    """

    async def problem(address: str, port: int) -> str:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(address, port), LIMIT_S)
        except TimeoutError:
            return f"no answer within {LIMIT_S:g} s"
        except OSError as error:
            return os.strerror(error.errno) if error.errno else str(error)
        writer.close()
        return ""

    problems = await asyncio.gather(*(problem(address, port) for _, address, port in targets))
    return [(*target, why) for target, why in zip(targets, problems, strict=True) if why]
