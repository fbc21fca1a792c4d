"""Patches to TensorFlow in ranks: AutoGraph's temporary files, and iterators that are slow to delete.

The patched modules are internals of TensorFlow. If one differs from the known versions, it is not changed.
"""

from __future__ import annotations

import itertools
import linecache
import sys
import types
from typing import Any

__all__ = ["apply"]


def apply() -> None:
    """Patch TensorFlow in this process. Call it once, before the student's code runs."""
    from tensorflow.python.autograph.pyct import loader
    from tensorflow.python.data.ops import multi_device_iterator_ops

    if hasattr(loader, "load_source"):
        _write_no_files(loader)
    if hasattr(multi_device_iterator_ops, "_create_device_dataset"):
        _end_at_once(multi_device_iterator_ops)


def _write_no_files(loader: Any) -> None:
    """Make AutoGraph load functions from memory: it removes its temporary files at exit, which a rank never reaches."""
    numbers = itertools.count(1)

    def load_source(source: str, delete_on_exit: bool) -> Any:  # noqa: ARG001  # TensorFlow's signature
        name = f"__autograph_generated_file{next(numbers)}"
        module = types.ModuleType(name)
        module.__file__ = filename = f"{name}.py"
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)  # for tracebacks
        exec(compile(source, filename, "exec", dont_inherit=True), module.__dict__)
        sys.modules[name] = module
        return module, filename

    loader.load_source = load_source


def _end_at_once(iterators: Any) -> None:
    """Turn autotuning off for the small datasets through which a distributed dataset passes batches to its devices.

    There is nothing to tune in them, but a thread checks them after 10 ms, 20 ms, 40 ms, ... and is often not woken
    when the iterator is deleted. Deleting it then takes up to as long as the training took (TensorFlow 2.21: 0 to 9 s
    after 24 steps on two busy cores).
    """
    create = iterators._create_device_dataset

    def create_device_dataset(*args: Any, **kwargs: Any) -> Any:
        import tensorflow as tf

        options = tf.data.Options()
        options.autotune.enabled = False
        return create(*args, **kwargs).with_options(options)

    iterators._create_device_dataset = create_device_dataset
