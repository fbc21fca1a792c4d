"""Modules that the server of ranks imports for the tests, so that each rank does not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from labkit.worker.runtimes.registry import RUNTIMES


@contextlib.contextmanager
def preloaded(module: str) -> Iterator[None]:
    """Let servers that start meanwhile import a module, too.

    A function of a test file is pickled by reference, so each rank imports the file, and with it pytest, which takes
    0.06 s of a core per rank, and what else the file imports.
    """
    before = {kind: kind.preload for runtime in RUNTIMES.values() for kind in runtime.__mro__ if "preload" in vars(kind)}
    for kind, modules in before.items():
        kind.preload = (*modules, module)
    try:
        yield
    finally:
        for kind, modules in before.items():
            kind.preload = modules
