"""Keeps a submission's code from what it must not see: the judges, the solutions, other submissions, the network.

There are two layers. Python's audit hooks see every file that Python code opens, every program that it starts, every
connection and every look at other frames, on any system. They do not see what C libraries do. On Linux, where the
system lets this process make namespaces, the files and the network are really gone: empty folders cover the folders,
and there is no network interface but the loopback.

Source: Python's table of audit events; mount_namespaces(7), network_namespaces(7) and capabilities(7), the Linux
man-pages.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

from labkit.errors.own_code import LABKIT
from labkit.worker.network_namespace import drop_capabilities, enter_new, system_call

__all__ = ["Confinement", "cover", "new_namespaces", "watch"]

CLONE_NEWNS: Final = 0x00020000
MS_RDONLY: Final = 1
MS_BIND: Final = 1 << 12
MS_REC: Final = 1 << 14
MS_PRIVATE: Final = 1 << 18
PR_SET_DUMPABLE: Final = 4
# Where the code of Python, of libraries and of labkit is. Libraries may be elsewhere than Python: in the user's folder.
_LIBRARIES: Final = (
    *(path for path in sys.path if path.endswith(("site-packages", "dist-packages"))), sys.prefix, sys.base_prefix,
    os.path.dirname(os.__file__), LABKIT, "<frozen "
)  # fmt: skip
_PATHS: Final = ("open", "os.listdir", "os.scandir", "os.chdir", "os.rename", "os.remove", "os.link", "os.symlink")
_PROGRAMS: Final = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn")
# Refused only if the submission's own code asks: libraries use them, too.
_OBJECTS: Final = (
    "sys._getframe", "sys._current_frames", "gc.get_objects", "gc.get_referrers", "gc.get_referents", "sys.setprofile",
    "sys.settrace",
)  # fmt: skip
_FRAMES: Final = ("tb_frame", "gi_frame", "cr_frame", "ag_frame")  # attributes whose reading is an event
# What these ask for, their callers have asked for.
_BESIDE: Final = ("inspect.py", "traceback.py", "ctypes/__init__.py", "linecache.py", "tokenize.py", "pathlib.py", "shutil.py")


@dataclass(frozen=True)
class Confinement:
    """What a submission's code must not do.

    Args:
        hidden: folders of which nothing may be opened, and files.
        for_libraries: folders of which libraries may open files, but not the submission's own code: TensorFlow reads
            the source of the functions that it compiles, and ranks of RPC import the judge's module.
        log: the file to which an attempt is written: code can swallow the exception that it gets.
    """

    hidden: tuple[str, ...]
    for_libraries: tuple[str, ...]
    log: str


@dataclass
class _State:
    """Whether this process is watched, and whether the hook itself runs, which causes events, too."""

    watched: bool = False
    inside: bool = field(default=False)


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


def cover(paths: Sequence[str]) -> None:
    """Cover folders and files by empty ones for this process and those that it starts, and drop the means to undo that.

    Raises:
        OSError: the system does not allow it.
    """
    for path in paths:
        if os.path.isdir(path):
            system_call("mount", b"none", os.fsencode(path), b"tmpfs", MS_RDONLY, b"size=4k,mode=0555")
        elif os.path.exists(path):
            system_call("mount", b"/dev/null", os.fsencode(path), None, MS_BIND, None)
    drop_capabilities()
    with contextlib.suppress(OSError):  # so that ranks cannot read this process's memory
        system_call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)


def watch(confinement: Confinement) -> None:
    """Let an audit hook refuse from now on what this process must not do; it cannot be removed again."""
    if _state.watched:
        return
    _state.watched = True
    hidden, for_libraries = (
        tuple(os.path.realpath(folder) + os.sep for folder in folders)
        for folders in (confinement.hidden, confinement.for_libraries)
    )
    log = os.open(confinement.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if _state.inside:
            return
        _state.inside = True
        try:
            if (act := _forbidden(event, arguments, hidden, for_libraries)) is not None:
                os.write(log, f"{act}\n".encode())
                raise PermissionError(f"a submission must not do this: it {act}")
        finally:
            _state.inside = False

    sys.addaudithook(hook)


def _forbidden(event: str, arguments: tuple[Any, ...], hidden: tuple[str, ...], for_libraries: tuple[str, ...]) -> str | None:
    """Return what an event is if it is forbidden, as the end of a sentence that begins with "it"."""
    if event in _PATHS:
        for path in arguments[:2]:
            if isinstance(path, (str, bytes, os.PathLike)):
                real = os.path.realpath(os.fsdecode(path)) + os.sep
                if real.startswith(hidden) or (real.startswith(for_libraries) and _by_submission(sys._getframe(2))):
                    return f"opens {Path(real).name}, which is not for submissions"
    elif event in _PROGRAMS:
        return None if _by_labkit(sys._getframe(2)) else "starts another program"
    elif event == "socket.connect":
        address = arguments[1]
        if isinstance(address, tuple) and not _is_loopback(str(address[0])):
            return f"connects to {address[0]}"
    elif event == "socket.getaddrinfo" and arguments[0] and not _is_loopback(os.fsdecode(arguments[0])):
        return f"looks up the address of {os.fsdecode(arguments[0])}"
    elif event in _OBJECTS or (event == "object.__getattr__" and arguments[1] in _FRAMES):
        return "looks at the frames or objects of other code" if _by_submission(sys._getframe(2)) else None
    elif event.startswith("ctypes."):
        return "calls C functions by ctypes" if _by_submission(sys._getframe(2)) else None
    elif event in ("os.kill", "os.killpg") and arguments[0] != os.getpid():
        return "sends signals to other processes" if _by_submission(sys._getframe(2)) else None
    return None


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1", "", socket.gethostname()) or host.startswith("127.")


def _by_labkit(frame: FrameType | None) -> bool:
    """Whether labkit starts a program itself, such as the server of a group that the submission opens."""
    while frame is not None and frame.f_code.co_filename.endswith("subprocess.py"):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(LABKIT)


def _by_submission(frame: FrameType | None) -> bool:
    """Whether the code of this frame is not that of a library, or was called by such code where it asks for others."""
    while frame is not None and frame.f_code.co_filename.endswith(_BESIDE):
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_filename.startswith(_LIBRARIES)
