"""The defect of TensorFlow's profiler is avoided while a session stops, and TensorFlow is left alone otherwise."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

import labkit as lab

pytestmark = [pytest.mark.processes, pytest.mark.tf]
if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("needs TensorFlow", allow_module_level=True)


@pytest.fixture(scope="module")
def one() -> Iterator[lab.Group]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABKIT_TENSORFLOW_TIMELINE", "0")  # the functions have sessions of their own
        with lab.Group(1, runtime="tensorflow", timeout_s=200) as group:
            yield group


def stop_sessions(folder: str, times: int) -> list[tuple[bool, bool, int, int]]:
    """For each session: whether the entry changed during the stop and after it; deques that were deferred, and that
    remain."""
    import threading

    import tensorflow as tf
    from tensorflow.python.profiler.internal import _pywrap_profiler

    from labkit.worker.runtimes.tensorflow.profiler_defect import safe_stop

    stopping, seen = safe_stop(), []
    assert stopping is not None
    for number in range(times):
        session = _pywrap_profiler.ProfilerSession()
        session.start(f"{folder}/{number}", {})
        threads = [threading.Thread(target=lambda: tf.reduce_sum(tf.ones(3))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        before = stopping.entry.value
        with stopping, stopping:
            inside = stopping.entry.value
            session.export_to_tb()
            aside = len(stopping._deques)
        seen.append((inside != before, stopping.entry.value != before, aside, len(stopping._deques)))
    return seen


def test_the_librarys_entry_changes_only_while_a_session_stops(one: lab.Group, tmp_path: object) -> None:
    for within, after, aside, left in one.run(stop_sessions, str(tmp_path), 3).results[0]:
        assert (within, after, left) == (True, False, 0)
        assert aside >= 3  # each of the threads has one


def look_with_another(version: str, machine: str, destructor: str) -> bool:
    import platform

    import tensorflow as tf

    from labkit.worker.runtimes.tensorflow import profiler_defect

    tf.__version__ = version
    platform.machine = lambda: machine
    profiler_defect.DESTRUCTOR = destructor or profiler_defect.DESTRUCTOR
    return profiler_defect.safe_stop() is not None


@pytest.mark.parametrize(
    ("version", "machine", "destructor", "known"),
    [
        ("2.21.0", "x86_64", "", True),
        ("2.22.0", "x86_64", "", False),
        ("2.21.0", "aarch64", "", False),
        ("2.21.0", "x86_64", "_ZN3tsl8profiler15TraceMeRecorder4StopEv", False),  # which has no entry
        ("2.21.0", "x86_64", "malloc", False),  # which is in another library
        ("2.21.0", "x86_64", "no_such_function", False),
    ],
)
def test_an_unknown_library_is_left_alone(one: lab.Group, version: str, machine: str, destructor: str, known: bool) -> None:
    assert one.run(look_with_another, version, machine, destructor).results == [known]


def profile_with_another_version() -> list[str]:
    import tensorflow as tf

    from labkit.recording.record import here
    from labkit.worker.runtimes.tensorflow.profiler_events import Role
    from labkit.worker.runtimes.tensorflow.profiler_timeline import ProfilerTimeline

    tf.__version__ = "2.22.0"
    assert here.recorder is not None
    timeline = ProfilerTimeline(here.recorder, Role(0, {}, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LABKIT_TENSORFLOW_TIMELINE")
        notes = timeline.install()
    timeline.begin()
    return [*notes, str(timeline._session)]


def test_without_it_nothing_is_profiled_and_a_line_says_so(one: lab.Group) -> None:
    (note, session) = one.run(profile_with_another_version).results[0]
    assert "no operations of TensorFlow" in note
    assert session == "None"
