"""Records the phases of training without the program's help: forward, backward, optimizer and data.

Programs that do not know labkit call a module, `backward`, an optimizer's `step` and a `DataLoader`. Each of these
calls is a span, but only the outermost: a model is recorded, its layers are not. A forward pass inside a backward pass
is a "recomputation", as by `torch.utils.checkpoint`. Nothing is recorded inside a span of the program's own, nor while
the rank serves a call, which already has a span. Each pass of a micro-batch through a stage of
`torch.distributed.pipelining` is a span; other passes inside a schedule are not recorded, such as those of the loss
function, and those on empty tensors that find out shapes.

A wrapper of `Module.__call__` costs a fifth of torch's global module hooks, which run for each layer and make
`torch.compile` warn (docs/decisions.md). `torch.compile` makes the same graphs with the wrappers as without.
"""

from __future__ import annotations

import functools
import sys
from _thread import get_ident
from collections.abc import Callable
from functools import partial
from types import FrameType, ModuleType
from typing import Any, Final

import torch
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from labkit.recording.import_hook import when_imported
from labkit.recording.record import Recorder, clock, here, student_line
from labkit.recording.schema import AUTOMATIC, COMPUTE, DATA, OPTIMIZER
from labkit.recording.torch_internals import COMPILED_PHASES, DATA_LOADER, PIPELINE_STARTS, in_place_of
from labkit.worker.comm.backward import in_backward
from labkit.worker.comm.training_facts import TrainingFacts

FORWARD: Final = "forward"
BACKWARD: Final = "backward"
RECOMPUTATION: Final = "recomputation"
STAGES: Final = "torch.distributed.pipelining.stage"
SCHEDULES: Final = "torch.distributed.pipelining.schedules"


@functools.cache
def install() -> Phases:
    """Wrap torch's functions in this process, at the first call, and return what records the phases.

    The fork server does this for its ranks. Python notes a change of `Module.__call__` in every subclass; in a rank,
    that would take 5 ms and copy 440 pages of the server's memory.
    """
    phases = Phases()
    phases.wrap()
    when_imported(STAGES, partial(_wrap_stages, phases))
    when_imported(SCHEDULES, partial(_wrap_schedules, phases))
    return phases


