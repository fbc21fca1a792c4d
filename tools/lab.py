"""Opens JupyterLab on the student's copy of the first lesson; without a browser, it only prints the address."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path

from labkit.notebook.lessons import Copies, copy_lessons

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path(os.environ.get("LABKIT_MY_LESSONS", ROOT / "my_lessons")).resolve()  # the variable puts the copies elsewhere
LESSON = "00_start_here.ipynb"
ROOT_OPTIONS = ("--ServerApp.root_dir", "--notebook-dir", "--ServerApp.notebook_dir")


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
        arguments: options for JupyterLab; they come last, so they override ours.
    """
    root = next(
        (Path(value).resolve() for name, _, value in (a.partition("=") for a in arguments) if name in ROOT_OPTIONS and value),
        None,
    )
    if root is None:
        root = ROOT if FOLDER.is_relative_to(ROOT) else FOLDER
    options = [
        f"--ServerApp.root_dir={root}",
        f"--LabApp.app_settings_dir={ROOT / 'tools' / 'lab_settings'}",  # no questions about news and updates before the lesson
        "--Application.log_level=WARN",  # the address is printed at any level; a student does not need the rest of the start-up
    ]
    if FOLDER.is_relative_to(root):  # else JupyterLab opens on its file browser
        options.append(f"--LabApp.default_url=/lab/tree/{(FOLDER / LESSON).relative_to(root).as_posix()}")
    if not has_browser():
        options.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        options.append("--allow-root")  # in a container root is often the only user; Jupyter requires the option
    return [sys.executable, "-m", "jupyterlab", *options, *arguments]


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
