"""Installs in a rank what records its collectives, messages and RPCs, without changes to the student's code.

torch creates its process groups from the class that is called `ProcessGroup`. In a rank this name refers to a subclass
of labkit's, whose methods record their calls. All communication uses them: `torch.distributed`'s functions,
DistributedDataParallel's reducer in C++, functional collectives (DTensor, FSDP2), and pipelines. The same methods delay
operations on an emulated link.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Final

import torch
import torch.distributed.distributed_c10d as c10d

from labkit.recording.import_hook import when_imported
from labkit.recording.record import Recorder, here
from labkit.recording.torch_internals import COMPILED_OPERATIONS, GPU_START, PROCESS_GROUPS, REMOTE_CALLS
from labkit.worker.comm import phases
from labkit.worker.comm.backward import in_backward
from labkit.worker.comm.cuda_timing import DeviceClock
from labkit.worker.comm.emulated_link import SlowLink
from labkit.worker.comm.futures import Futures
from labkit.worker.comm.members import Numbering, watch_creation
from labkit.worker.comm.process_group import recorded_process_group
from labkit.worker.comm.work import keep_for_reducers

UNTRACED: Final = ("labkit.worker.comm", "labkit.recording")


def watch(recorder: Recorder, slow: SlowLink | None = None, *, given: bool = True) -> None:
    """Record the operations of all process groups that are created from now on, and remote calls, delayed by `slow`.

    To be called before `init_process_group`, and before `init_rpc`, when C++ looks up the functions that it calls.
    `given` is as in `Numbering`.
    """
    futures = prepare()
    recorder.ring.in_backward = lambda: in_backward() != -1
    recorder.facts = phases.install().facts
    if PROCESS_GROUPS.found:
        numbering = Numbering(recorder.rank, recorder.size, given=given)
        c10d.ProcessGroup = recorded_process_group(recorder, futures, numbering, slow)  # type: ignore[misc]
        watch_creation(recorder)
    if REMOTE_CALLS.found:
        from labkit.worker.comm.rpc_calls import RpcCalls  # not every build of torch has RPC

        RpcCalls(recorder, futures, slow).install()


def watch_script(recorder: Recorder, *, given: bool = True) -> bool:
    """Record everything that a script may use that labkit did not start: process groups, RPC, and GPUs.

    To be called once torch has been imported; `given` is as in `Numbering`. Returns whether there already was a default
    group, whose operations are not recorded.
    """
    late = c10d.GroupMember.WORLD is not None
    watch(recorder, given=given)
    if torch.version.cuda is not None and GPU_START.found:
        # Called when torch initializes CUDA. Before that there is nothing to time, and a query for GPUs could
        # initialize CUDA.
        GPU_START["_lazy_call"](lambda: watch_device(recorder, torch.device("cuda")))
    return late


@functools.cache
def prepare() -> Futures:
    """Replace in this process, at the first call, what needs no recorder; return what records waits for futures.

    The server that forks ranks does this for them: it would take 1 ms of each, and 5 more for `phases.install`.
    """
    futures = Futures()
    futures.install()
    phases.install()
    when_imported("torch._dynamo.trace_rules", _run_untraced)
    keep_for_reducers()
    return futures


def _run_untraced(_: ModuleType) -> None:
    """Let `torch.compile` call what records operations as it calls C++, instead of compiling it.

    torch's process groups have no Python code. Where compiled code calls one, after a graph break, torch would compile
    our methods, and refuse, since a process group may have no attributes that it does not know. There is no public way
    to exclude a package; without this, such a program fails. Test: `test_compiled.py`.
    """
    for package in UNTRACED if COMPILED_OPERATIONS.found else ():
        COMPILED_OPERATIONS["add"](package)


def watch_device(recorder: Recorder, device: torch.device) -> None:
    """Time spans and operations by the GPU, if this is the device on which the rank computes."""
    if device.type == "cuda":
        recorder.device_clock = DeviceClock(recorder.ring)
        here.forget_spans()  # existing span objects are timed by the host
