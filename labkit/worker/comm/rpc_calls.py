"""Records remote procedure calls: on the caller until the result arrives, on the callee while the function runs.

All calls of `torch.distributed.rpc` use a few functions of torch's module `rpc.api`, and all called Python functions
run in a function of `rpc.internal`, which C++ looks up when RPC starts. These functions are wrapped. A call contains
its caller and its number, by which its two ends are matched: the caller waits until the callee replies; then the result
is transferred. A call of `remote` completes when it is sent. Its result stays at the callee, and is matched with the
`to_here` that fetches it on any rank.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc
from torch.distributed.rpc import PyRRef, internal
from torch.distributed.rpc.constants import DEFAULT_RPC_TIMEOUT_SEC, UNSET_RPC_TIMEOUT

from labkit.ipc.tracebacks import headline, sent_error, students_traceback
from labkit.recording.group_keys import call_key
from labkit.recording.operations import PROMISE, RECEIVED_REPLY, REMOTE, REPLY, SERVE, TO_HERE, UNSEEN_PROMISE, VALUE
from labkit.recording.record import Recorder, clock, student_line
from labkit.recording.schema import AUTOMATIC, COMPUTE, SERVED
from labkit.recording.torch_internals import REMOTE_CALLS, REMOTE_STEPS, in_place_of
from labkit.worker.comm.backward import RpcBackwards
from labkit.worker.comm.descriptions import nbytes_of
from labkit.worker.comm.emulated_link import SlowLink, hold_until, pass_on
from labkit.worker.comm.futures import Futures, value_of
from labkit.worker.comm.operation import Operation, blocked, ends_by_itself

# Internal functions that torch calls because of a call of the student's, with names for the student. All other internal
# functions only synchronize torch's workers, and are not recorded.
IN_WORDS: Final = {
    "_rref_typeof_on_owner": "type of an RRef",
    "_new_local_optimizer": "new optimizer",
    "_new_script_local_optimizer": "new optimizer",
    "_local_optimizer_step": "optimizer step",
    "_script_local_optimizer_step": "optimizer step",
}
REMOTE_MODULE: Final = "_remote_forward"  # the function with which torch's RemoteModule calls `forward` of its module
METHOD_WORDS: Final = ("method", "func", "fn", "attr")  # usual in names of helpers' parameters for the method to call
# Called with (rref, method name, ...).
METHOD_CALLS: Final = REMOTE_CALLS["_local_invoke"], REMOTE_CALLS["_local_invoke_async_execution"]

SHORTEST_S: Final = 0.002  # between two looks at which references the rank still uses, soon after a change
LONGEST_S: Final = 0.05  # and when there is none
OWN: Final = 3  # the counted uses of a reference that has no others: `held`, `rref` and the argument of `getrefcount`


class _NumberedCall(NamedTuple):
    """A function and its arguments as they are sent, like torch's `PythonUDF`, plus the caller and a number."""

    func: Any
    args: Any
    kwargs: Any
    caller: int
    number: int
    replies: bool  # otherwise its result stays at the callee, as an RRef


class _ServingThread(threading.local):
    """The call that a thread is preparing."""

    def __init__(self) -> None:
        self.api = REMOTE.name  # the function by which the student calls: "rpc_sync", "rpc_async" or "remote"
        self.call: tuple[_NumberedCall, int] | None = None  # the call that torch pickles, and its start in ns
        self.timed = False  # whether it fails after a time limit that the program has set


