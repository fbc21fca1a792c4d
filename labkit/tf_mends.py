"""Habits of TensorFlow's that suit a program of its own, mended in ranks: files it writes, iterators that end late, open ports.

All are in modules that TensorFlow does not promise to keep. Where one is no longer as known here, it is left alone.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import linecache
import os
import socket
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any, Final

from labkit.private import Network

__all__ = ["apply"]

# What starts a server of TensorFlow's, in its modules of C++ functions.
STARTS_EAGER: Final = (
    "TFE_EnableCollectiveOps", "TFE_ContextSetServerDefWithTimeoutAndRetries", "TFE_ContextSetServerDef",
    "TFE_ContextUpdateServerDef",
)  # fmt: skip
LOOPBACK: Final = "lo"
STARTS_ALONE: Final = ("TF_NewServer", "TF_ServerStart")
DATA_SERVERS: Final = ("DispatchGrpcDataServer", "WorkerGrpcDataServer")  # classes with a method `start`


def apply(network: Network) -> None:
    """Mend what this process's TensorFlow does; once, before anything runs.

    Args:
        network: where its servers listen.
    """
    from tensorflow.python import pywrap_tfe
    from tensorflow.python.autograph.pyct import loader
    from tensorflow.python.client import pywrap_tf_session
    from tensorflow.python.data.experimental.service import _pywrap_server_lib
    from tensorflow.python.data.ops import multi_device_iterator_ops

    if hasattr(loader, "load_source"):
        _write_no_files(loader)
    if hasattr(multi_device_iterator_ops, "_create_device_dataset"):
        _end_at_once(multi_device_iterator_ops)
    of_data = [(getattr(_pywrap_server_lib, name, None), ("start",)) for name in DATA_SERVERS]
    for owner, names in ((pywrap_tfe, STARTS_EAGER), (pywrap_tf_session, STARTS_ALONE), *of_data):
        for name in names:
            if hasattr(owner, name):
                setattr(owner, name, _then_within_this_machine(getattr(owner, name), network))


def _write_no_files(loader: Any) -> None:
    """AutoGraph loads functions from files that it removes at exit, which a rank never reaches: load them from memory."""
    numbers = itertools.count(1)

    def load_source(source: str, delete_on_exit: bool) -> Any:  # noqa: ARG001  # the loader gives both
        name = f"__autograph_generated_file{next(numbers)}"
        module = types.ModuleType(name)
        module.__file__ = filename = f"{name}.py"
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)  # tracebacks read it here
        exec(compile(source, filename, "exec", dont_inherit=True), module.__dict__)
        sys.modules[name] = module
        return module, filename

    loader.load_source = load_source


def _end_at_once(iterators: Any) -> None:
    """A distributed dataset hands batches to each device through a small dataset of its own, in which there is nothing to tune.

    It is tuned all the same, by a thread that looks every 10 ms, 20 ms, 40 ms, ... and is often not woken when the iterator
    goes: deleting it then takes up to as long as the training took (TensorFlow 2.21: 0 to 9 s after 24 steps, on two busy cores).
    """
    create = iterators._create_device_dataset

    def create_device_dataset(*args: Any, **kwargs: Any) -> Any:
        import tensorflow as tf

        options = tf.data.Options()
        options.autotune.enabled = False
        return create(*args, **kwargs).with_options(options)

    iterators._create_device_dataset = create_device_dataset


def _then_within_this_machine(start: Callable[..., Any], network: Network) -> Callable[..., Any]:
    """TensorFlow's servers listen on every interface, whatever address TF_CONFIG gives; bind them to loopback once they do."""

    @functools.wraps(start)
    def start_and_bind(*args: Any, **kwargs: Any) -> Any:
        try:
            return network.call(start, *args, **kwargs)
        finally:  # also where another rank did not come: the port is open by then
            _listen_within_this_machine()

    return start_and_bind


def _listen_within_this_machine() -> None:
    """Let no listening socket of this process hear what comes from another machine."""
    if not hasattr(socket, "SO_BINDTODEVICE"):  # macOS
        return
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as one:  # most are no sockets, or gone by now
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                _bind_to_loopback(one)


def _bind_to_loopback(server: socket.socket) -> None:
    address, port, *_ = server.getsockname()
    bound = server.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0").decode()
    if address not in ("::", "0.0.0.0") or bound == LOOPBACK:  # which only root may bind a second time
        return
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, f"{LOOPBACK}\0".encode())
    except PermissionError:  # Linux before 5.7 lets only root do it
        warnings.warn(f"TensorFlow listens on port {port} of all networks of this machine", stacklevel=1)
