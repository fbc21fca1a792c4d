"""Opens JupyterLab on the first lesson; without a browser, it only prints its address and serves."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LESSON = "notebooks/00_start_here.ipynb"


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
    """The command that starts JupyterLab on the first lesson.

    Args:
        arguments: options for JupyterLab; they come last and so override ours.
    """
    options = [
        f"--ServerApp.root_dir={ROOT}",
        f"--LabApp.default_url=/lab/tree/{LESSON}",
        f"--LabApp.app_settings_dir={ROOT / 'tools' / 'lab_settings'}",  # no questions about news and updates before the lesson
        "--Application.log_level=WARN",  # the address is printed at any level; a student does not need the rest of the start-up
    ]
    if not has_browser():
        options.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        options.append("--allow-root")  # in a container root is often the only user; Jupyter requires the option
    return [sys.executable, "-m", "jupyterlab", *options, *arguments]


def main() -> None:
    """Become the server, so that Ctrl-C reaches it."""
    print("JupyterLab: the address follows; Ctrl-C twice stops it.", flush=True)
    os.chdir(ROOT)
    line = command(sys.argv[1:])
    os.execv(line[0], line)


if __name__ == "__main__":
    main()
