"""Workaround for files that Keras writes under MultiWorkerMirroredStrategy: all workers may write to the same path.

Each worker writes its own temporary file, which then replaces the target. All workers have the same model, so it does
not matter which one is last. Nothing changes for workers that are given different paths.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from labkit.worker.runtimes.tensorflow.tensorflow_internals import FILES

WRITES_ONE_PATH: Final = (
    "Keras writes the files of all workers to one path only because labkit patches it; elsewhere, give each worker its own path."
)
SAVE_ATTEMPTS: Final = 10  # each of the other workers removes the folder once per training


def apply(say: Callable[[str], None]) -> None:
    """Patch Keras in this process."""
    write, shared = partial(_write_whole, say), SharedBackups()
    FILES.apply(save=write, save_weights=write, _load_model=shared.load, _save_model=shared.save, on_train_end=shared.end)


def has_other_workers(strategy: Any) -> bool:
    """Whether a strategy is a MultiWorkerMirroredStrategy of more than one worker."""
    import tensorflow as tf

    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return False
    return bool(strategy.num_replicas_in_sync > len(strategy.extended.worker_devices))


def _task(model: Any) -> int | None:
    """Return the number of this worker; None if it does not train together with others."""
    strategy: Any = getattr(model, "distribute_strategy", None)
    return int(strategy.cluster_resolver.task_id) if has_other_workers(strategy) else None


def _write_whole(say: Callable[[str], None], write: Any, model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
    path = os.fspath(filepath) if isinstance(filepath, (str, os.PathLike)) else ""
    task = None if args or kwargs.keys() - {"overwrite"} or "://" in path else _task(model)
    folder, name = os.path.split(path)
    if not name or task is None or not kwargs.get("overwrite", True) or os.path.isdir(path):
        return write(model, filepath, *args, **kwargs)
    say(WRITES_ONE_PATH)
    own = os.path.join(folder, f".worker{task}-{name}")
    try:
        write(model, own, overwrite=True)
        os.replace(own, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(own)
    return None


class SharedBackups:
    """Lets all workers write, read and remove one backup; they do not finish the training at exactly the same time.

    Its methods replace those of BackupAndRestore.
    """

    def __init__(self) -> None:
        self._over: set[str] = set()  # backups of finished trainings, which another worker may not have removed yet

    def load(self, load_model: Callable[..., None], callback: Any) -> None:
        """Load a backup when training begins, unless it belongs to a training that is over."""
        if os.path.abspath(callback.backup_dir) not in self._over:
            load_model(callback)

    def save(self, save_model: Callable[..., None], callback: Any) -> None:
        """Save a backup, again if another worker removes the folder meanwhile."""
        if _task(callback.model) is None:
            save_model(callback)
            return
        self._over.discard(os.path.abspath(callback.backup_dir))
        for attempt in range(1, SAVE_ATTEMPTS + 1):
            os.makedirs(callback.backup_dir, exist_ok=True)
            try:
                save_model(callback)
            except (FileNotFoundError, FileExistsError):
                # Another worker has finished the training and is removing the folder, file by file.
                # This worker removes what it saves here when it finishes.
                if attempt == SAVE_ATTEMPTS:
                    raise
            else:
                return

    def end(self, on_train_end: Callable[..., None], callback: Any, logs: Any = None) -> None:
        """Remove the backup when training ends."""
        if _task(callback.model) is None:
            on_train_end(callback, logs)
        elif callback.delete_checkpoint:
            self._over.add(os.path.abspath(callback.backup_dir))
            shutil.rmtree(callback.backup_dir, ignore_errors=True)
