"""Setting up and tearing down torch, rpc, tensorflow and bare ranks. The frameworks are imported here, in the ranks, and late.

A group starts in two rounds, so that no port is ever guessed: every rank says what it offers (a port it already holds), and then
gets what all of them offered.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import socket
import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from labkit import tf_mends
from labkit.errors import LabError, missing
from labkit.link import Link
from labkit.private import INTERFACES, LOOPBACK_INTERFACE, Network

__all__ = ["RUNTIMES", "Runtime", "Seat", "devices", "gpu_count", "quiet_stderr"]

LOOPBACK: Final = "127.0.0.1"
MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Seat:
    """What one rank is told when it starts.

    Args:
        rank: its number.
        names: the names of all ranks, in rank order.
        runtime: one of `RUNTIMES`.
        threads: how many threads its framework may compute with.
        devices: "auto", "cpu" or "cuda".
        devices_per_rank: logical devices of a TensorFlow rank.
        jobs: TensorFlow's job and task number of each rank, in rank order.
        path, folder: where it finds the student's modules and files.
        lend: whether the notebook may read this rank's memory, so that large results can stay there until it does.
        environment: variables that the notebook has changed since the process that the rank comes from was started; None removes.
        link: over which what the ranks send shall seem to go; None: as it goes.
    """

    rank: int
    names: tuple[str, ...]
    runtime: str
    threads: int = 1
    devices: str = "auto"
    devices_per_rank: int = 1
    jobs: tuple[tuple[str, int], ...] = ()
    path: tuple[str, ...] = field(default=(), repr=False)
    folder: str = ""
    lend: bool = False
    environment: dict[str, str | None] = field(default_factory=dict, repr=False)
    link: Link | None = None

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.names)


class Runtime:
    """`bare`: processes and nothing else. The other runtimes add their framework to this.

    Attributes:
        package: what must be installed, and `extra`, the extra that brings it.
        preload: modules that are imported before ranks are forked.
        environment: variables set before that.
        rank_bytes: memory that one working rank needs, at the least.
        serving_threads: how many of a rank's threads run what others call, beside the one that runs the student's function.
        fresh_each_run: whether a run needs processes in which the framework has not computed yet.
        certain_after_s: how long ranks have been blocked before it is asked whether that is for ever.
        resting_is_waiting: once set up, whether a process that hardly computes inside its framework must be waiting for others.
    """

    package: ClassVar[str] = ""
    extra: ClassVar[str] = ""
    preload: ClassVar[tuple[str, ...]] = ("labkit.rank",)
    environment: ClassVar[dict[str, str]] = {}
    rank_bytes: ClassVar[int] = 20 * MIB
    serving_threads: ClassVar[int] = 0
    fresh_each_run: ClassVar[bool] = False
    certain_after_s: ClassVar[float] = 0.5
    resting_is_waiting: bool = False

    @classmethod
    def serves(cls, jobs: Sequence[tuple[str, int]], rank: int) -> int:
        """How many threads of a rank work for other ranks, also when its function has returned.

        Args:
            jobs: TensorFlow's job and task number of each rank, in rank order.
            rank: which one.
        """
        return cls.serving_threads or int(_has_server([job for job, _ in jobs], jobs[rank][0]))

    def __init__(self, seat: Seat, network: Network) -> None:
        self.seat, self.network = seat, network

    def offer(self) -> Any:
        """In the rank: what the other ranks must know before they set up."""
        return _free_port() if self.seat.rank == 0 else None

    def set_up(self, offers: Sequence[Any]) -> list[str]:
        """In the rank: make it ready for the student's function. Returns what the student should be told once."""
        self._torchrun_environment(offers[0])
        return []

    def tear_down(self) -> None:
        """In the rank, when the group closes."""

    def _torchrun_environment(self, port: int) -> None:
        """What torchrun sets, so that a function does not know who started it.

        Source: "Environment Variables", PyTorch's documentation of torchrun.
        """
        seat = self.seat
        os.environ |= {
            "RANK": str(seat.rank),
            "LOCAL_RANK": str(seat.rank),
            "WORLD_SIZE": str(seat.size),
            "LOCAL_WORLD_SIZE": str(seat.size),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": str(seat.threads),
            "LABKIT_RANK": str(seat.rank),  # tells `Group` that it is in the wrong place
        }


