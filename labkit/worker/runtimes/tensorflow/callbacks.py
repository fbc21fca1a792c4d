"""Workaround for files that Keras writes under MultiWorkerMirroredStrategy: all workers may write to the same path.

Keras 3.15.1 opens the given path on every worker, so that `ModelCheckpoint` and `BackupAndRestore` fail with
BlockingIOError or FileExistsError, or leave a corrupt file. Keras 2 avoided that. Here each worker writes its own
temporary file, which then replaces the target. All workers have the same model, so it does not matter which one is
last. Remove the workaround when Keras handles this itself; it changes nothing for workers that are given different
paths.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Callable
from typing import Any, Final

__all__ = ["apply"]

WRITES: Final = ("save", "save_weights")  # methods of keras.Model
BEGIN, SAVE, END = "_load_model", "_save_model", "on_train_end"  # of BackupAndRestore
WRITES_ONE_PATH: Final = (
    "Keras writes the files of all workers to one path only because labkit patches it; elsewhere, give each worker its own path."
)
SAVE_ATTEMPTS: Final = 10  # each of the other workers removes the folder once per training


def apply(say: Callable[[str], None]) -> bool:
    """Patch Keras in this process; return False, and change nothing, if its code differs from the known versions.

    Args:
        say: called with a note where the workaround takes effect.
    """
    import keras

    backup = keras.callbacks.BackupAndRestore
    known = [(keras.Model, name) for name in WRITES] + [(backup, name) for name in (BEGIN, SAVE, END)]
    if not all(hasattr(owner, name) for owner, name in known):
        return False
    for name in WRITES:
        setattr(keras.Model, name, _written_whole(getattr(keras.Model, name), say))
    _share_backups(backup)
    return True


def _task(model: Any) -> int | None:
    """Return the number of this worker; None if it does not train together with others."""
    import tensorflow as tf

    strategy = getattr(model, "distribute_strategy", None)
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) and strategy.extended._in_multi_worker_mode():
        return int(strategy.cluster_resolver.task_id)
    return None


def _written_whole(write: Any, say: Callable[[str], None]) -> Any:
    @functools.wraps(write)
    def write_whole(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        path = os.fspath(filepath) if isinstance(filepath, (str, os.PathLike)) else ""
        task = None if args or kwargs.keys() - {"overwrite"} or "://" in path else _task(self)
        folder, name = os.path.split(path)
        if not name or task is None or not kwargs.get("overwrite", True) or os.path.isdir(path):
            return write(self, filepath, *args, **kwargs)
        say(WRITES_ONE_PATH)
        own = os.path.join(folder, f".worker{task}-{name}")
        try:
            write(self, own, overwrite=True)
            os.replace(own, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.remove(own)
        return None

    return write_whole


def _share_backups(callback: Any) -> None:
    """Let all workers write, read and remove one backup; they do not finish the training at exactly the same time."""
    begin, save, end = (getattr(callback, name) for name in (BEGIN, SAVE, END))
    over: set[str] = set()  # backups of finished trainings, which another worker may not have removed yet

    @functools.wraps(begin)
    def load_model(self: Any) -> None:
        if os.path.abspath(self.backup_dir) not in over:
            begin(self)

    @functools.wraps(save)
    def save_model(self: Any) -> None:
        if _task(self.model) is None:
            save(self)
            return
        over.discard(os.path.abspath(self.backup_dir))
        for attempt in range(1, SAVE_ATTEMPTS + 1):
            os.makedirs(self.backup_dir, exist_ok=True)
            try:
                save(self)
            except (FileNotFoundError, FileExistsError):
                # Another worker has finished the training and is removing the folder, file by file.
                # This worker removes what it saves here when it finishes.
                if attempt == SAVE_ATTEMPTS:
                    raise
            else:
                return

    @functools.wraps(end)
    def on_train_end(self: Any, logs: Any = None) -> None:
        if _task(self.model) is None:
            end(self, logs)
        elif self.delete_checkpoint:
            over.add(os.path.abspath(self.backup_dir))
            shutil.rmtree(self.backup_dir, ignore_errors=True)

    setattr(callback, BEGIN, load_model)
    setattr(callback, SAVE, save_model)
    setattr(callback, END, on_train_end)
