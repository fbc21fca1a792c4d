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
libraries are those of TensorFlow's own package; the code of the vector's growth calls the destructor through an entry
that the library's relocation table names; the entry is writable and has the value that the loader sets. Otherwise
labkit does not profile at all.

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
LIBRARIES: Final = ("libtensorflow_framework.so.2", "libtensorflow_cc.so.2")  # the entry is in the first, the destructor in both
DESTRUCTOR: Final = "_ZNSt5dequeIN3tsl8profiler15TraceMeRecorder5EventESaIS3_EED2Ev"
GROWTH: Final = (
    "_ZNSt6vectorIN3tsl8profiler15TraceMeRecorder12ThreadEventsESaIS3_EE17_M_realloc_insertIJS3_EEEv"
    "N9__gnu_cxx17__normal_iteratorIPS3_S5_EEDpOT_"
)
DEQUE_WORDS: Final = 10  # libstdc++'s std::deque: address and size of its map, and two iterators of four addresses
DYNAMIC: Final = struct.Struct("<QQ")  # a tag and its value
DT_NULL, DT_PLTRELSZ, DT_STRTAB, DT_SYMTAB, DT_STRSZ, DT_JMPREL = 0, 2, 5, 6, 10, 23
RELOCATION: Final = struct.Struct("<QIIq")  # of an entry: offset, type, symbol, 0
JUMP_SLOT: Final = 7  # R_X86_64_JUMP_SLOT
CALL: Final = 0xE8  # x86-64: call with an offset of four bytes
JUMP: Final = struct.Struct("<2sicI")  # x86-64: indirect jmp relative to rip; push of the relocation's number
JUMP_THROUGH: Final = b"\xff\x25"
JUMP_BYTES: Final = 6
PUSH: Final = b"\x68"
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
        # RTLD_NOLOAD: only if they are already loaded.
        ours, other = (
            ctypes.CDLL(str(Path(tf.__file__).with_name(name)), mode=os.RTLD_NOLOAD | os.RTLD_LAZY) for name in LIBRARIES
        )
        growth = _address(getattr(ours, GROWTH))
        destructors = [_address(getattr(library, DESTRUCTOR)) for library in (ours, other)]
        code = _code(growth, GROWTH)
    except (OSError, AttributeError):
        return None
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    jump, entry = _jump_called(_linked(ours), _region(maps, growth), growth, code)
    if not entry or entry % 8 or "w" not in _region(maps, entry)[2]:
        return None
    # The loader sets the function's address on the first call; until then the entry points to the jump's second half.
    if ctypes.c_uint64.from_address(entry).value not in (jump + JUMP_BYTES, *destructors):
        return None
    try:
        return SafeStop(entry, destructors[0])
    except (OSError, MemoryError):  # a system that allows no code generated at run time
        return None


class _Linked(ctypes.Structure):
    """`link_map`: the address at which the loader has loaded a library."""

    _fields_ = (("l_addr", ctypes.c_size_t), ("l_name", ctypes.c_char_p), ("l_ld", ctypes.c_size_t))


class _Found(ctypes.Structure):
    """`Dl_info`: the loader's information on an address."""

    _fields_ = (
        ("dli_fname", ctypes.c_char_p), ("dli_fbase", ctypes.c_size_t), ("dli_sname", ctypes.c_char_p),
        ("dli_saddr", ctypes.c_size_t),
    )  # fmt: skip


class _Symbol(ctypes.Structure):
    """`Elf64_Sym`."""

    _fields_ = (
        ("st_name", ctypes.c_uint32), ("st_info", ctypes.c_uint8), ("st_other", ctypes.c_uint8), ("st_shndx", ctypes.c_uint16),
        ("st_value", ctypes.c_uint64), ("st_size", ctypes.c_uint64),
    )  # fmt: skip


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _code(address: int, name: str) -> bytes:
    """Return the machine code of a function; an `OSError` if the loader knows none of this name at this address."""
    found, symbol = _Found(), ctypes.POINTER(_Symbol)()
    look = ctypes.CDLL(None).dladdr1
    known = look(ctypes.c_void_p(address), ctypes.byref(found), ctypes.byref(symbol), RTLD_DL_SYMENT)
    if not known or _address(symbol) == 0 or found.dli_sname != name.encode() or found.dli_saddr != address:
        raise OSError(f"no {name} at {address:#x}")
    return ctypes.string_at(address, symbol.contents.st_size)


def _linked(library: ctypes.CDLL) -> _Linked:
    linked = ctypes.POINTER(_Linked)()
    failed = ctypes.CDLL(None).dlinfo(ctypes.c_void_p(library._handle), RTLD_DI_LINKMAP, ctypes.byref(linked))
    return _Linked() if failed else linked.contents


def _region(maps: Sequence[str], address: int) -> tuple[int, int, str]:
    """Return start, end and permissions of the region of this process's memory that contains an address."""
    for line in maps:
        ends, permissions, _ = line.split(maxsplit=2)
        start, _, end = ends.partition("-")
        if int(start, 16) <= address < int(end, 16):
            return int(start, 16), int(end, 16), permissions
    return 0, 0, ""


def _jump_called(linked: _Linked, text: tuple[int, int, str], growth: int, code: bytes) -> tuple[int, int]:
    """Find where the code of the vector's growth calls the destructor: the jump, and the entry through which it jumps.

    Zeros if there is no such call.

    Source: "System V Application Binary Interface", chapter 5, "Dynamic Linking", and its supplement for AMD64.
    """
    start, end, permissions = text
    if not linked.l_ld or "x" not in permissions:
        return 0, 0
    dynamic: dict[int, int] = {}
    at = linked.l_ld
    while (pair := DYNAMIC.unpack(ctypes.string_at(at, DYNAMIC.size)))[0] != DT_NULL:
        dynamic.setdefault(*pair)
        at += DYNAMIC.size
    if not {DT_PLTRELSZ, DT_STRTAB, DT_SYMTAB, DT_STRSZ, DT_JMPREL} <= dynamic.keys():
        return 0, 0
    for offset in range(len(code) - 4):
        if code[offset] != CALL:
            continue
        jump = growth + offset + 5 + int(struct.unpack_from("<i", code, offset + 1)[0])
        if not start <= jump <= end - JUMP.size:  # not a call
            continue
        through, distance, push, number = JUMP.unpack(ctypes.string_at(jump, JUMP.size))
        if (through, push) != (JUMP_THROUGH, PUSH) or not 0 <= number < dynamic[DT_PLTRELSZ] // RELOCATION.size:
            continue
        where, kind, symbol, _ = RELOCATION.unpack(
            ctypes.string_at(dynamic[DT_JMPREL] + number * RELOCATION.size, RELOCATION.size)
        )
        entry = jump + JUMP_BYTES + distance
        if kind != JUMP_SLOT or linked.l_addr + where != entry:
            continue
        name = _Symbol.from_address(dynamic[DT_SYMTAB] + symbol * ctypes.sizeof(_Symbol)).st_name
        if name < dynamic[DT_STRSZ] and ctypes.string_at(dynamic[DT_STRTAB] + name) == DESTRUCTOR.encode():
            return jump, entry
    return 0, 0
