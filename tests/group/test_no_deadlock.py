"""Programs that only look stuck are not stopped, and notices about them are true."""

from __future__ import annotations

import inspect
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from reported import Reported  # noqa: E402
from time_limits import some_limit_does  # noqa: E402

import labkit as lab  # noqa: E402
from labkit.errors.exceptions import DeadlockError  # noqa: E402
from labkit.group.deadlock import Reason  # noqa: E402
from labkit.group.output import Output  # noqa: E402
from labkit.recording.group_keys import GroupKind, kind_of  # noqa: E402
from labkit.worker.runtimes.registry import RUNTIMES  # noqa: E402

pytestmark = pytest.mark.processes

LATE_S = 1.0  # delay of the message in these programs
KEPT: list[Any] = []


@pytest.fixture(autouse=True)
def soon_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A false deadlock would be reported in a third of the time for which these programs look stuck."""
    monkeypatch.setattr(RUNTIMES["torch"], "certain_after_s", 0.1)
    monkeypatch.setattr("labkit.group.deadlock_monitor.CONFIRM_NS", 100_000_000)


def answered(start: Callable[[Callable[[], None]], None]) -> float:
    """Rank 0 waits for a message of rank 1, which waits for the answer; the function passed to `start` sends it."""
    me, got = dist.get_rank(), torch.zeros(1)
    if me == 0:
        dist.recv(got, 1)
        dist.send(got, 1)
    elif me == 1:
        start(lambda: dist.send(torch.ones(1), 0))
        dist.recv(got, 0)
    return float(got)


def by_a_timer(send: Callable[[], None]) -> None:
    threading.Timer(LATE_S, send).start()


def by_a_scheduler(send: Callable[[], None]) -> None:
    import sched

    scheduler = sched.scheduler()
    scheduler.enter(LATE_S, 1, send)
    threading.Thread(target=scheduler.run).start()


def by_an_event_loop(send: Callable[[], None]) -> None:
    import asyncio

    loop = asyncio.new_event_loop()
    loop.call_later(LATE_S, send)
    loop.call_later(LATE_S, loop.stop)
    threading.Thread(target=loop.run_forever).start()


def by_an_executors_callback(send: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(time.sleep, LATE_S).add_done_callback(lambda _: send())
        pool.shutdown(wait=False)


def by_a_pools_callback(send: Callable[[], None]) -> None:
    pool = ThreadPool(1)
    pool.apply_async(time.sleep, (LATE_S,), callback=lambda _: send())
    pool.close()


def by_a_server(send: Callable[[], None]) -> None:
    import http.server
    import urllib.request

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            send()
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    def serve() -> None:
        with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
            address = f"http://127.0.0.1:{server.server_port}"
            threading.Timer(LATE_S, urllib.request.urlopen, (address,)).start()
            server.handle_request()

    threading.Thread(target=serve).start()


def by_a_forked_child(send: Callable[[], None]) -> None:
    """A thread waits for its end."""
    import subprocess

    def wait_and_send() -> None:
        subprocess.run(["sleep", str(LATE_S)], check=True)
        send()

    threading.Thread(target=wait_and_send).start()


def sends_after_its_return() -> float:
    got = torch.zeros(1)
    if dist.get_rank() == 0:
        dist.recv(got, 1)
    elif dist.get_rank() == 1:
        threading.Timer(LATE_S, dist.send, (torch.ones(1), 0)).start()
    return float(got)


def sends_when_another_collective_ends() -> float:
    """An operation that rank 1 began with rank 2, which is late, has a callback."""
    me, got = dist.get_rank(), torch.zeros(1)
    pair = dist.new_group([1, 2])
    if me == 0:
        dist.recv(got, 1)
        dist.send(got, 1)
    elif me == 1:
        begun = dist.all_reduce(torch.ones(1), group=pair, async_op=True)
        begun.get_future().add_done_callback(lambda _: dist.send(torch.ones(1), 0))
        dist.recv(got, 0)
    else:
        time.sleep(LATE_S)
        dist.all_reduce(torch.ones(1), group=pair)
    return float(got)


def sleeps_beside_a_waiting_thread() -> float:
    """The main thread of rank 1 does not wait for the message: it sends the one that triggers it."""
    me, got = dist.get_rank(), torch.zeros(1)
    if me == 0:
        dist.recv(got, 1)
        dist.send(got, 1)
    elif me == 1:
        receiver = threading.Thread(target=dist.recv, args=(got, 0))
        receiver.start()
        time.sleep(LATE_S)
        dist.send(torch.ones(1), 0)
        receiver.join()
    return float(got)


SENDERS = [
    by_a_timer, by_a_scheduler, by_an_event_loop, by_an_executors_callback, by_a_pools_callback, by_a_server, by_a_forked_child,
]  # fmt: skip


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        *[pytest.param(answered, [start], id=start.__name__) for start in SENDERS],
        (sends_when_another_collective_ends, []), (sleeps_beside_a_waiting_thread, []), (sends_after_its_return, []),
    ],
)  # fmt: skip
def test_a_message_that_is_sent_late(program: Callable[..., float], arguments: list[Any], three: lab.Group) -> None:
    answer = 0.0 if program is sends_after_its_return else 1.0
    assert three.run(program, *arguments).results == [1.0, answer, 0.0]


# Notices, and when a deadlock is certain.


def faces_another(start: Callable[[], object]) -> None:
    me = dist.get_rank()
    if me == 1:
        KEPT.append(start())
    if me < 2:
        dist.recv(torch.ones(5), 1 - me)


def an_idle_executor() -> object:
    pool = ThreadPoolExecutor(2)
    pool.submit(int).result()
    return pool


def a_thread_that_waits() -> object:
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("start", [an_idle_executor, a_thread_that_waits], ids=lambda f: f.__name__)
def test_a_thread_that_nothing_can_wake_changes_nothing(
    start: Callable[[], object], three: lab.Group, reported: Reported
) -> None:
    with pytest.raises(DeadlockError):
        three.run(faces_another, start)
    assert reported.deadlock() == (Reason.CIRCLE, [(0, "recv"), (1, "recv")])


def a_thread_that_works() -> object:
    thread = threading.Thread(target=time.sleep, args=(60,), daemon=True)
    thread.start()
    return thread


class Word:
    """Presses Stop, or acts, as soon as a notice about the run contains all of these. A false deadlock would be
    reported before."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *awaited: str,
        act: Callable[[], object] = lambda: signal.raise_signal(signal.SIGINT),
        after_s: float = 0.3,
    ) -> None:
        self.said, self._awaited, self._act = "", awaited, act
        monkeypatch.setattr("labkit.group.deadlock_monitor.SLOW_NS", int(after_s * 1e9))
        monkeypatch.setattr(Output, "say", lambda _, word: self._acts(word))

    def _acts(self, word: str) -> None:
        if all(part in word for part in self._awaited) and not self.said:
            self.said = word
            self._act()


