"""What a new process does to become a rank, forked by the server or spawned, before its main loop begins."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import mmap
import os
import signal
import socket
import sys
from collections.abc import Iterable, Sequence
from typing import Final, NoReturn

from labkit.ipc.stdio import print_to
from labkit.launch.capacity import raise_limit
from labkit.launch.descendants import adopt_orphans, end_other_sessions
from labkit.recording.ring_buffer import keep_from_forks
from labkit.worker.network_namespace import PrivateNetwork
from labkit.worker.stack_writer import prepare, write_when_asked

PR_SET_PDEATHSIG: Final = 1


def spawned(fds: list[int], preload: list[str]) -> NoReturn:
    """Run a spawned rank: import modules, then serve the notebook; `fds` is as for `live_as_rank`."""
    raise_limit()
    prepare()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # as in `fork_server.serve`
    import_all(preload)
    live_as_rank(fds, PrivateNetwork())


def import_all(names: Sequence[str]) -> None:
    """Import modules, call the functions that are named behind a colon, and keep all objects from the collector."""
    for name in names:
        module, _, function = name.partition(":")
        with contextlib.suppress(Exception):  # if it is not installed, or raises an error, its first use reports that
            imported = importlib.import_module(module)
            if function:
                getattr(imported, function)()
    import gc

    gc.collect()
    gc.freeze()  # otherwise the collector would write to, and so copy, each page that forked ranks share


def _reseed() -> None:
    """Seed random generators anew, as in a new process; otherwise all ranks would draw the same numbers.

    `random` reseeds itself after a fork. TensorFlow and CUDA seed their generators on first use, which is in the rank.
    """
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(int.from_bytes(os.urandom(4)))  # without a number it takes twice as long
    if "torch" in sys.modules:
        # Not `torch.seed`, which would also set CUDA's seed.
        sys.modules["torch"].default_generator.seed()


def live_as_rank(
    fds: Sequence[int], network: PrivateNetwork, parent: int | None = None, unneeded: Iterable[int] = ()
) -> NoReturn:
    """Run this process as a rank, and end it afterwards.

    `fds` are the socket, the output pipe and the recording memory; those `unneeded` are the server's. `parent` is the
    server that forked the rank; spawned ranks have a guard instead, as the kernel would take the end of the notebook's
    thread that spawned the rank for the death of its parent.
    """
    code = 1
    try:
        for fd in unneeded:
            os.close(fd)
        if parent is not None:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it died before `prctl`
                os._exit(1)
        with contextlib.suppress(OSError):  # a session leader already leads its process group
            os.setpgid(0, 0)
        adopt_orphans()
        connection, output, ring = fds
        print_to(output)
        _reseed()
        from labkit.recording.ring_buffer import RING_BYTES
        from labkit.worker.main_loop import main

        # Works also if no Python runs, as in a rank that is blocked or has crashed in C++. thread_states.py reads it.
        write_when_asked(ring)
        faulthandler.enable(ring, all_threads=False)
        os.register_at_fork(after_in_child=faulthandler.disable)  # for processes that the rank forks
        memory = mmap.mmap(ring, RING_BYTES)
        keep_from_forks(memory)
        main(socket.socket(fileno=connection), memory, network)
        if parent is None:  # otherwise the server ends them
            end_other_sessions()
        code = 0
    except BaseException:  # noqa: BLE001  # the notebook shows this rank's output
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):  # a broken stream must not keep the process alive
            sys.stdout.flush()
        os._exit(code)
