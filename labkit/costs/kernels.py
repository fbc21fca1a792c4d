"""What operators of torch compute, read and write, and the memory that tensors occupy meanwhile."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch.nn import functional
from torch.utils.flop_counter import flop_registry

from labkit.costs.device import ATTENTION, Kernel

ALLOCATING: Final = ("empty", "new_empty")  # prefixes of operators that only allocate
FILLING: Final = ("new_", "zeros", "ones", "full", "fill", "rand", "uniform", "normal")  # of those that read nothing
VIEWS: Final = ("_unsafe_view",)  # of which torch does not say that they are views
PARTIAL: Final = ("embedding", "index", "index_select", "gather")  # read only the elements that they return
NO_KERNELS: Final = ("prim", "profiler")  # namespaces of operators that compute nothing
FOR_CPU: Final = "_for_cpu"  # in the names of attention's operators


def kernel_of(func: Any, args: Any, kwargs: Any, result: Any) -> Kernel | None:
    """Return the kernel of an operator that was called with these arguments; None if it computes nothing."""
    name = func.overloadpacket.__name__
    if name.startswith(ALLOCATING) or func.is_view or name in VIEWS or func.namespace in NO_KERNELS:
        return None
    written = _nbytes(tensors_in(result)) or _nbytes(changed_by(name, args, kwargs))
    given = list(tensors_in((args, kwargs)))
    read = _nbytes(given) - _nbytes(tensors_in(kwargs.get("out")))
    if name.startswith(FILLING):
        read = 0
    elif name in PARTIAL:
        read = written
    wide = any(tensor.is_floating_point() and tensor.itemsize > 2 for tensor in given[:2])
    return Kernel(name, _flops(func, args, kwargs, result), read, written, wide)


def changed_by(name: str, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors that an operator changes, such as `_foreach_add_` or one with `out=`."""
    return list(tensors_in(kwargs.get("out", args[0] if name.endswith("_") and args else ())))


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Return the floating-point operations of an operator, as `torch.utils.flop_counter` counts them.

    Causal attention skips half of them, which that counter does not consider.
    """
    operator = func.overloadpacket
    name = operator.__name__
    if FOR_CPU in name:  # it counts as much as that for a GPU, which alone is registered
        operator = getattr(torch.ops.aten, name.replace(FOR_CPU, ""))
    formula = flop_registry.get(operator)
    if formula is None:
        return 0
    causal = name.startswith(ATTENTION) and (kwargs.get("is_causal") or any(value is True for value in args))
    return float(formula(*args, **kwargs, out_val=result)) / (2 if causal else 1)


@contextlib.contextmanager
def without_cpu_libraries() -> Iterator[None]:
    """Keep torch from its libraries for CPUs.

    MKL-DNN's LSTM is one operator that says nothing of its work; NNPACK takes convolutions of 16 samples or more, whose
    results have another layout in memory, which other operators copy.
    """
    mkldnn: Any = torch.backends.mkldnn
    before, mkldnn.enabled = mkldnn.enabled, False
    try:
        with torch.backends.nnpack.flags(enabled=False):
            yield
    finally:
        mkldnn.enabled = before


@contextlib.contextmanager
def fused_attention() -> Iterator[None]:
    """Leave out the dropout of attention, with which torch keeps the matrix of all pairs on CPUs, but not on GPUs."""
    original = functional.scaled_dot_product_attention

    def attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,  # noqa: ARG001
        is_causal: bool = False,
        **others: Any,
    ) -> Any:
        return original(query, key, value, attn_mask, 0.0, is_causal, **others)

    functional.scaled_dot_product_attention = attention  # type: ignore[assignment]
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


class LiveTensors:
    """Counts the bytes of tensors as long as their storages exist."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self._live: dict[int, weakref.ref[Any]] = {}  # the storages that exist, by the id of the object
        self._nbytes: dict[int, int] = {}  # counted, of each

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the memory of new tensors from now on, until their storages are freed."""
        for tensor in tensors:
            self._count(tensor.untyped_storage())

    def resized(self, storage: Any) -> None:
        """Count the new size of a storage."""
        if id(storage) in self._live:
            self._count(storage)

    def changed(self) -> None:
        """Note that `live_bytes` has another value."""

    def freed(self, key: int) -> None:
        """Forget a storage; nothing else has its key any more."""
        del self._live[key]
        self._change(-self._nbytes.pop(key))

    def key_of(self, storage: Any) -> int:
        """Return what identifies a storage as long as it exists: torch keeps one Python object of each."""
        key = id(storage)
        if key not in self._live:
            self._live[key] = weakref.ref(storage, lambda _: self.freed(key))
            self._nbytes[key] = 0
        return key

    def _count(self, storage: Any) -> None:
        key, nbytes = self.key_of(storage), storage.nbytes()
        change, self._nbytes[key] = nbytes - self._nbytes[key], nbytes
        self._change(change)

    def _change(self, nbytes: int) -> None:
        self.live_bytes += nbytes
        if nbytes:
            self.changed()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, and in lists, tuples and dicts in it."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
