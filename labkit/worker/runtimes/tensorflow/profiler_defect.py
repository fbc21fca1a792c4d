"""Workaround for a use-after-free in TensorFlow's profiler, which crashes processes when a session stops.

`TraceMeRecorder::Consume` collects the events of each thread in a `std::deque`, and the deques in a growing
`std::vector`. The move constructor of libstdc++'s deque may throw, so a vector that grows copies the deques and
destroys the old ones. But for events that began on one thread and ended on another, it keeps addresses in the old
deques, and completes the events there. MultiWorkerMirroredStrategy produces such an event for every collective, on all
workers but the first: of 25 processes that profiled 100 steps, 6 were killed by SIGABRT or SIGSEGV (TensorFlow 2.21).

While a session stops, the PLT entry through which TensorFlow's library calls the deque's destructor points to a
function of labkit that only keeps the deque. Afterwards the entry is restored and the deques are destroyed: no memory
leaks, and TensorFlow is changed only during the stop.

The entry is changed only if all of these hold: the version is known to have the bug; the system is Linux on x86-64; the
library is that of TensorFlow's own package; its relocation table names one entry for the destructor, which is writable
and leads to code. Otherwise labkit does not profile at all.

Remove this when TensorFlow reserves the vector's memory, or completes the events before they move.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

KNOWN_VERSIONS: Final = ("2.21.",)  # prefixes of version numbers
LIBRARY: Final = "libtensorflow_framework.so.2"
DESTRUCTOR: Final = "_ZNSt5dequeIN3tsl8profiler15TraceMeRecorder5EventESaIS3_EED2Ev"
DEQUE_WORDS: Final = 10  # libstdc++'s std::deque: address and size of its map, and two iterators of four addresses
DYNAMIC: Final = struct.Struct("<QQ")  # a tag and its value
DT_NULL, DT_PLTRELSZ, DT_SYMTAB, DT_JMPREL = 0, 2, 6, 23
JUMP_SLOT: Final = 7  # R_X86_64_JUMP_SLOT
SYMBOL_BYTES: Final = 24  # of `Elf64_Sym`
RTLD_DL_SYMENT: Final = 1
RTLD_DI_LINKMAP: Final = 2


class SafeStop:
    """A reentrant context manager in which a session of TensorFlow's profiler can be stopped safely."""

    def __init__(self, entry: int, destructor: int) -> None:
        self.entry = ctypes.c_void_p.from_address(entry)
        self._destroy = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(destructor)
        self._keep_function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._keep)
        self._deques: list[Any] = []
        self._lock = threading.RLock()
        self._depth = 0
        self._before: int | None = None

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self._before = self.entry.value
            self.entry.value = ctypes.cast(self._keep_function, ctypes.c_void_p).value

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.entry.value = self._before
            deques, self._deques = self._deques, []
            for deque in deques:
                self._destroy(ctypes.addressof(deque))
        self._lock.release()

    def _keep(self, deque: int) -> None:
        """Keep a copy of a deque, whose owner frees it next. The copy is valid: it has no pointers into itself."""
        self._deques.append((ctypes.c_uint64 * DEQUE_WORDS).from_buffer_copy(ctypes.string_at(deque, 8 * DEQUE_WORDS)))


def safe_stop() -> SafeStop | None:
    """Return a context manager in which to stop sessions; None if the library differs from the known ones.

    TensorFlow must have been imported.
    """
    import tensorflow as tf

    if sys.platform != "linux" or platform.machine() != "x86_64" or not tf.__version__.startswith(KNOWN_VERSIONS):
        return None
    try:
        # RTLD_NOLOAD: only if it is already loaded.
        library = ctypes.CDLL(str(Path(tf.__file__).with_name(LIBRARY)), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        destructor = ctypes.cast(getattr(library, DESTRUCTOR), ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return None
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    entry = _entry(library, destructor)
    if not entry or entry % 8 or "w" not in _permissions(maps, entry):
        return None
    # The loader sets the function's address on the first call; until then the entry points to the PLT's own code.
    if "x" not in _permissions(maps, ctypes.c_uint64.from_address(entry).value):
        return None
    try:
        return SafeStop(entry, destructor)
    except (OSError, MemoryError):  # a system that allows no code generated at run time
        return None


def _permissions(maps: Sequence[str], address: int) -> str:
    """Return the permissions of the region of this process's memory that contains an address."""
    for line in maps:
        ends, permissions, _ = line.split(maxsplit=2)
        start, _, end = ends.partition("-")
        if int(start, 16) <= address < int(end, 16):
            return permissions
    return ""


class _Linked(ctypes.Structure):
    """`link_map`: the address at which the loader has loaded a library, and its dynamic section."""

    _fields_ = (("l_addr", ctypes.c_size_t), ("l_name", ctypes.c_char_p), ("l_ld", ctypes.c_size_t))


class _Found(ctypes.Structure):
    """`Dl_info`: the loader's information on an address."""

    _fields_ = (
        ("dli_fname", ctypes.c_char_p), ("dli_fbase", ctypes.c_size_t), ("dli_sname", ctypes.c_char_p),
        ("dli_saddr", ctypes.c_size_t),
    )  # fmt: skip


def _entry(library: ctypes.CDLL, function: int) -> int:
    """Return the address of the entry through which a library calls a function of its own; 0 if there is not one.

    Source: "System V Application Binary Interface", chapter 5, "Dynamic Linking", and its supplement for AMD64.
    """
    import numpy as np

    loader, pointer = ctypes.CDLL(None), ctypes.POINTER(_Linked)()
    found, symbol = _Found(), ctypes.c_size_t()
    failed = loader.dlinfo(ctypes.c_void_p(library._handle), RTLD_DI_LINKMAP, ctypes.byref(pointer))
    known = loader.dladdr1(ctypes.c_void_p(function), ctypes.byref(found), ctypes.byref(symbol), RTLD_DL_SYMENT)
    if failed or not known or not symbol.value or found.dli_fbase != pointer.contents.l_addr:
        return 0
    linked, dynamic = pointer.contents, dict[int, int]()
    at = linked.l_ld
    while (pair := DYNAMIC.unpack(ctypes.string_at(at, DYNAMIC.size)))[0] != DT_NULL:
        dynamic.setdefault(*pair)
        at += DYNAMIC.size
    if not {DT_PLTRELSZ, DT_SYMTAB, DT_JMPREL} <= dynamic.keys():
        return 0
    number = (symbol.value - dynamic[DT_SYMTAB]) // SYMBOL_BYTES
    # Of each relocation: offset, number of the symbol and type, 0.
    table = np.ctypeslib.as_array((ctypes.c_uint64 * (dynamic[DT_PLTRELSZ] // 8)).from_address(dynamic[DT_JMPREL]))
    offsets = table[0::3][table[1::3] == ((number << 32) | JUMP_SLOT)]
    return linked.l_addr + int(offsets[0]) if len(offsets) == 1 else 0
