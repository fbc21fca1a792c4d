"""The form of reports: what an entry's functions are called with, questions to other processes, text and HTML."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import questions

from labkit.notebook import findings
from labkit.notebook.findings import Entry, Finding, ProcessQuestion, collect, report


def test_an_entry_gets_the_facts_that_it_needs() -> None:
    table = (
        Entry("a", lambda: 2, lambda a: [Finding(f"a={a}")]),
        Entry("b", lambda: 3, lambda _: []),
        Entry(
            "c", lambda b, a: 10 * b + a, lambda c, b, a: [Finding(f"{c} {b} {a}"), Finding("more", subject="d")],
            needs=("b", "a"),
        ),
    )  # fmt: skip
    facts = collect(table)
    assert facts == {"a": 2, "b": 3, "c": 32}
    assert report(table, facts).findings == (
        Finding("a=2", subject="a"), Finding("32 3 2", subject="c"), Finding("more", subject="d")
    )  # fmt: skip


@pytest.mark.processes
def test_replies_become_facts_after_all_questions_are_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEETING", str(tmp_path / "pipe"))
    os.mkfifo(tmp_path / "pipe")
    table = (
        Entry("writer", lambda: ProcessQuestion(questions.write, known=1), lambda _: []),
        Entry(
            "reader",
            lambda writer: ProcessQuestion(questions.read, waits=isinstance(writer, ProcessQuestion)),
            lambda *_: [],
            ("writer",),
        ),
    )
    assert collect(table) == {"writer": {"known": 1}, "reader": {"waits": True, "read": "met"}}


@pytest.mark.parametrize(
    ("function", "reply"),
    [
        (questions.noisy, {"gpus": 3}),
        (questions.not_importable, {"error": "ModuleNotFoundError: No module named 'nothing_of_this_name'"}),
        (questions.crash, {"error": "ended by SIGSEGV"}),
        (questions.leave, {"error": "exit code 7"}),
    ],
)
@pytest.mark.processes
def test_querying_a_process(function: Callable[[], dict[str, Any]], reply: dict[str, Any]) -> None:
    assert ProcessQuestion(function, version="1.2").reply() == {"version": "1.2", **reply}


@pytest.mark.processes
def test_querying_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "ASK_LIMIT_S", 0)
    assert ProcessQuestion(questions.sleep).reply() == {"error": "no reply within 0 s"}


def test_a_notebook_shows_a_table_that_breaks_lines_between_words() -> None:
    shown = findings.Report(
        (Finding("1 < 2", subject="order"), Finding("none", ok=False, remedy="pip install b", pip=True, subject="b"))
    )
    html = shown._repr_html_()
    assert html.count("<tr>") == 2
    assert "word-break:normal" in html
    assert "1 &lt; 2" in html
    assert "✗" in html
    assert re.search(r"→ <code>pip install b", html)
    assert str(shown).splitlines()[-1] in html
