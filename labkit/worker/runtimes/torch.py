"""Sets up a rank of torch.distributed, or of its RPC. torch is imported late: the notebook need not have it."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from labkit.errors.exceptions import LabError
from labkit.errors.lists import counted, listed
from labkit.ipc.protocol import Offer
from labkit.ipc.stdio import quiet_stderr
from labkit.recording.record import here
from labkit.worker.network_namespace import INTERFACES, LOOPBACK_INTERFACE
from labkit.worker.runtimes.base import MIB, Runtime
from labkit.worker.runtimes.devices import devices, share_of_devices

THROUGH_HOST: Final = "All communication goes through gloo and the host's memory."


class Torch(Runtime):
    """`torch.distributed` is initialised: with NCCL if each rank has GPUs of its own, else with gloo."""

    package = "torch"
    extra = "torch"
    preload = (
        "numpy", "torch", "torch.distributed", "torch.nn.parallel", "torch.optim", "torch.utils.data",
        "torch.distributed.optim", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.tensor.parallel",
        "torch.distributed.pipelining", "torch.distributed.rpc", "torch.distributed.autograd", "torch.distributed.device_mesh",
        "labkit.worker.main_loop", "labkit.recording.torch_internals:lost", "labkit.worker.comm.install:prepare",
        "labkit.worker.comm.process_group_initialization", "labkit.worker.comm.rpc_initialization",
        "labkit.worker.comm.rpc_calls", "labkit.worker.runtimes.torch_sockets",
    )  # fmt: skip
    environment: ClassVar[dict[str, str]] = {"OPENBLAS_NUM_THREADS": "1"}  # a fork would break numpy's thread pool
    rank_bytes = 100 * MIB
    emulates_links = True
    has_torch_profiler = True
    _master = Offer(port=-1)  # where the group's store is, once it is known

    def offer(self) -> Offer:
        """On rank 0: start a store. Return where it is, and this rank's GPUs."""
        if self.options.devices == "cpu":  # also for FSDP2, which takes a GPU that torch sees, and for torch's profiler
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self.network = self.network.unless_several(self.place.nodes, os.environ).unless_asked_outside(os.environ)
        if self.network.private:
            from labkit.worker.runtimes import torch_sockets

            torch_sockets.open_in(self.network, lambda: self._master.port)
        address = self.place.listening
        return Offer(address, self._open_store(address) if self.rank_config.rank == 0 else 0, self._gpus())

    def _open_store(self, address: str) -> int:
        """Start the group's store at an address of this machine, and return its port."""
        from torch.distributed import TCPStore

        # By default the store would listen on every interface of the machine; this socket does not.
        listening = self.network.call(socket.create_server, (address, 0), backlog=max(128, self.rank_config.size))
        with quiet_stderr():  # without a name server, torch warns that 127.0.0.1 has no name
            self._store = TCPStore(
                address, listening.getsockname()[1], self.rank_config.size, is_master=True, wait_for_workers=False,
                multi_tenant=True, master_listen_fd=listening.detach(),
            )  # fmt: skip
        return self._store.port

    def _gpus(self) -> tuple[str, ...]:
        import torch

        own = self._own_devices()
        return () if own == ["cpu"] else tuple(str(torch.cuda.get_device_properties(gpu).uuid) for gpu in own)

    def _own_devices(self) -> list[str]:
        """Return the names of this rank's devices, of those that torch sees on its machine."""
        import torch

        gpus = torch.cuda.device_count() if self.options.devices != "cpu" else 0
        return share_of_devices(self.place.local_rank, self.place.local_size, gpus)

    def set_up(self, offers: Sequence[Offer]) -> list[str]:
        """Join the group, recorded from the start; then let a program that sets up torch itself use this group."""
        from labkit.worker.comm import install
        from labkit.worker.comm.emulated_link import SlowLink
        from labkit.worker.comm.process_group_initialization import Initialization

        recorder, config, slow = here.recorder, self.rank_config, None
        assert recorder is not None
        if self.options.link is not None:
            assert config.payload is not None
            slow = SlowLink(self.options.link, config.rank, config.size, config.payload.fd)
        install.watch(recorder, slow, given=not self.has_rpc)
        notes = self._join(offers)
        rpc_name = config.name if self.has_rpc and not config.starts_rpc else ""
        self._initialization = Initialization(recorder, self.place.names, self._connect, rpc_name)
        self._initialization.install()
        install.watch_device(recorder, devices()[0])
        return notes

    def _join(self, offers: Sequence[Offer]) -> list[str]:
        """Join the process group; return remarks for the student."""
        import torch.distributed as dist

        device, notes = self._prepare(offers)
        own_gpu = device is not None and not notes
        # With a device, NCCL connects at once; a rank that is alone may never need it.
        at_once = own_gpu and self.rank_config.size > 1
        dist.init_process_group(
            "nccl" if own_gpu else "gloo",
            store=dist.PrefixStore("labkit", self._joined_store()),
            rank=self.rank_config.rank,
            world_size=self.rank_config.size,
            **({"device_id": device} if at_once else {}),
        )
        if own_gpu and not at_once:
            world: Any = dist.group.WORLD
            world.bound_device_id = device  # otherwise `barrier` warns that it had to guess
        return notes

    def _connect(self) -> Any:
        from torch.distributed import TCPStore

        with quiet_stderr():  # as above
            return TCPStore(self._master.address, self._master.port, self.rank_config.size, is_master=False)

    def _joined_store(self) -> Any:
        return self._store if self.rank_config.rank == 0 else self._connect()

    def _prepare(self, offers: Sequence[Offer]) -> tuple[Any, list[str]]:
        """Set environment variables, threads and device; return the GPU, or None, and remarks for the student."""
        import torch

        self._master = offers[0]
        self._torchrun_environment(self._master)
        for variable in INTERFACES if self.place.nodes == 1 else ():
            os.environ.setdefault(variable, LOOPBACK_INTERFACE)
        torch.set_num_threads(self.threads)
        own = self._own_devices()
        os.environ["LABKIT_DEVICES"] = ",".join(own)
        device = None
        if own != ["cpu"]:
            device = torch.device(own[0])
            torch.cuda.set_device(device)
        elif self.options.devices == "cuda":
            where = f"on {self.place.machine}" if self.place.elsewhere else "here"
            raise LabError(f"devices='cuda': torch sees no GPU {where}. Leave `devices` out to run on the CPU.")
        return device, [note] if (note := self._about_gpus(offers)) else []

    def _about_gpus(self, offers: Sequence[Offer]) -> str:
        """Return why a group with GPUs does not use NCCL, the same on all its ranks; "" if it does, or has no GPUs."""
        gpus = [gpu for offer in offers for gpu in offer.gpus]
        without = [name for name, offer in zip(self.options.names, offers, strict=True) if not offer.gpus]
        if not gpus:
            return ""
        if without:
            return f"no GPU for {listed(without)}: NCCL needs one per rank. {THROUGH_HOST}"
        if shared := sharing(offers):
            return f"{shared}: NCCL needs one per rank. {THROUGH_HOST}"
        if self.options.link is not None:
            return f"link=...: what NCCL sends cannot be delayed. {THROUGH_HOST}"
        return ""


