"""The table of what labkit replaces in TensorFlow agrees with the code, and with the table for students."""

from __future__ import annotations

import re
from pathlib import Path

from labkit.worker.runtimes.tensorflow import tensorflow_internals
from labkit.worker.runtimes.tensorflow.tensorflow_internals import Patch

ENTRIES = {name: entry for name, entry in vars(tensorflow_internals).items() if isinstance(entry, Patch)}


def test_what_is_replaced_stands_in_the_table() -> None:
    folder = Path(tensorflow_internals.__file__).parent
    text = "".join(path.read_text() for path in folder.glob("*.py") if path.name != "tensorflow_internals.py")
    replaced = set(re.findall(r"\b([A-Z_]+)\.(?:apply|replace|set)\(", text))
    assert replaced == {name for name, entry in ENTRIES.items() if entry.paths} - {"PENDING"}
    assert re.findall(r"setattr\(|functools\.wraps", text) == []


def test_students_read_about_all_patches_that_programs_notice() -> None:
    text = (Path(__file__).parents[3] / "docs" / "programs.md").read_text()
    section = text.partition("### What labkit patches in TensorFlow and Keras")[2].partition("\n#")[0]
    _, _, *rows = re.findall(r"^\| *(.*?) *\|", section, re.MULTILINE)
    assert set(rows) == {entry.listed for entry in ENTRIES.values() if entry.listed}
