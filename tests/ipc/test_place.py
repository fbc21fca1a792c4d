"""Where ranks are among the machines of their group."""

from __future__ import annotations

from made_up_machines import places

from labkit.ipc.options import LOOPBACK, Place


def test_on_the_notebooks_machine_ranks_are_alone() -> None:
    place = Place.here(2, 4)
    assert (place.local_rank, place.local_size, place.node, place.nodes) == (2, 4, 0, 1)
    assert not place.elsewhere
    assert place.listening == LOOPBACK


def test_ranks_of_several_machines_listen_for_each_other() -> None:
    one, two = places(["pc1", "pc2"])
    assert (one.elsewhere, two.elsewhere) == (True, True)
    assert (one.listening, two.listening) == ("127.0.0.2", "127.0.0.3")


def test_ranks_that_share_another_machine_listen_within_it() -> None:
    (place,) = places(["pc2"])
    assert place.elsewhere
    assert place.listening == LOOPBACK
