"""Keeps a submission's code from what it must not see: the judges, the solutions, other submissions, the network.

There are two layers. Python's audit hooks see every file that Python code opens, every program that it starts, every
connection and every look at other frames, on any system. They do not see what C libraries do. On Linux, where the
system lets this process make namespaces, the files and the network are really gone: empty folders cover the folders,
and there is no network interface but the loopback.

Source: Python's table of audit events; mount_namespaces(7), network_namespaces(7) and capabilities(7), the Linux
man-pages.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.util
import os
import posixpath
import shutil
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any, Final

from labkit.errors.exceptions import LABKIT
from labkit.notebook.lessons import JUDGES
from labkit.worker.network_namespace import drop_capabilities, enter_new, system_call

CLONE_NEWNS: Final = 0x00020000
MS_RDONLY: Final = 1
MS_BIND: Final = 1 << 12
MS_REC: Final = 1 << 14
MS_PRIVATE: Final = 1 << 18
PR_SET_DUMPABLE: Final = 4
MOUNT_SETATTR: Final = 442  # the number of the system call, for which older C libraries have no function
AT_FDCWD: Final = -100
AT_RECURSIVE: Final = 0x8000
# Where the code of Python, of libraries and of labkit is. Libraries may be elsewhere than Python: in the user's folder.
_LIBRARIES: Final = (
    *(path for path in sys.path if path.endswith(("site-packages", "dist-packages"))), sys.prefix, sys.base_prefix,
    os.path.dirname(os.__file__), LABKIT, str(JUDGES), "<frozen "
)  # fmt: skip
_OF_TWO: Final = ("os.rename", "os.link", "os.symlink")  # paths
_CHANGES: Final = (
    *_OF_TWO, "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.chown", "os.truncate", "os.utime",
)  # fmt: skip
MOST_OF_NAME: Final = 60  # characters of a program's name in a verdict
MOST_OF_ACT: Final = 250  # bytes of what a refused attempt is called; a file's name has at most 255
_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CODE: Final = ("compile", "code.__new__", "object.__setattr__")
_PATHS: Final = ("open", "os.listdir", "os.scandir", "os.chdir", "os.fwalk", *_CHANGES)
_PROGRAMS: Final = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn")
# Refused only if the submission's own code asks: libraries use them, too.
_OBJECTS: Final = (
    "sys._getframe", "sys._current_frames", "gc.get_objects", "gc.get_referrers", "gc.get_referents", "sys.setprofile",
    "sys.settrace",
)  # fmt: skip
_FRAMES: Final = ("tb_frame", "gi_frame", "cr_frame", "ag_frame")  # attributes whose reading is an event
# What these ask for, their callers have asked for.
_BESIDE: Final = ("inspect.py", "traceback.py", "ctypes/__init__.py", "linecache.py", "tokenize.py", "pathlib.py", "shutil.py")
_OF_OS: Final = ("/os.py", "<frozen os>")
# The same for signals.
_SENDERS: Final = (*_BESIDE, "psutil/__init__.py", "launch/descendants.py", "classroom/confinement.py")
_SET_OWNER: Final = (8, 15)  # F_SETOWN and F_SETOWN_EX of Linux

_IMPORTS: Final = ("importlib._bootstrap>", "importlib._bootstrap_external>")  # an `import` opens files, too


@dataclass(frozen=True)
class Confinement:
    """What a submission's code must not do.

    Args:
        hidden: folders of which nothing may be opened, and files.
        judges: folders and files that the submission's own code may not open. Libraries may: they read the lines of
            functions for tracebacks, and TensorFlow compiles from them.
        log: the folder in which an attempt becomes a folder of its name: code can swallow the exception that it gets. A
            file would be open, and a submission can write into each file descriptor of its process, or close it.
    """

    hidden: tuple[str, ...]
    judges: tuple[str, ...]
    log: str


@dataclass
class _State:
    """Whether this process is watched, and the threads in which the hook itself runs, which causes events, too."""

    watched: bool = False
    inside: set[int] = field(default_factory=set)


_state: Final = _State()


def new_namespaces() -> str:
    """Enter a new network, with a loopback interface only, and an own view of the file system. Call it first of all.

    Returns:
        why the system does not allow it; "" if it does.
    """
    if sys.platform != "linux":
        return "only Linux has namespaces"
    try:
        enter_new(as_owner=True)
        system_call("unshare", CLONE_NEWNS)
        system_call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def cover(confinement: Confinement, *, judges: bool = True) -> None:
    """Cover what is hidden by empty folders and files, and let only the submission's own folder be changed.

    This holds for this process and those that it starts. It drops the means to undo it.

    Args:
        confinement: what is hidden.
        judges: whether the judges are covered as well: not if the ranks import them.

    Raises:
        OSError: the system does not allow it.
    """
    with contextlib.suppress(OSError):  # a kernel before 5.12
        _read_only(_writable(confinement))
    for path in (*confinement.hidden, *(confinement.judges if judges else ())):
        if os.path.isdir(path):
            system_call("mount", b"none", os.fsencode(path), b"tmpfs", MS_RDONLY, b"size=4k,mode=0555")
        elif os.path.exists(path):
            system_call("mount", b"/dev/null", os.fsencode(path), None, MS_BIND, None)
    drop_capabilities()
    with contextlib.suppress(OSError):  # so that ranks cannot read this process's memory
        system_call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)


def _read_only(but: Sequence[str]) -> None:
    folders = [os.fsencode(folder) for folder in dict.fromkeys(but) if os.path.isdir(folder)]
    for folder in folders:
        system_call("mount", folder, folder, None, MS_BIND | MS_REC, None)
    read_only, none = struct.pack("4Q", 1, 0, 0, 0), struct.pack("4Q", 0, 1, 0, 0)
    system_call("syscall", MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, read_only, len(read_only))
    for folder in folders:
        system_call("syscall", MOUNT_SETATTR, AT_FDCWD, folder, AT_RECURSIVE, none, len(none))


def watch(confinement: Confinement) -> None:
    """Let an audit hook refuse from now on what this process must not do; it cannot be removed again."""
    if _state.watched:
        return
    _state.watched = True
    signal.pidfd_send_signal = sys.modules["_signal"].pidfd_send_signal = _kill_by_pidfd  # type: ignore[attr-defined]
    vars(_private_copy(__file__))["_watch"](confinement)


def attempts(confinement: Confinement) -> list[str]:
    """Return what was refused, and forget it. C code can have put anything in the place of the folder."""
    if not os.path.lexists(confinement.log):
        return []
    if os.path.islink(confinement.log) or not os.path.isdir(confinement.log):
        os.remove(confinement.log)
        return ["changes the list of what it has tried"]
    found = sorted(os.listdir(confinement.log))
    shutil.rmtree(confinement.log, ignore_errors=True)
    return found


def _writable(confinement: Confinement) -> tuple[str, ...]:
    return os.path.dirname(confinement.log), tempfile.gettempdir(), "/dev/shm"


def _private_copy(file: str) -> ModuleType:
    """Return a copy of a module that no other code can reach and change, with own built-in functions and `os`."""
    spec = importlib.util.spec_from_file_location(__name__, file)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    copy.__dict__["__builtins__"] = dict(vars(builtins))
    spec.loader.exec_module(copy)
    own = {"os": os, "sys": sys, "posixpath": posixpath, "socket": socket}
    copy.__dict__.update({name: SimpleNamespace(**vars(module)) for name, module in own.items() if name in vars(copy)})
    if file != posixpath.__file__ and os.path is posixpath:
        copy.__dict__["os"].path = _private_copy(posixpath.__file__)
    return copy


def _watch(confinement: Confinement) -> None:
    hidden, judges = (
        tuple(os.path.realpath(path) + os.sep for path in paths) for paths in (confinement.hidden, confinement.judges)
    )
    own = os.path.realpath(confinement.log) + os.sep
    writable = tuple(os.path.realpath(folder) + os.sep for folder in (*_writable(confinement), os.devnull, "/dev/tty"))
    first = [True]  # one attempt says enough, and a submission may make many

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        thread = get_ident()
        if thread in _state.inside:
            return
        _state.inside.add(thread)
        try:
            if (act := _forbidden(event, arguments, hidden, judges, writable, own)) is not None:
                if first:
                    first.clear()
                    _note(own, act)
                raise PermissionError(f"a submission must not do this: it {act}")
        finally:
            _state.inside.discard(thread)

    sys.addaudithook(hook)


def _note(log: str, act: str) -> None:
    """Make a folder that is called like the act. Nothing is called here that other code can replace."""
    name = "".join(character if character.isprintable() else " " for character in act.replace("/", "\u2215"))
    for folder in (b"", name.encode()[:MOST_OF_ACT]):
        try:
            os.mkdir(log.encode(errors="surrogateescape") + folder, 0o700)
        except OSError:  # another rank has made it
            pass


def _paths_in(event: str, arguments: tuple[Any, ...]) -> Iterator[tuple[Any, str]]:
    """Yield each path of an event, with the folder to which it is relative by a `dir_fd`."""
    if event in _OF_TWO:  # with one `dir_fd` or two
        yield arguments[0], _folder_at(arguments[2])
        yield arguments[1], _folder_at(arguments[-1])
    else:
        yield arguments[0], _folder_at(arguments[-1] if event in _CHANGES and event != "os.truncate" else -1)


def _folder_at(fd: Any) -> str:
    """Return the path of an open folder; "" for none, or if it is unknown."""
    if not isinstance(fd, int) or fd < 0:
        return ""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def _kill_by_pidfd(pidfd: int, number: int, *_: Any) -> None:
    """Do what `signal.pidfd_send_signal` does, which is no event, by `os.kill`, which is one."""
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        pid = next((int(line[4:]) for line in file if line.startswith("Pid:")), -1)
    if pid <= 0:
        raise ProcessLookupError(f"{pidfd} refers to no running process")
    os.kill(pid, number)


def _forbidden(
    event: str,
    arguments: tuple[Any, ...],
    hidden: tuple[str, ...],
    judges: tuple[str, ...],
    writable: tuple[str, ...],
    log: str,
) -> str | None:
    """Return what an event is if it is forbidden, as the end of a sentence that begins with "it"."""
    if event in _PATHS:
        for path, folder in _paths_in(event, arguments):
            if isinstance(path, (str, bytes)):
                real = os.path.realpath(os.path.join(folder, _exactly(path))) + os.sep
                if real.startswith(hidden) or (real.startswith(judges) and _by_submission(sys._getframe(2), _BESIDE + _IMPORTS)):
                    return f"opens {os.path.basename(real[:-1])}, which is not for submissions"
                changes = event in _CHANGES or (event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES)
                if changes and not real.startswith(writable) and _by_submission(sys._getframe(2)):
                    return f"changes {os.path.basename(real[:-1])}, which is not in its own folder"
                if (real.startswith(log) or (changes and log.startswith(real))) and _by_submission(sys._getframe(2)):
                    return "changes the list of what it has tried"
                # What is then opened relative to its descriptor is not seen. `real` ends like a folder.
                descriptor = event == "os.fwalk" or (event == "open" and arguments[1] is None)
                if descriptor and os.access(real, os.F_OK) and _by_submission(sys._getframe(2), _OF_OS):
                    return "opens a folder by os.open or os.fwalk"
                process = real.split("/")[2] if real.startswith("/proc/") else ""
                if process.isdecimal() and int(process) != os.getpid() and _by_submission(sys._getframe(2)):
                    return "looks at other processes"
            elif path is not None and type(path) is not int and _by_submission(sys._getframe(2)):
                return f"opens a file by a {type(path).__name__}"
    elif event in _CODE:
        file = arguments[1] if event != "object.__setattr__" else LABKIT * (arguments[1] == "__code__")
        if isinstance(file, (str, bytes)) and _exactly(file).startswith(_LIBRARIES):
            return "changes code, or compiles it under the name of a library" if _by_submission(sys._getframe(2)) else None
    elif event == "marshal.loads":
        return "loads code by marshal" if _by_submission(sys._getframe(2)) else None
    elif event in _PROGRAMS:
        program = arguments[0] if event != "pty.spawn" else ""
        name = " ".join(_exactly(program).split()) if isinstance(program, (str, bytes)) else ""
        return None if _by_labkit(sys._getframe(2)) else f"starts another program ({name[:MOST_OF_NAME]})"
    elif event == "socket.connect":
        address = arguments[1]
        if isinstance(address, tuple) and not _is_loopback(str(address[0])):
            return f"connects to {address[0]}"
    elif event == "socket.getaddrinfo" and arguments[0] and not _is_loopback(_exactly(arguments[0])):
        return f"looks up the address of {_exactly(arguments[0])}"
    elif event in _OBJECTS or (event == "object.__getattr__" and arguments[1] in _FRAMES):
        return "looks at the frames or objects of other code" if _by_submission(sys._getframe(2)) else None
    elif event.startswith("ctypes."):
        return "calls C functions by ctypes" if _by_submission(sys._getframe(2)) else None
    elif (event in ("os.kill", "os.killpg", "resource.prlimit") and arguments[0] not in (os.getpid(), 0)) or (
        event == "fcntl.fcntl" and arguments[1] in _SET_OWNER  # who gets a signal that the kernel sends
    ):
        return "sends signals to other processes" if _by_submission(sys._getframe(2), _SENDERS) else None
    return None


def _exactly(text: str | bytes) -> str:
    """Return a text without the methods of a subclass, which may deceive; `os.fsdecode` calls what can be replaced."""
    return str.__str__(text) if isinstance(text, str) else bytes(memoryview(text)).decode(errors="surrogateescape")


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1", "", socket.gethostname()) or host.startswith("127.")


def _by_labkit(frame: FrameType | None) -> bool:
    """Whether labkit starts a program itself, such as the server of a group that the submission opens."""
    while frame is not None and frame.f_code.co_filename.endswith("subprocess.py"):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(LABKIT)


def _by_submission(frame: FrameType | None, beside: tuple[str, ...] = _BESIDE) -> bool:
    """Whether the code of this frame is not that of a library, or was called by such code where it asks for others."""
    while frame is not None and frame.f_code.co_filename.endswith(beside):
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_filename.startswith(_LIBRARIES)
