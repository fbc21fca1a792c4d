"""The form of a report about this machine: a table of facts, found here or by another process, and what they mean."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any, Final

ASK_LIMIT_S: Final = 120.0  # importing a framework from a cold disk can take a minute
_CELL: Final = "text-align:left;vertical-align:top;padding:2px 8px;white-space:normal;word-break:normal"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a report."""

    found: str
    ok: bool = True  # False if a lesson needs something that is missing
    remedy: str = ""  # what to do about it, if possible a command
    pip: bool = False  # whether the remedy is a pip command
    subject: str = ""  # of the line; "" for that of the entry


@dataclass(frozen=True, slots=True)
class Entry:
    """One subject of a report: how its fact is found, and what the fact means.

    `find` returns the fact, or a `ProcessQuestion`, whose reply is the fact. It is called with the facts of `needs`, or
    the questions that have not been answered yet. `means` is called with the fact and the facts of `needs`.
    """

    subject: str
    find: Callable[..., Any]
    means: Callable[..., Iterable[Finding]]
    needs: tuple[str, ...] = ()  # the subjects of earlier entries


class ProcessQuestion:
    """A question to another Python process, which imports what this one must not. It starts at once.

    Args:
        function: returns the reply, which JSON can express; the process imports it by its name.
        known: what the reply contains besides.
    """

    def __init__(self, function: Callable[[], dict[str, Any]], **known: Any) -> None:
        self._known = known
        module, name = function.__module__, function.__name__
        program = f"import sys; sys.path[:] = {sys.path!r}; import json; from {module} import {name}; print(json.dumps({name}()))"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program], env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def reply(self) -> dict[str, Any]:
        """Wait for the reply and return it; if there is none, the reason under "error"."""
        with self._process as process:
            try:
                output, errors = process.communicate(timeout=ASK_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                return self._known | {"error": f"no reply within {ASK_LIMIT_S:.0f} s"}
        if process.returncode == 0:
            reply: dict[str, Any] = json.loads(output.splitlines()[-1])  # the last line: frameworks print others before
            return self._known | reply
        if process.returncode < 0:
            return self._known | {"error": f"ended by {signal.Signals(-process.returncode).name}"}
        said = [line for line in errors.splitlines() if line.strip()]
        return self._known | {"error": said[-1] if said else f"exit code {process.returncode}"}


@dataclass(frozen=True, slots=True)
class Report:
    """What a machine can run; its text is the output of `lab.doctor()`."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is missing."""
        return all(f.ok for f in self.findings)

    def __str__(self) -> str:
        width = max(len(f.subject) for f in self.findings)
        lines = []
        for f in self.findings:
            lines.append(f"{' ' if f.ok else '✗'} {f.subject:<{width}}  {f.found}")
            if f.remedy:
                lines.append(f"  {'':<{width}}  → {f.remedy}")
        missing = sum(not f.ok for f in self.findings)
        count = "1 thing is" if missing == 1 else f"{missing} things are"
        lines += ["", f"{count} missing: see ✗." if missing else "Nothing is missing."]
        if any(f.pip for f in self.findings):
            lines.append("Run the commands in a terminal with this environment; in a cell write %pip instead of pip.")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """As a table, which breaks long lines between words at any width of the page."""
        rows = []
        for f in self.findings:
            remedy = f"<br>→ <code>{escape(f.remedy)}</code>" if f.remedy else ""
            cells = "" if f.ok else "✗", f"<b>{escape(f.subject)}</b>", escape(f.found) + remedy
            rows.append("<tr>" + "".join(f'<td style="{_CELL}">{cell}</td>' for cell in cells) + "</tr>")
        last = "<br>".join(escape(line) for line in str(self).split("\n\n")[-1].splitlines())
        return f"<table><tbody>{''.join(rows)}</tbody></table><p>{last}</p>"


def collect(table: Sequence[Entry]) -> dict[str, Any]:
    """Find the facts of a table, by subject. All questions are asked before the first reply is awaited."""
    found: dict[str, Any] = {}
    for entry in table:
        found[entry.subject] = entry.find(*(found[subject] for subject in entry.needs))
    return {subject: fact.reply() if isinstance(fact, ProcessQuestion) else fact for subject, fact in found.items()}


def report(table: Sequence[Entry], facts: Mapping[str, Any]) -> Report:
    """Turn the facts of a table into a report: what they mean for the lessons."""
    findings = [
        replace(finding, subject=finding.subject or entry.subject)
        for entry in table
        for finding in entry.means(facts[entry.subject], *(facts[subject] for subject in entry.needs))
    ]
    return Report(tuple(findings))
