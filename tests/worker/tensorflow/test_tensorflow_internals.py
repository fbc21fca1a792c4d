"""Without a private name of TensorFlow's, ranks start, results are right, and only what depends on the name is left
out. The table of what labkit replaces agrees with the code, the tests, and the table for students."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import hidden_names
import pytest
import tensorflow_internals_program

from labkit.comm.torch_internals import PrivateNames
from labkit.worker.runtimes.tensorflow import tensorflow_internals
from labkit.worker.runtimes.tensorflow.tensorflow_internals import Patch

needs_tensorflow = pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="needs TensorFlow")
ENTRIES = {name: entry for name, entry in vars(tensorflow_internals).items() if isinstance(entry, PrivateNames)}
PATCHES = {name: entry for name, entry in ENTRIES.items() if isinstance(entry, Patch)}
TRAINED = {"train", "scale", "compute", "copy", "data", "tracing step", "all_reduce 4", "all_reduce 8", "broadcast 4", "send 4"}
COORDINATED, READ, SAVED = {"coordinate", "send", "recv"}, {"read", "compute", "data"}, {"save", "compute"}
# What the program of an entry returns and records with all names; for the others, it is training.
EXPECTED: dict[str, tuple[list[Any], set[str]]] = {
    "CLUSTER": ([4.0], COORDINATED),
    "PARAMETER_SERVERS": ([4.0], COORDINATED),
    "DATA_SERVICE": ([2, 10], READ),
    "MIRRORED": ([2, 10], READ),
    "FILES": ([2], SAVED),
    "DISTRIBUTION": ([2], SAVED),
    "LOGICAL_CPUS": ([2, 256.0], TRAINED - {"copy", "send 4"}),  # with one device per rank
}
# What is no longer recorded; all else is.
LEFT_OUT = {
    "PROFILER": TRAINED - {"train", "scale"},
    "GRAPHS": {"all_reduce 4", "send 4"},
    "COLLECTIVES": {"all_reduce 8", "broadcast 4"},
}
# What the student is told.
TOLD = {"LOGICAL_CPUS", "FIT", "FILES", "CLUSTER", "DATA_SERVICE", "PROFILER_SERVER", "PROFILER"}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What is seen without each entry's names, by the entry's name; one process starts all ranks."""
    folder = tmp_path_factory.mktemp("hidden")
    found = hidden_names.reports(tensorflow_internals_program, list(ENTRIES), str(folder / "gone"), folder)
    return {report["name"]: report for report in found}


@pytest.mark.tf
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(600)  # the first one runs the programs of all entries
@needs_tensorflow
@pytest.mark.parametrize("name", ENTRIES)
def test_results_are_right_without(seen: dict[str, Any], name: str) -> None:
    assert "error" not in seen[name], seen[name]["error"]
    result, expected = EXPECTED.get(name, ([4, 256.0], TRAINED))
    lost = [ENTRIES[name].lost] if ENTRIES[name].paths else []  # so this TensorFlow has all other names
    assert seen[name]["results"] == [[lost, *result]] * (2 if expected <= TRAINED else 1)
    assert expected & set(seen[name]["recorded"]) == expected - LEFT_OUT.get(name, set())
    assert (ENTRIES[name].lost in seen[name]["said"]) == (name in TOLD)


def test_what_is_replaced_stands_in_the_table_as_a_patch() -> None:
    folder = Path(tensorflow_internals.__file__).parent
    text = "".join(path.read_text() for path in folder.glob("*.py") if path.name != "tensorflow_internals.py")
    replaced = set(re.findall(r"\b([A-Z_]+)\.(?:apply|replace|set)\(", text))
    assert replaced == {name for name, patch in PATCHES.items() if patch.paths}
    assert re.findall(r"setattr\(|functools\.wraps", text) == []


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_names_a_test(name: str) -> None:
    file, _, function = PATCHES[name].test.partition("::")
    assert f"\ndef {function}(" in (hidden_names.ROOT / "tests" / "worker" / file).read_text()


def test_students_read_about_all_patches_that_programs_notice() -> None:
    text = (hidden_names.ROOT / "docs" / "programs.md").read_text()
    section = text.partition("### What labkit patches in TensorFlow and Keras")[2].partition("\n#")[0]
    _, _, *rows = re.findall(r"^\| *(.*?) *\|", section, re.MULTILINE)
    assert set(rows) == {patch.listed for patch in PATCHES.values() if patch.listed}