def test_with_a_live_thread_there_is_only_a_notice(three: lab.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    word = Word(monkeypatch, "rank 0", "rank 1", "recv (test_no_deadlock.py, line ", "threading.py")
    with pytest.raises(KeyboardInterrupt):
        three.run(faces_another, a_thread_that_works)
    _, *rest = word.said.split("; ")
    assert [part for part in rest if "rank 1" in part and "threading.py" in part], word.said


# Long silence


@pytest.mark.parametrize("way", ["run", "watch"])
def test_a_run_that_shows_nothing_for_long_says_where_its_ranks_are(
    way: str, three: lab.Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hold() -> None:
        threading.Event().wait()

    monkeypatch.setattr("labkit.group.deadlock_monitor.SLOW_S", 0.2)
    line = hold.__code__.co_firstlineno + 1
    place = f"rank 0, rank 1 and rank 2 are at test_no_deadlock.py, line {line}: threading.Event().wait()"
    Word(monkeypatch, "nothing printed", place)
    with pytest.raises(KeyboardInterrupt):
        getattr(three, way)(hold)


# Time limits of the program's own.


def caught(wait: Callable[[], object]) -> str:
    try:
        wait()
    except RuntimeError as error:
        return type(error).__name__
    return "came"


def in_a_group_with_a_limit(wait: Callable[[Any], object], limit_s: float) -> str:
    """If the ranks do not even create the group within the limit, which also holds for that, there is nothing to
    test."""
    dist.barrier()
    try:
        pair = dist.new_group([0, 1], timeout=timedelta(seconds=limit_s))
    except RuntimeError:
        return "no group"
    return caught(lambda: wait(pair)) if dist.get_rank() == 0 else ""


def waits_after_the_limit_was_set(limit_s: float) -> str:
    pair = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        dist.barrier(group=pair)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=limit_s), pair)
    return caught(lambda: dist.all_reduce(torch.ones(1), group=pair)) if dist.get_rank() == 0 else ""


