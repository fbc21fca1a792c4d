"""What travels between notebook and ranks, and how: functions by value, large arrays through shared memory, frames on a socket.

A function defined in a cell is sent with everything it refers to, and lands in the rank's `__main__`, so that in a rank it is what it
is in the notebook: a name in `__main__`. RPC needs that (it pickles functions by name), and so do classes that refer to one another.
"""

from __future__ import annotations

import contextlib
import copyreg
import importlib
import io
import linecache
import mmap
import os
import pickle
import socket
import struct
import sys
import tempfile
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import cloudpickle

from labkit.errors import LabError

__all__ = ["Channel", "Frame", "Parcel", "pack", "shared_memory", "unpack"]

OUT_OF_BAND_BYTES: Final = 1 << 16  # smaller arrays are cheaper inside the message than in a segment of their own
ALIGN: Final = 64  # bytes; a cache line, and enough for any vector load


@dataclass(slots=True)
class Parcel:
    """A pickled object: the stream, and the large buffers beside it in one shared-memory segment.

    Args:
        data: the pickle stream.
        spans: offset and size in bytes of each buffer in the segment.
        fd: the segment; -1 without buffers. Whoever sends it closes it with `close`.
        moved: whether CUDA tensors were copied to the CPU on the way.
        files: the student's files that its functions come from.
    """

    data: bytes
    spans: list[tuple[int, int]] = field(default_factory=list)
    fd: int = -1
    moved: bool = False
    files: set[str] = field(default_factory=set)

    def close(self) -> None:
        """Let go of the segment; those who received it keep theirs."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def pack(value: Any, *, home: types.ModuleType | None = None, what: str = "the value") -> Parcel:
    """Pickle any Python object by value.

    Args:
        value: what to send. Buffers of numpy arrays and CPU tensors are copied once, into shared memory.
        home: the module whose functions and classes shall live in the receiver's `__main__`; None sends them as strangers,
            which is right for results: they must not overwrite what the notebook defines.
        what: how an error names the value.

    Raises:
        LabError: something in it cannot be pickled; the message names it.
    """
    buffers: list[pickle.PickleBuffer] = []

    def keep_out_of_band(buffer: pickle.PickleBuffer) -> bool:
        try:
            large = buffer.raw().nbytes >= OUT_OF_BAND_BYTES
        except BufferError:  # not contiguous
            return True
        if large:
            buffers.append(buffer)
        return not large

    stream = io.BytesIO()
    pickler = _Pickler(stream, home, keep_out_of_band)
    try:
        pickler.dump(value)
        pickler.dump(pickler.definitions())
    except LabError:
        raise
    except Exception as error:  # any object's own __reduce__ may raise anything
        raise LabError(_blame(value, what, error)) from None
    parcel = Parcel(stream.getvalue(), moved=pickler.moved, files=pickler.files)
    if buffers:
        _fill(parcel, [b.raw() for b in buffers])
    return parcel


def unpack(parcel: Parcel) -> Any:
    """The object again. Its arrays lie in the shared segment, mapped privately: writing to them is seen by nobody else."""
    buffers: list[memoryview] = []
    if parcel.fd >= 0:
        size = max(offset + count for offset, count in parcel.spans)
        view = memoryview(mmap.mmap(parcel.fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
        buffers = [view[offset : offset + count] for offset, count in parcel.spans]
        parcel.close()
    unpickler = pickle.Unpickler(io.BytesIO(parcel.data), buffers=buffers)
    value = unpickler.load()
    for name, definition in unpickler.load().items():
        setattr(sys.modules["__main__"], name, definition)
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


def _fill(parcel: Parcel, views: Sequence[memoryview]) -> None:
    at = 0
    for view in views:
        parcel.spans.append((at, view.nbytes))
        at += -(-view.nbytes // ALIGN) * ALIGN
    parcel.fd = shared_memory(at)
    for (offset, _), view in zip(parcel.spans, views, strict=True):
        while view.nbytes:  # written, not mapped and copied: fresh pages are then filled without being cleared first
            done = os.pwrite(parcel.fd, view, offset)
            view, offset = view[done:], offset + done


class _Main(dict[str, Any]):
    """Stands for the notebook's namespace in a message; arrives as the receiver's own."""

    def __reduce__(self) -> tuple[Callable[[], dict[str, Any]], tuple[()]]:
        return _own_main, ()


def _own_main() -> dict[str, Any]:
    return sys.modules["__main__"].__dict__


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle ships no types
    """cloudpickle, with the student's functions at home in `__main__` and tensors out of band."""

    def __init__(self, stream: io.BytesIO, home: types.ModuleType | None, buffer_callback: Callable[[Any], Any]) -> None:
        super().__init__(stream, protocol=5, buffer_callback=buffer_callback)
        self._home = home
        self._defined: dict[str, Any] = {}
        self._alive: list[Any] = []  # the memo goes by identity: what it saw must not be freed and its address used again
        self._torch = sys.modules.get("torch")
        self.moved = False
        self.files: set[str] = set()
        if home is not None:
            self.globals_ref[id(home.__dict__)] = _Main()

    def definitions(self) -> dict[str, Any]:
        """The functions and classes of `home` that were sent, by name, for the receiver's `__main__`."""
        if self._home is None:
            return {}
        return {name: obj for name, obj in self._defined.items() if self._home.__dict__.get(name) is obj}

    def reducer_override(self, obj: Any) -> Any:
        """pickle's hook: how to take `obj` apart, or NotImplemented for the usual way."""
        if isinstance(obj, (types.FunctionType, type)) and self._home is not None and obj.__module__ == self._home.__name__:
            self._defined[obj.__name__] = obj
            if isinstance(obj, types.FunctionType):
                self.files.add(obj.__code__.co_filename)
        elif self._torch is not None and isinstance(obj, self._torch.UntypedStorage):
            return self._storage(obj)
        elif self._torch is not None and isinstance(obj, self._torch.TypedStorage):
            self._alive.append(obj)
            return _typed_storage, (obj._untyped_storage, obj.dtype)
        elif isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)  # labkit itself, torch.ops: cloudpickle knows plain modules alone
        return super().reducer_override(obj)

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


