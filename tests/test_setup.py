"""The way to a working environment: the Makefile, the versions, and the search for a Python."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import labkit
from labkit.errors.lists import listed
from tools import versions

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text())
BASE = [Requirement(r) for r in PROJECT["dependencies"]]
DIRECT = BASE + [Requirement(r) for extra in PROJECT["optional-dependencies"].values() for r in extra]
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
PINNED = {canonicalize_name(name): Version(version) for name, version in PINS.items()}

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def outside_make() -> dict[str, str]:
    """The environment without the variables of an outer make: `make test` runs these tests."""
    return {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES", "PYTHON")}


def make(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", *arguments], check=False, cwd=folder, env=outside_make(), capture_output=True, text=True, timeout=200
    )


# Versions


@pytest.mark.parametrize("requirement", [r for r in DIRECT if r.name != "labkit"], ids=str)
def test_every_direct_dependency_is_pinned(requirement: Requirement) -> None:
    assert PINNED[canonicalize_name(requirement.name)] in requirement.specifier


def test_constraints_are_exact_and_leave_the_build_open() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []  # no "+cpu", no address
    assert len(lines) == len(PINNED)


def test_indirect_dependencies_are_pinned_too() -> None:
    """On Linux the constraints contain everything that the direct dependencies require."""
    seen: set[str] = set()
    waiting = [(r.name, r.extras) for r in DIRECT]
    while waiting:
        name, extras = waiting.pop()
        if canonicalize_name(name) in seen:
            continue
        seen.add(canonicalize_name(name))
        try:
            required = [Requirement(r) for r in importlib.metadata.requires(name) or []]
        except importlib.metadata.PackageNotFoundError:
            continue  # an extra that is not installed here
        for r in required:
            if r.marker is None or any(r.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
                waiting.append((r.name, r.extras))
    gpu = {name for name in seen if name.startswith(("nvidia-", "cuda-")) or name == "triton"}  # pinned by torch itself
    if sys.platform == "linux":
        assert seen - gpu - set(PINNED) - {"labkit"} == set()


# What Colab's kernels have: https://github.com/googlecolab/backend-info, pip-freeze.txt of 2026-08-19.
COLAB = {
    "anywidget": "0.9.21", "cloudpickle": "3.1.2", "matplotlib": "3.10.0", "numpy": "2.1.3", "psutil": "5.9.5",
    "scikit-learn": "1.6.1",
}  # fmt: skip
LACKING = {"nvidia-ml-py"}  # requires no other package


def test_the_extra_for_hosted_kernels_replaces_nothing_on_colab() -> None:
    requirements, extras = list(BASE), ["hosted"]
    while extras:
        for requirement in map(Requirement, PROJECT["optional-dependencies"][extras.pop()]):
            extras += requirement.extras
            requirements += [requirement] * (requirement.name != "labkit")
    replaced = [str(r) for r in requirements if r.name not in LACKING and COLAB[r.name] not in r.specifier]
    assert replaced == []
    assert {r.name for r in requirements} == LACKING | set(COLAB)


@needs_make
@pytest.mark.processes
def test_conda_installs_what_make_installs() -> None:
    lines = make("--dry-run", "--always-make", "setup").stdout.splitlines()
    (install,) = [line for line in lines if " pip install " in line]
    (conda,) = [d["pip"] for d in ENVIRONMENT["dependencies"] if isinstance(d, dict)]
    assert shlex.split(install.split(" pip install ")[1]) == [word for line in conda for word in line.split()]


@pytest.mark.processes
def test_make_accepts_condas_python(tmp_path: Path) -> None:
    (python,) = [d for d in ENVIRONMENT["dependencies"] if isinstance(d, str) and d.startswith("python=")]
    version = python.removeprefix("python=")
    assert Version(version) in Requirement(f"python{PROJECT['requires-python']}").specifier
    assert find_python(tmp_path, {"python3": f"{version}.1"}).returncode == 0


# Finding a Python


def fake_python(path: Path, version: str, *, works: bool = True, venv: bool = True) -> None:
    """A fake Python that answers the queries of tools/find-python and logs its arguments."""
    path.write_text(f"""#!/bin/sh
