"""Records a rank of a script, as torchrun starts it, into the folder that LABKIT_TRACE names.

Each rank writes into its ring as in a group, but the ring's memory is a file in that folder: however the process ends,
its records are there. A thread wakes up ten times a second. It moves records out of the ring before they are
overwritten, and notes that the rank is alive. Once torch is imported, rank 0 publishes the run's id and the address of
its clock.

    <time>-<host>-<pid>-rank<n>.ring       the newest records, and operations in progress; see `recording.ring_buffer`
    <time>-<host>-<pid>-rank<n>.records    older records, if there are many
    <time>-<host>-<pid>-rank<n>.json       the rank, and its clock compared with rank 0's

If recording fails, a message says so once, and the script continues.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import mmap
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from labkit.recording import TRACE_VARIABLE
from labkit.recording.clock_sync import SECRET_BYTES, ClockServer, Reading, ask, machine
from labkit.recording.cores import thread_delays, usable_cores
from labkit.recording.import_hook import when_imported
from labkit.recording.record import Recorder, clock, here
from labkit.recording.ring_buffer import RingReader, RingWriter, keep_from_forks
from labkit.recording.ring_layout import CAPACITY, RING_BYTES

CHECK_EVERY_S: Final = 0.1
HURRY_S: Final = 0.01  # the same after records were moved: the fastest writer fills the ring in 0.1 s
MOVE_AT: Final = CAPACITY // 8  # new records; fewer stay in the ring
MOST_RECORDS: Final = 1 << 21  # that are moved: 268 MB per rank. After that only the ring keeps the newest
MEET_EVERY_S: Final = 0.02  # between checks whether rank 0 has published; short, because a script may end soon
MEET_LIMIT_S: Final = 120.0  # for rank 0 to publish; after that a rank's clock is not compared
CONNECT_LIMIT_S: Final = 10.0  # on a busy machine the agent that runs the store may get no core for a while
ASK_FIRST_S: Final = 1.0  # between the first two readings of rank 0's clock; doubled each time
ASK_LAST_S: Final = 60.0  # the longest time between two readings
END_LIMIT_S: Final = 2.0  # for the thread to end
GPU_LIMIT_S: Final = 10.0  # for a GPU that is behind: nothing finds a deadlock of scripts
LINGER_S: Final = 0.5  # longest delay of the end of a very short script until all ranks have met


def begin() -> None:
    """Start to record this process, as a rank, into the folder that `LABKIT_TRACE` names.

    Called by `import labkit` if the variable is set, and by `python -m labkit`.
    """
    # Removed, because processes that this one starts, such as DataLoader workers, import the script, but are no ranks.
    folder = os.environ.pop(TRACE_VARIABLE)
    with _reporting(f"{TRACE_VARIABLE}={folder}: this rank runs without being recorded"):
        _Script(Path(folder).absolute(), os.environ).start()


class _Script:
    """Records this process, as a rank, into a folder."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._environment = environment
        rank, size = int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))
        self._rank = rank
        self._elsewhere = size - int(environment.get("LOCAL_WORLD_SIZE", "1"))  # ranks, at most
        # The restart count is part of the key, because torchrun's store survives a restart.
        self._key = f"labkit/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}/{size}"
        host = socket.gethostname()
        self._about: dict[str, Any] = {
            "labkit": 1, "rank": rank, "world_size": size, "host": host, "machine": machine(), "pid": os.getpid(),
            "script": os.path.basename(sys.argv[0]) or "python", "run_id": environment.get("TORCHELASTIC_RUN_ID", ""),
            "restart": int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")), "run": "", "reference": "",
            "master": f"{environment.get('MASTER_ADDR', '')}:{environment.get('MASTER_PORT', '')}",
            "began_unix_ns": time.time_ns(), "began_ns": clock(), "ended_ns": 0, "readings": [], "name": "",
        }  # fmt: skip
        when = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{when}-{re.sub(r'[^A-Za-z0-9.-]', '_', host)[:40]}-{os.getpid()}-rank{rank}"
        self._ring = _ring_file(self._path.with_name(f"{self._path.name}.ring"))
        keep_from_forks(self._ring)
        self._write_about()
        self._recorder = Recorder(RingWriter(self._ring), rank, size)
        if int(environment.get("LOCAL_WORLD_SIZE", "1")) > usable_cores():
            self._recorder.ring.thread_delay = thread_delays()
        self._reader: RingReader | None = None
        self._moved = 0
        self._torch_imported = self._over = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._work, name="labkit-trace", daemon=True)
        # For the exchange with the other ranks:
        self._store: Any = None
        self._server: ClockServer | None = None
        self._reference: tuple[Sequence[str], int, bytes] | None = None  # hosts, port and secret of rank 0's clock
        self._met = size == 1
        self._ask_at_s, self._ask_again_s = 0.0, ASK_FIRST_S

    def start(self) -> None:
        """Start recording."""
        self._recorder.ring.alive(clock())
        here.start(self._recorder)
        when_imported("torch", lambda _: self._record_torch())
        atexit.register(self._end)
        self._thread.start()

    def _record_torch(self) -> None:
        with _reporting("communication is not recorded"):
            from labkit.worker.comm import install

            if install.watch_script(self._recorder):
                _report(
                    "the process group was initialised before labkit was imported, so its communication is not recorded. "
                    "Put `import labkit` before init_process_group."
                )
            self._torch_imported = True
            self._wake.set()

    # The following methods run on the thread, and at the end on the main thread.

    def _work(self) -> None:
        until_s = time.monotonic() + MEET_LIMIT_S
        hurry = False
        with _reporting(f"only the newest {CAPACITY} records will be kept"):
            while not self._over:
                meeting = self._torch_imported and not self._met and time.monotonic() < until_s
                self._wake.wait(HURRY_S if hurry else MEET_EVERY_S if meeting else CHECK_EVERY_S)
                self._wake.clear()
                self._recorder.ring.alive(clock())
                if self._recorder.name != self._about["name"]:  # it has become an RPC worker
                    self._about["name"] = self._recorder.name
                    self._write_about()
                hurry = self._move()
                if self._torch_imported and time.monotonic() < until_s:
                    self._meet()
                if self._reference is not None and time.monotonic() > self._ask_at_s:
                    self._ask()

    def _move(self) -> bool:
        """Move records from the ring to a file if there are many; return whether it did."""
        first = self._reader.next_record if self._reader is not None else 1
        if not self._recorder.ring.has(first + MOVE_AT) or self._moved >= MOST_RECORDS:
            return False
        if self._reader is None:
            self._reader = RingReader(self._ring)
        records = self._reader.read()
        self._moved += len(records)
        with open(f"{self._path}.records", "ab") as file:
            file.write(records.tobytes())
        return True

    def _meet(self) -> None:
        if not self._met:
            met = True  # also after an error
            with _reporting("the clock is not compared with rank 0's"):
                met = self._exchange()
            self._met = met

    def _exchange(self) -> bool:
        """On rank 0: publish the run's id and the clock's address. On others: read them. Return whether it is done."""
        if self._store is None:
            self._store = _store(self._environment)
        if self._store is None:
            return False
        if self._rank == 0:
            secret = secrets.token_bytes(SECRET_BYTES)
            published = {"run": secrets.token_hex(8), "machine": self._about["machine"]}
            if self._elsewhere:
                hosts = _own_hosts(self._environment)
                self._server = ClockServer(hosts[0] if all(map(_is_loopback, hosts)) else "", secret)
                published |= {"hosts": hosts, "port": self._server.port, "secret": secret.hex()}
            self._store.set(self._key, json.dumps(published))
        elif self._store.check([self._key]):  # `get` would wait, perhaps without end
            published = json.loads(self._store.get(self._key))
            if published["machine"] != self._about["machine"] and "port" in published:
                self._reference = published["hosts"], published["port"], bytes.fromhex(published["secret"])
        else:
            return False
        self._store = None
        self._about |= {"run": published["run"], "reference": published["machine"]}
        self._write_about()
        return True

    def _ask(self) -> None:
        assert self._reference is not None
        reading: Reading | None = ask(*self._reference)
        if reading is not None:
            self._about["readings"].append(reading)
            self._write_about()
        self._ask_at_s = time.monotonic() + self._ask_again_s
        self._ask_again_s = min(2 * self._ask_again_s, ASK_LAST_S)

    def _end(self) -> None:
        """Finish recording when the script ends."""
        if self._about["pid"] != os.getpid():
            return  # a process that the rank has forked
        with _reporting("the end is not recorded"):
            self._over = True
            self._wake.set()
            self._thread.join(END_LIMIT_S)
            self._recorder.automatic_steps.end_step()
            if self._recorder.device_clock is not None:
                self._recorder.device_clock.flush(GPU_LIMIT_S)
            self._meet_at_last()
            self._about |= {"ended_ns": clock(), "name": self._recorder.name}
            self._write_about()

    def _meet_at_last(self) -> None:
        """Meet the other ranks if the thread had no time for it, and take a last reading of the clock."""
        until_s = time.monotonic() + LINGER_S
        while self._torch_imported and not self._met and time.monotonic() < until_s:
            self._meet()
            time.sleep(MEET_EVERY_S)
        if self._reference is not None:
            self._ask()
        if self._server is not None:
            while self._server.asked < self._elsewhere and time.monotonic() < until_s:
                time.sleep(MEET_EVERY_S)
            self._server.close()

    def _write_about(self) -> None:
        whole = f"{self._path}.json"
        with open(f"{whole}.new", "w", encoding="utf-8") as file:
            json.dump(self._about, file)
        os.replace(f"{whole}.new", whole)


