"""The single table of operations: their names, traffic, costs, colours and wording in messages.

To have labkit record another collective, add an entry to `OPERATION_TYPES`. Recording, traffic, colours, predictions,
emulated links, and the detection of mismatches and deadlocks all read the entries. Anything that is not in the table is
an `OTHER`: a span that the student marks as communication, or a call that blocks until other ranks arrive and is fully
described by the key of its group (`recording.group_keys`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final


class Traffic(Enum):
    """Who sends what to whom. A rank's bytes are its input or its output of the operation, whichever is larger."""

    RING = "each rank sends the share of its bytes that the cost names to the next rank in the ring"
    PAIRWISE = "each rank sends an equal part to every other rank; the amounts of two ranks may differ"
    FROM_ROOT = "the root sends each other rank the bytes that the receiver records"
    TO_ROOT = "each rank sends the root the bytes that it records"
    TOGETHER = "the ranks wait for one another; no bytes are counted"
    TO_PEER = "the rank sends the bytes to its peer"
    FROM_PEER = "the rank receives the bytes from its peer, which records none"
    SECOND_END = "the rank receives the bytes from its peer, which records them"
    NONE = "the rank executes a call from another rank"
    UNKNOWN = "unknown; if there is a peer, the rank sends it the bytes"


class Algorithm(Enum):
    """How the ranks of an operation exchange messages; `costs.rounds` lists the messages."""

    RING = "in each round, each rank sends an equal part to the next"
    PAIRWISE = "in round k, each rank sends a part to the k-th rank after it"
    TREE = "a binomial tree from the first rank, over which everything travels, or the same towards it"
    TREE_OF_PARTS = "the same tree, over which only the parts of the ranks beyond travel"
    DISSEMINATION = "in round k, each rank notifies the rank 2ᵏ places after it"
    CENTRAL = "all ranks notify the first, which notifies them"


@dataclass(frozen=True, slots=True, eq=False)
class Cost:
    """The time of an operation on p ranks, rounds·α + share·n/B: α is a link's latency, B its bandwidth, n bytes."""

    rounds: Callable[[int], int]  # the number of rounds, as a function of p
    # the share of n, as a function of p; for a ring, each rank also sends this share to the next rank
    share: Callable[[int], float]
    formula: str  # in LaTeX
    source: str
    # who sends to whom in each round, which matters where not all ranks have the same link
    algorithm: Algorithm = Algorithm.RING


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """One form of an operation. All forms of an operation move the same bytes."""

    name: str  # the name that students know and that records use: "all_gather_into_tensor"
    # the methods of torch's process group that carry it out; some have one name in torch 2.11, another since 2.13
    methods: tuple[str, ...] = ()
    alike: int | None = None  # the index of the argument that must match in number and type on all ranks; None if it may differ
    # the index of the argument that lists, for each tensor, what each rank sends or receives; None if there is none
    parts: int | None = None
    of_one: str = ""  # the form that a call with a single tensor counts as; "" for this form


OTHER_COLOUR: Final = "#690F2D"


@dataclass(frozen=True, slots=True, eq=False)
class OperationType:
    """Everything that labkit knows about an operation."""

    name: str  # the name of its plainest form, used by `costs` and `lab.predict`
    traffic: Traffic  # who sends what to whom
    forms: tuple[Form, ...]  # its forms; a record names one of them
    cost: Cost | None = None  # its cost; None if no closed formula is known
    # its colour in every figure: warm, like all communication, and distinct for colour-blind readers too
    colour: str = OTHER_COLOUR
    # whether records append the name of the student's function to that of the form: "rpc_sync Net.forward"
    of_function: bool = False
    reduces: bool = False  # whether it combines elements of several ranks into one
    # whether n in the cost is the total of all ranks' bytes, although a rank other than the root counts only its part
    root_has_all: bool = False
    own_limit: bool = False  # whether each call may have its own time limit
    kernels: tuple[str, ...] = ()  # the prefixes of the names of the TensorFlow kernels that carry it out

    @property
    def collective(self) -> bool:
        """Whether all ranks of a process group take part."""
        return self.traffic in (Traffic.RING, Traffic.PAIRWISE, Traffic.FROM_ROOT, Traffic.TO_ROOT, Traffic.TOGETHER)

    @property
    def rooted(self) -> bool:
        """Whether one rank, the root, sends to all others or receives from them."""
        return self.traffic in (Traffic.FROM_ROOT, Traffic.TO_ROOT)

    def recorded(self, function: str) -> str:
        """Return the name in the record, for an operation with one form and a function: "serve Decoder.forward"."""
        return f"{self.name} {function}"

    def function_in(self, recorded: str) -> str:
        """Return the function in a name from the record; "" if there is none."""
        begin = next((form.name for form in self.forms if self.of_function and recorded.startswith(f"{form.name} ")), None)
        return "" if begin is None else recorded[len(begin) + 1 :]


