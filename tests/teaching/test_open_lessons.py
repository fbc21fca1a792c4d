"""`python -m labkit lab`: JupyterLab on the student's copy of the first lesson, with the student's own options."""

from __future__ import annotations

import json
import os
import posixpath
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from labkit import __main__
from labkit.teaching import lessons
from labkit.teaching.lessons import command, has_browser

ROOT = Path(__file__).resolve().parents[2]
LESSON = "00_start_here.ipynb"


@pytest.mark.parametrize(
    ("environment", "installed", "expected"),
    [
        ({"DISPLAY": ":0"}, True, True),
        ({"WAYLAND_DISPLAY": "wayland-0"}, True, True),
        ({}, True, False),
        ({"DISPLAY": ":0", "SSH_CONNECTION": "a b c d"}, True, False),
        ({"DISPLAY": ":0"}, False, False),
    ],
)
def test_whether_a_browser_can_open(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], installed: bool, expected: bool
) -> None:
    def get() -> None:
        if not installed:
            raise lessons.webbrowser.Error("could not locate runnable browser")

    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(lessons.sys, "platform", "linux")
    monkeypatch.setattr(lessons.webbrowser, "get", get)
    assert has_browser() is expected
    assert ("--no-browser" in command([], Path(LESSON))) is not expected


