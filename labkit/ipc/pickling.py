"""What travels between notebook and ranks, and how: functions by value, large arrays beside the message.

A function defined in a cell is sent with everything it refers to, and lands in the rank's `__main__`, so that in a rank it is
what it is in the notebook: a name in `__main__`. RPC needs that (it pickles functions by name), and so do classes that refer to
one another.
"""

from __future__ import annotations

import functools
import importlib
import io
import linecache
import marshal
import mmap
import os
import pickle
import sys
import tempfile
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import cloudpickle

from labkit.errors.exceptions import LabError
from labkit.ipc.array_views import SharedArrays
from labkit.ipc.definitions import Received, Sent
from labkit.ipc.notebook_builtins import reduce_ipython
from labkit.ipc.pickling_errors import Call, explain_unpicklable
from labkit.ipc.process_memory import ALIGN, address_of, read
from labkit.ipc.rank_only_objects import RankOnlyTypes
from labkit.ipc.sync_objects import reduce_sync_object

__all__ = ["Payload", "install_source", "pack", "shared_memory", "source_of", "unpack"]

OUT_OF_BAND_BYTES: Final = 1 << 16  # smaller arrays are cheaper inside the message than in a segment of their own
_PLAIN: Final = frozenset({type(None), bool, int, float, str})  # what most functions return, and nothing has to be looked at
_Cached: Final = type(functools.lru_cache(len))


@dataclass(slots=True)
class Payload:
    """A pickled object: the stream, and its large buffers, in one shared-memory segment or still in the sender's memory.

    Args:
        data: the pickle stream: the object, and the definitions for the receiver's `__main__` that came up in it.
        spans: offset in the segment, or address in the lender's memory, and size in bytes of each buffer.
        fd: the segment; -1 without one. Whoever sends it closes it with `close`.
        lender: the process that keeps the buffers until the payload is unpacked; 0 where they lie in a segment.
        moved: whether CUDA tensors were copied to the CPU on the way.
        files: the student's files that its functions come from; this stays with the sender.
    """

    data: bytes
    spans: list[tuple[int, int]] = field(default_factory=list)
    fd: int = -1
    lender: int = 0
    moved: bool = False
    files: set[str] = field(default_factory=set)
    _lent: list[memoryview] = field(default_factory=list)

    def close(self) -> None:
        """Let go of the segment, or of what was lent; those who received a segment keep theirs."""
        self._lent.clear()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def pack(
    value: Any,
    *,
    home: types.ModuleType | None = None,
    sent: Sent | None = None,
    received: Received | None = None,
    what: str = "the value",
    lend: bool = False,
) -> Payload:
    """Pickle any Python object by value.

    Args:
        value: what to send. Buffers of numpy arrays and CPU tensors are copied once.
        home: the module whose functions and classes shall live in the receiver's `__main__`; None sends them as strangers,
            which is right for results: they must not overwrite what the notebook defines.
        sent: in the notebook, where the functions and classes that travel get their numbers.
        received: in a rank, what it has of the notebook's functions and classes; in a result these travel as their numbers alone.
        what: how an error names the value.
        lend: whether the receiver may read this process's memory; it is then the receiver who copies.

    Raises:
        LabError: something in it cannot be pickled; the message names it.
    """
    if type(value) in _PLAIN:  # a pickler of our own would take a tenth of what a run of nothing does
        return Payload(pickle.dumps((value, {}, {})))
    buffers: list[pickle.PickleBuffer] = []

    def keep_out_of_band(buffer: pickle.PickleBuffer) -> bool:
        try:
            large = buffer.raw().nbytes >= OUT_OF_BAND_BYTES
        except BufferError:  # not contiguous
            return True
        if large:
            buffers.append(buffer)
        return not large

    blocks: dict[int, tuple[Any, Any]] = {}
    try:
        while True:
            buffers.clear()
            stream = io.BytesIO()
            pickler = _Pickler(stream, home, sent, received, keep_out_of_band, blocks)
            pickler.dump((tuple(value) if isinstance(value, Call) else value, pickler.defined, pickler.numbered))
            if blocks or not (blocks := pickler.arrays.found()):
                break
    except LabError:
        raise
    except Exception as error:  # noqa: BLE001  # an object's own __reduce__ may raise anything

        def attempt(part: Any) -> None:
            _Pickler(io.BytesIO(), home, None, received, lambda _: None).dump(part)

        raise LabError(explain_unpicklable(value, what, error, attempt, result=received is not None)) from None
    payload = Payload(stream.getvalue(), moved=pickler.moved, files=pickler.files)
    views = [b.raw() for b in buffers]
    if views and lend:
        payload.lender, payload._lent = os.getpid(), views
        payload.spans = [(address_of(view), view.nbytes) for view in views]
    elif views:
        try:
            _fill(payload, views)
        except BaseException:  # Stop, while much is copied
            payload.close()
            raise
    return payload


