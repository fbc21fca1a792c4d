"""Which faults are drawn."""

from __future__ import annotations

from bench.chaos.faults import FAULTS, RUNTIMES, Round


def test_a_round_is_drawn_from_its_seed_and_number() -> None:
    of = Round.of
    assert of(7, 3) == of(7, 3)
    drawn = [of(7, number) for number in range(300)]
    here = {name for name, fault in FAULTS.items() if not fault.machines}
    assert {turn.fault for turn in drawn} == here, "300 rounds meet every fault of one machine"
    assert {of(7, number, 2).fault for number in range(300)} == set(FAULTS), "and with two machines, every fault"
    assert {turn.runtime for turn in drawn} == set(RUNTIMES)
    assert {turn.start for turn in drawn} == {"fork", "spawn"}
    assert {turn.fault for turn in drawn} != {turn.fault for turn in map(of, [8] * 30, range(30))}
