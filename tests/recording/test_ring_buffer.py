"""The ring in shared memory: each record is read once and complete, or counted as dropped, also while the rank
writes."""

import mmap
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from labkit.group.run import LOOK_EVERY_S
from labkit.recording import ring_buffer
from labkit.recording.ring_buffer import RING_BYTES, RingReader, RingWriter
from labkit.recording.schema import CALL, COMMUNICATION, COMPUTE, CPU, CUDA, SCALAR, SERVED, STEP, WAIT

CAPACITY = ring_buffer.CAPACITY
FASTEST_SPAN_NS = 400  # what a rank needs for one if it does nothing else


@pytest.fixture
def memory() -> mmap.mmap:
    return mmap.mmap(-1, RING_BYTES)


@pytest.fixture
def writer(memory: mmap.mmap) -> RingWriter:
    return RingWriter(memory)


@pytest.fixture
def reader(memory: mmap.mmap) -> RingReader:
    return RingReader(memory)


def write(writer: RingWriter, count: int, start: int = 0) -> None:
    for i in range(start, start + count):
        writer.write("step", STEP, i, i + 7)


def finish(memory: mmap.mmap, number: int, start_ns: int, end_ns: int) -> None:
    """Write a span into the record whose number another thread has taken."""
    at = ring_buffer.RECORDS_AT + number * ring_buffer.RECORD_BYTES
    ring_buffer.SPAN_RECORD.pack_into(memory, at, start_ns, end_ns, 0, 0, 0, COMPUTE, CPU, number)


def test_a_span_is_read_as_it_was_written(writer: RingWriter, reader: RingReader) -> None:
    writer.write("forward", COMPUTE, 100, 250, device=CUDA)
    (row,) = reader.read()
    assert reader.names()[row["name"]] == "forward"
    assert [int(row[k]) for k in ("kind", "device", "start_ns", "end_ns")] == [COMPUTE, CUDA, 100, 250]


def test_what_a_span_does_not_have_is_the_default_even_if_the_slot_held_a_communication(
    writer: RingWriter, reader: RingReader
) -> None:
    numbers = {"wait_start_ns": 1, "wait_end_ns": 2, "nbytes": 3, "peer": 4, "root": 5, "match": 6}
    for _ in range(CAPACITY):
        writer.write_communication("send", 1, 9, group="0 to 4", signature="float32 [4]", **numbers)
    reader.read()
    writer.write("forward", COMPUTE, 100, 250)
    alone = reader.read()
    write(writer, 2)
    for rows in (alone, reader.read()):
        for field in ring_buffer.TAIL_FIELDS:
            assert set(rows[field.name].tolist()) == {0 if field.is_text else field.default}, field.name


def test_a_communication_is_read_as_it_was_written(writer: RingWriter, reader: RingReader) -> None:
    numbers = {
        "wait_start_ns": 1,
        "wait_end_ns": 2,
        "nbytes": 3,
        "peer": 4,
        "root": 6,
        "match": 5,
        "device": CUDA,
        "flags": SERVED,
    }
    writer.write_communication("send", -5, 2**62, group="0 to 4", line="cell 6, line 7", **numbers)
    (row,) = reader.read()
    names = reader.names()
    assert [names[row[k]] for k in ("name", "group", "line")] == ["send", "0 to 4", "cell 6, line 7"]
    assert [int(row[k]) for k in ("kind", "start_ns", "end_ns")] == [COMMUNICATION, -5, 2**62]
    assert {k: int(row[k]) for k in numbers} == numbers


@pytest.mark.parametrize("value", [0.1, -1e300, float("inf"), 0.0])
def test_a_scalar_is_read_bit_for_bit(writer: RingWriter, reader: RingReader, value: float) -> None:
    writer.write_scalar("loss", 12, value)
    rows = reader.read()
    assert rows["kind"].tolist() == [SCALAR]
    assert [rows[field].tolist() for field in ("start_ns", "end_ns", "value")] == [[12], [12], [value]]