def unpack(payload: Payload, *, sent: Sent | None = None, received: Received | None = None) -> Any:
    """The object again. The definitions that came with it now live in `__main__`.

    Its arrays lie in memory of their own, or in the shared segment, mapped privately: writing to them is seen by nobody else.

    Args:
        payload: what `pack` made.
        sent: in the notebook, what the functions and classes in a result are found by.
        received: in a rank, what learns the functions and classes that have come.

    Raises:
        EOFError: the lender is gone.
    """
    buffers: list[memoryview] = []
    if payload.lender:
        try:
            buffers = read(payload.lender, payload.spans)
        except OSError as error:
            raise EOFError(str(error)) from None
    elif payload.fd >= 0:
        size = max(offset + count for offset, count in payload.spans)
        view = memoryview(mmap.mmap(payload.fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
        buffers = [view[offset : offset + count] for offset, count in payload.spans]
        payload.close()
    if sent is not None and _REFERENCE in payload.data:
        value, defined, numbered = _Unpickler(payload.data, buffers, sent).load()
    else:
        value, defined, numbered = pickle.loads(payload.data, buffers=buffers)
    if defined:
        sys.modules["__main__"].__dict__.update(defined)
    if received is not None:
        received.learn(numbered)
    return value


def shared_memory(size: int) -> int:
    """A new segment of `size` zero bytes without a name: the file descriptor. It is gone when nobody holds it any more."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("labkit", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.truncate(fd, size)
    return fd


def _fill(payload: Payload, views: Sequence[memoryview]) -> None:
    at = 0
    for view in views:
        payload.spans.append((at, view.nbytes))
        at += -(-view.nbytes // ALIGN) * ALIGN
    payload.fd = shared_memory(at)
    for (offset, _), view in zip(payload.spans, views, strict=True):
        while view.nbytes:  # written, not mapped and copied: fresh pages are then filled without being cleared first
            done = os.pwrite(payload.fd, view, offset)
            view, offset = view[done:], offset + done


def _marshalled(code: types.CodeType) -> bytes | types.CodeType:
    """Code as bytes, in a third of the time that cloudpickle takes for all of its fields; or itself, where that cannot be."""
    try:
        return marshal.dumps(code)
    except ValueError:  # some tool has put into it what no compiler does
        return code


def _at_home(code: bytes | types.CodeType, cells: tuple[types.CellType, ...] | None) -> types.FunctionType:
    """A function that was the notebook's own, in the receiver's `__main__`; cloudpickle sets the rest of it."""
    code = code if isinstance(code, types.CodeType) else marshal.loads(code)
    return types.FunctionType(code, sys.modules["__main__"].__dict__, None, None, cells)


def _sent_definition(number: int, name: str) -> Any:
    """A function or class of the notebook, which has sent it; `_Unpickler` puts the one who knows in the place of this."""
    raise LabError(f"{name} (number {number}) is the notebook's, and can only be read there")


_REFERENCE: Final = _sent_definition.__name__.encode()  # stands in every stream that refers to one


class _Unpickler(pickle.Unpickler):
    """pickle's own, for a process that has sent definitions.

    Args:
        data: the stream.
        buffers: its large buffers.
        sent: what this process has sent.
    """

    def __init__(self, data: bytes, buffers: Sequence[memoryview], sent: Sent) -> None:
        super().__init__(io.BytesIO(data), buffers=buffers)
        self._sent = sent

    def find_class(self, module: str, name: str) -> Any:
        """pickle's hook: what a name stands for."""
        if name == _sent_definition.__name__ and module == __name__:
            return self._sent.named
        return super().find_class(module, name)


def _is_importable(obj: Any) -> bool:
    module = sys.modules.get(obj.__module__)
    return module is not None and module.__dict__.get(obj.__qualname__) is obj


def _with_slots(kind: type, parts: Any) -> Any:
    """How cloudpickle takes a class apart, with the slots that it forgets: its instances would have a dictionary instead."""
    make, (meta, name, bases, members, *rest), *state = parts
    return make, (meta, name, bases, {**members, "__slots__": vars(kind)["__slots__"]}, *rest), *state


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle ships no types
    """cloudpickle, with the student's functions at home in `__main__` and tensors out of band.

    Attributes:
        defined: the functions and classes of `home` that were sent, by name, for the receiver's `__main__`.
        numbered: all functions and classes that were sent by value, by the number that they have.
        files: where the student's functions come from.
        moved: whether tensors were copied from a GPU.
        arrays: the numpy arrays that were met.
    """

    def __init__(
        self,
        stream: io.BytesIO,
        home: types.ModuleType | None,
        sent: Sent | None,
        received: Received | None,
        buffer_callback: Callable[[Any], Any],
        blocks: dict[int, tuple[Any, Any]] | None = None,
    ) -> None:
        super().__init__(stream, protocol=5, buffer_callback=buffer_callback)
        self._home, self._sent, self._received = home, sent, received
        self._rank_only: RankOnlyTypes | None = None
        self._alive: list[Any] = []  # the memo goes by identity: what it saw must not be freed and its address used again
        self._torch = sys.modules.get("torch")
        self._by_value = cloudpickle.list_registry_pickle_by_value()  # modules of which somebody has asked that
        self.defined: dict[str, Any] = {}
        self.numbered: dict[int, Any] = {}
        self.files: set[str] = set()
        self.moved = False
        self.arrays = SharedArrays(blocks)

    def reducer_override(self, obj: Any) -> Any:
        """pickle's hook: how to take `obj` apart, or NotImplemented for the usual way."""
        if isinstance(obj, (types.FunctionType, type, _Cached)):
            return self._definition(obj)
        if self._received is not None:
            if self._rank_only is None:
                self._rank_only = RankOnlyTypes()
            self._rank_only.refuse(obj)
        if (shared := self.arrays.reduce(obj)) is not None:
            return shared
        if (fresh := reduce_sync_object(obj)) is not None:
            self._alive.append(fresh)
            return fresh
        if (stand_in := reduce_ipython(obj)) is not None:
            return stand_in
        if isinstance(obj, types.CodeType) and isinstance(data := _marshalled(obj), bytes):
            return marshal.loads, (data,)
        if self._torch is not None and isinstance(obj, self._torch.UntypedStorage):
            return self._storage(obj)
        if self._torch is not None and isinstance(obj, self._torch.TypedStorage):
            self._alive.append(obj)
            return _typed_storage, (obj._untyped_storage, obj.dtype)
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)  # labkit itself, torch.ops: cloudpickle knows plain modules alone
        return super().reducer_override(obj)

    def _definition(self, obj: Any) -> Any:
        """A function or a class: by its name, if the receiver has it; by value, if it is the student's."""
        if not self._by_value and obj.__module__ != "__main__" and _is_importable(obj):
            return self._library(obj)
        name = getattr(obj, "__name__", "")
        if self._received is not None and (number := self._received.number_of(obj)) is not None:
            return _sent_definition, (number, name)
        if self._sent is not None and not getattr(obj, "__closure__", None):  # a closure may come back with another state
            self.numbered[self._sent.number_of(obj)] = obj
        if self._home is not None and obj.__module__ == self._home.__name__:
            if self._home.__dict__.get(name) is obj:
                self.defined[name] = obj
            if isinstance(obj, types.FunctionType):
                self.files.add(obj.__code__.co_filename)
        if isinstance(obj, _Cached) and obj.__module__ == "__main__":  # cloudpickle would send its name alone
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        parts = super().reducer_override(obj)
        if isinstance(obj, type) and vars(obj).get("__slots__") and parts is not NotImplemented:
            return _with_slots(obj, parts)
        at_home = isinstance(obj, types.FunctionType) and self._home is not None and obj.__globals__ is self._home.__dict__
        if at_home and parts is not NotImplemented:
            _, (code, *_, cells), state, *_, set_state = parts
            return _at_home, (_marshalled(code), cells), state, None, None, set_state
        return parts

    def _library(self, obj: Any) -> Any:
        """What the receiver imports by its name; cloudpickle would find that out as well, five times as slowly."""
        if self._torch is not None and obj is getattr(self._torch._utils, "_rebuild_tensor_v3", None):
            return _rebuild_tensor, ()
        return NotImplemented

    def _storage(self, storage: Any) -> Any:
        torch = self._torch
        assert torch is not None
        self._alive.append(storage)
        if storage.device.type == "meta":
            return NotImplemented
        if storage.device.type != "cpu":
            self.moved = True
            storage = storage.cpu()
            self._alive.append(storage)
        if storage.nbytes() == 0:
            return torch.UntypedStorage, (0,)
        flat = torch.empty(0, dtype=torch.uint8).set_(storage)
        return _storage_from, (pickle.PickleBuffer(flat.numpy()),)


def _storage_from(buffer: Any) -> Any:
    import torch

    return torch.frombuffer(buffer if not memoryview(buffer).readonly else bytearray(buffer), dtype=torch.uint8).untyped_storage()


def _typed_storage(untyped: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def _rebuild_tensor() -> Callable[..., Any]:
    """What makes tensors of the newer types (float8, uint16): torch's own expects an untyped storage wrapped."""
    import torch

    return lambda storage, *rest: torch._utils._rebuild_tensor_v3(types.SimpleNamespace(_untyped_storage=storage), *rest)


def source_of(filename: str) -> list[str]:
    """The lines of a file or cell that only this process can read; [] for a file on disk, which the ranks read themselves."""
    if os.path.exists(filename):
        return []
    return linecache.getlines(filename)


def install_source(filename: str, lines: list[str]) -> None:
    """Make a cell's source readable here: tracebacks, `inspect.getsource` and TensorFlow's AutoGraph look it up."""
    linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)
