"""`lab.fault`: the programs in notebooks/faults/, what labkit says about each, and that the fixed ones are right."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
import torch

import labkit as lab
from labkit.teaching.faults import PROGRAMS
from tools.faults import CATALOGUE, compared, fixed

pytestmark = pytest.mark.processes
NAMES = sorted(path.stem for path in PROGRAMS.glob("*.py"))
# What a run with `check=True` shows of each: a part of the error or of the verdict; "" where labkit sees nothing.
SEEN = {
    "accumulation": "Inside no_sync() (accumulation.py",
    "accuracy": "2 samples came twice",
    "adapt": "spare.weight and spare.bias got none",
    "decaying_rate": "",
    "early_stopping": "The ranks parted at `while not stop`",
    "expert_tokens": "rank 1 sends 5 rows to rank 0,\nwhich expects 4",
    "batch_loss": "",
    "gradient_average": "was never waited for",
    "held_out": "",
    "many_files": "The ranks parted at `for x in DataLoader(",
    "normalised": "After the last step, buffers differ between rank 0 and rank 1",
    "sentences": "have 22 and 117 rows on rank 0 and rank 1",
    "split_layer": "All ranks gave all_gather (split_layer.py, line 17) the same numbers",
    "two_levels": "Every rank must call new_group for each group",
}
SERIAL = [name for name in NAMES if name != "held_out"]  # its ranks train with other examples than one rank does


def what_labkit_says(name: str) -> str:
    try:
        return str(lab.verdict(lab.fault(name).run()))
    except lab.RunError as error:
        return str(error)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_seen_of_a_fault(name: str) -> None:
    said = what_labkit_says(name)
    assert SEEN[name] in said if SEEN[name] else said.startswith("No fault was found"), said


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", SERIAL)
def test_a_fixed_program_has_the_result_of_one_rank(name: str, ranks: int) -> None:
    assert compared(fixed(name), lab.fault(name), ranks) < 1e-5


@pytest.mark.parametrize("name", ["accuracy", "adapt", "decaying_rate", "batch_loss", "normalised", "sentences"])
def test_without_the_cure_the_result_is_another(name: str) -> None:
    fault = lab.fault(name)
    assert compared(fault, fault, fault.ranks) > 1e-4


def test_labels_without_meaning_show_a_leak_and_its_cure() -> None:
    def by_chance(x: torch.Tensor) -> torch.Tensor:
        return torch.rand(len(x)) > 0.5

    runs: dict[str, Any] = {"leak": lab.fault("held_out"), "fixed": fixed("held_out")}
    right = {name: fault.run(by_chance, ranks=4).results[0].item() for name, fault in runs.items()}
    assert right["leak"] > 0.65
    assert 0.35 < right["fixed"] < 0.65


@pytest.mark.parametrize("name", NAMES)
def test_each_program_is_short_and_names_its_source_and_date(name: str) -> None:
    source = lab.fault(name).source
    assert len(source.splitlines()) < 40
    assert re.match(r"# Reported in [\w.-]+/[\w.-]+#\d+ (on \d+|in) [A-Z]\w+ 202[3-6]; this program was written", source)
    assert "labkit" not in source.partition("\n")[2]  # plain PyTorch


def test_the_catalogue_explains_each_program() -> None:
    assert sorted(tomllib.loads(CATALOGUE.read_text("utf-8"))) == NAMES


def test_an_unknown_name() -> None:
    with pytest.raises(lab.LabError, match="no fault is called 'sentence'; there are: accumulation, accuracy"):
        lab.fault("sentence")