class Rpc(Torch):
    """`torch.distributed.rpc` is initialised, each rank with its name, unless the program does so."""

    serving_threads = 16
    has_rpc = True
    rank_name = "worker{}"
    valid_name = re.compile(r"[A-Za-z0-9_:-]{1,127}")  # what torch.distributed.rpc accepts
    name_error = "{!r} is not a valid RPC name; expected at most 127 letters, digits and _ : - characters"

    def _join(self, offers: Sequence[Offer]) -> list[str]:
        """Join the RPC group, unless the program starts RPC: torch can do so only once in a process."""
        import torch.distributed as dist
        from torch.distributed import rpc

        if not rpc.is_available():
            raise LabError("runtime='rpc': this build of torch has no torch.distributed.rpc (Linux builds have it)")
        from labkit.worker.comm.rpc_initialization import OPTIONS, torchs_options

        _, notes = self._prepare(offers)
        if self.rank_config.starts_rpc:
            return notes
        place = dist.PrefixStore("labkit", self._joined_store()), self.rank_config.rank, self.rank_config.size
        dist.register_rendezvous_handler("labkit", lambda *_, **__: iter([place]))
        with quiet_stderr():  # torch calls a constructor that it has deprecated (pytorch/pytorch#149393)
            rpc.init_rpc(
                self.rank_config.name,
                rank=self.rank_config.rank,
                world_size=self.rank_config.size,
                rpc_backend_options=torchs_options(*OPTIONS, "labkit://"),
            )
        return notes

    def _about_gpus(self, offers: Sequence[Offer]) -> str:
        """Return that ranks share GPUs; "" if none do. Remote calls carry tensors of the CPU in any case."""
        return f"{shared}." if (shared := sharing(offers)) else ""


def sharing(offers: Sequence[Offer]) -> str:
    """Return "3 ranks share 2 GPUs and compute in turns"; "" if no GPU has several ranks."""
    gpus = [gpu for offer in offers for gpu in offer.gpus]
    different = len(set(gpus))
    return f"{len(offers)} ranks share {counted(different, 'GPU')} and compute in turns" if different < len(gpus) else ""
