"""`python -m labkit lab`: opens JupyterLab on the student's copy of the first lesson, or prints its address."""

from __future__ import annotations

import itertools
import os
import sys
import webbrowser
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from labkit.errors.exceptions import LabError, install_command
from labkit.teaching.lessons import lessons

VARIABLE: Final = "LABKIT_MY_LESSONS"  # the folder of the copies; by default, my_lessons in the current folder
# JupyterLab refuses an option that is given twice, also under two names: ours is left out where the student gives it.
ROOT_DIR: Final = ("--ServerApp.root_dir", "--notebook-dir", "--ServerApp.notebook_dir")
SETTINGS: Final = ("--LabApp.app_settings_dir",)
LOG_LEVEL: Final = ("--Application.log_level", "--log-level", "--debug")
PAGE: Final = ("--LabApp.default_url",)
# With these, JupyterLab prints something and ends.
PRINTS: Final = {"-h", "--help", "--help-all", "--version"}
# -P: the server does not import files of the current folder, where a student may have a random.py.
JUPYTERLAB: Final = [sys.executable, "-P", "-m", "jupyterlab"]


def main(arguments: list[str]) -> int:
    """Copy the lessons, and become JupyterLab's server, so that Ctrl-C reaches it; return 1 if one of them fails."""
    if find_spec("jupyterlab") is None:
        print(f"JupyterLab is not installed; this command installs it: {install_command('course')}", file=sys.stderr)
        return 1
    if PRINTS & set(arguments):
        return os.execv(sys.executable, [*JUPYTERLAB, *arguments])
    try:
        copies = lessons(os.environ.get(VARIABLE) or "my_lessons")
    except LabError as error:
        print(error, file=sys.stderr)
        return 1
    print(copies)
    print("JupyterLab: the address follows; Ctrl-C twice stops it.", flush=True)
    return os.execv(sys.executable, command(arguments, (copies.folder / copies.first).resolve()))


def command(arguments: list[str], lesson: Path) -> list[str]:
    """Return the command that starts JupyterLab on a lesson; the student's options replace ours."""
    given = {}
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        name, equals, value = argument.partition("=")
        given[name] = value if equals else following
    folder = Path.cwd() if lesson.is_relative_to(Path.cwd()) else lesson.parent
    root = next((Path(given[name]).resolve() for name in ROOT_DIR if given.get(name)), folder)
    options = {
        ROOT_DIR: str(root),
        SETTINGS: str(Path(__file__).with_name("lab_settings")),  # no questions about news and updates before the lesson
        LOG_LEVEL: "WARN",  # the address is printed at any level; a student does not need the rest of the start-up
    }
    if lesson.is_relative_to(root):  # else JupyterLab opens on its file browser
        options[PAGE] = f"/lab/tree/{lesson.relative_to(root).as_posix()}"
    ours = [f"{names[0]}={value}" for names, value in options.items() if not given.keys() & set(names)]
    if not has_browser():
        ours.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        ours.append("--allow-root")  # in a container root is often the only user; Jupyter requires the option
    return [*JUPYTERLAB, *ours, *arguments]


def has_browser() -> bool:
    """Whether a browser with a window can open here; one inside the terminal (lynx, w3m) would occupy the terminal."""
    if "SSH_CONNECTION" in os.environ:
        return False
    if sys.platform not in ("darwin", "win32") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return False
    try:
        webbrowser.get()
    except webbrowser.Error:
        return False
    return True