def test_a_wait_is_read_as_it_was_written(writer: RingWriter, reader: RingReader) -> None:
    writer.write_communication("all_reduce", 1, 9, wait_start_ns=1, nbytes=3, group="world", match=5, backend_ns=4)
    writer.write_wait("world", 5, 12)
    writer.write_wait("unknown before", 6, 13)
    rows, names = reader.read()[1:], reader.names()
    assert rows["kind"].tolist() == [WAIT] * 2
    assert [[names[group] for group in rows["group"]], *(rows[f].tolist() for f in ("match", "start_ns", "end_ns"))] == [
        ["world", "unknown before"], [5, 6], [12, 13], [12, 13],
    ]  # fmt: skip


def test_each_record_is_read_once(writer: RingWriter, reader: RingReader) -> None:
    assert len(reader.read()) == 0
    write(writer, 3)
    assert reader.read()["start_ns"].tolist() == [0, 1, 2]
    assert len(reader.read()) == 0
    write(writer, 2, start=3)
    assert reader.read()["start_ns"].tolist() == [3, 4]
    assert reader.dropped == 0


def test_a_second_reader_sees_the_same(writer: RingWriter, reader: RingReader, memory: mmap.mmap) -> None:
    write(writer, 5)
    assert reader.read().tolist() == RingReader(memory).read().tolist()


def test_the_ring_wraps_around_without_loss(writer: RingWriter, reader: RingReader) -> None:
    seen: list[int] = []
    part = CAPACITY // 3 + 1  # does not divide the ring: parts wrap around its end
    for start in range(0, 4 * part, part):
        write(writer, part, start)
        seen += reader.read()["start_ns"].tolist()
    assert seen == list(range(4 * part))
    assert reader.dropped == 0


def test_a_notebook_that_skips_one_reading_loses_nothing() -> None:
    assert 2 * LOOK_EVERY_S * 1e9 / FASTEST_SPAN_NS < CAPACITY - ring_buffer.IN_FLIGHT


