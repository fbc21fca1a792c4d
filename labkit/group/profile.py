"""`lab.profile`: the next runs of a group are seen by torch's profiler as well."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from labkit.errors.exceptions import LabError
from labkit.errors.wrong_calls import public_api
from labkit.worker.runtimes.registry import RUNTIMES

if TYPE_CHECKING:
    from labkit.group.group import Group

__all__ = ["profile"]


@public_api
def profile(group: Group) -> AbstractContextManager[None]:
    """Have torch's profiler look at each rank in the runs of this block: operators, kernels, calls of CUDA.

        with lab.profile(group):
            run = group.run(train)
        run.trace.save("x.json")      # Perfetto shows them in each rank's process, below labkit's own rows

    The times are on the clock of the spans, to within some microseconds. The ranks are slower meanwhile, so measure without.
    Of each rank and run the 100,000 events that last longest are kept; `run.trace.profile` has them.

    Args:
        group: of the runtime "torch" or "rpc".

    Raises:
        TypeError: it is no group.
        LabError: the group runs something else.
    """
    if not hasattr(group, "profiling"):
        raise TypeError(f"profile({group!r}): expected a group, as in `with lab.profile(group):`")
    if not RUNTIMES[group.runtime].has_torch_profiler:
        raise LabError(f"lab.profile looks at torch; this is a group of the runtime {group.runtime!r}")
    return group.profiling.block()
