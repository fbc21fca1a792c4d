"""Clocks of two machines are compared, and times converted: with simulated clocks, and once through a socket."""

import random
import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from labkit.recording.clock import DRIFT_PPM, Clock, ClockServer, Reading, ask, bounds, machine, on_reference

S, MS, US = 10**9, 10**6, 10**3
HOUR = 3_600 * S
BEGAN = 10**15
STEPPED = BEGAN + 5 * S
STEP = 300 * MS  # more than any reading is uncertain: a smaller step may go unnoticed

Delay = Callable[[random.Random], int]

CLOCKS: dict[str, Callable[[int], int]] = {
    "the same": lambda t: t,
    "an hour ahead": lambda t: t + HOUR,
    "an hour behind": lambda t: t - HOUR,
    "20 µs/s fast": lambda t: HOUR + BEGAN + (t - BEGAN) * 1_000_020 // 1_000_000,
    "400 ppm fast": lambda t: BEGAN + (t - BEGAN) * 1_000_400 // 1_000_000,
    "400 ppm slow": lambda t: BEGAN + (t - BEGAN) * 999_600 // 1_000_000,
    "now fast, now slow": lambda t: t + round(0.0004 * abs((t - BEGAN) % (4 * S) - 2 * S)),
    "jumps ahead": lambda t: t + STEP * (t >= STEPPED),
    "stops for a while": lambda t: t if t < STEPPED else max(STEPPED, t - STEP),
}
DELAYS: dict[str, tuple[Delay, Delay]] = {
    "quick": (lambda r: 30 * US + r.randrange(60 * US), lambda r: 30 * US + r.randrange(60 * US)),
    "sometimes slow": (lambda r: r.choice([50 * US, 5 * MS]), lambda r: r.choice([50 * US, 2 * MS])),
    "asymmetric": (lambda r: 4 * MS + r.randrange(MS), lambda r: 100 * US + r.randrange(50 * US)),
    "20 ms with jitter": (lambda r: 20 * MS + r.randrange(15 * MS), lambda r: 20 * MS + r.randrange(15 * MS)),
}


@pytest.mark.parametrize("delays", DELAYS)
@pytest.mark.parametrize("name", CLOCKS)
def test_the_error_is_within_the_bound_and_order_is_kept(name: str, delays: str) -> None:
    there_at, (forth, back) = CLOCKS[name], DELAYS[delays]
    steps = name in ("jumps ahead", "stops for a while")
    for seed in range(3):
        rng, clock = random.Random(seed), Clock()
        now, converted, read_ns = BEGAN, {}, 0
        while now < BEGAN + 12 * S:
            sent = now
            read_ns = sent + forth(rng)
            if name == "stops for a while" and STEPPED <= read_ns < STEPPED + STEP:
                read_ns = STEPPED + STEP  # a machine that stands still does not answer
            now = read_ns + back(rng)
            clock.read(sent, there_at(read_ns), now)
            until = now + rng.choice([MS, 50 * MS, 150 * MS, 600 * MS])
            while now < until:
                now += rng.randrange(40 * MS)
                events = [now - rng.randrange(200 * MS) for _ in range(3)] + [now]
                for at in events:
                    there = there_at(at)
                    here = clock.here(there)
                    assert converted.setdefault(there, here) == here, "it was converted differently before"
                    # That a clock was set is known from the next reading that lies after it as a whole.
                    known = at >= read_ns and not (steps and at >= STEPPED and sent < STEPPED + STEP)
                    if known:  # to one nanosecond, since clocks show whole ones
                        assert abs(here - at) <= clock.error_ns + max(now - sent, 0) * DRIFT_PPM / 1e6 + 1, (seed, at - BEGAN)
        pairs = sorted(converted.items())
        for (there, here), (later_there, later_here) in pairwise(pairs):
            assert later_here >= here
            # Also continuous: nowhere steeper than 1.5.
            assert abs((later_here - here) - (later_there - there)) <= (later_there - there) / 2 + 1
        slowest = 80 * MS if delays == "20 ms with jitter" else 10 * MS if delays != "quick" else 500 * US
        assert clock.error_ns < slowest, "also after a step, the bound is that of the readings again"
        theres = np.array([there for there, _ in pairs])
        rng.shuffle(theres)
        assert clock.here_all(theres).tolist() == [converted[there] for there in theres.tolist()]