def waits_in_a_monitored_barrier(limit_s: float) -> str:
    barrier = dist.monitored_barrier
    return caught(lambda: barrier(timeout=timedelta(seconds=limit_s))) if dist.get_rank() == 0 else ""


def messages_whose_limit_was_set_too_late() -> None:
    """gloo gives messages the limit that the group was created with."""
    pair = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=LATE_S), pair)
        dist.recv(torch.ones(1), 1 - dist.get_rank(), group=pair)


def test_a_limit_that_gloo_ignores_does_not_postpone_the_report(three: lab.Group) -> None:
    with pytest.raises(DeadlockError, match="recv"):
        three.run(messages_whose_limit_was_set_too_late)


def many_at_once() -> None:
    """As many operations as a network has parameters."""
    if dist.get_rank() == 0:
        works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(150)]
        works[-1].wait()


def test_a_wait_for_one_of_many_pending_operations_is_found(three: lab.Group, reported: Reported) -> None:
    with pytest.raises(lab.RankError):
        three.run(many_at_once)
    reason, waits = reported.deadlock()
    assert reason is Reason.RETURNED
    assert {operation for _, operation in waits} == {"all_reduce"}


def waits_for_a_message_no_longer_than(limit_s: float) -> str:
    return caught(lambda: dist.irecv(torch.ones(5), 1).wait(timedelta(seconds=limit_s))) if dist.get_rank() == 0 else ""


IN_A_GROUP_WITH_A_LIMIT: dict[str, Callable[[Any], object]] = {
    "a collective": lambda pair: dist.all_reduce(torch.ones(1), group=pair),
    "an asynchronous collective": lambda pair: dist.all_reduce(torch.ones(1), group=pair, async_op=True).wait(),
    "a message": lambda pair: dist.recv(torch.ones(1), 1, group=pair),
}


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        *[pytest.param(in_a_group_with_a_limit, [wait], id=name) for name, wait in IN_A_GROUP_WITH_A_LIMIT.items()],
        (waits_after_the_limit_was_set, []),
        (waits_in_a_monitored_barrier, []),
        (waits_for_a_message_no_longer_than, []),
    ],
)
def test_the_programs_own_time_limit_is_respected(program: Callable[..., str], arguments: list[Any]) -> None:
    def is_over_first(limit_s: float) -> bool:
        with lab.Group(3, timeout_s=200) as group:
            return group.run(program, *arguments, limit_s).results[0] in ("RuntimeError", "DistBackendError")

    assert some_limit_does(is_over_first, (LATE_S, 10.0, 60.0))


def late_for_the_default_group(limit_s: float) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=limit_s))  # sets it
    late = dist.get_rank() == 1 and threading.Event().wait()
    dist.barrier(late)


def late_for_an_asynchronous_operation(limit_s: float) -> None:
    pair = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        dist.barrier(group=pair)
        pair.set_timeout(timedelta(seconds=limit_s))  # sets it
        late = dist.get_rank() == 1 and threading.Event().wait()
        dist.all_reduce(torch.ones(1), group=pair, async_op=not late).wait()


def late_for_a_message(limit_s: float) -> None:
    pair = dist.new_group([0, 1], timeout=timedelta(seconds=limit_s))  # sets it
    if dist.get_rank() < 2:
        late = dist.get_rank() == 1 and threading.Event().wait()
        dist.recv(torch.ones(1), not late, group=pair)


@pytest.mark.parametrize(
    "late", [late_for_the_default_group, late_for_an_asynchronous_operation, late_for_a_message], ids=lambda f: f.__name__
)
def test_a_failure_by_the_programs_own_time_limit_says_so_and_who_was_late(late: Callable[[float], None]) -> None:
    source, first = inspect.getsourcelines(late)
    line = first + next(i for i, text in enumerate(source) if text.endswith("# sets it\n"))

    def is_said(limit_s: float) -> bool:  # a group that is not even created within the limit fails otherwise
        with lab.Group(3, timeout_s=200) as group, pytest.raises(lab.RankError) as caught:
            group.run(late, limit_s)
        shown = any(": late = dist.get_rank() == 1" in doing for doing in caught.value.others)
        said = f"{limit_s:g} s is the program's own time limit (test_no_deadlock.py, line {line}). rank 1 "
        return shown and caught.value.hint.startswith(said)

    assert some_limit_does(is_said, (LATE_S, 10.0, 60.0))


