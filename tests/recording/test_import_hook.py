"""A callback runs once, as soon as a module has been imported, with other finders present."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from labkit.recording.import_hook import when_imported

NAME = "imported_by_a_test"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    (tmp_path / f"{NAME}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setitem(sys.modules, NAME, None)  # type: ignore[arg-type]  # so that what is imported is forgotten afterwards
    del sys.modules[NAME]
    return NAME


def test_it_is_called_when_the_module_is_complete(module: str) -> None:
    seen: list[ModuleType] = []
    before = list(sys.meta_path)
    when_imported(module, lambda m: seen.append(m.value))
    assert seen == []
    importlib.import_module(module)
    importlib.reload(sys.modules[module])
    assert seen == [1]
    assert sys.meta_path == before


def test_several_may_wait_for_the_same_module(module: str) -> None:
    seen: list[str] = []
    when_imported(module, lambda _: seen.append("first"))
    when_imported(module, lambda _: seen.append("second"))
    importlib.import_module(module)
    assert sorted(seen) == ["first", "second"]


def test_an_imported_module_is_not_waited_for() -> None:
    seen: list[ModuleType] = []
    when_imported("sys", seen.append)
    assert seen == [sys]


def test_a_module_that_does_not_exist_is_still_missing(module: str) -> None:
    when_imported(f"{module}_not", lambda _: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{module}_not")
    sys.meta_path.pop(0)
