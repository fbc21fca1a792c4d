"""`q` at a debugger's prompt: what it raises in the rank, and the failure that this is for the run."""

from __future__ import annotations

import sys

from labkit.errors.exceptions import RankFailure


class Quit(BaseException):
    """The student has typed `q`. A program that catches `Exception`, for example to skip a bad batch, ends as well."""


def is_quit(error: BaseException) -> bool:
    """Whether the student has ended the function with the debugger's `q`."""
    bdb = sys.modules.get("bdb")
    return isinstance(error, Quit) or (bdb is not None and isinstance(error, bdb.BdbQuit))


def quit_failure(rank: int, name: str, at_ns: int) -> RankFailure:
    """Return the failure of a rank that the student has ended with `q`."""
    return RankFailure(rank, name, "was ended at a breakpoint, with q", at_ns=at_ns, verb="", own=True, in_python=True)
