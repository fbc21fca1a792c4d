"""The runtimes by name, and how torch and RPC ranks are set up and torn down. torch is imported late, in the ranks."""

from __future__ import annotations

import glob
import numbers
import os
import socket
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

from labkit.errors.exceptions import LabError, missing
from labkit.errors.lists import counted
from labkit.errors.wrong_calls import public_api
from labkit.recording.record import Recorder
from labkit.worker.network_namespace import INTERFACES, LOOPBACK_INTERFACE
from labkit.worker.runtimes.base import LOOPBACK, MIB, RankConfig, Runtime, quiet_stderr
from labkit.worker.runtimes.tensorflow.runtime import TensorFlow

__all__ = [
    "MIB",
    "RUNTIMES",
    "RankConfig",
    "Runtime",
    "TensorFlow",
    "devices",
    "gpu_count",
    "quiet_stderr",
    "share_of_devices",
]


class Torch(Runtime):
    """`torch.distributed` is initialised: with NCCL if each rank has its own GPU, else with gloo."""

    package = "torch"
    extra = "torch"
    preload = (
        "numpy", "torch", "torch.distributed", "torch._dynamo", "torch.nn.parallel", "torch.optim", "torch.utils.data",
        "torch.distributed.optim", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.tensor.parallel",
        "torch.distributed.pipelining", "torch.distributed.rpc", "torch.distributed.autograd", "torch.distributed.device_mesh",
        "torch.distributed._functional_collectives", "labkit.worker.main_loop", "labkit.comm", "labkit.comm.launch",
        "labkit.comm.rpc_launch", "labkit.comm.rpc_calls", "labkit.worker.runtimes.torch_sockets",
    )  # fmt: skip
    environment: ClassVar[dict[str, str]] = {"OPENBLAS_NUM_THREADS": "1"}  # a fork would break numpy's thread pool
    rank_bytes = 100 * MIB

    def offer(self) -> Any:
        """On rank 0: start a store and return its port."""
        self.network = self.network.unless_asked_outside(os.environ)
        if self.network.private:
            from labkit.worker.runtimes import torch_sockets

            torch_sockets.open_in(self.network)
        if self.rank_config.rank != 0:
            return None
        from torch.distributed import TCPStore

        # By default the store would listen on every interface of the machine; this socket does not.
        listening = self.network.call(socket.create_server, (LOOPBACK, 0), backlog=max(128, self.rank_config.size))
        with quiet_stderr():  # without a name server, torch warns that 127.0.0.1 has no name
            self._store = TCPStore(
                LOOPBACK,
                listening.getsockname()[1],
                self.rank_config.size,
                is_master=True,
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=listening.detach(),
            )
        return self._store.port

    def set_up(self, offers: Sequence[Any]) -> list[str]:
        """Join the process group."""
        import torch.distributed as dist

        device, notes = self._prepare(offers[0])
        store = self._store if self.rank_config.rank == 0 else self._connect()
        own_gpu = device is not None and not notes
        dist.init_process_group(
            "nccl" if own_gpu else "gloo",
            store=dist.PrefixStore("labkit", store),
            rank=self.rank_config.rank,
            world_size=self.rank_config.size,
            **({"device_id": device} if own_gpu else {}),
        )
        return notes

    def adapt_launch(self, recorder: Recorder, record_rpc: Callable[[], None]) -> None:
        """Let a program that sets up torch itself use the group's store and the existing process group."""
        from labkit.comm.launch import Launch

        rank_config = self.rank_config
        rpc = self._rpc_given(), rank_config.starts_rpc
        self._launch = Launch(recorder, rank_config.rank, rank_config.size, record_rpc, self._port, self._connect, *rpc)

    def _rpc_given(self) -> tuple[str, Any] | None:
        """Return the name and the options with which this rank has initialised RPC; None without RPC."""
        return None

    def _connect(self) -> Any:
        """Connect to the group's store."""
        from torch.distributed import TCPStore

        with quiet_stderr():  # as above
            return TCPStore(LOOPBACK, self._port, self.rank_config.size, is_master=False)

    def tear_down(self) -> None:
        """Destroy the process group; without that, the process may abort when it exits."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()

    def _prepare(self, port: int) -> tuple[Any, list[str]]:
        """Set environment variables, threads and device.

        Returns:
            the device, or None without a GPU, and remarks for the student, such as that ranks share GPUs.
        """
        import torch

        self._port = port
        self._torchrun_environment(port)
        for variable in INTERFACES:
            os.environ.setdefault(variable, LOOPBACK_INTERFACE)
        torch.set_num_threads(self.rank_config.threads)
        gpus = torch.cuda.device_count() if self.rank_config.devices != "cpu" else 0
        own = share_of_devices(self.rank_config.rank, self.rank_config.size, gpus)
        os.environ["LABKIT_DEVICES"] = ",".join(own)
        if not gpus:
            if self.rank_config.devices == "cuda":
                raise LabError("devices='cuda': torch sees no GPU here. Leave `devices` out to run on the CPU.")
            return None, []
        device = torch.device(own[0])
        torch.cuda.set_device(device)
        if gpus >= self.rank_config.size and self.rank_config.link is not None:
            return device, ["link=...: messages go through gloo and the host, where they can be delayed; NCCL's cannot."]
        if gpus >= self.rank_config.size:
            return device, []
        shared = f"{self.rank_config.size} ranks share {counted(gpus, 'GPU')}"
        return device, [f"{shared}: NCCL needs one per rank, so messages go through gloo."]


class Rpc(Torch):
    """`torch.distributed.rpc` is initialised, each rank with its name."""

    serving_threads = 16

    def set_up(self, offers: Sequence[Any]) -> list[str]:
        """Join the RPC group."""
        import torch.distributed as dist
        from torch.distributed import rpc

        if not rpc.is_available():
            raise LabError("runtime='rpc': this build of torch has no torch.distributed.rpc (Linux builds have it)")
        _, notes = self._prepare(offers[0])
        _hide_optimizer_warning()
        name, options = self._rpc_given()
        store = self._store if self.rank_config.rank == 0 else self._connect()
        place = dist.PrefixStore("labkit", store), self.rank_config.rank, self.rank_config.size
        dist.register_rendezvous_handler("labkit", lambda *_, **__: iter([place]))
        first_round = rpc.api._all_gather
        if self.rank_config.starts_rpc:
            rpc.api._all_gather = lambda *_, **__: None  # makes no call before the program starts RPC itself
        with quiet_stderr():  # torch calls a constructor that it has deprecated (pytorch/pytorch#149393)
            rpc.init_rpc(
                name,
                rank=self.rank_config.rank,
                world_size=self.rank_config.size,
                rpc_backend_options=options.for_torch("labkit://"),
            )
        rpc.api._all_gather = first_round
        return notes

    def adapt_launch(self, recorder: Recorder, record_rpc: Callable[[], None]) -> None:
        """Let a program that starts RPC itself find it initialised."""
        super().adapt_launch(recorder, record_rpc)
        recorder.ring.serving(self._rpc_given()[1].num_worker_threads)

    def _rpc_given(self) -> tuple[str, Any]:
        from labkit.comm.rpc_launch import RpcOptions

        return self.rank_config.names[self.rank_config.rank], RpcOptions(*self.rank_config.rpc_options)

    def tear_down(self) -> None:
        """Shut RPC down without waiting for the other ranks, which may have failed."""
        from torch.distributed import rpc

        rpc.shutdown(graceful=False)


def _hide_optimizer_warning() -> None:
    """Hide a warning that each DistributedOptimizer issues on each worker and that the student's code cannot avoid.

    torch sets the filter "always" around the warning, so it can only be dropped in `warnings.showwarning`.
    """
    show = warnings.showwarning

    def show_others(message: Warning | str, category: type[Warning], *where: Any, **kwargs: Any) -> None:
        if "`TorchScript` support for functional optimizers" not in str(message):
            show(message, category, *where, **kwargs)

    warnings.showwarning = show_others


RUNTIMES: Final[dict[str, type[Runtime]]] = {"torch": Torch, "rpc": Rpc, "tensorflow": TensorFlow, "bare": Runtime}


@public_api
def devices(n: int = 1) -> list[Any]:
    """Return the torch devices of this rank: its share of the GPUs, or the CPU if there are none.

    Args:
        n: the number of devices to return. If the rank has fewer, they repeat, so that a model split over two devices
            also runs on one.

    Returns:
        a list of `n` `torch.device`.

    Raises:
        TypeError: `n` is not a whole number.
        ValueError: `n` is less than 1.
        LabError: torch is not installed.
    """
    if not isinstance(n, numbers.Integral) or isinstance(n, bool):
        raise TypeError(f"devices({n!r}): expected a whole number, at least 1")
    if n < 1:
        raise ValueError(f"devices({n}): expected at least 1")
    try:
        import torch
    except ImportError:
        raise missing("torch", "torch") from None
    own = os.environ.get("LABKIT_DEVICES", "").split(",")
    if own == [""]:  # under torchrun, or in the notebook itself
        rank, size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        own = share_of_devices(rank, size, torch.cuda.device_count())
    return [torch.device(own[i % len(own)]) for i in range(n)]


def share_of_devices(rank: int, size: int, gpus: int) -> list[str]:
    """Return the names of a rank's devices: an equal share of the GPUs, a GPU shared with other ranks, or the CPU.

    Args:
        rank: the rank's number.
        size: the number of ranks.
        gpus: the number of GPUs.
    """
    if gpus == 0:
        return ["cpu"]
    if gpus < size:
        return [f"cuda:{rank % gpus}"]
    each = gpus // size
    return [f"cuda:{i}" for i in range(rank * each, (rank + 1) * each)]


def gpu_count() -> int:
    """Count GPUs without initialising CUDA: the driver's device files, except those that CUDA_VISIBLE_DEVICES hides."""
    files = len(glob.glob("/dev/nvidia[0-9]*")) or len(glob.glob("/dev/dri/renderD*")) * os.path.exists("/dev/kfd")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return files if visible is None else min(files, len([v for v in visible.split(",") if v.strip() not in ("", "-1")]))
