"""Children that a rank forks, such as DataLoader workers, do not write into the memory shared with the notebook."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Final

__all__ = ["keep_from_forks"]

MAP_FIXED: Final = 0x10  # on Linux and macOS alike; Python's mmap does not name it


def keep_from_forks(memory: mmap.mmap) -> None:
    """From now on, a process that this one forks has zeros of its own where this memory lies.

    The spans, process groups and hooks that it inherits all hold this memory, and count records on from where the rank
    was. They go on to work, into memory that nobody reads.

    Args:
        memory: shared memory. Once it is closed, processes are forked as if this had never been called.
    """
    if not hasattr(os, "register_at_fork"):
        return
    map_memory = ctypes.CDLL(None, use_errno=True).mmap
    map_memory.restype = ctypes.c_void_p
    map_memory.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    address, nbytes = ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory)
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
    mapped = weakref.ref(memory)  # a hook at fork stays for as long as the process lives; it must not keep the memory

    def replace() -> None:
        memory = mapped()
        if memory is None or memory.closed:
            return  # something else may lie at this address by now
        if map_memory(address, nbytes, protection, flags, -1, 0) != address:
            os._exit(1)  # there is no memory left; and to go on would be to spoil the rank's records

    os.register_at_fork(after_in_child=replace)
