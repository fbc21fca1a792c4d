"""Patches to TensorFlow in ranks: AutoGraph's temporary files, iterators that are slow to delete, long log messages.

The patched modules are internals of TensorFlow. If one differs from the known versions, it is not changed.
"""

from __future__ import annotations

import itertools
import linecache
import logging
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
    _shorten_log(logging.getLogger("tensorflow"))


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


def _shorten_log(log: logging.Logger) -> None:
    """Cut messages about failed operations to one line, and show each message once.

    A coordinator that has lost a parameter server logs the same error some ten times, with 15 lines each, before its
    program gets that error with all details. And connecting to a cluster gives the root logger a handler, which prints
    all messages of TensorFlow's again (TensorFlow 2.21, absl 2.5).
    """
    from tensorflow.errors import OpError

    shown: set[str] = set()

    def shorten(record: logging.LogRecord) -> bool:
        if not any(isinstance(value, OpError) for value in record.args or ()):
            return True
        line = record.getMessage().partition("\n")[0].rstrip(":")
        record.msg, record.args = line, ()
        new = line not in shown
        shown.add(line)
        return new

    def alone(_: logging.LogRecord) -> bool:
        return not (log.propagate and any(type(handler) is logging.StreamHandler for handler in logging.getLogger().handlers))

    log.addFilter(shorten)
    for handler in log.handlers:
        handler.addFilter(alone)
