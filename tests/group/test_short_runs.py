"""A run without changes sends one frame to each rank and does no unnecessary work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import labkit as lab
from labkit.ipc import pickling
from labkit.ipc.channel import Channel
from labkit.ipc.pickling import Received, Sent
from labkit.ipc.protocol import CallFunction, Changes, Frame, decode
from labkit.worker.process_state import ProcessState

Frames = list[tuple[type, Frame]]


@pytest.fixture(scope="module")
def ranks() -> Iterator[lab.Group]:
    with lab.Group(3, runtime="bare", timeout_s=200) as group:
        group.run(int)
        yield group


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Frames:
    """The frames that this process sends, with the classes of their messages."""
    frames: Frames = []
    send = Channel.send_frame

    def keep(to: Channel, frame: Frame) -> None:
        frames.append((type(decode(frame)), frame))
        send(to, frame)

    monkeypatch.setattr(Channel, "send_frame", keep)
    return frames


@pytest.mark.processes
def test_a_run_keeps_the_load_of_the_machine_at_its_end(ranks: lab.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labkit.group.run.machine_load", lambda: 6.2)
    run = ranks.run(int)
    monkeypatch.setattr("labkit.group.run.machine_load", lambda: 0.0)
    assert run.load == 6.2


@pytest.mark.processes
def test_one_frame_for_each_rank_pickled_once(ranks: lab.Group, sent: Frames) -> None:
    ranks.run(int)  # pytest names the test in a variable, which counts as a change
    sent.clear()
    assert ranks.run(int).results == [0, 0, 0]
    assert [kind for kind, _ in sent] == [CallFunction] * 3
    assert len({id(frame) for _, frame in sent}) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setenv("LABKIT_TEST_SHORT", "new"),
        lambda patch: patch.syspath_prepend("a folder that is not there"),
    ],
    ids=["variable", "path"],
)
@pytest.mark.processes
def test_a_change_is_sent_once(
    ranks: lab.Group, sent: Frames, change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.run(int)  # pytest names the test in a variable, which counts as a change
    sent.clear()
    with monkeypatch.context() as patch:
        change(patch)
        ranks.run(int)
        ranks.run(int)
        assert [kind for kind, _ in sent] == [Changes] * 3 + [CallFunction] * 6


def test_a_state_holds_until_something_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = ProcessState.now()
    assert before.holds()
    with monkeypatch.context() as patch:
        patch.setenv("LABKIT_TEST_SHORT", "new")
        assert not before.holds()
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        assert not before.holds()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(tmp_path)])
        assert not before.holds()
    assert before.holds()


def test_a_path_object_is_compared_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    before = ProcessState.now()
    assert before.path[-1] == str(tmp_path)
    assert ProcessState.now().since(before) is None


@pytest.mark.parametrize("result", [None, True, 3, -2.5, "a text", ""], ids=repr)
def test_a_plain_result_needs_no_pickler_of_our_own(result: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def unused(*_: object) -> None:
        raise AssertionError("used")

    monkeypatch.setattr(pickling, "_Pickler", unused)
    monkeypatch.setattr(pickling, "_Unpickler", unused)
    back = pickling.unpack(pickling.pack(result, received=Received()), sent=Sent())
    assert (back, type(back)) == (result, type(result))


def test_a_number_of_a_librarys_class_keeps_its_class() -> None:
    back = pickling.unpack(pickling.pack(np.float64(2.5), received=Received()), sent=Sent())
    assert (back, type(back)) == (2.5, np.float64)


def test_a_text_that_looks_like_a_reference_stays_a_text() -> None:
    text = pickling._REFERENCE.decode()
    assert pickling.unpack(pickling.pack([text], received=Received()), sent=Sent()) == [text]
