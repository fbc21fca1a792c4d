"""In a real Jupyter kernel: the hints after programs that were written for a launcher."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("ipykernel", reason="needs ipykernel")
pytest.importorskip("torch", reason="needs torch")
from kernels import Kernel, shared_kernel

from labkit.notebook.spawn_hint import NO_RANK, SPAWN

pytestmark = pytest.mark.processes

CELLS = """
import functools, operator, os
import labkit as lab
import torch.distributed as dist
import torch.multiprocessing as mp
def train(rank): ...
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with shared_kernel(tmp_path_factory.mktemp("kernel")) as kernel:
        assert kernel(CELLS).error is None
        yield kernel


@pytest.mark.parametrize(
    ("cell", "error", "hint"),
    [
        ("mp.spawn(train, nprocs=1)", "ProcessExitedException", SPAWN),
        ("mp.spawn(operator.truediv, args=(0,), nprocs=1)", "ProcessRaisedException", ""),  # found, and called: another error
        ("mp.spawn(os._exit, nprocs=1)", "", ""),  # ends with exit code 0
        ("mp.spawn(functools.partial(max, 3, key=os._exit), nprocs=1)", "ProcessExitedException", ""),  # found: exit code 3
        ("1", "", ""),
        ("dist.init_process_group('gloo')", "ValueError", NO_RANK),
        ("raise ValueError('RANK')", "ValueError", ""),
    ],
)
def test_what_was_written_for_a_launcher_leads_to_ranks(cell: str, error: str, hint: str, kernel: Kernel) -> None:
    ran = kernel(cell)
    assert (ran.error or [""])[0] == error
    assert [words for words in (SPAWN, NO_RANK) if words in ran.stderr] == [hint] * bool(hint)
    assert ran.stderr.endswith(f"{hint}\n" if hint else "")
    assert "\n" not in hint
