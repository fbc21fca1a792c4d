"""Values of tensors without data: they can be printed and computed with; a program that decides by one is refused."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, Final

import torch

from labkit.comm.private_names import in_place_of
from labkit.comm.torch_internals import SIMULATION
from labkit.errors.exceptions import LabError
from labkit.recording.record import is_students
from labkit.simulation.kernel_mode import computed
from labkit.simulation.rank_log import RankLog

__all__ = ["UnknownNumber", "hide_values"]

ARITHMETIC: Final = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "pow", "rpow",
    "neg", "pos", "abs",
)  # fmt: skip
DECISIONS: Final = ("bool", "eq", "ne", "lt", "le", "gt", "ge", "int", "round", "trunc", "floor", "ceil")
NUMBERS: Final = {  # methods of tensors that need the data, in words
    "__bool__": "a condition", "__int__": "int()", "__index__": "an index", "tolist": "tolist()", "numpy": "numpy()",
    "__array__": "numpy.array()",
}  # fmt: skip


def _refusal(use: str) -> LabError:
    return LabError(
        f"{use} needs the value of a tensor, and a simulated rank computes with tensors without data. "
        "Let what the program does depend on ranks and shapes only, or run it in a group."
    )


class UnknownNumber(float):
    """A number that is not known: NaN that prints as "?"."""

    def __new__(cls) -> UnknownNumber:
        """Return an unknown number."""
        return super().__new__(cls, math.nan)

    def __repr__(self) -> str:
        return "?"

    def __format__(self, _: str) -> str:
        return "?"

    __str__ = __repr__
    __hash__ = float.__hash__


def _unknown(_: UnknownNumber, *__: object) -> UnknownNumber:
    return UnknownNumber()


def _decision(name: str) -> Callable[..., Any]:
    def decide(_: UnknownNumber, *__: object) -> Any:
        raise _refusal({"bool": "a condition"}.get(name, "a comparison or rounding"))

    return decide


for _name in ARITHMETIC:
    setattr(UnknownNumber, f"__{_name}__", _unknown)
for _name in DECISIONS:
    setattr(UnknownNumber, f"__{_name}__", _decision(_name))


def hide_values(log: RankLog) -> None:
    """From now on in this process, answer for the values of tensors without data.

    Args:
        log: knows which tensors have data.
    """

    def hidden(tensor: Any) -> bool:
        local = getattr(tensor, "to_local", None)  # a DTensor consists of a local tensor
        return not log.has_value(tensor if local is None else local())

    def item(original: Callable[..., Any], tensor: Any) -> Any:
        if not hidden(tensor):
            return computed(original, tensor)
        if is_students(sys._getframe(2).f_code.co_filename):
            return UnknownNumber()
        return 1.0 if tensor.is_floating_point() else 1  # torch's own code, such as Adam's count of steps

    def refusing(use: str) -> Callable[..., Any]:
        def refuse(original: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if hidden(tensor):
                raise _refusal(use)
            return computed(original, tensor, *args, **kwargs)

        return refuse

    def in_words(original: Callable[..., Any], tensor: Any, how: str) -> str:
        return "?" if hidden(tensor) and tensor.dim() == 0 else original(tensor, how)

    ours = {"item": item, "__float__": lambda original, tensor: math.nan if hidden(tensor) else computed(original, tensor)}
    ours |= {"__format__": in_words} | {name: refusing(use) for name, use in NUMBERS.items()}
    tensor_class: Any = torch.Tensor
    fake_tensor = SIMULATION["FakeTensor"]
    for name, function in ours.items():
        if name in vars(fake_tensor):  # otherwise it inherits the method
            setattr(fake_tensor, name, in_place_of(getattr(fake_tensor, name), function))
        setattr(tensor_class, name, in_place_of(getattr(tensor_class, name), function))