class _Replies:
    """The results that torch will pickle next, each with a callback for that moment.

    torch pickles a result on the thread on which its function has returned or its future has completed. Only a future
    that completes while torch is about to wait for it is pickled on another thread. Not in a `threading.local`, whose
    contents would be lost since C++ leaves Python in between.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expected: list[tuple[int, Any, Callable[[int], None]]] = []  # thread id, result, callback

    def expect(self, result: Any, sent: Callable[[int], None]) -> None:
        with self._lock:
            self._expected.append((threading.get_ident(), result, sent))

    def take(self, value: Any) -> Callable[[int], None] | None:
        """Return the callback for a value that is pickled now, on this thread; None if it is no expected result."""
        own = threading.get_ident()
        with self._lock:
            same = [i for i, (_, result, _) in enumerate(self._expected) if result is value]
            if not same:
                return None
            here = [i for i in same if self._expected[i][0] == own]
            return self._expected.pop((here or same)[-1])[2]


class _References:
    """Keeps this rank's references until nothing else uses them; then one thread drops them, one after the other.

    To drop a reference, torch tells its owner. Meanwhile it holds a lock of its own, and Python's global lock, which it
    may release and take again, for the same moment can also free the tensor of an earlier message. If a second thread
    drops a reference just then, each of the two has the lock that the other needs, and the process never runs again.
    Calls that carry references and end at about the same time do this, over TCP in one of some hundred cases.
    """

    def __init__(self) -> None:
        self._new: SimpleQueue[Any] = SimpleQueue()

    def start(self) -> None:
        """Start the thread that drops the references."""
        threading.Thread(target=self._drop, name="labkit-references", daemon=True).start()

    def keep(self, rref: Any) -> Any:
        """Keep a reference that torch has just made, and return it."""
        self._new.put(rref)
        return rref

    def _drop(self) -> None:
        held: list[Any] = []
        wait_s = SHORTEST_S
        while True:
            if not held:
                held.append(self._new.get())
            time.sleep(wait_s)
            before = len(held)
            while not self._new.empty():
                held.append(self._new.get())
            held = [rref for rref in held if sys.getrefcount(rref) > OWN]
            wait_s = SHORTEST_S if len(held) != before else min(2 * wait_s, LONGEST_S)


class _SlowCalls:
    """Delays this rank's remote calls, and those that it serves.

    Calls, replies and values fetched through an RRef are messages: the callee starts and the caller resumes when one
    arrives. For torch's own functions, which run in C++, only the caller is delayed. Other messages that torch sends in
    C++, such as the gradients of a distributed backward pass, are not delayed at all.

    The methods identify a call by `pair`, the key of its caller and callee ("" for torch's own functions, which run in
    C++), and `number`, its number on the caller.
    """

    def __init__(self, slow: SlowLink, futures: Futures) -> None:
        self._slow, self._futures = slow, futures
        self._fetched = itertools.count(1)

    def call(self, operation: Operation, pair: str, number: int) -> None:
        """On the caller: schedule a call of `operation.nbytes`; does nothing for torch's own functions."""
        if pair:
            self._send(self._slow.rank, operation.peer, operation.nbytes, f"call {pair}", number, operation.start_ns)

    def arrives(self, pair: str, number: int) -> None:
        """On the callee: sleep until a received call has arrived over the emulated link."""
        hold_until(self._slow.shared_link.due_ns(f"call {pair}", number))

    def reply(self, caller: int, number: int, nbytes: int, at_ns: int, *, travels: bool) -> None:
        """On the callee: schedule a reply, or announce a value that stays there for an RRef, if it does not travel."""
        pair = call_key(caller, self._slow.rank)
        if travels:
            self._send(self._slow.rank, caller, nbytes, f"reply {pair}", number, at_ns)
        else:
            self._slow.shared_link.arrive(f"value {pair}", number, at_ns, self._slow.nothing)

    def until_reply(self, operation: Operation, result: Any, pair: str, number: int) -> Any:
        """On the caller: return a future that completes when the reply has arrived over the emulated link.

        For a function that runs in C++, the compute time is unknown: only the two messages are counted.
        """
        held: Any = torch.futures.Future()

        def came(done: Any) -> None:
            operation.backend_ns = clock()
            due_ns = self._slow.shared_link.due_ns(f"reply {pair}", number) if pair else self._there_and_back_ns(operation, done)
            self._slow.at(due_ns, lambda: complete(done))

        def complete(done: Any) -> None:
            operation.completed()
            pass_on(done, held)

        self._futures.tell(result, came)
        return held

    def fetched(self, operation: Operation, pair: str, number: int) -> None:
        """On the caller of `to_here`: sleep until the value has arrived over the emulated link."""
        operation.backend_ns = clock()
        asked_ns = operation.start_ns + round(self._slow.to(operation.peer).latency_s * 1e9)
        there_ns = self._slow.shared_link.due_ns(f"value {pair}", number) if pair else 0
        group, number, start_ns = f"fetched by {self._slow.rank}", next(self._fetched), max(asked_ns, there_ns)
        self._send(operation.peer, self._slow.rank, operation.nbytes, group, number, start_ns)
        hold_until(self._slow.shared_link.due_ns(group, number))

    def _there_and_back_ns(self, operation: Operation, done: Any) -> int:
        link, there, back = self._slow.to(operation.peer), operation.nbytes, nbytes_of(value_of(done))
        return operation.start_ns + round((link.seconds("send", there) + link.seconds("send", back)) * 1e9)

    def _send(self, source: int, destination: int, nbytes: int, group: str, number: int, at_ns: int) -> None:
        self._slow.message(source, destination, nbytes, group, number, at_ns, ends=1)