def _ring_file(path: Path) -> mmap.mmap:
    """Map a new file as memory. Its disk space is allocated at once: a full disk would later cause a SIGBUS.

    The file survives SIGKILL. A writing thread would lose the last moment, a file as large as the run risks the SIGBUS,
    and a writing process per rank costs a core.
    """
    with open(path, "xb+") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, RING_BYTES)
        except (AttributeError, OSError):  # not supported here, or the disk is full, which `write` reports
            file.write(bytes(RING_BYTES))
            file.flush()
        return mmap.mmap(file.fileno(), RING_BYTES)


def _store(environment: Mapping[str, str]) -> Any:
    """Return a store that all ranks share: a connection to torchrun's, else the process group's; None if not ready."""
    from datetime import timedelta

    import torch.distributed.distributed_c10d as c10d
    from torch.distributed import TCPStore

    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=CONNECT_LIMIT_S):
            return TCPStore(host, port, None, False, timedelta(seconds=CONNECT_LIMIT_S))
        return None
    return c10d.GroupMember.WORLD.get_group_store() if c10d.GroupMember.WORLD is not None else None


def _own_hosts(environment: Mapping[str, str]) -> list[str]:
    """Return hosts under which others may reach this rank: its address towards the store, and the store's host."""
    hosts = [environment["MASTER_ADDR"]]
    with contextlib.suppress(OSError):
        address = hosts[0], int(environment["MASTER_PORT"])
        with socket.create_connection(address, timeout=CONNECT_LIMIT_S) as connection:
            hosts.insert(0, connection.getsockname()[0])
    return hosts


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host in ("::1", "localhost")


@contextlib.contextmanager
def _reporting(lost: str) -> Iterator[None]:
    """Report an error in the `with` block, and what is lost because of it: recording must not end the training."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  # whatever it is
        _report(f"{lost}: {type(error).__name__}: {error}")


def _report(text: str) -> None:
    rank = os.environ.get("RANK")
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr is closed
        print(f"labkit{'' if rank is None else f', rank {rank}'}: {text}", file=sys.stderr, flush=True)
