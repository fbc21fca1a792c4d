"""Records each operator that a simulated rank's program calls, while tensors have shapes but no data.

Integers are exceptions: operators compute them as long as they depend on no data and on no message. Torch decides by
such numbers itself: the coordinates in a device mesh, the order of a sampler, the buckets of DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.distributed import get_global_rank

from labkit.costs.kernels import changed_by, kernel_of, tensors_in
from labkit.errors.exceptions import LabError
from labkit.group.simulation.rank_log import RankLog, is_fake
from labkit.group.simulation.refused_calls import check_device
from labkit.recording.operations import OTHER, type_of
from labkit.recording.torch_internals import DISPATCH, SIMULATION

INDEXING: Final = ("index", "index_put", "index_put_")  # take indices as their second argument
COLLECTIVES: Final = "_c10d_functional"


def kernel_mode(log: RankLog) -> Any:
    """Return a context manager in which operators are recorded in `log`; `FakeTensorMode` must be active around it."""
    fake_tensor = SIMULATION["FakeTensor"]
    plain = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, fake_tensor}
    undecidable = tuple(SIMULATION[name] for name in ("DynamicOutputShapeException", "DataDependentOutputException"))

    dispatch_mode: Any = DISPATCH["TorchDispatchMode"]

    class KernelMode(dispatch_mode):  # type: ignore[misc]  # a class of torch's, looked up by name
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if not plain.issuperset(types):
                return NotImplemented  # DTensor and others call operators on the tensors that they consist of
            if kwargs.get("device") is not None:
                check_device(kwargs["device"])
            name = func.overloadpacket.__name__
            if name in INDEXING:
                args = args[0], self._positions(args[1]), *args[2:]
            given = list(tensors_in((args, kwargs)))
            log.uses(given)
            if given and all(_whole(t) and log.has_value(t) for t in given):
                result = computed(func, *args, **kwargs)
                log.hold(tensors_in(result))
                return result
            log.hold(t for t in given if not is_fake(t))  # the program has made them from data, such as batches
            try:
                result = func(*args, **kwargs)
            except undecidable:
                raise LabError(
                    f"torch.{name} gives a result that depends on the data, and a simulated rank has no data. "
                    "Run this in a group, or use an operation whose result has a fixed size, such as torch.where."
                ) from None
            results = list(tensors_in(result))
            if any(tensor.is_meta for tensor in results):
                return result  # has no memory, in a real rank either
            if name.endswith("_") or "out" in kwargs:
                log.forget_values(t for t in changed_by(name, args, kwargs) if not is_fake(t))
            if whole := not given and results and all(map(_whole, results)):
                result = computed(func, *args, **kwargs)
            log.hold(tensors_in(result))
            if whole:
                return result
            if func.namespace == COLLECTIVES:
                self._collective(name.removesuffix("_").removesuffix("_out"), args, given, results)
            elif kernel := kernel_of(func, args, kwargs, result):
                log.add(kernel)
            return result

        @staticmethod
        def _positions(indices: Any) -> list[Any]:
            """Return indices in which masks that have data are replaced by the positions that they select."""
            found: list[Any] = []
            for index in indices:
                known = index is not None and index.dtype == torch.bool and _whole(index) and log.has_value(index)
                found += computed(torch.nonzero, index, as_tuple=True) if known else [index]
            return found

        def _collective(self, name: str, args: Any, given: list[Any], results: list[Any]) -> None:
            if type_of(name) is OTHER:
                return  # wait_tensor
            group = SIMULATION["_resolve_process_group"](args[-1])
            root = get_global_rank(group, args[1]) if type_of(name).rooted else -1
            group.issue(name, (given, results), results, root=root)

    return KernelMode()


def computed(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of torch whose tensors have data."""
    with SIMULATION["_disable_current_modes"]():
        return func(*args, **kwargs)


def _whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor consists of integers or truth values in the host's memory."""
    return not (tensor.is_floating_point() or tensor.is_complex()) and tensor.device.type == "cpu"
