"""Every private name of torch that labkit uses: what is lost without it, and what public way would replace it.

torch may change them in any version. If the installed version lacks one, ranks start all the same, what depends on it
is left out, and `lab.doctor` says so. Programs use torch itself, so their results do not depend on this table;
`test_torch_internals.py` takes one entry away after the other.

This file imports torch only where a name is looked up. Elsewhere, a name of torch that begins with an underscore is an
error that `tests/test_house.py` finds, with two exceptions, which concern what torch shows and not what it does: the
methods of process groups that carry out operations (`recording/operations.py`), and classes and functions that are
recognized by their names, in error messages and on the stack (`ipc/`, `launch/thread_states.py`,
`group/deadlock_words.py`).

Tables of names say what depends on each, and how it is found and replaced; TensorFlow's are in
`worker/runtimes/tensorflow/tensorflow_internals.py`.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
import re
import types
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Final


class PrivateNames:
    """The private names of a framework that one thing in labkit depends on.

    Args:
        *paths: where they are, for `pkgutil.resolve_name`: "torch.distributed.rpc.api:_invoke_rpc". Words in
            parentheses at the end are parameters of a function, or names and constants in its code. The names are known
            by their last part, or, where two have the same, with their class: "Server.join".
        lost: what labkit does not record or cannot do without them.
        public: what the framework would have to offer in their place.
        versions: the versions of the framework in which they were seen.
    """

    def __init__(self, *paths: str, lost: str, public: str, versions: str) -> None:
        names = [re.split("[.:]", path.partition("(")[0]) for path in paths]
        last = [name for *_, name in names]
        self.paths = {
            name if last.count(name) == 1 else f"{owner}.{name}": path
            for (*_, owner, name), path in zip(names, paths, strict=True)
        }
        self.lost, self.public, self.versions = lost, public, versions

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
        """Return what has this name.

        Raises:
            ImportError, AttributeError: the installed version lacks it.
        """
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


_Torch: Final = partial(PrivateNames, versions="2.10 to 2.13")
_GROUP: Final = "torch._C._distributed_c10d:ProcessGroup"
_C10D: Final = "torch.distributed.distributed_c10d"
_RPC: Final = "torch.distributed.rpc.api"

BACKWARD: Final = _Torch(
    "torch._C:_current_graph_task_id", "torch.autograd:Variable._execution_engine",
    lost="waits for gradients at the end of a backward pass, recomputed forward passes, remote backward passes",
    public="a hook at the end of a backward pass, and a function that tells whether one is running",
)  # fmt: skip
PROCESS_GROUPS: Final = _Torch(
    f"{_GROUP}._get_backend", f"{_GROUP}._device_types",
    f"{_GROUP}._register_backend", f"{_GROUP}._set_default_backend",
    f"{_GROUP}._set_group_desc", f"{_GROUP}._set_group_name",
    lost="collectives and messages",
    public="a hook before and after each operation of a process group, with its Work",
)  # fmt: skip
BATCHES: Final = _Torch(
    f"{_GROUP}._start_coalescing", f"{_GROUP}._end_coalescing",
    lost="the end of messages that are sent together, as by batch_isend_irecv",
    public="methods of the same names without the underscore, which a version after 2.13 may have",
)  # fmt: skip
MESSAGE_SENDERS: Final = _Torch(
    "torch.distributed:Work._source_rank",
    lost="the senders of messages that are received from any rank",
    public="source_rank, which torch has deprecated",
)
TIME_LIMITS: Final = _Torch(
    "torch._C._distributed_c10d:Backend.Options._timeout",
    lost="which operations end by a time limit of the program, and so are no deadlock",
    public="a backend's time limit; set_timeout only sets it",
)
GROUP_CREATION: Final = _Torch(
    f"{_C10D}:_new_process_group_helper",
    lost="waits for the members of a new group",
    public="a hook in new_group, which split_group and init_device_mesh share",
)
DEFAULT_GROUP: Final = _Torch(
    f"{_C10D}:_world", f"{_C10D}:_register_process_group", f"{_C10D}:_unregister_process_group",
    lost="the default group of a rank whose program has destroyed it: the next run starts new ranks",
    public="functions that detach a default group and make it the default again",
)  # fmt: skip
RENDEZVOUS: Final = _Torch(
    "torch.distributed.rendezvous:_rendezvous_handlers",
    lost="meeting in the group's store: init_process_group opens the port that the program names",
    public="register_rendezvous_handler for a scheme that has a handler",
)
DTENSOR_CACHE: Final = _Torch(
    "torch.distributed.tensor.debug:_clear_python_sharding_prop_cache",
    "torch.distributed.tensor.debug:_clear_fast_path_sharding_prop_cache",
    lost="runs with DTensor after a run that has destroyed the default group",
    public="a destroy_process_group that clears DTensor's cache, which names destroyed groups",
)
DDP_HOOKS: Final = _Torch(
    "torch.nn.parallel:DistributedDataParallel.register_comm_hook(_comm_hooks)",
    lost="checks of gradients are also made where a communication hook lets them differ",
    public="an attribute of DistributedDataParallel that tells its communication hooks",
)
MODES: Final = _Torch(
    "torch._C:_len_torch_dispatch_stack", "torch._C:_len_torch_function_stack",
    lost="lab.verdict, but for what a trace shows",
    public="a function that tells whether a TorchDispatchMode or a TorchFunctionMode is active",
)  # fmt: skip
JOIN: Final = _Torch(
    "torch._C._distributed_c10d:Reducer._set_forward_pass_work_handle",
    lost="uneven inputs of DistributedDataParallel, inside Join",
    public="a Reducer that keeps the whole Work, not only its C++ part",
)
SPARSE: Final = _Torch(
    "torch:Tensor._values", "torch:Tensor._indices",
    lost="bytes of sparse tensors",
    public="values() and indices() of a tensor that is not coalesced",
)  # fmt: skip
COMPILED_OPERATIONS: Final = _Torch(
    "torch._dynamo.trace_rules:add",
    lost="compiled programs that communicate after a graph break",
    public="a way to except a package from compilation, as torch.compiler.disable excepts a function",
)
COMPILED_PHASES: Final = _Torch(
    "torch._dynamo.eval_frame:skip_code",
    lost="overlap in a compiled DistributedDataParallel, whose buckets become one graph",
    public="torch.compiler.disable for a function alone, without a graph break where it is called",
)
DATA_LOADER: Final = _Torch(
    "torch.utils.data.dataloader:_BaseDataLoaderIter",
    lost="batches of a DataLoader",
    public="a public class of the iterators of DataLoader",
)
PIPELINE_STARTS: Final = _Torch(
    "torch.distributed.pipelining.stage:_PipelineStageBase._get_init_p2p_neighbors_ops",
    lost="schedules of torch 2.11 with neighbouring stages on one rank, such as ZBV",
    public="none is needed once torch 2.11 is no longer supported",
)
GPU_START: Final = _Torch(
    "torch.cuda:_lazy_call",
    lost="times of a GPU in scripts",
    public="a hook that runs when CUDA is initialized",
)
REMOTE_CALLS: Final = _Torch(
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
    public="hooks before a call, on both ends, that may add data to it, and after it; torch has frozen RPC",
)  # fmt: skip
REMOTE_CONTEXT: Final = _Torch(
    "torch.distributed.autograd:_current_context", "torch._C._distributed_autograd:DistAutogradContext._context_id",
    lost="the parts of a distributed backward pass on the ranks that were called, and exercises that look for them",
    public="the id of the context in which a called function runs",
)  # fmt: skip
REMOTE_STEPS: Final = _Torch(
    "torch.distributed.optim.optimizer:_script_local_optimizer_step",
    lost="steps of a DistributedOptimizer on the owners of the parameters",
    public="a hook in script functions that are called remotely",
)
RPC_START: Final = _Torch(
    f"{_RPC}:_all_gather", f"{_RPC}:_get_current_rpc_agent", f"{_RPC}:_cleanup_python_rpc_handler",
    f"{_RPC}:_reset_current_rpc_agent", "torch.distributed.autograd:_init",
    lost="init_rpc with other names or options than those of the group",
    public="a shutdown after which init_rpc works again",
)  # fmt: skip
RPC_TRANSPORTS: Final = _Torch(
    "torch.distributed.rpc:TensorPipeRpcBackendOptions(_transports)",
    lost="idle cores of ranks that wait in RPC: a thread of each polls shared memory",
    public="a public parameter for the transports",
)
RPC_SOCKETS: Final = _Torch(
    f"{_RPC}:_set_and_start_rpc_agent",
    lost="the private network for RPC, whose ports other users of the machine can reach",
    public="a parameter for the sockets of RPC",
)
PROFILER: Final = _Torch(
    "torch.autograd:_profiler_enabled", "torch.autograd.profiler:_prepare_profiler",
    "torch.autograd.profiler:_enable_profiler", "torch.autograd.profiler:_disable_profiler",
    lost="lab.profile",
    public="a function that tells whether a profiler is running, and a hook where one starts and stops",
)  # fmt: skip
PROFILED_THREADS: Final = _Torch(
    "torch.profiler:_ExperimentalConfig",
    lost="threads of RPC in lab.profile",
    public="the same as a public option of torch.profiler.profile",
)
SAVED_TENSORS: Final = _Torch(
    "torch:Tensor._version",
    lost="lab.track_memory's check that no saved tensor was modified",
    public="the same check for tensors that saved_tensors_hooks keep, or a public version of a tensor",
)
DISPATCH: Final = _Torch(
    "torch.utils._python_dispatch:TorchDispatchMode",
    lost="the exercises on tensor parallelism, which count what is sent",
    public="this class under a public name",
)
SIMULATION: Final = _Torch(
    "torch._C._distributed_c10d:ProcessGroup", "torch._C._distributed_c10d:_resolve_process_group",
    "torch._subclasses.fake_tensor:FakeTensor", "torch._subclasses.fake_tensor:FakeTensorMode",
    "torch._subclasses.fake_tensor:DynamicOutputShapeException",
    "torch._subclasses.fake_tensor:DataDependentOutputException",
    "torch.utils._python_dispatch:_disable_current_modes",
    f"{_C10D}:_object_to_tensor",
    "torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached",
    "torch.distributed.fsdp._fully_shard._fsdp_param:_chunk_with_empty",
    lost="simulated ranks",
    public="tensors without data, and modes that see each operator, under public names; a process group by its name; "
    "DTensor and FSDP2 that neither compute with tensors of other ranks nor allocate them",
)  # fmt: skip
TABLE: Final = tuple(entry for entry in list(globals().values()) if isinstance(entry, PrivateNames))


def lost() -> list[str]:
    """Return what the installed torch lacks the private names for; for `lab.doctor`, since it imports much of torch."""
    return [entry.lost for entry in TABLE if not entry.found]
