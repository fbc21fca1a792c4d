"""Every private name of torch (2.10 to 2.13) that labkit uses, and what is lost without it.

If the installed version lacks one, ranks start all the same, what depends on it is left out, and `lab.doctor` says so.
Programs use torch itself, so their results do not depend on this table. torch is imported where a name is looked up.

Elsewhere, a name of torch that begins with an underscore is an error that `tests/test_house.py` finds, but for the
methods of process groups in `recording/operations.py`, and names in error messages and on the stack (`ipc/`,
`launch/thread_states.py`, `group/deadlock_words.py`).
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
import re
import types
import warnings
from collections.abc import Callable
from typing import Any, Final


class PrivateNames:
    """The private names of a framework that one thing in labkit depends on; without them, `lost` cannot be done.

    Paths are as for `pkgutil.resolve_name`: "torch.distributed.rpc.api:_invoke_rpc". Words in parentheses at the end
    are parameters of a function, or names and constants in its code. The names are known by their last part, or, where
    two have the same, with their class: "Server.join".
    """

    def __init__(self, *paths: str, lost: str) -> None:
        names = [re.split("[.:]", path.partition("(")[0]) for path in paths]
        last = [name for *_, name in names]
        self.paths = {
            name if last.count(name) == 1 else f"{owner}.{name}": path
            for (*_, owner, name), path in zip(names, paths, strict=True)
        }
        self.lost = lost

    @functools.cached_property
    def found(self) -> bool:
        """Whether the installed version has all of them; found out once, since some are needed at each operation."""
        return not self.missing

    @property
    def missing(self) -> list[str]:
        """The paths that the installed version lacks."""
        return [path for name, path in self.paths.items() if not self._has(name)]

    def __contains__(self, name: object) -> bool:
        return name in self.paths

    def __getitem__(self, name: str) -> Any:
        """Return what has this name; an ImportError or AttributeError says that the installed version lacks it."""
        path, _, words = self.paths[name].rstrip(")").partition("(")
        found = pkgutil.resolve_name(path)
        if words and not set(words.split(", ")) <= _words(found):
            raise AttributeError(f"{path} contains not all of {words}")
        return found

    def of(self, owner: Any, name: str) -> Any:
        """Return an attribute of an object by its private name."""
        assert name in self.paths or name in " ".join(self.paths.values()), name
        return getattr(owner, name)

    def replace(self, name: str, ours: Callable[..., Any]) -> None:
        """Replace a function by one that calls `ours` with the original as first argument; see `in_place_of`."""
        self.set(name, in_place_of(self[name], ours))

    def apply(self, **ours: Callable[..., Any]) -> bool:
        """Replace functions, by their names, as `replace` does; none, and return False, if a name is missing."""
        if self.found:
            for name, function in ours.items():
                self.replace(name, function)
        return self.found

    def set(self, name: str, value: Any) -> None:
        """Give another value to a name, in its module or class."""
        module, _, inner = self.paths[name].partition("(")[0].partition(":")
        outer, _, last = inner.rpartition(".")
        setattr(pkgutil.resolve_name(f"{module}:{outer}" if outer else module), last, value)

    def _has(self, name: str) -> bool:
        try:
            with warnings.catch_warnings(action="ignore"):  # importing some of torch's modules deprecates others
                self[name]
        except (ImportError, AttributeError):
            return False
        return True


def _words(function: Any) -> set[str]:
    """Return a function's parameters, and the names and constants in its code."""
    words = set(inspect.signature(function).parameters)
    codes = [code] if (code := getattr(inspect.unwrap(function), "__code__", None)) else []
    for code in codes:
        words.update(code.co_names, map(str, code.co_consts))
        codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
    return words


def in_place_of(function: Any, ours: Callable[..., Any]) -> Any:
    """Return a replacement for `function` that calls `ours` with the original as first argument.

    If `function` is such a replacement itself, its original is used.
    """
    original = getattr(function, "__labkit_original__", function)

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs)

    watched.__labkit_original__ = original  # type: ignore[attr-defined]
    return watched