echo "$@" >> "${{0%/*}}/asked"
case "$*" in
    *version_info*) echo {version}; exit {0 if works else 1} ;;
    *ensurepip*) exit {0 if venv else 1} ;;
    *"-m venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
esac
""")
    path.chmod(0o755)


def find_python(folder: Path, versions: dict[str, str], *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    for name, version in versions.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        fake_python(folder / name, version, works=version != "does not run")
    command = [shutil.which("sh") or "sh", str(ROOT / "tools" / "find-python"), *arguments]
    return subprocess.run(
        command, check=False, env={"PATH": str(folder)} | environment, capture_output=True, text=True, timeout=200
    )


FOUND: list[tuple[str, dict[str, str], str]] = [
    ("", {"python3.11": "3.11.4", "python3.12": "3.12.1", "python3": "3.12.1"}, "python3.11"),
    ("", {"python3.12": "3.12.1", "python3": "3.9.2"}, "python3.12"),
    ("", {"python3": "3.13.0"}, "python3"),
    ("", {"python3": "3.14.0", "python": "3.11.9"}, "python"),
    ("", {"python3.11": "does not run", "python3.12": "3.12.1"}, "python3.12"),
    # Of one version, whatever PYTHON names: that is the one of the course.
    ("3.12", {"python3.12": "3.12.1", "python3.11": "3.11.4"}, "python3.12"),
    ("3.12", {".pyenv/versions/3.12.7/bin/python": "3.12.7", "python3": "3.11.7"}, ".pyenv/versions/3.12.7/bin/python"),
    ("3.12", {"python3": "3.12.4"}, "python3"),
]


@pytest.mark.parametrize(("wanted", "versions", "chosen"), FOUND)
@pytest.mark.processes
def test_a_python_is_found(tmp_path: Path, wanted: str, versions: dict[str, str], chosen: str) -> None:
    if wanted:
        answer = find_python(tmp_path, versions, wanted, HOME=str(tmp_path), PYTHON="python3.11")
    else:
        answer = find_python(tmp_path, versions)
    assert (answer.stdout.strip(), answer.stderr) == (str(tmp_path / chosen), "")


ANY = "labkit needs Python 3.11, 3.12 or 3.13; {}: install one of these, or name it: make PYTHON=/path/to/python3.11.\n"
ONE = "labkit needs Python 3.12; {}: install it, with pyenv or uv, say.\n"


@pytest.mark.parametrize(
    ("wanted", "versions", "named", "found", "said"),
    [
        ([], {}, {}, "found none", ANY),
        ([], {"python3": "3.9.18"}, {}, "found only 3.9.18 (python3)", ANY),
        ([], {"python3": "3.10.2", "python": "2.7.18"}, {}, "found only 3.10.2 (python3), 2.7.18 (python)", ANY),
        ([], {"python3": "3.14.0"}, {}, "found only 3.14.0 (python3)", ANY),
        ([], {"python3.11": "3.11.4", "old": "3.8.1"}, {"PYTHON": "old"}, "found only 3.8.1 (old)", ANY),
        ([], {"python3.11": "3.11.4"}, {"PYTHON": "nowhere"}, "nowhere does not run", ANY),
        (["3.12"], {"python3": "3.11.4"}, {}, "found only 3.11.4 (python3)", ONE),
    ],
)
@pytest.mark.processes
def test_a_missing_python_is_reported_in_one_sentence(
    tmp_path: Path, wanted: list[str], versions: dict[str, str], named: dict[str, str], found: str, said: str
) -> None:
    answer = find_python(tmp_path, versions, *wanted, **named)
    assert (answer.returncode, answer.stdout, answer.stderr) == (1, "", said.format(found))


@pytest.mark.processes
def test_a_python_of_uv_is_found(tmp_path: Path) -> None:
    fake_python(tmp_path / "elsewhere", "3.12.9")
    (tmp_path / "uv").write_text(f"#!/bin/sh\n[ $4 = 3.12 ] && echo {tmp_path / 'elsewhere'}\n")
    (tmp_path / "uv").chmod(0o755)
    assert find_python(tmp_path, {}, "3.12").stdout.strip() == str(tmp_path / "elsewhere")
    assert find_python(tmp_path, {}, "3.13").returncode == 1


@pytest.mark.processes
def test_a_version_that_is_missing_is_skipped_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(versions.TABLE, "old", versions.Versions("3.10"))
    assert versions.main(["old"]) == 0
    assert re.fullmatch(r"old is not tested: labkit needs Python 3\.10; found .*\n", capfd.readouterr().out)


def test_without_room_for_torch_nothing_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    monkeypatch.setattr(versions, "ROOM_BYTES", 1 << 62)
    assert versions.main(["colab"]) == 0
    assert re.fullmatch(r"colab is not tested: a CUDA build of torch needs .* GB of free space\n", capfd.readouterr().out)
    assert not list(tmp_path.iterdir())
    assert versions.main(["colab", "calob"]) == 2
    assert "ONLY must name some of colab, kaggle, 3.11, 3.12, 3.13; got calob" in capfd.readouterr().err


@pytest.mark.processes
def test_the_short_suites_run_on_the_pythons_and_the_torches_of_the_course() -> None:
    pythons = sorted({entry.python for entry in versions.TABLE.values()})
    assert f"labkit needs Python {listed(pythons, word='or')};" in find_python(ROOT, {}, PYTHON="nowhere").stderr
    assert not [path for entry in versions.TABLE.values() for path in entry.tests if not (ROOT / path).exists()]
    (oldest,) = next(iter(r for r in DIRECT if r.name == "torch")).specifier
    assert f"torch=={oldest.version}.0" in versions.TABLE["kaggle"].pins


def test_pins_replace_those_of_the_course() -> None:
    constraints = "numpy==2.4.6\nnumpy-financial==1\nSetuptools==84\nIPython==9\n"
    assert versions.without(constraints, ("numpy==2.1.3", "ipython==7.34.0")) == "numpy-financial==1\n"
    assert versions.without(constraints, ()) == constraints.replace("Setuptools==84\n", "")


@pytest.mark.processes
def test_a_python_without_venv_says_what_to_install(tmp_path: Path) -> None:
    fake_python(tmp_path / "python3", "3.11.2", venv=False)
    answer = find_python(tmp_path, {})
    assert answer.returncode == 1
    assert answer.stderr == (
        "labkit: python3 (3.11.2) cannot make virtual environments: install its venv module "
        "(on Debian and Ubuntu: apt install python3.11-venv).\n"
    )


# The Makefile


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the files that `make setup` reads, with a Python that only logs its arguments."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "tools/find-python"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    fake_python(tmp_path / "python", "3.11.4")
    return tmp_path


def installs(tree: Path) -> int:
    asked = tree / ".venv" / "bin" / "asked"  # the copy in .venv logs pip's arguments in its own folder
    return asked.read_text().count("-m pip install") if asked.exists() else 0


@needs_make
@pytest.mark.processes
def test_a_second_make_installs_nothing(tree: Path) -> None:
    python = f"PYTHON={tree / 'python'}"
    first = make("setup", python, folder=tree)
    assert first.returncode == 0, first.stderr
    assert installs(tree) == 1
    assert make("setup", python, folder=tree).stdout == "make: Nothing to be done for 'setup'.\n"
    assert installs(tree) == 1
    edited_s = (tree / ".venv" / "installed").stat().st_mtime + 1  # the clock of file times may advance in steps of milliseconds
    os.utime(tree / "pyproject.toml", (edited_s, edited_s))
    make("setup", python, folder=tree)
    assert installs(tree) == 2


@needs_make
@pytest.mark.processes
def test_make_reports_an_unsuitable_python(tree: Path) -> None:
    fake_python(tree / "python", "3.9.18")
    answer = make("setup", f"PYTHON={tree / 'python'}", folder=tree)
    assert answer.returncode != 0
    assert answer.stderr.startswith("labkit needs Python 3.11, 3.12 or 3.13; found only 3.9.18")
    assert not (tree / ".venv").exists()


@needs_make
@pytest.mark.processes
def test_a_failed_install_is_tried_again(tree: Path) -> None:
    with (tree / "python").open("a") as file:
        file.write('case "$*" in *"pip install"*) exit 1 ;; esac\n')
    for _ in range(2):
        assert make("setup", f"PYTHON={tree / 'python'}", folder=tree).returncode != 0


@needs_make
@pytest.mark.processes
def test_help_lists_every_target() -> None:
    phony, *_ = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)  # later lines: parts of a target
    listed = re.findall(r"^make ([\w.-]+) +\S", make("help").stdout, re.MULTILINE)
    assert listed == phony.split()
    assert {"lab", "test", "bench", "notebooks", "clean"} <= set(listed)
    assert make().stdout == make("help").stdout


@needs_make
@pytest.mark.processes
def test_make_test_and_test_slow_run_everything() -> None:
    commands, pytest_command = make("--dry-run", "test").stdout, "pytest -n 3 --dist loadfile --nbval-lax"
    for part in ("ruff check .", "ruff format --check .", "-m mypy", f'{pytest_command} -m "not slow" tests notebooks'):
        assert part in commands
    assert f"{pytest_command} -m slow tests" in make("--dry-run", "test-slow").stdout


@needs_make
@pytest.mark.processes
def test_make_quick_leaves_out_what_starts_processes() -> None:
    tests = '-m "not processes and not slow and not tf" tests'
    commands = make("--dry-run", "quick").stdout
    for part in ("ruff check .", "-m mypy", f"{tests}/plots", f"{tests} --ignore=tests/plots", "notebooks/00_start_here.ipynb"):
        assert part in commands


@needs_make
@pytest.mark.processes
def test_make_wheel_builds_what_the_tests_install() -> None:
    assert " -m pip wheel --no-deps --wheel-dir dist ." in make("--dry-run", "wheel").stdout


@needs_make
@pytest.mark.processes
def test_clean_leaves_the_environment(tree: Path) -> None:
    for folder in (".venv/lib/__pycache__", "labkit/__pycache__", ".mypy_cache", "notebooks/.ipynb_checkpoints"):
        (tree / folder).mkdir(parents=True)
    make("clean", folder=tree)
    left = {str(p.relative_to(tree)) for p in tree.rglob("*") if p.is_dir()}
    assert left == {".venv", ".venv/lib", ".venv/lib/__pycache__", "labkit", "notebooks", "tools"}


@pytest.mark.processes
def test_ci_runs_all_tests_and_a_few_elsewhere() -> None:
    script = ROOT / ".ci" / "run"
    assert script.read_text().splitlines()[-4:] == [
        "", "make test", "make test-slow",
        'exec make test-versions ONLY="kaggle 3.13"  # the oldest torch with IPython 7, and the newest Python',
    ]  # fmt: skip
    if shutil.which("bash"):
        subprocess.run(["bash", "-n", str(script)], check=True, timeout=200)


def test_license_and_citation_agree_with_the_project() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (labkit.__version__, PROJECT["license"])
    assert (ROOT / "LICENSE").read_text().startswith("BSD 3-Clause License")


def test_the_workflow_runs_what_ci_runs_and_nothing_else() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step] == ["bash .ci/run"]
