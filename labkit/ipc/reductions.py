"""How objects are sent that cloudpickle cannot send, and why some are not sent at all.

- Locks serve the threads of one process, so each rank gets new ones, as each process of a script creates its own. The
  usual case is a module's global lock, which no thread holds while a run is being sent.
- A function whose decorator keeps state that cannot be sent is decorated anew by the receiver.
- Some objects exist only inside a rank: wrapped models, process groups, futures, DTensors. Some of them cannot be
  pickled. Others can, but fail in the notebook, or look complete there and are only a rank's shard.
- `input`, `exit` and `get_ipython` of the notebook become those of a rank.
"""

from __future__ import annotations

import _thread
import builtins
import contextlib
import functools
import multiprocessing.process
import pickle
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from concurrent.futures import Executor, Future
from types import FunctionType
from typing import Any, Final, NoReturn

from labkit.errors.exceptions import LabError
from labkit.ipc.ranks_cell import instead_of_magic

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


class CannotSendError(pickle.PicklingError):
    """An object of a kind that cannot be sent, or not in its current state.

    `reason` is the predicate of the sentence that says why ("is locked"), `remedy` a sentence on what to do.
    """

    def __init__(self, culprit: Any, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.culprit, self.reason, self.remedy = culprit, reason, remedy


# Also subclasses by the student. Their locks could be sent, but the result would be no working thread, pool or future.
_OF_ONE_PROCESS: Final = (
    threading.Thread, threading.Barrier, subprocess.Popen, multiprocessing.process.BaseProcess, Executor, Future,
)  # fmt: skip
_LOCKS: Final = {_thread.LockType: threading.Lock, type(threading.RLock()): threading.RLock}


def reduce_sync_object(obj: Any) -> Reduced | None:
    """Return how to create a lock or a condition in the receiver; None for other objects.

    Events, semaphores and queues consist of these, and of state that pickle sends.
    """
    kind = type(obj)
    if kind in _LOCKS:
        if not obj.acquire(blocking=False):
            remedy = "Release it before the run. If it is unlocked, each rank gets a new one, since processes share no locks."
            raise CannotSendError(obj, "is locked at this moment", remedy)
        obj.release()
        return _LOCKS[kind], ()
    if kind is threading.Condition:
        return threading.Condition, (obj._lock,)
    if isinstance(obj, _OF_ONE_PROCESS):
        raise CannotSendError(obj, "belongs to the process that made it", "Make it inside the function that the ranks run.")
    return None


CACHED: Final = type(functools.lru_cache(len))
_COMPILER: Final = "torch._dynamo.eval_frame", "OptimizeContext"


def reduce_decorated(function: Any) -> Reduced | None:
    """Return how to reduce a function under `lru_cache` or `torch.compile`; None for any other."""
    if isinstance(function, CACHED):
        return _cached, (function.__wrapped__, function.cache_parameters())
    if (
        isinstance(function, FunctionType)
        and hasattr(function, "__wrapped__")
        and (compiler := _compiler_of(function)) is not None
    ):
        return compiler.__call__, (function.__wrapped__,)
    return None


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _compiler_of(function: FunctionType) -> Any:
    """Return the object with which `torch.compile` has wrapped a function; None if something else has.

    It is a variable of the wrapper, and torch can pickle it, because a compiled module refers to it, too. Without this,
    a compiled function could not be sent. torch has no public way to ask for it (2.11 to 2.13), so it is recognized by
    the name of its class.
    """
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            kind = type(cell.cell_contents)
            if (kind.__module__, kind.__name__) == _COMPILER:
                return cell.cell_contents
    return None


_MODEL: Final = "Return model.module.state_dict(), or model.module, the model inside."
_SHARDED: Final = (
    "Return its full state: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) "
    "of torch.distributed.checkpoint.state_dict, called on all ranks."
)
_SHARD: Final = "Return tensor.full_tensor(), called on all ranks, or this rank's shard: tensor.to_local()."
_GROUP: Final = "Return plain data about it, such as dist.get_process_group_ranks(group)."
_FUTURE: Final = "Return its value: future.wait()."
_REFERENCE: Final = "Return its value: rref.to_here()."
_STAGE: Final = "Return stage.submod.state_dict(), this rank's part of the model."
_VARIABLE: Final = "Return numpy arrays: variable.numpy(), [w.numpy() for w in weights]."
_PER_REPLICA: Final = "Return [v.numpy() for v in strategy.experimental_local_results(value)], or strategy.reduce(...) of it."
_GRAPH: Final = "Return its result, as numpy arrays."

# By the class's module and name, what to return instead; subclasses count too.
_ADVICE: Final = {
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): _MODEL,
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"): _SHARDED,
    ("torch.distributed.fsdp", "FSDPModule"): _SHARDED,
    ("torch.distributed.tensor", "DTensor"): _SHARD,
    ("torch.distributed.device_mesh", "DeviceMesh"): "Return mesh.mesh, the tensor of its ranks.",
    ("torch._C._distributed_c10d", "ProcessGroup"): _GROUP,
    ("torch._C._distributed_c10d", "Backend"): _GROUP,
    ("torch._C._distributed_c10d", "Store"): "Return the values that it holds: store.get(key).",
    ("torch._C._distributed_c10d", "Work"): "Wait for it (work.wait()), and return the tensor that it was for.",
    ("torch._C", "Future"): _FUTURE,
    ("torch.futures", "Future"): _FUTURE,
    ("torch.distributed.rpc", "PyRRef"): _REFERENCE,
    ("torch.distributed.rpc.api", "RRef"): _REFERENCE,
    ("torch.distributed.pipelining.stage", "_PipelineStageBase"): _STAGE,
    ("torch.cuda.streams", "Stream"): "It is of no use in another process; leave it out.",
    ("torch.cuda.streams", "Event"): "Return the time: start.elapsed_time(end), in milliseconds.",
    ("torch.cuda.graphs", "CUDAGraph"): "Return the tensors that it computes.",
    ("tensorflow.python.ops.variables", "Variable"): _VARIABLE,
    ("tensorflow.python.distribute.values", "DistributedValues"): _PER_REPLICA,
    ("tensorflow.python.distribute.distribute_lib", "StrategyBase"): "Make the strategy inside the function, and return arrays.",
    ("tensorflow.python.data.ops.dataset_ops", "DatasetV2"): "Return its elements: list(dataset.as_numpy_iterator()).",
    ("tensorflow.python.eager.polymorphic_function.polymorphic_function", "Function"): _GRAPH,
}


