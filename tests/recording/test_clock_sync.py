"""How the clocks of two machines are compared: with simulated clocks and delays, and once through a socket."""

import random
import time

import numpy as np
import pytest

from labkit.recording.clock_sync import ClockServer, Reading, ask, bounds, machine, on_reference

SECRET = b"0123456789abcdef"
SEEDS = range(200)


def test_the_true_offset_is_within_the_bounds_for_any_delays() -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        truth, now = rng.randrange(-(10**15), 10**15), rng.randrange(10**15)
        exchanges, quickest = [], 10**18
        for _ in range(rng.randrange(1, 20)):
            there, back = (rng.choice([100, 20_000, 5_000_000]) + rng.randrange(10_000) for _ in range(2))
            exchanges.append((now, now + there + truth, now + there + back))
            quickest = min(quickest, there + back)
            now += there + back + rng.randrange(10_000)
        reading = bounds(exchanges)
        assert abs(reading.offset_ns - truth) <= reading.within_ns, seed
        assert reading.within_ns <= (quickest + 1) // 2, "several exchanges tell at least as much as the quickest alone"
        assert reading.at_ns == exchanges[-1][2]


def test_several_exchanges_bound_the_offset_from_both_sides() -> None:
    # Once the request took all the time, once the reply: together they fix the offset.
    assert bounds([(0, 1000, 1000), (2000, 2000, 3000)]) == Reading(3000, 0, 0)
    assert bounds([(0, 1000, 1000)]) == Reading(1000, 500, 500)


def test_after_a_clock_was_set_the_quickest_exchange_counts() -> None:
    assert bounds([(0, 50, 100), (200, 1_000_205, 210)]) == Reading(210, 1_000_000, 5)


def test_a_clock_is_read_through_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labkit.recording.clock_sync.LIMIT_S", 60.0)
    ahead_ns = 3_600 * 10**9
    server = ClockServer("127.0.0.1", SECRET, lambda: time.perf_counter_ns() + ahead_ns)
    try:
        reading = ask(["127.0.0.1"], server.port, SECRET)
        assert reading is not None
        assert abs(reading.offset_ns - ahead_ns) <= reading.within_ns
        assert ask(["127.0.0.1"], server.port, b"wrong"[:1] * 16) is None, "it answers only who knows the secret"
    finally:
        server.close()
    assert ask(["127.0.0.1"], server.port, SECRET) is None, "nobody there"


def test_drift_is_removed() -> None:
    began, rate = 10**15, 1 + 40e-6  # a clock that is an hour ahead and 40 µs a second too fast

    def theirs(true_ns: int) -> int:
        return 3_600 * 10**9 + began + round((true_ns - began) * rate)

    readings = [Reading(theirs(t), t - theirs(t), 0) for t in (began, began + 10**9, began + 60 * 10**9)]
    true = np.array([began - 10**9, began, began + 5 * 10**8, began + 30 * 10**9, began + 90 * 10**9])
    found = on_reference(np.array([theirs(int(t)) for t in true]), readings)
    assert np.abs(found - true).max() < 100  # ns; without drift the last would be 1.2 ms off
    assert on_reference(np.array([5]), readings[:1])[0] == 5 + readings[0].offset_ns


def test_all_processes_of_a_machine_use_one_name_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = machine()
    assert mine == machine()
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    assert machine() != mine