def test_a_students_options_come_last() -> None:
    assert command(["--port=9000"], Path(LESSON))[-1] == "--port=9000"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["--ServerApp.root_dir=FOLDER"], ".root_dir = 'FOLDER'"),
        (["--ServerApp.root_dir", "FOLDER"], ".root_dir = 'FOLDER'"),
        (["--notebook-dir=FOLDER"], ".root_dir = 'FOLDER'"),
        (["--Application.log_level=ERROR"], ".log_level = 'ERROR'"),
        (["--LabApp.default_url=/tree"], ".default_url = '/tree'"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
@pytest.mark.processes
def test_jupyterlab_accepts_a_students_options_beside_ours(tmp_path: Path, given: list[str], shown: str) -> None:
    """It refuses an option that is given twice."""
    line = command([argument.replace("FOLDER", str(tmp_path)) for argument in given], Path(LESSON))
    done = subprocess.run([*line, "--show-config"], check=False, capture_output=True, text=True, timeout=150)
    assert shown.replace("FOLDER", str(tmp_path)) in done.stdout, done.stdout + done.stderr


def page(lesson: Path, *arguments: str) -> tuple[str, str]:
    """The root folder that JupyterLab serves, and the page that it opens; "" for its file browser."""
    line = command(list(arguments), lesson)[4:]
    options = dict(option.partition("=")[::2] for option in line)
    assert len(options) == len(line), "JupyterLab refuses an option that is given twice"
    return options["--ServerApp.root_dir"], options.get("--LabApp.default_url", "")


def test_the_page_is_the_students_copy_of_the_first_lesson(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert page(tmp_path / "my_lessons" / LESSON) == (str(tmp_path), f"/lab/tree/my_lessons/{LESSON}")
    elsewhere = tmp_path.parent / "mine"
    assert page(elsewhere / LESSON) == (str(elsewhere), f"/lab/tree/{LESSON}")


def test_a_root_folder_of_the_students_own(tmp_path: Path) -> None:
    lesson = tmp_path / "a" / "mine" / LESSON
    assert page(lesson, f"--ServerApp.root_dir={tmp_path}") == (str(tmp_path), f"/lab/tree/a/mine/{LESSON}")
    assert page(lesson, f"--ServerApp.root_dir={tmp_path / 'b'}") == (str(tmp_path / "b"), "")


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The command lines that would have become this process; the current folder is empty."""
    lines: list[list[str]] = []

    def execv(_: str, line: list[str]) -> None:
        lines.append(line)
        sys.exit(0)

    monkeypatch.setattr(lessons.os, "execv", execv)
    monkeypatch.delenv(lessons.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    return lines


def run(*arguments: str) -> object:
    """The exit status of `python -m labkit lab`."""
    with pytest.raises(SystemExit) as ended:
        __main__.main(["lab", *arguments])
    return ended.value.code


def test_the_copies_are_in_the_current_folder(
    executed: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--port=9000") == 0
    (line,) = executed
    assert line[:4] == [sys.executable, "-P", "-m", "jupyterlab"]
    assert line[-1] == "--port=9000"
    assert f"--LabApp.default_url=/lab/tree/my_lessons/{LESSON}" in line
    assert (tmp_path / "my_lessons" / LESSON).exists()
    assert capsys.readouterr().out.startswith("New in my_lessons: lessons 00, 01,")


def test_the_copies_are_where_the_variable_says(
    executed: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(lessons.VARIABLE, str(tmp_path / "mine"))
    assert run() == 0
    assert (tmp_path / "mine" / LESSON).exists()
    assert not (tmp_path / "my_lessons").exists()


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_what_jupyterlab_only_prints_needs_no_copies(executed: list[list[str]], tmp_path: Path, option: str) -> None:
    assert run(option) == 0
    assert executed == [[sys.executable, "-P", "-m", "jupyterlab", option]]
    assert list(tmp_path.iterdir()) == []


def test_without_jupyterlab_the_command_is_named(
    executed: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lessons, "find_spec", lambda _: None)
    assert run() == 1
    assert capsys.readouterr().err == ('JupyterLab is not installed; this command installs it: pip install "labkit[course]"\n')
    assert (executed, list(tmp_path.iterdir())) == ([], [])


def test_a_folder_that_cannot_be_written(executed: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my_lessons").write_text("a file")
    assert run() == 1
    assert executed == []
    assert re.match(r"lessons\('my_lessons'\): \S+: (Not a directory|File exists)", capsys.readouterr().err)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """JupyterLab as `python -m labkit lab` starts it on a machine without a display."""
    headless = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "WAYLAND_DISPLAY")}
    headless["JUPYTER_RUNTIME_DIR"] = str(tmp_path)
    headless["PYTHONPATH"] = str(ROOT)
    headless.pop(lessons.VARIABLE, None)
    line = [sys.executable, "-m", "labkit", "lab", "--port=0"]
    with subprocess.Popen(
        line, cwd=tmp_path, env=headless, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as p:
        yield p
        p.terminate()


def fetch(address: str) -> str:
    """The answer of a server, which may not listen yet."""
    until = time.monotonic() + 150
    while True:
        try:
            with urllib.request.urlopen(address, timeout=30) as answer:
                text: str = answer.read().decode()
                return text
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError) or time.monotonic() > until:
                raise
            time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.processes
def test_the_server_has_the_first_lesson_and_its_pictures(server: subprocess.Popen[str]) -> None:
    assert server.stdout is not None
    addresses = (re.search(r"(http://127\.0\.0\.1:\d+)/lab/tree/(\S+)\?token=(\w+)", line) for line in server.stdout)
    found = next(filter(None, addresses))  # printed a moment before the server listens
    host, page, token = found.groups()
    folder, _, name = page.rpartition("/")
    assert name == LESSON
    assert "<title>JupyterLab</title>" in fetch(f"{host}/lab/tree/{page}?token={token}")
    notebook = json.loads(fetch(f"{host}/api/contents/{page}?token={token}"))
    texts = [cell["source"] for cell in notebook["content"]["cells"] if cell["cell_type"] == "markdown"]
    pictures = [target for text in texts for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)]
    assert pictures
    for picture in pictures:
        assert "<svg" in fetch(f"{host}/files/{posixpath.normpath(posixpath.join(folder, picture))}?token={token}")
    settings = fetch(f"{host}/lab/api/settings/@jupyterlab/apputils-extension:notification?token={token}")
    assert json.loads(settings)["schema"]["properties"]["fetchNews"]["default"] == "false"
