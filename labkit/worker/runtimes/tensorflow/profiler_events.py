"""Converts the events of TensorFlow's profiler to spans, by device: phases of computation, collectives and messages.

TensorFlow runs the part of a function that belongs to one device in an executor. All operations of an executor, on any
thread, are nested in events with the number of the executor's context, so they can be grouped. The names of operations
tell their purpose: `gradient_tape/` is the backward pass, and the optimizer and `lab.span` have name scopes. A
collective is issued by one thread and executed by others; numbers of contexts connect its parts as well.

tf.data runs its functions, such as that of `map`, in executors too, beside the program. Only the time in which the
program waits for the next batch becomes a span.

The key of a send contains both devices; a receive does not name its source. The step's number and the tensor's name
connect the two. Outside a tf.function TensorFlow copies the inputs of operations; the event's name then contains both
devices.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypeVar

from labkit.recording.operations import OTHER, RECV, SEND, type_of_kernel
from labkit.recording.schema import DATA, Span

BROADCAST_ROOT: Final = 0  # the strategies' variables come from the first worker
OPTIMIZERS: Final = re.compile(
    r"(?i)(sgd|adam|adamw|adamax|adagrad|adadelta|nadam|ftrl|lion|lamb|rmsprop|adafactor|muon|loss_scale_optimizer)(_\d+)?$"
)
ASSIGNS: Final = re.compile(r"(Assign\w*VariableOp|ResourceApply\w+|ResourceSparseApply\w+|ResourceScatter\w+)$")
# What an update written by hand consists of, besides the assignment; a forward pass that is late rarely does.
ARITHMETIC: Final = frozenset(("Mul", "Sub", "Add", "AddV2", "RealDiv", "Neg", "Square", "Sqrt", "Rsqrt", "Pow"))
INLINED: Final = re.compile(r"(tf\.)?(Stateful)?PartitionedCall(_\d+)?$")
NEXT: Final = ("IteratorGetNext", "IteratorGetNextSync", "IteratorGetNextAsOptional")  # types of operations
NEXT_EAGERLY: Final = ("IteratorGetNext", "MultiDeviceIteratorGetNext")  # prefixes of them
PYTHON: Final = ("PyFunc", "EagerPyFunc")  # types of operations that call Python, such as a dataset's generator
# AutoGraph turns `for x in dataset` in a tf.function into `dataset.scan(body).reduce(...)`: the loop's own `Scan` is
# the first, and its input is one level deeper.
LOOP: Final = re.compile(r"ReduceIterator::(?:(?!Scan\b)[^:]+::)*Scan(?P<input>::[^:]+)?$")
REDUCES: Final = "ReduceDatasetOp::DoCompute"
SCOPE: Final = re.compile(r"labkit_span_(\d+)(_\d+)?$")
REPLICA: Final = re.compile(r"(?:^|/)replica_(\d+)(?:/|$)")
MESSAGES: Final = "TensorFlow messages"  # the group of sends and receives between ranks
COPIES: Final = "TensorFlow copies"  # the group of those between a rank's devices, without the rank's number
COPIED: Final = "_Send input "  # prefix of the event of a copy outside a tf.function
SENDS: Final = ("_Send", "_HostSend")  # types of operations; the second of each is for small values, such as a condition
RECEIVES: Final = ("_Recv", "_HostRecv")
DEVICE: Final = re.compile(r"/job:(\w+)/replica:\d+/task:(\d+)/device:\w+:(\d+)")
NUMBERED: Final = re.compile(r"(.*)/_(\d+)$")
End = tuple[str, int, int]  # one end of a message: job, task and device
PAUSE_NS: Final = 50_000  # operations with shorter pauses, in which the executor schedules the next one, become one span
EAGER_PAUSE_NS: Final = 1_000_000  # the same outside a tf.function, where Python runs between them
FORWARD, BACKWARD, OPTIMIZER, COMPUTE = "forward", "backward", "optimizer", "compute"
T = TypeVar("T")


class Event(NamedTuple):
    """An event of TensorFlow's profiler."""

    thread: int  # the number of its thread
    name: str  # TensorFlow's name for it, such as "sgd/split:SplitV"
    start_ns: int  # on the clock of `time.perf_counter_ns`
    end_ns: int
    stats: dict[str, Any]  # TensorFlow's details, by name


