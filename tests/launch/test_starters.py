"""Processes start both ways and always end: with their group, server or notebook process, however these end."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from processes import GONE_LIMIT_S, left_after

import labkit as lab
from labkit.errors.exceptions import LabError, Stopped
from labkit.errors.exit_reasons import Cause
from labkit.group.open_groups import Notebook, default_start, notebook, warm_up
from labkit.group.output import Notice, Output
from labkit.launch import fork_server
from labkit.launch.capacity import FILES_PER_RANK, STARTING_FILES, raise_limit
from labkit.launch.descendants import _await_end
from labkit.launch.rank_process import End, RankProcess, Status
from labkit.launch.server_requests import Failed, Fork, Forked, Reply, Request
from labkit.launch.starters import ForkStarter, SpawnStarter
from labkit.worker.network_namespace import PrivateNetwork

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def ranks(start: str) -> Iterator[lab.Group]:
    with lab.Group(2, runtime="bare", start=start, timeout_s=200) as group:
        yield group


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[[str, str], Any]]:
    """Starts a Python program whose ranks start in this way; it ends with the test."""
    with contextlib.ExitStack() as ends:

        def run(source: str, start: str) -> subprocess.Popen[str]:
            path = tmp_path / "program.py"
            path.write_text(textwrap.dedent(source))
            environment = os.environ | {"PYTHONPATH": str(ROOT), "LABKIT_START": start}
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            program: subprocess.Popen[str] = subprocess.Popen([sys.executable, str(path)], env=environment, text=True, **pipes)
            ends.callback(program.communicate)
            ends.callback(program.kill)
            return program

        yield run


def reported(program: subprocess.Popen[str]) -> Any:
    """The next line of JSON that a program prints; other lines before it are shown if there is none."""
    assert program.stdout is not None
    before = []
    while line := program.stdout.readline():
        with contextlib.suppress(ValueError):
            return json.loads(line)
        before.append(line)
    raise AssertionError("the program ended: " + "".join(before))


# How ranks start


def test_every_rank_draws_its_own_random_numbers(start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the server that they were forked from has loaded numpy."""
    monkeypatch.setattr("labkit.worker.runtimes.base.Runtime.preload", ("numpy.random", "labkit.worker.main_loop"))

    def draw() -> tuple[float, float]:
        return random.random(), float(np.random.rand())  # noqa: NPY002  # this is the generator that a fork copies

    with lab.Group(2, runtime="bare", start=start) as group:
        first, second = group.run(draw).results
    assert not set(first) & set(second)
    notebook.starters.pop(("numpy.random,labkit.worker.main_loop", start, "")).close()