THAKUR: Final = "Thakur, Rabenseifner, Gropp, Optimization of collective communication operations in MPICH, 2005"
CHAN: Final = "Chan et al., Collective communication: theory, practice, and experience, 2007"
HOCKNEY: Final = "Hockney, The communication challenge for MPP, 1994"
_HENSGEN: Final = "Hensgen, Finkel, Manber, Two algorithms for barrier synchronization, 1988"
DEPTH: Final = r"\lceil\log_2 p\rceil"


def depth(ranks: int) -> int:
    """⌈log₂ p⌉, the rounds of a tree."""
    return math.ceil(math.log2(ranks))


# With p ranks and L = ⌈log₂ p⌉:
#
# | operation | algorithm | rounds | share | n |
# |---|---|---|---|---|
# | send, recv, rpc | | 1 | 1 | the message; for a remote call, in one direction |
# | all_reduce | ring | 2(p−1) | 2(p−1)/p | a rank's tensor |
# | all_gather, reduce_scatter | ring | p−1 | (p−1)/p | the parts of all ranks together |
# | all_to_all | pairwise exchange | p−1 | (p−1)/p | the total that a rank sends, including to itself |
# | broadcast, reduce | binomial tree | L | L | the tensor |
# | gather, scatter | binomial tree | L | (p−1)/p | the parts of all ranks together |
# | barrier | dissemination | L | 0 | |
# | monitored_barrier | all to rank 0, and back | 2 | 0 | |
#
# Thakur et al. and Chan et al. also have a term for the arithmetic, which is omitted here.
_MESSAGE: Final = Cost(lambda _: 1, lambda _: 1.0, r"\alpha + \frac{n}{B}", HOCKNEY)
_RING_TWICE: Final = Cost(
    lambda p: 2 * (p - 1), lambda p: 2 * (p - 1) / p, r"2(p-1)\,\alpha + \frac{2(p-1)}{p}\,\frac{n}{B}", THAKUR
)
_RING: Final = Cost(lambda p: p - 1, lambda p: (p - 1) / p, r"(p-1)\,\alpha + \frac{p-1}{p}\,\frac{n}{B}", THAKUR)
_PAIRWISE: Final = replace(_RING, algorithm=Algorithm.PAIRWISE)
_TREE: Final = Cost(depth, lambda p: float(depth(p)), rf"{DEPTH}\left(\alpha + \frac{{n}}{{B}}\right)", THAKUR, Algorithm.TREE)
_TREE_OF_PARTS: Final = Cost(
    depth, lambda p: (p - 1) / p, rf"{DEPTH}\,\alpha + \frac{{p-1}}{{p}}\,\frac{{n}}{{B}}", CHAN, Algorithm.TREE_OF_PARTS
)
_DISSEMINATION: Final = Cost(depth, lambda _: 0.0, rf"{DEPTH}\,\alpha", _HENSGEN, Algorithm.DISSEMINATION)
_THERE_AND_BACK: Final = Cost(
    lambda p: 2 if p > 1 else 0, lambda _: 0.0, r"2\,\alpha", "torch.distributed, documentation of monitored_barrier",
    Algorithm.CENTRAL,
)  # fmt: skip