class Role(NamedTuple):
    """A rank's role in the cluster."""

    rank: int
    ranks: Mapping[tuple[str, int], int]  # the numbers of all ranks, by TensorFlow's job and task number
    devices: int  # the number of its devices
    coordinates: bool = False  # whether it is the coordinator, whose functions run on other ranks while it waits
    serves: bool = False  # whether it runs functions of the coordinator, on threads of its server


@dataclass(slots=True)
class _Executor:
    """The operations of one executor, which runs one call of a function on one device."""

    step: int = 0
    operations: list[Event] = field(default_factory=list)
    device: int = -1
    started_on: int = 0  # the thread that started it
    sends_to: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _IssuedOperation:
    """The start of a collective or a receive."""

    name: str
    start_ns: int
    context: int = 0
    eager: bool = False


def scope_of(number: int) -> str:
    """Return the name scope that represents the span with this number in a tf.function."""
    return f"labkit_span_{number}"


def spans_of(
    events: Iterable[Event], role: Role, names: Sequence[str] = (), nbytes: Callable[..., int] = lambda *_: 0,
    times: Counter[tuple[int, int, int]] | None = None,
) -> list[Span]:  # fmt: skip
    """Convert the events of a session of the profiler to the spans of a rank.

    The student's spans in tf.functions have these `names`, by their numbers. `nbytes` is as `Sizes.nbytes`. `times` is
    how often each device has run a collective in earlier sessions, by group, instance key and device; it is updated.
    """
    reader = _ProtoReader(role, names, nbytes, Counter() if times is None else times)
    reader.read(events)
    return reader.spans()


