"""Pickles that name anything but data are refused."""

from __future__ import annotations

import collections
import decimal
import os
import pickle
from fractions import Fraction
from typing import Any, get_args

import numpy as np
import pytest
import torch

from labkit.costs.device import Kernel
from labkit.group.simulation.program import (
    Communication,
    Elapsed,
    Event,
    Mark,
    Memory,
    OnStream,
    Program,
    StreamEvent,
    Value,
    Wait,
)
from labkit.ipc import pickling
from labkit.teaching.classroom.packed_answer import only_trusted_pickles
from labkit.teaching.exercises.comparisons import AnswerError

EVENTS = (
    Kernel("mm", 1.0, 1.0, 1.0), Memory(1), Elapsed(1), Communication(0, "send", 1, (0, 1), "0"), Wait(0),
    Mark("step", "step", True), OnStream(1), StreamEvent(0, 1, True), Value("loss", 1.0),
)  # fmt: skip
DATA = [
    1, "text", [1.5, None], {"a": (1, 2)}, {1, 2}, range(3), 2j, collections.Counter("aab"), decimal.Decimal("1.5"),
    Fraction(1, 3), np.arange(3), np.float32(1.5), np.ones((300, 300)), torch.ones(2), torch.ones(300, 300, dtype=torch.bfloat16),
    torch.Size([1]), Program(0, 1, EVENTS),
]  # fmt: skip


class Calls:
    def __init__(self, function: Any, *args: Any) -> None:
        self.reduced = function, args

    def __reduce__(self) -> Any:
        return self.reduced


CODE = compile("1 / 0", "cell 1", "exec")
ATTACKS = [
    Calls(os.system, "true"), Calls(eval, "1"), Calls(getattr, "text", "upper"), Calls(pickle.loads, b""), Calls(torch.load, "x"),
    Calls(pickling.install_source, "a", []), Calls(pickling._function_in_main, b"", None), np.add, torch.nn.Linear,
    Calls(__import__, "labkit.teaching.exercises.data_parallel"),
]  # fmt: skip


@pytest.mark.parametrize("value", DATA, ids=lambda value: type(value).__name__)
def test_data_passes(value: Any) -> None:
    with only_trusted_pickles():
        back = pickling.unpack(pickling.pack(value))
    assert type(back) is type(value)


def test_every_event_of_a_simulated_rank_is_data() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(Event))


@pytest.mark.parametrize("attack", ATTACKS, ids=range(len(ATTACKS)))
def test_everything_else_is_refused(attack: Any) -> None:
    sent = pickle.dumps(attack)
    with only_trusted_pickles(), pytest.raises(AnswerError, match="expected numbers"):
        pickle.loads(sent)


def test_outside_of_the_block_nothing_is_refused() -> None:
    assert pickle.loads(pickle.dumps(np.add)) is np.add
