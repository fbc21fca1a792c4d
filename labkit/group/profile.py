"""`lab.profile`: records the runs of a group with torch's profiler, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from labkit.errors.exceptions import LabError
from labkit.errors.wrong_calls import public_api
from labkit.worker.runtimes.registry import RUNTIMES

if TYPE_CHECKING:
    from labkit.group.group import Group


@public_api
def profile(group: Group) -> AbstractContextManager[None]:
    """Record each rank with torch's profiler in the runs of this block: operators, kernels, CUDA calls.

        with lab.profile(group):
            run = group.run(train)
        run.trace.save("x.json")      # Perfetto shows them in each rank's process, below labkit's own rows

    The events have the clock of the spans, to within some microseconds. Profiling slows the ranks down, so measure
    times without it. For each rank and run, the 100,000 longest events are kept, in `run.trace.profile`.

    Args:
        group: a group with runtime "torch" or "rpc".

    Returns:
        a context manager.

    Raises:
        TypeError: `group` is not a group.
        LabError: the group has another runtime.
    """
    if not hasattr(group, "profiling"):
        raise TypeError(f"profile({group!r}): expected a group, as in `with lab.profile(group):`")
    if not RUNTIMES[group.runtime].has_torch_profiler:
        raise LabError(f"lab.profile is for torch; this group has the runtime {group.runtime!r}")
    return _profiled(group)


@contextmanager
def _profiled(group: Group) -> Iterator[None]:
    before, group.profiling = group.profiling, True
    try:
        yield
    finally:
        group.profiling = before