class RpcCalls:
    """Records the calls that this rank makes and serves, delayed by an emulated link if there is one."""

    def __init__(self, recorder: Recorder, futures: Futures, slow: SlowLink | None = None) -> None:
        self._slow = None if slow is None else _SlowCalls(slow, futures)
        self._recorder, self._ring = recorder, recorder.ring
        self._futures = futures
        self._numbers = itertools.count(1)
        self._backwards = RpcBackwards(recorder.ring)
        self._references = _References()
        self._thread = _ServingThread()
        self._replies = _Replies()
        self._promises: dict[int, tuple[Any, _NumberedCall, str]] = {}  # by slot: future, call and function
        self._values: WeakKeyDictionary[Any, tuple[str, int]] = WeakKeyDictionary()  # by RRef, the call whose result it refers to

    def install(self) -> None:
        """Wrap torch's functions; to be called before `init_rpc`, when C++ looks them up."""
        REMOTE_CALLS.replace("_invoke_rpc", self._calling)
        REMOTE_CALLS.replace("PythonUDF", self._pickling)
        for name, look_at in _INVOKERS.items():
            REMOTE_CALLS.replace(name, partial(self._invoke, look_at))
        REMOTE_CALLS.replace("_run_function", self._serve)
        REMOTE_CALLS.replace("serialize", self._reply)
        self._references.start()
        REMOTE_CALLS.replace("_py_rref_reducer", self._send_reference)
        receiver = in_place_of(REMOTE_CALLS["_py_rref_receiver"], self._receive_reference)
        REMOTE_CALLS.set("_py_rref_receiver", staticmethod(receiver))
        PyRRef.to_here = in_place_of(PyRRef.to_here, self._to_here)  # type: ignore[method-assign]
        dist_autograd.backward = in_place_of(dist_autograd.backward, self._backwards.started)
        if REMOTE_STEPS.found:
            REMOTE_STEPS.set(_script_local_optimizer_step.__name__, _script_local_optimizer_step)
        REMOTE_CALLS.replace("_init_rpc_backend", self._named)

    def _named(self, init: Callable[..., Any], backend: Any, store: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        self._recorder.name = name
        return init(backend, store, name, *args, **kwargs)

    def _calling(self, invoke: Callable[..., Any], to: Any, func: Any, mode: Any, *args: Any, **kwargs: Any) -> Any:
        thread = self._thread
        before = thread.api, thread.timed
        limit_s = args[2] if len(args) > 2 else kwargs.get("rpc_timeout", UNSET_RPC_TIMEOUT)
        thread.api, thread.timed = f"rpc_{mode.value}", _ends_by_itself(limit_s)
        try:
            return invoke(to, func, mode, *args, **kwargs)
        finally:
            thread.api, thread.timed = before

    def _pickling(self, udf: Callable[..., Any], func: Any, args: Any, kwargs: Any) -> Any:
        """Replace the call that will be pickled by a numbered one."""
        thread = self._thread
        if spoken(func, args) is None:
            return udf(func, args, kwargs)
        caller = rpc.get_worker_info().id
        call = _NumberedCall(func, args, kwargs, caller, next(self._numbers), replies=thread.api != REMOTE.name)
        thread.call = call, clock()
        return call

    def _invoke(self, look_at: Callable[..., tuple[Any, int, str]], invoke: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Record a call that is sent."""
        thread = self._thread
        (call, start_ns), thread.call = thread.call or (None, clock()), None
        to, nbytes, function = look_at(*args, **kwargs)
        if call is not None:
            function = spoken(call.func, call.args) or ""
        elif not function:
            return invoke(*args, **kwargs)  # an internal call of torch's
        peer = to.id if hasattr(to, "id") else rpc.get_worker_info(to).id
        pair, number = (call_key(call.caller, peer), call.number) if call is not None else ("", 0)
        shared = (pair, number) if call is None or call.replies else ("", 0)
        operation = Operation(self._ring, f"{thread.api} {function}", start_ns, nbytes, peer, *shared, student_line())
        operation.timed = thread.timed
        if self._slow is not None:
            self._slow.call(operation, pair, number)
        try:
            result = invoke(*args, **kwargs)
        except BaseException:
            operation.withdrawn()
            raise
        if call is None and not isinstance(result, PyRRef):
            operation.also = partial(self._replied, function, operation, result)
        if self._slow is not None and not isinstance(result, PyRRef):
            result = self._slow.until_reply(operation, result, pair, number)
        if isinstance(result, PyRRef):
            result = self._references.keep(result)
            self._values[result] = pair, number
            operation.completed()  # the call is sent; `to_here` records the rest
        else:
            self._futures.tie(result, [operation])
            if self._slow is None:
                self._futures.tell(result, operation.completed)
        return result

    def _replied(self, function: str, operation: Operation, future: Any) -> None:
        """Record the reply to one of torch's own functions, which the callee runs in C++ without a record."""
        if nbytes := nbytes_of(value_of(future)):
            now, name = clock(), RECEIVED_REPLY.recorded(function)
            self._ring.write_communication(name, now, now, nbytes=nbytes, peer=operation.peer, line=operation.line)

    def _serve(self, run: Callable[..., Any], call: Any) -> Any:
        """On the callee: run the function and record it."""
        if not isinstance(call, _NumberedCall):
            return run(call)
        function = spoken(call.func, call.args) or ""
        pair = call_key(call.caller, rpc.get_worker_info().id)
        if self._slow is not None:
            self._slow.arrives(pair, call.number)
        name, start_ns = SERVE.recorded(function), clock()
        slot = self._ring.pend(name, start_ns, peer=call.caller, group=pair, match=call.number)
        thread = threading.get_ident()
        self._ring.serving_threads.add(thread)
        try:
            result = self._called(call, function)
        finally:
            self._ring.serving_threads.discard(thread)
        end_ns = clock()
        self._ring.write(name, COMPUTE, start_ns, end_ns, flags=AUTOMATIC | SERVED)
        if isinstance(result, torch.Future):  # the function has `async_execution`: torch replies when the future completes
            kind = PROMISE if self._futures.known(result) else UNSEEN_PROMISE
            promise = self._ring.pend(kind.recorded(function), end_ns, peer=call.caller, group=pair, match=call.number)
            self._ring.unpend(slot)  # only now: without either record, the call would seem not to have arrived
            self._backwards.served(function, call.caller, call.args, result, replies=call.replies)
            self._promises[promise] = result, call, function
            result.add_done_callback(lambda _: self._kept(promise))
            return result
        self._ring.unpend(slot)
        self._backwards.served(function, call.caller, call.args, result, replies=call.replies)
        self._replying(call, function, result, end_ns)
        return result

    def _kept(self, promise: int) -> None:
        """Record once that the future that a function has returned has completed."""
        future, call, function = self._promises.pop(promise, (None, None, ""))
        if call is not None:
            self._ring.unpend(promise)
            self._replying(call, function, value_of(future), clock())

    def _called(self, call: _NumberedCall, function: str) -> Any:
        """Call the function, like torch's `_run_function`, but send the caller the whole error, which it will show."""
        try:
            return call.func(*call.args, **call.kwargs)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever the student's function raised
            line = headline(error)
            # The caller may never see the error, since it may not wait for the future.
            sys.stderr.write(f"{function} failed: {line}\n")
            text = sent_error(rpc.get_worker_info(), line, students_traceback(error))
            return internal.RemoteException(text, type(error) if isinstance(error, Exception) else RuntimeError)

    def _replying(self, call: _NumberedCall, function: str, result: Any, start_ns: int) -> None:
        """Record the reply. If the result is sent back, torch pickles it next, on this thread; errors are not pickled.

        The reply begins exactly at the end of the span of serving the call, by which trace files match the two.
        """

        def sent(nbytes: int) -> None:
            self._ring.write_communication(
                (REPLY if call.replies else VALUE).recorded(function), start_ns, clock(), nbytes=nbytes, peer=call.caller,
                group=call_key(call.caller, rpc.get_worker_info().id), match=call.number,
            )  # fmt: skip
            if self._slow is not None:
                self._slow.reply(call.caller, call.number, nbytes, start_ns, travels=call.replies)

        if call.replies and not isinstance(result, BaseException):
            self._replies.expect(result, sent)
        else:
            sent(0)

    def _reply(self, serialize: Callable[..., Any], value: Any) -> Any:
        sent = self._replies.take(value)
        if sent is None:  # torch may be faster than the callback of a future that another thread completes
            done = (slot for slot, (future, *_) in [*self._promises.items()] if future.done() and value_of(future) is value)
            for promise in itertools.islice(done, 1):
                self._kept(promise)
                sent = self._replies.take(value)
        pickled, tensors = serialize(value)
        if sent is not None:
            sent(len(pickled) + nbytes_of(tensors))
        return pickled, tensors

    def _send_reference(self, reduce: Callable[..., Any], pickler: Any, rref: Any) -> tuple[Any, tuple[Any, ...]]:
        """Send a reference together with the call whose result it refers to."""
        receiver, (data,) = reduce(pickler, rref)
        return receiver, (data, *self._values.get(rref, ("", 0)))

    def _receive_reference(self, receive: Callable[..., Any], data: Any, pair: str, number: int) -> Any:
        rref = self._references.keep(receive(data))
        self._values[rref] = pair, number
        return rref

    def _to_here(self, to_here: Callable[..., Any], rref: Any, *args: Any, **kwargs: Any) -> Any:
        if rref.is_owner():
            return to_here(rref, *args, **kwargs)
        pair, number = self._values.get(rref, ("", 0))
        operation = Operation(self._ring, TO_HERE.name, clock(), 0, rref.owner().id, pair, number, student_line())
        operation.timed = _ends_by_itself(args[0] if args else kwargs.get("timeout", UNSET_RPC_TIMEOUT))
        with blocked(operation):
            value = to_here(rref, *args, **kwargs)
            operation.nbytes = nbytes_of(value)
            self._backwards.fetched(value, rref.owner().id)
            if self._slow is not None:
                self._slow.fetched(operation, pair, number)
        return value


def _ends_by_itself(limit_s: float) -> bool:
    """Whether a call fails after a time limit that the program has set; torch's default of a minute does not count."""
    if limit_s == UNSET_RPC_TIMEOUT:
        limit_s = rpc.get_rpc_timeout()
        return limit_s != DEFAULT_RPC_TIMEOUT_SEC and ends_by_itself(limit_s)
    return ends_by_itself(limit_s)


def _script_local_optimizer_step(local_optim_rref: Any, autograd_ctx_id: int) -> None:
    """Run a step of a `DistributedOptimizer`; the name is torch's, by which the call is recognized.

    It takes the place of a script function of torch's, which the owner of the parameters would run in C++, unrecorded.
    """
    local_optim_rref.local_value().step(autograd_ctx_id)


def spoken(func: Any, args: Any) -> str | None:
    """Return the name of a called function for the student; None for an internal function of torch's.

    A method that is called through a reference is "Decoder.forward". It is called by torch, as in
    `rref.rpc_sync().forward(x)`, or by a helper of the program: a function whose first two arguments are a reference
    and a method or its name.
    """
    if func in METHOD_CALLS:
        return _method(args[0], args[1], torch_knows_class=True)
    name = str(getattr(func, "__qualname__", type(func).__name__)).rpartition("<locals>.")[2]
    if name in IN_WORDS:
        return IN_WORDS[name]
    if getattr(func, "__module__", "").startswith("torch.distributed.rpc"):
        return None
    if isinstance(func, type) or len(args) < 2:
        return name
    at = 1 if isinstance(args[0], PyRRef) else 0  # position of the method
    rref, method = args[1 - at], args[at]
    if not isinstance(rref, PyRRef):
        return name
    if name == REMOTE_MODULE:
        return _method(rref, "forward") if rref.is_owner() else "RemoteModule.forward"
    return _method(rref, method) if _is_method(method, func, at) else name


def _is_method(given: Any, helper: Any, at: int) -> bool:
    """Whether a helper's argument is the method to call, judging by the argument or by the parameter's name."""
    if not (isinstance(given, str) and given.isidentifier()) and not callable(given):
        return False
    code = getattr(helper, "__code__", None)
    if code is not None and at < code.co_argcount and any(word in code.co_varnames[at] for word in METHOD_WORDS):
        return True
    return not isinstance(given, str | type) and "." in str(getattr(given, "__qualname__", "")).rpartition("<locals>.")[2]


def _method(rref: Any, method: Any, *, torch_knows_class: bool = False) -> str:
    own = method if isinstance(method, str) else str(getattr(method, "__name__", type(method).__name__))
    if rref.is_owner():
        return f"{type(rref.local_value()).__name__}.{own}"
    if torch_knows_class:  # torch has asked the owner before the call
        found = REMOTE_CALLS.of(rref, "_get_type")(blocking=False)
        return f"{found.value().__name__}.{own}" if found.done() else own
    return str(getattr(method, "__qualname__", own)).rpartition("<locals>.")[2]


def last_name(qualified: str) -> str:
    """Return the name of one of torch's operators or script functions for the student."""
    name = qualified.rpartition("::")[2].rpartition(".")[2]
    return IN_WORDS.get(name, name)


# The functions by which torch passes a call to C++, and how to find the call's destination, bytes and function in their
# arguments ("" for Python functions, which are already known).
_INVOKERS: Final[dict[str, Callable[..., tuple[Any, int, str]]]] = {
    "_invoke_rpc_python_udf": lambda to, pickled, tensors, *_: (to, len(pickled) + nbytes_of(tensors), ""),
    "_invoke_remote_python_udf": lambda to, pickled, tensors, *_: (to, len(pickled) + nbytes_of(tensors), ""),
    "_invoke_rpc_builtin": lambda to, name, _, *args, **kwargs: (to, nbytes_of([args, kwargs]), last_name(name)),
    "_invoke_remote_builtin": lambda to, name, _, *args, **kwargs: (to, nbytes_of([args, kwargs]), last_name(name)),
    "_invoke_rpc_torchscript": lambda to, name, args, kwargs, *_: (to, nbytes_of([args, kwargs]), last_name(name)),
    "_invoke_remote_torchscript": lambda to, name, _, __, *args, **kwargs: (to, nbytes_of([args, kwargs]), last_name(name)),
}
