"""Copies of a ring, as on another machine: complete and equal at any moment, with times on this machine's clock."""

import mmap
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from labkit.recording import ring_buffer
from labkit.recording.clock import Clock
from labkit.recording.ring_buffer import CAPACITY, RECORD_BYTES, RING_BYTES, RingReader, RingWriter, record_dtype
from labkit.recording.ring_copy import TOGETHER, RingCopy, RingTap
from labkit.recording.schema import COMPUTE, CPU, FIELDS, OPEN, PENDING_FIELDS, SCALAR, STEP, Pending

AHEAD_NS = 3_600 * 10**9
NOW = 10**15
ALL = 1 << 30  # a limit that nothing reaches


class Copied:
    """A rank's ring and its copy; the rank's clock is `AHEAD_NS` ahead."""

    def __init__(self) -> None:
        memory, copied = mmap.mmap(-1, RING_BYTES), mmap.mmap(-1, RING_BYTES)
        self.writer, self.original, self.tap = RingWriter(memory), RingReader(memory), RingTap(memory)
        self.clock = Clock()
        self.clock.read(NOW, NOW + AHEAD_NS, NOW)
        self.copy, self.reader = RingCopy(copied, self.clock), RingReader(copied)

    def send(self, limit_bytes: int = ALL) -> int:
        news = self.tap.news(limit_bytes)
        if news:
            self.copy.apply(news)
        return len(news)

    def send_all(self, limit_bytes: int = ALL) -> None:
        while self.send(limit_bytes):
            pass

    def missing(self, known: dict[int, str], recorded: set[int]) -> set[int]:
        """Return the operations that the copy has shown, but shows no more; their `match` identifies them."""
        pending = {p.match: p.name for p in self.reader.pending()}
        rows = self.reader.read()
        names = self.reader.names()
        records = {int(row["match"]): names[row["name"]] for row in rows}
        recorded.update(records)
        known |= pending | records
        return known.keys() - pending.keys() - recorded


@pytest.fixture
def copied() -> Copied:
    return Copied()


def shifted(rows: Any) -> Any:
    rows = rows.copy()
    for field in FIELDS:
        if field.is_time:
            rows[field.name][rows[field.name] != 0] -= AHEAD_NS
    return rows


def shifted_pending(operations: list[Pending]) -> list[dict[str, Any]]:
    return [
        {f.name: value - AHEAD_NS if f.is_time and (value := getattr(p, f.name)) else getattr(p, f.name) for f in PENDING_FIELDS}
        | {"thread": p.thread}
        for p in operations
    ]


def as_given(operations: list[Pending]) -> list[dict[str, Any]]:
    return [{f.name: getattr(p, f.name) for f in PENDING_FIELDS} | {"thread": p.thread} for p in operations]


def write_anything(writer: RingWriter, rng: random.Random, number: int, slots: dict[int, int]) -> None:
    """Record something with a number of its own; `slots`: those of the pending operations, by their number."""
    now = AHEAD_NS + NOW + number * 1000
    name, line = f"name {rng.randrange(300)}", rng.choice(["", f"cell 1, line {rng.randrange(100)}"])
    kind = rng.randrange(7)
    if kind == 0:
        writer.write(name, rng.choice([COMPUTE, STEP]), now, now + 7, line=line)
    elif kind == 1:
        writer.write_scalar(name, now, rng.random())
    elif kind == 2:
        writer.write_wait("world", number, now)
    elif kind == 3:
        writer.alive(now)
    elif kind == 4 or not slots:
        slot = writer.pend(name, now, nbytes=number, peer=rng.randrange(-1, 3), group="world", match=number, line=line)
        slots[number] = slot
    elif kind == 5:
        writer.waiting(slots[rng.choice(list(slots))], now)
    else:
        match = rng.choice(list(slots))
        times = {"wait_start_ns": now - 5, "wait_end_ns": now} if rng.random() < 0.5 else {}
        writer.write_communication(
            name, now - 10, now, **times, nbytes=match, peer=2, root=1, group="world", match=match, line=line,
            signature="float32 [4]", flags=OPEN, backend_ns=rng.choice([0, now - 1]), issue_delay_ns=3, wait_delay_ns=4,
        )  # fmt: skip
        writer.unpend(slots.pop(match))


