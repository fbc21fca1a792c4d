"""Whether NCCL can all-reduce between the GPUs of this machine, and which transports must be switched off for it.

Each attempt runs in processes of its own, which end after ten seconds: over a broken transport NCCL waits for ever.

Source: NCCL_P2P_DISABLE and NCCL_SHM_DISABLE in NVIDIA's NCCL documentation, "Environment Variables",
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
"""

from __future__ import annotations

import datetime
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from labkit.errors.lists import listed
from labkit.notebook.findings import Finding, call_elsewhere, why_ended

LIMIT_S: Final = 10.0  # for connecting and reducing, which takes a second or two where it works
IMPORT_LIMIT_S: Final = 60.0  # for importing torch from a cold disk
VALUES: Final = 250_000  # of 4 bytes: 1 MB
TOO_LATE: Final = 75  # exit code
_NCCL_SAYS: Final = "NCCL WARN "
_P2P, _SHM = {"NCCL_P2P_DISABLE": "1"}, {"NCCL_SHM_DISABLE": "1"}
_TRANSPORTS: Final[tuple[dict[str, str], ...]] = ({}, _P2P, _P2P | _SHM)  # all; those of the host; the network only


def probe(attempt: Callable[[dict[str, str]], str]) -> list[tuple[dict[str, str], str]]:
    """Make attempts with fewer and fewer transports, until one succeeds.

    Args:
        attempt: makes one with these environment variables, and returns why it failed; "" if it did not.

    Returns:
        for each attempt its environment variables and why it failed.
    """
    made = []
    for variables in _TRANSPORTS:
        made.append((variables, attempt(variables)))
        if not made[-1][1]:
            break
    return made


def verdict(made: Sequence[tuple[dict[str, str], str]], gpus: int) -> Finding:
    """Say what the attempts mean, and which variables to set."""
    (_, as_it_is), (variables, last) = made[0], made[-1]
    done = f"all-reduces 1 MB between {gpus} GPUs"
    if not as_it_is:
        return Finding(done)
    if last:
        remedy = "lab.Group(2, devices='cpu') does without; NCCL_DEBUG=INFO makes NCCL say more"
        return Finding(f"fails between {gpus} GPUs over every transport: {last}", ok=False, remedy=remedy)
    found = f"{done} only with {listed([f'{name}={value}' for name, value in variables.items()])}; without: {as_it_is}"
    return Finding(found, ok=False, remedy=f"in a cell before the first group:  import os; os.environ |= {variables}")


def attempt(
    variables: Mapping[str, str],
    ranks: int,
    *,
    backend: str = "nccl",
    limit_s: float = LIMIT_S,
    rank: Callable[..., dict[str, Any]] | None = None,
) -> str:
    """All-reduce 1 MB between processes of their own, and return why it failed; "" if it did not.

    Args:
        variables: environment variables of the processes.
        ranks: the number of processes, each with a GPU.
        backend: of torch.distributed; tests without a GPU use "gloo".
        limit_s: how long it may take once all processes have imported torch.
        rank: what the processes call; None for `all_reduce`.
    """
    with tempfile.TemporaryDirectory() as folder:
        meeting = os.path.join(folder, "meeting")
        processes = [
            call_elsewhere(
                rank or all_reduce, number, ranks, backend, meeting, limit_s,
                variables={"NCCL_DEBUG": "WARN"} | dict(variables), stderr=subprocess.STDOUT,
            )
            for number in range(ranks)
        ]  # fmt: skip
        deadline = time.monotonic() + IMPORT_LIMIT_S + limit_s
        codes: list[int | None] = [None]
        # Those that work wait for one that has failed, and would tell nothing.
        while None in codes and not any(codes) and time.monotonic() < deadline:
            time.sleep(0.05)
            codes = [process.poll() for process in processes]
        for process in processes:
            process.kill()
        said = [process.communicate()[0] for process in processes]
    if codes == [0] * ranks:
        return ""
    failed = [(code, text) for code, text in zip(codes, said, strict=True) if code]
    if warnings := [line.partition(_NCCL_SAYS)[2] for _, text in failed for line in text.splitlines() if _NCCL_SAYS in line]:
        return warnings[0]
    if not failed:
        return f"no result within {IMPORT_LIMIT_S + limit_s:.0f} s"
    code, text = failed[0]
    return f"no result within {limit_s:g} s" if code == TOO_LATE else why_ended(code, text)


def all_reduce(rank: int, ranks: int, backend: str, meeting: str, limit_s: float) -> dict[str, Any]:
    """Be a rank of an attempt.

    Args:
        rank: its number.
        ranks: the number of ranks.
        backend: of torch.distributed.
        meeting: a file by which the ranks meet.
        limit_s: how long all may take after all ranks have met; then this process ends.

    Raises:
        ArithmeticError: the sum is wrong.
    """
    import torch
    from torch import distributed as dist

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    values = torch.ones(VALUES, device=device)
    store = dist.FileStore(meeting, ranks)
    store.set(str(rank), "")
    store.wait([str(other) for other in range(ranks)], datetime.timedelta(seconds=IMPORT_LIMIT_S))
    timer = threading.Timer(limit_s, os._exit, [TOO_LATE])
    timer.daemon = True
    timer.start()
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    dist.all_reduce(values)
    if not bool((values == ranks).all()):
        raise ArithmeticError(f"the sum is wrong: {values[values != ranks][0].item()} instead of {ranks}")
    dist.destroy_process_group()
    timer.cancel()
    return {}
