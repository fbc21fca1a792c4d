"""Makes TensorFlow's servers in a rank listen in the private network, and for this machine only."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import warnings
from collections.abc import Callable
from typing import Any, Final

from labkit.errors.exceptions import LabError
from labkit.worker.network_namespace import PrivateNetwork
from labkit.worker.runtimes.base import Released
from labkit.worker.runtimes.tensorflow.blocked import starting_servers
from labkit.worker.runtimes.tensorflow.tensorflow_internals import CLUSTER, DATA_SERVICE

LOOPBACK: Final = "lo"
NO_DATA_SERVICE: Final = (
    "tf.data's service does not run in ranks: shard the dataset instead, with dataset.shard(...) or "
    "strategy.distribute_datasets_from_function(...)"
)


def apply(
    network: PrivateNetwork,  # in which they listen
    options: Any,  # the ConfigProto for servers that are given none
    wait_for_release: Callable[[], None],  # until no other rank needs this rank's servers; instead of an endless `join`
    check: Callable[[tuple[Any, ...]], None],  # called with the arguments that make this rank a part of a cluster
    *,
    one_machine: bool,  # whether all ranks are on this machine, so that the servers need not listen for others
) -> list[str]:
    """Patch TensorFlow's servers in this process. Call it once, before the student's code runs.

    Returns a sentence if some of the servers are as TensorFlow starts them.
    """

    def start_and_bind(start: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Bind the servers to loopback after their start: they listen on all interfaces."""
        try:
            return network.call(start, *args, **kwargs)
        finally:  # also if another rank is missing: the port is open nevertheless
            if one_machine:
                _listen_within_this_machine()

    def start_and_wait(start: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        check(args)
        with starting_servers():
            return start_and_bind(start, *args, **kwargs)

    made: dict[str, Any] = {}

    def get_server(new: Callable[[bytes], Any], definition: bytes) -> Any:
        """Return an existing server for its address instead of a second one, which would take some of its connections.

        A worker or parameter server has one before the student's code creates it, as TensorFlow's tutorial does.
        """
        import tensorflow as tf

        server = tf.train.ServerDef.FromString(definition)
        if not server.HasField("default_session_config"):
            server.default_session_config.CopyFrom(options)
        addresses = {(job.name, task): address for job in server.cluster.job for task, address in job.tasks.items()}
        address = addresses.get((server.job_name, server.task_index), "")
        if address in made:
            return made[address]
        one = start_and_bind(new, server.SerializeToString())
        if address and not address.endswith(":0"):  # port 0 is any free port
            made[address] = one
        return one

    def join_and_end(join: Callable[[Any], None], server: Any) -> None:
        """A rank that serves ends when the ranks that it serves have returned."""
        if threading.current_thread() is not threading.main_thread():
            return join(server)
        wait_for_release()
        raise Released

    def refuse(*_: Any, **__: Any) -> None:
        raise LabError(NO_DATA_SERVICE)

    starts = [name for name in CLUSTER.paths if name.startswith("TFE_")]
    CLUSTER.apply(
        **dict.fromkeys(starts, start_and_wait), TF_NewServer=get_server, TF_ServerStart=start_and_bind, join=join_and_end
    )
    DATA_SERVICE.apply(**dict.fromkeys(DATA_SERVICE.paths, refuse))
    if CLUSTER.found or not one_machine:
        return []
    return [f"other machines may reach TensorFlow's servers: this version lacks what labkit needs for {CLUSTER.lost}"]


def _listen_within_this_machine() -> None:
    """Bind all listening sockets of this process to the loopback interface."""
    if not hasattr(socket, "SO_BINDTODEVICE"):  # macOS
        return
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), duplicate(fd) as one:  # most are no sockets, or already closed
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                _bind_to_loopback(one)


def duplicate(fd: int) -> socket.socket:
    """Return a socket object for a duplicate of a file descriptor; an `OSError` if that is not an open socket."""
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
