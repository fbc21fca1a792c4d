"""The methods of `RingWriter` that take all fields of an operation, generated from the schema.

They are compiled from source text, like those of a dataclass. Passing the fields in a dictionary, or looping over them,
would more than double the time to record a communication.
"""

from __future__ import annotations

from _thread import get_native_id
from collections.abc import Callable, Iterable
from typing import Any

from labkit.recording import ring_layout as layout
from labkit.recording.schema import COMMUNICATION, CPU, OPEN, Field, Tail

__all__ = ["compiled_pend", "compiled_write_communication"]


def compiled_write_communication() -> Callable[..., None]:
    """Compile the method that records a finished communication."""
    fields = layout.TAIL_FIELDS
    return _compiled(
        "write_communication",
        f"""
def write_communication(self, name, start_ns, end_ns, *, {_parameters(fields)}, device={CPU}, flags=0):
    'Keep one finished communication; see `recording.schema.Span` for the meaning of each number.'
    self.communications += 1
    self.failures += flags & {OPEN} != 0
    ids, number_of = self.ids, self.name
    name = ids[name] if name in ids else number_of(name)
    {_interned(fields)}
    number, at = self.next_slot()
    pack_word(self.buffer, at + {layout.COMMIT_OFFSET}, 0)  # the record that was here loses its tail before its head
    pack_tail(self.buffer, at + {layout.HEAD.size}, {_values(fields)})
    pack_head(self.buffer, at, start_ns, end_ns, name, {COMMUNICATION}, device, flags, number)
""",
    )


def compiled_pend() -> Callable[..., int]:
    """Compile the method that records a pending operation."""
    fields = layout.PENDING_ORDER
    return _compiled(
        "pend",
        f"""
def pend(self, name, start_ns, *, {_parameters(f for f in fields if f.name != "name")}):
    '''Note that an operation was issued.

    Returns:
        the slot that `waiting` and `unpend` ask for; -1, which they ignore, where all are taken.
    '''
    slot = self.free_slot()
    if slot >= 0:
        ids, number_of = self.ids, self.name
        {_interned(fields)}
        pack_pending(self.buffer, {layout.PENDING_AT} + slot * {layout.PENDING.size}, 0, thread(), {_values(fields)}, start_ns)
    return slot
""",
    )


def _parameters(fields: Iterable[Field]) -> str:
    return ", ".join(f"{f.name}={f.default!r}" for f in fields)


def _values(fields: Iterable[Field]) -> str:
    return ", ".join(f.name for f in fields)


def _interned(fields: Iterable[Field]) -> str:
    """Return statements that replace each string by its number. Most are known: two lookups are faster than a call."""
    return "; ".join(f"{f.name} = ids[{f.name}] if {f.name} in ids else {_asked(f)}" for f in fields if f.is_text)


def _asked(field: Field) -> str:
    few = field.place.few if isinstance(field.place, Tail) else None
    return f"number_of({field.name})" if few is None else f"self.rare_name({field.name}, {few!r})"


def _compiled(name: str, source: str) -> Callable[..., Any]:
    known: dict[str, Any] = {
        "pack_head": layout.HEAD.pack_into,
        "pack_tail": layout.TAIL.pack_into,
        "pack_word": layout.WORD.pack_into,
        "pack_pending": layout.PENDING.pack_into,
        "thread": get_native_id,
    }
    exec(compile(source, f"<labkit {name}>", "exec"), known)
    made: Callable[..., Any] = known[name]
    return made
