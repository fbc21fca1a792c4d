"""Notes facts about training, to be compared with those of other ranks after the run. It never communicates.

Facts that cost next to nothing are noted in every run. Digests of tensors are noted in a run with `check=True`, in the
first steps and in every tenth, so that they take a small part of the time; all ranks look at the same steps. What goes
wrong here never reaches the program: the fact is left out. Models and samplers live no longer for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from labkit.recording.import_hook import when_imported
from labkit.recording.rank_facts import SKETCH, Fact, FactKind
from labkit.recording.record import student_line
from labkit.recording.torch_internals import DDP_HOOKS, MODES, wrap
from labkit.worker.comm.backward import in_backward

FIRST_STEPS: Final = 2  # are looked at, and then
EVERY: Final = 10  # each step with a multiple of this number
FEW_ELEMENTS: Final = 16  # tensors with fewer may well be equal
MOST_OPTIMIZERS: Final = 4  # are kept until the run ends; a program may make one for each step
MOST_ROWS: Final = 4096  # are noted as samples of the first step
LOOKED_AT: Final = 64  # elements of a tensor, to tell whether all are whole numbers, or equal
INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes
COLUMNS: Final = 1021  # a prime number: no rearrangement of rows leaves the digest on a GPU as it is
PLAIN: Final = (type(None), bool, int, float, str, torch.device, torch.dtype)  # arguments that are no data


def _apart(method: Callable[..., None]) -> Callable[..., None]:
    """Keep a method apart from the program: from its errors, and from modes that would see what it computes."""

    @functools.wraps(method)
    def noted(self: TrainingFacts, *args: Any, **kwargs: Any) -> None:
        counts = _counts_of_modes()
        if counts and not any(count() for count in counts):
            # Tensors of any kind may refuse any operation. Without `check`, nothing is computed with them.
            with contextlib.suppress(Exception), torch.no_grad() if self.checking else contextlib.nullcontext():
                method(self, *args, **kwargs)

    return noted


@functools.cache
def _counts_of_modes() -> tuple[Callable[[], int], ...]:
    """Return torch's functions that count the active modes; () if the installed version lacks them."""
    return tuple(MODES[name] for name in MODES.paths) if MODES.found else ()


