"""`python -m bench.load`: heavy loads at full size, as a table of results, limits, and whether they held."""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
from collections.abc import Callable
from typing import Final

from bench.load import loads
from bench.load.footprint import GROWTH, Footprint, too_much
from bench.page import about, duration, mib, say, table

Row = tuple[str, str, str, bool]  # the load, the result, the limit, and whether it held
FLAT: Final = (
    f"each time, once warm: {GROWTH.descriptors:g} descriptors, segments and processes, "
    f"{GROWTH.resident / 1024:g} KiB here and in all below"
)


def runs() -> list[Row]:
    """1,000 runs on one group."""
    return [
        _flat("1,000 runs on one group of 2", loads.many_runs(1_000, warm=100)),
        _flat("1,000 runs on one group of 2, rpc", loads.many_runs(1_000, warm=100, runtime="rpc")),
    ]


def groups() -> list[Row]:
    """200 groups, one after the other."""
    return [
        _flat("200 groups of 2, one after the other", loads.many_groups(200, warm=20)),
        _flat("200 groups of 2, one after the other, tensorflow", loads.many_groups(200, warm=20, runtime="tensorflow")),
    ]


def _flat(load: str, grown: Footprint) -> Row:
    seen = (
        f"{grown.descriptors:.3f} descriptors, {grown.segments:.3f} segments, {grown.processes:.3f} processes, "
        f"{grown.resident / 1024:+.2f} KiB here, {grown.below / 1024:+.2f} KiB below"
    )
    return load, seen, FLAT, not too_much(grown)


def ranks() -> list[Row]:
    """16 ranks on any number of cores."""
    sums = loads.many_ranks(16)
    return [("an all_reduce of 16 ranks", f"{sums[0]:g} on {len(sums)} ranks", "120 on each", sums == [120.0] * 16)]


def move() -> list[Row]:
    """Arguments and results of 1 GiB in all."""
    right, seconds, left = loads.move(1 << 30)
    seen = f"{'equal' if right else 'not equal'}, {duration(seconds)}, {mib(left)} left"
    return [("512 MiB to 4 ranks, 128 MiB from each", seen, "equal, 16 MiB left", right and left <= 16 << 20)]


def flood() -> list[Row]:
    """A rank that prints 100 MB."""
    seconds, kept, said, most = loads.flood(100_000_000)
    seen = f"{kept:,} characters kept, {mib(most)} more at most, {duration(seconds)}; {said!r}"
    held = kept < 500_000 and most < 32 << 20 and bool(said)
    return [("a rank prints 100 MB", seen, "500,000 characters, 32 MiB more, the cut is said", held)]


def spans() -> list[Row]:
    """1,000,000 spans in one run."""
    seen, dropped, seconds = loads.many_spans(1_000_000)
    took = ", ".join(f"{part} {duration(part_s)}" for part, part_s in seconds.items())
    found = f"{seen:,} seen, {dropped:,} counted as dropped; {took}"
    return [("1,000,000 spans on 2 ranks in one run", found, "none lost uncounted", seen + dropped == 1_000_000)]


def notebooks() -> list[Row]:
    """Forty notebooks' processes that start a group at once."""
    seen = loads.many_notebooks(40)
    own = sum(n["numbers"] == [[n["number"]] * 2] * 2 for n in seen)
    pids, places = {pid for n in seen for pid in n["pids"]}, {n["place"] for n in seen}
    slow = f"{duration(statistics.median(n['seconds'] for n in seen))} median, {duration(max(n['seconds'] for n in seen))} worst"
    found = f"{own} saw their own 2 ranks alone, {len(places)} stores, {len(pids)} ranks; first result after {slow}"
    held = (own, len(places), len(pids)) == (40, 40, 80)
    return [("40 notebooks' processes start a group at once", found, "40, 40, 80", held)]


PARTS: Final[dict[str, Callable[[], list[Row]]]] = {
    part.__name__: part for part in (runs, groups, ranks, move, flood, spans, notebooks)
}


def main() -> None:
    """Load, and print."""
    parser = argparse.ArgumentParser("python -m bench.load", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="these parts alone")
    arguments = parser.parse_args()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that started processes end with this one
    machine, rows = about(), []
    for part in arguments.only:
        say(part)
        for load, seen, allowed, held in PARTS[part]():
            rows.append([load, seen, allowed, "yes" if held else "**no**"])
    print("\n".join([*machine, "", table(["load", "seen", "allowed", "held"], rows)]))


if __name__ == "__main__":
    main()