@pytest.mark.parametrize("limit", [None, timedelta(minutes=30)])
def test_torchs_own_time_limit_postpones_nothing(limit: timedelta | None, three: lab.Group, reported: Reported) -> None:
    def waits() -> None:
        pair = dist.new_group([0, 1], timeout=limit)
        if dist.get_rank() == 0:
            dist.monitored_barrier(pair)

    with pytest.raises(lab.RankError) as caught:
        three.run(waits)
    assert caught.value.rank == 1
    assert reported.deadlock() == (Reason.RETURNED, [(0, "monitored_barrier")])


# Stores that other programs can open.


def gets_a_key(open_store: Callable[[str], Any], path: str) -> bytes:
    """Rank 0 waits for rank 1, and rank 2 has returned."""
    value: bytes = open_store(path).get("key") if dist.get_rank() == 1 else b""
    if dist.get_rank() == 0:
        dist.recv(torch.ones(1), 1)
    elif dist.get_rank() == 1:
        dist.send(torch.ones(1), 0)
    return value


def waits_for_a_key(open_store: Callable[[str], Any], path: str) -> bytes:
    """All ranks wait."""
    open_store(path).wait(["key"])
    return b"value" if dist.get_rank() == 1 else b""


def a_file(path: str) -> Any:
    return dist.FileStore(path, 2)


def part_of_a_file(path: str) -> Any:
    return dist.PrefixStore("part", dist.FileStore(path, 2))


def meets(path: str, rank: int) -> float:
    """Meets a rank of another group; the others have returned."""
    if dist.get_rank():
        return 0.0
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    one = torch.ones(1)
    dist.all_reduce(one)
    return float(one)


def notebook_acts(monkeypatch: pytest.MonkeyPatch, call: str, act: Callable[[], object]) -> Word:
    monkeypatch.setattr("labkit.group.deadlock_monitor.SLOW_S", LATE_S)
    return Word(monkeypatch, call, act=act, after_s=LATE_S)


