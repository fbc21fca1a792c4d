"""The submissions: right, wrong, unfinished, hanging, crashing, greedy and cheating ones, made from templates."""

from __future__ import annotations

import copy
import json
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from labkit.teaching.classroom.handout import code_cell, read_handout
from labkit.teaching.lessons import ORIGINALS

__all__ = ["CLASS", "LESSON", "POINTS", "Submission", "notebook_of"]

LESSON: Final = "02_data_parallel"
POINTS: Final = {"average_gradients": 2.0, "average_in_buckets": 1.0, "draw_indices": 1.0, "scaled_learning_rate": 1.0}


@dataclass(frozen=True)
class Submission:
    """What one student submits.

    Args:
        student: the student's name, which says what is special.
        points: what it must get.
        answers: the cell for an exercise, where it is not the reference solution; None: the stub.
        first: a cell at the beginning.
        in_kernel: the points where tests run in the kernel of the submission, if they differ.
        text: the file's text, if it is no notebook.
    """

    student: str
    points: float
    answers: dict[str, str | None] = field(default_factory=dict)
    first: str = ""
    in_kernel: float | None = None
    text: str | None = None


def _rate(*lines: str, name: str = "scaled_learning_rate") -> dict[str, str | None]:
    """Return an answer to the shortest exercise: some lines, and the right value."""
    body = textwrap.indent("\n".join([*lines, "return base * per_rank * ranks / base_batch"]), "    ")
    return {"scaled_learning_rate": f"def {name}(base, base_batch, per_rank, ranks):\n{body}"}


def _average(*lines: str) -> dict[str, str | None]:
    body = textwrap.indent("\n".join(lines), "        ")
    return {"average_gradients": f"def average_gradients(model):\n    for p in model.parameters():\n{body}"}


def _draw(*lines: str) -> dict[str, str | None]:
    body = textwrap.indent("\n".join(lines), "    ")
    return {"draw_indices": f"def draw_indices(examples, rank, ranks, epoch):\n{body}"}


_BUCKETS: Final = """
def average_in_buckets(model, bucket_bytes):
    {before}
    for grad in [p.grad for p in model.parameters() if p.requires_grad][::-1]:
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
"""
_SHUFFLED: Final = "order = torch.randperm(examples, generator=torch.Generator().manual_seed(epoch)).tolist()"
_FILLED: Final = "order += order[: -examples % ranks]"
_NOTHING: Final[dict[str, str | None]] = dict.fromkeys(POINTS)
_REBOUND: Final = """
import labkit as lab
import labkit.teaching.exercises.check
lab.check = labkit.teaching.exercises.check.check = lambda *arguments, **options: True
"""
_PRINTED: Final = 'print("✓ average_gradients: passed")\nprint({"score": 5.0, "points": 5.0})'
_ORACLE: Final = """
def average_gradients(model):
    from labkit.teaching.exercises import data_parallel
    data_parallel.average_gradients(model)
"""
_SOLUTIONS: Final = """
def average_gradients(model):
    import json, labkit, pathlib
    root = pathlib.Path(labkit.__file__).parent
    folder = next(p for p in (root / "course", root.parent / "notebooks") if p.exists())
    cells = json.loads((folder / "solutions" / "02_data_parallel.ipynb").read_text())["cells"]
    names = {"torch": torch, "dist": dist}
    exec(next(s for c in cells if "def average_gradients" in (s := "".join(c["source"]))).partition("lab.check")[0], names)
    names["average_gradients"](model)
"""
_NEIGHBOUR: Final = """
def average_gradients(model):
    import json, pathlib
    cells = json.loads(pathlib.Path("NEIGHBOUR").read_text())["cells"]
    names = {"torch": torch, "dist": dist}
    exec(next(s for c in cells if "def average_gradients" in (s := "".join(c["source"]))).partition("lab.check")[0], names)
    names["average_gradients"](model)
"""
_SUM: Final = (
    "if p.requires_grad:",
    "    p.grad = torch.zeros_like(p) if p.grad is None else p.grad",
    "    dist.all_reduce(p.grad)",
)
_GATHERED: Final = (
    "if p.requires_grad:",
    "    own = torch.zeros_like(p) if p.grad is None else p.grad",
    "    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]",
    "    dist.all_gather(every, own)",
    "    p.grad = torch.stack(every).mean(0)",
)
_SOCKET: Final = (
    "import contextlib, socket",
    "with contextlib.suppress(OSError):",
    "    socket.create_connection(('192.0.2.1', 80), timeout=0.2)",  # an address for documentation, RFC 5737
)
_STAYS: Final = ("import os, time", "if os.fork() == 0:", "    os.setsid()", "    time.sleep(600)", "    os._exit(0)")
_FULL: Final = ("kept = [bytearray(b'x' * 2**26) for _ in range(48)]", "return [len(kept)]")  # 3 GiB, all of them written

