"""A script that torchrun started: what its ranks record lands in the folder that LABKIT_TRACE names.

Each rank writes into its ring as in a group, only that the ring's memory is a file of the folder: whatever ends the
process, what it had recorded is there. A thread looks in ten times a second. It moves records out of the ring before
they are overwritten, says that the rank is alive, and once torch is there has rank 0 tell the others what this run is
called and what its clock says.

    <when>-<host>-<pid>-rank<n>.ring       the newest records, and what is under way; see `recording.ring_buffer`
    <when>-<host>-<pid>-rank<n>.records    older records, where there are so many
    <when>-<host>-<pid>-rank<n>.json       who wrote that, and how its clock compares with rank 0's

Whatever goes wrong here is said once, and the script goes on.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from labkit.recording.clock_sync import SECRET_BYTES, ClockServer, Reading, ask, machine
from labkit.recording.fork_isolation import keep_from_forks
from labkit.recording.import_hook import when_imported
from labkit.recording.record import Recorder, clock, here
from labkit.recording.ring_buffer import RingReader, RingWriter
from labkit.recording.ring_layout import CAPACITY, RING_BYTES
from labkit.recording.script_folder import VARIABLE

__all__ = ["begin"]

LOOK_EVERY_S: Final = 0.1
HURRY_S: Final = 0.01  # the same where records had to be moved: the fastest writer fills the ring in 0.1 s
MOVE_AT: Final = CAPACITY // 8  # records: below that, the ring alone keeps them
MOST_RECORDS: Final = 1 << 21  # that are moved: 168 MB a rank. The ring goes on to keep the newest
MEET_EVERY_S: Final = 0.02  # look whether rank 0 has told, until it has: a script may be over soon
MEET_LIMIT_S: Final = 120.0  # for rank 0 to tell the others; after that a rank stays alone with its clock
CONNECT_LIMIT_S: Final = 10.0  # on a busy machine the agent that holds the store may get no core for a while
ASK_FIRST_S: Final = 1.0  # between two readings of the clock; doubled each time, up to
ASK_LAST_S: Final = 60.0
END_LIMIT_S: Final = 2.0  # for the thread to come to its end
LINGER_S: Final = 0.5  # so long a script that was very short is held for the ranks to meet


def begin() -> None:
    """Record this process as the rank that it is, in the folder that `LABKIT_TRACE` names.

    Called by `import labkit` where there is one, and by `python -m labkit`.
    """
    # Taken out: what this process starts is no rank, such as a worker of a DataLoader, which imports the script again.
    folder = os.environ.pop(VARIABLE)
    try:
        _Script(Path(folder).absolute(), os.environ).start()
    except Exception as error:  # noqa: BLE001  # the training is worth more than its trace
        _say(f"{VARIABLE}={folder}: {_words(error)}. This rank runs without being recorded.")


class _Script:
    """This process, as a rank that is recorded in a folder.

    Args:
        folder: where.
        environment: what torchrun tells.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._environment = environment
        rank, size = int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))
        self._rank = rank
        self._alone = size == 1
        self._elsewhere = size - int(environment.get("LOCAL_WORLD_SIZE", "1"))  # ranks, at most
        self._key = f"labkit/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}/{size}"  # torchrun's store outlives a restart
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
        self._reader: RingReader | None = None
        self._moved = 0
        self._torch_is_there = self._over = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._look_in, name="labkit-trace", daemon=True)
        # Of meeting the other ranks:
        self._store: Any = None
        self._server: ClockServer | None = None
        self._where: tuple[Sequence[str], int, bytes] | None = None  # rank 0's clock
        self._met = self._alone
        self._ask_at_s, self._ask_again_s = 0.0, ASK_FIRST_S

    def start(self) -> None:
        """From now on."""
        self._recorder.ring.alive(clock())
        here.start(self._recorder)
        when_imported("torch", lambda _: self._watch())
        atexit.register(self._end)
        self._thread.start()

    def _watch(self) -> None:
        try:
            from labkit import comm

            if comm.watch_script(self._recorder):
                _say(
                    "the process group was there before labkit: what goes through it is not recorded. "
                    "Let `import labkit` stand above init_process_group."
                )
            self._torch_is_there = True
            self._wake.set()
        except Exception as error:  # noqa: BLE001  # as above
            _say(f"communication is not recorded: {_words(error)}")

    # On the thread, and at the end.

    def _look_in(self) -> None:
        until_s = time.monotonic() + MEET_LIMIT_S
        hurry = False
        try:
            while not self._over:
                meeting = self._torch_is_there and not self._met and time.monotonic() < until_s
                self._wake.wait(HURRY_S if hurry else MEET_EVERY_S if meeting else LOOK_EVERY_S)
                self._wake.clear()
                self._recorder.ring.alive(clock())
                if self._recorder.name != self._about["name"]:  # it is a worker of RPC by now
                    self._about["name"] = self._recorder.name
                    self._write_about()
                hurry = self._move()
                if self._torch_is_there and time.monotonic() < until_s:
                    self._meet()
                if self._where is not None and time.monotonic() > self._ask_at_s:
                    self._ask()
        except Exception as error:  # noqa: BLE001  # as above
            _say(f"only the newest {CAPACITY} records will be kept: {_words(error)}")

    def _move(self) -> bool:
        """Take records out of the ring, if there are many; whether there were."""
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
        if self._met:
            return
        try:
            self._met = self._meets()
        except Exception as error:  # noqa: BLE001  # as above
            self._met = True
            _say(f"its clock is not compared with rank 0's: {_words(error)}")

    def _meets(self) -> bool:
        """Rank 0 tells what the run is called and where its clock is to be asked; the others look whether it has."""
        if self._store is None:
            self._store = _store(self._environment)
        if self._store is None:
            return False
        if self._rank == 0:
            secret, told = secrets.token_bytes(SECRET_BYTES), {"run": secrets.token_hex(8), "machine": self._about["machine"]}
            if self._elsewhere:
                hosts = _own_hosts(self._environment)
                self._server = ClockServer(hosts[0] if all(map(_is_loopback, hosts)) else "", secret)
                told |= {"hosts": hosts, "port": self._server.port, "secret": secret.hex()}
            self._store.set(self._key, json.dumps(told))
        elif self._store.check([self._key]):  # `get` would wait, and maybe for ever
            told = json.loads(self._store.get(self._key))
            if told["machine"] != self._about["machine"] and "port" in told:
                self._where = told["hosts"], told["port"], bytes.fromhex(told["secret"])
        else:
            return False
        self._store = None
        self._about |= {"run": told["run"], "reference": told["machine"]}
        self._write_about()
        return True

    def _ask(self) -> None:
        assert self._where is not None
        reading: Reading | None = ask(*self._where)
        if reading is not None:
            self._about["readings"].append(reading)
            self._write_about()
        self._ask_at_s = time.monotonic() + self._ask_again_s
        self._ask_again_s = min(2 * self._ask_again_s, ASK_LAST_S)

    def _end(self) -> None:
        """The script is over."""
        if self._about["pid"] != os.getpid():
            return  # a process that the rank has forked
        try:
            self._over = True
            self._wake.set()
            self._thread.join(END_LIMIT_S)
            if self._recorder.device_clock is not None:
                self._recorder.device_clock.flush()
            self._meet_at_last()
            self._about |= {"ended_ns": clock(), "name": self._recorder.name}
            self._write_about()
        except Exception as error:  # noqa: BLE001  # as above
            _say(_words(error))

    def _meet_at_last(self) -> None:
        """What the thread may have had no time for; and a last reading of the clock."""
        until_s = time.monotonic() + LINGER_S
        while self._torch_is_there and not self._met and time.monotonic() < until_s:
            self._meet()
            time.sleep(MEET_EVERY_S)
        if self._where is not None:
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
    """Memory that is a file. Its place on the disk is taken at once: a full disk later would be a SIGBUS in the training."""
    with open(path, "xb+") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, RING_BYTES)
        except (
            AttributeError,
            OSError,
        ):  # not on this system or in this kind of folder; a full disk will be seen below
            file.write(bytes(RING_BYTES))
            file.flush()
        return mmap.mmap(file.fileno(), RING_BYTES)


def _store(environment: Mapping[str, str]) -> Any:
    """A store that all ranks know: a connection of our own to torchrun's, else the one of the process group; None for now."""
    from datetime import timedelta

    import torch.distributed.distributed_c10d as c10d
    from torch.distributed import TCPStore

    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=CONNECT_LIMIT_S):
            return TCPStore(host, port, None, False, timedelta(seconds=CONNECT_LIMIT_S))
        return None
    return c10d._get_default_store() if c10d.GroupMember.WORLD is not None else None


def _own_hosts(environment: Mapping[str, str]) -> list[str]:
    """Addresses under which the other ranks may find this one: the way it goes to the store, and what the store is called."""
    hosts = [environment["MASTER_ADDR"]]
    with contextlib.suppress(OSError):
        address = hosts[0], int(environment["MASTER_PORT"])
        with socket.create_connection(address, timeout=CONNECT_LIMIT_S) as connection:
            hosts.insert(0, connection.getsockname()[0])
    return hosts


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host in ("::1", "localhost")


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _say(text: str) -> None:
    rank = os.environ.get("RANK")
    with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody listens
        print(f"labkit{'' if rank is None else f', rank {rank}'}: {text}", file=sys.stderr, flush=True)
