"""The form of a report about this machine: a table of facts, found here or by another process, and what they mean."""

from __future__ import annotations

import contextlib
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
    """One line of a report.

    Args:
        found: what was found.
        ok: False if a lesson needs something that is missing.
        remedy: what to do about it, if possible a command.
        pip: whether the remedy is a pip command.
        subject: the subject of the line; "" for that of the entry.
    """

    found: str
    ok: bool = True
    remedy: str = ""
    pip: bool = False
    subject: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """One subject of a report: how its fact is found, and what the fact means.

    Args:
        subject: its name, which also names its fact.
        find: returns the fact, or a `Question`, whose reply is the fact. Called with the facts of `needs`, or the
            questions that have not been answered yet.
        means: returns the findings, none or several; called with the fact and the facts of `needs`.
        needs: the subjects of earlier entries whose facts these functions need.
    """

    subject: str
    find: Callable[..., Any]
    means: Callable[..., Iterable[Finding]]
    needs: tuple[str, ...] = ()


class Question:
    """A question to another Python process, which imports what this one must not. It starts at once.

    Args:
        function: returns the reply as a dictionary; the process imports it by its name.
        arguments: what it is called with; JSON can express them.
        known: what the reply contains besides.
    """

    def __init__(self, function: Callable[..., dict[str, Any]], *arguments: Any, **known: Any) -> None:
        self._known = known
        self._process = call_elsewhere(function, *arguments, variables={"TF_CPP_MIN_LOG_LEVEL": "3"}, stderr=subprocess.PIPE)

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
        return self._known | {"error": why_ended(process.returncode, errors)}


def call_elsewhere(
    function: Callable[..., dict[str, Any]], *arguments: Any, variables: Mapping[str, str], stderr: int
) -> subprocess.Popen[str]:
    """Start a process that imports a function by its name, calls it, and prints the result as its last line, in JSON.

    Args:
        function: the function.
        arguments: what it is called with; JSON can express them.
        variables: environment variables of the process, beside those of this one.
        stderr: what `subprocess.Popen` gets as `stderr`.
    """
    module, name = function.__module__, function.__name__
    call = f"{name}(*json.loads(sys.stdin.readline()))"
    program = f"import sys; sys.path[:] = {sys.path!r}; import json; from {module} import {name}; print(json.dumps({call}))"
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=os.environ | variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
        text=True,
    )  # fmt: skip
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended
        process.stdin.write(json.dumps(arguments) + "\n")
        process.stdin.flush()
    return process


def why_ended(returncode: int, errors: str) -> str:
    """Return why a process failed, given its exit code and what it wrote: a signal, the last line, or the exit code."""
    if returncode < 0:
        return f"ended by {signal.Signals(-returncode).name}"
    said = [line for line in errors.splitlines() if line.strip()]
    return said[-1] if said else f"exit code {returncode}"


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
    return {subject: fact.reply() if isinstance(fact, Question) else fact for subject, fact in found.items()}


def report(table: Sequence[Entry], facts: Mapping[str, Any]) -> Report:
    """Turn the facts of a table into a report: what they mean for the lessons."""
    findings = [
        replace(finding, subject=finding.subject or entry.subject)
        for entry in table
        for finding in entry.means(facts[entry.subject], *(facts[subject] for subject in entry.needs))
    ]
    return Report(tuple(findings))
