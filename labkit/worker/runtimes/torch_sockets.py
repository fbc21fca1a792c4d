"""Makes torch's store, gloo and TensorPipe open their sockets in the ranks' private network, whichever code calls them.

The student's code may create process groups, stores and RPC at any time, so the C++ functions behind them are replaced.
The threads that serve RPC are started before TensorPipe's and stay in the machine's network, as the student's threads
do. NCCL is not changed: whichever thread communicates first opens its sockets.

A store on this machine may also be served outside, by the notebook or a program that it has started. A rank connects to
it there if the same user serves it: another user could otherwise pretend to be the rank that serves it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from labkit.recording.torch_internals import RPC_SOCKETS
from labkit.worker.network_namespace import PrivateNetwork

HERE: Final = ("127.0.0.1", "localhost", "::1")  # addresses that also exist in the private network
MACHINE: Final = PrivateNetwork()
STANDARD: Final = timedelta(seconds=300)  # torch's default time limit for a connection
POLL_EVERY_S: Final = 0.02
LISTENING: Final = "0A"  # the state of a socket in /proc


def open_in(network: PrivateNetwork, own_port: Callable[[], int]) -> None:
    """Open torch's sockets in the ranks' private network from now on, in this process.

    `own_port` returns the port of the group's store, which need not be looked for: that takes 3 ms of each start.
    """
    from torch.distributed import rpc

    stores: Any = dist.Store
    init, clone = dist.TCPStore.__init__, stores.clone

    def server_of(host: str, port: int, limit: timedelta) -> PrivateNetwork:
        return network if host in HERE and port == own_port() else _server_of(network, host, port, limit)

    def make_store(self: Any, host_name: str, *args: Any, **kwargs: Any) -> None:
        """Make a store; one that is served outside is reached through the machine's network."""
        given = dict(zip(("port", "world_size", "is_master", "timeout"), args, strict=False)) | kwargs
        own = given.get("is_master") or "port" not in given  # torch rejects a call without a port
        where = network if own else server_of(host_name, given["port"], given.get("timeout", STANDARD))
        where.call(init, self, host_name, *args, **kwargs)

    def clone_store(store: Any) -> Any:
        inner = store
        while isinstance(inner, dist.PrefixStore):
            inner = inner.underlying_store
        tcp = isinstance(inner, dist.TCPStore)
        return (server_of(inner.host, inner.port, inner.timeout) if tcp else network).call(clone, store)

    def within(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: network.call(function, *args, **kwargs)

    patched: list[tuple[Any, str, Any]] = [(dist.TCPStore, "__init__", make_store), (stores, "clone", clone_store)]
    for name in ("split_group", "merge_remote_group"):
        if hasattr(dist.ProcessGroup, name):  # some versions and builds of torch lack some
            patched.append((dist.ProcessGroup, name, within(getattr(dist.ProcessGroup, name))))
    gloo = getattr(dist, "ProcessGroupGloo", None)
    if gloo is not None:
        patched.append((gloo, "__init__", within(gloo.__init__)))
        makers = [n for n in ("create_device", "create_default_device") if hasattr(gloo, n)]
        patched += [(gloo, n, staticmethod(within(getattr(gloo, n)))) for n in makers]
    for owner, name, replacement in patched:
        setattr(owner, name, replacement)
    if rpc.is_available() and RPC_SOCKETS.found:
        RPC_SOCKETS.replace("_set_and_start_rpc_agent", network.call)


def _server_of(network: PrivateNetwork, host: str, port: int, limit: timedelta) -> PrivateNetwork:
    """Wait for the server of a store, and return the network in which it listens."""
    if host not in HERE:
        return MACHINE
    until_s = time.monotonic() + limit.total_seconds()
    while True:
        for place in (network, MACHINE):
            if place.call(_listens, port):
                return place
        if time.monotonic() > until_s:
            limit_ms = round(limit / timedelta(milliseconds=1))
            raise dist.DistNetworkError(
                f"The client socket has timed out after {limit_ms}ms while trying to connect to ({host}, {port})."
            )
        time.sleep(POLL_EVERY_S)


def _listens(port: int) -> bool:
    """Whether a process of this user listens on a port, in the network of the calling thread.

    Source: proc_pid_net(5), the Linux man-pages.
    """
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for row in Path("/proc/thread-self/net", table).read_text().splitlines()[1:]:
                _, address, _, state, _, _, _, uid, *_ = row.split()
                if state == LISTENING and int(address.rpartition(":")[2], 16) == port and int(uid) == os.geteuid():
                    return True
    return False
