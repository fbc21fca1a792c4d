"""What a rank prints goes out at once: Python's streams and C's, on the pipe that the notebook reads."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import sys
import warnings
from collections.abc import Iterator

__all__ = ["print_to", "quiet_stderr", "reopen_closed"]

_IONBF = 2  # of <stdio.h>, in glibc, musl and macOS alike


def print_to(output: int) -> None:
    """From now on all that this process prints goes to a descriptor, which is used up; its standard input is empty."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdin = open(os.devnull)  # noqa: SIM115  # for the rank's whole life
    sys.stdout, sys.stderr = _Prompt(1), _Prompt(2)
    _unbuffer_c_output()


def reopen_closed() -> None:
    """Give a rank back what its program has closed, such as `sys.stdout`: no later run could print, nor say why."""
    if getattr(sys.stdout, "closed", False):
        sys.stdout = _Prompt(1)
    if getattr(sys.stderr, "closed", False):
        sys.stderr = _Prompt(2)


class _Prompt(io.TextIOWrapper):
    """A text stream on a descriptor that holds nothing back, so that a line without its end is seen as well."""

    def __init__(self, fd: int) -> None:
        super().__init__(open(fd, "wb", closefd=False), encoding="utf-8", errors="backslashreplace")  # noqa: SIM115

    def write(self, text: str) -> int:
        count = super().write(text)
        self.flush()
        return count


def _unbuffer_c_output() -> None:
    """C and C++ hold back what they print into a pipe until 4 KiB are full; make them give it out at once."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # a C library that names its stream otherwise
        libc = ctypes.CDLL(None)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _IONBF, 0)


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Send what C++ code writes to descriptor 2, and Python's warnings, nowhere for a while."""
    _flush_stderr()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        _flush_stderr()
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _flush_stderr() -> None:
    with contextlib.suppress(AttributeError, ValueError):  # the student's code has closed it, or put None there
        sys.stderr.flush()