def test_a_students_file_with_the_frameworks_name_is_shown(start: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('the student has another torch')")
    code = f"""
        import labkit as lab
        try:
            lab.Group(2, start={start!r}).run(int)
        except lab.RankError as error:
            failure = error.failures[0]
            print(failure.headline, "torch.py" in failure.traceback, sep="|")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=tmp_path,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1:] == ["RuntimeError: the student has another torch|True"], done.stderr


def test_a_slow_start_gives_no_notice_in_test_programs() -> None:
    """Their output is compared, as in lessons."""
    code = "from labkit.group.processes import SLOW_S, STARTING_S; print(SLOW_S, STARTING_S)"
    for more, expected in (({}, "180.0 180.0\n"), ({"LABKIT_SLOW_S": "20"}, "20.0 20.0\n")):
        done = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | more, cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert done.stdout == expected


def test_a_slow_start_says_once_what_it_waits_for(start: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An import that lasts until the notice has been printed."""
    go_on = tmp_path / "go on"
    source = f"""
        import os, time
        until = time.monotonic() + 150
        while not os.path.exists({str(go_on)!r}) and time.monotonic() < until:
            time.sleep(0.01)
    """
    (tmp_path / "a_framework.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("labkit.worker.runtimes.base.Runtime.preload", ("a_framework", "labkit.worker.main_loop"))
    monkeypatch.setattr("labkit.worker.runtimes.base.Runtime.package", "a_framework")
    monkeypatch.setattr("labkit.group.processes.STARTING_S", 0.1)
    said: list[str] = []

    def show(notice: Notice, text: str) -> None:
        said.append(text)
        go_on.touch()

    monkeypatch.setattr(Notice, "show", show)
    with lab.Group(2, runtime="bare", start=start) as group:
        assert group.run(os.getpid).results
        assert len(said) == 1
        assert said[0].startswith("labkit: starting 2 ranks: importing a_framework")
        group.run(os.getpid)
        assert len(said) == 1
    notebook.starters.pop(("a_framework,labkit.worker.main_loop", start, "")).close()


def test_a_rank_has_no_input_and_leads_its_own_process_group(ranks: lab.Group) -> None:
    def look() -> tuple[bool, str, str, list[str]]:
        answer = sys.stdin.readline() or "end of file"
        return os.getpgid(0) == os.getpid(), answer, os.getcwd(), sys.argv

    assert ranks.run(look).results == [(True, "end of file", os.getcwd(), [""])] * 2


def test_variables_that_the_notebook_sets_or_removes_later_reach_new_ranks(start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_TEST_REMOVED", "there when the server started")
    own = Notebook()
    monkeypatch.setattr("labkit.group.group.notebook", own)
    own.starter("bare", start)
    monkeypatch.setenv("LABKIT_TEST_NEW", "set after the server started")
    monkeypatch.delenv("LABKIT_TEST_REMOVED")
    names = ("LABKIT_TEST_NEW", "LABKIT_TEST_REMOVED")
    with contextlib.closing(own), lab.Group(1, runtime="bare", start=start) as group:
        assert group.run(lambda: [os.environ.get(n) for n in names]).results == [["set after the server started", None]]


def test_ranks_have_the_notebooks_folder_and_path(start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "helpers_of_a_student.py").write_text("def word(): return 'found'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])

    def f() -> str:
        from helpers_of_a_student import word  # type: ignore[import-not-found]

        return word() + Path("helpers_of_a_student.py").name

    with lab.Group(1, runtime="bare", start=start) as group:
        assert group.run(f).results == ["foundhelpers_of_a_student.py"]


def test_no_more_processes_are_kept_ready_than_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    ready: list[int] = []
    monkeypatch.setenv("LABKIT_START", "spawn")
    monkeypatch.setattr(notebook, "starter", lambda *_: SimpleNamespace(warm=ready.append))
    for cores in (0.5, 2.5, 64.0):
        monkeypatch.setattr("labkit.group.open_groups.usable_cores", lambda cores=cores: cores)
        warm_up("bare")
    assert ready == [1, 2, 4]


def test_the_default_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LABKIT_START", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert default_start() == "fork"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert default_start() == "spawn"
    with pytest.raises(lab.LabError, match="start='fork' needs Linux; elsewhere a forked process may hang"):
        lab.Group(1, runtime="bare", start="fork")
    monkeypatch.setenv("LABKIT_START", "fork")
    assert default_start() == "fork"
    monkeypatch.setenv("LABKIT_START", "frok")
    with pytest.raises(lab.LabError, match="LABKIT_START='frok': expected 'fork' or 'spawn'"):
        default_start()


# What a group leaves behind


def test_descriptors_and_threads_stay_the_same_over_many_groups(start: str) -> None:
    def once() -> None:
        with lab.Group(2, runtime="bare", start=start) as group:
            assert group.run(os.getpid).results != [os.getpid()] * 2

    def held() -> tuple[int, int]:
        """Descriptors (without those of spare ranks, one for each rank of the last group) and threads."""
        spares = sum(len(getattr(s, "_spares", [])) for s in notebook.starters.values())
        return len(os.listdir("/proc/self/fd")) - 3 * spares, threading.active_count()

    once()
    gc.collect()
    once()
    descriptors, threads = held()
    for _ in range(30 if start == "fork" else 5):
        once()
    until = time.monotonic() + 60
    while (now := held()) and (now[0] > descriptors or now[1] > threads) and time.monotonic() < until:
        gc.collect()  # a thread may be about to end
        time.sleep(0.05)
    assert now[0] <= descriptors  # fewer, if leftovers of an earlier test are collected only now
    assert now[1] <= threads


def test_the_garbage_collector_may_end_a_group_while_another_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may run on this very thread while the starter is in use; ending the group at once would deadlock."""
    old: list[lab.Group] = [lab.Group(1, runtime="bare", start="fork")]
    pids = old[0].run(os.getpid).results
    new = lab.Group(1, runtime="bare", start="fork")
    starter = notebook.starter("bare", "fork")
    ask = starter._ask

    def ask_and_collect(request: Request, *rest: Any) -> Reply:
        if isinstance(request, Fork):
            old.clear()
            gc.collect()
        return ask(request, *rest)

    monkeypatch.setattr(starter, "_ask", ask_and_collect)
    assert new.run(int).results == [0]
    assert not left_after(GONE_LIMIT_S, pids)
    new.close()


DAEMON = """
import os, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
print(os.getpid(), flush=True)
os.close(1)
time.sleep(600)
"""


def start_processes() -> list[int]:
    """A child, a daemon that has forked twice, a process in a session of its own, and a child of that."""
    child = subprocess.Popen(["sleep", "600"])
    forked = subprocess.run([sys.executable, "-c", DAEMON], stdout=subprocess.PIPE, text=True, check=True).stdout
    below = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert below.stdout is not None
    return [child.pid, int(forked), below.pid, int(below.stdout.readline())]


def test_processes_that_ranks_started_end_with_the_group(start: str) -> None:
    with lab.Group(2, runtime="bare", start=start) as group:
        pids = [pid for started in group.run(start_processes).results for pid in started]
        assert len(set(pids)) == 8
        assert all(psutil.pid_exists(pid) for pid in pids)
    assert not left_after(GONE_LIMIT_S, pids)


def start_shared_memory_manager() -> int:
    """Start a process with the name, the session and the life of torch's."""
    program = "import time; open('/proc/self/comm', 'w').write('torch_shm_manager'); print(flush=True); time.sleep(600)"
    manager = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    assert manager.stdout is not None
    manager.stdout.readline()
    return manager.pid


@pytest.mark.skipif(sys.platform != "linux", reason="a process changes its name in /proc")
def test_torchs_manager_of_shared_memory_has_time_to_clean_up(start: str) -> None:
    with lab.Group(1, runtime="bare", start=start) as group:
        (pid,) = group.run(start_shared_memory_manager).results
        manager = psutil.Process(pid)
    assert manager.is_running()
    assert manager.status() != psutil.STATUS_ZOMBIE
    manager.kill()
    assert not left_after(GONE_LIMIT_S, [pid])


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_CHILD_SUBREAPER")
def test_daemons_of_a_rank_that_was_killed_end_too() -> None:
    with lab.Group(2, runtime="bare", start="fork") as group:
        pids = group[0].run(start_processes).results[0]
        with pytest.raises(lab.RankError):
            group[0].run(lambda: os.kill(os.getpid(), signal.SIGKILL))
        assert not left_after(GONE_LIMIT_S, pids)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
def test_processes_end_if_descriptors_have_high_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has started a thousand ranks."""
    high = 1100
    if raise_limit(high + 100) <= high:
        pytest.skip("this process may not have so many open files")
    pidfd_open = os.pidfd_open

    def open_high(pid: int) -> int:
        fd = pidfd_open(pid)
        try:
            return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, high)
        finally:
            os.close(fd)

    monkeypatch.setattr(os, "pidfd_open", open_high)
    child = subprocess.Popen(["sleep", "600"])
    child.kill()
    _await_end(child.pid, time.monotonic() + 60)
    child.wait()


def test_the_open_files_of_a_rank_match_the_count_before_a_start(start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer, a process with a low limit could not start the ranks that it was allowed."""
    count, own = 16, 6  # and those of the group itself
    with lab.Group(1, runtime="bare", start=start) as warm:
        warm.run(int)
    opened = []
    connect, me = RankProcess.__init__, psutil.Process()

    def look(self: RankProcess, *arguments: Any) -> None:
        connect(self, *arguments)
        opened.append(me.num_fds())

    monkeypatch.setattr(RankProcess, "__init__", look)
    before = me.num_fds()
    with lab.Group(count, runtime="bare", start=start) as group:
        group.run(int)
        opened.append(me.num_fds())
    assert max(opened) - before <= count * (FILES_PER_RANK + STARTING_FILES) + own
    assert count * (FILES_PER_RANK - 1) < opened[-1] - before <= count * FILES_PER_RANK + own


@pytest.mark.parametrize("hard", [False, True])
def test_a_low_limit_of_open_files(hard: bool) -> None:
    """It is raised if the system allows it: in ranks, and in the notebook as far as the requested ranks need it."""
    script = f"""
        import resource
        import labkit as lab
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256 if {hard} else 4096))
        def limit(): return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        with lab.Group(2, runtime="bare") as group:
            print(group.run(limit).results, limit())
        try:
            with lab.Group(64, runtime="bare") as group:
                print(len(group.run(int).results), limit() > 256)
        except lab.LabError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=200, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    if hard:
        assert first == "[256, 256] 256"
        assert "the hard limit of this process is 256" in second
    else:
        assert first == "[4096, 4096] 256"
        assert second == "64 True"


# Deaths


def test_when_the_server_dies_the_run_says_so_and_the_next_one_works() -> None:
    def f() -> int:
        child = subprocess.Popen(["sleep", "600"])
        print(child.pid)
        return child.pid

    def hang() -> None:
        os.kill(server_pid, signal.SIGKILL)
        threading.Event().wait()

    with lab.Group(2, runtime="bare", start="fork", timeout_s=200) as group:
        children = group.run(f).results
        pids = group.run(os.getpid).results
        server_pid = notebook.starter("bare", "fork")._process.pid
        with pytest.raises(lab.RankError) as caught:
            group.run(hang)
        assert (caught.value.rank, caught.value.failures[0].cause) == (0, Cause.KILLED)
        assert not left_after(GONE_LIMIT_S, [*pids, *children])
        assert group.run(int).results == [0, 0]
        assert notebook.starter("bare", "fork")._process.pid != server_pid


def test_a_server_that_died_between_two_runs_is_replaced() -> None:
    with lab.Group(1, runtime="bare", start="fork") as group:
        group.run(int)
        process = notebook.starter("bare", "fork")._process
        process.kill()
        process.wait()
        with contextlib.suppress(lab.RankError):  # its rank's death may be noticed first
            group.run(int)
        assert group.run(int).results == [0]


@pytest.mark.parametrize("make", [ForkStarter, SpawnStarter])
def test_an_import_that_fails_is_reported(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # An exception is reported by the module's first use; this ends the process that imports.
    (tmp_path / "broken_module.py").write_text("class End(BaseException): pass\nraise End('broken at import')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with contextlib.closing(make(["no_such_module", "broken_module"], {})) as starter:
        if make is ForkStarter:
            with pytest.raises(lab.LabError, match=r"(?s)the process that starts ranks has ended.*End: broken at"):
                starter.start(1)
        else:
            (process,) = starter.start(1)
            assert process.sock.recv(1) == b"", "the stream ends with it"
            assert starter.end([process]) == [End(1)]
            assert starter.end([process]) == [End(1)], "asked again"
            process.close()


def test_a_system_that_cannot_start_more_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    buried: list[int] = []
    pids = iter([11, 12])

    def fork() -> int:
        try:
            return next(pids)
        except StopIteration:
            raise BlockingIOError(11, "Resource temporarily unavailable") from None

    monkeypatch.setattr(os, "fork", fork)
    monkeypatch.setattr(os, "setpgid", lambda *_: None)
    monkeypatch.setattr(fork_server, "_pidfd", lambda _: -1)
    near, far = socket.socketpair()
    with socket.socket() as unused:
        own = fork_server._Server(unused, PrivateNetwork())
        monkeypatch.setattr(own, "_reap", buried.extend)
        reply = own._reply(Fork([1, 2, 3]), [near.detach(), far.detach()])
    assert isinstance(reply, Failed)
    refused = "this system does not let 3 more processes start: [Errno 11] Resource temporarily unavailable."
    assert reply.reason.startswith(refused)
    assert buried == [1, 2]


def test_a_killed_spare_rank_is_not_used() -> None:
    with contextlib.closing(SpawnStarter([], {})) as starter:
        starter.warm(2)
        first, second = starter._spares
        os.kill(first.pid, signal.SIGKILL)
        assert not left_after(GONE_LIMIT_S, [first.pid])
        processes = starter.start(2)
        assert first.pid not in [p.pid for p in processes]
        assert second.pid in [p.pid for p in processes]
        starter.end(processes)
        for process in processes:
            process.close()


BUSY = """
    import json, os, subprocess, sys
    import torch.distributed as dist
    import labkit as lab
    from labkit.group.open_groups import notebook

    def begin():
        return os.getpid(), subprocess.Popen(["sleep", "600"]).pid

    def hang():
        print("ready", flush=True)
        if dist.get_rank() == 0:
            dist.barrier()                 # blocked in C++
        else:
            sum(range(10 ** 13))           # lets no other thread of Python run

    group = lab.Group(3)
    pids = [pid for pair in group.run(begin).results for pid in pair]
    servers = [s._process.pid for s in notebook.starters.values()]
    print(json.dumps(pids + servers), flush=True)
    group.run(hang)
"""


@pytest.mark.parametrize(("start", "server_first"), [("fork", False), ("spawn", False), ("fork", True)])
def test_nothing_is_left_when_the_notebooks_process_is_killed(
    start: str, server_first: bool, script: Callable[[str, str], Any]
) -> None:
    """Its ranks are blocked in C++ and in a computation that holds the GIL; each has started a process."""
    pytest.importorskip("torch")
    program = script(BUSY, start)
    pids = reported(program)
    assert len(pids) >= 7
    lines = [program.stdout.readline() for _ in range(3)]
    assert all("ready" in line for line in lines), lines
    if server_first:  # as when memory runs out: then only the system can end the ranks
        program.send_signal(signal.SIGSTOP)
        os.kill(pids.pop(), signal.SIGKILL)
        assert not left_after(GONE_LIMIT_S, pids[::2])
        for pid in pids[1::2]:
            os.kill(pid, signal.SIGKILL)  # the processes that they started have no parent
    program.kill()
    program.wait()
    assert not left_after(GONE_LIMIT_S, pids)


def test_nothing_is_left_when_the_notebooks_process_ends_by_itself(start: str, script: Callable[[str, str], Any]) -> None:
    """Without `if __name__ == "__main__"` and without `close`."""
    program = script(
        """
        import json, os
        import labkit as lab
        group = lab.Group(2, runtime="bare")
        from labkit.group.open_groups import notebook
        print(json.dumps(group.run(os.getpid).results + [s._process.pid for s in notebook.starters.values()]))
        raise SystemExit("the end")
        """,
        start,
    )
    pids = reported(program)
    assert program.stdout.read() == "the end\n"
    assert not left_after(GONE_LIMIT_S, pids)


@pytest.fixture
def no_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of a program in Python 3.12."""

    def fail(*_: object) -> int:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr("_thread.start_new_thread", fail)


@pytest.mark.usefixtures("no_more_threads")
def test_ranks_start_and_end_where_no_thread_can_be_started(start: str) -> None:
    with lab.Group(2, runtime="bare", start=start, timeout_s=200) as group:
        pids = group.run(os.getpid).results
    assert not left_after(GONE_LIMIT_S, pids)


def test_a_fork_of_the_notebooks_process_does_not_use_its_groups(start: str, script: Callable[[str, str], Any]) -> None:
    program = script(
        """
        import json, os
        import labkit as lab
        group = lab.Group(1, runtime="bare")
        pids = group.run(os.getpid).results
        child = os.fork()
        if child == 0:
            try:
                group.run(int)
            except lab.LabError as error:
                print(error, flush=True)
            with lab.Group(1, runtime="bare") as own:
                print(own.run(int).results, flush=True)
            raise SystemExit
        os.waitpid(child, 0)
        print(group.run(os.getpid).results == pids)
        """,
        start,
    )
    refused = "this process is a fork of the one that made the group; make a new group here"
    assert program.stdout.read().splitlines() == [refused, "[0]", "True"]


def test_a_fork_of_a_rank_does_not_answer_for_it(ranks: lab.Group) -> None:
    """A student's `os.fork()` whose child does not exit: it must not continue as the rank."""
    children = ranks.run(lambda: os.fork()).results
    assert all(pid > 0 for pid in children)
    assert not left_after(GONE_LIMIT_S, children)
    assert ranks.run(int).output == ""
    assert ranks.run(lambda: "the rank").results == ["the rank"] * 2


# Stop


def test_stop_while_the_server_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop arrives when the ranks already exist, but the notebook does not know them yet."""
    starter = notebook.starter("bare", "fork")
    ask = starter._ask
    forked: list[int] = []

    def stopped(request: Request, *rest: Any) -> Reply:
        reply = ask(request, *rest)
        if isinstance(reply, Forked) and not forked:
            forked.extend(reply.pids.values())
            os.kill(os.getpid(), signal.SIGINT)
        return reply

    monkeypatch.setattr(starter, "_ask", stopped)
    with lab.Group(2, runtime="bare", start="fork") as group:
        with pytest.raises(KeyboardInterrupt):
            group.run(int)
        assert len(forked) == 2
        assert not left_after(GONE_LIMIT_S, forked)
        assert group.run(int).results == [0, 0]


def test_stop_while_the_server_still_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one caller learns that it is ready, all know it; before that there is nothing to end or to wait for."""
    (tmp_path / "slow_module.py").write_text(
        f"import pathlib, time\nwhile not pathlib.Path({str(tmp_path)!r}, 'go').exists(): time.sleep(0.001)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("labkit.worker.runtimes.base.Runtime.preload", ("slow_module", "labkit.worker.main_loop"))
    receive = ForkStarter._receive

    def stopped(starter: ForkStarter, number: int, limit_s: float) -> Any:
        monkeypatch.setattr(ForkStarter, "_receive", receive)
        os.kill(os.getpid(), signal.SIGINT)
        return receive(starter, number, limit_s)

    with lab.Group(2, runtime="bare", start="fork", timeout_s=200) as group:
        starter = notebook.starter("bare", "fork")
        monkeypatch.setattr(ForkStarter, "_receive", stopped)
        with pytest.raises(Stopped) as caught:
            group.run(int)
        assert caught.value.name == "int"
        (tmp_path / "go").touch()
        with starter._lock:  # held by the start that was given up, until it has heard that the server is ready
            assert not starter.importing
        assert group.run(int).results == [0, 0]
    notebook.starters.pop(next(key for key, value in notebook.starters.items() if value is starter)).close()


def test_repeated_stop_while_ranks_end(start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A student presses Stop several times: the first interrupts the run, the next the cleanup."""
    starter = notebook.starter("bare", start)
    end = starter.end
    main = threading.main_thread().ident
    assert main is not None
    with lab.Group(2, runtime="bare", start=start, timeout_s=200) as group:
        pids = group.run(os.getpid).results
        stops: list[int] = []

        def hang() -> None:
            print("hanging")
            threading.Event().wait()

        def stopped(processes: Any) -> Any:
            stops.append(signal.SIGINT)
            signal.pthread_kill(main, signal.SIGINT)
            return end(processes)

        def feed(output: Output, rank: int, data: bytes) -> None:
            if not stops:
                stops.append(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(starter, "end", stopped)
        monkeypatch.setattr(Output, "feed", feed)
        with pytest.raises(KeyboardInterrupt):
            group.run(hang)
        assert len(stops) >= 2
        monkeypatch.undo()
        assert not left_after(GONE_LIMIT_S, pids)
        assert group.run(int).results == [0, 0]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_a_process_about_to_end_is_distinguished_from_one_that_works() -> None:
    child = subprocess.Popen(["sleep", "100"])
    process = RankProcess.__new__(RankProcess)
    process.pid = child.pid
    try:
        assert not process.status().exiting
    finally:
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process.status().exiting, "dead, and not yet buried"
    child.wait()
    assert process.status() == Status("gone", exiting=True, cpu_s=0.0)


def test_a_server_that_another_thread_closes_has_ended() -> None:
    """At the end of a program, a thread in the background may still wait for a reply."""
    starter = ForkStarter(("labkit.worker.main_loop",), {})
    starter.close()
    with pytest.raises(LabError, match="the process that starts ranks has ended"):
        starter._receive(1, 1.0)
