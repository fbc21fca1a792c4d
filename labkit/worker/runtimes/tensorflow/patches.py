"""Patches to TensorFlow in ranks: AutoGraph's temporary files, iterators that are slow to delete, long log messages."""

from __future__ import annotations

import itertools
import linecache
import logging
import sys
import types
from collections.abc import Callable
from typing import Any

from labkit.worker.runtimes.tensorflow.tensorflow_internals import AUTOGRAPH, DEVICE_DATASETS


def apply() -> None:
    """Patch TensorFlow in this process. Call it once, before the student's code runs."""
    numbers = itertools.count(1)

    def load_source(_: Callable[..., Any], source: str, delete_on_exit: bool) -> Any:  # noqa: ARG001  # TensorFlow's
        """Load a function of AutoGraph's from memory."""
        name = f"__autograph_generated_file{next(numbers)}"
        module = types.ModuleType(name)
        module.__file__ = filename = f"{name}.py"
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)  # for tracebacks
        exec(compile(source, filename, "exec", dont_inherit=True), module.__dict__)
        sys.modules[name] = module
        return module, filename

    def create_device_dataset(create: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make, without autotuning, a small dataset through which a distributed dataset passes batches to a device."""
        import tensorflow as tf

        options = tf.data.Options()
        options.autotune.enabled = False
        return create(*args, **kwargs).with_options(options)

    AUTOGRAPH.apply(load_source=load_source)
    DEVICE_DATASETS.apply(_create_device_dataset=create_device_dataset)
    _shorten_log(logging.getLogger("tensorflow"))


def _shorten_log(log: logging.Logger) -> None:
    """Cut messages about failed operations to one line, and show each message once: `LOG`."""
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
