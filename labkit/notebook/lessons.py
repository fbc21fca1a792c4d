"""The student's own copies of the lessons: without outputs, never overwritten by an update, and reset on request."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from labkit.errors.exceptions import LabError
from labkit.errors.wrong_calls import public_api

__all__ = ["Copies", "copy_lessons", "reset_lesson"]

KEY: Final = "labkit"  # in a copy's metadata: the path of the original, and a digest of the text that was copied
_LINK: Final = re.compile(r"\]\(([^)#?\s]+)")  # the target of a link or picture in Markdown


@dataclass(frozen=True)
class Copies:
    """What `copy_lessons` did, as names of notebooks.

    Args:
        new: copied for the first time.
        updated: copied again, because the lesson has changed and the student had not changed the copy.
        outdated: left alone: both the lesson and the copy have changed.
    """

    new: tuple[str, ...] = ()
    updated: tuple[str, ...] = ()
    outdated: tuple[str, ...] = ()


def copy_lessons(lessons: Path, folder: Path) -> Copies:
    """Give the student a copy of each lesson; copies that the student has changed stay as they are.

    Args:
        lessons: the folder of the executed notebooks.
        folder: the folder for the copies; created if it does not exist.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    new, updated, outdated = [], [], []
    for original in sorted(lessons.glob("*.ipynb")):
        copy = folder / original.name
        if not copy.exists():
            new.append(original.name)
        else:
            copied = _copied_digest(copy)
            if copied in ("", _digest(_read(original))):  # a notebook of the student's own; up to date
                continue
            if _digest(_read(copy, lessons, folder)) != copied:
                outdated.append(original.name)
                continue
            updated.append(original.name)
        with _prepared(original, copy) as fresh:
            fresh.replace(copy)
    return Copies(tuple(new), tuple(updated), tuple(outdated))


@public_api
def reset_lesson(lesson: str) -> str:
    """Replace your copy of a lesson by a fresh one; the old copy is kept beside it under another name.

    Args:
        lesson: its number, such as "02" or "02b", or another beginning of its name.

    Returns:
        what was done, and what to do in JupyterLab.

    Raises:
        TypeError: not a text.
        LabError: no lesson or several lessons have names that begin so, the original no longer exists or is broken, or
            the copy cannot be written.
    """
    if not isinstance(lesson, str):
        raise TypeError(f'reset_lesson({lesson!r}): expected the beginning of a lesson\'s name, as in lab.reset_lesson("02")')
    folder = Path.cwd()
    originals = _originals(folder)
    found = [path for name, path in originals.items() if name == f"{lesson.removesuffix('.ipynb')}.ipynb"]
    found = found or [path for name, path in originals.items() if name.partition("_")[0] == lesson]  # "02" is not "02b"
    found = found or [path for name, path in originals.items() if lesson and name.startswith(lesson)]
    if len(found) != 1:
        names = ", ".join(name.removesuffix(".ipynb") for name in originals) or "no copies of lessons"
        raise LabError(f"reset_lesson({lesson!r}): expected the beginning of one lesson's name; this folder has {names}")
    original = found[0]
    copy = folder / original.name
    if not original.exists():
        raise LabError(f"reset_lesson({lesson!r}): the original, {original}, no longer exists")
    number, kept = 1, ""
    while (old := copy.with_name(f"{copy.stem}.old{number}.ipynb")).exists():
        number += 1
    try:
        with _prepared(original, copy) as fresh:  # if that fails, the student's copy is where it was
            if copy.exists():
                copy.rename(old)
                kept = f"; your work is in {old.name}"
            fresh.replace(copy)
    except OSError as error:
        raise LabError(f"reset_lesson({lesson!r}): {error.filename or copy}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise LabError(f"reset_lesson({lesson!r}): the original, {original}, is not a notebook") from None
    return f"{copy.name} is as it was at first{kept}. If the lesson is open, choose File → Reload Notebook from Disk."


def _originals(folder: Path) -> dict[str, Path]:
    """Return the lessons of which a folder has copies, by name; also those whose copy was deleted or is broken."""
    copies = [path for path in folder.glob("*.ipynb") if _copied_digest(path)]
    copied = [Path(os.path.normpath(folder / _about(path)["original"])) for path in copies]
    beside = [path for parent in {path.parent for path in copied} for path in parent.glob("*.ipynb")]
    return {path.name: path for path in sorted({*copied, *beside})}


@contextlib.contextmanager
def _prepared(original: Path, copy: Path) -> Iterator[Path]:
    """Write a copy into a temporary file beside it, which the caller moves to its place."""
    content = json.loads(original.read_text(encoding="utf-8"))
    digest = _digest(_sources(content))
    for cell in content["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
        elif cell["cell_type"] == "markdown":
            cell["source"] = _relinked("".join(cell["source"]), original.parent, copy.parent)
    content["metadata"][KEY] = {"original": os.path.relpath(original, copy.parent), "digest": digest}
    temporary = copy.with_name(f".{copy.name}.new")
    try:
        temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _relinked(text: str, lessons: Path, folder: Path) -> str:
    """Adapt links to pictures and solutions to the new folder; links to other lessons lead to their copies."""

    def relinked(match: re.Match[str]) -> str:
        target = match.group(1)
        if target.startswith("/") or not (lessons / target).exists() or (lessons / target).parent == lessons:
            return match.group()
        return f"]({_from(lessons, folder)}{target}"

    return _LINK.sub(relinked, text)


def _from(lessons: Path, folder: Path) -> str:
    return f"{Path(os.path.relpath(lessons, folder)).as_posix()}/"


def _read(path: Path, lessons: Path | None = None, folder: Path | None = None) -> list[str]:
    """Return the texts of a notebook's cells; links in a copy are as in the original."""
    sources = _sources(json.loads(path.read_text(encoding="utf-8")))
    if lessons is not None and folder is not None:
        return [source.replace(f"]({_from(lessons, folder)}", "](") for source in sources]
    return sources


def _sources(content: Any) -> list[str]:
    return [f"{cell['cell_type']}\n{''.join(cell['source'])}" for cell in content["cells"]]


def _digest(sources: list[str]) -> str:
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()


def _about(copy: Path) -> dict[str, str]:
    try:
        about = json.loads(copy.read_text(encoding="utf-8"))["metadata"].get(KEY, {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no notebook, or one that something else wrote
        return {}
    return about if isinstance(about, dict) else {}


def _copied_digest(copy: Path) -> str:
    """Return the digest of the text that was copied; "" if this is no copy of a lesson."""
    return str(_about(copy).get("digest", ""))
