"""Records each pass of a micro-batch through a stage of `torch.distributed.pipelining` as a span.

All schedules (GPipe, 1F1B, interleaved, zero-bubble) compute in three methods of the stage. They are wrapped when
torch's module of stages is imported, so that ranks without pipelines have no overhead. Other passes inside a schedule
are not recorded, such as those of the loss function, and those on empty tensors that find out shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from labkit.recording.import_hook import when_imported
from labkit.recording.record import student_line
from labkit.worker.comm.phases import BACKWARD, FORWARD, Phases
from labkit.worker.comm.torch_internals import PIPELINE_STARTS, in_place_of

STAGES: Final = "torch.distributed.pipelining.stage"
SCHEDULES: Final = "torch.distributed.pipelining.schedules"


class Pipelines:
    """Records the passes of micro-batches: "forward 3", or "forward 3 of stage 1" for a rank with several stages.

    Zero-bubble schedules split a backward pass in two: "backward 3, inputs" and, later, "backward 3, weights".
    """

    def __init__(self, phases: Phases) -> None:
        self._phases = phases
        self._names: dict[tuple[Any, ...], tuple[str, str]] = {}  # with the line that first used each

    def install(self) -> None:
        """Wrap the stages now, or when they are imported."""
        when_imported(STAGES, self._wrap)
        when_imported(SCHEDULES, self._wrap_schedules)

    def _wrap_schedules(self, module: ModuleType) -> None:
        for name in ("PipelineScheduleSingle", "PipelineScheduleMulti"):
            schedule = getattr(module, name, None)
            if hasattr(schedule, "step"):
                schedule.step = in_place_of(schedule.step, self._phases.unrecorded)  # type: ignore[union-attr]

    def _wrap(self, module: ModuleType) -> None:
        for method, ours in (
            ("forward_one_chunk", self._forward),
            ("backward_one_chunk", self._backward),
            ("backward_weight_one_chunk", self._weights),
        ):
            for stage in module.PipelineStage.__mro__:
                if method in vars(stage):  # in the base class that all stages share
                    setattr(stage, method, in_place_of(getattr(stage, method), ours))
        if PIPELINE_STARTS.found:
            PIPELINE_STARTS.replace("_get_init_p2p_neighbors_ops", _to_others)

    def _forward(self, torchs: Callable[..., Any], stage: Any, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        return self._recorded(FORWARD, "", torchs, stage, fwd_chunk_id, *args, **kwargs)

    def _backward(self, torchs: Callable[..., Any], stage: Any, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if not stage.has_backward:
            return torchs(stage, bwd_chunk_id, *args, **kwargs)
        full = args[1] if len(args) > 1 else kwargs.get("full_backward", True)
        return self._recorded(BACKWARD, "" if full else ", inputs", torchs, stage, bwd_chunk_id, *args, **kwargs)

    def _weights(self, torchs: Callable[..., Any], stage: Any, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if not stage.has_backward:
            return torchs(stage, bwd_chunk_id, *args, **kwargs)
        return self._recorded(BACKWARD, ", weights", torchs, stage, bwd_chunk_id, *args, **kwargs)

    def _recorded(
        self, way: str, part: str, torchs: Callable[..., Any], stage: Any, number: int, *args: Any, **kwargs: Any
    ) -> Any:
        named = self._names.get((way, part, number, stage.stage_index, stage.num_stages)) or self._name(way, part, number, stage)
        return self._phases.call(way, named, torchs, stage, number, *args, **kwargs)

    def _name(self, way: str, part: str, number: int, stage: Any) -> tuple[str, str]:
        of_stage = f" of stage {stage.stage_index}" if stage.num_stages > stage.group_size else ""
        named = f"{way} {number}{of_stage}{part}", student_line()
        self._names[way, part, number, stage.stage_index, stage.num_stages] = named
        return named


def _to_others(torchs: Callable[..., Any], stage: Any) -> Any:
    """Return the messages with which a schedule begins, without those of a rank to itself, which gloo refuses.

    torch 2.11 has such messages if neighbouring stages are on one rank, as in the V of ZBV; they carry no data.
    """
    return [message for message in torchs(stage) if message.group_peer != stage.group_rank]
