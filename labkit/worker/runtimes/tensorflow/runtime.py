"""Sets up a TensorFlow rank: TF_CONFIG, devices and threads, and the server of a rank that serves a chief."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from labkit.errors.exceptions import LabError
from labkit.errors.lists import counted
from labkit.ipc.protocol import Offer
from labkit.ipc.stdio import quiet_stderr
from labkit.recording.record import here
from labkit.worker.runtimes.base import MIB, Runtime, has_server
from labkit.worker.runtimes.tensorflow import patches, servers
from labkit.worker.runtimes.tensorflow.profiler_events import Role
from labkit.worker.runtimes.tensorflow.profiler_timeline import ProfilerTimeline


class TensorFlow(Runtime):
    """TF_CONFIG and the logical devices are set; TensorFlow is imported, but not initialised yet."""

    package = "tensorflow"
    extra = "tf"
    preload = ("numpy", "tensorflow", "keras", "labkit.worker.main_loop")
    # TF_GRPC_REUSE_PORT lets TensorFlow's server bind the port that `offer` holds for it.
    environment: ClassVar[dict[str, str]] = {
        "TF_CPP_MIN_LOG_LEVEL": "2", "TF_GRPC_REUSE_PORT": "1", "KERAS_BACKEND": "tensorflow", "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip
    rank_bytes = 300 * MIB
    fresh_each_run = True  # "Collective ops must be configured at program startup"
    observes_runs = True
    has_jobs = True
    has_logical_devices = True
    certain_after_s = 3.0  # seconds; a process that is idle in TensorFlow for so long waits for another rank

    _timeline: ProfilerTimeline | None = None
    _all_called = False  # whether all ranks run the current function or cell

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._remarks: list[str] = []  # for the student, on the current run

    @classmethod
    def replaceable(cls, jobs: Sequence[tuple[str, int]], rank: int) -> bool:
        """Return whether a rank is a worker of a parameter-server cluster: the chief gives its work to another one."""
        return jobs[rank][0] == "worker" and has_server([job for job, _ in jobs], "worker")

    def offer(self) -> Offer:
        """Bind a port, without listening on it; TensorFlow will bind it as well. Return it, and this rank's GPUs."""
        self.network = self.network.unless_several(self.place.nodes, os.environ)
        self._held: socket.socket = self.network.call(socket.socket)
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._held.bind((self.place.listening, 0))
        with quiet_stderr():
            import tensorflow as tf

            own = self._own(tf.config.list_physical_devices("GPU"))
        gpus = tuple(f"{self.place.machine} {gpu.name}" for gpu in own)
        return Offer(self.place.listening, self._held.getsockname()[1], gpus)

    def set_up(self, offers: Sequence[Offer]) -> list[str]:
        """Set TF_CONFIG and the logical devices, without running a TensorFlow operation."""
        super().set_up(offers)
        rank_config = self.rank_config
        job, task = self.options.jobs[rank_config.rank]
        cluster: dict[str, list[str]] = {}
        for (name, _), offer in zip(self.options.jobs, offers, strict=True):
            cluster.setdefault(name, []).append(f"{offer.address}:{offer.port}")
        if rank_config.size > 1:
            os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": job, "index": task}})
            if list(cluster) == ["worker"]:
                os.environ |= _for_dtensor(cluster["worker"], task)
        with quiet_stderr():
            import tensorflow as tf

            cpu = tf.config.list_physical_devices("CPU")[0]
            gpus = tf.config.list_physical_devices("GPU")
        between = threads_between(self.threads, cluster)
        own_threads = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=self.threads, inter_op_parallelism_threads=between)
        patches.replace_functions_of_datasets_and_autograph()
        check = partial(patches.check_config, self.options.jobs, rank_config.rank)
        notes = servers.apply(self.network, own_threads, self.wait_for_release, check, one_machine=self.place.nodes == 1)
        patches.check_strategies(cluster, job, lambda: rank_config.size if self._all_called and "ps" not in cluster else 1)
        unknown = patches.work_around_bugs_of_strategies(self._remarks.append)
        if rank_config.size > 1:
            patches.warn_if_alone(rank_config.rank)
            notes += unknown if "ps" not in cluster else []
        own, too_few = self._share(gpus, offers)
        self.resting_is_waiting = rank_config.size > 1 and not own  # with a GPU, a process is idle while the GPU computes
        tf.config.set_visible_devices(own, "GPU")
        for gpu in own:
            tf.config.experimental.set_memory_growth(gpu, True)
        if self.options.devices_per_rank > 1 and not own:
            logical = [tf.config.LogicalDeviceConfiguration()] * self.options.devices_per_rank
            tf.config.set_logical_device_configuration(cpu, logical)
        # Both limits: concurrent operations use cores, as do the threads of one operation.
        tf.config.threading.set_intra_op_parallelism_threads(self.threads)
        tf.config.threading.set_inter_op_parallelism_threads(between)
        if has_server(cluster, job):
            self._server = tf.distribute.Server(cluster, job_name=job, task_index=task, protocol="grpc")
        ranks = {one: rank for rank, one in enumerate(self.options.jobs)}
        coordinates = "ps" in cluster and job == "chief"
        role = Role(rank_config.rank, ranks, self.options.devices_per_rank, coordinates, has_server(cluster, job))
        return [*notes, *too_few, *self._record(own, role)]

    def begin_recording(self) -> None:
        """Start TensorFlow's profiler."""
        if self._timeline is not None:
            self._timeline.begin()

    def end_recording(self) -> list[str]:
        """Stop the profiler, and write its events to the ring."""
        remarks, self._remarks[:] = list(self._remarks), []
        return remarks + (self._timeline.end() if self._timeline is not None else [])

    def begin_run(self, *, keep: bool, all_called: bool) -> None:
        """Remember whether all ranks run it."""
        self._all_called = all_called
        super().begin_run(keep=keep, all_called=all_called)

    def _record(self, gpus: Sequence[Any], role: Role) -> list[str]:
        """Prepare the recording of TensorFlow's operations; return remarks for the student."""
        if gpus:
            return ["TensorFlow's operations on GPUs are not in the pictures: use lab.span, or TensorFlow's own profiler."]
        if here.recorder is None:
            return []
        here.recorder.facts = patches.EmptyReplicas()
        here.recorder.facts.install()
        self._timeline = ProfilerTimeline(here.recorder, role)
        return self._timeline.install()

    def _own(self, gpus: Sequence[Any]) -> Sequence[Any]:
        """Return this rank's share of its machine's GPUs, none if there are not enough for the ranks there."""
        place, each = self.place, self.options.devices_per_rank
        if self.options.devices == "cpu" or len(gpus) < place.local_size * each:
            return []
        return gpus[place.local_rank * each : (place.local_rank + 1) * each]

    def _share(self, gpus: Sequence[Any], offers: Sequence[Offer]) -> tuple[Sequence[Any], list[str]]:
        """Return this rank's GPUs, none unless all ranks have some, and remarks for the student.

        Collectives fail between ranks that compute on a GPU and others that compute on the CPU.
        """
        own = self._own(gpus)
        if all(offer.gpus for offer in offers):
            return own, []
        expected = bool(gpus) or any(offer.gpus for offer in offers) or self.options.devices == "cuda"
        if own or not expected or self.options.devices == "cpu":  # if own: ranks on a machine with too few say so
            return [], []
        place, where = self.place, f" on {self.place.machine}" if self.place.elsewhere else ""
        need = f"{counted(place.local_size, 'rank')}{where} with {counted(self.options.devices_per_rank, 'device')} each"
        if self.options.devices == "cuda":
            raise LabError(
                f"devices='cuda': {need}, and TensorFlow sees {len(gpus)} GPUs. Leave `devices` out to run on the CPU."
            )
        they = "all ranks" if place.nodes > 1 else "they"
        return [], [f"{need}, and TensorFlow sees {counted(len(gpus), 'GPU')}: {they} compute on the CPU."]


def _for_dtensor(addresses: Sequence[str], task: int) -> dict[str, str]:
    """Return the variables that DTensor reads instead of TF_CONFIG; without them each process would be its own cluster.

    Source: "Distributed training with DTensors", TensorFlow's tutorial, and `tensorflow/dtensor/python/config.py`.
    """
    return {
        "DTENSOR_CLIENT_ID": str(task), "DTENSOR_NUM_CLIENTS": str(len(addresses)), "DTENSOR_JOB_NAME": "worker",
        "DTENSOR_JOBS": ",".join(addresses),
    }  # fmt: skip


def threads_between(threads: int, cluster: Mapping[str, Sequence[str]]) -> int:
    """Return the number of operations of a rank that may run concurrently.

    A worker or parameter server occupies a thread while it waits for another rank. With too few threads none is left to
    reply, and the run deadlocks.

    Source: "Parameter server training", TensorFlow's tutorial: at least the number of workers and one more.
    """
    return max(threads, len(cluster.get("worker", ())) + 1) if "ps" in cluster else threads
