"""/dev/shm, which DataLoader's workers and NCCL fill: its size, its free part, and what dead processes have left in it.

labkit itself does not use it: its shared memory is anonymous.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from labkit.errors.lists import counted
from labkit.errors.units import in_words
from labkit.notebook.doctor_places import Place
from labkit.notebook.findings import Finding

WANTED: Final = 2**30  # bytes; with a container's default of 64 MiB, NCCL and DataLoader fail
# Files of torch ("torch_", process, random number, counter), of NCCL, and semaphores of multiprocessing and others.
_LEFT_BEHIND: Final = re.compile(r"torch_(?P<process>\d+)_.*|nccl-.*|sem\..*")
_SHOWN: Final = 10  # files that a command names; if there are more, it is a pattern


class SharedMemory(NamedTuple):
    """What /dev/shm has.

    Args:
        nbytes: its size.
        free_nbytes: the free part.
        stale: the files that processes have left behind which no longer run, with their sizes.
        others: names of the same kinds, of processes that still run or of other users.
    """

    nbytes: int
    free_nbytes: int
    stale: tuple[tuple[str, int], ...] = ()
    others: tuple[str, ...] = ()


def find_shared_memory(folder: Path = Path("/dev/shm"), proc: Path = Path("/proc")) -> SharedMemory | None:
    """Return what /dev/shm has; None where there is none, as on macOS."""
    if not folder.is_dir():
        return None
    usage = shutil.disk_usage(folder)
    names = [name for name in sorted(os.listdir(folder)) if _LEFT_BEHIND.fullmatch(name)]
    used = _mapped(folder, proc) if names else set()
    stale = []
    for name in names:
        process = _LEFT_BEHIND.fullmatch(name)["process"]  # type: ignore[index]  # all names match
        with contextlib.suppress(OSError):  # deleted meanwhile
            status = (folder / name).stat()
            mine = status.st_uid == os.geteuid()  # what other users' processes map cannot be seen
            if mine and name not in used and not (process and (proc / process).exists()):
                stale.append((name, 512 * status.st_blocks))  # files of failed allocations have a size and no memory
    return SharedMemory(usage.total, usage.free, tuple(stale), tuple(set(names) - {name for name, _ in stale}))


def _mapped(folder: Path, proc: Path) -> set[str]:
    """The names of files in a folder that processes have mapped, as far as this user may know."""
    found: set[str] = set()
    pattern = re.compile(re.escape(f"{folder}/") + r"(\S+)$", re.MULTILINE)
    for maps in proc.glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            found.update(pattern.findall(maps.read_text(errors="replace")))
    return found


def shared_memory(memory: SharedMemory | None, place: Place) -> Iterator[Finding]:
    """Report the size and the free part, and the command that deletes what dead processes have left."""
    if memory is None:
        return
    found = f"{in_words(memory.nbytes, 'iB')} in /dev/shm"
    free = f"{in_words(memory.free_nbytes, 'iB')} of it free"
    enough = "DataLoader's workers and NCCL may need more"
    if memory.nbytes < WANTED:
        yield Finding(f"only {found}, {free}; {enough}", ok=False, remedy=place.shared_memory)
    elif memory.free_nbytes < WANTED:
        yield Finding(f"{found}, only {free}; {enough}", ok=False, remedy="du -a /dev/shm | sort -n | tail")
    else:
        yield Finding(found)
    if memory.stale:
        nbytes = in_words(sum(nbytes for _, nbytes in memory.stale), "iB")
        yield Finding(f"{counted(len(memory.stale), 'file')} of dead processes, {nbytes}", remedy=_delete(memory))


def _delete(memory: SharedMemory) -> str:
    """The command that deletes the stale files, and no others."""
    names = [name for name, _ in memory.stale]
    if len(names) <= _SHOWN:
        return f"rm {' '.join(shlex.quote(f'/dev/shm/{name}') for name in names)}"
    patterns: dict[str, None] = {}
    for name in names:
        prefix = re.match(r"torch_\d+_|nccl-|sem\.", name)[0]  # type: ignore[index]  # all names match
        spared = any(other.startswith(prefix) for other in memory.others)
        patterns[shlex.quote(f"/dev/shm/{name}") if spared else f"/dev/shm/{prefix}*"] = None
    return f"rm {' '.join(patterns)}"
