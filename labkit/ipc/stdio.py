"""Unbuffered output of a rank: Python's and C's standard streams, written to the pipe that the notebook reads."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import sys
import warnings
from collections.abc import Iterator

_IONBF = 2  # <stdio.h>: unbuffered; the same value in glibc, musl and macOS


def print_to(output: int) -> None:
    """Redirect all output of this process to a pipe, which is closed here, and make its standard input empty."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdin = open(os.devnull)  # noqa: SIM115  # for the rank's whole life
    sys.stdout, sys.stderr = _Unbuffered(1), _Unbuffered(2)
    _unbuffer_c_output()


def reopen_closed() -> None:
    """Reopen `sys.stdout` and `sys.stderr` if the student's program has closed them, so that later runs can print."""
    if getattr(sys.stdout, "closed", False):
        sys.stdout = _Unbuffered(1)
    if getattr(sys.stderr, "closed", False):
        sys.stderr = _Unbuffered(2)


class _Unbuffered(io.TextIOWrapper):
    """A text stream that writes at once, so that a line is visible before it ends."""

    def __init__(self, fd: int) -> None:
        super().__init__(open(fd, "wb", closefd=False), encoding="utf-8", errors="backslashreplace")  # noqa: SIM115

    def write(self, text: str) -> int:
        count = super().write(text)
        self.flush()
        return count


def _unbuffer_c_output() -> None:
    """Make C and C++ code print at once; into a pipe it would buffer 4 KiB."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # a C library with another name for its stream
        libc = ctypes.CDLL(None)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _IONBF, 0)


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Discard what C++ code writes to file descriptor 2, and Python's warnings, inside the `with` block."""
    _flush_stderr()
    kept, devnull = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        _flush_stderr()
        os.dup2(kept, 2)
        os.close(kept)
        os.close(devnull)


def _flush_stderr() -> None:
    with contextlib.suppress(AttributeError, ValueError):  # the student's code has closed it or set it to None
        sys.stderr.flush()
