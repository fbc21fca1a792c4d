"""Every private name of TensorFlow (2.21) and Keras (3.15) that labkit uses, and everything that it replaces in them.

Public are `tf.*` and `keras.*`; `tensorflow.python`, `tensorflow.core`, `tensorflow.tsl` and `keras.src` may change in
any version. If the installed version lacks a name, ranks start all the same, what depends on it is left out, and
`lab.doctor` says so. What is replaced may also be public. All else is for a program as it is outside of labkit.

This file imports TensorFlow only where a name is looked up. Elsewhere, a private name is an error that
`tests/test_house.py` finds, with two exceptions, which concern what TensorFlow shows and not what it does: classes that
are recognized by their names (`ipc/`), and functions and their variables on the stack (`blocked.py`).
"""

from __future__ import annotations

from typing import Final

from labkit.recording.torch_internals import PrivateNames

_EAGER: Final = "tensorflow.python.pywrap_tfe"
_ALONE: Final = "tensorflow.python.client.pywrap_tf_session"
_EXTENDED: Final = "tensorflow.python.distribute.collective_all_reduce_strategy:CollectiveAllReduceExtended"
_GRAPH: Final = "tensorflow.python.framework.func_graph:FuncGraph"
_LAUNCHER: Final = "tensorflow.python.distribute.cross_device_utils:CollectiveReplicaLauncher"
_CONTEXT: Final = "tensorflow.python.eager.context"
_COLLECTIVES: Final = "tensorflow.python.ops.gen_collective_ops"
_SERVICE: Final = "tensorflow:data.experimental.service"
_TRAINER: Final = "keras.src.backend.tensorflow.trainer"
_BACKUP: Final = "keras.callbacks:BackupAndRestore"

# Strategies

LOGICAL_CPUS: Final = PrivateNames(
    f"{_EXTENDED}._initialize_local_devices",
    lost="devices_per_rank under MultiWorkerMirroredStrategy",
)
FIT: Final = PrivateNames(  # keras-team/keras#20585
    f"{_TRAINER}:TensorFlowTrainer._maybe_symbolic_build(reduce, MEAN)", f"{_TRAINER}:reduce_per_replica(MEAN, 0)",
    "keras.src.trainers.trainer:Trainer._symbolic_build",
    lost="Keras's fit under MultiWorkerMirroredStrategy",
)  # fmt: skip
FILES: Final = PrivateNames(
    "keras:Model.save", "keras:Model.save_weights",
    f"{_BACKUP}._load_model", f"{_BACKUP}._save_model", f"{_BACKUP}.on_train_end",
    lost="Keras's files under MultiWorkerMirroredStrategy",
)  # fmt: skip
DISTRIBUTION: Final = PrivateNames(
    "keras.src.distribution.distribution_lib:set_distribution",
    lost="a warning about keras.distribution",
)
MIRRORED: Final = PrivateNames(  # the replica of a missing device never runs, so the first all-reduce waits for it without end
    "tensorflow:distribute.MirroredStrategy.__init__",
    lost="errors and warnings about MirroredStrategy",
)
PARAMETER_SERVERS: Final = PrivateNames(  # several coordinators reset each other's state: they hang, or a server crashes
    "tensorflow:distribute.ParameterServerStrategy.__init__",
    lost="an error for ParameterServerStrategy outside the chief",
)
TRAINS_ALONE: Final = PrivateNames(
    f"{_EXTENDED}._initialize_local",
    lost="a warning about MultiWorkerMirroredStrategy without TF_CONFIG",
)

# Servers, which listen on all interfaces. A second one takes connections of the first; `join()` never returns.

# A rank that is reached in one network must reach others in the same, so the entries are as large as this.
CLUSTER: Final = PrivateNames(
    f"{_EAGER}:TFE_EnableCollectiveOps", f"{_EAGER}:TFE_ContextSetServerDefWithTimeoutAndRetries",
    f"{_EAGER}:TFE_ContextSetServerDef", f"{_EAGER}:TFE_ContextUpdateServerDef",
    f"{_ALONE}:TF_NewServer", f"{_ALONE}:TF_ServerStart", "tensorflow:distribute.Server.join",
    lost="the private network of TensorFlow's clusters, their waits, warnings about TF_CONFIG, and labkit's tf.distribute.Server",
)  # fmt: skip
DATA_SERVICE: Final = PrivateNames(  # gRPC connects on threads of its own, so a reader would find no server in the ranks' network
    f"{_SERVICE}.DispatchServer.__init__", f"{_SERVICE}.WorkerServer.__init__",
    f"{_SERVICE}.distribute", f"{_SERVICE}.register_dataset", f"{_SERVICE}.from_dataset_id",
    lost="an error for tf.data's service",
)  # fmt: skip