SEND: Final = OperationType("send", Traffic.TO_PEER, (Form("send", ("send",)),), _MESSAGE, "#7A3E65")
RECV: Final = OperationType("recv", Traffic.SECOND_END, (Form("recv", ("recv", "recv_anysource")),), _MESSAGE)
# Remote calls: the caller records the call; the callee records its execution, and the result that it sends back or
# keeps until it is fetched.
RPC: Final = OperationType(
    "rpc", Traffic.TO_PEER, (Form("rpc_sync"), Form("rpc_async"), Form("rpc_async_jit"), Form("rpc_remote")), _MESSAGE, "#D55E00",
    of_function=True,
)  # fmt: skip
REMOTE: Final = OperationType("remote", Traffic.TO_PEER, (Form("remote"),), colour="#D55E00", of_function=True)
SERVE: Final = OperationType("serve", Traffic.NONE, (Form("serve"),), of_function=True)
# The called function has returned a future that is not complete yet (`async_execution`).
PROMISE: Final = OperationType("future of", Traffic.NONE, (Form("future of"),), of_function=True)
# The same for a future that C++ may complete, such as that of `torch.jit.fork`.
UNSEEN_PROMISE: Final = OperationType("unseen future of", Traffic.NONE, (Form("unseen future of"),), of_function=True)
REPLY: Final = OperationType("reply", Traffic.TO_PEER, (Form("reply"),), colour="#F0E442", of_function=True)
# The reply to a call of one of torch's own functions, for which the callee records nothing.
RECEIVED_REPLY: Final = OperationType(
    "received reply", Traffic.FROM_PEER, (Form("received reply"),), colour="#F0E442", of_function=True
)
VALUE: Final = OperationType("value", Traffic.TO_PEER, (Form("value"),), colour="#F0E442", of_function=True)
# It has the colour of all_gather, which rarely occurs in a group with remote calls.
TO_HERE: Final = OperationType("to_here", Traffic.FROM_PEER, (Form("to_here"),), colour="#E69F00")
# In a distributed backward pass.
GRADIENTS: Final = OperationType("gradients", Traffic.TO_PEER, (Form("gradients"),), colour="#CC79A7")
RECEIVED_GRADIENTS: Final = OperationType(
    "received gradients", Traffic.FROM_PEER, (Form("received gradients"),), colour="#CC79A7"
)
RPC_SHUTDOWN: Final = OperationType("rpc.shutdown", Traffic.TOGETHER, (Form("rpc.shutdown"),))
OTHER: Final = OperationType("", Traffic.UNKNOWN, ())

FOR_OTHERS: Final = (SERVE, PROMISE, UNSEEN_PROMISE)  # what a rank executes, or still owes, for a caller on another rank

