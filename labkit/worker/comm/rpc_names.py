"""Names of functions called by RPC, as shown to the student: "Decoder.forward", whichever helper calls the method."""

from __future__ import annotations

from typing import Any, Final

from torch.distributed.rpc import PyRRef

from labkit.worker.comm.torch_internals import REMOTE_CALLS

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