def test_without_readings_it_is_this_processs_clock() -> None:
    clock = Clock()
    assert [clock.here(t) for t in (0, 5, BEGAN)] == [0, 5, BEGAN]
    assert clock.here_all(np.array([3, 0, BEGAN])).tolist() == [3, 0, BEGAN]
    assert clock.error_ns == 0
    clock.read(BEGAN, BEGAN + HOUR, BEGAN)
    assert clock.here(BEGAN + HOUR) == BEGAN, "what was converted without readings does not bind it"


def test_one_reading_bounds_the_error_by_half_of_what_it_took() -> None:
    clock = Clock()
    clock.read(BEGAN, BEGAN + HOUR + 70 * US, BEGAN + 100 * US)
    assert clock.here(BEGAN + HOUR + 70 * US) == BEGAN + 50 * US
    assert clock.error_ns == 50 * US


def test_several_readings_bound_the_error_more_tightly_than_the_quickest() -> None:
    clock = Clock()
    clock.read(BEGAN, BEGAN + 1000 * US, BEGAN + 1000 * US)  # the question took all the time
    clock.read(BEGAN + 2000 * US, BEGAN + 2000 * US, BEGAN + 3000 * US)  # the answer did
    assert clock.error_ns <= US


def test_it_jumps_only_while_nothing_was_converted() -> None:
    clock = Clock()
    clock.read(BEGAN, BEGAN + HOUR, BEGAN + 10 * MS)
    clock.read(BEGAN + S, BEGAN + S + HOUR - 9 * MS, BEGAN + S + 10 * US - 8 * MS)
    before = BEGAN + HOUR + 2 * S
    jumped = clock.here(before)
    clock.read(before - HOUR, before + 4 * MS, before - HOUR + 10 * US)
    assert clock.here(before) == jumped
    assert clock.here(before + 1) - jumped in (0, 1)
    later = before + 20 * MS
    assert abs(clock.here(later) - (later - HOUR - 4 * MS)) <= 5 * US + 1, "it has arrived at the new offset"


def test_a_small_deviation_adds_no_piece_to_the_line() -> None:
    clock = Clock()
    for i in range(1000):
        now = BEGAN + i * MS
        clock.read(now, now + HOUR + 50 * US + i % 3 * US, now + 100 * US)
        clock.here(now + HOUR)
    assert len(clock._times) == 1


def test_between_readings_the_offset_is_interpolated() -> None:
    clock = Clock()
    clock.read(BEGAN, BEGAN, BEGAN)
    clock.here(BEGAN)
    clock.read(BEGAN + S + 400 * US, BEGAN + S, BEGAN + S + 400 * US)
    assert [clock.here(BEGAN + t) - BEGAN - t for t in (S, S // 2, S // 4)] == [400 * US, 200 * US, 100 * US]


def test_a_line_that_leads_elsewhere_is_changed_in_front_of_what_was_converted() -> None:
    for convert_before in (False, True):
        clock = Clock()
        clock.read(BEGAN, BEGAN, BEGAN)
        clock.here(BEGAN)
        clock.read(BEGAN + 11 * MS, BEGAN + MS, BEGAN + 11 * MS)  # 10 ms off: the line arrives there after 20 ms
        later = BEGAN + 20 * MS
        if convert_before:
            clock.here(later)
        clock.read(BEGAN, BEGAN, BEGAN)
        assert clock.here(later) - later == (10 * MS if convert_before else 0)
        assert clock.error_ns == (10 * MS if convert_before else 0), "until the line is right again"


SECRET = b"0123456789abcdef"
SEEDS_OF_BOUNDS = range(200)


def test_the_true_offset_is_within_the_bounds_for_any_delays() -> None:
    for seed in SEEDS_OF_BOUNDS:
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
    monkeypatch.setattr("labkit.recording.clock.COMPARE_LIMIT_S", 60.0)
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
