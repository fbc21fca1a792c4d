"""Raises an explanation if a rank other than the chief creates a ParameterServerStrategy."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from labkit.errors.exceptions import LabError
from labkit.worker.runtimes.base import has_server
from labkit.worker.runtimes.tensorflow.tensorflow_internals import PARAMETER_SERVERS

__all__ = ["apply"]


def apply(jobs: Collection[str], job: str) -> None:
    """Make the strategy's constructor raise in this process, if this rank serves the chief.

    Args:
        jobs: the jobs of the cluster.
        job: this rank's job.
    """
    if "chief" not in jobs or not has_server(jobs, job):
        return

    def refuse(*_: Any, **__: Any) -> None:
        raise LabError(
            f"tf.distribute.ParameterServerStrategy belongs to the chief, and this rank's job is {job!r}: it runs what the chief "
            "sends. Use group['chief'].run(...), or call tf.distribute.Server(...).join() on workers and servers."
        )

    PARAMETER_SERVERS.apply(__init__=refuse)
