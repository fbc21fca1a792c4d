"""Sets up and tears down a rank of torch.distributed. torch is imported late, in the ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from labkit.errors.exceptions import LabError
from labkit.errors.lists import counted
from labkit.recording.record import Recorder
from labkit.worker.network_namespace import INTERFACES, LOOPBACK_INTERFACE
from labkit.worker.runtimes.base import LOOPBACK, MIB, Runtime, quiet_stderr
from labkit.worker.runtimes.devices import devices, share_of_devices

if TYPE_CHECKING:
    from labkit.comm.emulated_link import SlowLink

__all__ = ["Torch"]


class Torch(Runtime):
    """`torch.distributed` is initialised: with NCCL if each rank has its own GPU, else with gloo."""

    package = "torch"
    extra = "torch"
    preload = (
        "numpy", "torch", "torch.distributed", "torch.nn.parallel", "torch.optim", "torch.utils.data",
        "torch.distributed.optim", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.tensor.parallel",
        "torch.distributed.pipelining", "torch.distributed.rpc", "torch.distributed.autograd", "torch.distributed.device_mesh",
        "labkit.worker.main_loop", "labkit.comm.torch_internals:lost", "labkit.comm.install:prepare",
        "labkit.comm.initialization", "labkit.comm.rpc_initialization", "labkit.comm.rpc_calls",
        "labkit.worker.runtimes.torch_sockets",
    )  # fmt: skip
    environment: ClassVar[dict[str, str]] = {"OPENBLAS_NUM_THREADS": "1"}  # a fork would break numpy's thread pool
    rank_bytes = 100 * MIB
    emulates_links = True
    has_torch_profiler = True
    _port = -1  # of the group's store, once it is known

    def offer(self) -> Any:
        """On rank 0: start a store and return its port."""
        self.network = self.network.unless_asked_outside(os.environ)
        if self.network.private:
            from labkit.worker.runtimes import torch_sockets

            torch_sockets.open_in(self.network, lambda: self._port)
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

    def record_operations(self, recorder: Recorder, shared_link: int) -> Callable[[], None]:
        """Record what goes through process groups; RPC only once the returned function is called."""
        from labkit.comm.install import watch_torch

        return watch_torch(recorder, self._slow_link(shared_link))

    def _slow_link(self, shared_link: int) -> SlowLink | None:
        """What holds messages back, if the group has a link."""
        from labkit.comm.install import slow_link

        link = self.options.link
        return None if link is None else slow_link(link, self.rank_config.rank, shared_link)

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

    def adapt_initialization(self, recorder: Recorder, record_rpc: Callable[[], None]) -> None:
        """Let a program that sets up torch itself use the group's store and the existing process group."""
        from labkit.comm.initialization import Initialization
        from labkit.comm.install import watch_device

        rank_config = self.rank_config
        rpc = self._rpc_given(), rank_config.starts_rpc
        self._initialization = Initialization(
            recorder, rank_config.rank, rank_config.size, record_rpc, self._port, self._connect, *rpc
        )
        watch_device(recorder, devices()[0])

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
        torch.set_num_threads(self.options.threads)
        gpus = torch.cuda.device_count() if self.options.devices != "cpu" else 0
        own = share_of_devices(self.rank_config.rank, self.rank_config.size, gpus)
        os.environ["LABKIT_DEVICES"] = ",".join(own)
        if not gpus:
            if self.options.devices == "cuda":
                raise LabError("devices='cuda': torch sees no GPU here. Leave `devices` out to run on the CPU.")
            return None, []
        device = torch.device(own[0])
        torch.cuda.set_device(device)
        if gpus >= self.rank_config.size and self.options.link is not None:
            return device, ["link=...: messages go through gloo and the host, where they can be delayed; NCCL's cannot."]
        if gpus >= self.rank_config.size:
            return device, []
        shared = f"{self.rank_config.size} ranks share {counted(gpus, 'GPU')}"
        return device, [f"{shared}: NCCL needs one per rank, so messages go through gloo."]
