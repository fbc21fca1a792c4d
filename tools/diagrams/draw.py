"""Writes the diagrams of all lessons to notebooks/images/: `make diagrams`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tools.diagrams import (
    choose_a_strategy,
    collectives,
    data_parallel,
    find_the_bottleneck,
    hybrid_mesh,
    messages,
    model_parallel,
    pipelines,
    rpc,
    rpc_hybrid,
    several_machines,
    sharded_data_parallel,
    start_here,
    tensor_parallel,
    tf_data_parallel,
    tf_hybrid,
    tf_model_parallel,
)
from tools.diagrams.kit import Diagram

IMAGES: Final = Path(__file__).resolve().parents[2] / "notebooks" / "images"
# A file for each lesson that has diagrams.
LESSONS: Final = (
    start_here,
    messages,
    collectives,
    data_parallel,
    sharded_data_parallel,
    model_parallel,
    pipelines,
    rpc,
    rpc_hybrid,
    tensor_parallel,
    hybrid_mesh,
    several_machines,
    tf_data_parallel,
    tf_model_parallel,
    tf_hybrid,
    find_the_bottleneck,
    choose_a_strategy,
)


def all_diagrams() -> dict[str, Diagram]:
    """Each diagram by the name of its file, without ".svg"."""
    return {name: diagram for lesson in LESSONS for name, diagram in lesson.diagrams().items()}


def main() -> None:
    """Write the files anew, and remove those that no lesson draws."""
    IMAGES.mkdir(exist_ok=True)
    found = all_diagrams()
    for old in IMAGES.glob("*.svg"):
        if old.stem not in found:
            old.unlink()
    for name, diagram in found.items():
        diagram.save(IMAGES / f"{name}.svg")


if __name__ == "__main__":
    main()