class _ProtoReader:
    """Reads events, thread by thread, and converts them to spans."""

    def __init__(self, role: Role, names: Sequence[str], nbytes: Callable[..., int], times: Any) -> None:
        self._role, self._names, self._nbytes, self._times = role, names, nbytes, times
        self._executors: dict[int, _Executor] = defaultdict(_Executor)
        self._issued: dict[int, _IssuedOperation] = {}  # by the context of its end
        self._runs: dict[int, int] = {}  # from the context of a collective's kernel to the one of its start
        self._executes: dict[int, int] = {}  # from the context of a collective's algorithm to the one of its kernel
        self._ends: dict[int, int] = {}
        self._algorithms: list[Event] = []
        self._members: dict[int, int] = {}  # the number of devices in a group, by the group's key
        self._main: list[Span] = []
        self._eager: list[tuple[int, int, int]] = []  # thread, start and end of operations outside a tf.function
        self._of_data: set[int] = set()  # the numbers of calls of tf.data's functions

    def read(self, events: Iterable[Event]) -> None:
        """Read events in their order on each thread, together with the events in which they are nested."""
        threads: dict[int, list[Event]] = defaultdict(list)
        for event in events:
            threads[event.thread].append(event)
        for of_thread in threads.values():
            of_thread.sort(key=lambda e: (e.start_ns, -e.end_ns))
            within: list[Event] = []
            for event in of_thread:
                while within and within[-1].end_ns <= event.start_ns:
                    within.pop()
                self._take(event, within)
                within.append(event)

    def _take(self, event: Event, within: Sequence[Event]) -> None:
        name, stats = event.name, event.stats
        if name == "ExecutorState::Process":
            return
        if name == "ExecutorState::ProcessAsync::Start":
            issued = _IssuedOperation(stats["name"], event.start_ns, _context(within))
            self._issued[stats["_p"]] = issued
            if issued.context:
                kind = stats["kernel_type"]
                self._executors[issued.context].operations.append(event._replace(name=f"{issued.name}:{kind}"))
        elif name == "ExecutorState::ProcessAsync::Done":
            self._ends[stats["_c"]] = event.start_ns
        elif name == "CollectiveOpV2Kernel::Run":
            starts = [e for e in within if e.name == "ExecutorState::ProcessAsync::Start"]
            if starts:
                self._runs[stats["_p"]] = starts[-1].stats["_p"]
            else:
                self._runs[stats["_p"]] = stats["_p"]
                self._issued[stats["_p"]] = _IssuedOperation(stats["name"], event.start_ns, eager=True)
        elif name == "CollectiveExecutor::CompleteParams":
            self._members[int(stats["group_key"])] = int(stats["group_size"])
        elif name == "BaseCollectiveExecutor::ExecuteAsync":
            kernels = [e.stats["_c"] for e in within if e.name in _EXECUTED and "_c" in e.stats]
            if kernels and "_p" in stats:
                self._executes[stats["_p"]] = kernels[-1]
        elif name == "CollectiveExecutor::ExecuteAsync::Done":
            self._ends[stats["_c"]] = event.start_ns
        elif name == "FunctionRun":
            executor = self._executors[stats.get("_p", 0)]
            executor.step, executor.started_on = stats.get("id", 0), event.thread
        elif name.startswith("InstantiatedCapturedFunction::"):
            if not _is_loop(within):
                self._of_data.add(stats.get("id", 0))
        elif (loop := LOOP.match(name)) and loop["input"]:
            self._main.append(self._span(DATA, event.start_ns, event.end_ns, device=self._device(0), measured=True))
        elif "tf_function_call" in stats and not self._role.coordinates:
            self._main.append(self._span(name, event.start_ns, event.end_ns))
        elif name == "tf.function-graph_building":
            outer = next((e.name for e in reversed(within) if "tf_function_call" in e.stats), "")
            self._main.append(self._span(f"tracing {outer}".strip(), event.start_ns, event.end_ns))
        elif name == "EagerExecute" and not self._role.coordinates and not any(_kind(e) in PYTHON for e in within):
            self._take_eager(event)
        elif name.startswith(COPIED):
            self._main += _copy_of(event, self._role.rank, self._device)
        elif ":" in name and "::" not in name:
            self._take_operation(event, within)

    def _take_eager(self, event: Event) -> None:
        operation = str(event.stats.get("eager_op", ""))
        if operation.startswith(NEXT_EAGERLY):
            self._main.append(self._span(DATA, event.start_ns, event.end_ns))
        elif not event.stats.get("is_func") and not operation.startswith("Collective"):
            self._eager.append((event.thread, event.start_ns, event.end_ns))

    def _take_operation(self, event: Event, within: Sequence[Event]) -> None:
        kind = _kind(event)
        if type_of_kernel(kind) is not OTHER:
            self._algorithms.append(event)
            return
        context = _context(within)
        if not context:
            return
        executor = self._executors[context]
        executor.operations.append(event)
        executor.step = executor.step or next(
            e.stats.get("id", 0) for e in reversed(within) if e.name == "ExecutorState::Process"
        )
        if kind in SENDS and "key" in event.stats:
            source, target = _ends_of(event)
            if source and target:
                executor.device = source[2]
                if target[:2] == source[:2]:
                    executor.sends_to.add(target[2])

    def spans(self) -> list[Span]:
        """Return all spans, in no particular order."""
        self._executors = {c: e for c, e in self._executors.items() if e.step not in self._of_data}
        self._place_executors()
        found, sent = list(self._main), list[Span]()
        for executor in self._executors.values():
            if executor.step != -1 and executor.operations:  # -1: constant folding
                found += self._phases(executor) + self._waits_for_data(executor)
                sent += _messages_of(
                    executor.operations, self._ends, self._role.rank, self._role.ranks, step=executor.step,
                    device=self._device(executor.device), nbytes=self._nbytes,
                )  # fmt: skip
        found += _within_the_rank(sent)
        found += self._collectives()
        found += self._eager_spans()
        return found

    def _place_executors(self) -> None:
        """Find the device of each executor."""
        calls: dict[tuple[int, int], list[_Executor]] = defaultdict(list)
        for executor in self._executors.values():
            replicas = Counter(int(m[1]) for e in executor.operations if (m := REPLICA.search(e.name.partition(":")[0])))
            if executor.device < 0 and replicas:
                executor.device = replicas.most_common(1)[0][0]
            calls[executor.started_on, executor.step].append(executor)
        of_thread: dict[int, Counter[int]] = defaultdict(Counter)  # DTensor has a thread for each device
        for (thread, _), siblings in calls.items():
            unknown = [e for e in siblings if e.device < 0 and e.operations]
            left = set().union(*(e.sends_to for e in siblings)) - {e.device for e in siblings}
            if len(unknown) == len(left) == 1:
                unknown[0].device = left.pop()
                of_thread[thread][unknown[0].device] += 1
        for executor in self._executors.values():
            if executor.device < 0:
                usual = of_thread[executor.started_on].most_common(1)
                executor.device = usual[0][0] if usual else 0

    def _span(self, name: str, start_ns: int, end_ns: int, **about: Any) -> Span:
        return Span(self._role.rank, name, "compute", start_ns, end_ns, **about)

    def _device(self, number: int) -> str:
        return f"CPU:{number}" if self._role.devices > 1 else "cpu"

    def _phases(self, executor: _Executor) -> list[Span]:
        """Return forward, backward and optimizer of one executor, and the student's own spans."""
        operations = sorted((e for e in executor.operations if _computes(e)), key=lambda e: e.start_ns)
        labels = _labels(operations)
        device, found = self._device(executor.device), []
        scopes: dict[int, list[int]] = defaultdict(list)
        for i, event in enumerate(operations):
            for number in _scopes(event.name):
                if number < len(self._names):
                    scopes[number].append(i)
        whole = {number for number, inside in scopes.items() if len({labels[i] for i in inside}) == 1}
        for number, inside in scopes.items():
            start_ns, end_ns = operations[inside[0]].start_ns, max(operations[i].end_ns for i in inside)
            found.append(self._span(self._names[number], start_ns, end_ns, device=device))
        own = set().union(*(scopes[number] for number in whole)) if whole else set()
        others = ((labels[i], e.start_ns, e.end_ns) for i, e in enumerate(operations) if i not in own)
        for label, start_ns, end_ns in _joined(others, PAUSE_NS):
            found.append(self._span(label, start_ns, end_ns, device=device, measured=True))
        # Operations in the student's own spans are measured as well.
        for event in (operations[i] for i in sorted(own)):
            name = self._names[_scopes(event.name)[-1]]
            found.append(self._span(name, event.start_ns, event.end_ns, device=device, measured=True))
        return found

    def _waits_for_data(self, executor: _Executor) -> list[Span]:
        device = self._device(executor.device)
        waits = [e for e in executor.operations if _kind(e) in NEXT]
        return [
            self._span(DATA, e.start_ns, self._ends.get(e.stats.get("_p", 0), e.end_ns), device=device, measured=True)
            for e in waits
        ]

    def _collectives(self) -> list[Span]:
        found, times = [], self._times
        taken: dict[tuple[Any, ...], set[int]] = defaultdict(set)
        for event in sorted(self._algorithms, key=lambda e: e.start_ns):
            kernel = self._executes.get(event.stats.get("_c", 0), 0)
            context = self._runs.get(kernel, 0)
            issued = self._issued.get(context) or _IssuedOperation(event.name.rpartition(":")[0], event.start_ns)
            name, _, kind = event.name.rpartition(":")
            executor = self._executors.get(issued.context)
            device = max(executor.device, 0) if executor is not None else 0
            group, instance = int(event.stats.get("group_key", 0)), int(event.stats.get("instance_key", 0))
            among = taken[group, instance, event.stats.get("step_id"), event.stats.get("iter_id")]
            if device in among:  # each device takes part once, so this is another device, which the events do not name
                device = next((d for d in range(self._role.devices) if d not in among), device)
            among.add(device)
            times[group, instance, device] += 1
            match = (instance & 0x7FFFFFFF) << 32 | times[group, instance, device]
            operation = type_of_kernel(kind)
            root = BROADCAST_ROOT if operation.rooted else -1
            end_ns = max(event.end_ns, self._ends.get(context, 0), self._ends.get(kernel, 0))
            start_ns = min(issued.start_ns, event.start_ns)
            size = max(self._nbytes(name, group, instance, issued.eager), 0)
            found.append(
                Span(
                    self._role.rank, operation.name, "communication", start_ns, end_ns, start_ns, end_ns, nbytes=size,
                    root=root, group=f"TensorFlow group {group}", match=match, device=self._device(device),
                    sized=size > 0,
                )
            )  # fmt: skip
        # If all members are devices of this rank, the group is private: another rank's group may have the same key.
        own = {f"TensorFlow group {key[0]}" for key, devices in taken.items() if len(devices) == self._members.get(key[0])}
        return [replace(span, group=f"{span.group} of rank {span.rank}") if span.group in own else span for span in found]

    def _eager_spans(self) -> list[Span]:
        """Return the operations outside a tf.function; those in close succession form one span."""
        pieces = _joined(sorted(self._eager), EAGER_PAUSE_NS)
        return [self._span(COMPUTE, start_ns, end_ns) for _, start_ns, end_ns in pieces]


