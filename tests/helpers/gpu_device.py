"""What the tests marked `gpu` run on: the machine's GPUs, or, in a rehearsal, its CPU.

`LABKIT_GPU_REHEARSAL=1` runs those that a CPU can run as well, so that most of their code runs without a GPU.
"""

from __future__ import annotations

import os
from typing import Final

import pytest
import torch

REHEARSAL: Final = os.environ.get("LABKIT_GPU_REHEARSAL") == "1"
GPUS: Final = torch.cuda.device_count()
DEVICES: Final = "cpu" if REHEARSAL else "cuda"  # the `devices` argument of a group

gpu: Final = [
    pytest.mark.processes,
    pytest.mark.gpu,
    pytest.mark.skipif(not GPUS and not REHEARSAL, reason="no GPU here: `make gpu` runs this test on a machine with one"),
]
needs_cuda: Final = pytest.mark.skipif(not GPUS, reason="no GPU here: `make gpu` runs this test on a machine with one")
needs_two_gpus: Final = pytest.mark.skipif(
    GPUS < 2, reason=f"needs two GPUs, one for each rank of NCCL; there {'is' if GPUS == 1 else 'are'} {GPUS}"
)
