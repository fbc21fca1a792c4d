"""Who waits for whom, and since when: a rank's pending operations in words."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.ring import Pending

__all__ = ["doing"]


def doing(name: str, pending: Sequence[Pending], now_ns: int, *, returned: bool = False, names: Sequence[str] = ()) -> str:
    """One line: what a rank is doing at this moment.

    Args:
        name: the rank's name.
        pending: its operations that are issued and not completed.
        now_ns: this moment.
        returned: whether its function has returned.
        names: the names of all ranks, to name a peer.
    """
    if returned:
        return f"{name} had returned"
    blocked = [p for p in pending if p.wait_start_ns]
    if not blocked:
        beside = f", with {pending[0].name} under way" if pending else ""
        return f"{name} was computing{beside}"
    last = blocked[-1]
    peer = f" with {names[last.peer]}" if 0 <= last.peer < len(names) else ""
    where = f" ({last.line})" if last.line else ""
    return f"{name} was waiting in {last.name}{peer}{where} for {(now_ns - last.wait_start_ns) / 1e9:.1f} s"
