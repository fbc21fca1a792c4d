"""`track_memory`: parameters, gradients, optimizer state and activations in a rank's memory over time.

It relies on what torch reports anyway: tensors that autograd saves for the backward pass, accumulated gradients,
optimizer steps, and storages that Python code resizes, as FSDP2 does. Operators run unchanged. A mode that intercepts
every operator, such as torch's MemTracker, also sees temporaries, but makes a step take up to four times as long.
"""

from __future__ import annotations

import contextlib
import reprlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

from labkit.recording.record import clock, here
from labkit.recording.ring_buffer import RingWriter
from labkit.recording.schema import MEMORY, MEMORY_KINDS
from labkit.recording.torch_internals import SAVED_TENSORS

APART_NS: Final = 200_000  # minimum spacing of the curve's points, except peaks and valleys, which are all kept
NEVER_NS: Final = 1 << 62

Key = tuple[int, int, int]


def track_memory(*objects: Any) -> AbstractContextManager[None]:
    """Track what occupies this rank's memory: `with track_memory(model, optimizer):` around the training loop.

    `labkit.memory(run)` draws the result. Memory is counted in bytes of this rank, by kind:

    - parameters: the parameters and buffers of the modules; of sharded ones (FSDP2, DTensor), this rank's shard; and
      other tensors that an optimizer updates, such as shards that the program keeps itself
    - gathered parameters: what FSDP2 has gathered for the layer in progress, until it frees it; and parameters whose
      storage the program has emptied and fills again
    - gradients: `.grad` of the parameters; of sharded ones, this rank's shard
    - buckets: in which DistributedDataParallel sends gradients, if it is among the modules; none if the gradients are
      views of them (`gradient_as_bucket_view=True`)
    - optimizer state: the state of every optimizer that makes a step
    - activations: what autograd saves for the backward pass, including the batch
    - other: on CUDA only, the rest of what the allocator holds for tensors. On the CPU, temporaries are not seen, such
      as the full gradients of a sharded layer before they are reduced

    Each piece of memory counts once, as the first kind that it belongs to.

    Recording costs a few microseconds per saved tensor; outside a group nothing happens.

    Args:
        objects: at least one module, and the optimizers that already have state.

    Returns:
        the context manager.

    Raises:
        TypeError: the objects include no module, or include something that is neither a module nor an optimizer.
    """
    recorder = here.recorder
    if recorder is None:
        return contextlib.nullcontext()
    import torch

    modules = [o for o in objects if isinstance(o, torch.nn.Module)]
    optimizers = [o for o in objects if isinstance(o, torch.optim.Optimizer)]
    if not modules or len(modules) + len(optimizers) < len(objects):
        known = (torch.nn.Module, torch.optim.Optimizer)
        given = ", ".join(type(o).__name__ if isinstance(o, known) else reprlib.repr(o) for o in objects)
        raise TypeError(f"track_memory({given}): expected modules and optimizers, as in track_memory(model, optimizer)")
    on = next((p.device for m in modules for p in m.parameters() if p.device.type == "cuda"), None)
    allocated = None if on is None else lambda: int(torch.cuda.memory_allocated(on))
    return Tracker(recorder.ring, modules, optimizers, allocated).following()


@dataclass(slots=True)
class _Storage:
    """A storage of one kind."""

    kind: str
    nbytes: int  # when last counted
    end: weakref.ref[Any]  # reports its deletion


