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


def content_with(change: Callable[[Any], Any]) -> Callable[[str], str]:
    def changed(text: str) -> str:
        content = json.loads(text)
        change(content)
        return json.dumps(content)

    return changed


def spans_of(content: Any) -> list[Any]:
    return [e for e in content["traceEvents"] if e["ph"] == "X" and e["cat"] in ("compute", "communication")]


def each_span(**changes: Any) -> Callable[[str], str]:
    return content_with(lambda content: [span.update(changes) for span in spans_of(content)])


def each_argument(**changes: Any) -> Callable[[str], str]:
    return content_with(lambda content: [span["args"].update(changes) for span in spans_of(content)])


def each(event_is: Callable[[Any], bool], **changes: Any) -> Callable[[str], str]:
    return content_with(lambda content: [event.update(changes) for event in content["traceEvents"] if event_is(event)])


VALUE = "one of its values is of another type, form or size than labkit writes"

BROKEN: dict[str, tuple[Callable[[str], str | bytes], str]] = {
    "empty": (lambda _: "", "it ends in the middle"),
    "blank": (lambda _: " \n", "it ends in the middle"),
    "cut": (lambda text: text[: len(text) // 2], "it (ends in the middle|is not valid JSON)"),
    "cut at the end": (lambda text: text[:-1], "it ends in the middle"),
    "no JSON": (lambda text: text.replace(":", "=", 1), "it is not valid JSON"),
    "no text": (lambda _: bytes(range(128, 256)), "it is damaged"),
    "deep": (lambda _: "[" * 100_000, "it is damaged"),
    "a list": (lambda _: "[1, 2]", "no list of traceEvents"),
    "another shape": (lambda _: '{"traceEvents": {}}', "no list of traceEvents"),
    "another program's": (lambda _: '{"traceEvents": [], "otherData": {"version": 1}}', "it is a trace of another program"),
    "lacks ranks": (content_with(lambda c: c["otherData"].pop("ranks")), "it lacks 'ranks'"),
    "a rank less": (
        content_with(lambda c: c["otherData"].update(ranks=["a"], dropped=[0], nodes=[0], link=None)),
        "it has a .* rank",
    ),
    "a wait is a word": (content_with(lambda c: c["otherData"].update(waits=["world"])), "one of its waits"),
    "a wait of no rank": (content_with(lambda c: c["otherData"].update(waits=[["world", 2, 1, 75]])), "one of its waits"),
    "a wait at a word": (content_with(lambda c: c["otherData"].update(waits=[["world", 0, 1, "noon"]])), "one of its waits"),
    "the end first": (
        content_with(lambda c: c["otherData"].update(start_ns=9, end_ns=1)),
        "its start and end are not valid times",
    ),
    "begins at a word": (content_with(lambda c: c["otherData"].update(zero_ns="noon")), "its start and end are not valid times"),
    "an event is a word": (content_with(lambda c: c["traceEvents"].append("event")), "one of its events is not an object"),
    "lacks a time": (content_with(lambda c: [s.pop("dur") for s in spans_of(c)]), "it lacks 'dur'"),
    "negative length": (each_span(dur=-5), "a span that ends before it starts"),
    "time is a word": (each_span(ts="now"), VALUE),
    "time is no number": (each_span(ts=float("nan")), VALUE),
    "time is infinite": (each_span(ts=float("inf")), VALUE),
    "time is huge": (each_span(ts=1e300), f"{VALUE}|at an impossible time"),
    "rank is huge": (each_span(pid=10**30), VALUE),
    "rank is negative": (each_span(pid=-1), "a span of an unknown rank"),
    "name is a list": (each_span(name=[1]), VALUE),
    "name is a number": (each_span(name=5), "a name that is not a string"),
    "arguments are a list": (each_span(args=[1]), VALUE),
    "a value of no rank": (each(lambda e: "value" in e["args"], pid=9), "a value of an unknown rank"),
    "a profiled event of no rank": (each(lambda e: "track" in e["args"], pid=9), "a profiled event of an unknown rank"),
    "a profiled event of negative length": (each(lambda e: "track" in e["args"], dur=-1), "a profiled event that ends before"),
    "negative size": (each_argument(nbytes=-1), "a span of a negative size"),
    "peer is nobody": (each_argument(peer=7), "an unknown peer"),
    "root is nobody": (each_argument(root=7), "an unknown root"),
    "gzip of nonsense": (lambda _: gzip.compress(b"nonsense"), "it is not valid JSON"),
    "gzip cut": (lambda text: gzip.compress(text.encode())[:-20], "it is damaged"),
    "gzip damaged": (lambda text: gzip.compress(text.encode())[:40] + b"\xff" * 300, "it is damaged|it cannot be read"),
    "gzip in name alone": (lambda _: b"\x1f\x8b", "it is damaged"),
}
ENTRIES: dict[str, list[Any]] = {
    "ranks": [[0, 1]],
    "dropped": [["many", 0], [0, -1]],
    "nodes": [[0], [0, 10**29], ["a", "b"]],
    "link": [{"gbit_per_s": 1}],
    "simulated": [1, 10**12],
    "replayed": ["perhaps"],
    "cores": ["two", -1],
    "clock_error_ns": [-1, "1 ms", 10**29],
}
for name, values in ENTRIES.items():
    for value in values:
        change = content_with(lambda c, new={name: value}: c["otherData"].update(new))  # type: ignore[misc]
        BROKEN[f"{name}={value}"] = change, f"its entry '{name}' is invalid"


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_one_clear_error(name: str, text: str, tmp_path: Path) -> None:
    change, says = BROKEN[name]
    changed = change(text)
    path = tmp_path / "broken.json"
    path.write_bytes(changed if isinstance(changed, bytes) else changed.encode())
    with pytest.raises(LabError, match=rf"broken.json' is not a trace that labkit wrote .*: .*({says})") as caught:
        load_trace(path)
    assert len(str(caught.value).splitlines()) == 1


def test_fields_of_a_later_version_are_ignored(text: str, tmp_path: Path) -> None:
    content = json.loads(text)
    content["later"] = content["otherData"]["later"] = 1
    content["traceEvents"] += [{"ph": "Z"}, {"ph": "b", "cat": "other", "id": 1}]
    for span in spans_of(content):
        span["args"]["later"] = span["later"] = [1]
    path = tmp_path / "later.json"
    path.write_text(json.dumps(content))
    assert load_trace(path).spans == a_trace().spans


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


@pytest.mark.parametrize("seed", range(4))
def test_random_damage_to_the_values(seed: int, text: str, tmp_path: Path) -> None:
    """Whatever is read can be used: nothing fails later, in a figure."""
    dice, content, path = random.Random(seed), json.loads(text), tmp_path / "x.json"
    refused = 0
    for _ in range(ROUNDS):
        path.write_text(json.dumps(damaged(content, dice)))
        try:
            trace = load_trace(path)
        except LabError as error:
            refused += len(str(error).splitlines())
        else:
            use(trace)
    assert 0 < refused < ROUNDS


@pytest.mark.parametrize("packed", [False, True])
def test_random_damage_to_the_bytes(packed: bool, text: str, tmp_path: Path) -> None:
    dice, path = random.Random(5), tmp_path / "x.json"
    data = gzip.compress(text.encode(), mtime=0) if packed else text.encode()
    for _ in range(ROUNDS):
        wrong = bytearray(data)
        for _ in range(dice.choice((1, 2, 20))):
            wrong[dice.randrange(len(wrong))] = dice.randrange(256)
        path.write_bytes(wrong[: dice.randrange(len(wrong))] if dice.random() < 0.3 else wrong)
        try:
            use(load_trace(path))
        except LabError:
            continue


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
def test_a_folder_without_traces(copied: Path) -> None:
    (copied / "folder.json").mkdir()
    (copied / "list.json").write_text("[1]")
    (copied / "half.json").write_text('{"began_unix_ns": 1')
    (copied / "bytes.json").write_bytes(b"\xff\xfe\x00")
    (copied / "lacking.json").write_text('{"began_unix_ns": 1, "rank": 0}')
    (copied / "lacking.ring").write_bytes(b"")
    assert "mine" in [s.name for s in load_trace(copied)]


@pytest.mark.processes
def test_a_truncated_ring_is_reported(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (ring,) = copied.glob("*.ring")
    ring.write_bytes(ring.read_bytes()[:1000])
    assert len(load_trace(copied)) == 0
    assert "what rank 0 left cannot be read" in capsys.readouterr().out


@pytest.mark.processes
def test_random_damage_to_the_description_of_a_rank(copied: Path) -> None:
    dice = random.Random(7)
    (about,) = copied.glob("*.json")
    description = json.loads(about.read_text())
    for _ in range(25):
        about.write_text(json.dumps(damaged(description, dice)))
        with contextlib.suppress(LabError):
            use(load_trace(copied))


@pytest.mark.processes
def test_random_damage_to_records(copied: Path) -> None:
    dice = random.Random(7)
    (ring,) = copied.glob("*.ring")
    data = ring.read_bytes()
    written = np.flatnonzero(np.frombuffer(data, np.int64)) * 8  # most of it was never written
    for _ in range(12):
        wrong = bytearray(data)
        for at in dice.sample(written.tolist(), dice.choice((1, 3, 10))):
            wrong[at : at + 8] = dice.randbytes(8)
        ring.write_bytes(wrong)
        with contextlib.suppress(LabError):
            use(load_trace(copied))
