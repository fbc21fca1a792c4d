"""Objects that exist only inside a rank, and what to return instead: wrapped models, process groups, futures, DTensors.

Some of them cannot be pickled. Others can, but fail in the notebook, or look complete there and are only a rank's
shard.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from labkit.ipc.sync_objects import CannotSendError

_MODEL: Final = "Return model.module.state_dict(), or model.module, the model inside."
_SHARDED: Final = (
    "Return its full state: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) "
    "of torch.distributed.checkpoint.state_dict, called on all ranks."
)
_GROUP: Final = "Return plain data about it, such as dist.get_process_group_ranks(group)."
_VARIABLE: Final = "Return numpy arrays: variable.numpy(), [w.numpy() for w in weights]."
_PER_REPLICA: Final = "Return [v.numpy() for v in strategy.experimental_local_results(value)], or strategy.reduce(...) of it."

# By the class's module and name, what to return instead; subclasses count too.
_ADVICE: Final = {
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): _MODEL,
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"): _SHARDED,
    ("torch.distributed.fsdp", "FSDPModule"): _SHARDED,
    (
        "torch.distributed.tensor",
        "DTensor",
    ): "Return tensor.full_tensor(), called on all ranks, or this rank's shard: tensor.to_local().",
    ("torch.distributed.device_mesh", "DeviceMesh"): "Return mesh.mesh, the tensor of its ranks.",
    ("torch._C._distributed_c10d", "ProcessGroup"): _GROUP,
    ("torch._C._distributed_c10d", "Backend"): _GROUP,
    ("torch._C._distributed_c10d", "Store"): "Return the values that it holds: store.get(key).",
    ("torch._C._distributed_c10d", "Work"): "Wait for it (work.wait()), and return the tensor that it was for.",
    ("torch._C", "Future"): "Return its value: future.wait().",
    ("torch.futures", "Future"): "Return its value: future.wait().",
    ("torch.distributed.rpc", "PyRRef"): "Return its value: rref.to_here().",
    ("torch.distributed.rpc.api", "RRef"): "Return its value: rref.to_here().",
    (
        "torch.distributed.pipelining.stage",
        "_PipelineStageBase",
    ): "Return stage.submod.state_dict(), this rank's part of the model.",
    ("torch.cuda.streams", "Stream"): "It is of no use in another process; leave it out.",
    ("torch.cuda.streams", "Event"): "Return the time: start.elapsed_time(end), in milliseconds.",
    ("torch.cuda.graphs", "CUDAGraph"): "Return the tensors that it computes.",
    ("tensorflow.python.ops.variables", "Variable"): _VARIABLE,
    ("tensorflow.python.distribute.values", "DistributedValues"): _PER_REPLICA,
    ("tensorflow.python.distribute.distribute_lib", "StrategyBase"): "Make the strategy inside the function, and return arrays.",
    ("tensorflow.python.data.ops.dataset_ops", "DatasetV2"): "Return its elements: list(dataset.as_numpy_iterator()).",
    (
        "tensorflow.python.eager.polymorphic_function.polymorphic_function",
        "Function",
    ): "Return its result, as numpy arrays.",
}


class RankOnlyTypes:
    """The classes of rank-only objects that this process has imported."""

    def __init__(self) -> None:
        self._advice: dict[type, str] = {}
        for (module, name), advice in _ADVICE.items():
            found = getattr(sys.modules.get(module), name, None)
            if isinstance(found, type):
                self._advice.setdefault(found, advice)
        self._types = tuple(self._advice)

    def check(self, obj: Any) -> None:
        """Check that an object can be sent to the notebook.

        Raises:
            CannotSendError: it exists only inside its rank.
        """
        if isinstance(obj, self._types):
            kind = next(k for k in self._types if isinstance(obj, k))
            raise CannotSendError(obj, "exists only inside its rank", self._advice[kind])
