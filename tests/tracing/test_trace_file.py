"""Broken trace files of every kind raise one clear error each; and where a trace is written."""

from __future__ import annotations

import contextlib
import copy
import errno
import gzip
import json
import mmap
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import chrome

from labkit.costs.link import Link
from labkit.costs.network import Network
from labkit.errors.exceptions import LabError
from labkit.recording.events import WAITS, Columns, ProfilerEvent, Scalar
from labkit.recording.ring_buffer import RING_BYTES, RingWriter
from labkit.recording.schema import Span
from labkit.tracing.load import load_trace
from labkit.tracing.trace import Trace
from labkit.tracing.trace_file import KEY

ROUNDS = 150  # rounds of random damage


def a_trace() -> Trace:
    """A trace with one of everything."""
    spans = [
        Span(0, "forward", "compute", 10, 40, line="cell 1, line 2"),
        Span(0, "all_reduce", "communication", 40, 70, wait_start_ns=45, wait_end_ns=70, nbytes=64, group="world", match=1),
        Span(1, "all_reduce", "communication", 50, 70, nbytes=64, group="world", match=1, done=False),
        Span(0, "send", "communication", 70, 80, peer=1, nbytes=8, group="p2p 0>1", match=1),
        Span(1, "recv", "communication", 60, 80, peer=0, nbytes=8, group="p2p 0>1", match=1),
        Span(1, "step", "step", 10, 90),
        Span(1, "train", "call", 5, 95),
    ]
    columns = Columns.of(spans)
    return Trace(
        columns,
        [Scalar(0, "loss", 20, 0.5), Scalar(1, "loss", 30, float("nan"))],
        ranks=["rank 0", "rank 1"],
        notes=["a note"],
        profile=[ProfilerEvent(0, "cpu", "aten::mm", "operator", 12, 30)],
        nodes=[0, 1],
        link=Network(nodes=2, inside=Link.nvlink4, between=Link(gbit_per_s=1, latency_us=50), ranks=2),
        waits=np.array([(0, columns.name_id("world"), 1, 75), (1, columns.name_id("p2p 0>1"), 1, 85)], WAITS),
    )


def use(trace: Trace) -> None:
    """What figures and tables read from a trace."""
    assert repr(trace)
    assert len(trace.shares()) == len(trace.ranks)
    assert len(list(trace)) == len(trace)
    assert all(trace.columns.names[group] is not None for group in trace.waits["group"])
    trace.ready(), trace.step_bounds(), json.dumps(chrome(trace))


@pytest.fixture
def text(tmp_path: Path) -> str:
    return a_trace().save(tmp_path / "good.json").read_text()


def everything(trace: Trace) -> list[Any]:
    """All that a trace holds, to compare it with another."""
    waits = [(rank, trace.columns.names[group], match, time_ns) for rank, group, match, time_ns in trace.waits.tolist()]
    return [trace.spans, repr(trace.scalars), trace.profile, waits, trace.info, trace.start_ns, trace.end_ns]


def at_key(text: str, change: Callable[[str], str]) -> str:
    """The file with another text behind the key."""
    before, key, trace = text.rpartition(f'"{KEY}":')
    return before + key + change(trace)


SAYS = "it is cut, damaged, or of another program or version of labkit: save the run again|it cannot be read"

