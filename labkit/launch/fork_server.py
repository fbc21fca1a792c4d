"""The server from which ranks are forked.

What can go wrong, and the tests that show it; those without a file are in `tests/launch/test_starters.py`:

- The notebook's process is killed, before, during or after the imports, with ranks that are blocked in C++. The server
  waits for its end, a rank dies with the server, and a guard ends spawned ranks
  (`test_nothing_is_left_when_the_notebooks_process_is_killed`).
- The server dies. Its ranks die with it; the run says so, and the next one starts a new server
  (`test_when_the_server_dies_the_run_says_so_and_the_next_one_works`).
- A rank has started processes, in sessions of their own or as orphans. They end with it
  (`test_daemons_of_a_rank_that_was_killed_end_too`).
- The system refuses a process in the middle of a group. The ranks already forked end
  (`test_a_system_that_cannot_start_more_processes`).
- A rank inherits what belongs to others: file descriptors
  (`test_descriptors_and_threads_stay_the_same_over_many_groups`), or the state of random generators
  (`test_every_rank_draws_its_own_random_numbers`). It would inherit locks that another thread holds, so the server has
  one thread when it forks.
- The student's program forks in a rank. The child is no rank: it does not answer for it
  (`test_a_fork_of_a_rank_does_not_answer_for_it`) and records nothing (`test_record.py`:
  `test_a_worker_that_a_rank_forks_records_nothing`).
- Stop comes while the server imports or forks (`test_stop_while_the_server_forks`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from labkit.errors.exceptions import LabError
from labkit.launch.capacity import raise_limit
from labkit.launch.descendants import adopt_orphans, children, end_children, kill_groups
from labkit.launch.new_process import import_all, live_as_rank
from labkit.launch.server_requests import BATCH, LONGEST_BYTES, READY, Failed, Fork, Forked, Reap, Reply, Request
from labkit.worker import network_namespace
from labkit.worker.network_namespace import PrivateNetwork
from labkit.worker.stack_writer import prepare

MADV_COLLAPSE: Final = 25
SIZE_FILE: Final = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")  # in bytes
AT_ONCE: Final = 4  # huge pages per call, which takes some milliseconds
IDLE_MS: Final = 50  # without a request for so long, the server moves some memory, which may delay one by 10 ms


def serve(fds: list[int], preload: list[str], notebook: int) -> NoReturn:
    """Run the server: import modules, then fork ranks as requests say, until the notebook's process has ended."""
    raise_limit()
    prepare()
    adopt_orphans()
    # If the notebook's process ignores SIGCHLD, so would this one, and exit codes would be lost.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        network = network_namespace.make(network_namespace.wanted(os.environ))  # needs a single thread
    except LabError as error:
        sys.exit(str(error))  # the notebook shows the log
    with _ended_with(notebook):
        import_all(preload)
    _Server(socket.socket(fileno=fds[0]), network).serve(notebook)
    os._exit(0)


@contextlib.contextmanager
def _ended_with(notebook: int) -> Iterator[None]:
    """End this process if the notebook's ends inside the `with` block. It leaves no thread behind."""
    alive = _pidfd(notebook)
    stop, stopping = os.pipe()

    def wait() -> None:
        if alive in select.select([alive, stop], [], [])[0]:
            os._exit(0)

    thread = threading.Thread(target=wait)
    if alive >= 0:
        thread.start()
    try:
        yield
    finally:
        os.close(stopping)
        if alive >= 0:
            thread.join()
            os.close(alive)
        os.close(stop)


class _ForkedRank(NamedTuple):
    """A running rank: its process, and the pidfd of that; -1 on old kernels."""

    pid: int
    pidfd: int


