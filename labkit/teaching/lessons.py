"""The student's own copies of the lessons: without outputs, never overwritten by an update, and reset on request."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from labkit.errors.exceptions import LABKIT, LabError, install_command
from labkit.errors.lists import listed
from labkit.errors.wrong_calls import public_api

# The lessons, their images and solutions: a wheel has them in the package, a checkout in `notebooks`.
_INSTALLED: Final = Path(LABKIT, "course")
ORIGINALS: Final = _INSTALLED if _INSTALLED.exists() else Path(LABKIT).parent / "notebooks"
JUDGES: Final = ORIGINALS / "judges"  # modules of labkit.teaching.exercises; they are not copied
KEY: Final = "labkit"  # in a copy's metadata: a digest of the text that was copied


@dataclass(frozen=True, repr=False)
class Copies:
    """What `lessons` did, as names of notebooks."""

    folder: Path  # where the copies are
    first: str  # the lesson to begin with
    new: tuple[str, ...] = ()  # copied for the first time
    updated: tuple[str, ...] = ()  # copied again: the lesson has changed, and the student had not changed the copy
    outdated: tuple[str, ...] = ()  # left alone: both have changed

    def __repr__(self) -> str:
        lines = []
        if self.new:
            lines.append(f"New in {self.folder}: {_numbers(self.new)}, with their pictures and solutions.")
        if self.updated:
            lines.append(f"Updated, because you had not changed your copy: {_numbers(self.updated)}.")
        for name in self.outdated:
            number = name.partition("_")[0]
            lines.append(f'{name} has a newer version; your copy is kept. lab.reset_lesson("{number}") gives you the new one.')
        lines = lines or [f"The lessons in {self.folder} are up to date."]
        return "\n".join([*lines, f"Open {self.folder / self.first}. An update never overwrites what you write there."])


@public_api
def lessons(folder: str | Path = "my_lessons", *, only: str | Sequence[str] = ()) -> Copies:
    """Give yourself a copy of each lesson, without outputs; copies that you have changed stay as they are.

    Images and solutions come into `images` and `solutions` beside the copies, and are renewed each time.

    Args:
        folder: the folder for the copies; created if it does not exist.
        only: the lessons to copy, by number, such as "02" or ["02", "04"], or another beginning of their names; by
            default, all.

    Returns:
        what was copied, updated and left alone.

    Raises:
        LabError: no lesson or several lessons have names that begin so, or the folder cannot be written.
    """
    folder = Path(folder)
    chosen = lessons_named([only] if isinstance(only, str) else only)
    new, updated, outdated = [], [], []
    try:
        for original in chosen:
            copy = folder / original.name
            digest = _digest(json.loads(original.read_bytes()))
            if not copy.exists():
                new.append(original.name)
            elif (copied := _copied_digest(copy)) in ("", digest):  # a notebook of the student's own; up to date
                continue
            elif _digest(json.loads(copy.read_bytes())) != copied:
                outdated.append(original.name)
                continue
            else:
                updated.append(original.name)
            _write(copy, _fresh(original))
        for original in chosen:
            if (solutions := ORIGINALS / "solutions" / original.name).exists():  # a lesson in the making may have none
                _write(folder / "solutions" / original.name, _fresh(solutions))
        for original in (*ORIGINALS.glob("images/*"), *ORIGINALS.glob("AGENTS.md")):
            _write(folder / original.relative_to(ORIGINALS), original.read_bytes())
    except OSError as error:
        raise LabError(f"lessons({str(folder)!r}): {error.filename or folder}: {error.strerror}") from None
    return Copies(folder, chosen[0].name, tuple(new), tuple(updated), tuple(outdated))


@public_api
def reset_lesson(lesson: str) -> str:
    """Replace your copy of a lesson by a fresh one; the old copy is kept beside it under another name.

    Args:
        lesson: its number, such as "02" or "02b", or another beginning of its name.

    Returns:
        what was done, and what to do in JupyterLab.

    Raises:
        LabError: no lesson or several lessons have names that begin so, the current folder has no copies of lessons, or
            the copy cannot be written.
    """
    original = _named(lesson.removesuffix(".ipynb"))
    folder = Path.cwd()
    if not any(map(_copied_digest, folder.glob("*.ipynb"))):
        raise LabError(f"reset_lesson({lesson!r}): {folder} has no copies of lessons; lab.lessons(folder) makes them")
    copy = folder / original.name
    number, kept = 1, ""
    while (old := copy.with_name(f"{copy.stem}.old{number}.ipynb")).exists():
        number += 1
    try:
        if copy.exists():
            _write(old, copy.read_bytes())
            kept = f"; your work is in {old.name}"
        _write(copy, _fresh(original))
    except OSError as error:
        raise LabError(f"reset_lesson({lesson!r}): {error.filename or copy}: {error.strerror}") from None
    return f"{copy.name} is as it was at first{kept}. If the lesson is open, choose File → Reload Notebook from Disk."


def lessons_named(beginnings: Sequence[str] = ()) -> list[Path]:
    """Return the lessons that have these numbers, or whose names begin so; all lessons if none is given."""
    return [_named(beginning) for beginning in beginnings] or _originals()


def _originals() -> list[Path]:
    found = sorted(ORIGINALS.glob("*.ipynb"))
    if not found:
        raise LabError(f"this installation of labkit has no lessons in {ORIGINALS}: install its wheel, or clone its repository")
    return found


def _named(beginning: str) -> Path:
    """Return the lesson that has a number, or whose name begins so."""
    originals = _originals()
    found = [path for path in originals if beginning in (path.stem, path.stem.partition("_")[0])]  # "02" is not "02b"
    found = found or [path for path in originals if beginning and path.stem.startswith(beginning)]
    if len(found) != 1:
        names = listed((path.stem for path in originals), word="or")
        raise LabError(f"{beginning!r} is not the beginning of one lesson's name; expected {names}")
    return found[0]


def _fresh(original: Path) -> bytes:
    """Return a notebook without outputs, with a digest of its text."""
    content = json.loads(original.read_bytes())
    content["metadata"][KEY] = {"digest": _digest(content)}
    for cell in content["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def _write(path: Path, content: bytes) -> None:
    """Write a file that has another content; if that fails, the old one is still there."""
    if path.exists() and path.read_bytes() == content:
        return
    from labkit.tracing.trace_file import replacing  # ranks of an exercise import this file, and copy no lessons

    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as new:
        new.write_bytes(content)


def _numbers(names: Sequence[str]) -> str:
    return f"lesson{'s' * (len(names) > 1)} {listed(name.partition('_')[0] for name in names)}"


def _digest(content: Any) -> str:
    """Return a digest of the texts of a notebook's cells."""
    sources = [f"{cell['cell_type']}\n{''.join(cell['source'])}" for cell in content["cells"]]
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()


def _copied_digest(copy: Path) -> str:
    """Return the digest of the text that was copied; "" if this is no copy of a lesson."""
    try:
        about = json.loads(copy.read_bytes())["metadata"].get(KEY, {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no notebook, or one that something else wrote
        return ""
    return str(about.get("digest", "")) if isinstance(about, dict) else ""


# `python -m labkit lab` opens JupyterLab on the student's copy of the first lesson, or prints its address.
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