class TrainingFacts:
    """The facts of one rank."""

    def __init__(self) -> None:
        self._no_sync: list[Any] = []  # the models in whose `no_sync` the rank is
        self._epochs: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # by sampler, the calls of `set_epoch`
        self._wrapped: WeakSet[Any] = WeakSet()  # modules of DistributedDataParallel
        self.begin_run(check=False)

    def begin_run(self, *, check: bool) -> None:
        """Forget the previous run."""
        self.checking = check  # whether the run compares tensors
        self._facts: list[Fact] = []
        self._steps = self._backwards = 0  # of optimizers; backward passes
        self._optimizers: list[Any] = []
        self._looked: set[int] = set()  # the steps whose tensors were noted
        self._models: list[ref[Any]] = []  # whose forward pass the program has called, not those inside
        self._samplers: list[ref[Any]] = []
        self._passes: list[tuple[int, Fact]] = []  # over samplers: steps and backward passes before it, and the fact
        self._given: set[int] = set()  # addresses of what was compared: after an all-reduce, it is the same everywhere
        self._finite = True  # whether all losses were
        self._loaders: set[str] = set()  # the lines of the noted ones
        self._rows = 0  # of inputs before the first step
        self._rough = False  # whether a model computed with fewer than 32 bits there
        self._reduced: dict[str, Fact] = {}  # the facts of kind `NO_SYNC` by line
        self._called: dict[int, Any] = {}  # by id, DDP models with a forward pass since the latest backward pass
        self._synced: set[int] = set()  # those of which that pass arranges reductions
        self._bypassed: WeakKeyDictionary[Any, Fact] = WeakKeyDictionary()  # of that kind by module
        self._unfed: WeakKeyDictionary[Any, Fact | None] = WeakKeyDictionary()  # by optimizer, of kind `NO_GRADIENTS`
        self._reductions: list[int] = []  # of the models in `_no_sync`, before the current backward pass

    def take(self) -> list[Fact]:
        """Return the facts of the run."""
        self._take()
        facts = [replace(fact, values={name: _number(value) for name, value in fact.values.items()}) for fact in self._facts]
        self.begin_run(check=False)
        return facts

    @_apart
    def _take(self) -> None:
        ends = [*(begun for begun, _ in self._passes[1:]), self._steps + self._backwards]
        for (begun, fact), end in zip(self._passes, ends, strict=False):
            fact.values["trained"] = end - begun
        run = {"threads": torch.get_num_threads(), "compared": len(self._looked), "backward passes": self._backwards}
        self._note(FactKind.RUN, run)
        for number, optimizer in enumerate(self._optimizers):
            self._note_parameters(optimizer, number, FactKind.LAST_PARAMETERS)
            self._note_sketches(optimizer, number, FactKind.LAST_VALUES)

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

        def registered(parent: Any, name: str, child: Any) -> None:
            if name == "module" and isinstance(parent, DistributedDataParallel):
                self._wrapped.add(child)

        no_sync.__doc__ = original.__doc__
        DistributedDataParallel.no_sync = no_sync  # type: ignore[assignment, method-assign]
        # A wrapper of `__init__` would be on the stack, and torch's warnings about arguments would name its line.
        register_module_module_registration_hook(registered)

    def _watch_samplers(self, module: ModuleType) -> None:
        def iterate(original: Callable[..., Iterator[Any]], sampler: Any) -> Iterator[Any]:
            return self._passed(original(sampler), self._note_pass(sampler))

        def set_epoch(original: Callable[..., None], sampler: Any, epoch: int) -> None:
            self._epochs[sampler] = self._epochs.get(sampler, 0) + 1
            original(sampler, epoch)

        wrap(module.DistributedSampler, __iter__=iterate, set_epoch=set_epoch)

    @staticmethod
    def _passed(items: Iterator[Any], fact: Fact) -> Iterator[Any]:
        yield from items
        fact.values["complete"] = True

    def _note(self, kind: FactKind, values: dict[str, Any], of: str = "", ranks: Iterable[int] = ()) -> Fact:
        fact = Fact(kind, self._steps, student_line(), of, tuple(ranks), values)
        self._facts.append(fact)
        return fact

    def _due(self) -> bool:
        """Whether the tensors of this step are compared; before an optimizer has stepped, of this backward pass."""
        step = self._steps or self._backwards
        due = self.checking and (step < FIRST_STEPS or step % EVERY == 0)
        if due:
            self._looked.add(step)
        return due

    def _note_pass(self, sampler: Any) -> Fact:
        values = {
            "epoch": sampler.epoch, "shuffle": sampler.shuffle, "samples": sampler.total_size, "size": len(sampler.dataset),
            "evaluates": not torch.is_grad_enabled(), "complete": False, "set_epoch": self._epochs.get(sampler, 0),
            "seed": sampler.seed,
        }  # fmt: skip
        fact = self._note(FactKind.SAMPLER, values, f"sampler {_number_of(sampler, self._samplers)}")
        self._passes.append((self._steps + self._backwards, fact))
        return fact

    @_apart
    def loads(self, loader: Any) -> None:
        """Note that the program begins to iterate over a DataLoader."""
        line = student_line()
        if line not in self._loaders:
            self._loaders.add(line)
            self._note(FactKind.LOADER, {"workers": loader.num_workers})

    def forward(self, model: Any, inputs: Iterable[Any]) -> None:
        """Note a forward pass that the program begins."""
        grad = torch.is_grad_enabled()
        if grad and isinstance(model, DistributedDataParallel):
            self._calls(model)
        elif grad and self._wrapped:
            self._note_bypassed(model)
        trains = grad and model.training
        if self.checking and trains and not self._steps:
            self._note_samples(model, inputs)
        if self._due():
            self._note_inputs(model, inputs, trains=trains)

    @_apart
    def _note_bypassed(self, module: Any) -> None:
        if module in self._wrapped and module not in self._bypassed:
            self._bypassed[module] = self._note(FactKind.BYPASSED, {"steps": 0, "called": False})

    def _calls(self, ddp: Any) -> None:
        if ddp.module not in self._bypassed:
            self._bypassed[ddp.module] = Fact(FactKind.BYPASSED, self._steps, "")
        self._bypassed[ddp.module].values["called"] = True
        self._called[id(ddp)] = ddp
        if ddp.require_backward_grad_sync:
            self._synced.add(id(ddp))

    @_apart
    def _note_samples(self, model: Any, inputs: Iterable[Any]) -> None:
        self._rough |= torch.is_autocast_enabled("cpu")
        batch = next((value for value in inputs if not isinstance(value, PLAIN)), None)
        if type(batch) is not Tensor or not batch.dim() or next(nn.Module.parameters(model), None) is None:
            return
        if batch.grad_fn is None:  # else another model has computed it
            self._rows += len(batch)
            rows = [_number(_digest(row)) for row in batch] if self._rows <= MOST_ROWS else None
            self._note(FactKind.SAMPLES, {"rows": rows})

    @_apart
    def _note_inputs(self, model: Any, inputs: Iterable[Any], *, trains: bool) -> None:
        if next(nn.Module.parameters(model), None) is None:  # a loss may be a new module in each step
            return
        number = _number_of(model, self._models)
        for ddp in _ddp_inside(model) if trains else ():
            self._calls(ddp)
        ranks = _data_parallel_ranks(model) if trains else []
        data = [value for value in inputs if not isinstance(value, PLAIN)]
        if ranks and any(type(value) is not Tensor or not _is_constant(value) for value in data):
            digests = {f"input {i}": _digest(value) if type(value) is Tensor else None for i, value in enumerate(data)}
            rows = {"rows": len(data[0])} if type(data[0]) is Tensor and data[0].dim() else {}
            self._note(FactKind.INPUTS, digests | rows, f"model {number}", ranks)

    def backward_begins(self) -> None:
        """Note that the program begins a backward pass."""
        self._reductions = [_collectives(model) for model in self._no_sync]

    @_apart
    def backward_ends(self, tensors: Any, *, accumulates: bool) -> None:
        """Note a backward pass from some tensors; `accumulates` unless it only returns gradients."""
        if not accumulates:
            return
        self._backwards += 1
        called, synced = self._called, self._synced
        self._called, self._synced = {}, set()
        for model, before in zip(self._no_sync, self._reductions, strict=False):
            # torch decides in the forward pass whether the backward pass reduces.
            if id(model) in synced and (reductions := _collectives(model) - before):
                line = student_line()
                fact = self._reduced.get(line) or self._note(FactKind.NO_SYNC, {"reductions": 0})
                self._reduced[line] = fact
                fact.values["reductions"] += reductions
        # A GPU's loss would have to be waited for, and another kind of tensor may communicate.
        loss = tensors if type(tensors) is Tensor and tensors.is_cpu else None
        if self._finite and loss is not None and loss.numel() == 1 and not math.isfinite(loss.item()):
            self._finite = False
            self._note(FactKind.LOSS, {"loss": loss.detach()})
        if self._due():
            for ddp in called.values():
                self._note_gradients(ddp)

    def _note_gradients(self, ddp: Any) -> None:
        if not ddp.require_backward_grad_sync or _has_hook(ddp):
            return
        named = {n: p.grad for n, p in _averaged_by(ddp).items() if p.requires_grad}
        digests = {name: None if gradient is None else _digest(gradient) for name, gradient in named.items()}
        self._note(FactKind.GRADIENTS, digests, f"gradients of {len(named)}", _ranks_of(ddp.process_group))

    def optimizer_begins(self, optimizer: Any) -> None:
        """Note that an optimizer begins to step."""
        if self._bypassed or self.checking:
            self._note_begun(optimizer)

    @_apart
    def _note_begun(self, optimizer: Any) -> None:
        for module, fact in self._bypassed.items():
            if not fact.values["called"] and _optimizes(optimizer, module):
                fact.values["steps"] += 1
        if self.checking:
            number = self._number_of_optimizer(optimizer)
            if number == len(self._optimizers) < MOST_OPTIMIZERS:
                self._optimizers.append(optimizer)
                self._note_parameters(optimizer, number)
                self._note_sketches(optimizer, number, FactKind.FIRST_GRADIENTS)
            elif number < MOST_OPTIMIZERS and self._due():
                self._note_parameters(optimizer, number)

    def optimizer_ends(self, optimizer: Any) -> None:
        """Note that an optimizer has stepped."""
        self._note_unfed(optimizer)
        due = self._due()
        self._steps += 1
        if due:
            self._note_stepped(optimizer)

    @_apart
    def _note_unfed(self, optimizer: Any) -> None:
        known = optimizer in self._unfed
        if known and self._unfed[optimizer] is None:
            return  # it had gradients at its first step
        fed = any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
        if not known:
            self._unfed[optimizer] = None if fed else self._note(FactKind.NO_GRADIENTS, {"steps": 0, "others": False})
        fact = self._unfed[optimizer]
        if fact is not None:
            fact.values["steps"] += 1
            fact.values["others"] |= fed

    @_apart
    def _note_stepped(self, optimizer: Any) -> None:
        self._note_buffers()
        number = self._number_of_optimizer(optimizer)
        if number < len(self._optimizers):
            self._note_parameters(optimizer, number)

    def _number_of_optimizer(self, optimizer: Any) -> int:
        return next((i for i, known in enumerate(self._optimizers) if known is optimizer), len(self._optimizers))

    def _note_parameters(self, optimizer: Any, number: int, kind: FactKind = FactKind.PARAMETERS) -> None:
        averaging = [ddp for model in self._living_models() for ddp in _ddp_inside(model) if not _has_hook(ddp)]
        groups = [(ddp, tuple(_ranks_of(ddp.process_group))) for ddp in averaging]
        averaged = {id(p): ranks for ddp, ranks in groups if len(ranks) > 1 for p in _averaged_by(ddp).values()}
        digests: dict[tuple[int, ...], dict[str, Any]] = {}
        for name, parameter in self._named(optimizer).items():
            if _is_sharded(parameter):
                continue
            digests.setdefault(averaged.get(id(parameter), ()), {})[name] = _digest(parameter)
        for ranks, of_ranks in digests.items():
            self._note(kind, of_ranks, f"{'averaged ' if ranks else ''}optimizer {number}", ranks)
            if ranks and kind is FactKind.PARAMETERS:
                rates = {f"group {i}": float(group.get("lr", 0)) for i, group in enumerate(optimizer.param_groups)}
                self._note(FactKind.RATES, rates, f"optimizer {number}", ranks)

    def _note_sketches(self, optimizer: Any, number: int, kind: FactKind) -> None:
        of_gradients = kind is FactKind.FIRST_GRADIENTS
        sketches = {}
        for name, parameter in self._named(optimizer).items():
            tensor = parameter.grad if of_gradients else parameter
            if tensor is not None:
                unread = _is_sharded(parameter) or (of_gradients and self._rough)
                sketches[name] = None if unread else _sketch(tensor)
        self._note(kind, sketches, f"optimizer {number}")

    def _named(self, optimizer: Any) -> dict[str, Any]:
        names = {id(p): name for model in self._living_models() for name, p in nn.Module.named_parameters(model)}
        found: dict[str, Any] = {}
        for i, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            name = names.get(id(parameter), "").removeprefix("module.") or f"parameter {i}"
            found[f"{name} of parameter {i}" if name in found else name] = parameter
        return found

    def _living_models(self) -> list[Any]:
        return [model for known in self._models if (model := known()) is not None]

    def _note_buffers(self) -> None:
        for number, known in enumerate(self._models):
            for ddp in _ddp_inside(known()) if known() is not None else ():
                buffers = dict(ddp.module.named_buffers())
                values = {}
                for name, mean in buffers.items():
                    variance = buffers.get(name.removesuffix("running_mean") + "running_var")
                    if name.endswith("running_mean") and type(mean) is type(variance) is Tensor:
                        values[name] = mean.float().mean()
                        values[f"{name}, deviation"] = variance.float().mean().sqrt()
                if values:
                    self._note(FactKind.BUFFERS, values, f"model {number}", _ranks_of(ddp.process_group))

    @_apart
    def operand(self, name: str, tensor: Any, group: str, match: int) -> None:
        """Note what the rank gives to an all-gather or all-reduce, unless it is the result of an all-reduce."""
        if not self._due() or type(tensor) not in (Tensor, nn.Parameter) or tensor.numel() < FEW_ELEMENTS:
            return
        address = tensor.untyped_storage().data_ptr()
        head = tensor.detach().reshape(-1)[:LOOKED_AT]
        counts = not tensor.is_floating_point() or bool((head == head.round()).all()) or _is_constant(tensor)
        if counts or address in self._given:  # counts may well be equal
            return
        self._given.add(address)
        fact = Fact(FactKind.OPERAND, self._steps, "" if in_backward() != -1 else student_line(), f"{group} {match}")
        fact.values[name] = _digest(tensor)
        self._facts.append(fact)