def _joined(parts: Iterable[tuple[T, int, int]], pause_ns: int) -> list[tuple[T, int, int]]:
    """Join parts that are neighbours, are of one kind, and have at most a short pause between them."""
    joined: list[tuple[T, int, int]] = []
    for kind, start_ns, end_ns in parts:
        if joined and joined[-1][0] == kind and start_ns - joined[-1][2] <= pause_ns:
            joined[-1] = (kind, joined[-1][1], max(joined[-1][2], end_ns))
        else:
            joined.append((kind, start_ns, end_ns))
    return joined


_EXECUTED: Final = ("CollectiveExecutor::RunClosure", "CollectiveExecutor::CompleteParamsAsync::Done")


def _is_loop(within: Sequence[Event]) -> bool:
    """Whether a function that tf.data calls is the body of a loop over a dataset, and not a part of the input."""
    names = [e.name for e in within if e.name.startswith(("ReduceIterator::", REDUCES))]
    return bool(names) and (names[-1] == REDUCES or ((loop := LOOP.match(names[-1])) is not None and not loop["input"]))


def _context(within: Sequence[Event]) -> int:
    """Return the context of the executor in whose event another one is nested; 0 if there is none."""
    return next((e.stats["_c"] for e in reversed(within) if e.name == "ExecutorState::Process" and e.stats.get("id") != -1), 0)


