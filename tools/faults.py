"""Runs the programs of notebooks/faults/, wrong and fixed, and writes docs/faults.md with a picture of each.

    python -m tools.faults              all of them
    python -m tools.faults sentences    only this picture, and the whole page

tools/faults.toml says what is wrong with each program, and what fixes it.
"""

from __future__ import annotations

import difflib
import re
import sys
import tempfile
import textwrap
import tomllib
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import torch

import labkit as lab
from labkit.teaching.faults import Fault, fault

ROOT: Final = Path(__file__).resolve().parent.parent
CATALOGUE: Final = Path(__file__).with_suffix(".toml")
PAGE: Final = ROOT / "docs" / "faults.md"
PICTURES: Final = ROOT / "docs" / "pictures" / "faults"
FOLDER: Final = tempfile.TemporaryDirectory(prefix="fixed-")  # of the programs without their faults
DPI = 90
EQUAL = 1e-5  # results that differ by less are equal but for the order in which numbers were added
HEAD: Final = """# Faults

For teachers: programs that are wrong, what is wrong with them, and what labkit shows. Somebody has reported each fault
between 2023 and 2026; the programs were written for labkit. Each is plain PyTorch in fewer than forty lines, stands in
`notebooks/faults/`, and runs under `torchrun`. Lesson [15](../notebooks/15_find_the_fault.ipynb) uses seven of them;
the others are yours to set as exercises. Students who read this page know the answers.

```python
lab.fault("sentences")  # shows the program, without a word on what is wrong
run = lab.fault("sentences").watch()  # runs it on new ranks with check=True; .run() does so without the picture
lab.verdict(run)
lab.fault("sentences").run(ranks=1)  # the serial oracle
```

Results differ by the largest difference between the numbers that a program returns on several ranks and on one. A
fixed program differs by less than 1e-5; `held_out` has other examples on each rank and is compared in another way.
`make faults` runs all of them and writes this page.
"""


def fixed(name: str) -> Fault:
    """Return the program without its fault, in a file of its own."""
    right = fault(name).source
    for old, new in tomllib.loads(CATALOGUE.read_text("utf-8"))[name]["fixed"]:
        if right.count(old) != 1:
            raise ValueError(f"{name}: expected this text once in the program: {old!r}")
        right = right.replace(old, new)
    path = Path(FOLDER.name) / f"{name}.py"
    path.write_text(right, encoding="utf-8")
    return Fault(path)


def compared(program: Fault, serial: Fault, ranks: int) -> float:
    """Return the largest difference between a program's result on several ranks and another's on one."""
    results = program.run(ranks=ranks).results
    (right,) = serial.run(ranks=1).results
    whole = results[0] if results[0].shape == right.shape else torch.cat(results)  # or each rank has a part
    return float((whole - right).abs().max())


def wrapped(text: str) -> str:
    """Return a paragraph in lines of at most 120 characters."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def section(name: str, entry: dict[str, Any], *, picture: bool) -> str:
    """Return the part of the page about one fault, and draw its picture."""
    program, right = fault(name), fixed(name)
    report = re.match(r"# Reported in (\S+)#(\d+) ([^;]+);", program.source)
    assert report, name
    repository, number, when = report.groups()
    try:
        run = program.run()
        difference = compared(program, program, program.ranks)
        ends = f"Its result differs from that of one rank by {difference:.1g}." if difference > EQUAL else "Its result is right."
        said = str(lab.verdict(run))
    except lab.RunError as error:
        run, said, ends = error.run, str(error).strip("─\n "), "It ends with an error."
    if picture:
        figure = lab.timeline({f"{name} on {program.ranks} ranks": run}).get_figure(root=True)
        assert figure is not None
        figure.savefig(PICTURES / f"{name}.png", dpi=DPI)
    changed = list(difflib.unified_diff(program.source.splitlines(), right.source.splitlines(), lineterm="", n=1))[2:]
    serial = ""
    if said.startswith("No fault was found"):
        serial = f"\n`lab.same_as_serial` says:\n\n```\n{lab.same_as_serial(program.train, ranks=(1, program.ranks))}\n```\n"
    return f"""
## {entry["title"]}: `{name}`

{
        wrapped(
            f"Reported in [{repository}#{number}](https://github.com/{repository}/issues/{number}) {when}. "
            f"Ranks: {program.ranks}. {ends}"
        )
    }

{wrapped(entry["wrong"])}

![The timeline of {name} on {program.ranks} ranks.](pictures/faults/{name}.png)

labkit says:

```
{said}
```
{serial}
{wrapped("Fix: " + entry["cure"])}

```diff
{chr(10).join(changed)}
```
"""


def main(names: list[str]) -> int:
    """Write the page, and the pictures of all programs or of those named."""
    mpl.use("agg")
    PICTURES.mkdir(parents=True, exist_ok=True)
    catalogue = tomllib.loads(CATALOGUE.read_text("utf-8"))
    parts = [section(name, entry, picture=not names or name in names) for name, entry in catalogue.items()]
    PAGE.write_text(HEAD + "".join(parts), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
