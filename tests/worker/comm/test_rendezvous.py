"""Which addresses belong to the group's machines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from labkit.recording.record import Recorder
from labkit.worker.comm.rendezvous import Rendezvous


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
def test_programs_meet_at_addresses_of_the_groups_machines(machines: tuple[str, ...], where: str, here: bool) -> None:
    ring: Any = SimpleNamespace()
    assert Rendezvous(Recorder(ring, 0, 2), None, machines)._is_here(where) is here