@pytest.mark.parametrize("open_store", [a_file, part_of_a_file], ids=lambda f: f.__name__)
@pytest.mark.parametrize("program", [gets_a_key, waits_for_a_key], ids=lambda f: f.__name__)
def test_the_notebook_sets_a_key_that_ranks_wait_for(
    program: Callable[..., bytes], open_store: Callable[[str], Any], three: lab.Group, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path = f"{tmp_path}/store"
    notebook = notebook_acts(monkeypatch, "open_store(path).", lambda: open_store(path).set("key", "value"))
    assert three.run(program, open_store, path).results == [b"", b"value", b""]
    assert re.search(r"rank 1( is|.* are) at test_no_deadlock.py, line \d+: .*open_store", notebook.said), notebook.said


def gets_from_a_server(port: int) -> bytes:
    store = dist.TCPStore("localhost", port, 2, False) if dist.get_rank() == 1 else None
    return b"" if store is None else store.get("key")


@pytest.mark.parametrize("late", ["the key", "the server"])
def test_the_notebook_serves_a_store(late: str, three: lab.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]

        def serve() -> None:
            held.listen()
            options = {"is_master": True, "wait_for_workers": False, "master_listen_fd": held.detach()}
            KEPT.append(dist.TCPStore("127.0.0.1", port, **options))

        def act() -> None:
            if late == "the server":
                serve()
            KEPT[-1].set("key", "value")

        if late == "the key":
            serve()
        call = "store.get" if late == "the key" else "dist.TCPStore"
        notebook = notebook_acts(monkeypatch, f"{call}(", act)
        assert three.run(gets_from_a_server, port).results == [b"", b"value", b""]
        KEPT.clear()
    assert re.search(rf"rank 1 is at test_no_deadlock.py, line \d+: .*{call}\(", notebook.said), notebook.said


def test_a_rank_waits_for_one_of_another_group(three: lab.Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"{tmp_path}/store"
    with lab.Group(1, timeout_s=200) as other, ThreadPoolExecutor(1) as pool:
        notebook = notebook_acts(monkeypatch, "in init_process_group at", lambda: pool.submit(other.run, meets, path, 1))
        assert three.run(meets, path, 0).results == [2.0, 0.0, 0.0]
    assert f"in init_process_group at {path} of 2 ranks" in notebook.said


# Sub-groups that only some ranks create.


def creates_alone() -> None:
    if dist.get_rank() == 0:
        dist.new_group([0, 1])


def test_a_group_that_only_one_of_its_members_creates(three: lab.Group, reported: Reported) -> None:
    with pytest.raises(lab.RankError) as caught:
        three.run(creates_alone)
    assert caught.value.rank == 1
    assert reported.deadlock() == (Reason.RETURNED, [(0, "new_group")])
    assert creates_a_group(reported)


def creates_a_group(reported: Reported) -> bool:
    """Whether the first rank that waits in the last deadlock creates a group."""
    return kind_of(reported.deadlocks[-1].waits[0][1].group) is GroupKind.CREATION


def makes_a_mesh() -> None:
    if dist.get_rank() == 0:
        dist.init_device_mesh("cpu", (2, 2))


def makes_subgroups() -> None:
    if dist.get_rank() == 0:
        dist.new_subgroups(2)


@pytest.mark.parametrize(("creates", "named"), [(makes_a_mesh, "init_device_mesh"), (makes_subgroups, "new_subgroups")])
def test_the_function_that_creates_groups_is_named(creates: Callable[[], None], named: str, reported: Reported) -> None:
    with lab.Group(4, timeout_s=200) as group, pytest.raises(lab.RankError):
        group.run(creates)
    assert reported.deadlock() == (Reason.RETURNED, [(0, named)])
    assert creates_a_group(reported)


def creates_one_more() -> None:
    if dist.get_rank() == 0:
        dist.new_group([0])


def creates_and_uses() -> None:
    pair = dist.new_group([0, 2])
    if dist.get_rank() != 1:
        dist.all_reduce(torch.ones(1), group=pair)


def test_an_extra_group_of_the_previous_run_is_named() -> None:
    """torch numbers the groups per process: the next one has another number on the rank that has created one more."""
    first = creates_one_more.__code__.co_firstlineno + 2
    with lab.Group(3, timeout_s=200) as group:
        group.run(creates_one_more)
        with pytest.raises(lab.RankError, match=rf"has rank 0 \(test_no_deadlock.py, line {first}\). Every rank"):
            group.run(creates_and_uses)


def creates_late(late: int) -> float:
    if dist.get_rank() == late:
        time.sleep(LATE_S)
    group = dist.new_group([0, 1, 2])
    one = torch.ones(1)
    dist.all_reduce(one, group=group)
    return float(one)


def test_a_late_member(three: lab.Group) -> None:
    """Another member may have completed and returned while others still wait for the late one."""
    run = three.run(creates_late, 0)
    assert run.results == [3.0] * 3
    assert {span.name for span in run.trace.spans if span.kind == "communication"} == {"all_reduce"}


# A rank that is stuck in the program's own locks.


def waits_for_itself() -> None:
    if dist.get_rank() == 1:
        threading.Event().wait()
    dist.barrier()


def test_the_line_of_a_rank_that_waits_for_itself_is_shown(three: lab.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    line = waits_for_itself.__code__.co_firstlineno + 2
    word = Word(monkeypatch, "rank 1", "test_no_deadlock.py", f" {line}: threading.Event().wait()")
    with pytest.raises(KeyboardInterrupt):
        three.run(waits_for_itself)
    assert "barrier (test_no_deadlock.py, line " in word.said


def joins_a_thread_that_waits() -> None:
    if dist.get_rank() == 1:
        receiver = threading.Thread(target=dist.recv, args=(torch.ones(1), 0))
        receiver.start()
        receiver.join()
    else:
        dist.barrier()


def test_a_main_thread_that_joins_one_in_an_operation_is_stuck_with_it(three: lab.Group, reported: Reported) -> None:
    with pytest.raises(DeadlockError):
        three.run(joins_a_thread_that_waits)
    assert reported.deadlock() == (Reason.CIRCLE, [(0, "barrier"), (1, "recv")])