def _kind(event: Event) -> str:
    return event.name.rpartition(":")[2]


def _computes(event: Event) -> bool:
    """Whether an operation neither communicates nor waits for data."""
    return _kind(event) not in SENDS + RECEIVES + NEXT and type_of_kernel(_kind(event)) is OTHER


def _parts(name: str) -> list[str]:
    return [part for part in name.rpartition(":")[0].split("/") if not INLINED.match(part)]


def _scopes(name: str) -> list[int]:
    """Return the spans around an operation, without those after `gradient_tape`, which are the forward operation's."""
    parts = _parts(name)
    before = parts[: parts.index("gradient_tape")] if "gradient_tape" in parts else parts
    return [int(m[1]) for part in before if (m := SCOPE.match(part))]


def _labels(operations: Sequence[Event]) -> list[str]:
    """Return the phase of each operation of an executor; the operations are in the order in which they ran."""
    parts = [_parts(e.name) for e in operations]
    kinds = [_kind(e) for e in operations]
    backward = [i for i, p in enumerate(parts) if "gradient_tape" in p or p[:1] == ["gradients"]]
    first, last = (backward[0], backward[-1]) if backward else (-1, -1)
    assigns = {i for i, kind in enumerate(kinds) if ASSIGNS.search(kind)}
    last_assign = max(assigns, default=-1)
    labels = dict.fromkeys(backward, BACKWARD)
    for i, (of_operation, kind) in enumerate(zip(parts, kinds, strict=True)):
        if i in labels:
            continue
        if any(OPTIMIZERS.match(part) for part in of_operation):
            labels[i] = OPTIMIZER
        elif last < 0:
            labels[i] = COMPUTE
        elif first < i <= last_assign and (i > last or kind in ARITHMETIC or i in assigns):
            labels[i] = OPTIMIZER  # an update may run while later gradients are computed
        else:
            labels[i] = FORWARD if i < last else COMPUTE
    return [labels[i] for i in range(len(operations))]