# The colours are those of Okabe and Ito that compute does not use, and others found by search to be far from them.
OPERATION_TYPES: tuple[OperationType, ...] = (
    SEND,
    RECV,
    RPC,
    OperationType(
        "all_reduce", Traffic.RING,
        (Form("all_reduce", ("allreduce",), alike=0), Form("all_reduce_coalesced", ("allreduce_coalesced",), alike=0)),
        _RING_TWICE, "#D26978", reduces=True, kernels=("CollectiveReduce",),
    ),
    OperationType(
        "all_gather", Traffic.RING,
        (
            Form("all_gather", ("allgather",), alike=1, parts=0),
            Form("all_gather_coalesced", ("allgather_coalesced",), alike=1),
            Form("all_gather_into_tensor", ("_allgather_base", "all_gather_single"), alike=1),
            # Functional collectives use only the coalesced form, even for one tensor.
            Form(
                "all_gather_into_tensor_coalesced", ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"), alike=1,
                of_one="all_gather_into_tensor",
            ),
        ),
        _RING, "#E69F00", kernels=("CollectiveGather",),
    ),
    OperationType(
        "reduce_scatter", Traffic.RING,
        (
            Form("reduce_scatter", ("reduce_scatter",), alike=0, parts=1),
            Form("reduce_scatter_tensor", ("_reduce_scatter_base", "reduce_scatter_single"), alike=0),
            Form(
                "reduce_scatter_tensor_coalesced", ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
                alike=0, of_one="reduce_scatter_tensor",
            ),
        ),
        _RING, "#CC79A7", reduces=True, kernels=("CollectiveReduceScatter",),
    ),
    OperationType(
        "all_to_all", Traffic.PAIRWISE,
        (Form("all_to_all", ("alltoall",)), Form("all_to_all_single", ("alltoall_base", "all_to_all_single"))),
        _PAIRWISE, "#C3A55A", kernels=("CollectiveAllToAll",),
    ),
    OperationType(
        "broadcast", Traffic.FROM_ROOT, (Form("broadcast", ("broadcast",), alike=0),), _TREE, "#A52D96",
        kernels=("CollectiveBcast",),
    ),
    OperationType("reduce", Traffic.TO_ROOT, (Form("reduce", ("reduce",), alike=0),), _TREE, "#780000", reduces=True),
    OperationType(
        "gather", Traffic.TO_ROOT, (Form("gather", ("gather",), alike=1),), _TREE_OF_PARTS, "#78693C", root_has_all=True
    ),
    OperationType(
        "scatter", Traffic.FROM_ROOT, (Form("scatter", ("scatter",), alike=0),), _TREE_OF_PARTS, "#FFB4FF", root_has_all=True
    ),
    OperationType("barrier", Traffic.TOGETHER, (Form("barrier", ("barrier",)),), _DISSEMINATION, own_limit=True),
    OperationType("monitored_barrier", Traffic.TOGETHER, (Form("monitored_barrier", ("monitored_barrier",)),), _THERE_AND_BACK),
    OperationType("permutation", Traffic.UNKNOWN, (Form("permutation"),), kernels=("CollectivePermute",)),
    REMOTE, SERVE, PROMISE, UNSEEN_PROMISE, REPLY, RECEIVED_REPLY, VALUE, TO_HERE, GRADIENTS, RECEIVED_GRADIENTS, RPC_SHUTDOWN,
)  # fmt: skip


@functools.lru_cache(maxsize=1 << 12)
def type_of(name: str) -> OperationType:
    """Return the operation with this name, which may be from a record, its own or a torch method's; else `OTHER`."""
    by_name, by_begin = _names()
    found = by_name.get(name)
    if found is None:
        found = next((kind for begin, kind in by_begin.items() if name.startswith(begin)), OTHER)
    return found


@functools.lru_cache(maxsize=1 << 12)
def type_of_kernel(name: str) -> OperationType:
    """Return the operation of "CollectiveReduceV2" or "collective_reduce_v2"; `OTHER` if it is no collective."""
    plain = name.replace("_", "").lower()
    begins = {kernel.lower(): kind for kind in OPERATION_TYPES for kernel in kind.kernels if plain.startswith(kernel.lower())}
    return begins[max(begins, key=len)] if begins else OTHER  # the longest match: ReduceScatter, not Reduce


def methods() -> Mapping[str, tuple[OperationType, Form]]:
    """Return the methods of torch's process group that are operations, each with its operation and form."""
    return {method: (kind, form) for kind in OPERATION_TYPES for form in kind.forms for method in form.methods}


@functools.cache
def _names() -> tuple[Mapping[str, OperationType], Mapping[str, OperationType]]:
    """Return the types by name, and those whose records append a function, by the prefix of the recorded name."""
    by_name = {name: kind for kind in OPERATION_TYPES for form in kind.forms for name in form.methods}
    by_name |= {form.name: kind for kind in OPERATION_TYPES for form in kind.forms if not kind.of_function}
    by_name |= {kind.name: kind for kind in OPERATION_TYPES if kind.cost is not None}
    return by_name, {f"{form.name} ": kind for kind in OPERATION_TYPES for form in kind.forms if kind.of_function}
