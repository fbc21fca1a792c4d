"""Warns at once if a program sets or removes TF_CONFIG itself, as tutorials do, so that it cannot work in the group."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

__all__ = ["apply", "mistake"]

LOCAL: Final = "_initialize_local"  # method of CollectiveAllReduceExtended that sets the strategy up without a cluster
STARTS: Final = ("TFE_EnableCollectiveOps", "TFE_ContextSetServerDefWithTimeoutAndRetries", "TFE_ContextSetServerDef")


def apply(jobs: Sequence[tuple[str, int]], rank: int) -> None:
    """Install the checks in this process. Call it once, before the student's code runs.

    Args:
        jobs: TensorFlow's job and task number of each rank, in rank order.
        rank: this rank's number.
    """
    from tensorflow.python import pywrap_tfe
    from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended

    if len(jobs) > 1 and hasattr(CollectiveAllReduceExtended, LOCAL):
        setattr(CollectiveAllReduceExtended, LOCAL, _warning_if_alone(getattr(CollectiveAllReduceExtended, LOCAL), rank))
    for name in STARTS:
        if hasattr(pywrap_tfe, name):
            setattr(pywrap_tfe, name, _checked(getattr(pywrap_tfe, name), jobs, rank))


def mistake(job: str, task: int, cluster: Mapping[str, int], jobs: Sequence[tuple[str, int]], rank: int) -> str:
    """Return what is wrong with a rank's job and task; "" if they can be right.

    Args:
        job: the job as which the program starts this rank.
        task: the number of its task.
        cluster: the number of tasks of each job in the program's cluster.
        jobs: as for `apply`.
        rank: as for `apply`.
    """
    own_job, own_task = jobs[rank]
    named = {name for name, _ in jobs}
    if (job, task) != (own_job, own_task) and (job, task) in jobs:
        return (
            f"TF_CONFIG makes this rank {job} {task}, but it is {own_job} {own_task}, and another rank is {job} {task}: "
            "they would wait for each other without end. Take the task from the TF_CONFIG that labkit has set."
        )
    for other, tasks in cluster.items() if job == own_job else ():
        has = sum(name == other for name, _ in jobs)
        if tasks > has and other in named:
            return (
                f"TF_CONFIG names {tasks} tasks of the job {other!r}, but this group has {has}: unless the program starts the "
                "others itself, the ranks wait for them without end. labkit has set a TF_CONFIG that fits the group."
            )
    return ""


def _checked(start: Callable[..., Any], jobs: Sequence[tuple[str, int]], rank: int) -> Callable[..., Any]:
    from tensorflow.core.protobuf import tensorflow_server_pb2

    @functools.wraps(start)
    def check_and_start(*args: Any, **kwargs: Any) -> Any:
        definition = next((arg for arg in args if isinstance(arg, bytes)), b"")
        server = tensorflow_server_pb2.ServerDef.FromString(definition)
        cluster = {job.name: len(job.tasks) for job in server.cluster.job}
        if problem := mistake(server.job_name, server.task_index, cluster, jobs, rank):
            warnings.warn(problem, stacklevel=2)
        return start(*args, **kwargs)

    return check_and_start


def _warning_if_alone(begin: Callable[..., Any], rank: int) -> Callable[..., Any]:
    @functools.wraps(begin)
    def warn_and_begin(*args: Any, **kwargs: Any) -> Any:
        warnings.warn(
            f"MultiWorkerMirroredStrategy finds no cluster in TF_CONFIG, so rank {rank} trains alone. labkit sets TF_CONFIG in "
            "each rank: remove the line that deletes or empties it.",
            stacklevel=2,
        )
        return begin(*args, **kwargs)

    return warn_and_begin