class Phases:
    """Records the phases of training in this process, while it has a recorder."""

    def __init__(self) -> None:
        self._threads: dict[str, set[int]] = {phase: set() for phase in (FORWARD, BACKWARD, DATA)}  # that are in the phase
        self._stepping: dict[int, _Stepping] = {}  # per thread
        self.facts = TrainingFacts()

    def wrap(self) -> None:
        """Wrap torch's functions."""
        self._wrap(torch.nn.Module, "__call__", FORWARD)
        self._wrap(torch.autograd, "backward", BACKWARD)  # `Tensor.backward` calls it
        self._wrap(torch.autograd, "grad", BACKWARD)
        register_optimizer_step_pre_hook(lambda optimizer, *_: self._optimizer_begins(optimizer))
        register_optimizer_step_post_hook(lambda optimizer, *_: self._optimizer_ends(optimizer))
        when_imported("torch.utils.data.dataloader", self._wrap_loaders)
        self.facts.install()

    def _wrap_loaders(self, module: ModuleType) -> None:
        self._wrap(module.DataLoader, "__iter__", DATA)  # starts the worker processes
        if DATA_LOADER.found:
            self._wrap(DATA_LOADER["_BaseDataLoaderIter"], "__next__", DATA)

    def _wrap(self, owner: Any, name: str, phase: str) -> None:
        function = getattr(owner, name)
        function = getattr(function, "__labkit_original__", function)
        threads, call = self._threads[phase], self.call

        @functools.wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or get_ident() in threads:
                return function(*args, **kwargs)
            return call(phase, None, function, *args, **kwargs)

        recorded.__labkit_original__ = function  # type: ignore[attr-defined]
        _trace_through(recorded)
        setattr(owner, name, recorded)

    def call(self, phase: str, named: tuple[str, str] | None, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function that is a phase, and record it; calls of the same phase inside it are not recorded.

        `named`: name and line of a span that is recorded in any case; None for the phase's own, to which the module's
        rules apply.
        """
        threads, thread = self._threads[phase], get_ident()
        outermost = thread not in threads
        recorder = _recorder()
        end = self._begin(recorder, phase, named)
        threads.add(thread)
        noted = named is None and in_backward() == -1 and recorder is not None and thread == recorder.ring.main_thread
        try:
            if noted and phase == FORWARD and args:
                self.facts.forward(args[0], (*args[1:], *kwargs.values()))
            elif noted and phase == BACKWARD:
                self.facts.backward_begins()
            elif noted and phase == DATA and args and hasattr(args[0], "num_workers"):  # not its iterator, for each batch
                self.facts.loads(args[0])
            result = function(*args, **kwargs)
            if noted and phase == BACKWARD:
                self.facts.backward_ends(args[0] if args else None, accumulates=function.__name__ == "backward")
            return result
        finally:
            if outermost:
                threads.discard(thread)
            end()

    def unrecorded(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function, and record no forward and backward passes inside it but those with a name of their own."""
        thread = get_ident()
        quiet = [threads for phase in (FORWARD, BACKWARD) if thread not in (threads := self._threads[phase])]
        for threads in quiet:
            threads.add(thread)
        try:
            return function(*args, **kwargs)
        finally:
            for threads in quiet:
                threads.discard(thread)

    def _begin(self, recorder: Recorder | None, phase: str, named: tuple[str, str] | None = None) -> Callable[[], None]:
        """Begin a span, and return what ends it."""
        if recorder is None or is_compiling():  # the compiler traces passes that are not the program's
            return lambda: None
        recorder.automatic_steps.working()
        start_ns = clock()  # not earlier: the phase that begins a step belongs to it
        if named is None:
            if phase in (FORWARD, BACKWARD) and in_backward() != -1:
                if phase == BACKWARD:  # of a part of the graph, on a thread of torch's
                    return lambda: None
                phase = RECOMPUTATION
            if here.in_span():
                return lambda: None
            named = phase, student_line()
        name, line = named
        flags = AUTOMATIC | recorder.ring.thread_flags()
        device_clock = recorder.device_clock
        if device_clock is not None and phase != DATA:
            begun = device_clock.mark()
            return lambda: device_clock.ended(name, line, begun, flags)
        return lambda: recorder.ring.write(name, COMPUTE, start_ns, clock(), line=line, flags=flags)

    def _optimizer_begins(self, optimizer: Any) -> None:
        if is_dynamo_compiling():
            return
        outer = self._stepping.get(get_ident())
        if outer is not None and outer.goes_on():
            return  # an optimizer inside another, as in `ZeroRedundancyOptimizer`
        recorder = _recorder()
        if recorder is not None:
            recorder.automatic_steps.optimizer_begins(optimizer)
            self.facts.optimizer_begins(optimizer)
        self._stepping[get_ident()] = _Stepping(sys._getframe(2), self._begin(recorder, OPTIMIZER))

    def _optimizer_ends(self, optimizer: Any) -> None:
        if is_dynamo_compiling():
            return
        stepping = self._stepping.get(get_ident())
        if stepping is None or stepping.frame is not sys._getframe(2):
            return  # the step of an inner optimizer, or of a base class that the optimizer's own step calls
        del self._stepping[get_ident()]
        stepping.end()
        recorder = _recorder()
        if recorder is not None:
            recorder.automatic_steps.optimizer_ends(optimizer)
            self.facts.optimizer_ends(optimizer)


class _Stepping:
    """An optimizer's step in progress, with the frame of `step` and what ends the span.

    Torch calls no hook if the step raises; then this frame has left the stack.
    """

    def __init__(self, frame: FrameType, end: Callable[[], None]) -> None:
        self.frame, self.end = frame, end

    def goes_on(self) -> bool:
        """Whether the step is on this thread's stack."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is not None


def _recorder() -> Recorder | None:
    """Return what records this thread's phases: nothing in a forked process, nor while the rank serves a call."""
    recorder = here.recorder
    return None if recorder is None or get_ident() in recorder.ring.serving_threads else recorder


def _trace_through(wrapper: Any) -> None:
    """Let `torch.compile` trace through a wrapper, and start to compile at what it calls.

    It is told to leave labkit's files alone (`worker.comm.install`), so the wrapper names another. There is no public
    way to except one function. Without it, each layer of a compiled model breaks the graph; without `skip_code`, a
    wrapper is compiled with what it calls, and DistributedDataParallel's buckets are one graph. Test:
    `test_the_wrappers_are_no_part_of_a_graph`.
    """
    wrapper.__code__ = wrapper.__code__.replace(co_filename="<labkit phases>")

    def skip(_: ModuleType) -> None:
        if COMPILED_PHASES.found:
            COMPILED_PHASES["skip_code"](wrapper.__code__)

    when_imported("torch._dynamo.eval_frame", skip)


def _wrap_schedules(phases: Phases, module: ModuleType) -> None:
    for name in ("PipelineScheduleSingle", "PipelineScheduleMulti"):
        schedule = getattr(module, name, None)
        if hasattr(schedule, "step"):
            schedule.step = in_place_of(schedule.step, phases.unrecorded)  # type: ignore[union-attr]


def _wrap_stages(phases: Phases, module: ModuleType) -> None:
    """Record the passes of micro-batches: "forward 3", or "forward 3 of stage 1" for a rank with several stages.

    All schedules (GPipe, 1F1B, interleaved, zero-bubble) compute in three methods of the stage. Zero-bubble schedules
    split a backward pass in two: "backward 3, inputs" and, later, "backward 3, weights".
    """

    def passed(phase: str, part: str, torchs: Callable[..., Any], stage: Any, number: int, *args: Any, **kwargs: Any) -> Any:
        if phase == BACKWARD and not stage.has_backward:
            return torchs(stage, number, *args, **kwargs)
        if phase == BACKWARD and not part:
            full = args[1] if len(args) > 1 else kwargs.get("full_backward", True)
            part = "" if full else ", inputs"
        of_stage = f" of stage {stage.stage_index}" if stage.num_stages > stage.group_size else ""
        named = f"{phase} {number}{of_stage}{part}", student_line()
        return phases.call(phase, named, torchs, stage, number, *args, **kwargs)

    for method, phase, part in (
        ("forward_one_chunk", FORWARD, ""),
        ("backward_one_chunk", BACKWARD, ""),
        ("backward_weight_one_chunk", BACKWARD, ", weights"),
    ):
        for stage in module.PipelineStage.__mro__:
            if method in vars(stage):  # in the base class that all stages share
                setattr(stage, method, in_place_of(getattr(stage, method), partial(passed, phase, part)))
    PIPELINE_STARTS.apply(_get_init_p2p_neighbors_ops=_to_others)


def _to_others(torchs: Callable[..., Any], stage: Any) -> Any:
    """Return the messages with which a schedule begins, without those of a rank to itself, which gloo refuses.

    torch 2.11 has such messages if neighbouring stages are on one rank, as in the V of ZBV; they carry no data.
    """
    return [message for message in torchs(stage) if message.group_peer != stage.group_rank]