@pytest.mark.parametrize("limit_bytes", [1, 500, 5000, ALL])
def test_a_copy_is_equal_but_for_its_times(copied: Copied, limit_bytes: int) -> None:
    rng, slots, parts = random.Random(1), {}, []
    for number in range(1, 2000):
        write_anything(copied.writer, rng, number, slots)
        if rng.random() < 0.05:
            copied.send(limit_bytes)
            parts.append(copied.reader.read())
    copied.send_all(limit_bytes)
    rows = np.concatenate([*parts, copied.reader.read()])
    assert len(rows) > 1000
    assert rows.tolist() == shifted(copied.original.read()).tolist()
    assert copied.reader.names() == copied.original.names()
    assert len(slots) > 3
    assert as_given(copied.reader.pending()) == shifted_pending(copied.original.pending())
    assert copied.reader.alive_ns == copied.original.alive_ns - AHEAD_NS
    assert not copied.tap.behind
    assert copied.tap.news(limit_bytes) == b""


def test_header_words_are_copied(copied: Copied) -> None:
    copied.send_all()
    assert [copied.reader.alive_ns, copied.reader.unnoted, copied.reader.serving, copied.reader.no_room] == [0, 0, 0, []]
    copied.writer.serving(3)
    for number in range(ring_buffer.PENDING_SLOTS + 2):
        copied.writer.pend("send", AHEAD_NS + number + 1)
    for number in range(600):
        copied.writer.span_name(f"{number} " + 990 * "x")
    copied.send_all()
    assert [copied.reader.unnoted, copied.reader.serving, copied.reader.no_room] == [2, 3, ["spans"]]
    assert copied.reader.names() == copied.original.names()
    assert len(copied.reader.pending()) == ring_buffer.PENDING_SLOTS


def test_a_time_of_zero_stays_zero_and_a_scalars_end_is_a_time(copied: Copied) -> None:
    copied.writer.write_scalar("loss", AHEAD_NS + 12, 0.5)
    copied.writer.write_communication("send", AHEAD_NS + 1, AHEAD_NS + 9)
    copied.send()
    scalar, send = copied.reader.read()
    assert [int(scalar[f]) for f in ("start_ns", "end_ns", "kind")] == [12, 12, SCALAR]
    times = ("start_ns", "end_ns", "wait_start_ns", "wait_end_ns", "backend_ns")
    assert [int(send[f]) for f in times] == [1, 9, 0, 0, 0]


@pytest.mark.parametrize("limit_bytes", [1, 300, 3000, ALL])
def test_an_operation_is_pending_or_recorded_at_any_time(copied: Copied, limit_bytes: int) -> None:
    rng, slots, number = random.Random(2), {}, 0
    known: dict[int, str] = {}
    recorded: set[int] = set()

    def more() -> None:
        nonlocal number
        for _ in range(rng.randrange(20)):
            number += 1
            write_anything(copied.writer, rng, number, slots)

    # The rank goes on at the worst moments: between each two steps of the tap's look.
    for method in ("slots_in_use", "newest", "read"):
        before = getattr(copied.tap._reader, method)
        setattr(copied.tap._reader, method, meanwhile(before, more))
    for _ in range(400):
        more()
        for _ in range(rng.randrange(4)):
            copied.send(limit_bytes)
            assert not copied.missing(known, recorded)
    del copied.tap._reader.read, copied.tap._reader.newest, copied.tap._reader.slots_in_use  # no more meanwhile
    copied.send_all(ALL)
    assert not copied.missing(known, recorded)
    assert known.keys() - recorded == slots.keys()
    assert len(recorded) > 500
    assert {p.match for p in copied.reader.pending()} == slots.keys()


