"""The table of what labkit replaces in TensorFlow agrees with the code, and with the table for students."""

from __future__ import annotations

import re
from pathlib import Path

from labkit.worker.runtimes.tensorflow import tensorflow_internals
from labkit.worker.runtimes.tensorflow.tensorflow_internals import TABLE

ENTRIES = {name for name, entry in vars(tensorflow_internals).items() if entry in TABLE}
ROWS = {  # for students, in docs/programs.md, on the entries that programs notice
    "Keras 3 `fit`, `evaluate` under `MultiWorkerMirroredStrategy`": {"FIT"},
    "files that several workers write to one path (`ModelCheckpoint`, `BackupAndRestore`)": {"FILES"},
    "`MultiWorkerMirroredStrategy` with several logical CPUs": {"LOGICAL_CPUS"},
    "`tf.distribute.Server` in a worker or parameter server": {"CLUSTER"},
    "TensorFlow's servers": {"CLUSTER"},
    "`tf.data`'s service": {"DATA_SERVICE"},
    "`MirroredStrategy` with a device that the rank lacks; `ParameterServerStrategy` outside the chief": {
        "MIRRORED", "PARAMETER_SERVERS",
    },
    "AutoGraph": {"AUTOGRAPH"},
    "deleting a distributed dataset's iterator": {"DEVICE_DATASETS"},
    "stopping TensorFlow's profiler (2.21)": set(),  # profiler_defect.py: what it replaces has no name in Python
}  # fmt: skip


def test_what_is_replaced_stands_in_the_table() -> None:
    folder = Path(tensorflow_internals.__file__).parent
    text = "".join(path.read_text() for path in folder.glob("*.py") if path.name != "tensorflow_internals.py")
    replaced = set(re.findall(r"\b([A-Z_]+)\.(?:apply|replace|set)\(", text))
    assert replaced == ENTRIES - {"PENDING"}
    assert re.findall(r"setattr\(|functools\.wraps", text) == []


def test_students_read_about_all_patches_that_programs_notice() -> None:
    text = (Path(__file__).parents[3] / "docs" / "programs.md").read_text()
    section = text.partition("### What labkit patches in TensorFlow and Keras")[2].partition("\n#")[0]
    _, _, *rows = re.findall(r"^\| *(.*?) *\|", section, re.MULTILINE)
    assert set(rows) == ROWS.keys()
    assert set().union(*ROWS.values()) <= ENTRIES