# The profiler, whose events become spans

PROFILER: Final = PrivateNames(  # TensorFlow allows one session at a time, so labkit's gives way to the program's
    "tensorflow.python.profiler.profiler_v2:_pywrap_profiler",
    "tensorflow.python.profiler.internal._pywrap_profiler:ProfilerSession",
    "tensorflow.python.profiler.internal._pywrap_traceme:TraceMe",
    "tensorflow.tsl.profiler.protobuf.xplane_pb2:DESCRIPTOR",
    lost="operations of TensorFlow",
)
CALLS: Final = PrivateNames(  # no operation runs between two calls, so the profiler's events can be read then
    "tensorflow.python.eager.polymorphic_function.polymorphic_function:Function.__call__",
    lost="operations of TensorFlow after the first minute of a run, and before its end in lab.watch",
)
PENDING: Final = PrivateNames(
    f"{_CONTEXT}:async_wait",
    lost="operations of TensorFlow that are still running when a function returns, such as DTensor's",
)

# Sizes, which the profiler's events do not have

GRAPHS: Final = PrivateNames(
    f"{_GRAPH}.__init__", f"{_GRAPH}.outer_graph",
    lost="bytes of messages, and of collectives in loops and branches of tf.functions",
)  # fmt: skip
INSTANCE_KEYS: Final = PrivateNames(  # the only difference between operations of one name in several graphs
    f"{_GRAPH}.capture_call_time_value", f"{_LAUNCHER}._next_instance_key", f"{_LAUNCHER}.__init__(_group_key)",
    lost="bytes of collectives whose names several tf.functions share",
)  # fmt: skip
LIBRARY: Final = PrivateNames(  # a function is read before it is removed
    f"{_CONTEXT}:context", f"{_CONTEXT}:Context.remove_function",
    f"{_CONTEXT}:Context.list_function_names", f"{_CONTEXT}:Context.get_function_def",
    lost="bytes of DTensor's collectives",
)  # fmt: skip
COLLECTIVES: Final = PrivateNames(
    f"{_COLLECTIVES}:collective_reduce", f"{_COLLECTIVES}:collective_reduce_v2", f"{_COLLECTIVES}:collective_gather",
    f"{_COLLECTIVES}:collective_gather_v2", f"{_COLLECTIVES}:collective_bcast_send", f"{_COLLECTIVES}:collective_bcast_send_v2",
    f"{_COLLECTIVES}:collective_bcast_recv", f"{_COLLECTIVES}:collective_bcast_recv_v2",
    f"{_COLLECTIVES}:collective_reduce_scatter_v2", f"{_COLLECTIVES}:collective_all_to_all_v2",
    lost="bytes of collectives outside of tf.functions",
)  # fmt: skip

# All else

AUTOGRAPH: Final = PrivateNames(  # it removes its temporary files at exit, which a rank never reaches
    "tensorflow.python.autograph.pyct.loader:load_source(source, delete_on_exit)",
    lost="AutoGraph without temporary files",
)
# A thread checks a dataset's autotuning after 10 ms, 20 ms, 40 ms, ... and is often not woken when the iterator is
# deleted, which then takes up to as long as the training took (0 to 9 s after 24 steps on two busy cores).
DEVICE_DATASETS: Final = PrivateNames(
    "tensorflow.python.data.ops.multi_device_iterator_ops:_create_device_dataset",
    lost="the quick end of a distributed dataset's iterator",
)
DISTRIBUTED_BATCHES: Final = PrivateNames(
    "tensorflow.python.distribute.input_lib:DistributedIteratorBase.__next__",
    lost="the note on a replica that has no samples in a batch",
)
TABLE: Final = tuple(entry for entry in list(globals().values()) if isinstance(entry, PrivateNames))


def lost() -> list[str]:
    """Return what the installed TensorFlow and Keras lack the names for; for `lab.doctor`, since it imports both."""
    return [entry.lost for entry in TABLE if not entry.found]