def meanwhile(method: Callable[[], Any], action: Callable[[], None]) -> Callable[[], Any]:
    def both() -> Any:
        result = method()
        action()
        return result

    return both


def test_an_operation_stays_pending_while_its_record_is_hidden(copied: Copied) -> None:
    writer = copied.writer
    slot = writer.pend("send", AHEAD_NS + 1, match=1)
    copied.send()
    number, at = writer.next_slot()  # another thread takes its number here and has to wait for the GIL
    writer.write_communication("send", AHEAD_NS + 1, AHEAD_NS + 2, match=1)
    writer.unpend(slot)
    slot = writer.pend("recv", AHEAD_NS + 3, match=2)  # it takes the same slot
    writer.pend("broadcast", AHEAD_NS + 4, match=3)
    copied.send_all()
    assert [p.name for p in copied.reader.pending()] == ["send", "broadcast"]
    assert len(copied.reader.read()) == 0
    ring_buffer.SPAN_RECORD.pack_into(writer.buffer, at, 5, 6, 0, 0, 0, COMPUTE, CPU, number)
    copied.send_all()
    assert [p.name for p in copied.reader.pending()] == ["recv", "broadcast"]
    assert copied.reader.read()["match"].tolist() == [0, 1]


def test_names_arrive_before_the_records_that_refer_to_them(copied: Copied) -> None:
    for number in range(100):
        copied.writer.write(f"{number} {'x' * (number * 7 % 50)}", COMPUTE, number + 1, number + 2, line=f"line {number}")
        copied.writer.pend(f"send {number}", number + 1)
    seen = []
    while copied.send(200):
        names = copied.reader.names()
        seen += [names[row["name"]].split()[0] for row in copied.reader.read()]
        assert all(p.name.startswith("send") for p in copied.reader.pending())
    assert seen == [str(number) for number in range(100)]
    assert copied.reader.names() == copied.original.names()


def test_a_message_is_not_larger_than_the_limit_and_behind_tells_of_the_rest(copied: Copied) -> None:
    for number in range(1000):
        copied.writer.write(f"name {number}", COMPUTE, number + 1, number + 2)
    for number in range(100):
        copied.writer.pend("send", number + 1)
    limit_bytes, sizes = 2000, []
    assert not copied.tap.behind
    while size := copied.send(limit_bytes):
        sizes.append(size)
        left = len(sizes) < 2 or copied.tap.behind
        if left:
            assert size > limit_bytes - 2 * RECORD_BYTES
    assert max(sizes) <= limit_bytes
    assert not copied.tap.behind
    assert len(copied.reader.read()) == 1000
    assert len(copied.reader.pending()) == 100


def test_only_changed_slots_are_sent(copied: Copied) -> None:
    slots = [copied.writer.pend("send", AHEAD_NS + number + 1) for number in range(1000)]
    nothing = copied.send() - 1000 * (8 + RECORD_BYTES)
    assert 0 < nothing < 100
    assert copied.send() == 0
    copied.writer.waiting(slots[17], AHEAD_NS + 5000)
    empty = RingTap(bytearray(RING_BYTES))
    assert copied.send() == 8 + RECORD_BYTES + len(_message_without_anything(empty))
    assert [p.wait_start_ns for p in copied.reader.pending() if p.wait_start_ns] == [5000]


def _message_without_anything(tap: RingTap) -> bytes:
    tap._ring[ring_buffer.SERVING_AT] = 1
    return tap.news(ALL)


class Observed:
    """Rows of words; something is checked after each write to them, and in the middle of each write of whole rows."""

    def __init__(self, rows: Any, check: Callable[[], None]) -> None:
        self.rows, self.check = rows, check

    def __getitem__(self, which: Any) -> Any:
        return self.rows[which]

    def __setitem__(self, which: Any, values: Any) -> None:
        if isinstance(which, slice):
            half = self.rows.shape[1] // 2
            self.rows[which, :half] = values[:, :half]
            self.check()
        self.rows[which] = values
        self.check()


