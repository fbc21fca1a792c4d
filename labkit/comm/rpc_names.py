"""Names of functions called by RPC, as shown to the student: "Decoder.forward", whichever helper calls the method."""

from __future__ import annotations

from typing import Any, Final

from torch._C._distributed_rpc import PyRRef
from torch.distributed.rpc import rref_proxy

__all__ = ["last_name", "spoken"]

# What torch calls for the student's sake, in the student's words. What else it calls keeps its own workers in step,
# unseen.
IN_WORDS: Final = {
    "_rref_typeof_on_owner": "type of an RRef",
    "_new_local_optimizer": "new optimizer",
    "_new_script_local_optimizer": "new optimizer",
    "_local_optimizer_step": "optimizer step",
    "_script_local_optimizer_step": "optimizer step",
}
REMOTE_MODULE: Final = "_remote_forward"  # by which torch's RemoteModule calls `forward` of the module that it stands for
METHOD_WORDS: Final = ("method", "func", "fn", "attr")  # what helpers call the parameter that says which method to call
METHOD_CALLS: Final = (rref_proxy._local_invoke, rref_proxy._local_invoke_async_execution)  # of (rref, name of the method, ...)


def spoken(func: Any, args: Any) -> str | None:
    """What the student calls a function that is called; None for those by which torch keeps its workers in step.

    A method that is called through a reference is "Decoder.forward". torch itself calls it, as in
    `rref.rpc_sync().forward(x)`, or a helper of the program's does: a function whose first two arguments are a
    reference and a method or its name.

    Args:
        func: what is called.
        args: with what.
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
    """Whether a helper's argument names the method to call: judged by the argument, or by its parameter's name."""
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
        found = rref._get_type(blocking=False)
        return f"{found.value().__name__}.{own}" if found.done() else own
    return str(getattr(method, "__qualname__", own)).rpartition("<locals>.")[2]


def last_name(qualified: str) -> str:
    """The name of an operator or a script function of torch's for the student."""
    name = qualified.rpartition("::")[2].rpartition(".")[2]
    return IN_WORDS.get(name, name)