def _number_of(thing: Any, things: list[ref[Any]]) -> int:
    """Return the place of an object in a list, to which it is added if it is new."""
    for number, known in enumerate(things):
        if known() is thing:
            return number
    things.append(ref(thing))
    return len(things) - 1


def _digest(tensor: Tensor) -> Any:
    """Return a number that is the same for tensors with the same bits, and hardly for others; None if there is none.

    For a tensor on a GPU, it is a tensor, read later.
    """
    plain = _readable(tensor)
    if plain is None:
        return None
    if plain.device.type == "cpu":
        # Not `Tensor.numpy`, after which the program can no longer resize the tensor.
        return zlib.crc32((ctypes.c_char * plain.nbytes).from_address(plain.data_ptr())) if plain.nbytes else 0
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    words = plain.reshape(-1).view(INTEGERS[plain.element_size()])
    rows = len(words) // COLUMNS
    columns = words[: rows * COLUMNS].view(rows, COLUMNS).sum(0, dtype=torch.int64)
    columns[: len(words) - rows * COLUMNS] += words[rows * COLUMNS :]
    return (columns * torch.arange(1, 2 * COLUMNS, 2, device=words.device)).sum()


def _sketch(tensor: Tensor) -> Any:
    """Return sums of a tensor's elements with fixed weights, one for each part of it; None if they are too rough."""
    plain = _readable(tensor)
    if plain is None or not plain.is_floating_point() or plain.element_size() < 4:
        return None
    elements = plain.reshape(-1)
    weights = torch.arange(min(max(len(elements), 1), COLUMNS), dtype=elements.dtype, device=elements.device).cos()
    rows = nn.functional.pad(elements, (0, -len(elements) % len(weights))).view(-1, len(weights))
    return torch.stack([part.sum(dtype=torch.float64) for part in (rows * weights).reshape(-1).tensor_split(SKETCH)])


