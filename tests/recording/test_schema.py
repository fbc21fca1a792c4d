"""A field of a span is declared in the schema, and has a place in the ring: from there it comes through columns, traces
and files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import labkit
from labkit.recording import ring_buffer, schema
from labkit.recording.events import COLUMNS, Columns
from labkit.recording.schema import FIELDS, Flag, OfRank, Pending, Span

ADDED = """
    retries: Annotated[int, Tail("i")] = -3
    resumed_ns: Annotated[int, Tail("q")] = 0
    algorithm: Annotated[str, Tail("I")] = ""
    compressed: Annotated[bool, Flag(1 << 7)] = False
"""
LAST = '    signature: Annotated[str, Tail("I")] = ""\n'
DELAYS = "backend_ns: int = 0, issue_delay_ns: int = 0, wait_delay_ns: int = 0,\n"
PARAMETERS = '        resumed_ns: int = 0, retries: int = -3, algorithm: str = "",\n'
# What adding a field takes: its declaration, its place in a record, and the parameter of what writes it.
CHANGES = [
    ("schema.py", LAST, LAST + ADDED),
    ("schema.py", "    thread: int = 0  #", '    algorithm: str = ""\n    thread: int = 0  #'),
    ("ring_buffer.py", '"match", "value",\n', '"match", "value", "resumed_ns",\n'),
    ("ring_buffer.py", '"peer", "root", "count",', '"peer", "root", "retries", "algorithm", "count",'),
    ("ring_buffer.py", DELAYS, DELAYS + PARAMETERS),
    ("ring_buffer.py", "wait_delay_ns, nbytes, match,\n", "wait_delay_ns, nbytes, match, resumed_ns,\n"),
    ("ring_buffer.py", "peer, root, 1, flags,", "peer, root, retries, self.name(algorithm), 1, flags,"),
    ("ring_buffer.py", 'signature: str = "",\n    ) -> int:', 'signature: str = "", algorithm: str = "",\n    ) -> int:'),
    ("ring_buffer.py", "peer, root, start_ns,\n", "peer, root, self.name(algorithm), start_ns,\n"),
]
GIVEN = {"retries": 4, "resumed_ns": 150, "algorithm": "ring"}
VALUES = GIVEN | {"compressed": True}

# Writes two spans and an operation under way, and prints what each way gives back.
PROGRAM = """
import json, mmap, sys
from pathlib import Path

from labkit.recording.events import Columns
from labkit.recording.ring_buffer import RING_BYTES, RingReader, RingWriter
from labkit.recording.schema import COMPUTE
from labkit.tracing.load import load_trace
from labkit.tracing.trace import from_records

folder, given = Path(sys.argv[1]), json.loads(sys.argv[2])
with open(folder / "rank0.ring", "wb+") as file:
    file.truncate(RING_BYTES)
    memory = mmap.mmap(file.fileno(), RING_BYTES)
writer = RingWriter(memory)
for number in range(2):
    writer.write("forward", COMPUTE, 10, 90)
    writer.write_communication("all_reduce", 100, 200, nbytes=8, group="world", match=number + 1, flags=1 << 7, **given)
writer.pend("all_reduce", 210, group="world", match=3, algorithm=given["algorithm"])
about = {name: 0 for name in ("rank", "restart", "began_unix_ns")} | {"world_size": 1, "began_ns": 1, "ended_ns": 300}
about |= {name: "here" for name in ("host", "machine", "script", "run_id", "run", "reference", "master")} | {"readings": []}
(folder / "rank0.json").write_text(json.dumps(about))

reader = RingReader(memory)
rows, pending = reader.read(), reader.pending()
trace = from_records([rows], [reader.names()], ["rank 0"], pending=[pending], start_ns=5, end_ns=300)
traces = {
    "the ring": trace,
    "columns": Columns.of(trace.spans),
    "a file": load_trace(trace.save(folder / "trace.json")),
    "a folder": [s for s in load_trace(folder) if s.kind != "call"],
}
fields = (*given, "compressed", "start_ns")
print(json.dumps({name: [[s.name, {f: getattr(s, f) for f in fields}] for s in found] for name, found in traces.items()}))
"""


@pytest.fixture(scope="module")
def came_back(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The records as read by a copy of labkit with more fields in its schema and one more in `Pending`."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(Path(labkit.__file__).parent, folder / "labkit", ignore=shutil.ignore_patterns("__pycache__"))
    for name, old, new in CHANGES:
        path = folder / "labkit" / "recording" / name
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1, (name, old)
        path.write_text(text.replace(old, new), encoding="utf-8")
    command = [sys.executable, "-c", PROGRAM, str(folder), json.dumps(GIVEN)]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("way", ["the ring", "columns", "a file", "a folder"])
@pytest.mark.processes
def test_a_field_added_to_the_schema_comes_back_through(way: str, came_back: dict[str, Any]) -> None:
    default = {"retries": -3, "resumed_ns": 0, "algorithm": "", "compressed": False}
    spans = came_back[way]
    assert [fields for name, fields in spans if name == "forward"] == [default | {"start_ns": 10}] * 2, "it has no tail"
    complete = [VALUES | {"start_ns": 100}] * 2
    under_way = [default | {"algorithm": "ring", "start_ns": 210}]
    assert [fields for name, fields in spans if name == "all_reduce"] == complete + under_way


def test_each_field_has_a_place() -> None:
    assert [f.name for f in FIELDS] == [f.name for f in fields(Span)]
    assert {f.name for f in schema.PENDING_FIELDS} == {f.name for f in fields(Pending)} - {"thread"}
    in_ring = set(ring_buffer.record_dtype().names)
    assert {f.name for f in FIELDS if not isinstance(f.place, Flag | OfRank)} | {"flags", "commit", "value", "thread"} == in_ring
    assert {f.name for f in FIELDS if not isinstance(f.place, Flag)} | {"flags"} == set(COLUMNS.names or ())


def test_no_two_flags_share_a_bit() -> None:
    bits = [f.place.bit for f in FIELDS if isinstance(f.place, Flag)] + [schema.UNSHOWN]
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


def test_each_value_of_a_span_comes_back_from_columns() -> None:
    """Also those that differ from the default in one field alone."""
    plain = Span(0, "x", "communication", 1, 2)
    others = {int: 5, str: "y", bool: None}
    for field in fields(Span):
        value = getattr(plain, field.name)
        changed = not value if isinstance(value, bool) else others[type(value)]
        if field.name in schema.CODES:
            changed = {"kind": "call", "device": "CPU:3"}[field.name]
        span = Span(**{f.name: getattr(plain, f.name) for f in fields(Span)} | {field.name: changed})
        assert list(Columns.of([span])) == [span], field.name