class Tracker:
    """Tracks the memory of modules, and of the optimizers that already have state.

    `allocated` returns how many bytes the device's allocator holds; None if there is no allocator to ask.
    """

    def __init__(
        self, ring: RingWriter, modules: list[Any], optimizers: list[Any], allocated: Callable[[], int] | None = None,
        now: Callable[[], int] = clock,
    ) -> None:  # fmt: skip
        self._ring, self._modules, self._optimizers, self._allocated, self._now = ring, modules, optimizers, allocated, now
        self._lock = threading.RLock()  # reentrant: any thread may free a tensor, even this one while it counts
        self._bytes = dict.fromkeys(MEMORY_KINDS, 0)
        self._written: dict[str, int] = {}
        self._written_ns = self._at_ns = now()
        self._rising = True
        self._storages: dict[int, _Storage] = {}  # counted as another kind, so not as activations as well
        self._saved: dict[Key, int] = {}  # how many graph nodes hold each tensor
        self._states: dict[int, int] = {}  # per optimizer: how many parameters had state when last checked

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Track memory inside this context."""
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self._written_ns = NEVER_NS  # existing memory becomes one point, however long it takes to count
        parameters = [p for m in self._modules for p in m.parameters()]
        handles = [
            register_optimizer_step_pre_hook(lambda optimizer, *_: self._before_step(parameters, optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, *_: self._state_of(optimizer)),
        ]
        for tensor in (*parameters, *(b for m in self._modules for b in m.buffers())):
            self._own("parameters", tensor)
        for p in parameters:
            if p.requires_grad:
                # Before all other hooks: one of them may free the gradient, as ZeRO 2 does. Torch calls hooks in the
                # order in which they entered the dictionary.
                handle = p.register_post_accumulate_grad_hook(lambda p: self._gradients((p,)))
                hooks = handle.hooks_dict_ref()
                for other in [key for key in hooks if key != handle.id]:
                    hooks[other] = hooks.pop(other)
                handles.append(handle)
        for layer, within in _gathering(self._modules):
            # The first hook runs once the layer's parameters are gathered, the second once FSDP2 has freed them or kept
            # a part.
            handles.append(layer.register_forward_pre_hook(lambda _, __, within=within: self._gathered(within)))
            handles.append(layer.register_forward_hook(lambda *_, within=within: self._gathered(within)))
        self._gradients(parameters)
        self.count("buckets", sum(p.nbytes for p in _sent_in_buckets(self._modules)))
        for optimizer in self._optimizers:
            self._before_step((), optimizer)
            self._state_of(optimizer)
        self._written_ns = self._at_ns
        try:
            saving = torch.autograd.graph.saved_tensors_hooks(lambda tensor: _Saved(self, tensor), _Saved.tensor)
            with resizing_reported(self._resized), saving:
                yield
        finally:
            for handle in handles:
                handle.remove()
            with self._lock:
                self._write()  # the last change, at its own time
                self._at_ns = self._now()
                self._write(last=True)
                self._ring = None  # type: ignore[assignment]  # memory that is freed later is no longer tracked

    def count(self, kind: str, nbytes: int) -> None:
        """Add bytes to one kind; a negative number removes them."""
        with self._lock:
            if self._ring is None or not nbytes:
                return
            now, rising = self._now(), nbytes > 0
            if rising != self._rising or now - self._written_ns > APART_NS:
                self._write()  # the values before this change: a peak or a valley
                self._rising = rising
            self._bytes[kind] += nbytes
            self._at_ns = now

    def save(self, tensor: Any) -> Key | None:
        """Count a tensor that a graph node saves; return the key for its release, or None if it is of another kind."""
        tensor = _local(tensor)
        storage = tensor.untyped_storage()
        if id(storage) in self._storages:  # torch keeps the same object as long as the memory
            return None
        nbytes = min(tensor.nbytes, storage.nbytes())
        key = id(storage), tensor.storage_offset(), nbytes
        with self._lock:
            self._saved[key] = self._saved.get(key, 0) + 1
            if self._saved[key] == 1:
                self.count("activations", nbytes)
        return key

    def let_go(self, key: Key) -> None:
        """Release a tensor that a graph node no longer needs."""
        with self._lock:
            self._saved[key] -= 1
            if not self._saved[key]:
                del self._saved[key]
                self.count("activations", -key[2])

    def _own(self, kind: str, tensor: Any) -> None:
        """Count a tensor's storage as one kind until it is freed."""
        storage = _local(tensor).untyped_storage()
        key = id(storage)
        with self._lock:
            if key in self._storages:
                return

            def died(_: object) -> None:
                with self._lock:
                    self.count(kind, -self._storages.pop(key).nbytes)

            self._storages[key] = _Storage(kind, storage.nbytes(), weakref.ref(storage, died))
            self.count(kind, storage.nbytes())

    def _resized(self, storage: Any) -> None:
        """Count the new size of a storage: FSDP2 empties the storages of gathered parameters and fills them again."""
        with self._lock:
            known = self._storages.get(id(storage))
            if known is not None:
                before, known.nbytes = known.nbytes, storage.nbytes()
                if not before and known.kind == "parameters":
                    known.kind = "gathered parameters"
                self.count(known.kind, known.nbytes - before)

    def _before_step(self, parameters: Any, optimizer: Any) -> None:
        """Count the gradients, and what the optimizer updates besides the modules' parameters."""
        updated = [p for group in optimizer.param_groups for p in group["params"]]
        for p in updated:
            self._own("parameters", p)
        self._gradients([*parameters, *updated])

    def _gradients(self, parameters: Any) -> None:
        for p in parameters:
            if p.grad is not None:
                self._own("gradients", p.grad)

    def _state_of(self, optimizer: Any) -> None:
        """Count an optimizer's state if it has grown since the last check."""
        if self._states.get(id(optimizer)) != len(optimizer.state):
            self._states[id(optimizer)] = len(optimizer.state)
            for of_parameter in optimizer.state.values():
                for value in of_parameter.values() if isinstance(of_parameter, dict) else ():
                    if hasattr(value, "untyped_storage"):
                        self._own("optimizer state", value)

    def _gathered(self, layers: list[Any]) -> None:
        for layer in layers:
            for parameter in layer.parameters(recurse=False):
                self._own("gathered parameters", parameter)

    def _write(self, *, last: bool = False) -> None:
        """Write the kinds that changed, at the time of the last change; the `last` time, every kind ever written."""
        if self._allocated is not None:
            known = sum(self._bytes.values()) - self._bytes["other"]
            self._bytes["other"] = max(self._allocated() - known, 0)
        self._written_ns = self._at_ns
        for kind, nbytes in self._bytes.items():
            if nbytes != self._written.get(kind, 0) or (last and kind in self._written):
                self._ring.write_scalar(MEMORY + kind, self._at_ns, float(nbytes))
                self._written[kind] = nbytes


