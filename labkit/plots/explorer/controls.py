"""The controls above the timeline: what can be changed, and what the run is after a change.

A control has stops, each with a text. The page sends the numbers of the chosen stops; the answer is a view of the
changed run, two texts, and its critical path.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from labkit.costs.link import Link
from labkit.costs.network import Network
from labkit.costs.prediction import GPIPE, INTERLEAVED, ONE_F_ONE_B
from labkit.errors.exceptions import LabError
from labkit.errors.units import percent, three_digits, time_in_words, unit_of
from labkit.plots.view import View, bubble_in_words, view_of
from labkit.tracing.ideal_pipeline import IdealPipeline, schedule
from labkit.tracing.replaying.changes import AS_RECORDED, ProgramChanges
from labkit.tracing.replaying.critical_path import Piece, path_in
from labkit.tracing.replaying.gains import NOTICED, Questions, taken_by, work_in
from labkit.tracing.replaying.replay import replay_of
from labkit.tracing.step_times import spread_ns

MANTISSAS: Final = (1, 1.25, 1.6, 2, 2.5, 3.2, 4, 5, 6.3, 8)  # ten stops for each power of ten
LATENCIES_US: Final = (0.0, *(m * 10.0**power for power in range(5) for m in MANTISSAS), 1e5)
BANDWIDTHS: Final = (*(m * 10.0**power for power in range(-2, 3) for m in MANTISSAS), 1e3)  # in Gbit/s
SPEEDS: Final = (0.1, 0.125, 0.2, 0.25, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0, 8.0, 10.0)
MICRO_BATCHES: Final = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
SMALL: Final = 0.0005  # of the time: a smaller change is rounding


class Controls:
    """What the two kinds of controls share; `note` says what a move does, `given` what the run is without a change."""

    def __init__(self, note: str, given: str) -> None:
        self.note, self.given = note, given
        self.all: list[dict[str, Any]] = []  # what the page gets
        self._stops: dict[str, list[Any]] = {}

    @property
    def as_given(self) -> dict[str, int]:
        """The stops of the run as it is."""
        return {control["name"]: control["at"] for control in self.all}

    def _chosen(self, stops: Mapping[str, int]) -> dict[str, Any]:
        return {name: self._stops[name][stop] for name, stop in stops.items()}

    def _add(self, name: str, label: str, kind: str, stops: Iterable[Any], texts: Iterable[str], at: Any, **needs: int) -> None:
        """Add a slider ("range"), a list ("select") or a box ("check"); without the stops `needs`, it has no effect."""
        self._stops[name] = list(stops)
        at = self._stops[name].index(at)
        self.all.append({"name": name, "label": label, "kind": kind, "texts": list(texts), "at": at, "needs": needs})

    def _compared(self, now_ns: float, given_ns: float) -> str:
        saved_ns = given_ns - now_ns
        words = f"{'saves' if saved_ns > 0 else 'costs'} {time_in_words(abs(saved_ns))} ({percent(abs(saved_ns) / given_ns)})"
        words = words if abs(saved_ns) > SMALL * given_ns else "saves nothing"
        return f"{self.given}: {time_in_words(given_ns)}. The change {words}."


class Replays(Controls):
    """What `lab.replay` can change in a run; a `LabError` says why it cannot be replayed."""

    def __init__(self, view: View) -> None:
        super().__init__("Move a control: the picture shows the run with that change, as lab.replay predicts it.", "As recorded")
        if view.whole.restarts_ns:
            raise LabError("explore: only one attempt can be replayed: lab.explore(run.trace.last_attempt()) replays the last")
        self._view, self._asked = view, Questions(view.whole, "replay")
        trace, graph = view.whole, self._asked.graph
        self._operations = tuple(taken_by(graph, self._asked.recorded))
        if self._operations:
            self._add_links(trace.link)
        work = work_in(graph)
        phases = [name for name in sorted(work, key=lambda name: -work[name]) if work[name] > NOTICED * sum(work.values())]
        if phases:
            self._add("speed", "speed", "range", SPEEDS, [f"× {speed:g}" for speed in SPEEDS], 1.0)
            chosen = [tuple(work), *((name,) for name in phases)]
            self._add("phase", "of", "select", chosen, ["all computing", *phases], chosen[0])
            if len(trace.ranks) > 1:
                self._add("rank", "on", "select", [None, *range(len(trace.ranks))], ["all ranks", *trace.ranks], None)
        if self._operations:
            self._add("free", "communication takes no time", "check", (False, True), (), False)
        if trace.columns.data["issue_delay_ns"].any():
            self._add("own_cores", "a core for each rank", "check", (False, True), (), False)

    def _add_links(self, link: Any) -> None:
        needs = {"free": 0}
        self._levels = {"inside": " inside nodes", "between": " between nodes"} if isinstance(link, Network) else {"": ""}
        if not isinstance(link, Network):
            self._add("link", "emulated link", "check", (False, True), (), link is not None)
            needs["link"] = 1
        for level, where in self._levels.items():
            own: Link = getattr(link, level) if level else link or Link.ethernet_1g  # without a link, what it could be
            latencies, bandwidths = sorted({*LATENCIES_US, own.latency_us}), sorted({*BANDWIDTHS, own.gbit_per_s})
            texts = [f"{us:.4g} µs" if us < 1000 else f"{us / 1000:.4g} ms" for us in latencies]
            self._add(f"latency {level}", f"latency{where}", "range", latencies, texts, own.latency_us, **needs)
            texts = [f"{speed:.4g} Gbit/s" for speed in bandwidths]
            self._add(f"bandwidth {level}", f"bandwidth{where}", "range", bandwidths, texts, own.gbit_per_s, **needs)

    def _link(self, chosen: Mapping[str, Any]) -> Any:
        """The link that is chosen; `AS_RECORDED` if it is the recorded one, or plays no part."""
        if not self._operations or chosen["free"]:
            return AS_RECORDED
        links: Any = {
            level: Link(gbit_per_s=chosen[f"bandwidth {level}"], latency_us=chosen[f"latency {level}"]) for level in self._levels
        }
        recorded = self._view.whole.link
        found = replace(recorded, **links) if isinstance(recorded, Network) else links[""] if chosen["link"] else None
        return AS_RECORDED if found == recorded else found

    def ask(self, stops: Mapping[str, int]) -> tuple[View, tuple[str, str], list[Piece]]:
        """Replay the run with the chosen changes."""
        asked, whole, chosen = self._asked, self._view.whole, self._chosen(stops)
        speed = chosen.get("speed", 1.0)
        changes = ProgramChanges(
            link=self._link(chosen),
            own_cores=chosen.get("own_cores", False),
            faster=dict.fromkeys(chosen["phase"], speed) if speed != 1 else {},
            rank=chosen.get("rank") if speed != 1 else None,
            free=self._operations if chosen.get("free") else (),
        )
        found, times = replay_of(asked.graph, asked.recorded, changes, changes.in_words(whole.ranks))
        unchanged = changes == ProgramChanges()
        view = view_of(whole if unchanged else found, self._view.chosen or "all", "")
        path = path_in(asked.graph, times, view.shown.start_ns, view.shown.end_ns)
        subject = "The median step" if asked.steps else "The run"
        if unchanged:
            return view, (f"{subject} took {time_in_words(asked.step_ns)}.", self.note), path
        now_ns = spread_ns(found)[1] if asked.steps else float(found.duration_ns)
        compared = self._compared(now_ns, asked.step_ns)
        if SMALL * asked.step_ns < abs(asked.step_ns - now_ns) <= (asked.high_ns - asked.low_ns) / 2:
            compared += " The recorded steps differ by more than that."
        return view, (f"{subject} takes {time_in_words(now_ns)}, predicted by replay.", compared), path


class Schedules(Controls):
    """The arguments of `lab.schedule`. Model and batch stay the same, so that more passes are shorter passes."""

    def __init__(self, given: IdealPipeline) -> None:
        super().__init__("Move a control. Model and batch stay the same; each pass takes the cost per call besides.", "As given")
        self._given = given
        kind, ranks, forward, backward = (given.arguments[name] for name in ("kind", "ranks", "forward", "backward"))
        if isinstance(forward, Iterable) or isinstance(backward, Iterable):
            raise LabError("explore: the stages of this schedule are not equal, so that another number of them is not defined")
        self._chunks = max(given.arguments["stages"] // ranks, 2)  # stages per rank, if interleaved
        kinds = {GPIPE: "GPipe", ONE_F_ONE_B: "1F1B", INTERLEAVED: f"interleaved 1F1B, {self._chunks} stages per rank"}
        self._add("kind", "schedule", "select", kinds, kinds.values(), kind)
        for name, label, usual in (("ranks", "ranks", range(1, 9)), ("micro_batches", "micro-batches", MICRO_BATCHES)):
            numbers = sorted({*usual, given.arguments[name]})
            self._add(name, label, "range", numbers, map(str, numbers), given.arguments[name])
        costs = [part / 20 * forward for part in range(21)]
        unit, length_ns = unit_of(1e9 * forward)
        texts = [f"{three_digits(1e9 * cost / length_ns)} {unit}" if cost else "0" for cost in costs]
        self._add("cost", "cost per call", "range", costs, texts, 0.0)

    def ask(self, stops: Mapping[str, int]) -> tuple[View, tuple[str, str], list[Piece]]:
        """Compute the chosen schedule."""
        given, chosen = self._given.arguments, self._chosen(stops)
        unchanged, note = stops == self.as_given, ""
        kind, ranks, micro_batches = chosen["kind"], chosen["ranks"], chosen["micro_batches"]
        stages = ranks * (self._chunks if kind == INTERLEAVED else 1)
        if kind == INTERLEAVED and micro_batches % ranks:
            micro_batches = max(micro_batches // ranks, 1) * ranks
            note = f" Interleaving needs a multiple of {ranks} micro-batches: here {micro_batches}."
        share = given["micro_batches"] / micro_batches * given["stages"] / stages
        times = {name: given[name] * share + chosen["cost"] for name in ("forward", "backward")}
        sizes = {"stages": stages, "ranks": ranks, "micro_batches": micro_batches}
        found = self._given if unchanged else schedule(kind, **sizes, **times, communication=given["communication"])
        kept, most = [0] * ranks, 0
        for span in found.filter(kind="compute"):
            kept[span.rank] += 1 if span.name.startswith("forward") else -1
            most = max(most, kept[span.rank])
        memory = f" A rank keeps the activations of at most {most * ranks / stages:g} of {micro_batches} micro-batches."
        compared = self.note if unchanged else self._compared(found.duration_ns, self._given.duration_ns)
        said = f"A step takes {time_in_words(found.duration_ns)}{bubble_in_words(found)}."
        return view_of(found, "all", ""), (said, compared + note + memory), []
