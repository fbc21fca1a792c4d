"""Warns at once if a program sets or removes TF_CONFIG itself, as tutorials do, so that it cannot work in the group."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from labkit.worker.runtimes.tensorflow.tensorflow_internals import TRAINS_ALONE


def warn_if_alone(rank: int) -> None:
    """Have MultiWorkerMirroredStrategy warn, in this process, if it is made without a cluster; `rank` is its number."""

    def warn_and_begin(begin: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        warnings.warn(
            f"MultiWorkerMirroredStrategy finds no cluster in TF_CONFIG, so rank {rank} trains alone. labkit sets TF_CONFIG in "
            "each rank: remove the line that deletes or empties it.",
            stacklevel=3,
        )
        return begin(*args, **kwargs)

    TRAINS_ALONE.apply(_initialize_local=warn_and_begin)


def check(jobs: Sequence[tuple[str, int]], rank: int, args: Sequence[Any]) -> None:
    """Warn if a program makes this rank a part of a cluster in which it cannot work.

    Args:
        jobs: TensorFlow's job and task number of each rank, in rank order.
        rank: this rank's number.
        args: the arguments of TensorFlow's function that does so; one of them is the definition of the server.
    """
    import tensorflow as tf

    server = tf.train.ServerDef.FromString(next((arg for arg in args if isinstance(arg, bytes)), b""))
    cluster = {job.name: len(job.tasks) for job in server.cluster.job}
    if problem := mistake(server.job_name, server.task_index, cluster, jobs, rank):
        warnings.warn(problem, stacklevel=4)


def mistake(job: str, task: int, cluster: Mapping[str, int], jobs: Sequence[tuple[str, int]], rank: int) -> str:
    """Return what is wrong with a rank's job and task; "" if they can be right.

    Args:
        job: the job as which the program starts this rank.
        task: the number of its task.
        cluster: the number of tasks of each job in the program's cluster.
        jobs: as for `check`.
        rank: as for `check`.
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
