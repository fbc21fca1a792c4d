"""`memory_mb` and `sent_mb`: what `memory` and `traffic` draw, as one number to compare with a prediction."""

from __future__ import annotations

from labkit.errors.exceptions import LabError
from labkit.errors.wrong_calls import public_api
from labkit.plots.flows import flows_of
from labkit.plots.memory import memory_uses
from labkit.plots.view import view_of
from labkit.recording.operations import type_of
from labkit.recording.schema import MEMORY_KINDS
from labkit.tracing.step_times import HasTrace, trace_of
from labkit.tracing.trace import Trace


@public_api
def memory_mb(run: HasTrace | Trace, *kinds: str, rank: int | None = None) -> float:
    """Return the peak memory of a rank in MB (10⁶ bytes), as `track_memory` recorded it.

    For example, `memory_mb(run, "gradients", "optimizer state")` is the most that both together occupied at any time.
    On a CPU, only the tracked kinds are counted, without temporaries: the real peak is higher. On CUDA, and in a
    simulation without `measured=True`, "other" includes them.

    Args:
        run: a run or a trace.
        kinds: what to count: "parameters", "gathered parameters", "gradients", "buckets", "optimizer state",
            "activations", "other"; default: everything that was tracked.
        rank: the rank; default: the one that needs most.

    Raises:
        LabError: no rank tracked its memory, or not this one.
        TypeError: `run` is neither a run nor a trace.
        ValueError: an unknown kind.
    """
    trace = trace_of(run, "memory_mb")
    for kind in kinds:
        if kind not in MEMORY_KINDS:
            raise ValueError(f"memory_mb({kind!r}): expected {', '.join(map(repr, MEMORY_KINDS))}")
    rows = [MEMORY_KINDS.index(kind) for kind in kinds or MEMORY_KINDS]
    found = [use for use in memory_uses(trace) if rank in (None, use.rank)]
    tracked = any(use.nbytes[:-1].any() for use in found)  # a simulation without `track_memory` has only "other"
    if not found or (not tracked and set(kinds) - {MEMORY_KINDS[-1]}):
        whose = "no rank of this run has" if rank is None else f"rank {rank} of this run has not"
        raise LabError(
            f"memory_mb: {whose} tracked its memory; put `with lab.track_memory(model, optimizer):` around the training loop"
        )
    return max(float(use.nbytes[rows].sum(axis=0).max()) for use in found) / 1e6


@public_api
def sent_mb(run: HasTrace | Trace, rank: int | None = None) -> float:
    """Return how many MB (10⁶ bytes) a rank sends in a step, counted as `traffic` counts them.

    A run without `lab.steps` counts as one step. What is sent before the first step or after the last does not count,
    nor do TensorFlow's messages and copies of which its profiler does not say the size; `traffic` lists them.

    Args:
        run: a run or a trace.
        rank: the rank; default: the mean of all ranks.

    Raises:
        LabError: the ranks recorded nothing, or the size of a collective is unknown.
        TypeError: `run` is neither a run nor a trace.
        ValueError: there is no such rank.
    """
    trace = trace_of(run, "sent_mb")
    if rank is not None and rank not in range(len(trace.ranks)):
        raise ValueError(f"sent_mb(rank={rank!r}): expected a rank from 0 to {len(trace.ranks) - 1}")
    steps = len(trace.step_bounds())
    last = trace.end_ns + 1
    bounds = view_of(trace, range(steps) if steps else "all", "").bounds_of_ranks()
    if bounds is not None:
        last = int(bounds[:, 1].max())
        bounds[:, 1] = trace.end_ns  # what a rank has begun in its last step may end after it
    flows = flows_of(trace, bounds)
    if unknown := ", ".join(f"{count} × {name}" for name, count in flows.unsized if type_of(name).collective):
        raise LabError(f"sent_mb: the sizes of {unknown} are unknown; lab.traffic draws those that are known")
    counted = flows.start_ns < last
    if rank is not None:
        counted &= flows.rank[flows.source] == rank
    among = len(trace.ranks) if rank is None else 1
    return float(flows.nbytes[counted].sum()) / max(steps, 1) / among / 1e6
