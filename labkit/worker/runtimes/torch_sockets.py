"""Makes torch's store, gloo and TensorPipe open their sockets in the ranks' private network, whichever code calls them.

The student's code may create process groups, stores and RPC at any time, so the C++ functions behind them are replaced.
The threads that serve RPC are started before TensorPipe's and stay in the machine's network, as the student's threads
do. NCCL is not changed: whichever thread communicates first opens its sockets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch._C import _distributed_c10d as c10d

from labkit.worker.network_namespace import Network

__all__ = ["open_in"]

HERE: Final = ("127.0.0.1", "localhost", "::1")  # addresses that also exist in the private network


def open_in(network: Network) -> None:
    """Open torch's sockets in a network from now on, in this process.

    Args:
        network: the ranks' private network.
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
            if hasattr(kind, name):  # some versions and builds of torch lack some
                _replace(kind, name, lambda function: _in(network, function))


def _replace(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    replacement: Any = wrap(getattr(owner, name))
    setattr(owner, name, staticmethod(replacement) if name.startswith("create_") else replacement)


def _in(network: Network, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return network.call(function, *args, **kwargs)

    return call


def _store_in(network: Network, init: Callable[..., None]) -> Callable[..., None]:
    """Wrap a store's constructor: a store on another machine is reached through the machine's network."""
    machine = Network()

    def call(self: Any, host_name: str, *args: Any, **kwargs: Any) -> None:
        (network if host_name in HERE else machine).call(init, self, host_name, *args, **kwargs)

    return call
