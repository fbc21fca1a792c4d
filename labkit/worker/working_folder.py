"""The working folder of a rank: the notebook's, or a temporary one on a machine that does not have that."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from labkit.ipc.place import Place

PREFIX: Final = "labkit-rank-"


class WorkingFolder:
    """Has a rank follow the notebook into its working folders.

    Args:
        place: where the rank is. On the notebook's machine it has no folder of its own.
    """

    def __init__(self, place: Place) -> None:
        self._place, self._own = place, ""

    def enter(self, folder: str) -> list[str]:
        """Enter the notebook's working folder, or the rank's own one if its machine does not have that.

        Returns:
            remarks for the student, the same on all ranks of a machine.

        Raises:
            OSError: the rank is on the notebook's machine, and cannot enter the folder.
        """
        try:
            os.chdir(folder)
        except OSError as error:
            if not self._place.elsewhere:
                raise
            why = "has no folder" if isinstance(error, FileNotFoundError) else "does not let ranks into the folder"
        else:
            return []
        if not self._own:
            _remove_leftovers()
            self._own = _new_folder()
        os.chdir(self._own)
        instead = "each rank there works in a temporary folder of its own; files of the notebook are not there."
        return [f"{self._place.machine} {why} {folder}: {instead}"]

    def remove(self) -> None:
        """Remove the rank's own folder, if it has one, with all files in it."""
        if self._own:
            shutil.rmtree(self._own, ignore_errors=True)


def _new_folder() -> str:
    """Create a folder that is locked until this process has ended, and those that it has forked.

    Another rank may take a folder for a leftover until it is locked; then this one creates another.
    """
    while True:
        folder = tempfile.mkdtemp(prefix=PREFIX)
        locked = _lock(folder)
        if locked >= 0 and os.path.isdir(folder):
            return folder


def _remove_leftovers() -> None:
    """Remove the folders of ranks that were killed, which nobody has locked."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        locked = _lock(folder)
        if locked >= 0:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(locked)


def _lock(folder: str | Path) -> int:
    """Lock a folder of this user, until the returned file descriptor is closed; return -1 if another process has."""
    try:
        fd = os.open(folder, os.O_RDONLY)
    except OSError:  # another user's, or removed
        return -1
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return -1
    return fd