def wrap(owner: Any, **ours: Callable[..., Any]) -> None:
    """Replace functions of a module, or methods of a class, each by one that calls ours; see `in_place_of`."""
    for name, function in ours.items():
        setattr(owner, name, in_place_of(getattr(owner, name), function))


_GROUP: Final = "torch._C._distributed_c10d:ProcessGroup"
_C10D: Final = "torch.distributed.distributed_c10d"
_RPC: Final = "torch.distributed.rpc.api"

BACKWARD: Final = PrivateNames(
    "torch._C:_current_graph_task_id", "torch.autograd:Variable._execution_engine",
    lost="waits for gradients at the end of a backward pass, recomputed forward passes, remote backward passes",
)  # fmt: skip
PROCESS_GROUPS: Final = PrivateNames(
    f"{_GROUP}._get_backend", f"{_GROUP}._device_types",
    f"{_GROUP}._register_backend", f"{_GROUP}._set_default_backend",
    f"{_GROUP}._set_group_desc", f"{_GROUP}._set_group_name",
    lost="collectives and messages",
)  # fmt: skip
BATCHES: Final = PrivateNames(
    f"{_GROUP}._start_coalescing", f"{_GROUP}._end_coalescing",
    lost="the end of messages that are sent together, as by batch_isend_irecv",
)  # fmt: skip
MESSAGE_SENDERS: Final = PrivateNames(
    "torch.distributed:Work._source_rank", lost="the senders of messages that are received from any rank"
)
TIME_LIMITS: Final = PrivateNames(
    "torch._C._distributed_c10d:Backend.Options._timeout",
    lost="which operations end by a time limit of the program, and so are no deadlock",
)
GROUP_CREATION: Final = PrivateNames(f"{_C10D}:_new_process_group_helper", lost="waits for the members of a new group")
RENDEZVOUS: Final = PrivateNames(
    "torch.distributed.rendezvous:_rendezvous_handlers",
    lost="meeting in the group's store: init_process_group opens the port that the program names",
)
DTENSOR_CACHE: Final = PrivateNames(
    "torch.distributed.tensor.debug:_clear_python_sharding_prop_cache",
    "torch.distributed.tensor.debug:_clear_fast_path_sharding_prop_cache",
    lost="cells with DTensor after a cell that has destroyed its groups",
)
DDP_HOOKS: Final = PrivateNames(
    "torch.nn.parallel:DistributedDataParallel.register_comm_hook(_comm_hooks)",
    lost="checks of gradients are also made where a communication hook lets them differ",
)
MODES: Final = PrivateNames(
    "torch._C:_len_torch_dispatch_stack", "torch._C:_len_torch_function_stack", lost="lab.verdict, but for what a trace shows"
)
JOIN: Final = PrivateNames(
    "torch._C._distributed_c10d:Reducer._set_forward_pass_work_handle",
    lost="uneven inputs of DistributedDataParallel, inside Join",
)
SPARSE: Final = PrivateNames("torch:Tensor._values", "torch:Tensor._indices", lost="bytes of sparse tensors")
COMPILED_OPERATIONS: Final = PrivateNames(
    "torch._dynamo.trace_rules:add", lost="compiled programs that communicate after a graph break"
)
COMPILED_PHASES: Final = PrivateNames(
    "torch._dynamo.eval_frame:skip_code", lost="overlap in a compiled DistributedDataParallel, whose buckets become one graph"
)
DATA_LOADER: Final = PrivateNames("torch.utils.data.dataloader:_BaseDataLoaderIter", lost="batches of a DataLoader")
PIPELINE_STARTS: Final = PrivateNames(
    "torch.distributed.pipelining.stage:_PipelineStageBase._get_init_p2p_neighbors_ops",
    lost="schedules of torch 2.11 with neighbouring stages on one rank, such as ZBV",
)
GPU_START: Final = PrivateNames("torch.cuda:_lazy_call", lost="times of a GPU in scripts")
REMOTE_CALLS: Final = PrivateNames(
    f"{_RPC}:_invoke_rpc",
    f"{_RPC}:_invoke_rpc_python_udf", f"{_RPC}:_invoke_remote_python_udf",
    f"{_RPC}:_invoke_rpc_builtin", f"{_RPC}:_invoke_remote_builtin",
    f"{_RPC}:_invoke_rpc_torchscript", f"{_RPC}:_invoke_remote_torchscript",
    f"{_RPC}:PythonUDF", "torch.distributed.rpc:_init_rpc_backend",
    "torch.distributed.rpc.internal:_run_function", "torch.distributed.rpc.internal:serialize",
    "torch.distributed.rpc.internal:_InternalRPCPickler._py_rref_reducer",
    "torch.distributed.rpc.internal:_InternalRPCPickler._py_rref_receiver",
    "torch.distributed.rpc.rref_proxy:_local_invoke", "torch.distributed.rpc.rref_proxy:_local_invoke_async_execution",
    "torch._C._distributed_rpc:PyRRef._get_type",
    lost="remote calls",
)  # fmt: skip
REMOTE_CONTEXT: Final = PrivateNames(
    "torch.distributed.autograd:_current_context", "torch._C._distributed_autograd:DistAutogradContext._context_id",
    lost="the parts of a distributed backward pass on the ranks that were called, and exercises that look for them",
)  # fmt: skip
REMOTE_STEPS: Final = PrivateNames(
    "torch.distributed.optim.optimizer:_script_local_optimizer_step",
    lost="steps of a DistributedOptimizer on the owners of the parameters",
)
RPC_TRANSPORTS: Final = PrivateNames(
    "torch.distributed.rpc:TensorPipeRpcBackendOptions(_transports)",
    lost="idle cores of ranks that wait in RPC: a thread of each polls shared memory",
)
RPC_SOCKETS: Final = PrivateNames(
    f"{_RPC}:_set_and_start_rpc_agent", lost="the private network for RPC, whose ports other users of the machine can reach"
)
PROFILER: Final = PrivateNames(
    "torch.autograd:_profiler_enabled", "torch.autograd.profiler:_prepare_profiler",
    "torch.autograd.profiler:_enable_profiler", "torch.profiler:_ExperimentalConfig",
    lost="lab.profile",
)  # fmt: skip
SAVED_TENSORS: Final = PrivateNames("torch:Tensor._version", lost="lab.track_memory's check that no saved tensor was modified")
DISPATCH: Final = PrivateNames(
    "torch.utils._python_dispatch:TorchDispatchMode", lost="the exercises on tensor parallelism, which count what is sent"
)
SIMULATION: Final = PrivateNames(
    "torch._C._distributed_c10d:ProcessGroup", "torch._C._distributed_c10d:_resolve_process_group",
    "torch._subclasses.fake_tensor:FakeTensor", "torch._subclasses.fake_tensor:FakeTensorMode",
    "torch._subclasses.fake_tensor:DynamicOutputShapeException",
    "torch._subclasses.fake_tensor:DataDependentOutputException",
    "torch.utils._python_dispatch:_disable_current_modes",
    f"{_C10D}:_object_to_tensor",
    "torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached",
    "torch.distributed.fsdp._fully_shard._fsdp_param:_chunk_with_empty",
    lost="simulated ranks",
)  # fmt: skip
TABLE: Final = tuple(entry for entry in list(globals().values()) if isinstance(entry, PrivateNames))


def lost() -> list[str]:
    """Return what the installed torch lacks the private names for; for `lab.doctor`, since it imports much of torch."""
    return [entry.lost for entry in TABLE if not entry.found]