class Torch(Runtime):
    """`torch.distributed` initialised: NCCL where every rank has a GPU of its own, else gloo."""

    package = "torch"
    extra = "torch"
    preload = (
        "numpy", "torch", "torch.distributed", "torch._dynamo", "torch.nn.parallel", "torch.optim", "torch.utils.data",
        "torch.distributed.optim", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.tensor.parallel",
        "torch.distributed.pipelining", "torch.distributed.rpc", "torch.distributed.autograd", "torch.distributed.device_mesh",
        "torch.distributed._functional_collectives", "labkit.rank", "labkit.comm", "labkit.torch_sockets",
    )  # fmt: skip
    environment: ClassVar[dict[str, str]] = {"OPENBLAS_NUM_THREADS": "1"}  # numpy's own pool would be forked along
    rank_bytes = 100 * MIB

    def offer(self) -> Any:
        """The port of a store that rank 0 already serves."""
        self.network = self.network.unless_asked_outside(os.environ)
        if self.network.private:
            from labkit import torch_sockets

            torch_sockets.open_in(self.network)
        if self.seat.rank != 0:
            return None
        from torch.distributed import TCPStore

        # The store would listen on every interface of the machine; this socket, which it takes over, does not.
        listening = self.network.call(socket.create_server, (LOOPBACK, 0), backlog=max(128, self.seat.size))
        with quiet_stderr():  # where no name server answers, a warning that 127.0.0.1 has no name
            self._store = TCPStore(
                LOOPBACK,
                listening.getsockname()[1],
                self.seat.size,
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
        with quiet_stderr():  # as above
            store = self._store if self.seat.rank == 0 else dist.TCPStore(LOOPBACK, offers[0], self.seat.size, is_master=False)
        own_gpu = device is not None and not notes
        dist.init_process_group(
            "nccl" if own_gpu else "gloo",
            store=dist.PrefixStore("labkit", store),
            rank=self.seat.rank,
            world_size=self.seat.size,
            **({"device_id": device} if own_gpu else {}),
        )
        return notes

    def tear_down(self) -> None:
        """Leave the process group: one that is left standing may abort the process at its end."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()

    def _prepare(self, port: int) -> tuple[Any, list[str]]:
        """Environment, threads and device; the device is None without a GPU, the notes say that GPUs are shared."""
        import torch

        self._torchrun_environment(port)
        # With these, torch's own init_method="env://" joins our store instead of opening one on the same port.
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        for variable in INTERFACES:
            os.environ.setdefault(variable, LOOPBACK_INTERFACE)
        torch.set_num_threads(self.seat.threads)
        gpus = torch.cuda.device_count() if self.seat.devices != "cpu" else 0
        own = share_of_devices(self.seat.rank, self.seat.size, gpus)
        os.environ["LABKIT_DEVICES"] = ",".join(own)
        if not gpus:
            if self.seat.devices == "cuda":
                raise LabError("devices='cuda': torch sees no GPU here. Leave `devices` out to run on the CPU.")
            return None, []
        device = torch.device(own[0])
        torch.cuda.set_device(device)
        if gpus >= self.seat.size and self.seat.link is not None:
            return device, ["link=...: messages go through gloo and the host, where they can be held back; NCCL's cannot."]
        if gpus >= self.seat.size:
            return device, []
        return device, [
            f"{self.seat.size} ranks share {gpus} GPU{'s' * (gpus > 1)}: NCCL needs one per rank, so messages go through gloo."
        ]


# TensorPipe's first choice on one machine, shared memory, has a thread in each rank that asks and asks: also in an idle rank it
# takes a whole core.
TRANSPORTS: Final = ["uv"]


class Rpc(Torch):
    """`torch.distributed.rpc` initialised, each rank under its name."""

    serving_threads = 8

    def set_up(self, offers: Sequence[Any]) -> list[str]:
        """Join the RPC group."""
        from torch.distributed import rpc

        if not rpc.is_available():
            raise LabError("runtime='rpc': this build of torch has no torch.distributed.rpc (Linux builds have it)")
        _, notes = self._prepare(offers[0])
        _hide_optimizer_warning()
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://{LOOPBACK}:{offers[0]}", num_worker_threads=self.serving_threads, _transports=TRANSPORTS
        )
        with quiet_stderr():  # a warning about a deprecated constructor that torch itself calls (pytorch/pytorch#149393)
            rpc.init_rpc(
                self.seat.names[self.seat.rank], rank=self.seat.rank, world_size=self.seat.size, rpc_backend_options=options
            )
        return notes

    def tear_down(self) -> None:
        """Leave the RPC group without waiting for the others, who may have failed."""
        from torch.distributed import rpc

        rpc.shutdown(graceful=False)


def _hide_optimizer_warning() -> None:
    """Keep silent what every DistributedOptimizer says on every worker, whatever the student does, about a choice of its own.

    torch sets the filter "always" around it, so that only the place where warnings are shown is left.
    """
    show = warnings.showwarning

    def show_others(message: Warning | str, category: type[Warning], *where: Any, **kwargs: Any) -> None:
        if "`TorchScript` support for functional optimizers" not in str(message):
            show(message, category, *where, **kwargs)

    warnings.showwarning = show_others


class TensorFlow(Runtime):
    """TensorFlow not yet awake, with TF_CONFIG and the logical devices set."""

    package = "tensorflow"
    extra = "tf"
    preload = ("numpy", "tensorflow", "keras", "labkit.rank")
    # TF_GRPC_REUSE_PORT lets TensorFlow's server bind the port that `offer` holds for it.
    environment: ClassVar[dict[str, str]] = {
        "TF_CPP_MIN_LOG_LEVEL": "2", "TF_GRPC_REUSE_PORT": "1", "KERAS_BACKEND": "tensorflow", "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip
    rank_bytes = 300 * MIB
    fresh_each_run = True  # "Collective ops must be configured at program startup"
    certain_after_s = 3.0  # a strategy's collectives need all ranks; a process that TensorFlow lets rest that long waits for one

    def offer(self) -> Any:
        """A port that this rank holds, without listening, until TensorFlow binds it as well."""
        self._held: socket.socket = self.network.call(socket.socket)
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._held.bind((LOOPBACK, 0))
        return self._held.getsockname()[1]

    def set_up(self, offers: Sequence[Any]) -> list[str]:
        """Set TF_CONFIG and the logical devices; runs no TensorFlow op."""
        seat = self.seat
        self._torchrun_environment(offers[0])
        job, task = seat.jobs[seat.rank]
        cluster: dict[str, list[str]] = {}
        for (name, _), port in zip(seat.jobs, offers, strict=True):
            cluster.setdefault(name, []).append(f"{LOOPBACK}:{port}")
        if seat.size > 1:
            os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": job, "index": task}})
        with quiet_stderr():
            import tensorflow as tf

            cpu = tf.config.list_physical_devices("CPU")[0]
            gpus = tf.config.list_physical_devices("GPU")
        tf_mends.apply(self.network)
        own, notes = self._share(gpus)
        self.resting_is_waiting = seat.size > 1 and not own  # while a GPU works, its process rests as well
        tf.config.set_visible_devices(own, "GPU")
        for gpu in own:
            tf.config.experimental.set_memory_growth(gpu, True)
        if seat.devices_per_rank > 1 and not own:
            logical = [tf.config.LogicalDeviceConfiguration()] * seat.devices_per_rank
            tf.config.set_logical_device_configuration(cpu, logical)
        # Both: operations side by side take cores as well as the threads within one.
        tf.config.threading.set_intra_op_parallelism_threads(seat.threads)
        tf.config.threading.set_inter_op_parallelism_threads(seat.threads)
        if _has_server(cluster, job):
            own_threads = tf.compat.v1.ConfigProto(
                intra_op_parallelism_threads=seat.threads, inter_op_parallelism_threads=seat.threads
            )
            self._server = tf.distribute.Server(cluster, job_name=job, task_index=task, protocol="grpc", config=own_threads)
        return notes

    def _share(self, gpus: Sequence[Any]) -> tuple[Sequence[Any], list[str]]:
        """The GPUs that are this rank's own, none where they do not suffice for all ranks; and what the student should know."""
        seat, each = self.seat, self.seat.devices_per_rank
        if seat.devices == "cpu" or (not gpus and seat.devices != "cuda"):
            return [], []
        if len(gpus) >= seat.size * each:
            return gpus[seat.rank * each : (seat.rank + 1) * each], []
        need = f"{seat.size} rank{'s' * (seat.size > 1)} with {each} device{'s' * (each > 1)} each"
        if seat.devices == "cuda":
            raise LabError(
                f"devices='cuda': {need}, and TensorFlow sees {len(gpus)} GPUs. Leave `devices` out to run on the CPU."
            )
        return [], [f"{need}, and TensorFlow sees {len(gpus)} GPU{'s' * (len(gpus) > 1)}: they compute on the CPU."]


def _has_server(jobs: Collection[str], job: str) -> bool:
    """Whether a rank of TensorFlow's has a server, which the chief has compute."""
    return "ps" in jobs and job in ("worker", "ps")


RUNTIMES: Final[dict[str, type[Runtime]]] = {"torch": Torch, "rpc": Rpc, "tensorflow": TensorFlow, "bare": Runtime}


def devices(n: int = 1) -> list[Any]:
    """The torch devices that are this rank's own: its GPUs where there are some, else the CPU.

    Args:
        n: how many to give. Where the rank has fewer, they come round again: a model cut in two runs on one device as well.

    Returns:
        a list of `n` `torch.device`.

    Raises:
        ValueError: `n` is less than 1.
    """
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
    """Which devices belong to a rank: an equal share of the GPUs, one for several ranks where they are few, or the CPU."""
    if gpus == 0:
        return ["cpu"]
    if gpus < size:
        return [f"cuda:{rank % gpus}"]
    each = gpus // size
    return [f"cuda:{i}" for i in range(rank * each, (rank + 1) * each)]


def gpu_count() -> int:
    """How many GPUs the driver shows, without waking CUDA: device files, less what CUDA_VISIBLE_DEVICES hides."""
    files = len(glob.glob("/dev/nvidia[0-9]*")) or len(glob.glob("/dev/dri/renderD*")) * os.path.exists("/dev/kfd")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return files if visible is None else min(files, len([v for v in visible.split(",") if v.strip() not in ("", "-1")]))


def _free_port() -> int:
    """A port that is free now. Nobody holds it: bare ranks that want one may have to try again."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Send what C++ code writes to descriptor 2 nowhere for a while."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
