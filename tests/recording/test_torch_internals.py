"""The table of private names: this torch has all of them, and a missing one is noticed."""

from __future__ import annotations

import json
import textwrap
import warnings

import pytest

from labkit.recording import torch_internals
from labkit.recording.torch_internals import PrivateNames

ENTRIES = {name: entry for name, entry in vars(torch_internals).items() if isinstance(entry, PrivateNames)}


def test_all_names_are_found_in_this_torch() -> None:
    assert torch_internals.lost() == []
    assert len(ENTRIES) == len(torch_internals.TABLE)


def test_what_is_missing_is_named() -> None:
    gone = "torch:nn._Gone", "torch:nn.Linear.forward(_nothing)"
    entry = PrivateNames("torch:nn.Linear", *gone, lost="all")
    assert not entry.found
    assert entry.missing == list(gone)
    with pytest.raises(AttributeError):
        entry["_Gone"]
    with pytest.raises(KeyError):
        entry["Conv2d"]  # torch has it, and the entry does not name it


def test_asking_again_whether_names_exist_shows_no_warning_twice() -> None:
    """Some names are asked for at each operation, and Python forgets what it has warned of when its filters change."""
    entry = PrivateNames("math:sqrt", lost="all")
    assert entry.found
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(3):
            warnings.warn("once for this line", stacklevel=1)
            assert entry.found
    assert len(shown) == 1


def test_names_are_told_apart_by_their_class_and_by_what_their_code_contains(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = PrivateNames(
        "json:JSONEncoder.__init__", "json:JSONDecoder.__init__", "textwrap:dedent(text, sub)", "textwrap:indent(lambda)",
        lost="all",
    )  # fmt: skip
    assert list(entry.paths) == ["JSONEncoder.__init__", "JSONDecoder.__init__", "dedent", "indent"]
    assert entry["JSONDecoder.__init__"] is json.JSONDecoder.__init__
    assert entry.missing == ["textwrap:indent(lambda)"]
    monkeypatch.setattr(textwrap, "dedent", textwrap.dedent)  # restored at the end
    entry.replace("dedent", lambda dedent, text: dedent(text) + "!")
    assert textwrap.dedent(" a") == "a!"
    assert entry.missing == ["textwrap:indent(lambda)"]
