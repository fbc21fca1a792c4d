"""The numbers of `make bench`, what stands beside each, and the goals: what a user feels. Nothing is measured here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from bench.page import duration, mib


@dataclass(frozen=True, slots=True)
class Promise:
    """One row of the table of promises.

    Attributes:
        unit: "times" for a multiple of what is beside it, "more" for a fraction above that, "seconds" for a limit.
    """

    quantity: str  # the measured quantity, in words; `{lost:.0%}` is the part of the spans that was lost
    key: str  # of labkit's measurement
    beside: str = ""  # the measurement to compare with; "" if there is none
    beside_name: str = ""  # what that is
    at_most: float | None = None  # the goal, in `unit`; None if there is none
    unit: str = "times"

    def cells(self, measured: Mapping[str, float]) -> list[str]:
        """Its cells: quantity, labkit's, what is beside it, ratio, goal, and whether it was reached."""
        value, other = measured[self.key], measured.get(self.beside)
        show = mib if self.key.endswith("memory") else duration
        ratio = value / other if other else None
        shown = "" if ratio is None else f"{ratio - 1:+.1%}" if self.unit == "more" else f"{ratio:.2f}×"
        beside = f"{show(other)} ({self.beside_name})" if other else ""
        goal, reached = "", ""
        if self.at_most is not None:
            seconds, limit = self.unit == "seconds", self.at_most + (self.unit == "more")
            goal = {"times": f"{self.at_most:g}×", "more": f"{self.at_most:.0%} more", "seconds": duration(self.at_most)}[
                self.unit
            ]
            compared = value if seconds else ratio
            reached = "not measured" if compared is None else "yes" if compared <= limit else "**no**"
        return [
            self.quantity.format(lost=measured.get("picture: lost", 0)),
            show(value),
            beside,
            shown,
            goal and f"at most {goal}",
            reached,
        ]


BARE: Final = "bare forkserver, pipes and shared memory"
PROMISES: Final = (
    Promise("the first `Group(4)` of a kernel, with the import, and one all_reduce", "labkit: first",
            f"{BARE}: first", "bare forkserver", 1.2),
    Promise("a later `Group(4)` ready and one all_reduce done", "labkit: later", f"{BARE}: later", "bare forkserver", 1.3),
    Promise("`run` of nothing on four ranks", "labkit: call", f"{BARE}: call", "bare pipes", 0.0005, "seconds"),
    Promise("64 MiB to each of four ranks and back", "labkit: move", "Ray's actors: move", "Ray's actors", 1),
    Promise("memory of four idle ranks and their server", "labkit: memory", "import: torch", "one `import torch`", 1.3),
    Promise("a small model's step, its phases recorded", "step: phases", "step: plain", "without, in turns", 0.02, "more"),
    Promise("training with `watch`, 2 ranks", "picture: watch", "picture: run", "`run`, in turns", 0.02, "more"),
    Promise("one `span`, recording", "span: recording", "span: two clocks", "two clock reads"),
    Promise("one `span` outside a group", "span: outside", "span: two clocks", "two clock reads"),
    Promise("one all_reduce of a number, 2 ranks, recorded", "all_reduce: recorded",
            "all_reduce: torch's", "torch's own group, in turns"),
    Promise("the kernel's processor per second of `watch`, 2 ranks train", "picture: watch share",
            "picture: run share", "`run`"),
    Promise("the kernel's processor per second, 2 × 10⁶ spans as fast as can be ({lost:.0%} lost)", "picture: spans share"),
    Promise("a million spans drawn as a timeline", "picture: draw"),
    Promise("a rank raises → error visible", "until: raise"),
    Promise("a rank is killed → error visible", "until: kill"),
    Promise("Stop → prompt, ranks blocked in C++", "until: blocked"),
    Promise("Stop → prompt, ranks computing", "until: computing"),
)  # fmt: skip
