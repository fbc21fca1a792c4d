"""A step of a `DistributedOptimizer` is seen where it is made: on the owner of the parameters.

torch calls a script function there, which C++ runs, unseen. In its place the owner calls a function of Python, which
calls the same script of the same optimizer: what is computed is the same, without the interpreter's lock as before.
"""

from __future__ import annotations

from typing import Any

__all__ = ["step_in_python"]


def step_in_python() -> None:
    """From now on, as this process calls steps."""
    try:
        from torch.distributed.optim import optimizer
    except ImportError:  # a build of torch without distributed optimizers
        return
    if hasattr(optimizer, "_script_local_optimizer_step"):
        setattr(optimizer, "_script_local_optimizer_step", _script_local_optimizer_step)  # noqa: B010  # it has another type


def _script_local_optimizer_step(local_optim_rref: Any, autograd_ctx_id: int) -> None:
    """The name is torch's, by which the call is told."""
    local_optim_rref.local_value().step(autograd_ctx_id)
