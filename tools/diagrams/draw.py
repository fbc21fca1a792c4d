"""Writes the diagrams of all lessons to notebooks/images/: `make diagrams`."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Final

import tools.diagrams
from tools.diagrams.kit import DIAGRAMS, Diagram

IMAGES: Final = Path(__file__).resolve().parents[2] / "notebooks" / "images"


def all_diagrams() -> dict[str, Diagram]:
    """Each diagram by the name of its file, without ".svg"."""
    for module in pkgutil.iter_modules(tools.diagrams.__path__, "tools.diagrams."):
        importlib.import_module(module.name)
    return DIAGRAMS


def main() -> None:
    """Write the files anew, and remove those that no lesson draws."""
    IMAGES.mkdir(exist_ok=True)
    found = all_diagrams()
    for old in IMAGES.glob("*.svg"):
        if old.stem not in found:
            old.unlink()
    for name, diagram in found.items():
        (IMAGES / f"{name}.svg").write_text(diagram.svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