def _blame(value: Any, what: str, error: Exception) -> str:
    """The sentence that names the innermost thing that cannot be sent."""
    path, culprit, reason = _culprit(value, what, error, depth=0)
    return f"{path} cannot be sent: {type(culprit).__name__} objects cannot be pickled ({reason}).\n{_remedy(culprit)}"


def _remedy(culprit: Any) -> str:
    kind = f"{type(culprit).__module__}.{type(culprit).__name__}"
    if isinstance(culprit, io.IOBase):
        return "Open the file inside the function that the ranks run."
    if kind.startswith(("tensorflow", "keras", "tf_keras")):
        return "Send numpy arrays (tensor.numpy(), model.get_weights()), and build TensorFlow's objects inside the function."
    return "Make it inside the function that the ranks run, or send plain data (numbers, arrays, tensors, state_dict()) instead."


def _culprit(value: Any, path: str, error: Exception, depth: int) -> tuple[str, Any, str]:
    if depth < 8:
        for name, part in _parts(value, path):
            try:
                _Pickler(io.BytesIO(), sys.modules["__main__"], lambda _: None).dump(part)
            except Exception as inner:  # as above: whatever the object raises is the reason we report
                return _culprit(part, name, inner, depth + 1)
    reason = " ".join(str(error).split()) or type(error).__name__
    return path, value, reason


def _parts(value: Any, path: str) -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"{path}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", None) or range(len(value))
        yield from ((f"{path}[{name!r}]" if isinstance(name, int) else f"{path}.{name}", v) for name, v in zip(names, value, strict=True))
    elif isinstance(value, types.FunctionType):
        used = value.__code__.co_names
        yield from ((f"the variable {n!r} used by {value.__name__}()", value.__globals__[n]) for n in used if n in value.__globals__)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                yield f"the variable {name!r} used by {value.__name__}()", cell.cell_contents
    elif not isinstance(value, (type, types.ModuleType)) and hasattr(value, "__dict__") and not _reduces_itself(value):
        yield from ((f"{path}.{name}", item) for name, item in vars(value).items())


def _reduces_itself(value: Any) -> bool:
    return type(value) in copyreg.dispatch_table


def source_of(filename: str) -> list[str]:
    """The lines of a file or cell that only this process can read; [] for a file on disk, which the ranks read themselves."""
    if os.path.exists(filename):
        return []
    return linecache.getlines(filename)


def install_source(filename: str, lines: list[str]) -> None:
    """Make a cell's source readable here: tracebacks, `inspect.getsource` and TensorFlow's AutoGraph look it up."""
    linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)


@dataclass(slots=True)
class Frame:
    """One message: a word that says what it is, small plain data, and perhaps a parcel."""

    kind: str
    data: Any = None
    parcel: Parcel | None = None


_LENGTHS: Final = struct.Struct("<II")  # bytes of the head, bytes of the parcel's stream


class Channel:
    """Frames over a stream socket of this machine; file descriptors travel along.

    Args:
        sock: a connected Unix socket, blocking.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, kind: str, data: Any = None, parcel: Parcel | None = None) -> None:
        """Send one frame; the parcel stays the caller's to close.

        Raises:
            OSError: the other side is gone.
        """
        stream, fds = b"", []
        if parcel is not None:
            stream = parcel.data
            fds = [parcel.fd] if parcel.fd >= 0 else []
        head = pickle.dumps((kind, data, None if parcel is None else (parcel.spans, parcel.moved, len(fds))))
        start = _LENGTHS.pack(len(head), len(stream)) + head
        if fds:
            socket.send_fds(self._socket, [start[:1]], fds)
            start = start[1:]
        if len(stream) < 1 << 16:
            self._socket.sendall(start + stream)
        else:
            self._socket.sendall(start)
            self._socket.sendall(stream)

    def receive(self) -> Frame:
        """The next frame; waits for it.

        Raises:
            EOFError: the other side is gone.
        """
        first, fds, _, _ = socket.recv_fds(self._socket, 1, 1)
        if not first:
            raise EOFError
        for fd in fds:
            os.set_inheritable(fd, False)
        head_size, stream_size = _LENGTHS.unpack(first + self._exactly(_LENGTHS.size - 1))
        kind, data, parcel = pickle.loads(self._exactly(head_size))
        if parcel is None:
            return Frame(kind, data)
        spans, moved, count = parcel
        return Frame(kind, data, Parcel(self._exactly(stream_size), spans, fds[0] if count else -1, moved))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _exactly(self, size: int) -> bytes:
        if size < 1 << 16:
            chunk = self._socket.recv(size, socket.MSG_WAITALL) if size else b""
            if len(chunk) == size:
                return chunk
            if not chunk:
                raise EOFError
        else:
            chunk = b""
        data = bytearray(size)
        data[: len(chunk)] = chunk
        view, at = memoryview(data), len(chunk)
        while at < size:
            count = self._socket.recv_into(view[at:])
            if not count:
                raise EOFError
            at += count
        return bytes(data)