class _Server:
    """Forks ranks, and ends them, as requests on a socket say."""

    def __init__(self, sock: socket.socket, network: PrivateNetwork) -> None:
        self._sock, self._network = sock, network
        self._ranks: dict[int, _ForkedRank] = {}  # by number
        self._codes: dict[int, int] = {}  # exit codes of ended ranks that no request has fetched yet
        self._poll = select.poll()
        self._helpers = children()  # processes that an imported library has started

    def serve(self, notebook: int) -> None:
        """Answer requests until the notebook's process has ended; then end all ranks."""
        self._poll.register(self._sock, select.POLLIN)
        alive = _pidfd(notebook)
        if alive >= 0:
            self._poll.register(alive, select.POLLIN)
        with contextlib.suppress(OSError):  # the notebook's process may end before a reply is sent
            self._sock.send(pickle.dumps((READY, None)))
            collapsing = collapse()
            running = True
            while running:
                ready = self._ready(collapsing)
                self._reap([number for number, rank in self._ranks.items() if rank.pidfd in ready])
                if self._sock.fileno() in ready:
                    running = self._serve_request()
                running &= alive not in ready
        self._reap(list(self._ranks))

    def _ready(self, collapsing: Iterator[int]) -> set[int]:
        """Wait until file descriptors are readable, and return them. Meanwhile, move memory into huge pages."""
        while not self._ranks and not self._poll.poll(IDLE_MS) and next(collapsing, 0):
            pass  # not while there are ranks: they would keep the old pages, so that there would be two of each
        return {fd for fd, _ in self._poll.poll()}

    def _serve_request(self) -> bool:
        """Receive a request, carry it out and reply; return False if the notebook has closed the socket."""
        data, received, _, _ = socket.recv_fds(self._sock, LONGEST_BYTES, 3 * BATCH)
        if not data:
            return False
        number, request = pickle.loads(data)
        self._sock.send(pickle.dumps((number, self._reply(request, received))))
        return True

    def _reply(self, request: Request, received: Sequence[int]) -> Reply:
        if isinstance(request, Fork):
            return self._fork(request.ranks, received)
        assert isinstance(request, Reap), "the other requests are for relays"
        self._reap([number for number in request.ranks if number in self._ranks])
        return {number: self._codes.pop(number) for number in request.ranks if number in self._codes}

    def _fork(self, numbers: Sequence[int], received: Sequence[int]) -> Forked | Failed:
        forked: dict[int, int] = {}
        me = os.getpid()
        try:
            for i, number in enumerate(numbers):
                mine = received[3 * i : 3 * i + 3]
                pid = os.fork()
                if pid == 0:
                    others = {*received, *(rank.pidfd for rank in self._ranks.values()), self._sock.fileno()} - {*mine, -1}
                    live_as_rank(mine, self._network, parent=me, unneeded=others)
                with contextlib.suppress(OSError):  # the child has already done it
                    os.setpgid(pid, pid)
                forked[number] = pid
                self._ranks[number] = _ForkedRank(pid, _pidfd(pid))
                if self._ranks[number].pidfd >= 0:
                    self._poll.register(self._ranks[number].pidfd, select.POLLIN)
        except OSError as error:
            self._reap(list(forked))
            count = len(numbers)
            return Failed(f"this system does not let {count} more processes start: {error}. Close other groups and notebooks.")
        finally:
            for fd in received:
                os.close(fd)
        return Forked(forked)

    def _reap(self, numbers: Sequence[int]) -> None:
        """End ranks and the processes that they have started, and keep the exit codes."""
        kill_groups([self._ranks[number].pid for number in numbers])
        for number in numbers:
            pid, pidfd = self._ranks.pop(number)
            self._codes[number] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if pidfd >= 0:
                self._poll.unregister(pidfd)
                os.close(pidfd)
        if numbers:
            end_children(self._helpers | {rank.pid for rank in self._ranks.values()})


def collapse() -> Iterator[int]:
    """Move this process's private memory into huge pages, and yield the size of each part in bytes.

    A fork copies the page table, and the end of the process clears the copy. The table of torch's server has 57,000
    entries; in huge pages they are some hundreds. With four ranks, start and end together take 15 ms less CPU time.

    Source: madvise(2), the Linux man-pages: MADV_COLLAPSE, since Linux 6.1. Where that is missing, nothing changes.
    """
    try:
        size = int(SIZE_FILE.read_text())
        maps = Path("/proc/self/maps").read_text()
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):  # not Linux, or without huge pages
        return
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in maps.splitlines():
        addresses, access, _, _, inode = line.split()[:5]
        if access != "rw-p" or inode != "0":  # only anonymous memory is private and can be moved
            continue
        begin, end = (int(address, 16) for address in addresses.split("-"))
        first, last = -(-begin // size) * size, end // size * size  # huge pages are aligned
        for at in range(first, last, AT_ONCE * size):
            part = min(AT_ONCE * size, last - at)
            madvise(at, part, MADV_COLLAPSE)  # what cannot be moved stays where it is
            yield part


def _pidfd(pid: int) -> int:
    """Return a file descriptor that becomes readable when a process ends; -1 if there is none, or on old kernels."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1