def test_a_pending_operation_is_whole_at_each_step_and_stays_visible_when_its_wait_begins(copied: Copied) -> None:
    seen: list[list[tuple[str, int, int]]] = []

    def check() -> None:
        seen.append([(p.name, p.match, p.wait_start_ns) for p in copied.reader.pending()])

    copied.copy._slots = Observed(copied.copy._slots, check)
    slot = copied.writer.pend("send", AHEAD_NS + 1, match=1)
    copied.send()
    assert {tuple(found) for found in seen} == {(), (("send", 1, 0),)}
    seen.clear()
    copied.writer.waiting(slot, AHEAD_NS + 2)
    copied.send()
    assert {tuple(found) for found in seen} <= {(("send", 1, 0),), (("send", 1, 2),)}
    seen.clear()
    copied.writer.unpend(slot)
    copied.writer.pend("recv", AHEAD_NS + 3, match=2)
    copied.send()
    assert {tuple(found) for found in seen} == {(), (("recv", 2, 0),)}


def test_what_was_lost_before_the_copy_is_counted_by_its_readers(copied: Copied) -> None:
    written = CAPACITY + 1000
    for number in range(written):
        copied.writer.write("step", STEP, number + 1, number + 8)
    copied.send_all(1 << 20)
    assert copied.tap._reader.dropped > 1000
    assert copied.reader.dropped == copied.tap._reader.dropped
    rows = copied.reader.read()
    assert len(rows) + copied.reader.dropped == written
    assert rows["start_ns"].tolist() == [t - AHEAD_NS for t in range(copied.reader.dropped + 1, written + 1)]
    copied.writer.write("step", STEP, 1, 8)
    copied.send()
    assert len(copied.reader.read()) == 1
    assert RingReader(copied.reader.buffer).dropped == copied.reader.dropped, "for each reader"


