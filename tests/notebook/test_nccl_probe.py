"""The probe of NCCL: which attempts are made, what they mean, and real processes with gloo in NCCL's place."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from typing import Any

import probe_ranks
import pytest

from labkit.notebook import nccl_probe
from labkit.notebook.findings import Finding
from labkit.notebook.nccl_probe import attempt, probe, verdict

P2P = {"NCCL_P2P_DISABLE": "1"}
BOTH = P2P | {"NCCL_SHM_DISABLE": "1"}
BROKEN = "no result within 10 s"
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@pytest.mark.parametrize(
    ("working", "made"),
    [
        (({}, P2P, BOTH), [({}, "")]),
        ((P2P, BOTH), [({}, BROKEN), (P2P, "")]),
        ((BOTH,), [({}, BROKEN), (P2P, BROKEN), (BOTH, "")]),
        ((), [({}, BROKEN), (P2P, BROKEN), (BOTH, BROKEN)]),
    ],
)
def test_attempts_end_with_the_first_that_works(working: tuple[dict[str, str], ...], made: list[Any]) -> None:
    assert probe(lambda variables: "" if variables in working else BROKEN) == made


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ([({}, "")], Finding("all-reduces 1 MB between 2 GPUs")),
        (
            [({}, BROKEN), (P2P, "")],
            Finding(
                f"all-reduces 1 MB between 2 GPUs only with NCCL_P2P_DISABLE=1; without: {BROKEN}", ok=False,
                remedy="in a cell before the first group:  import os; os.environ |= {'NCCL_P2P_DISABLE': '1'}",
            ),
        ),
        (
            [({}, BROKEN), (P2P, "full"), (BOTH, "")],
            Finding(
                f"all-reduces 1 MB between 2 GPUs only with NCCL_P2P_DISABLE=1 and NCCL_SHM_DISABLE=1; without: {BROKEN}",
                ok=False,
                remedy="in a cell before the first group:  "
                "import os; os.environ |= {'NCCL_P2P_DISABLE': '1', 'NCCL_SHM_DISABLE': '1'}",
            ),
        ),
        (
            [({}, BROKEN), (P2P, "full"), (BOTH, "no interface")],
            Finding(
                "fails between 2 GPUs over every transport: no interface", ok=False,
                remedy="lab.Group(2, devices='cpu') does without; NCCL_DEBUG=INFO makes NCCL say more",
            ),
        ),
    ],
)  # fmt: skip
def test_verdicts(made: list[Any], expected: Finding) -> None:
    assert verdict(made, 2) == expected


@needs_torch
@pytest.mark.processes
@pytest.mark.parametrize(
    ("rank", "limit_s", "why"),
    [
        (None, 60.0, ""),
        (probe_ranks.needs_variable, 60.0, "Call to posix_fallocate failed: No space left on device"),
        (probe_ranks.hangs, 0.5, "no result within 0.5 s"),
        (probe_ranks.wrong_sum, 60.0, "ArithmeticError: the sum is wrong: 3.0 instead of 2"),
        (probe_ranks.killed, 60.0, "ended by SIGBUS"),
    ],
)
def test_an_attempt(rank: Callable[..., Any], limit_s: float, why: str) -> None:
    assert re.sub(r"^\[rank\d\]: ", "", attempt({}, 2, backend="gloo", limit_s=limit_s, rank=rank)) == why  # torch's prefix


@needs_torch
@pytest.mark.processes
def test_the_variables_reach_the_ranks() -> None:
    assert attempt(P2P, 2, backend="gloo", limit_s=60.0, rank=probe_ranks.needs_variable) == ""


@needs_torch
@pytest.mark.processes
def test_ranks_that_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_probe, "IMPORT_LIMIT_S", 0.1)
    assert attempt({}, 2, backend="gloo", limit_s=0.1, rank=probe_ranks.hangs) == "no result within 0 s"
