"""Dockerfile, dev container and Binder agree with pyproject.toml, constraints.txt and environment.yml."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
DOCKERFILE = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE))
INSTRUCTIONS = [(line.split()[0], line.partition(" ")[2]) for line in DOCKERFILE.splitlines() if line]
ARGUMENTS = {a.partition("=")[0]: a.partition("=")[2].strip('"') for name, a in INSTRUCTIONS if name == "ARG"}
COPIED = {source for name, a in INSTRUCTIONS if name == "COPY" for source in a.split()[:-1]}
DEV_CONTAINER = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
BINDER: list[str] = yaml.safe_load((ROOT / "binder" / "environment.yml").read_text())["dependencies"]
SNIPPETS = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / "containers.md").read_text(), re.DOTALL | re.MULTILINE)


def python_of(conda_packages: list[Any]) -> str:
    (version,) = [p.removeprefix("python=") for p in conda_packages if isinstance(p, str) and p.startswith("python=")]
    return version


def requirements(*extras: str) -> dict[str, Requirement]:
    """What labkit requires with these extras, and with the extras that they name."""
    found: dict[str, Requirement] = {}
    waiting = [Requirement(text) for text in PROJECT["project"]["dependencies"]]
    waiting += [Requirement(text) for extra in extras for text in EXTRAS[extra]]
    while waiting:
        requirement = waiting.pop()
        if requirement.name == "labkit":
            waiting += [Requirement(text) for extra in requirement.extras for text in EXTRAS[extra]]
        else:
            found[requirement.name] = requirement
    return found


# The Dockerfile


def test_all_containers_have_the_python_of_the_constraints() -> None:
    expected = python_of(yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"])
    assert f"Python {expected}" in (ROOT / "constraints.txt").read_text()
    base = re.fullmatch(r"python:(\d+\.\d+)\.\d+-slim-\w+", ARGUMENTS["BASE"])  # a patch release and a release of Debian
    assert base is not None
    assert (base[1], python_of(BINDER)) == (expected, expected)


def test_the_image_installs_under_the_constraints() -> None:
    installs = [a for name, a in INSTRUCTIONS if name == "RUN" and " install " in a and "pip" in a]
    assert [("-c constraints.txt" in a) or ("--no-deps" in a) for a in installs] == [True, True]
    assert "constraints.txt" in COPIED


def test_what_is_copied_exists_and_nothing_else_reaches_the_builder() -> None:
    assert [source for source in COPIED if not (ROOT / source).exists()] == []
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert {rule.removeprefix("!") for rule in rules if rule.startswith("!")} == COPIED


def test_what_the_build_backend_reads_is_copied() -> None:
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    project = PROJECT["project"]
    assert {*wheel, project["readme"], *project["license-files"], "pyproject.toml"} <= COPIED


def test_the_image_ends_as_a_user_without_rights() -> None:
    users = [a for name, a in INSTRUCTIONS if name == "USER"]
    assert users[-1].isdigit()  # by its number: Kubernetes refuses a name where runAsNonRoot is set
    assert int(users[-1]) > 0
    assert DEV_CONTAINER["remoteUser"] != "root"


# The dev container


def test_the_dev_container_builds_the_image() -> None:
    build = DEV_CONTAINER["build"]
    folder = ROOT / ".devcontainer"
    assert (folder / build["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert (folder / build["context"]).resolve() == ROOT
    assert build["args"].keys() <= ARGUMENTS.keys()
    assert ARGUMENTS["DEBIAN_PACKAGES"] in build["args"]["DEBIAN_PACKAGES"].split()


@pytest.mark.parametrize("extras", [ARGUMENTS["EXTRAS"], DEV_CONTAINER["build"]["args"]["EXTRAS"]])
def test_extras_exist(extras: str) -> None:
    assert set(extras.split(",")) <= EXTRAS.keys()


# Binder


def test_binder_installs_what_labkit_requires() -> None:
    required = {**requirements("hosted"), **{r.name: r for r in map(Requirement, PROJECT["build-system"]["requires"])}}
    conda_names = {"matplotlib": "matplotlib-base"}  # without Qt
    expected = {f"{conda_names.get(name, name)}{r.specifier}" for name, r in required.items()}
    assert {str(Requirement(p)) for p in BINDER if not re.match(r"python=|pytorch-cpu=", p)} == {
        str(Requirement(text)) for text in expected
    }


def test_binder_has_a_torch_that_labkit_supports() -> None:
    (version,) = [p.removeprefix("pytorch-cpu=") for p in BINDER if p.startswith("pytorch-cpu=")]
    pinned = re.search(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert Version(version) in requirements("torch")["torch"].specifier
    assert Version(version) <= Version(pinned[1])


def test_the_script_of_binder_can_be_executed() -> None:
    assert os.access(ROOT / "binder" / "postBuild", os.X_OK)


# The hub


def test_the_snippets_give_enough_shared_memory() -> None:
    compose, hub = (yaml.safe_load(text) for text in SNIPPETS)
    assert [service["shm_size"] for service in compose["services"].values()] == ["1gb"]
    storage = hub["singleuser"]["storage"]
    (volume,), (mount,) = storage["extraVolumes"], storage["extraVolumeMounts"]
    assert volume["emptyDir"]["medium"] == "Memory"
    assert (mount["name"], mount["mountPath"]) == (volume["name"], "/dev/shm")


# A real build


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(1500)
def test_the_image_is_built_and_runs_a_group(request: pytest.FixtureRequest) -> None:
    """Builds with CUDA unless PIP_EXTRA_INDEX_URL names an index with CPU builds: minutes and gigabytes either way."""
    program = next((p for p in ("docker", "podman") if shutil.which(p)), None)
    if program is None:
        pytest.skip("neither docker nor podman is installed")

    def call(*arguments: str, timeout_s: int = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run([program, *arguments], check=False, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)

    if call("image", "inspect", ARGUMENTS["BASE"]).returncode:
        pull = call("pull", ARGUMENTS["BASE"], timeout_s=600)
        if pull.returncode:
            pytest.skip(f"{program} cannot get {ARGUMENTS['BASE']}: {pull.stderr.strip().splitlines()[-1]}")
    tag = "labkit-test"
    index = os.environ.get("PIP_EXTRA_INDEX_URL", "")
    arguments = [f"--build-arg=PIP_EXTRA_INDEX_URL={index}", "--build-arg=EXTRAS=torch"]
    build = call("build", *arguments, "--tag", tag, ".", timeout_s=1200)
    assert build.returncode == 0, build.stderr
    request.addfinalizer(lambda: call("image", "rm", tag))
    program_text = "import os, labkit as lab; print(os.getuid(), lab.Group(2).run(lambda: lab.__file__).results)"
    run = call("run", "--rm", "--shm-size=1g", tag, "python", "-c", program_text)
    assert run.stdout.startswith("1000 ['/usr/local/lib/python3.11/site-packages/labkit/"), run.stderr