def rank_only_types() -> tuple[type, ...]:
    """Return the classes of objects that exist only inside a rank, of those that this process has imported."""
    found = [getattr(sys.modules.get(module), name, None) for module, name in _ADVICE]
    return tuple(kind for kind in found if isinstance(kind, type))


def rank_only_error(obj: Any) -> CannotSendError:
    """Return the error for an object of one of these classes."""
    kinds = ((getattr(sys.modules.get(module), name, ()), advice) for (module, name), advice in _ADVICE.items())
    return CannotSendError(obj, "exists only inside its rank", next(advice for kind, advice in kinds if isinstance(obj, kind)))


def install_builtins() -> None:
    """Replace `input`, `exit` and `get_ipython` in this process, which is a rank."""
    builtins.input = _input
    vars(builtins).update(exit=_Exit(), quit=_Exit(), get_ipython=_Shell)


def reduce_ipython(thing: Any) -> Any:
    """Reduce IPython's shell, and the names that it defines in every notebook, to a rank's; None for other objects."""
    kind = type(thing)
    if kind is types.MethodType:
        return (_builtin, ("get_ipython",)) if thing.__func__.__name__ == "get_ipython" else None
    if not kind.__module__.startswith(("IPython.", "ipykernel.")):
        return None
    if kind.__name__.endswith("ExitAutocall"):
        return _builtin, ("exit",)
    return (_Shell, ()) if kind.__name__.endswith("InteractiveShell") else None


def _builtin(name: str) -> Any:
    return getattr(builtins, name)


def _input(prompt: object = "", /) -> NoReturn:
    raise LabError(
        f"input({str(prompt)!r}): a rank has no keyboard. Ask in the notebook, and pass the answer: group.run(f, answer)"
    )


class _Exit:
    """Ends the function that this rank runs, but not the rank: `exit()` and `exit(0)` succeed, other codes fail."""

    def __call__(self, code: Any = None, **_: Any) -> NoReturn:
        raise SystemExit(code)

    def __repr__(self) -> str:
        return "exit() ends the function that this rank runs"


class _Shell:
    """The result of `get_ipython()` in a rank: shell commands work (`!ls` in a function), magics raise an error."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}
        self.user_ns = sys.modules["__main__"].__dict__

    def system(self, command: str) -> None:  # `!command`
        subprocess.run(command, shell=True, check=False)

    def getoutput(self, command: str, **_: Any) -> list[str]:  # `lines = !command`
        return subprocess.run(command, shell=True, check=False, stdout=subprocess.PIPE, text=True).stdout.splitlines()

    def run_line_magic(self, name: str, line: str = "", *_: Any, **__: Any) -> None:
        if name != "matplotlib":  # it chooses where figures appear; those of ranks always appear under the cell
            raise LabError(
                f"{f'%{name} {line}'.strip()!r} is IPython syntax, and ranks run plain Python. {instead_of_magic(name)}"
            )

    def run_cell_magic(self, name: str, line: str = "", *_: Any) -> None:
        self.run_line_magic(f"%{name}", line)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"get_ipython().{name}: IPython runs in the notebook, and this is a rank")
