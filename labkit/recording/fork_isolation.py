"""Keeps processes that a rank forks, such as DataLoader workers, from writing to memory shared with the notebook."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Final

MAP_FIXED: Final = 0x10  # the same on Linux and macOS; Python's mmap module does not define it


def keep_from_forks(memory: mmap.mmap) -> None:
    """Give every process forked from now on its own zeroed pages in place of this memory.

    A forked process inherits spans, process groups and hooks that refer to this memory, and it continues the rank's
    numbering of records. They keep working, but write to memory that nobody reads.

    Args:
        memory: shared memory. Once it is closed, forks are no longer affected.
    """
    if not hasattr(os, "register_at_fork"):
        return
    map_memory = ctypes.CDLL(None, use_errno=True).mmap
    map_memory.restype = ctypes.c_void_p
    map_memory.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    address, nbytes = ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory)
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
    mapped = weakref.ref(memory)  # a fork hook lives as long as the process; it must not keep the memory alive

    def replace() -> None:
        memory = mapped()
        if memory is None or memory.closed:
            return  # something else may be mapped at this address by now
        if map_memory(address, nbytes, protection, flags, -1, 0) != address:
            os._exit(1)  # out of memory; continuing would corrupt the rank's records

    os.register_at_fork(after_in_child=replace)
