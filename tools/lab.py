"""Opens JupyterLab on the student's copy of the first lesson; without a browser, it only prints the address."""

from __future__ import annotations

import itertools
import os
import sys
import webbrowser
from pathlib import Path

from labkit.notebook.lessons import Copies, copy_lessons

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path(os.environ.get("LABKIT_MY_LESSONS", ROOT / "my_lessons")).resolve()  # the variable puts the copies elsewhere
LESSON = "00_start_here.ipynb"
# JupyterLab refuses an option that is given twice, also under two names: ours is left out where the student gives it.
ROOT_DIR = ("--ServerApp.root_dir", "--notebook-dir", "--ServerApp.notebook_dir")
SETTINGS = ("--LabApp.app_settings_dir",)
LOG_LEVEL = ("--Application.log_level", "--log-level", "--debug")
PAGE = ("--LabApp.default_url",)


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


def command(arguments: list[str]) -> list[str]:
    """Return the command that starts JupyterLab on the first lesson.

    Args:
        arguments: options for JupyterLab, as `--name=value` or `--name value`; they replace ours.
    """
    given = {}
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        name, equals, value = argument.partition("=")
        given[name] = value if equals else following
    # Copies elsewhere show the pictures of the lessons, too, which the server must reach.
    common = Path(os.path.commonpath([ROOT, FOLDER]))
    root = next((Path(given[name]).resolve() for name in ROOT_DIR if given.get(name)), common)
    options = {
        ROOT_DIR: str(root),
        SETTINGS: str(ROOT / "tools" / "lab_settings"),  # no questions about news and updates before the lesson
        LOG_LEVEL: "WARN",  # the address is printed at any level; a student does not need the rest of the start-up
    }
    if FOLDER.is_relative_to(root):  # else JupyterLab opens on its file browser
        options[PAGE] = f"/lab/tree/{(FOLDER / LESSON).relative_to(root).as_posix()}"
    ours = [f"{names[0]}={value}" for names, value in options.items() if not given.keys() & set(names)]
    if not has_browser():
        ours.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        ours.append("--allow-root")  # in a container root is often the only user; Jupyter requires the option
    return [sys.executable, "-m", "jupyterlab", *ours, *arguments]


def announce(copies: Copies) -> None:
    """Tell the student what happened to the copies of the lessons."""
    if copies.new:
        print(f"Your copies of the lessons are in {FOLDER}. An update never overwrites what you write there.")
    for name in copies.outdated:
        number = name.partition("_")[0]
        print(f'{name} has a newer version; your copy is kept. lab.reset_lesson("{number}") gives you the new one.')


def main() -> None:
    """Become the server, so that Ctrl-C reaches it."""
    announce(copy_lessons(ROOT / "notebooks", FOLDER))
    print("JupyterLab: the address follows; Ctrl-C twice stops it.", flush=True)
    os.chdir(ROOT)
    line = command(sys.argv[1:])
    os.execv(line[0], line)


if __name__ == "__main__":
    main()