BROKEN: dict[str, Callable[[str], str | bytes]] = {
    "empty": lambda _: "",
    "blank": lambda _: " \n",
    "cut": lambda text: text[: len(text) // 2],
    "cut at the end": lambda text: text[:-4],
    "cut behind the key": lambda text: at_key(text, lambda trace: trace[:0]),
    "cut in the checksum": lambda text: at_key(text, lambda trace: trace[:4]),
    "a character less": lambda text: at_key(text, lambda trace: trace[:500] + trace[501:]),
    "another checksum": lambda text: at_key(text, lambda trace: '"AAAA' + trace[5:]),
    "no text": lambda _: bytes(range(128, 256)),
    "deep": lambda _: "[" * 100_000,
    "a list": lambda _: "[1, 2]",
    "another shape": lambda _: '{"traceEvents": {}}',
    "another program's": lambda _: '{"traceEvents": [], "otherData": {"version": 1}}',
    "another program's text": lambda text: at_key(text, lambda _: '"abcd"}'),
    "another program's number": lambda text: at_key(text, lambda _: "5}"),
    "an earlier version's": lambda _: '{"traceEvents": [], "otherData": {"labkit": 1, "ranks": ["rank 0"], "zero_ns": 0}}',
    "gzip of nonsense": lambda _: gzip.compress(b"nonsense"),
    "gzip cut": lambda text: gzip.compress(text.encode())[:-20],
    "gzip damaged": lambda text: gzip.compress(text.encode())[:40] + b"\xff" * 300,
    "gzip in name alone": lambda _: b"\x1f\x8b",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_one_clear_error(name: str, text: str, tmp_path: Path) -> None:
    changed = BROKEN[name](text)
    path = tmp_path / "broken.json"
    path.write_bytes(changed if isinstance(changed, bytes) else changed.encode())
    with pytest.raises(LabError, match=rf"broken.json' is not a trace that labkit wrote .*: ({SAYS})") as caught:
        load_trace(path)
    assert len(str(caught.value).splitlines()) == 1


def test_all_of_a_trace_comes_back(text: str, tmp_path: Path) -> None:
    path = tmp_path / "again.json"
    for again in (text, json.dumps(json.loads(text), indent=1)):  # a program may have written it anew
        path.write_text(again)
        assert everything(load_trace(path)) == everything(a_trace())


def test_a_file_of_another_version_may_have_other_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = a_trace()
    data = trace.columns.data
    trace.columns.data = np.empty(len(data), [("later", "<i8"), *((n, data.dtype[n]) for n in data.dtype.names if n != "peer")])
    for name in set(data.dtype.names) - {"peer"}:
        trace.columns.data[name] = data[name]
    monkeypatch.setattr(Trace, "info", a_trace().info | {"later": 1})
    monkeypatch.setattr("labkit.tracing.trace.write_events", lambda *_: iter(()))
    path = trace.save(tmp_path / "later.json")
    assert load_trace(path).spans == tuple(replace(span, peer=-1) for span in a_trace().spans)


def test_a_file_without_read_permission(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)

    def refuse(*_: Any) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(LabError, match=r"mine.json' is not a trace .*: it cannot be read: Permission denied"):
        load_trace(path)


def damaged(content: Any, dice: random.Random) -> Any:
    """The same data with other values in some places."""
    content = copy.deepcopy(content)
    places: list[tuple[Any, Any]] = []

    def look(part: Any) -> None:
        for key, value in list(part.items() if isinstance(part, dict) else enumerate(part)):
            places.append((part, key))
            if isinstance(value, (dict, list)):
                look(value)

    look(content)
    for part, key in dice.sample(places, dice.choice((1, 1, 2, 5))):
        others: list[Any] = [None, -1, 0, 1 << 70, 1e400, float("nan"), "", "x", [], {}, True, -0.5, [[]]]
        value = dice.choice([*others, "drop"])
        if value == "drop" and isinstance(part, dict):
            part.pop(key, None)
        elif isinstance(part, dict) or key < len(part):
            part[key] = value
    return content


@pytest.mark.parametrize("packed", [False, True])
def test_random_damage_to_the_bytes(packed: bool, text: str, tmp_path: Path) -> None:
    dice, path = random.Random(5), tmp_path / "x.json"
    data = gzip.compress(text.encode(), mtime=0) if packed else text.encode()
    refused = 0
    for _ in range(ROUNDS):
        wrong = bytearray(data)
        for _ in range(dice.choice((1, 2, 20))):
            wrong[dice.randrange(len(wrong))] = dice.randrange(256)
        path.write_bytes(wrong[: dice.randrange(len(wrong))] if dice.random() < 0.3 else wrong)
        try:
            trace = load_trace(path)
        except LabError:
            refused += 1
        else:
            assert everything(trace) == everything(a_trace()), "only its events were damaged"
    assert 0 < refused <= ROUNDS


# Where a trace is written


def test_the_home_folder_and_compression(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    trace = a_trace()
    plain, packed = trace.save("~/x.json"), trace.save("~/x.json.gz")
    assert (plain, packed) == (tmp_path / "x.json", tmp_path / "x.json.gz")
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    packed.rename(tmp_path / "renamed.json")  # the content decides, not the name
    for path in ("~/x.json", "~/renamed.json"):
        assert load_trace(path).spans == trace.spans


@pytest.mark.parametrize("place", ["nowhere/x.json", "nowhere/x.json.gz", "."])
def test_a_place_that_cannot_be_written_to(place: str, tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"the trace cannot be written to '.*': (No such file|Is a directory)"):
        a_trace().save(tmp_path / place)


@contextlib.contextmanager
def full_disk(free_bytes: int) -> Iterator[None]:
    """Let this process write no file that is longer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("name", ["x.json", "x.json.gz"])
def test_on_a_full_disk_an_older_trace_stays(name: str, tmp_path: Path) -> None:
    path = a_trace().save(tmp_path / name)
    path.chmod(0o640)
    before = path.read_bytes()
    with full_disk(100), pytest.raises(LabError, match=r"the trace cannot be written to '.*': File too large"):
        a_trace().save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    (tmp_path / "link.json").symlink_to(path)
    a_trace().save(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "x.json"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    a_trace().save(pipe)
    assert os.read(reader, 16) == b'{"traceEvents":['
    os.close(reader)
    assert pipe.is_fifo()


# Folders


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that a script left."""
    found = tmp_path_factory.mktemp("left") / "traces"
    script = "import labkit as lab\nwith lab.span('mine'): lab.record(loss=1.0)"
    environment = {**os.environ, "LABKIT_TRACE": str(found)}
    subprocess.run([sys.executable, "-c", script], env=environment, timeout=200, check=True)
    return found


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def test_waits_for_completed_operations_are_read_from_a_folder(tmp_path: Path) -> None:
    with open(tmp_path / "rank0.ring", "wb+") as file:
        file.truncate(RING_BYTES)
        writer = RingWriter(mmap.mmap(file.fileno(), RING_BYTES))
    writer.write_communication("all_reduce", 10, 20, group="world", match=1)
    writer.write_wait("world", 1, 30)
    about: dict[str, Any] = dict.fromkeys(("rank", "restart", "began_unix_ns", "began_ns"), 0) | {"world_size": 1, "ended_ns": 40}
    about |= dict.fromkeys(("host", "machine", "script", "run_id", "run", "reference", "master"), "here") | {"readings": []}
    (tmp_path / "rank0.json").write_text(json.dumps(about))
    trace = load_trace(tmp_path)
    assert trace.waits.tolist() == [(0, trace.columns.name_id("world"), 1, 30)]
    assert [s.name for s in trace] == ["all_reduce", "here"]


def test_a_folder_without_files(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="no trace in the folder"):
        load_trace(tmp_path)


@pytest.mark.processes
def test_a_folder_with_other_files(copied: Path) -> None:
    (copied / "folder.json").mkdir()
    (copied / "list.json").write_text("[1]")
    (copied / "half.json").write_text('{"began_unix_ns": 1')
    (copied / "bytes.json").write_bytes(b"\xff\xfe\x00")
    (copied / "lacking.json").write_text('{"began_unix_ns": 1, "rank": 0}')
    (copied / "lacking.ring").write_bytes(b"")
    assert "mine" in [s.name for s in load_trace(copied)]


@pytest.mark.processes
def test_damage_to_the_files_of_a_rank(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A random one to its description, and to its records; then these are truncated."""
    dice = random.Random(7)
    (about,), (ring,) = copied.glob("*.json"), copied.glob("*.ring")
    description, data = about.read_text(), ring.read_bytes()
    for _ in range(25):
        about.write_text(json.dumps(damaged(json.loads(description), dice)))
        with contextlib.suppress(LabError):
            use(load_trace(copied))
    about.write_text(description)
    written = np.flatnonzero(np.frombuffer(data, np.int64)) * 8  # most of it was never written
    for _ in range(12):
        wrong = bytearray(data)
        for at in dice.sample(written.tolist(), dice.choice((1, 3, 10))):
            wrong[at : at + 8] = dice.randbytes(8)
        ring.write_bytes(wrong)
        with contextlib.suppress(LabError):
            use(load_trace(copied))
    capsys.readouterr()
    ring.write_bytes(data[:1000])
    assert len(load_trace(copied)) == 0
    assert "what rank 0 left cannot be read" in capsys.readouterr().out