def _readable(tensor: Tensor) -> Tensor | None:
    """Return a tensor's elements on this rank, one after the other; None for a tensor that has none to be read."""
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        return None  # what a tensor of another type does is not known: it may communicate
    last = tensor.storage_offset() + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() and tensor.untyped_storage().nbytes() < (last + 1) * tensor.element_size():
        return None  # the program has freed it, as FSDP2 does
    return tensor.resolve_conj().resolve_neg().contiguous()


def _is_constant(tensor: Tensor) -> bool:
    """Whether a tensor's first elements are equal, as in data that only take the place of others."""
    head = tensor.detach().reshape(-1)[:LOOKED_AT]
    return head.numel() > 1 and bool((head == head[:1]).all())


def _number(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


def _collectives(model: Any) -> int:
    return getattr(model.process_group, "collectives", 0)


def _ddp_inside(model: Any) -> list[Any]:
    return [module for module in nn.Module.modules(model) if isinstance(module, DistributedDataParallel)]


def _optimizes(optimizer: Any, module: Any) -> bool:
    own = {id(p) for p in nn.Module.parameters(module)}
    return any(id(p) in own for group in optimizer.param_groups for p in group["params"])


def _has_hook(ddp: Any) -> bool:
    """Whether the program has a communication hook, which may let gradients differ, as for local SGD."""
    return bool(DDP_HOOKS.found and DDP_HOOKS.of(ddp, "_comm_hooks"))


def _averaged_by(ddp: Any) -> dict[str, Any]:
    return {n: p for n, p in nn.Module.named_parameters(ddp.module) if n not in ddp.parameters_to_ignore}


def _ranks_of(group: Any) -> list[int]:
    return torch.distributed.get_process_group_ranks(group)


def _data_parallel_ranks(model: Any) -> list[int]:
    """Return the ranks that train replicas, or shards, of a model with their own data; [] if that is not known."""
    for ddp in _ddp_inside(model):
        return _ranks_of(ddp.process_group)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(model, fsdp.FSDPModule):
        return []
    meshes = [p.device_mesh for p in nn.Module.parameters(model) if hasattr(p, "device_mesh")]
    # With more axes, ranks may share their data, as in tensor parallelism.
    return meshes[0].mesh.tolist() if meshes and all(mesh.ndim == 1 for mesh in meshes) else []


def _is_sharded(parameter: Any) -> bool:
    return any(not placement.is_replicate() for placement in getattr(parameter, "placements", ()))
