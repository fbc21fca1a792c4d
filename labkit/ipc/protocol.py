"""The messages between the notebook and its ranks: a class for each, and how one becomes a frame.

The notebook sends requests, which each rank answers with the reply that stands beside them here, or with `Raised`; and
notices, which are not answered. A frame is what `ipc/channel.py` transmits. Only `encode` and `decode` look into its
body, so that whoever passes frames on does not need the classes.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Final, NamedTuple

from labkit.errors.exceptions import RankFailure
from labkit.ipc.options import LOOPBACK, Options, Place
from labkit.ipc.pickling import Payload
from labkit.recording.rank_facts import Fact

Files = dict[str, tuple[str, list[str]]]  # by path: a file's name for the student, and its lines if only the notebook has them


class Message:
    """A message. Its fields are plain data, except a last one named `payload`: a pickled object beside the body."""

    __slots__ = ()


class RankNotice(Message):
    """A message to a rank that it does not answer."""

    __slots__ = ()


# Requests of the notebook, each followed by its reply.


@dataclass(slots=True)
class RankConfig(Message):
    """The first message to a rank: who it is. Its reply is `Offer`."""

    rank: int
    options: Options  # of its group
    path: tuple[str, ...] = field(default=(), repr=False)  # the notebook's `sys.path`
    folder: str = ""  # the notebook's working folder
    # Variables that the notebook has changed since the server or spare rank was started; None deletes one.
    environment: Mapping[str, str | None] = field(default_factory=dict, repr=False)
    readable_memory: bool = False  # whether the notebook may read this rank's memory, so that large results can stay there
    rich: bool = False  # whether the notebook can display more than text
    starts_rpc: bool = False  # whether the program calls `init_rpc` itself, so that labkit does not
    shares_cores: bool = False  # whether the ranks of its group outnumber the cores that they may use
    place: Place = field(default_factory=Place)
    payload: Payload | None = None  # the memory of an emulated link, which ranks share; None without one

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return len(self.options.names)

    @property
    def name(self) -> str:
        """The rank's name."""
        return self.options.names[self.rank]


@dataclass(slots=True)
class Offer(Message):
    """What the other ranks must know before they set up."""

    address: str = LOOPBACK  # the address at which the others reach it
    port: int = 0  # its port there; 0 for none
    gpus: tuple[str, ...] = ()  # that it would use; different GPUs have different names, also on different machines


@dataclass(slots=True)
class Offers(Message):
    """Set up, given the offers of all ranks in rank order. The reply is `Done`."""

    offers: Sequence[Offer]


@dataclass(slots=True)
class Install(Message):
    """Install the payload's definitions before any rank starts to call, so that RPC finds them by name.

    The reply is `Done`.
    """

    payload: Payload


@dataclass(slots=True)
class Profile(Message):
    """Start torch's profiler, or stop it and send its events. The reply is `Profiled`."""

    begin: bool


@dataclass(slots=True)
class Profiled(Message):
    """The profiler's events: track, name, category, start and end in ns on the rank's clock; none after a start."""

    events: list[tuple[str, str, str, int, int]]


@dataclass(slots=True)
class Observe(Message):
    """A run begins, or is over, in which the rank may serve others. The reply is `Done`."""

    begin: bool


@dataclass(slots=True)
class Done(Message):
    """The request is carried out, with remarks for the student."""

    notes: list[str]


@dataclass(slots=True)
class CallFunction(Message):
    """Call the payload's function with its arguments. The reply is `Returned`."""

    all_called: bool  # whether all ranks of the group call it
    check: bool  # whether the rank's tensors are to be compared with those of others
    payload: Payload  # the function and its arguments, as `pickling.pack` packs them


@dataclass(slots=True)
class RunCell(Message):
    """Run a cell's source in `__main__`. The reply is `Returned`, after `Assigned`."""

    all_called: bool  # whether all ranks of the group run it
    check: bool  # whether the rank's tensors are to be compared with those of others
    source: str  # Python source
    filename: str  # its name in tracebacks before `label` replaces it
    label: str  # its name for the student
    present: Collection[str]  # the names in the payload that the rank has already
    payload: Payload  # names of the notebook with their values


@dataclass(slots=True)
class Returned(Message):
    """The function has returned, or the cell is complete."""

    communicated: bool  # whether the rank has completed a communication
    unfinished: bool  # whether it has left an operation pending or failed
    spent: bool  # whether the rank is in a state from which no other function can start
    notes: list[str]  # remarks for the student, each shown once
    exits: dict[int, RankFailure]  # by rank, where its function ended with `exit()` or `exit(0)`; times of the rank's clock
    facts: list[Fact]  # what is to be compared with other ranks
    payload: Payload  # the result


