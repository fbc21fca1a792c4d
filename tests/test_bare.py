"""labkit with only its base dependencies: it imports, and errors for missing packages name the extra and the
command."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "tensorflow", "keras", "matplotlib", "ipywidgets", "anywidget", "sklearn", "numpy", "psutil", "IPython")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages that holds only labkit and its base dependencies."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "labkit").symlink_to(ROOT / "labkit")
    for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
        distribution = importlib.metadata.distribution(Requirement(line).name)
        for top in {file.parts[0] for file in distribution.files or () if not file.parts[0].startswith("..")}:
            (folder / top).symlink_to(distribution.locate_file(top))
    return folder


def output(*command: str, folder: Path = ROOT) -> Any:
    """What Python prints for a command, read as JSON."""
    answer = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def run(base: Path, program: str) -> Any:
    """Run a program that sees only these packages and the standard library."""
    return output("-I", "-S", "-c", f"import sys; sys.path.append({str(base)!r})\nimport json\n{program}", folder=base)


def test_importing_loads_nothing_heavy() -> None:
    assert output("-c", f"import sys, json, labkit; print(json.dumps(sorted(set({HEAVY}) & set(sys.modules))))") == []


def test_importing_needs_nothing_heavy(base: Path) -> None:
    assert run(base, "import labkit; print(json.dumps(labkit.__file__))") == str(base / "labkit" / "__init__.py")


def test_the_fixture_hides_the_frameworks(base: Path) -> None:
    program = f"from importlib.util import find_spec; print(json.dumps([n for n in {HEAVY} if find_spec(n)]))"
    assert run(base, program) == ["numpy", "psutil"]


def test_every_public_name_exists_or_names_its_extra(base: Path) -> None:
    program = """
import labkit
answers = {}
for name in labkit.__all__:
    try:
        getattr(labkit, name)
    except labkit.LabError as error:
        answers[name] = str(error)
print(json.dumps(answers))
"""
    for name, error in run(base, program).items():
        assert 'pip install "labkit[' in error, f"labkit.{name}: {error}"


@pytest.mark.parametrize(
    ("call", "extra"),
    [
        ("lab.Group(2)", "torch"),
        ("lab.Group(2, runtime='rpc')", "torch"),
        ("lab.Group(2, runtime='tensorflow')", "tf"),
        ("lab.timeline(lab.Trace(ranks=['rank 0']))", "plot"),
    ],
)
def test_using_a_missing_package_names_the_extra(base: Path, call: str, extra: str) -> None:
    program = f"""
import labkit as lab
try:
    {call}
except lab.LabError as error:
    print(json.dumps(str(error)))
"""
    assert f'pip install "labkit[{extra}]"' in run(base, program)


def test_ranks_and_traces_work_without_extras(base: Path) -> None:
    program = """
import labkit as lab
def work(n):
    with lab.span("forward"):
        lab.record(loss=1.0)
    return n
if __name__ == "__main__":
    with lab.Group(2, runtime="bare") as group:
        run = group.run(work, 7)
    print(json.dumps([run.results, sorted({s.name for s in run.trace.filter(kind="compute")})]))
"""
    assert run(base, program) == [[7, 7], ["forward"]]


def test_public_names_win_over_the_files_of_the_same_name() -> None:
    imported = "import labkit, labkit.recording.record, labkit.notebook.doctor"
    assert output("-c", f"{imported}; print([int(callable(f)) for f in (labkit.record, labkit.doctor)])") == [1, 1]
