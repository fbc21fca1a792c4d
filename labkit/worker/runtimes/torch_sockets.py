"""Where torch opens sockets: its store, gloo and TensorPipe do it in the ranks' own network, whoever asks them to.

The student's code may make process groups, stores and RPC of its own at any time, so the few functions of C++ behind all of that
are replaced. The threads that serve RPC are started before TensorPipe's, and stay in the network of the machine, as the student's
do. NCCL is left alone: its sockets are opened by whichever thread communicates first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch._C import _distributed_c10d as c10d

from labkit.worker.network_namespace import Network

__all__ = ["open_in"]

HERE: Final = ("127.0.0.1", "localhost", "::1")  # the addresses that the ranks' own network has as well


def open_in(network: Network) -> None:
    """From now on, in this process.

    Args:
        network: the ranks' own.
    """
    from torch.distributed import rpc

    _replace(c10d.TCPStore, "__init__", lambda init: _store_in(network, init))
    kinds: list[tuple[Any, tuple[str, ...]]] = [
        (c10d.Store, ("clone",)),
        (c10d.ProcessGroup, ("split_group", "merge_remote_group")),
        (getattr(c10d, "ProcessGroupGloo", None), ("__init__", "create_device", "create_default_device")),
    ]
    if rpc.is_available():
        kinds.append((rpc.api, ("_set_and_start_rpc_agent",)))
    for kind, names in kinds:
        for name in names:
            if hasattr(kind, name):  # not every version and build of torch has them all
                _replace(kind, name, lambda function: _in(network, function))


def _replace(owner: Any, name: str, made_of: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    replacement: Any = made_of(getattr(owner, name))
    setattr(owner, name, staticmethod(replacement) if name.startswith("create_") else replacement)


def _in(network: Network, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return network.call(function, *args, **kwargs)

    return call


def _store_in(network: Network, init: Callable[..., None]) -> Callable[..., None]:
    """A store at another address than this machine's own is somebody else's."""
    machine = Network()

    def call(self: Any, host_name: str, *args: Any, **kwargs: Any) -> None:
        (network if host_name in HERE else machine).call(init, self, host_name, *args, **kwargs)

    return call
