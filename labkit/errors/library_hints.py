"""Hints for errors of libraries whose text does not say what to change."""

from __future__ import annotations

from typing import Final

_SHARED_MEMORY_FULL: Final = (
    "/dev/shm is full: a container has 64 MiB of it by default. lab.doctor() says how much there is, and how to get more; "
    "a DataLoader with num_workers=0 needs none."
)
_ONE_DEVICE: Final = 'This rank has one CPU device. lab.Group(..., devices_per_rank=2) gives each rank two, "CPU:0" and "CPU:1".'
# A part of the error's text, and the usual mistake behind it.
_HINTS: Final = {
    "Collective ops must be configured at program startup": (
        "TensorFlow had already computed something in this process: create the strategy first, before any tensor, "
        "variable or model."
    ),
    "Virtual devices cannot be modified after being initialized": (
        "TensorFlow had already used its devices in this process: set them before its first tensor, or create the group "
        "with `devices_per_rank`."
    ),
    "Collective instance": (
        "The workers ran different collectives. Under MultiWorkerMirroredStrategy all must have the same number of batches and "
        "of epochs: look for datasets of unlike length; `steps_per_epoch` with `dataset.repeat()` makes them equal."
    ),
    "called while defining a new graph or a tf.function": (  # merge_call
        "Inside strategy.run, apply_gradients waits for all replicas, and tf.cond excludes that. Decide outside of strategy.run, "
        "or let the optimizer count: gradient_accumulation_steps."
    ),
    "CPU:1 unknown device": _ONE_DEVICE,
    "device:CPU:1'. enable_soft_placement=0": _ONE_DEVICE,
    "devices for spec /device:CPU:1": _ONE_DEVICE,
    "got mixed torch.Tensor and DTensor": (
        "A parameter is sharded here. FSDP2 gathers parameters for forward() only; for another method that computes with them, "
        "call torch.distributed.fsdp.register_fsdp_forward_method(model, 'method')."
    ),
    "is not part of group": "src and dst are ranks of the whole world. A group's own number goes to group_src or group_dst.",
    "invalid output tensor list at index 0": (
        "Each rank of the group needs one tensor in the list. Without `group=`, the group is that of all ranks."
    ),
    "Can't pickle local object": "RPC sends functions by name: define them with `def` at the top of a cell, not inside another.",
    "unable to allocate shared memory(shm) for file </torch_": _SHARED_MEMORY_FULL,
    "unable to write to file </torch_": _SHARED_MEMORY_FULL,  # older versions of torch
    "is killed by signal: Bus error": _SHARED_MEMORY_FULL,  # a DataLoader's worker
    "OSError: [Errno 28] No space left on device": (  # also of a semaphore, which DataLoader's queues need
        "A disk or /dev/shm is full: `df -h` in a terminal shows which. For /dev/shm, lab.doctor() says how to get more; "
        "a DataLoader with num_workers=0 needs none."
    ),
    "Error while creating shared memory segment /dev/shm/nccl": _SHARED_MEMORY_FULL,
}


def library_hint(headline: str) -> str:
    """Return the usual mistake behind a library's error, given its type and text; "" if there is nothing to add."""
    return next((hint for text, hint in _HINTS.items() if text in headline), "")