def test_a_reader_that_the_copy_laps_counts_what_it_lost(copied: Copied) -> None:
    written = 0
    for _ in range(7):
        for _ in range(CAPACITY // 5):
            written += 1
            copied.writer.write("step", STEP, written, written + 7)
        copied.send()
    rows = copied.reader.read()
    assert len(rows) > CAPACITY // 2
    assert copied.reader.dropped == written - len(rows) > 0
    assert rows["start_ns"].tolist() == [t - AHEAD_NS for t in range(copied.reader.dropped + 1, written + 1)]


@pytest.mark.parametrize("ahead", [1, 100, TOGETHER, 3 * TOGETHER])
def test_records_wrap_around_the_end_of_the_ring(copied: Copied, ahead: int) -> None:
    for count in (CAPACITY // 2, CAPACITY - CAPACITY // 2 - ahead):
        for number in range(count):
            copied.writer.write("step", STEP, number, number + 7)
        copied.send_all()
        copied.reader.read()
    for number in range(2 * ahead):
        copied.writer.write("step", STEP, number + 1, number + 8)
    copied.send_all()
    assert copied.reader.read()["start_ns"].tolist() == [number + 1 - AHEAD_NS for number in range(2 * ahead)]
    assert copied.reader.dropped == 0


def rank_program(writer: RingWriter, thread: int, until: threading.Event, written: list[int]) -> None:
    """Write operations as a rank does, each with three related times."""
    number = 0
    while not until.is_set() and number < 60_000:
        number += 1
        at = AHEAD_NS + NOW + 10 * number
        slot = writer.pend(f"send {thread}", at, match=10 * number + thread, nbytes=number)
        writer.waiting(slot, at + 1)
        writer.write_communication(
            f"send {thread}", at, at + 7, wait_start_ns=at + 1, wait_end_ns=at + 7, match=10 * number + thread, nbytes=number
        )
        writer.unpend(slot)
        if not number % 50:
            writer.write(f"new {thread} {number}", COMPUTE, at, at + 7)
    written.append(number)


@pytest.fixture
def threads() -> Iterator[list[threading.Thread]]:
    started: list[threading.Thread] = []
    yield started
    for thread in started:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("limit_bytes", [20_000, ALL])
def test_another_thread_reads_the_copy_while_it_is_written(
    copied: Copied, threads: list[threading.Thread], limit_bytes: int
) -> None:
    until, sent = threading.Event(), threading.Event()
    written: list[int] = []

    def copying() -> None:
        writers = threads[:2]
        while any(w.is_alive() for w in writers):
            copied.send(limit_bytes)
        copied.send_all(ALL)
        sent.set()

    threads += [threading.Thread(target=rank_program, args=(copied.writer, t, until, written)) for t in range(2)]
    threads.append(threading.Thread(target=copying))
    for thread in threads:
        thread.start()
    known: dict[int, str] = {}
    recorded: set[int] = set()
    second, parts = RingReader(copied.reader.buffer), []
    try:
        while not sent.is_set():
            assert not copied.missing(known, recorded)
            parts.append(second.read())
    finally:
        until.set()
    assert not copied.missing(known, recorded)
    rows = np.concatenate([*parts, second.read()])
    names = second.names()
    assert copied.reader.dropped == second.dropped == copied.tap._reader.dropped
    if not second.dropped:
        assert len(rows) == sum(written) + sum(number // 50 for number in written)
    communications = rows[rows["nbytes"] > 0]
    assert (communications["match"] // 10 == communications["nbytes"]).all()
    assert (rows["end_ns"] == rows["start_ns"] + 7).all()
    assert {names[row] for row in set(communications["name"].tolist())} == {"send 0", "send 1"}
    assert set(known.values()) >= {"send 0", "send 1"}
    assert copied.reader.pending() == []


def test_at_each_step_records_are_whole_or_invalid_and_few_are_invalid(copied: Copied) -> None:
    rows, written = np.zeros((CAPACITY // 4 + 1, record_dtype().itemsize // 8), np.int64), 0
    invalid: list[int] = []

    def check() -> None:
        found = RingReader(copied.reader.buffer, max(written + 1 - CAPACITY, 1)).read().view(np.int64).reshape(-1, rows.shape[1])
        assert (found[:, 0] == found[:, -1]).all()
        assert (found[:, 1] == found[:, -1]).all()
        invalid.append(int((copied.reader._commits == 0).sum()))

    copied.copy._times = []
    for _ in range(9):
        rows[:, 0] = rows[:, 1] = np.arange(written + 1, written + 1 + len(rows))
        if written > 7 * len(rows):  # the ring is full
            copied.copy._records = Observed(copied.copy._records, check)
        copied.copy._write(rows.copy())
        written += len(rows)
    assert 0 < max(invalid) <= TOGETHER


def test_a_reader_that_is_lapped_meanwhile_reads_only_whole_records(copied: Copied, threads: list[threading.Thread]) -> None:
    rows = np.zeros(CAPACITY // 2, record_dtype())
    template = rows.view(np.int64).reshape(len(rows), -1)
    done = threading.Event()
    rounds = 12

    def copying() -> None:
        for number in range(rounds * len(rows) // TOGETHER):
            template[:TOGETHER] = number + 1
            copied.copy._write(template[:TOGETHER].copy())
        done.set()

    copied.copy._times = []
    threads.append(threading.Thread(target=copying))
    threads[0].start()
    count = 0
    while True:
        last = done.is_set()
        words = copied.reader.read().view(np.int64).reshape(-1, template.shape[1])
        count += len(words)
        assert (words[:, 0] == words[:, 5]).all()
        assert (words[:, 0] == (words[:, -1] - 1) // TOGETHER + 1).all()
        if last:
            break
    assert count + copied.reader.dropped == rounds * len(rows)
