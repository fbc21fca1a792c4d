"""An answer on its way from the process of the submission to a rank. The judge's process never unpickles it.

Unpickling runs code that whoever pickled has chosen. So the submission's process sends bytes, the judge's process hands
them on, and a rank unpickles them.

What ranks send back is data: messages, numbers, arrays, tensors, and what exercises return. A pickle that names
anything else raises an error in the judge's process, before anything is called.

Source: "Restricting Globals" in the documentation of Python's pickle module.
"""

from __future__ import annotations

import base64
import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any, Final

from labkit.ipc.pickling import Payload, install_source, pack, shared_memory, source_of, unpack

_TRUSTED: Final = {
    "builtins": ("bytearray", "complex", "frozenset", "range", "set", "slice"),
    "collections": ("Counter", "OrderedDict", "defaultdict", "deque"),
    "decimal": ("Decimal",),
    "fractions": ("Fraction",),
    "labkit.costs.device": ("Kernel",),
    "labkit.errors.exit_reasons": ("Cause",),
    "labkit.errors.exceptions": ("RankFailure",),
    "labkit.recording.rank_facts": ("Fact", "FactKind"),
    "labkit.ipc.pickling": ("_array_in", "_sent_definition", "_storage_from", "_tensor_from"),
    "labkit.ipc.protocol": ("ImportedModule", "Offer"),
    "numpy": ("dtype", "ndarray"),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
    "numpy._core.numeric": ("_frombuffer",),
    "torch": ("Size", "UntypedStorage"),
}


@dataclass
class _State:
    installed: bool = False
    active: bool = False  # whether the hook refuses


_state: Final = _State()


@contextlib.contextmanager
def only_trusted_pickles() -> Iterator[None]:
    """Refuse other pickles in the `with` block."""
    if not _state.installed:
        _state.installed = True
        sys.addaudithook(_hook)
    _state.active = True
    try:
        yield
    finally:
        _state.active = False


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class" and _state.active and not _is_trusted(*arguments):
        from labkit.teaching.exercises.comparisons import (
            AnswerError,  # ranks, which import this module, have no modules with exercises
        )

        raise AnswerError(f"it sends {'.'.join(arguments)}: expected numbers, texts, or lists of them")


def _is_trusted(module: str, name: str) -> bool:
    if name in _TRUSTED.get(module, ()) or module == "labkit.launch.server_requests":
        return True
    found = getattr(sys.modules.get(module), name, None)
    if module == "torch":
        return isinstance(found, sys.modules["torch"].dtype)
    # What exercises of RPC and simulated ranks return. Making one runs no code of its own.
    if not module.startswith(("labkit.teaching.exercises.", "labkit.group.simulation.program")) or not isinstance(found, type):
        return False
    return is_dataclass(found) or issubclass(found, tuple)


@dataclass(frozen=True)
class Packed:
    """A function or a class of a submission, pickled."""

    name: str
    is_class: bool
    data: bytes  # the pickle stream
    memory: bytes  # the large arrays that it refers to
    regions: list[tuple[int, int]]  # where each is in `memory`, and its size in bytes
    sources: dict[str, list[str]]  # the lines of the cells in which its functions are defined, by name

    def __post_init__(self) -> None:
        object.__setattr__(self, "__qualname__", self.name)  # as a function has it

    def __call__(self, *_: Any) -> Any:
        """Fail: only ranks call answers; judges pass them on."""
        raise TypeError(f"{self.name} runs only on ranks")

    def __reduce__(self) -> Any:
        return _unpacked, (self.data, self.memory, self.regions, self.sources)

    def to_json(self) -> dict[str, Any]:
        """Return this as JSON can hold it."""
        encoded = {key: base64.b64encode(getattr(self, key)).decode() for key in ("data", "memory")}
        return {"name": self.name, "is_class": self.is_class, "regions": self.regions, "sources": self.sources, **encoded}

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> Packed:
        """Return what `to_json` was given; raise if the submission's process has sent something else."""
        data, memory = (base64.b64decode(given[key]) for key in ("data", "memory"))
        regions = [(int(at), int(size)) for at, size in given["regions"]]
        if any(at < 0 or size < 0 or at + size > len(memory) for at, size in regions):
            raise ValueError("regions outside of the memory")
        sources = {str(name): [str(line) for line in lines] for name, lines in given["sources"].items()}
        return cls(str(given["name"]), bool(given["is_class"]), data, memory, regions, sources)


def packed(answer: Any, home: Any) -> Packed:
    """Pickle a function or a class of a submission, which is defined in the module `home`."""
    payload = pack(answer, home=home, label="the answer")
    try:
        size = max((at + count for at, count in payload.regions), default=0)
        memory = os.pread(payload.fd, size, 0) if payload.fd >= 0 else b""
    finally:
        payload.close()
    sources = {name: source_of(name) for name in payload.files}
    name = getattr(answer, "__qualname__", type(answer).__qualname__)
    return Packed(name, isinstance(answer, type), payload.data, memory, payload.regions, sources)


def _unpacked(data: bytes, memory: bytes, regions: list[tuple[int, int]], sources: dict[str, list[str]]) -> Any:
    """In a rank: unpickle the answer."""
    for name, lines in sources.items():
        install_source(name, lines)
    fd = -1
    if regions:
        fd = shared_memory(len(memory))
        os.pwrite(fd, memory, 0)
    return unpack(Payload(data, regions, fd))
