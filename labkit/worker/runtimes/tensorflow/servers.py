"""Makes TensorFlow's servers in a rank listen in the private network, and for this machine only.

The functions that start a server are replaced, in modules that are internals of TensorFlow. Missing ones are skipped.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import stat
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Final

from labkit.worker.network_namespace import Network
from labkit.worker.runtimes.base import Released
from labkit.worker.runtimes.tensorflow.blocked import reads_from_a_service, starting_servers

__all__ = ["apply", "duplicate"]

# Functions that start a server, in TensorFlow's modules of C++ functions.
STARTS_EAGER: Final = (
    "TFE_EnableCollectiveOps", "TFE_ContextSetServerDefWithTimeoutAndRetries", "TFE_ContextSetServerDef",
    "TFE_ContextUpdateServerDef",
)  # fmt: skip
LOOPBACK: Final = "lo"
STARTS_ALONE: Final = ("TF_NewServer", "TF_ServerStart")
PROFILER_SERVERS: Final = ("start_server",)
# Functions that a client of tf.data's service calls first, in TensorFlow's modules of C++ functions.
DATA_CLIENTS: Final = ("TF_DATA_GetDataServiceMetadataByID", "TF_DATA_DataServiceConfig")
DATA_OPERATIONS: Final = ("register_dataset", "register_dataset_v2", "data_service_dataset_v4")
DATA_SERVERS: Final = ("DispatchGrpcDataServer", "WorkerGrpcDataServer")  # classes with a method `start`


def apply(network: Network, options: Any, wait_for_release: Callable[[], None]) -> None:
    """Patch TensorFlow's servers in this process. Call it once, before the student's code runs.

    Args:
        network: the network in which they listen.
        options: the ConfigProto for servers that are given none.
        wait_for_release: waits until no other rank needs this rank's servers; it replaces `join`, which never returns.
    """
    from tensorflow.python import pywrap_tfe
    from tensorflow.python.client import pywrap_tf_session
    from tensorflow.python.data.experimental.service import _pywrap_server_lib
    from tensorflow.python.data.experimental.service import server_lib as data_server_lib
    from tensorflow.python.ops import gen_experimental_dataset_ops
    from tensorflow.python.profiler.internal import _pywrap_profiler
    from tensorflow.python.training import server_lib

    of_data = [(getattr(_pywrap_server_lib, name, None), ("start",)) for name in DATA_SERVERS]
    starts = ((pywrap_tfe, STARTS_EAGER), (pywrap_tf_session, STARTS_ALONE), (_pywrap_profiler, PROFILER_SERVERS), *of_data)
    _replace(starts, lambda start: _then_within_this_machine(start, network))
    _replace([(pywrap_tfe, STARTS_EAGER)], _waiting_for_the_others)
    _replace([(pywrap_tf_session, ["TF_NewServer"])], lambda new: _one_for_each_address(new, options))
    _replace(
        [(server_lib.Server, ["join"]), (data_server_lib.DispatchServer, ["join"]), (data_server_lib.WorkerServer, ["join"])],
        lambda join: _until_released(join, wait_for_release),
    )
    clients = ((_pywrap_server_lib, DATA_CLIENTS), (gen_experimental_dataset_ops, DATA_OPERATIONS))
    _replace(clients, lambda call: _after(reads_from_a_service, call))
    if network.private and hasattr(_pywrap_server_lib, "TF_DATA_NewDispatchServer"):
        enter = _connections_within(_pywrap_server_lib)
        _replace(clients, lambda call: _after(enter, call))


def _replace(where: Iterable[tuple[Any, Iterable[str]]], by: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the functions with these names in modules and classes."""
    for owner, names in where:
        for name in names:
            if hasattr(owner, name):
                setattr(owner, name, by(getattr(owner, name)))


def _waiting_for_the_others(start: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(start)
    def start_and_wait(*args: Any, **kwargs: Any) -> Any:
        with starting_servers():
            return start(*args, **kwargs)

    return start_and_wait


def _one_for_each_address(new: Callable[[bytes], Any], options: Any) -> Callable[[bytes], Any]:
    """Return an existing server for its address instead of a second one, which would take some of its connections.

    A worker or parameter server has one before the student's code creates it, as TensorFlow's tutorial does.
    """
    from tensorflow.core.protobuf import tensorflow_server_pb2

    made: dict[str, Any] = {}

    @functools.wraps(new)
    def get(definition: bytes) -> Any:
        server = tensorflow_server_pb2.ServerDef.FromString(definition)
        if not server.HasField("default_session_config"):
            server.default_session_config.CopyFrom(options)
        addresses = {(job.name, task): address for job in server.cluster.job for task, address in job.tasks.items()}
        address = addresses.get((server.job_name, server.task_index), "")
        if address in made:
            return made[address]
        one = new(server.SerializeToString())
        if address and not address.endswith(":0"):  # port 0 is any free port
            made[address] = one
        return one

    return get


def _until_released(join: Callable[..., None], wait_for_release: Callable[[], None]) -> Callable[..., None]:
    """Replace `join`, which never returns: a rank that serves ends when the ranks that it serves have returned."""

    @functools.wraps(join)
    def join_and_end(server: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            return join(server)
        wait_for_release()
        raise Released

    return join_and_end


def _connections_within(of_data: Any) -> Callable[[], None]:
    """Return a function that makes gRPC open this process's connections in the private network from now on.

    gRPC opens them on its own threads, which it starts on first use and ends when it is no longer used. So it is first
    used in the private network, by an idle server of tf.data's that exists as long as the rank.
    """
    from tensorflow.core.protobuf import service_config_pb2

    kept: list[Any] = []

    def enter() -> None:
        if not kept:
            config = service_config_pb2.DispatcherConfig(protocol="grpc")
            kept.append(of_data.TF_DATA_NewDispatchServer(config.SerializeToString()))
            kept[0].start()  # patched like all servers, so it starts in the private network

    return enter


def _after(first: Callable[[], None], call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def call_after(*args: Any, **kwargs: Any) -> Any:
        first()
        return call(*args, **kwargs)

    return call_after


def _then_within_this_machine(start: Callable[..., Any], network: Network) -> Callable[..., Any]:
    """Bind TensorFlow's servers to loopback after their start: they listen on all interfaces."""

    @functools.wraps(start)
    def start_and_bind(*args: Any, **kwargs: Any) -> Any:
        try:
            return network.call(start, *args, **kwargs)
        finally:  # also if another rank is missing: the port is open nevertheless
            _listen_within_this_machine()

    return start_and_bind


def _listen_within_this_machine() -> None:
    """Bind all listening sockets of this process to the loopback interface."""
    if not hasattr(socket, "SO_BINDTODEVICE"):  # macOS
        return
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), duplicate(fd) as one:  # most are no sockets, or already closed
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                _bind_to_loopback(one)


def duplicate(fd: int) -> socket.socket:
    """Return a socket object for a duplicate of a file descriptor.

    Raises:
        OSError: the descriptor is not a socket, or already closed.
    """
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _bind_to_loopback(server: socket.socket) -> None:
    address, port, *_ = server.getsockname()
    bound = server.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0").decode()
    if address not in ("::", "0.0.0.0") or bound == LOOPBACK:  # only root may bind it again
        return
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, f"{LOOPBACK}\0".encode())
    except PermissionError:  # before Linux 5.7 only root may do it
        warnings.warn(f"TensorFlow listens on port {port} of all networks of this machine", stacklevel=1)