class _Saved:
    """A tensor that autograd saves for the backward pass; reports its own release."""

    __slots__ = ("_held", "_key", "_tracker", "_version")

    def __init__(self, tracker: Tracker, tensor: Any) -> None:
        self._held, self._version = tensor, _version(tensor)
        self._tracker, self._key = tracker, tracker.save(tensor)

    def tensor(self) -> Any:
        """Return the tensor as it was saved.

        Raises:
            RuntimeError: it was modified since; torch itself does not check this for tensors saved through hooks.
        """
        version = _version(self._held)
        if version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {list(self._held.shape)} is at version {version}, saved was {self._version}"
            )
        return self._held

    def __del__(self) -> None:
        if self._key is not None:
            self._held = None
            self._tracker.let_go(self._key)


def _local(tensor: Any) -> Any:
    """Return this rank's own memory of a tensor: a DTensor's shard, and the result behind a functional collective."""
    if hasattr(tensor, "to_local"):
        from torch import no_grad

        with no_grad():
            tensor = tensor.to_local()
    return getattr(tensor, "elem", tensor)


def _version(tensor: Any) -> int:
    """Return a number that changes with each modification of the tensor; 0 if torch has none."""
    return int(SAVED_TENSORS.of(tensor, "_version")) if SAVED_TENSORS.found else 0


def _sent_in_buckets(modules: list[Any]) -> Iterator[Any]:
    """Yield the parameters whose gradients DistributedDataParallel copies into buckets, which it creates in C++."""
    from torch.nn.parallel import DistributedDataParallel

    for layer in dict.fromkeys(layer for module in modules for layer in module.modules()):
        if isinstance(layer, DistributedDataParallel) and not layer.gradient_as_bucket_view:
            yield from (p for p in layer.parameters() if p.requires_grad)


def _gathering(modules: list[Any]) -> Iterator[tuple[Any, list[Any]]]:
    """Yield the layers at whose start parameters may be gathered, each with the inner layers that may own them.

    For each module that FSDP2 manages, it gathers all parameters at once, except those of inner modules that it manages
    separately.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    given = getattr(fsdp, "FSDPModule", ())  # without FSDP2: (), which matches no layer

    def has_own(module: Any) -> bool:
        return next(module.parameters(recurse=False), None) is not None

    for layer in dict.fromkeys(layer for module in modules for layer in module.modules()):
        if isinstance(layer, given):
            within = list(layer.modules())
            elsewhere = {id(inner) for other in within[1:] if isinstance(other, given) for inner in other.modules()}
            yield layer, [inner for inner in within if has_own(inner) and id(inner) not in elsewhere]
        elif has_own(layer):
            yield layer, [layer]


@contextlib.contextmanager
def resizing_reported(tell: Callable[[Any], None]) -> Iterator[None]:
    """Inside this context, call `tell` with each storage that Python code has resized."""
    from torch import UntypedStorage

    resize = UntypedStorage.resize_

    def resize_and_tell(storage: Any, nbytes: Any) -> Any:
        resized = resize(storage, nbytes)
        tell(storage)
        return resized

    UntypedStorage.resize_ = resize_and_tell  # type: ignore[assignment,method-assign]  # its argument has a different name
    try:
        yield
    finally:
        if UntypedStorage.resize_ is resize_and_tell:  # otherwise a context begun inside this one has not ended
            UntypedStorage.resize_ = resize  # type: ignore[method-assign]
