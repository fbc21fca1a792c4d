"""Calls that cannot be simulated: each raises an error that says why, and what to do instead.

One does nothing instead: almost every program saves its parameters.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, Final

import torch
from torch.nn.parallel import DistributedDataParallel

from labkit.errors.exceptions import LabError
from labkit.recording.import_hook import when_imported
from labkit.recording.torch_internals import wrap

HERE: Final = ("cpu", "meta")  # devices of a simulated rank's tensors
# What cannot be simulated, where it is, and why.
REFUSED: Final = (
    ("torch", "compile", "its kernels are those of generated code. Simulate the program without torch.compile"),
    ("torch.distributed.checkpoint", "save", "tensors have no data to be saved. Simulate the program without it"),
    ("torch.distributed.rpc", "init_rpc", "other ranks decide when this one is called. Run it in a group"),
    ("torch.distributed", "recv_object_list", "it receives data. Run it in a group"),
    ("torch.distributed", "scatter_object_list", "it receives data. Run it in a group"),
    ("torch.distributed", "broadcast_object_list", "it receives data. Run it in a group, or have each rank make the objects"),
    ("torch.distributed", "monitored_barrier", "it is a check of gloo's. Use dist.barrier()"),
)


def refuse_calls() -> None:
    """From now on in this process, refuse what cannot be simulated, and save nothing."""
    _save_nothing()
    for home, name, why in REFUSED:
        when_imported(home, partial(_refuse, name, why))
    when_imported("torch.distributed.fsdp", _refuse_offloading)
    when_imported("tensorflow", _refuse_module)
    when_imported("torch.distributed.pipelining.stage", _check_stages)
    _refuse("join", "how long it lasts depends on the batches of other ranks. Run it in a group", DistributedDataParallel)


def _refuse(name: str, why: str, home: Any) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise LabError(f"{home.__name__}.{name} cannot be simulated: {why}.")

    setattr(home, name, refuse)


def _refuse_offloading(module: Any) -> None:
    _refuse("__init__", "only one memory of a rank is. lab.plan(..., offload=...) plans it", module.CPUOffloadPolicy)


def _check_stages(module: Any) -> None:
    """Have stages of pipelines refuse to be created without the shapes that they receive and send."""

    def create(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        if given.get("input_args") is None or given.get("output_args") is None:
            raise LabError(
                "a PipelineStage without input_args and output_args cannot be simulated: the stages would send each other "
                "the shapes of their tensors. Give both, as in PipelineStage(..., input_args=torch.empty(2, 64), "
                "output_args=torch.empty(2, 64, requires_grad=True))."
            )
        original(*args, **kwargs)

    wrap(module.PipelineStage, __init__=create)


def _refuse_module(module: ModuleType) -> None:
    raise LabError(f"programs with {module.__name__} cannot be simulated, only those with torch. Run it in a group.")


def _save_nothing() -> None:
    """Have `torch.save` do nothing, so that no file of the student's is overwritten by one without data."""
    notes: list[str] = []

    def save(_: Callable[..., None], *__: Any, **___: Any) -> None:
        if not notes:
            notes.append("torch.save")
            print("labkit: torch.save saves nothing in a simulation, whose parameters are not trained.", file=sys.stderr)

    wrap(torch, save=save)


def check_device(device: Any) -> None:
    """Raise LabError if a `torch.device`, its name, or the number of a GPU, is another device than the CPU."""
    if isinstance(device, int) or torch.device(device).type not in HERE:
        raise LabError(
            f"device {str(device)!r}: tensors of simulated ranks are on the CPU, whatever device is simulated. Write "
            "device = lab.device(), which is right in groups with and without GPUs, too."
        )


def refuse_other_devices() -> None:
    """From now on in this process, refuse to move tensors to GPUs, and to select one."""

    def move(original: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device", args[0] if args else None)
        if isinstance(device, int | str | torch.device):
            check_device(device)
        return original(tensor, *args, **kwargs)

    def move_to_gpu(_: Callable[..., Any], __: Any, device: Any = "cuda", **___: Any) -> None:
        check_device(0 if device is None else device)

    wrap(torch.Tensor, to=move, cuda=move_to_gpu)
    wrap(torch.nn.Module, cuda=move_to_gpu)
    wrap(torch.cuda, set_device=lambda _, device: check_device(device))
