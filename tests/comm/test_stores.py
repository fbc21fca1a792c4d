"""Which stores are the group's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from labkit.comm.rendezvous import Rendezvous
from labkit.comm.stores import Stores
from labkit.recording.record import Recorder


@pytest.fixture
def recorder() -> Recorder:
    ring: Any = SimpleNamespace()
    return Recorder(ring, 0, 2)


@pytest.mark.parametrize(
    ("own", "address", "same"),
    [
        (("127.0.0.1", 4000), ("localhost", 4000), True),
        (("127.0.0.1", 4000), ("127.0.0.1", 4000), True),
        (("127.0.0.1", 4000), ("127.0.0.1", 4001), False),
        (("10.0.0.1", 4000), ("10.0.0.1", 4000), True),
        (("10.0.0.1", 4000), ("10.0.0.2", 4000), False),
        (("10.0.0.1", 4000), ("localhost", 4000), False),
        (None, ("localhost", 4000), False),
    ],
)
def test_a_store_is_known_by_address_and_port(
    recorder: Recorder, own: tuple[str, int] | None, address: tuple[str, int], same: bool
) -> None:
    assert Stores(recorder, Rendezvous(recorder, 0), own)._is_own(*address) is same


@pytest.mark.parametrize(
    ("machines", "where", "here"),
    [
        ((), "localhost:1", True),
        ((), "127.0.0.3:1", True),
        ((), "192.0.2.1:1", False),
        (("pc1", "10.0.0.1"), "localhost:1", True),
        (("pc1", "10.0.0.1"), "pc1:1", True),
        (("pc1", "10.0.0.1"), "10.0.0.1:1", True),
        (("pc1", "10.0.0.1"), "10.0.0.2:1", False),
        (("pc1", "10.0.0.1"), "127.0.0.3:1", False),  # which each machine could bind
    ],
)
def test_programs_meet_at_addresses_of_the_groups_machines(
    recorder: Recorder, machines: tuple[str, ...], where: str, here: bool
) -> None:
    assert Rendezvous(recorder, 0, None, machines)._is_here(where) is here
