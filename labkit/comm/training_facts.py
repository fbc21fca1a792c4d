"""Notes facts about training, to be compared with those of other ranks after the run. It never communicates.

Facts that cost next to nothing are noted in every run. Sums of tensors are noted in a run with `check=True`, in the
first steps and in every tenth, so that they take a small part of the time; all ranks look at the same steps.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from labkit.comm.torch_internals import DDP_HOOKS
from labkit.recording.import_hook import when_imported
from labkit.recording.rank_facts import Fact, FactKind
from labkit.recording.record import student_line

__all__ = ["TrainingFacts"]

FIRST_STEPS: Final = 2  # are looked at, and then
EVERY: Final = 10  # each step with a multiple of this number
FEW_ELEMENTS: Final = 16  # tensors with fewer may well be equal
MOST_OPTIMIZERS: Final = 16  # a program may make one for each step
LOOKED_AT: Final = 64  # elements of a tensor, to tell whether all are whole numbers, or equal
INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


class TrainingFacts:
    """The facts of one rank.

    Attributes:
        checking: whether the run compares tensors.
    """

    def __init__(self) -> None:
        self._no_sync: list[Any] = []  # the models in whose `no_sync` the rank is
        self.begin_run(check=False)

    def begin_run(self, *, check: bool) -> None:
        """Forget the previous run."""
        self.checking = check
        self._facts: list[Fact] = []
        self._steps = self._backwards = 0  # of optimizers; backward passes
        self._optimizers: list[Any] = []
        self._models: list[Any] = []  # whose forward pass the program has called, not those inside
        self._samplers: list[Any] = []
        self._passes: list[tuple[int, Fact]] = []  # over samplers: steps and backward passes before it, and the fact
        self._given: set[int] = set()  # addresses of what was compared: after an all-reduce, it is the same everywhere
        self._finite = True  # whether all losses were
        self._loaders: set[str] = set()  # the lines of the noted ones
        self._reduced: dict[str, Fact] = {}  # the facts of kind `NO_SYNC` by line
        self._reductions: list[int] = []  # of the models in `_no_sync`, before the current backward pass

    def take(self) -> list[Fact]:
        """Return the facts of the run, and release what they were taken from."""
        if self.checking:
            for number in range(len(self._optimizers)):
                self._note_parameters(number)
            self._note_buffers()
        self._note(FactKind.THREADS, {"threads": torch.get_num_threads()})
        ends = [*(begun for begun, _ in self._passes[1:]), self._steps + self._backwards]
        for (begun, fact), end in zip(self._passes, ends, strict=False):
            fact.values["trained"] = end - begun
        facts = [replace(fact, values={name: _number(value) for name, value in fact.values.items()}) for fact in self._facts]
        self.begin_run(check=False)
        return facts

    def install(self) -> None:
        """Wrap the functions of torch that are no phase of training."""
        when_imported("torch.utils.data.distributed", self._watch_samplers)
        original, inside = DistributedDataParallel.no_sync, self._no_sync

        @contextlib.contextmanager
        def no_sync(model: Any) -> Iterator[None]:
            inside.append(model)
            try:
                with original(model):
                    yield
            finally:
                inside.remove(model)

        no_sync.__doc__ = original.__doc__
        DistributedDataParallel.no_sync = no_sync  # type: ignore[assignment, method-assign]

    def _watch_samplers(self, module: ModuleType) -> None:
        original = module.DistributedSampler.__iter__

        def iterate(sampler: Any) -> Iterator[Any]:
            fact = self._note_pass(sampler)
            yield from original(sampler)
            fact.values["complete"] = True

        module.DistributedSampler.__iter__ = iterate

    def _note(self, kind: FactKind, values: dict[str, Any], of: str = "", ranks: Iterable[int] = ()) -> Fact:
        fact = Fact(kind, self._steps, student_line(), of, tuple(ranks), values)
        self._facts.append(fact)
        return fact

    def _due(self) -> bool:
        """Whether the tensors of the current step are compared."""
        return self.checking and (self._steps < FIRST_STEPS or self._steps % EVERY == 0)

    def _note_pass(self, sampler: Any) -> Fact:
        values = {
            "epoch": sampler.epoch, "shuffle": sampler.shuffle, "samples": sampler.total_size, "size": len(sampler.dataset),
            "evaluates": not torch.is_grad_enabled(), "complete": False,
        }  # fmt: skip
        fact = self._note(FactKind.SAMPLER, values, f"sampler {_number_of(sampler, self._samplers)}")
        self._passes.append((self._steps + self._backwards, fact))
        return fact

    def loads(self, loader: Any) -> None:
        """Note that the program begins to iterate over a DataLoader."""
        line = student_line()
        if line not in self._loaders:
            self._loaders.add(line)
            self._note(FactKind.LOADER, {"workers": loader.num_workers})

    def forward(self, model: Any, inputs: Iterable[Any]) -> None:
        """Note a forward pass that the program begins."""
        if not self._due() or next(model.parameters(), None) is None:  # a loss may be a new module in each step
            return
        number = _number_of(model, self._models)
        ranks = _data_parallel_ranks(model) if model.training and torch.is_grad_enabled() else []
        tensors = [value for value in inputs if type(value) is Tensor]
        if ranks and any(not _is_constant(tensor) for tensor in tensors):
            sums = {f"input {i}": _sum(tensor) for i, tensor in enumerate(tensors)}
            rows = {"rows": len(tensors[0])} if tensors[0].dim() else {}
            self._note(FactKind.INPUTS, sums | rows, f"model {number}", ranks)

    def backward_begins(self) -> None:
        """Note that the program begins a backward pass."""
        self._reductions = [_collectives(model) for model in self._no_sync]

    def backward_ends(self, tensors: Any) -> None:
        """Note a backward pass from some tensors."""
        self._backwards += 1
        for model, before in zip(self._no_sync, self._reductions, strict=False):
            # torch decides in the forward pass whether the backward pass reduces, and keeps its decision here.
            if model.require_forward_param_sync and (reductions := _collectives(model) - before):
                line = student_line()
                fact = self._reduced.get(line) or self._note(FactKind.NO_SYNC, {"passes": 0, "reductions": 0})
                self._reduced[line] = fact
                fact.values["passes"] += 1
                fact.values["reductions"] += reductions
        # A GPU's loss would have to be waited for, and another kind of tensor may communicate.
        loss = tensors if type(tensors) is Tensor and tensors.device.type == "cpu" else None
        if self._finite and loss is not None and loss.numel() == 1 and not math.isfinite(loss.item()):
            self._finite = False
            self._note(FactKind.LOSS, {"loss": loss.detach()})
        if self._due():
            for number, model in enumerate(self._models):
                for ddp in _ddp_inside(model):
                    self._note_gradients(ddp, number)

    def _note_gradients(self, ddp: Any, number: int) -> None:
        if not ddp.require_backward_grad_sync or (DDP_HOOKS.found and DDP_HOOKS.of(ddp, "_comm_hooks")):
            return  # gradients may differ
        ignored = ddp.parameters_to_ignore
        named = {name: p.grad for name, p in ddp.module.named_parameters() if p.requires_grad and name not in ignored}
        sums = {name: None if gradient is None else _sum(gradient) for name, gradient in named.items()}
        self._note(FactKind.GRADIENTS, sums, f"model {number}", _ranks_of(ddp.process_group))

    def optimizer_begins(self, optimizer: Any) -> None:
        """Note that an optimizer begins to step."""
        if self.checking:
            known = len(self._optimizers)
            number = _number_of(optimizer, self._optimizers, MOST_OPTIMIZERS)
            if number == known or (number >= 0 and self._due()):
                self._note_parameters(number)

    def optimizer_ends(self) -> None:
        """Note that an optimizer has stepped."""
        self._steps += 1

    def _note_parameters(self, number: int) -> None:
        names = {id(p): name for model in self._models for name, p in model.named_parameters()}
        sums = {}
        parameters = [p for group in self._optimizers[number].param_groups for p in group["params"]]
        for i, parameter in enumerate(parameters):
            if not _is_sharded(parameter):
                name = names.get(id(parameter), "").removeprefix("module.") or f"parameter {i} of shape {list(parameter.shape)}"
                sums[name] = _sum(parameter)
        self._note(FactKind.PARAMETERS, sums, f"optimizer {number}")

    def _note_buffers(self) -> None:
        for number, model in enumerate(self._models):
            for ddp in _ddp_inside(model):
                buffers = [(n, b) for n, b in ddp.module.named_buffers() if type(b) is Tensor]
                means = {n: b.detach().float().mean() for n, b in buffers if b.is_floating_point() and b.numel()}
                if means:
                    self._note(FactKind.BUFFERS, means, f"model {number}", _ranks_of(ddp.process_group))

    def operand(self, name: str, tensor: Any, group: str, match: int) -> None:
        """Note what the rank gives to an all-gather or all-reduce, unless it is the result of an all-reduce."""
        if not self._due() or not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.numel() < FEW_ELEMENTS:
            return
        head = tensor.detach().reshape(-1)[:LOOKED_AT]
        address = tensor.untyped_storage().data_ptr()
        if bool((head == head.round()).all()) or address in self._given:  # counts may well be equal
            return
        self._given.add(address)
        self._note(FactKind.OPERAND, {name: _sum(tensor)}, f"{group} {match}")


def _number_of(thing: Any, things: list[Any], most: int | None = None) -> int:
    """Return the place of an object in a list, to which it is added if it is new; -1 if the list would be too long."""
    for number, known in enumerate(things):
        if known is thing:
            return number
    if most is not None and len(things) >= most:
        return -1
    things.append(thing)
    return len(things) - 1


def _sum(tensor: Tensor) -> Any:
    """Return the sum of a tensor's bits as 64-bit numbers, at the speed of memory; on a GPU, a tensor, read later."""
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        return None  # what a tensor of another type does is not known: it may communicate
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    whole = tensor.contiguous().reshape(-1).view(INTEGERS[tensor.element_size()])
    if whole.device.type != "cpu":
        return whole.sum(dtype=torch.int64)
    octets = whole.numpy().view(np.uint8)
    even = len(octets) // 8 * 8
    return int(np.add.reduce(octets[:even].view(np.uint64))) + int.from_bytes(octets[even:].tobytes(), "little")


def _is_constant(tensor: Tensor) -> bool:
    """Whether a tensor's first elements are equal, as in data that only take the place of others."""
    head = tensor.detach().reshape(-1)[:LOOKED_AT]
    return head.numel() > 1 and bool((head == head[:1]).all())


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _collectives(model: Any) -> int:
    """Return the number of collectives of a model's process group."""
    return getattr(model.process_group, "collectives", 0)


def _ddp_inside(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def _ranks_of(group: Any) -> list[int]:
    return torch.distributed.get_process_group_ranks(group)


def _data_parallel_ranks(model: Any) -> list[int]:
    """Return the ranks that train replicas, or shards, of a model with their own data; [] if that is not known."""
    for ddp in _ddp_inside(model):
        return _ranks_of(ddp.process_group)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(model, fsdp.FSDPModule):
        return []
    meshes = [p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")]
    # With more axes, ranks may share their data, as in tensor parallelism.
    return meshes[0].mesh.tolist() if meshes and all(mesh.ndim == 1 for mesh in meshes) else []


def _is_sharded(parameter: Any) -> bool:
    return any(not placement.is_replicate() for placement in getattr(parameter, "placements", ()))
