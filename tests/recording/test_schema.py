"""Each field of a span has a place in the ring, and comes back from it, from columns, from files and from folders."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from labkit.recording import ring_buffer, schema
from labkit.recording.events import COLUMNS, Columns
from labkit.recording.ring_buffer import RING_BYTES, RingReader, RingWriter
from labkit.recording.schema import FIELDS, Pending, Span, device_code, flags_of
from labkit.tracing.load import load_trace
from labkit.tracing.trace import Trace, from_records

PLAIN = Span(0, "x", "communication", 10, 20, wait_start_ns=11, wait_end_ns=18)
OTHER = {"device": "CPU:3", "peer": 0, "root": 0}
OTHERS = {int: 15, str: "y"}
NOT_WRITTEN = ("rank", "kind", "count")
ARGUMENTS = {f.name for f in FIELDS if f.place != "flag"} - {*NOT_WRITTEN, "device"}


def different(name: str, default: object) -> Span:
    """A span that differs from the plain one in this field alone, and has its name."""
    value = OTHER.get(name, not default if isinstance(default, bool) else OTHERS[type(default)])
    return Span(**{f.name: getattr(PLAIN, f.name) for f in fields(Span)} | {"name": name, name: value})


SPANS = [different(field.name, getattr(PLAIN, field.name)) for field in FIELDS if field.name not in NOT_WRITTEN]


def record(memory: mmap.mmap) -> None:
    """Write the spans as a rank does."""
    writer = RingWriter(memory)
    for span in SPANS:
        given = {name: getattr(span, name) for name in ARGUMENTS}
        writer.write_communication(**given, device=device_code(span.device), flags=flags_of(span))


def through_the_ring(_: Path) -> Trace:
    memory = mmap.mmap(-1, RING_BYTES)
    record(memory)
    reader = RingReader(memory)
    return from_records([reader.read()], [reader.names()], ["rank 0"], start_ns=0)


def through_columns(_: Path) -> Columns:
    return Columns.of(SPANS)


def through_a_file(folder: Path) -> Trace:
    return load_trace(Trace(SPANS, ranks=["rank 0"]).save(folder / "trace.json"))


def through_a_folder(folder: Path) -> list[Span]:
    with open(folder / "rank0.ring", "wb+") as file:
        file.truncate(RING_BYTES)
        record(mmap.mmap(file.fileno(), RING_BYTES))
    about = dict.fromkeys(("rank", "restart", "began_unix_ns"), 0) | {"world_size": 1, "began_ns": 1, "ended_ns": 300}
    about |= dict.fromkeys(("host", "machine", "script", "run_id", "run", "reference", "master"), "here")
    (folder / "rank0.json").write_text(json.dumps(about | {"readings": []}))
    return [span for span in load_trace(folder) if span.kind != "call"]


@pytest.mark.parametrize("way", [through_the_ring, through_columns, through_a_file, through_a_folder])
def test_each_field_comes_back(way: Callable[[Path], object], tmp_path: Path) -> None:
    assert sorted(way(tmp_path), key=repr) == sorted(SPANS, key=repr)  # type: ignore[call-overload]


def test_each_field_has_a_place() -> None:
    assert [f.name for f in FIELDS] == [f.name for f in fields(Span)]
    assert {f.name for f in schema.PENDING_FIELDS} == {f.name for f in fields(Pending)} - {"thread"}
    in_ring = set(ring_buffer.record_dtype().names)
    assert {f.name for f in FIELDS if f.place not in ("flag", "of rank")} | {"flags", "commit", "value", "thread"} == in_ring
    assert {f.name for f in FIELDS if f.place != "flag"} | {"flags"} == set(COLUMNS.names or ())


def test_no_two_flags_share_a_bit() -> None:
    bits = [f.bit for f in FIELDS if f.place == "flag"] + [schema.UNSHOWN]
    assert len(set(bits)) == len(bits)
    assert all(bit & (bit - 1) == 0 and 0 < bit < 1 << 16 for bit in bits)


def test_memory_is_laid_out_in_whole_words() -> None:
    """A reader in another process sees each number whole, and copies records as rows of words."""
    dtype = ring_buffer.record_dtype()
    assert dtype.itemsize == ring_buffer.RECORD_BYTES
    assert ring_buffer.RECORD_BYTES % 8 == ring_buffer.COMMIT_OFFSET % 8 == ring_buffer.PENDING_AT % 8 == 0
    assert all(offset % kind.itemsize == 0 for kind, offset, *_ in dtype.fields.values())


@pytest.mark.parametrize("device", ["cpu", "cuda", "CPU:0", "CPU:7", "CPU:200"])
def test_a_device_is_a_number_and_back(device: str) -> None:
    assert [s.device for s in Columns.of([Span(0, "x", "compute", 1, 2, device=device)])] == [device]
