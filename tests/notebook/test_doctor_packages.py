"""What an installation of labkit's extras would replace, with made-up requirements."""

from __future__ import annotations

import importlib.metadata
from email.message import Message

import pytest

from labkit.notebook.doctor_packages import find_replaced, replaced
from labkit.notebook.doctor_places import PLAIN, Place
from labkit.notebook.findings import Finding

HOSTED = Place("a service", hosted=True)
VERSIONS = {"psutil": "5.9.5", "ipykernel": "6.17.1", "ipywidgets": "7.7.1", "torch": "2.11.0+cu128"}
REQUIREMENTS = [
    "psutil>=5.9",
    'torch>=2.10; extra == "torch"',
    'anywidget>=0.9; extra == "hosted"',
    'labkit[hosted,torch]; extra == "course"',
    'ipykernel>=6.29; extra == "course"',
    'ipywidgets>=8.1; extra == "course"',
    'jupyterlab>=4.3; extra == "course"',
    'ipykernel>=99; extra == "test"',
    'psutil>=99; extra == "torch" and sys_platform == "other"',
]


@pytest.fixture(autouse=True)
def _kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = Message()
    for extra in ("torch", "hosted", "course", "test"):
        metadata["Provides-Extra"] = extra

    def version(name: str) -> str:
        if name not in VERSIONS:
            raise importlib.metadata.PackageNotFoundError(name)
        return VERSIONS[name]

    monkeypatch.setattr(importlib.metadata, "metadata", lambda _: metadata)
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: REQUIREMENTS)
    monkeypatch.setattr(importlib.metadata, "version", version)


def test_what_each_extra_would_replace() -> None:
    assert find_replaced(HOSTED) == {
        "": {}, "torch": {}, "hosted": {}, "course": {"ipykernel": "6.17.1 by >=6.29", "ipywidgets": "7.7.1 by >=8.1"}
    }  # fmt: skip
    assert find_replaced(PLAIN) == {}


def test_a_requirement_of_labkit_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VERSIONS, "psutil", "5.8")
    assert find_replaced(HOSTED)[""] == {"psutil": "5.8 by >=5.9"}


def test_labkit_need_not_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_there(_: str) -> None:
        raise importlib.metadata.PackageNotFoundError("labkit")

    monkeypatch.setattr(importlib.metadata, "metadata", not_there)
    assert find_replaced(HOSTED) == {}


def test_the_extra_that_replaces_nothing_is_named_once() -> None:
    found = list(replaced({"": {}, "hosted": {}, "course": {"a": "1 by >=2", "b": "3 by >=4"}, "tf": {"c": "5 by <5"}}))
    assert found == [
        Finding("labkit[course] replaces a 1 by >=2, b 3 by >=4", remedy='pip install "labkit[hosted]"', pip=True),
        Finding("labkit[tf] replaces c 5 by <5"),
    ]


def test_without_such_an_extra_there_is_no_remedy() -> None:
    (found,) = replaced({"": {"a": "1 by >=2"}})
    assert found == Finding("labkit replaces a 1 by >=2")