@dataclass(slots=True)
class Raised(Message):
    """A request has raised an error. The failure's time is on the rank's clock."""

    spent: bool  # as in `Returned`
    failure: RankFailure


@dataclass(slots=True)
class Changes(RankNotice):
    """The changes of the notebook's process since the last time a rank copied its state."""

    folder: str | None = None  # the working folder; None if it has not changed
    path: tuple[str, ...] | None = None  # the import path, `sys.path`; None if it has not changed
    path_before: tuple[str, ...] = ()  # the previous import path
    variables: Mapping[str, str | None] = field(default_factory=dict)  # new values; None deletes one


@dataclass(slots=True)
class NewFiles(RankNotice):
    """The student's files in which functions of the next messages are defined."""

    files: Files


@dataclass(slots=True)
class NewFilters(RankNotice):
    """The notebook has other filters of warnings; see `worker.process_state.AppliedFilters`."""

    payload: Payload


@dataclass(slots=True)
class Restarted(RankNotice):
    """How many times all ranks have been replaced in the run that begins."""

    count: int


@dataclass(slots=True)
class Forget(RankNotice):
    """The notebook has deleted the definitions with these numbers."""

    numbers: list[int]


@dataclass(slots=True)
class ResultRead(RankNotice):
    """The notebook has read the result out of the rank's memory, which the rank may use again."""


@dataclass(slots=True)
class Command(RankNotice):
    """What the student has typed at the debugger's prompt."""

    line: str | None  # the line; "" at the end of the input, None if nobody can be asked


@dataclass(slots=True)
class Release(RankNotice):
    """All ranks that were called and do not serve have returned: serving ends."""


# Notices of a rank, between a request and its reply; `Displayed` and `Warned` at any time.


@dataclass(slots=True)
class Serving(Message):
    """The rank only serves others from now on, until `Release`."""


@dataclass(slots=True)
class Assigned(Message):
    """The names that a cell has assigned or deleted in the rank's `__main__`."""

    names: list[str]


@dataclass(slots=True)
class AtBreakpoint(Message):
    """The rank's debugger has printed this text, of which the last line is its prompt, and waits for a `Command`."""

    text: str


@dataclass(slots=True)
class LeftBreakpoint(Message):
    """The rank's debugger has printed this text, and continues the program until its next breakpoint, or ends it."""

    text: str  # the text
    quits: bool = False  # whether the student has ended the run with `q`


class ImportedModule(NamedTuple):
    """A module of the student's that a rank has imported."""

    name: str  # its name, as in `import name`
    file: str  # its source file
    modified_ns: int  # the file's modification time when the module was imported
    digest: bytes  # a hash of the file's content at that time
    machine: str = ""  # the rank's machine, as in `Place`


@dataclass(slots=True)
class Imported(Message):
    """The student's modules that the rank has imported or reloaded in this run."""

    modules: list[ImportedModule]


@dataclass(slots=True)
class Displayed(Message):
    """One display for the cell."""

    data: dict[str, Any] | None  # the content by MIME type; None removes all that the rank has displayed so far (`clear_output`)
    metadata: dict[str, Any] = field(default_factory=dict)  # the metadata by MIME type
    left_out: int = 0  # the number of displays that were not sent because a limit was reached


@dataclass(slots=True)
class Warned(Message):
    """A warning's text, and how many times it was raised since it was last sent."""

    text: str
    count: int


class Frame(NamedTuple):
    """A message as it is transmitted."""

    kind: int  # the number of the message's class
    body: bytes  # its pickled fields
    payload: Payload | None  # its payload; None without one


_CLASSES: Final[tuple[Any, ...]] = tuple(
    kind for kind in globals().values() if isinstance(kind, type) and issubclass(kind, Message) and is_dataclass(kind)
)
_NUMBERS: Final[dict[type[Message], int]] = {kind: number for number, kind in enumerate(_CLASSES)}
# The names of the fields in the body. They are sent as a list: pickling the instances would take three times as long.
_FIELDS: Final = tuple(tuple(name for name in kind.__match_args__ if name != "payload") for kind in _CLASSES)
_WITH_PAYLOAD: Final = tuple(kind.__match_args__[-1:] == ("payload",) for kind in _CLASSES)


def encode(message: Message) -> Frame:
    """Return a message as a frame, which several channels may send. The caller remains responsible for the payload."""
    number = _NUMBERS[type(message)]
    body = pickle.dumps([getattr(message, name) for name in _FIELDS[number]])
    return Frame(number, body, getattr(message, "payload", None))


def decode(frame: Frame) -> Message:
    """Return the message in a frame."""
    values = pickle.loads(frame.body)
    if _WITH_PAYLOAD[frame.kind]:
        values.append(frame.payload)
    message: Message = _CLASSES[frame.kind](*values)
    return message
