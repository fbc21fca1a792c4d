"""The number of cores that a process may use, and how long its threads have waited for one."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_control_groups import fake_control_groups

from labkit.recording import cores as module
from labkit.recording.cores import no_delays, thread_delays, usable_cores


@pytest.fixture
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)


def test_the_cores_of_the_processs_affinity_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5, 7}, raising=False)
    assert usable_cores(tmp_path) == 3


@pytest.mark.parametrize(("count", "cores"), [(8, 8), (None, 1)])
def test_without_affinities_all_cores_count(
    monkeypatch: pytest.MonkeyPatch, count: int | None, cores: int, tmp_path: Path
) -> None:
    """As on macOS."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize(
    ("version", "files", "cores"),
    [
        ("v2", {"cpu.max": "max 100000\n"}, 16),
        ("v2", {"cpu.max": "200000 100000\n"}, 2),
        ("v2", {"cpu.max": "50000 100000\n"}, 0.5),
        ("v2", {"cpu.max": "6400000 100000\n"}, 16),  # more than the machine has
        ("v2", {"pod/cpu.max": "150000 100000\n", "pod/inner/cpu.max": "max 100000\n"}, 1.5),
        ("v2", {"pod/cpu.max": "300000 100000\n", "pod/inner/cpu.max": "100000 50000\n"}, 2),
        ("v1", {"cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, 16),
        ("v1", {"cpu,cpuacct/pod/cpu.cfs_quota_us": "250000\n", "cpu,cpuacct/pod/cpu.cfs_period_us": "100000\n"}, 2.5),
    ],
)
@pytest.mark.usefixtures("sixteen_cores")
def test_the_smallest_quota_of_the_processs_control_groups_counts(
    version: str, files: dict[str, str], cores: float, tmp_path: Path
) -> None:
    folder = fake_control_groups(tmp_path, version, "/pod/inner")
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    assert usable_cores(tmp_path) == cores


# The threads' delays.


@pytest.fixture
def schedstat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in place of the system's."""
    path = tmp_path / "schedstat"
    path.write_text("5000 70 3\n")
    monkeypatch.setattr(module, "RUN_QUEUE", str(path))
    return path


def test_the_delay_is_the_time_in_the_run_queue(schedstat: Path) -> None:
    of_thread = thread_delays()
    delay_ns = of_thread()
    assert (delay_ns(), of_thread()()) == (70, 70)
    schedstat.write_text("6000 1234567890123 4\n")
    assert delay_ns() == 1234567890123


def test_where_the_system_counts_no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RUN_QUEUE", "/nowhere/schedstat")
    assert thread_delays() is no_delays
    assert no_delays()() == 0


@pytest.mark.usefixtures("schedstat")
def test_a_thread_opens_one_file_and_closes_it_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    of_thread, opened, closed = thread_delays(), [], []
    real_open, real_close = os.open, os.close

    def note_open(*how: int) -> int:
        opened.append(real_open(*how))  # type: ignore[arg-type]
        return opened[-1]

    def note_close(file: int) -> None:
        real_close(file)
        closed.append(file)

    monkeypatch.setattr(module.os, "open", note_open)
    monkeypatch.setattr(module.os, "close", note_close)

    def ask() -> None:
        assert of_thread() is of_thread()
        assert of_thread()() == 70

    for _ in range(2):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert len(opened) == 2
    assert opened == closed


@pytest.mark.usefixtures("schedstat")
def test_a_program_with_too_many_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError("Too many open files")

    monkeypatch.setattr(module.os, "open", fail)
    assert thread_delays()()() == 0


@pytest.mark.skipif(not os.path.exists(module.RUN_QUEUE), reason="this system does not count delays")
def test_each_thread_has_its_own_delay_which_others_may_read() -> None:
    of_thread = thread_delays()
    found: list[Callable[[], int]] = []
    told, over = threading.Event(), threading.Event()

    def ask() -> None:
        found.append(of_thread())
        told.set()
        assert over.wait(60)

    thread = threading.Thread(target=ask)
    thread.start()
    assert told.wait(60)
    (other,), own = found, of_thread()
    assert other is not own
    for delay, task in ((other, f"/proc/self/task/{thread.native_id}/schedstat"), (own, module.RUN_QUEUE)):
        before, now, after = delay(), int(Path(task).read_text().split()[1]), delay()
        assert before <= now <= after  # until it sleeps, the other thread may wait for a core
    over.set()
    thread.join()
    while other():  # `join` may return before the kernel has removed the thread
        time.sleep(0.001)
