"""Where a notebook runs: recognised by variables and files."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from labkit.notebook.doctor_facts import PLAIN, find_place, place


@pytest.mark.parametrize(
    ("environment", "files", "name", "hosted"),
    [
        ({}, [], "", False),
        ({"COLAB_RELEASE_TAG": "release"}, [], "Google Colab", True),
        ({"COLAB_RELEASE_TAG": "release", "KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, [".dockerenv"], "Kaggle", True),
        ({"BINDER_REPO_URL": "url", "JUPYTERHUB_USER": "me", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, [], "Binder", True),
        ({"CODESPACES": "true"}, [".dockerenv"], "GitHub Codespaces", False),
        ({"JUPYTERHUB_USER": "me", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, [], "JupyterHub", True),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, [], "a container", False),
        ({}, ["run/.containerenv"], "a container", False),
        ({"CODESPACES": ""}, [".dockerenv"], "a container", False),
    ],
)
def test_places(environment: dict[str, str], files: list[str], name: str, hosted: bool, tmp_path: Path) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    found = find_place(environment, tmp_path)
    assert (found.name, found.hosted) == (name, hosted)
    assert bool(place(found)) == bool(found.limits) == bool(name)


@pytest.mark.parametrize(
    ("shell", "kernel"), [(None, False), (types.SimpleNamespace(), False), (types.SimpleNamespace(kernel=1), True)]
)
def test_whether_this_process_is_a_kernel(shell: object, kernel: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    assert find_place({}, tmp_path).has_kernel is kernel


def test_a_plain_machine_is_not_reported() -> None:
    assert place(PLAIN) == []
