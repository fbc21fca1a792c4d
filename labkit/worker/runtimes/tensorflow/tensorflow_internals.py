"""Every private name of TensorFlow and Keras that labkit uses, and everything that it replaces in them.

Public are `tf.*` and `keras.*`; `tensorflow.python`, `tensorflow.core`, `tensorflow.tsl` and `keras.src` may change in
any version. If the installed version lacks a name, ranks start all the same, what depends on it is left out, and
`lab.doctor` says so; `test_tensorflow_internals.py` takes one entry away after the other. What is replaced may also be
public. Without a `Patch`, a program gets what it gets outside of labkit.

This file imports TensorFlow only where a name is looked up. Elsewhere, a private name is an error that
`tests/test_house.py` finds, with two exceptions, which concern what TensorFlow shows and not what it does: classes that
are recognized by their names (`ipc/`), and functions and their variables on the stack (`calls.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from labkit.comm.torch_internals import PrivateNames


class Patch(PrivateNames):
    """Functions that labkit replaces in the ranks.

    Args:
        *paths: as for `PrivateNames`; none if what is replaced has no name in Python.
        why: what happens without the patch, in these versions.
        test: the test that shows it, in `tests/worker`.
        listed: the row on it in the table for students, in `docs/programs.md`; "" if programs do not notice it.
        **about: as for `PrivateNames`.
    """

    def __init__(self, *paths: str, why: str, test: str, listed: str = "", **about: str) -> None:
        super().__init__(*paths, **about)
        self.why, self.test, self.listed = why, test, listed

    def apply(self, **ours: Callable[..., Any]) -> bool:
        """Replace functions, by their names, as `replace` does; none, and return False, if a name is missing."""
        if self.found:
            for name, function in ours.items():
                self.replace(name, function)
        return self.found


_NAMES: Final = partial(PrivateNames, versions="TensorFlow 2.21")
_TENSORFLOW: Final = partial(Patch, versions="TensorFlow 2.21")
_KERAS: Final = partial(Patch, versions="Keras 3.15.1")
_EAGER: Final = "tensorflow.python.pywrap_tfe"
_ALONE: Final = "tensorflow.python.client.pywrap_tf_session"
_EXTENDED: Final = "tensorflow.python.distribute.collective_all_reduce_strategy:CollectiveAllReduceExtended"
_GRAPH: Final = "tensorflow.python.framework.func_graph:FuncGraph"
_LAUNCHER: Final = "tensorflow.python.distribute.cross_device_utils:CollectiveReplicaLauncher"
_CONTEXT: Final = "tensorflow.python.eager.context"
_COLLECTIVES: Final = "tensorflow.python.ops.gen_collective_ops"
_DATA: Final = "tensorflow.python.data.experimental.service._pywrap_server_lib"
_DATA_OPERATIONS: Final = "tensorflow.python.ops.gen_experimental_dataset_ops"
_TRAINER: Final = "keras.src.backend.tensorflow.trainer"
_BACKUP: Final = "keras.callbacks:BackupAndRestore"

# Strategies

LOGICAL_CPUS: Final = _TENSORFLOW(
    f"{_EXTENDED}._initialize_local_devices",
    lost="devices_per_rank under MultiWorkerMirroredStrategy",
    public="a worker that uses all its logical CPUs",
    why="a worker computes on one CPU, even if it has several logical CPUs; no issue is known",
    test="tensorflow/test_tf_strategies.py::test_without_the_patch_a_worker_uses_one_of_its_cpus",
    listed="`MultiWorkerMirroredStrategy` with several logical CPUs",
)
FIT: Final = _KERAS(
    f"{_TRAINER}:TensorFlowTrainer._maybe_symbolic_build(reduce, MEAN)", f"{_TRAINER}:reduce_per_replica(MEAN, 0)",
    "keras.src.trainers.trainer:Trainer._symbolic_build",
    lost="Keras's fit under MultiWorkerMirroredStrategy",
    public="a Keras in which keras-team/keras#20585 is closed",
    why='fit and evaluate fail: "Attempt to convert a value (PerReplica...", and then for averaging a scalar along axis 0',
    test="tensorflow/test_tf_strategies.py::test_without_its_patch_keras_fails",
    listed="Keras 3 `fit`, `evaluate` under `MultiWorkerMirroredStrategy`",
)  # fmt: skip
FILES: Final = _KERAS(
    "keras:Model.save", "keras:Model.save_weights",
    f"{_BACKUP}._load_model", f"{_BACKUP}._save_model", f"{_BACKUP}.on_train_end",
    lost="Keras's files under MultiWorkerMirroredStrategy",
    public="a Keras in which workers do not write to the same path, as Keras 2",
    why="each worker opens the given path: BlockingIOError, FileExistsError, or a corrupt file",
    test="tensorflow/test_tf_careless.py::test_training_continues_from_the_backup_after_a_worker_was_killed",
    listed="files that several workers write to one path (`ModelCheckpoint`, `BackupAndRestore`)",
)  # fmt: skip
DISTRIBUTION: Final = _KERAS(
    "keras.src.distribution.distribution_lib:set_distribution",
    lost="a warning about keras.distribution",
    public="a Keras that raises an error",
    why="on the TensorFlow backend it computes on one device, without a word",
    test="tensorflow/test_tf_strategies.py::test_keras_distribution_says_that_it_does_nothing_and_a_mirrored_strategy_takes_all_devices",
)
MIRRORED: Final = _TENSORFLOW(
    "tensorflow:distribute.MirroredStrategy.__init__",
    lost="errors and warnings about MirroredStrategy",
    public="a strategy that checks its devices",
    why="the replica of a missing device never runs, so the first all-reduce waits for it without end",
    test="tensorflow/test_tf_careless.py::test_a_strategy_for_devices_that_the_rank_does_not_have_is_refused",
    listed="`MirroredStrategy` with a device that the rank lacks; `ParameterServerStrategy` outside the chief",
)
PARAMETER_SERVERS: Final = _TENSORFLOW(
    "tensorflow:distribute.ParameterServerStrategy.__init__",
    lost="an error for ParameterServerStrategy outside the chief",
    public="a strategy that checks the job of its process",
    why="several coordinators reset each other's state: they hang, or a server dies of SIGSEGV in GetOrCreateKernelAndDevice",
    test="tensorflow/test_tf_roles.py::test_a_worker_or_server_that_makes_the_chiefs_strategy_gets_an_error",
    listed="`MirroredStrategy` with a device that the rank lacks; `ParameterServerStrategy` outside the chief",
)
TRAINS_ALONE: Final = _TENSORFLOW(
    f"{_EXTENDED}._initialize_local",
    lost="a warning about MultiWorkerMirroredStrategy without TF_CONFIG",
    public="such a warning of TensorFlow's",
    why="each rank trains alone, without a word",
    test="tensorflow/test_tf_careless.py::test_without_tf_config_a_rank_says_that_it_trains_alone",
)

# Servers

# A rank that is reached in one network must reach others in the same, so the entries are as large as this.
CLUSTER: Final = _TENSORFLOW(
    f"{_EAGER}:TFE_EnableCollectiveOps", f"{_EAGER}:TFE_ContextSetServerDefWithTimeoutAndRetries",
    f"{_EAGER}:TFE_ContextSetServerDef", f"{_EAGER}:TFE_ContextUpdateServerDef",
    f"{_ALONE}:TF_NewServer", f"{_ALONE}:TF_ServerStart", "tensorflow:distribute.Server.join",
    lost="the private network of TensorFlow's clusters, their waits, warnings about TF_CONFIG, and labkit's tf.distribute.Server",
    public="a server that is told its network, hooks before and after it starts, and a join() with a time limit",
    why="servers listen on all interfaces; a second one takes connections of the first, labkit's; join() never returns",
    test="tensorflow/test_tf_servers.py::test_ranks_that_join_their_servers_end_with_the_chief",
    listed="`tf.distribute.Server` in a worker or parameter server",
)  # fmt: skip
DATA_SERVICE: Final = _TENSORFLOW(
    f"{_DATA}:DispatchGrpcDataServer.start", f"{_DATA}:WorkerGrpcDataServer.start",
    "tensorflow:data.experimental.service.DispatchServer.join", "tensorflow:data.experimental.service.WorkerServer.join",
    f"{_DATA}:TF_DATA_GetDataServiceMetadataByID", f"{_DATA_OPERATIONS}:register_dataset",
    f"{_DATA_OPERATIONS}:register_dataset_v2", f"{_DATA_OPERATIONS}:data_service_dataset_v4",
    f"{_DATA}:TF_DATA_NewDispatchServer", "tensorflow.core.protobuf.service_config_pb2:DispatcherConfig",
    lost="the private network of tf.data's service, the end of join(), and readers that rest without being blocked",
    public="a server that is told its network, a join() with a time limit, and a hook where a program first reads",
    why="servers listen on all interfaces; join() never returns; gRPC connects on threads of its own",
    test="tensorflow/test_tf_servers.py::test_ranks_read_from_a_data_service_of_others",
    listed="TensorFlow's servers",
)  # fmt: skip
PROFILER_SERVER: Final = _TENSORFLOW(
    "tensorflow.python.profiler.internal._pywrap_profiler:start_server",
    lost="the private network of tf.profiler.experimental.server",
    public="a server that is told its network",
    why="it listens on all interfaces",
    test="test_network_namespace.py::test_tensorflows_workers_listen_only_on_loopback",
    listed="TensorFlow's servers",
)

# The profiler, whose events become spans

PROFILER: Final = _TENSORFLOW(
    "tensorflow.python.profiler.profiler_v2:_pywrap_profiler",
    "tensorflow.python.profiler.internal._pywrap_profiler:ProfilerSession",
    "tensorflow.python.profiler.internal._pywrap_traceme:TraceMe",
    "tensorflow.tsl.profiler.protobuf.xplane_pb2:DESCRIPTOR",
    lost="operations of TensorFlow",
    public="several sessions at a time, events in memory, and tf.profiler.experimental.Trace in each of them",
    why="TensorFlow allows one session at a time, so labkit's gives way to the program's",
    test="tensorflow/test_tf_timeline.py::test_the_students_own_profiler_works_and_is_noted",
)  # fmt: skip
PROFILER_STOP: Final = _TENSORFLOW(
    lost="operations of TensorFlow",
    public="a profiler that completes events before it moves them: see `profiler_defect.py`",
    why="a use-after-free crashes some processes when a session stops",
    test="tensorflow/test_tf_profiler_defect.py::test_the_librarys_entry_changes_only_while_a_session_stops",
    listed="stopping TensorFlow's profiler (2.21)",
)
CALLS: Final = _TENSORFLOW(
    "tensorflow.python.eager.polymorphic_function.polymorphic_function:Function.__call__",
    lost="operations of TensorFlow after the first minute of a run, and before its end in lab.watch",
    public="a hook before a tf.function runs",
    why="no operation runs between two calls, so the profiler's events can be read then",
    test="tensorflow/test_tf_timeline.py::test_reading_between_two_calls_loses_nothing_of_dtensors",
)
PENDING: Final = _NAMES(
    f"{_CONTEXT}:async_wait",
    lost="operations of TensorFlow that are still running when a function returns, such as DTensor's",
    public="tf.test.experimental.sync_devices, if it ran no operations itself",
)
_SIZES: Final = partial(_TENSORFLOW, public="sizes in the profiler's events")
GRAPHS: Final = _SIZES(
    f"{_GRAPH}.__init__", f"{_GRAPH}.outer_graph",
    lost="bytes of messages, and of collectives in loops and branches of tf.functions",
    why="the shapes in graphs are the only source of sizes",
    test="tensorflow/test_tf_timeline.py::test_each_steps_collectives_are_recorded_with_bytes_and_matched",
)  # fmt: skip
INSTANCE_KEYS: Final = _SIZES(
    f"{_GRAPH}.capture_call_time_value", f"{_LAUNCHER}._next_instance_key", f"{_LAUNCHER}.__init__(_group_key)",
    lost="bytes of collectives whose names several tf.functions share",
    why="graphs may have operations of the same name, and only the instance key tells which one ran",
    test="tensorflow/test_tf_sizes.py::test_collectives_of_one_name_have_their_own_sizes",
)  # fmt: skip
LIBRARY: Final = _TENSORFLOW(
    f"{_CONTEXT}:context", f"{_CONTEXT}:Context.remove_function",
    f"{_CONTEXT}:Context.list_function_names", f"{_CONTEXT}:Context.get_function_def",
    lost="bytes of DTensor's collectives, and the number of collectives in a function that a rank is blocked in",
    public="the definitions of functions that TensorFlow has generated",
    why="a function is read before it is removed",
    test="tensorflow/test_tf_timeline.py::test_dtensors_collectives_are_numbered_although_their_keys_repeat",
)  # fmt: skip
COLLECTIVES: Final = _SIZES(
    f"{_COLLECTIVES}:collective_reduce", f"{_COLLECTIVES}:collective_reduce_v2", f"{_COLLECTIVES}:collective_gather",
    f"{_COLLECTIVES}:collective_gather_v2", f"{_COLLECTIVES}:collective_bcast_send", f"{_COLLECTIVES}:collective_bcast_send_v2",
    f"{_COLLECTIVES}:collective_bcast_recv", f"{_COLLECTIVES}:collective_bcast_recv_v2",
    f"{_COLLECTIVES}:collective_reduce_scatter_v2", f"{_COLLECTIVES}:collective_all_to_all_v2",
    lost="bytes of collectives outside of tf.functions",
    why="these have no graph",
    test="tensorflow/test_tf_timeline.py::test_the_broadcast_of_a_variables_first_value_has_its_size",
)  # fmt: skip

# All else

AUTOGRAPH: Final = _TENSORFLOW(
    "tensorflow.python.autograph.pyct.loader:load_source(source, delete_on_exit)",
    lost="AutoGraph without temporary files",
    public="an AutoGraph that loads functions from memory",
    why="it removes its temporary files at exit, which a rank never reaches",
    test="tensorflow/test_tensorflow.py::test_autograph_writes_no_file",
    listed="AutoGraph",
)
DEVICE_DATASETS: Final = _TENSORFLOW(
    "tensorflow.python.data.ops.multi_device_iterator_ops:_create_device_dataset",
    lost="the quick end of a distributed dataset's iterator",
    public="a dataset whose autotuning ends at once",
    why="a thread checks its autotuning after 10 ms, 20 ms, 40 ms, ... and is often not woken when the iterator is deleted, "
    "which then takes up to as long as the training took (0 to 9 s after 24 steps on two busy cores)",
    test="tensorflow/test_tensorflow.py::test_datasets_that_feed_devices_are_not_autotuned",
    listed="deleting a distributed dataset's iterator",
)
DISTRIBUTED_BATCHES: Final = _TENSORFLOW(
    "tensorflow.python.distribute.input_lib:DistributedIteratorBase.__next__",
    lost="the note on a replica that has no samples in a batch",
    public="a hook where a program takes a batch",
    why="a mean over no samples is nan, without a word",
    test="tensorflow/test_tf_data.py::test_a_replica_without_samples_is_noted",
)
LOG: Final = _TENSORFLOW(
    lost="short log messages",
    public="none is needed",
    why="a lost parameter server is logged some ten times with 15 lines each; the root logger prints each message again",
    test="tensorflow/test_tf_lost_workers.py::test_an_error_in_the_log_is_one_line_once",
    listed="log messages about failed operations",
)
TABLE: Final = tuple(entry for entry in list(globals().values()) if isinstance(entry, PrivateNames))


def lost() -> list[str]:
    """Return what the installed TensorFlow and Keras lack the names for; for `lab.doctor`, since it imports both."""
    return [entry.lost for entry in TABLE if not entry.found]