def _ends_of(send: Event) -> tuple[End | None, End | None]:
    """Return the source and the target of a send."""
    source, _, target, *_ = [*str(send.stats["key"]).split(";"), "", "", ""]
    found = [DEVICE.match(text) for text in (source, target)]
    ends = [(m[1], int(m[2]), int(m[3])) if m else None for m in found]
    return ends[0], ends[1]


def _messages_of(
    operations: Iterable[Event], ends: Mapping[int, int], rank: int, ranks: Mapping[tuple[str, int], int], *, step: int,
    device: str, nbytes: Callable[..., int],
) -> list[Span]:  # fmt: skip
    """Return the messages that one executor sends to other devices and receives from them.

    `ends` are the end times of asynchronous operations in ns, by their contexts; `step` is the number of the call, the
    same in all processes.
    """
    found = []
    times: Counter[tuple[str, int]] = Counter()  # in a loop, one message per iteration
    for event in sorted(operations, key=lambda e: e.start_ns):
        kind = event.name.rpartition(":")[2]
        if kind not in SENDS + RECEIVES:
            continue
        tensor, number = _tensor(event.name.rpartition(":")[0])
        times[tensor, number] += 1
        time = times[tensor, number]
        if kind in SENDS and "key" in event.stats:
            source, target = _ends_of(event)
            if source is None or target is None or source == target:
                continue
            peer, size = ranks.get(target[:2], rank), nbytes(tensor)
            found.append(
                Span(
                    rank, SEND.name, "communication", event.start_ns, event.end_ns, nbytes=max(size, 0), peer=peer,
                    group=MESSAGES if peer != rank else _copies(rank), match=_match(step, tensor, number, time), device=device,
                    sized=bool(size),
                )
            )  # fmt: skip
        elif kind in RECEIVES and event.stats.get("_p") in ends:
            end_ns, size = ends[event.stats["_p"]], nbytes(tensor)
            found.append(
                Span(
                    rank, RECV.name, "communication", event.start_ns, end_ns, event.start_ns, end_ns, nbytes=max(size, 0),
                    group=MESSAGES, match=_match(step, tensor, number - 1, time), device=device, sized=bool(size),
                )
            )  # fmt: skip
    return found


def _within_the_rank(messages: Iterable[Span]) -> list[Span]:
    """Return all of a rank's messages, with the peer set in those that it has received from itself."""
    messages = list(messages)
    own = {s.match for s in messages if s.name == SEND.name and s.peer == s.rank}
    return [replace(s, group=_copies(s.rank), peer=s.rank) if s.name == RECV.name and s.match in own else s for s in messages]


def _copy_of(event: Event, rank: int, name: Callable[[int], str]) -> list[Span]:
    """Return the span of a copy between devices outside a tf.function; [] if there is only one device."""
    devices = [int(m[3]) for m in DEVICE.finditer(event.name)]
    if len(devices) != 2 or devices[0] == devices[1]:
        return []
    return [Span(rank, "copy", "communication", event.start_ns, event.end_ns, peer=rank, device=name(devices[0]), sized=False)]


def _copies(rank: int) -> str:
    return f"{COPIES} of rank {rank}"


def _tensor(name: str) -> tuple[str, int]:
    """Return the tensor's name, and the number that TensorFlow gave the send; the receive has the next number."""
    numbered = NUMBERED.match(name)
    return (numbered[1], int(numbered[2])) if numbered else (name, 0)


def _match(step: int, tensor: str, number: int, time: int) -> int:
    """Return a number that connects a send and its receive; the step's number is the same in all processes."""
    return (step & 0x7FFFFFFF) << 32 | zlib.crc32(f"{tensor} {number} {time}".encode())