@pytest.mark.parametrize("extra", [-1, 0, 1, 1000, CAPACITY, CAPACITY + CAPACITY // 3])
def test_what_was_overwritten_is_counted_exactly(writer: RingWriter, reader: RingReader, extra: int) -> None:
    written = CAPACITY + extra
    write(writer, written)
    rows = reader.read()
    assert reader.dropped == written - len(rows)
    assert rows["start_ns"].tolist() == list(range(reader.dropped, written)), "the newest are kept, and none twice"
    assert len(rows) > CAPACITY * 3 // 4, "no more is given up than the headway"
    write(writer, 2, start=written)
    assert reader.read()["start_ns"].tolist() == [written, written + 1]


def test_nothing_is_lost_while_the_ring_is_almost_full(writer: RingWriter, reader: RingReader) -> None:
    count = CAPACITY - ring_buffer.IN_FLIGHT
    write(writer, count)
    assert len(reader.read()) == count
    assert reader.dropped == 0


def test_threads_write_concurrently(writer: RingWriter, reader: RingReader) -> None:
    count, threads = 4000, 4

    def work(thread: int) -> None:
        for i in range(count):
            writer.write(f"thread {thread}", COMPUTE, i, thread)

    workers = [threading.Thread(target=work, args=(t,)) for t in range(threads)]
    for worker in workers:
        worker.start()
    parts = []
    while any(w.is_alive() for w in workers):
        parts.append(reader.read())
    parts.append(reader.read())
    rows, names = np.concatenate(parts), reader.names()
    assert len(rows) == count * threads
    assert reader.dropped == 0
    for thread in range(threads):
        mine = rows[rows["end_ns"] == thread]
        assert mine["start_ns"].tolist() == list(range(count))
        assert {names[i] for i in mine["name"]} == {f"thread {thread}"}


def test_an_unfinished_record_delays_the_later_ones_and_is_not_lost(
    writer: RingWriter, reader: RingReader, memory: mmap.mmap
) -> None:
    write(writer, 1)
    number, _ = writer.next_slot()  # another thread takes its number here and has to wait for the GIL
    write(writer, 6, start=2)
    assert reader.read()["start_ns"].tolist() == [0]
    assert len(reader.read()) == 0
    finish(memory, number, 1, 8)
    assert reader.read()["start_ns"].tolist() == list(range(1, 8))
    assert reader.dropped == 0


class Overtaken:
    """A reader's view of the records: after it has copied a part of them, something happens before it copies the
    rest."""

    def __init__(self, words: Any, after: float, meanwhile: Callable[[], None]) -> None:
        self.words, self.after, self.meanwhile = words, after, meanwhile

    def __getitem__(self, slots: Any) -> Any:
        slots = np.arange(ring_buffer.CAPACITY)[slots]
        part = int(len(slots) * self.after)
        first = self.words[slots[:part]]
        self.meanwhile()
        return np.concatenate([first, self.words[slots[part:]]])


def test_what_changes_while_it_is_copied_is_dropped(writer: RingWriter, reader: RingReader) -> None:
    unread, more = CAPACITY - 100, 3 * CAPACITY // 4
    write(writer, unread)
    reader._words = Overtaken(reader._words, 0.5, lambda: write(writer, more, unread))
    rows = reader.read()
    assert (rows["end_ns"] == rows["start_ns"] + 7).all()
    assert len(rows) + reader.dropped == unread
    assert rows["start_ns"].max() == unread - 1
    assert rows["start_ns"].min() >= more - 100, "the slots of those before were filled again during the copy"


def test_a_record_that_is_finished_just_after_it_was_copied_is_read_the_next_time(
    writer: RingWriter, reader: RingReader, memory: mmap.mmap
) -> None:
    write(writer, 2)
    number, _ = writer.next_slot()
    write(writer, 6, start=3)
    words = reader._words
    reader._words = Overtaken(words, 1.0, lambda: finish(memory, number, 2, 9))
    assert reader.read()["start_ns"].tolist() == [0, 1]
    reader._words = words
    assert reader.read()["start_ns"].tolist() == list(range(2, 9))


def test_a_single_record_that_is_overwritten_before_it_is_copied(
    writer: RingWriter, reader: RingReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(writer, 1)
    look = reader._commit_at

    def look_then_overtake(number: int) -> int:
        seen = look(number)
        if number == 2:  # nothing comes after the first record yet: now a whole round does
            monkeypatch.undo()
            write(writer, CAPACITY, 1)
        return seen

    monkeypatch.setattr(reader, "_commit_at", look_then_overtake)
    rows = np.concatenate([reader.read(), reader.read()])
    assert (rows["end_ns"] == rows["start_ns"] + 7).all()
    assert rows["start_ns"].tolist() == list(range(CAPACITY + 1 - len(rows), CAPACITY + 1))
    assert len(rows) + reader.dropped == CAPACITY + 1


def test_records_about_to_be_overwritten_are_not_trusted(writer: RingWriter, reader: RingReader) -> None:
    write(writer, CAPACITY)
    assert reader.read()["start_ns"].tolist() == list(range(ring_buffer.IN_FLIGHT, CAPACITY))
    assert reader.dropped == ring_buffer.IN_FLIGHT


def test_a_record_that_is_half_overwritten_is_not_read(
    writer: RingWriter, reader: RingReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(CAPACITY):
        writer.write_communication("send", i, i + 7, match=i)

    def stop_half_way() -> None:
        with pytest.raises(struct.error):
            writer.write_communication("recv", 0, 1, peer="nobody", match=-1)  # type: ignore[arg-type]

    monkeypatch.setattr(ring_buffer, "IN_FLIGHT", 0)  # the margin would hide what this tests
    reader._words = Overtaken(reader._words, 0.0, stop_half_way)
    rows = reader.read()
    assert rows["match"].tolist() == list(range(1, CAPACITY))
    assert reader.dropped == 1


WRITER = """
import mmap, os, signal, sys
from labkit.recording.ring_buffer import RingWriter
from labkit.recording.ring_buffer import RING_BYTES
from labkit.recording.schema import COMPUTE
with open(sys.argv[1], "r+b") as file:
    writer = RingWriter(mmap.mmap(file.fileno(), RING_BYTES))
for i in range(1, int(sys.argv[2]) + 1):
    if i % 3:
        writer.write(f"span {i % 100}", COMPUTE, i, i + 7)
    else:
        writer.write_communication("send", i, i + 7, wait_start_ns=i + 1, wait_end_ns=i + 2, nbytes=3 * i, match=-i)
writer.waiting(writer.pend("recv", 5, peer=1, match=9, line="cell 3, line 2"), 6)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def shared_file(tmp_path: Path) -> Iterator[tuple[Path, mmap.mmap]]:
    path = tmp_path / "ring"
    with path.open("w+b") as file:
        file.truncate(RING_BYTES)
        yield path, mmap.mmap(file.fileno(), RING_BYTES)


@pytest.mark.processes
def test_another_process_reads_whole_records_while_the_rank_writes_and_after_it_was_killed(
    shared_file: tuple[Path, mmap.mmap],
) -> None:
    path, memory = shared_file
    written = 2 * CAPACITY
    reader, parts = RingReader(memory), []
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(written)])
    try:
        while process.poll() is None:
            parts.append(reader.read())
    finally:
        process.kill()
        process.wait()
    parts.append(reader.read())
    rows, names = np.concatenate(parts), reader.names()
    assert len(rows) + reader.dropped == written
    assert len(rows) > CAPACITY // 2
    assert (np.diff(rows["commit"]) > 0).all()
    assert (rows["start_ns"] == rows["commit"]).all()
    assert (rows["end_ns"] == rows["start_ns"] + 7).all()
    travels = rows["kind"] == COMMUNICATION
    assert (travels == (rows["commit"] % 3 == 0)).all()
    sent, number = rows[travels], rows["commit"][travels]
    assert (sent["wait_start_ns"] == number + 1).all()
    assert (sent["wait_end_ns"] == number + 2).all()
    assert (sent["nbytes"] == 3 * number).all()
    assert (sent["match"] == -number).all()
    assert all(names[row["name"]] == f"span {row['commit'] % 100}" for row in rows[~travels][::97])
    (pending,) = reader.pending()
    assert (pending.name, pending.peer, pending.match, pending.line, pending.wait_start_ns) == ("recv", 1, 9, "cell 3, line 2", 6)


NAMER = """
import mmap, sys
from labkit.recording.ring_buffer import RingWriter
from labkit.recording.ring_buffer import NAMES_BYTES, RING_BYTES

with open(sys.argv[1], "r+b") as file:
    writer = RingWriter(mmap.mmap(file.fileno(), RING_BYTES))
for number in range(NAMES_BYTES // 10):
    writer.name(str(number))
"""


@pytest.mark.processes
def test_the_number_of_names_never_becomes_smaller_while_the_rank_adds_one(shared_file: tuple[Path, mmap.mmap]) -> None:
    """A reader that saw fewer names for a moment would lack those of records that it has read."""
    path, memory = shared_file
    used, seen = np.frombuffer(memory, np.uint32, 1), []
    process = subprocess.Popen([sys.executable, "-c", NAMER, str(path)])
    try:
        while process.poll() is None:
            seen.append([int(used[0]) for _ in range(10_000)])
    finally:
        process.kill()
        process.wait()
    values = np.concatenate(seen)
    assert len(np.unique(values)) > 2, "the rank added names meanwhile"
    assert (np.diff(values) >= 0).all()


def test_names_are_interned_once(writer: RingWriter, reader: RingReader) -> None:
    assert writer.name("forward") == writer.name("forward") != writer.name("backward")
    assert writer.name("") == 0
    assert reader.names() == ["", "forward", "backward"]
    writer.name("später · 更晚")
    assert reader.names()[-1] == "später · 更晚"


def test_a_long_name_is_cut_between_two_characters(writer: RingWriter, reader: RingReader) -> None:
    name = "a" + "ä" * ring_buffer.LONGEST_NAME
    number = writer.name(name)
    assert reader.names()[number] == "a" + "ä" * ((ring_buffer.LONGEST_NAME - 1) // 2)


def test_a_name_that_cannot_be_encoded_stays_legible(writer: RingWriter, reader: RingReader) -> None:
    number = writer.name("loss \udcff")
    assert reader.names()[number] == "loss ?"


def fill(writer: RingWriter, limit: int) -> None:
    """Use up names until so many bytes are taken."""
    number = 0
    while writer._used < limit:
        writer.name(f"{number:0{ring_buffer.LONGEST_NAME}}")
        number += 1


def test_a_full_table_of_names_returns_the_empty_name_and_says_so(writer: RingWriter, reader: RingReader) -> None:
    fitting = (ring_buffer.NAMES_BYTES - 2) // (ring_buffer.LONGEST_NAME + 2)
    numbers = [writer.name(f"{i:0{ring_buffer.LONGEST_NAME}}") for i in range(fitting)]
    assert numbers == [*range(1, fitting + 1)]
    assert reader.no_room == []
    assert writer.name("x" * ring_buffer.LONGEST_NAME) == 0
    assert reader.no_room == ["groups"]
    assert writer.name(f"{0:0{ring_buffer.LONGEST_NAME}}") == 1, "those that are in it keep their numbers"
    assert len(reader.names()) == fitting + 1


def test_a_span_has_its_line_while_there_is_room_for_lines(writer: RingWriter, reader: RingReader) -> None:
    def written(name: str, line: str) -> list[str]:
        writer.write(name, COMPUTE, 1, 2, line=line)
        (row,) = reader.read()
        return [reader.names()[row["name"]], reader.names()[row["line"]]]

    assert written("forward", "cell 2, line 3") == ["forward", "cell 2, line 3"]
    assert written("backward", "") == ["backward", ""]
    fill(writer, ring_buffer.LINES_LIMIT)
    assert written("backward", "cell 2, line 4") == ["backward", ""]
    assert written("optimizer", "cell 2, line 3") == ["optimizer", "cell 2, line 3"], "this line is known"


def test_operations_keep_their_names_with_any_number_of_spans_and_curves(writer: RingWriter, reader: RingReader) -> None:
    """Otherwise nobody could see who waits for whom."""
    for i in range(100_000):
        writer.write(f"forward {i}", COMPUTE, 1, 2, line="cell 2, line 3")
    assert reader.no_room == ["spans"]
    for i in range(100_000):
        writer.write_scalar(f"loss {i}", 1, 0.5)
    assert reader.no_room == ["spans", "values"]
    reader.read()
    writer.write("one more", COMPUTE, 1, 2, line="cell 2, line 3")
    writer.write("forward 20000", COMPUTE, 1, 2)
    writer.write("main", CALL, 1, 2)
    writer.write_scalar("one more", 1, 0.5)
    writer.write_communication("all_reduce", 1, 2, group="world", line="cell 9, line 1", signature="float32 [4]")
    rows, names = reader.read(), reader.names()
    assert [names[row["name"]] for row in rows] == [
        ring_buffer.OTHER_SPANS,
        "forward 20000",
        "main",
        ring_buffer.OTHER_SCALARS,
        "all_reduce",
    ]
    assert [names[rows[-1][field]] for field in ("group", "line", "signature")] == ["world", "cell 9, line 1", "float32 [4]"]


def test_groups_keep_their_names_with_any_number_of_shapes(writer: RingWriter, reader: RingReader) -> None:
    fill(writer, ring_buffer.SIGNATURES_LIMIT)
    slot = writer.pend("send", 1, group="p2p 0>1 tag 7", signature="float32 [4]")
    assert [(p.group, p.signature) for p in reader.pending()] == [("p2p 0>1 tag 7", "")]
    writer.unpend(slot)
    assert reader.no_room == ["sizes"]


def test_pending_operations_come_and_go(writer: RingWriter, reader: RingReader) -> None:
    first = writer.pend("all_reduce", 10, nbytes=400, group="world", match=3, line="cell 2, line 1", signature="float32 [100]")
    second = writer.pend("recv", 5, peer=2)
    assert [p.name for p in reader.pending()] == ["recv", "all_reduce"], "oldest first"
    assert reader.pending()[1] == ring_buffer.Pending(
        name="all_reduce", start_ns=10, wait_start_ns=0, nbytes=400, peer=-1, group="world", match=3, line="cell 2, line 1",
        signature="float32 [100]", thread=threading.get_native_id(),
    )  # fmt: skip
    other = threading.Thread(target=writer.waiting, args=(first, 12))
    other.start()
    other.join()
    assert [p.wait_start_ns for p in reader.pending()] == [0, 12]
    assert [p.thread for p in reader.pending()] == [threading.get_native_id(), other.native_id]
    writer.unpend(second)
    assert [p.name for p in reader.pending()] == ["all_reduce"]
    writer.unpend(first)
    assert reader.pending() == []


def test_an_operation_is_pending_whatever_becomes_of_records(writer: RingWriter, reader: RingReader, memory: mmap.mmap) -> None:
    """Records are lost, or hidden behind one whose thread was interrupted for good: who waits is seen all the same."""
    slot = writer.pend("irecv", 5)
    write(writer, 2 * CAPACITY)
    reader.read()
    assert reader.dropped > CAPACITY // 2
    assert [p.name for p in reader.pending()] == [p.name for p in RingReader(memory).pending()] == ["irecv"]
    writer.next_slot()  # and then a signal handler of the program raises an exception
    write(writer, 1000)
    writer.unpend(slot)
    writer.pend("recv", 6)
    assert len(reader.read()) == 0
    assert [p.name for p in reader.pending()] == ["recv"]


def test_a_reused_slot_does_not_say_that_a_rank_waits(writer: RingWriter, reader: RingReader) -> None:
    for start in range(1, 3 * ring_buffer.PENDING_SLOTS):
        slot = writer.pend("recv", start)
        assert [p.wait_start_ns for p in reader.pending()] == [0]
        writer.waiting(slot, start + 1)
        writer.unpend(slot)


def test_pending_operations_beyond_the_slots_are_not_seen_and_do_no_harm(
    writer: RingWriter, reader: RingReader, memory: mmap.mmap
) -> None:
    slots = [writer.pend("isend", i + 1) for i in range(ring_buffer.PENDING_SLOTS + 2)]
    assert slots[-3:] == [ring_buffer.PENDING_SLOTS - 1, -1, -1]
    writer.waiting(-1, 99)
    writer.unpend(-1)
    assert not any(memory[8 : ring_buffer.PENDING_AT]), "what lies before the first slot is untouched"
    assert reader.unnoted == 2
    assert len(reader.pending()) == ring_buffer.PENDING_SLOTS
    writer.unpend(slots[0])
    assert writer.pend("isend", 1000) == slots[0]
    assert len(reader.pending()) == ring_buffer.PENDING_SLOTS


def test_a_pending_operation_that_is_half_written_is_not_seen(writer: RingWriter, reader: RingReader, memory: mmap.mmap) -> None:
    slot = writer.pend("isend", 10, match=1)
    writer.unpend(slot)
    at = ring_buffer.PENDING_AT + slot * ring_buffer.RECORD_BYTES
    ring_buffer.PENDING_RECORD.pack_into(memory, at, 10, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0)  # all but `commit`, which comes last
    assert reader.pending() == []


class Changed:
    """A reader's view of the slots: something happens just before, or just after, the records in them are copied."""

    def __init__(self, slots: Any, action: Callable[[], None], *, before_the_copy: bool) -> None:
        self.slots, self.action, self.before_the_copy = slots, action, before_the_copy

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, tuple):
            return self.slots[which]
        if self.before_the_copy:
            self.action()
        rows = self.slots[which]
        if not self.before_the_copy:
            self.action()
        return rows


@pytest.mark.parametrize("before_the_copy", [True, False])
def test_a_slot_that_changes_while_it_is_copied_is_left_out(
    writer: RingWriter, reader: RingReader, before_the_copy: bool
) -> None:
    writer.pend("isend", 10, match=1)
    slot = writer.pend("irecv", 20, match=2)

    def change() -> None:
        writer.unpend(slot)
        writer.pend("broadcast", 30, match=3)

    slots = reader._slots
    reader._slots = Changed(slots, change, before_the_copy=before_the_copy)
    assert [(p.name, p.match) for p in reader.pending()] == [("isend", 1)]
    reader._slots = slots
    assert [(p.name, p.match) for p in reader.pending()] == [("isend", 1), ("broadcast", 3)]


def test_a_finished_record_behind_an_unfinished_one_is_noticed(writer: RingWriter, reader: RingReader, memory: mmap.mmap) -> None:
    assert reader.newest() == 0
    write(writer, 3)
    assert reader.newest() == 3
    number, _ = writer.next_slot()
    assert (reader.newest(), len(reader.read()), reader.next_record) == (3, 3, number)
    assert reader.newest() == 3, "nothing is behind it yet"
    write(writer, 1)
    assert (reader.newest(), len(reader.read()), reader.next_record) == (5, 0, number)
    write(writer, 1000)
    assert reader.newest() > number
    finish(memory, number, 1, 8)
    assert (reader.newest(), len(reader.read())) == (1005, 1002)
    write(writer, CAPACITY + 100)  # the reader is lapped
    assert reader.newest() == CAPACITY + 1105


def test_what_a_copy_lacks_counts_as_dropped(reader: RingReader, memory: mmap.mmap) -> None:
    struct.pack_into("<q", memory, ring_buffer.LOST_AT, 1 << 40)
    assert reader.dropped == 1 << 40