CLASS: Final = (
    Submission("right", 5),
    Submission("right by all_gather", 5, _average(*_GATHERED)),
    Submission("right with a helper", 5, _rate("base = as_given(base)"), first="def as_given(number):\n    return number"),
    Submission("right under another name", 5, _rate(name="my_rate"), in_kernel=4),
    Submission("right beside a syntax error", 5, first="def broken(:\n    pass"),
    Submission("right beside an error", 5, first="1 / 0"),
    Submission("sums gradients", 3, _average(*_SUM)),
    Submission("divides by two", 3, _average(*_SUM, "    p.grad /= 2")),
    Submission("skips missing gradients", 3, _average("if p.grad is not None:", *(f"    {line}" for line in _SUM))),
    Submission("a bucket for each", 4, {"average_in_buckets": _BUCKETS.format(before="")}),
    Submission("never shuffles", 4, _draw("order = list(range(examples))", _FILLED, "return order[rank::ranks]")),
    Submission("deals unevenly", 4, _draw(_SHUFFLED, "return order[rank::ranks]")),
    Submission("square root of the rate", 4, _rate("return base * (per_rank * ranks / base_batch) ** 0.5")),
    Submission("forgets the ranks", 4, _rate("return base * per_rank / base_batch")),
    Submission("nothing written", 0, _NOTHING),
    Submission("half written", 2, {"average_gradients": None, "draw_indices": None}),
    Submission("no file content", 0, text=""),
    Submission("deadlock", 3, _average("if dist.get_rank() == 0:", "    dist.all_reduce(p.data)")),
    Submission("endless", 4, _draw("while True:", "    pass")),
    Submission(
        "endless, swallows exceptions",
        4,
        _draw("while True:", "    try:", "        while True:", "            pass", "    except BaseException:", "        pass"),
    ),
    Submission("SIGSEGV", 4, _rate("import os, signal", "os.kill(os.getpid(), signal.SIGSEGV)")),
    Submission("os._exit", 4, {"average_in_buckets": _BUCKETS.format(before="import os; os._exit(0)")}),
    Submission("reads the judges", 3, {"average_gradients": _ORACLE}),
    Submission("rebinds lab.check", 0, _NOTHING, first=_REBOUND),
    Submission("reads the solutions", 3, {"average_gradients": _SOLUTIONS}, in_kernel=5),
    Submission("reads a neighbour", 3, {"average_gradients": _NEIGHBOUR}, in_kernel=5),
    Submission("prints a verdict", 0, _NOTHING, first=_PRINTED),
    Submission("opens a connection, swallows the error", 5, _rate(*_SOCKET)),
    Submission("forks a process that stays", 5, _rate(*_STAYS)),
    Submission("fills memory, prints without end", 3, {**_draw(*_FULL), **_rate("while True:", "    print('x' * 1000)")}),
)


def notebook_of(submission: Submission, handed_out: dict[str, Any], neighbour: Path) -> dict[str, Any]:
    """Return the content of a submitted notebook.

    Args:
        submission: what is special about it.
        handed_out: the notebook that students get.
        neighbour: another submission, which a cheating one reads.
    """
    original = json.loads((ORIGINALS / "solutions" / f"{LESSON}.ipynb").read_bytes())
    solutions = ["".join(cell["source"]) for cell in original["cells"] if cell["cell_type"] == "code"]
    content: dict[str, Any] = copy.deepcopy(handed_out)
    cells = {cell["id"]: cell for cell in content["cells"]}
    lesson = read_handout(ORIGINALS / f"{LESSON}.ipynb", {}, [])
    for exercise in lesson.exercises:
        cell = cells[lesson.notebook["cells"][exercise.cell]["id"]]
        until = 1 + next(i for i, source in enumerate(solutions) if f'lab.check("{exercise.name}"' in source)
        answer = submission.answers.get(exercise.name, "")
        if answer:
            name = "my_rate" if "def my_rate" in answer else exercise.name
            answer = f'{answer.replace("NEIGHBOUR", str(neighbour))}\n\nlab.check("{exercise.name}", {name})'
            cell["source"] = answer.strip()
        elif answer is not None:
            cell["source"] = "\n\n".join(solutions[:until])
        solutions = solutions[until:]
    if submission.first:
        content["cells"].insert(4, code_cell("first", submission.first.strip()))
    return content
