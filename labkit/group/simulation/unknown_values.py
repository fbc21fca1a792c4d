"""Values of tensors without data: they can be printed and computed with; a program that decides by one is refused.

Exceptions are tests for numbers that are not finite or out of bounds: they find none, as in a run that goes well.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from labkit.errors.exceptions import LabError
from labkit.group.simulation.kernel_mode import computed
from labkit.group.simulation.rank_log import RankLog
from labkit.recording.record import is_students
from labkit.recording.torch_internals import SIMULATION, wrap

ARITHMETIC: Final = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "pow", "rpow",
    "neg", "pos", "abs",
)  # fmt: skip
DECISIONS: Final = {  # methods of numbers that need the value, in words
    "bool": "a condition", "int": "int()", "index": "a whole number",
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), "a comparison"),
    **dict.fromkeys(("round", "trunc", "floor", "ceil"), "rounding"),
}  # fmt: skip
NUMBERS: Final = {  # methods of tensors that need the data, in words
    "__bool__": "a condition", "__int__": "int()", "__index__": "an index", "numpy": "numpy()", "__array__": "numpy.array()",
}  # fmt: skip
# Files of torch that look for what is not finite or out of bounds, and do something else if they find it.
SEARCHES: Final = tuple(os.path.join("torch", *path) for path in (
    ("amp", "grad_scaler.py"), ("nn", "init.py"), ("nn", "utils", "clip_grad.py"),
))  # fmt: skip
FINITE: Final = {"isfinite": True, "isinf": False, "isnan": False}  # functions of `math`, and what they say of a number


def _refusal(use: str) -> LabError:
    return LabError(
        f"{use} needs the value of a tensor, and a simulated rank computes with tensors without data. "
        "Simulate the program without this line, with a fixed number of steps, say; or run it in a group."
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
        raise _refusal(DECISIONS[name])

    return decide


for _name in ARITHMETIC:
    setattr(UnknownNumber, f"__{_name}__", _unknown)
for _name in DECISIONS:
    setattr(UnknownNumber, f"__{_name}__", _decision(_name))


def hide_values(log: RankLog) -> None:
    """From now on in this process, answer for the values of tensors without data."""

    def hidden(tensor: Any) -> bool:
        local = getattr(tensor, "to_local", None)  # a DTensor consists of a local tensor
        return not log.has_value(tensor if local is None else local())

    def item(original: Callable[..., Any], tensor: Any) -> Any:
        if not hidden(tensor):
            return computed(original, tensor)
        code = sys._getframe(2).f_code
        if is_students(code.co_filename) or code.co_name == "get_scale":  # of torch's GradScaler, for the student
            return UnknownNumber()
        if code.co_filename.endswith(SEARCHES):
            return 0
        return 0.5 if tensor.is_floating_point() else 1  # torch divides by such numbers, and by what they lack to 1

    def tolist(original: Callable[..., Any], tensor: Any) -> Any:
        if not hidden(tensor):
            return computed(original, tensor)
        if not is_students(sys._getframe(2).f_code.co_filename):
            raise _refusal("tolist()")
        return unknown_list(tensor.shape)

    def unknown_list(shape: Sequence[int]) -> Any:
        return [unknown_list(shape[1:]) for _ in range(shape[0])] if shape else UnknownNumber()

    def refusing(use: str) -> Callable[..., Any]:
        def refuse(original: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if not hidden(tensor):
                return computed(original, tensor, *args, **kwargs)
            if sys._getframe(2).f_code.co_filename.endswith(SEARCHES):
                return False
            raise _refusal(use)

        return refuse

    def in_words(original: Callable[..., Any], tensor: Any, how: str) -> str:
        return "?" if hidden(tensor) and tensor.dim() == 0 else original(tensor, how)

    def shown(original: Callable[..., Any], tensor: Any, **kwargs: Any) -> str:
        if not hidden(tensor):
            return str(computed(original, tensor, **kwargs))
        return f"tensor(?, size={tuple(tensor.shape)})" if tensor.dim() else "tensor(?)"

    def finite(answer: bool) -> Callable[..., bool]:
        return lambda original, number: answer if isinstance(number, UnknownNumber) else original(number)

    wrap(math, **{name: finite(answer) for name, answer in FINITE.items()})
    ours: dict[str, Callable[..., Any]] = {
        "item": item,
        "__float__": lambda original, tensor: math.nan if hidden(tensor) else computed(original, tensor),
    }
    ours |= {"__format__": in_words, "__repr__": shown, "tolist": tolist}
    ours |= {name: refusing(use) for name, use in NUMBERS.items()}
    fake_tensor = SIMULATION["FakeTensor"]
    wrap(fake_tensor, **{name: function for name, function in ours.items() if name in vars(fake_tensor)})  # it inherits others
    wrap(torch.Tensor, **ours)
