"""Runs a module on a submission in a process of its own: without the teacher's files and network, and within limits.

    run_confined(module, text, limits)                            where the class is graded
      └─ python -m labkit.teaching.classroom.confined_process MODULE FD   enters namespaces, while it has one thread
           └─ MODULE.main(FD, cover)                              imports what it needs, and calls `cover`

On Linux, where the system allows namespaces, the process has no network but the loopback, sees no processes but those
that it starts, and can change no files but those in its folder, which is deleted. What `cover` hides does not exist for
it, whatever C code it runs. Elsewhere only the limits hold: the process may do what the teacher may.

Source: pid_namespaces(7), mount_namespaces(7), network_namespaces(7) and capabilities(7), the Linux man-pages.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any, Final

import psutil

from labkit.errors.exceptions import LABKIT
from labkit.launch.descendants import adopt_orphans, end_all
from labkit.worker.network_namespace import drop_capabilities, enter_new, system_call

CHECK_EVERY_S: Final = 0.2
MOST_OUTPUT: Final = 20_000  # characters of what it prints that are kept
MOST_RESULT: Final = 1 << 26  # bytes of its result
MOST_IN_FILE: Final = 1 << 30  # bytes that one file can have; writing more raises OSError
# The environment of a submission: nothing else of the teacher's is in it, such as passwords.
_KEPT: Final = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "SYSTEMROOT", "VIRTUAL_ENV")
# Linux
CLONE_NEWNS: Final = 0x00020000
CLONE_NEWPID: Final = 0x20000000
MS_RDONLY: Final = 1
MS_NOSUID_NODEV_NOEXEC: Final = 2 | 4 | 8
MS_BIND: Final = 1 << 12
MS_REC: Final = 1 << 14
MS_PRIVATE: Final = 1 << 18
PR_SET_PDEATHSIG: Final = 1
PR_SET_DUMPABLE: Final = 4
MOUNT_SETATTR: Final = 442  # the number of the system call, for which older C libraries have no function
AT_FDCWD: Final = -100
AT_RECURSIVE: Final = 0x8000

Cover = Callable[[Sequence[str]], None]  # `cover`, or where there are no namespaces a function that does nothing


@dataclass(frozen=True)
class Limits:
    """What a process and those that it starts may use together."""

    time_s: float
    memory_mb: float = 4000  # resident; pages that processes share count several times
    processes: int = 64  # at a time


@dataclass(frozen=True)
class ProcessEnd:
    """How a process ended."""

    result: str  # what it wrote into its result
    output: str  # the beginning of what it printed
    why: str  # which limit ended it, or its exit code if that is not 0; "" if it ended by itself


def run_confined(module: str, text: str, limits: Limits, path: Sequence[str] = (), *, confined: bool = True) -> ProcessEnd:
    """Call a module's `main` in a process in a session and a folder of its own, and wait for it.

    `main` gets the file descriptor for its result, and `cover`; `text` is its standard input, `path` has the folders
    from which it may import. A confined process has namespaces of its own.
    """
    adopt_orphans()  # what it leaves behind becomes a child of this process, and is found
    read_end, write_end = os.pipe()
    with (
        tempfile.TemporaryDirectory(prefix="labkit-grade-", ignore_cleanup_errors=True) as folder,
        subprocess.Popen(
            [sys.executable, "-m", __name__, module, str(write_end), str(int(confined))], cwd=folder,
            env=_environment(folder, path), pass_fds=[write_end], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        ) as process,
    ):  # fmt: skip
        os.close(write_end)
        assert process.stdin is not None
        assert process.stdout is not None
        readers = [_Reader(os.fdopen(read_end, "rb", buffering=0), MOST_RESULT), _Reader(process.stdout, MOST_OUTPUT)]
        known: dict[int, psutil.Process] = {}
        try:
            feeding = threading.Thread(target=_feed, args=(process.stdin, text), daemon=True)
            feeding.start()
            why = _supervised(process, limits, known)
        finally:
            _end(process, known)
        result, output = (reader.kept() for reader in readers)  # before `Popen` closes the streams
    return ProcessEnd(result, output, why)


def why_unconfined() -> str:
    """Return why this system does not allow namespaces; "" if it does. Another process tries."""
    with tempfile.TemporaryDirectory() as folder:
        program = f"from {__name__} import *; enter_namespaces(); cover([])"
        command = [sys.executable, "-c", program]
        tried = subprocess.run(command, capture_output=True, text=True, env=_environment(folder), check=False, timeout=60)
    return (tried.stderr.splitlines() or [f"exit code {tried.returncode}"])[-1] if tried.returncode else ""


def _environment(folder: str, path: Sequence[str] = ()) -> dict[str, str]:
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return kept | {
        "CUDA_VISIBLE_DEVICES": "", "HOME": folder, "TMPDIR": folder, "LABKIT_NETWORK": "shared",
        "PYTHONPATH": os.pathsep.join([os.path.dirname(os.path.dirname(LABKIT)), *path]), "PYTHONUTF8": "1",
        "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1", "TF_CPP_MIN_LOG_LEVEL": "3",
    }  # fmt: skip


class _Reader:
    """Reads a stream to its end on a thread of its own, and keeps the beginning."""

    def __init__(self, stream: IO[bytes], most: int) -> None:
        self._stream, self._most = stream, most
        self._kept = bytearray()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while data := os.read(self._stream.fileno(), 1 << 16):
            self._kept += data[: self._most - len(self._kept)]

    def kept(self) -> str:
        self._thread.join(timeout=5)  # all writers have ended, but for one in the middle of a system call
        with contextlib.suppress(OSError):
            self._stream.close()
        return bytes(self._kept).decode(errors="replace")


def _feed(stream: IO[bytes], text: str) -> None:
    with contextlib.suppress(OSError):  # it has ended without reading
        stream.write(text.encode())
        stream.close()


def _supervised(process: subprocess.Popen[bytes], limits: Limits, known: dict[int, psutil.Process]) -> str:
    """Wait for the end of a process, and note its descendants. Return why it has to be ended, or its exit code."""
    until = time.monotonic() + limits.time_s
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(CHECK_EVERY_S)
            return f"it ended with exit code {code}" if code else ""
        family = _family(process.pid)
        known.update({one.pid: one for one in family})
        if time.monotonic() > until:
            return f"it was not finished after {limits.time_s:.0f} s"
        if len(family) > limits.processes:
            return f"it started more than {limits.processes} processes"
        if (used := sum(map(_memory_mb, family))) > limits.memory_mb:
            return f"it used {used:.0f} MB of memory; allowed are {limits.memory_mb:.0f}"


def _family(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    return []


def _memory_mb(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        info: Any = process.memory_info()
        return float(info.rss - getattr(info, "shared", 0)) / 1e6
    return 0.0


def _end(process: subprocess.Popen[bytes], known: dict[int, psutil.Process]) -> None:
    """End the process and all that it has started, also what has left its session."""
    known.update({one.pid: one for one in _family(process.pid)})
    process.kill()
    process.wait()
    end_all([one for one in known.values() if one.pid != process.pid])


def enter_namespaces() -> None:
    """Go on in a new process, the first of new namespaces: all others in them end with it.

    A user who is not root may do this only while the process has a single thread; numpy and torch start others when
    they are imported.

    Raises:
        OSError: the system does not allow it.
    """
    if sys.platform != "linux":
        raise OSError("only Linux has namespaces")
    enter_new(as_owner=True)
    system_call("unshare", CLONE_NEWNS | CLONE_NEWPID)
    system_call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    go_on_in_child()
    system_call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    system_call("mount", b"proc", b"/proc", b"proc", MS_NOSUID_NODEV_NOEXEC, None)


def cover(hidden: Sequence[str]) -> None:
    """Cover folders and files by empty ones, and let only the process's own folder be changed.

    This holds for this thread, which has no means left to undo it, and for the processes that it starts.

    Raises:
        OSError: the system does not allow it, as a kernel before 5.12.
    """
    own = [os.fsencode(folder) for folder in (os.environ["HOME"], "/dev/shm") if os.path.isdir(folder)]
    for folder in own:
        system_call("mount", folder, folder, None, MS_BIND | MS_REC, None)
    os.chdir(own[0])  # until now, the current folder is that below the new mount
    read_only, none = struct.pack("4Q", MS_RDONLY, 0, 0, 0), struct.pack("4Q", 0, MS_RDONLY, 0, 0)
    system_call("syscall", MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, read_only, len(read_only))
    for folder in own:
        system_call("syscall", MOUNT_SETATTR, AT_FDCWD, folder, AT_RECURSIVE, none, len(none))
    for path in hidden:
        if os.path.isdir(path):
            system_call("mount", b"none", os.fsencode(path), b"tmpfs", MS_RDONLY, b"size=4k,mode=0555")
        elif os.path.exists(path):
            system_call("mount", b"/dev/null", os.fsencode(path), None, MS_BIND, None)
    drop_capabilities()
    system_call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)  # so that ranks cannot read this process's memory


def go_on_in_child() -> None:
    """Fork, and go on in the child; this process waits, and ends with its exit code, or 128 and the signal's number."""
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(code if code >= 0 else 128 - code)


def _main(module: str, result: int, *, confined: bool) -> None:
    import resource  # not available on Windows, where labkit can be imported

    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    most = MOST_IN_FILE if hard == resource.RLIM_INFINITY else min(MOST_IN_FILE, hard)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    if confined:
        enter_namespaces()
    importlib.import_module(module).main(result, cover if confined else lambda _: None)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), confined=sys.argv[3] == "1")
