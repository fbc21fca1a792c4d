"""Which pairs of machines cannot connect: sockets of this one; two machines in `test_namespaces.py` beside it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from labkit.errors.exceptions import LabError
from labkit.launch.machines import agent
from labkit.launch.machines.agent import listen_for_a_moment, unreached
from labkit.launch.machines.facts import Connect, Listen
from labkit.launch.machines.relay import check_reachability


class Machine:
    """A machine that cannot connect to some others."""

    def __init__(self, number: int, fails: Sequence[str] = ()) -> None:
        self.name, self.facts = f"pc{number}", SimpleNamespace(address=f"10.0.0.{number}")
        self._port, self._fails, self.asked = 40_000 + number, fails, list[Any]()

    async def ask(self, request: Any) -> Any:
        self.asked.append(request)
        if isinstance(request, Listen):
            return self._port
        return [(*target, "no answer within 3 s") for target in request.targets if target[0] in self._fails]


def check(*machines: Any) -> None:
    asyncio.run(check_reachability(machines))


def test_each_machine_connects_once_to_each_other_one() -> None:
    machines = [Machine(number) for number in (1, 2, 3)]
    check(*machines)
    assert [m.asked[0] for m in machines] == [Listen()] * 3
    assert machines[1].asked[1:] == [Connect([("pc1", "10.0.0.1", 40_001), ("pc3", "10.0.0.3", 40_003)])]


def test_the_pair_is_named() -> None:
    with pytest.raises(LabError) as caught:
        check(Machine(1, ["pc3"]), Machine(2, ["pc1"]), Machine(3))
    said = str(caught.value)
    assert "pc1 cannot connect to pc3 at 10.0.0.3 (port 40003): no answer within 3 s" in said
    assert "pc2 cannot connect to pc1 at 10.0.0.1 (port 40001)" in said
    assert said.count("cannot connect") == 2
    assert "random ports" in said
    assert "firewall" in said


def test_what_an_agent_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """It listens for a moment, reaches who listens, and says why it does not reach others."""
    monkeypatch.setattr(agent, "OPEN_S", 0.3)
    monkeypatch.setattr(agent, "CONNECT_S", 0.2)

    async def f() -> list[tuple[str, str, int, str]]:
        with contextlib.ExitStack() as stack:
            full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))  # what a firewall drops, too
            name = full.getsockname()
            for _ in range(3):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(name)
            port = await listen_for_a_moment("127.0.0.1")
            found = await unreached([("open", "127.0.0.1", port), ("silent", *name)])
            await asyncio.sleep(0.5)
            return found + await unreached([("closed", "127.0.0.1", port)])

    silent, closed = asyncio.run(f())
    assert (silent[0], silent[3]) == ("silent", "no answer within 0.2 s")
    assert (closed[0], closed[3]) == ("closed", "Connection refused")
