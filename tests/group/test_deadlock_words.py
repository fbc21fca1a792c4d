"""The words of deadlocks, mismatches and waiting ranks, on states made by hand, without processes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from rank_states import COMPUTES, RETURNED, THREADS, call, deadlock_of, future, message, op, serve, standing

from labkit.group import deadlock_words
from labkit.group.deadlock import RankState
from labkit.group.deadlock_words import deadlock_in_words, doing, mismatch_in_words, serving_for_ever
from labkit.recording.group_keys import TENSORFLOW

S = 1_000_000_000
TESTS = Path(__file__).resolve().parents[1]
# The files that may quote the sentences: this one, and those whose reports are made by hand.
QUOTING = {"test_deadlock_words.py", "test_exceptions.py", "test_judge.py"}


def words_of(*ranks: RankState) -> tuple[str, str]:
    found = deadlock_of(*ranks)
    assert found is not None
    return deadlock_in_words(found, [f"rank {i}" for i in range(len(ranks))])


def facing(kind: str) -> list[RankState]:
    """Two ranks that send to each other, or that receive from each other."""
    there, back = ((0, 1), (1, 0)) if kind == "send" else ((1, 0), (0, 1))
    return [standing(message(kind, *there)), standing(message(kind, *back))]


@pytest.mark.parametrize(
    ("ranks", "headline", "hint"),
    [
        (
            [standing(op("all_reduce", 3)), RETURNED, standing(op("all_reduce", 3))],
            "returned while rank 0 and rank 2 still wait for it in all_reduce (cell 5, line 3)",
            "an early return",
        ),
        (
            [standing(op("TensorFlow's train", group=TENSORFLOW)), RETURNED],
            "returned while rank 0 still waits for it in TensorFlow's train (cell 5, line 1)",
            "All ranks of a strategy must run the same steps",
        ),
        (
            [standing(op("barrier")), standing(called=False, returned=True)],
            "was not called, and rank 0 still waits for it in barrier (cell 5, line 1)",
            "need all of their ranks",
        ),
        (
            [standing(op("barrier")), *[standing(called=False, returned=True)] * 3],
            "was not called, nor was rank 2 or rank 3, and rank 0 still waits for them in barrier (cell 5, line 1)",
            "need all of their ranks",
        ),
        (
            [standing(op("all_reduce", signature="float32 [3]")), standing(op("broadcast"))],
            (
                "collective number 1 is all_reduce of float32 [3] (cell 5, line 1) on rank 0, "
                "and broadcast (cell 5, line 1) on rank 1"
            ),
            "in the same order",
        ),
        (
            [standing(message("send", 0, 1, signature="float32 [5]")), standing(message("recv", 0, 1, signature="float32 [9]"))],
            "rank 0 sends float32 [5] (cell 5, line 1), and rank 1 receives it as float32 [9] (cell 5, line 1)",
            "of the size and type that is sent",
        ),
        (
            [standing(op("all_reduce", group=f"group {number} of ranks 0,1")) for number in (1, 2)],
            "rank 0 waits in all_reduce (cell 5, line 1) for rank 1; rank 1 waits in all_reduce (cell 5, line 1) for rank 0",
            "several groups",
        ),
        (
            facing("send"),
            "rank 0 waits in send (cell 5, line 1) for rank 1; rank 1 waits in send (cell 5, line 1) for rank 0",
            "use isend",
        ),
        (
            facing("recv"),
            "rank 0 waits in recv (cell 5, line 1) for rank 1; rank 1 waits in recv (cell 5, line 1) for rank 0",
            "is a send missing",
        ),
        (
            [standing(op("new_group", group="new group 1 of ranks 0,1")), RETURNED],
            "returned while rank 0 still waits for it in new_group (cell 5, line 1)",
            "Every rank must call new_group",
        ),
        (
            [
                standing(op("init_device_mesh", group="new group 1 of ranks 0,1")),
                standing(op("new_group", group="new group 2 of ranks 0,1")),
            ],
            (
                "rank 0 waits in init_device_mesh (cell 5, line 1) for rank 1; rank 1 waits in new_group (cell 5, line 1) for "
                "rank 0"
            ),
            "Every rank must call init_device_mesh",
        ),
        (
            [standing(message("send", 0, 1)), RETURNED],
            "returned while rank 0 still waits for it in send (cell 5, line 1)",
            "look for a receive that is missing",
        ),
        (
            [standing(message("recv", 1, 0)), RETURNED],
            "returned while rank 0 still waits for it in recv (cell 5, line 1)",
            "Look for a send that is missing",
        ),
        (
            [standing(message("send", 0, 1)), standing(message("recv", 0, 1, tag=7))],
            "rank 0 waits in send (cell 5, line 1) for rank 1; rank 1 waits in recv with tag 7 (cell 5, line 1) for rank 0",
            "the tag that it is sent with: rank 0 sends with tag 0, and rank 1 receives with tag 7.",
        ),
        (
            [standing(message("recv", 1, 0)), standing(op("barrier"))],
            "rank 0 waits in recv (cell 5, line 1) for rank 1; rank 1 waits in barrier (cell 5, line 1) for rank 0",
            "messages and collectives",
        ),
        (
            [standing(op("recv", 0, group="", signature="float32 [5]")), RETURNED],
            "rank 0 waits for a message that nobody will send",
            "",
        ),
        (
            [
                standing(call(0, 2), serving=THREADS),
                standing(call(1, 2), serving=THREADS),
                standing(future(0, 2), future(1, 2), returned=True, serving=THREADS),
            ],
            "rank 0 and rank 1 wait in rpc_sync f (cell 5, line 1): on rank 2 it has returned a future that nobody will complete",
            "set_result",
        ),
        (
            [standing(op("init_process_group", group="rendezvous at h:1 of 4 ranks")) for _ in range(2)],
            (
                "rank 0 waits in init_process_group at h:1 of 4 ranks (cell 5, line 1); "
                "rank 1 waits in init_process_group at h:1 of 4 ranks (cell 5, line 1)"
            ),
            "4 ranks, and this group has 2",
        ),
        (
            [standing(op("all_gather")), standing(op("init_process_group", group="rendezvous at h:1 of 2 ranks"))],
            (
                "rank 0 waits in all_gather (cell 5, line 1) for rank 1; "
                "rank 1 waits in init_process_group at h:1 of 2 ranks (cell 5, line 1) for rank 0"
            ),
            "each must come with a rank of its own",
        ),
    ],
)
def test_a_deadlock(ranks: list[RankState], headline: str, hint: str) -> None:
    found = words_of(*ranks)
    assert found[0] == headline
    assert hint in found[1] if hint else found[1] == ""


def test_calls_that_wait_for_each_other_have_a_hint_of_their_own() -> None:
    there = [p for i in range(THREADS) for p in (serve(1, 0, i + 1, thread=i), call(0, 1, i + 2, thread=i))]
    back = [p for i in range(THREADS) for p in (serve(0, 1, i + 1, thread=i), call(1, 0, i + 1, thread=i))]
    first = standing(call(0, 1, 1, thread=99), *there, serving=THREADS)
    assert "Calls wait for one another" in words_of(first, standing(*back, serving=THREADS))[1]


def test_a_rank_without_a_thread_for_replies() -> None:
    full = [p for i in range(THREADS) for p in (serve(0, 1, i + 1, thread=i), call(1, 0, 1 + i // 2, thread=i))]
    caller = standing(call(0, 1, 1, thread=99), serving=THREADS, receiving=True)
    headline, hint = words_of(caller, standing(*full, returned=True, serving=THREADS, receiving=True))
    assert headline == (
        "rank 1 waits in rpc_sync f (cell 5, line 1) and rpc_sync f (cell 5, line 2) on every thread that serves calls: "
        "none is left to receive a reply"
    )
    assert "return a future" in hint


def test_a_rank_that_computes_is_not_named() -> None:
    assert "rank 2" not in words_of(*facing("send"), COMPUTES)[0]


def test_servers_that_nobody_calls() -> None:
    assert serving_for_ever(["worker1"])[0] == "worker1 serves others, and no other rank was called"
    assert serving_for_ever(["a", "b"])[0] == "a and b serve others, and no other rank was called"


def test_mismatch_names_the_first_pair_that_differs() -> None:
    same = op("all_reduce", signature="float32 [2]")
    assert mismatch_in_words([("rank 0", same), ("rank 1", same)]) == ("", "")
    assert mismatch_in_words([("rank 0", same), ("rank 1", op("all_reduce", 2, signature="float32 [3]"))])[0] == "", (
        "another operation"
    )
    text, hint = mismatch_in_words([("rank 0", same), ("rank 1", same), ("rank 2", op("all_reduce", signature="float64 [2]"))])
    assert text == (
        "collective number 1 is all_reduce of float32 [2] (cell 5, line 1) on rank 0, and all_reduce of float64 [2] (cell 5, "
        "line 1) on rank 2"
    )
    assert "same collectives, in the same order" in hint


def test_a_mismatched_message_is_reported_from_its_sender() -> None:
    sent, received = message("send", 1, 0, signature="float32 [8]"), message("recv", 1, 0, signature="float32 [4]")
    text, hint = mismatch_in_words([("rank 0", received), ("rank 1", sent)])
    assert text == "rank 1 sends float32 [8] (cell 5, line 1), and rank 0 receives it as float32 [4] (cell 5, line 1)"
    assert hint == "A receive needs a tensor of the size and type that is sent."


def test_doing() -> None:
    assert doing("rank 0", [], 5 * S) == "rank 0 was computing"
    assert doing("rank 0", [], 5 * S, returned=True) == "rank 0 had returned"
    assert doing("rank 0", [op("all_reduce", since=0)], 5 * S) == "rank 0 was computing, with all_reduce under way"
    waits = message("recv", 1, 0, since=3 * S)
    assert doing("rank 0", [waits], 5 * S, names=["rank 0", "rank 1"]) == (
        "rank 0 was waiting in recv with rank 1 (cell 5, line 1) for 2.0 s"
    )


def test_no_wait_is_negative() -> None:
    assert doing("rank 0", [op("all_reduce", since=5 * S)], 4 * S).endswith(" for 0.0 s")


def test_doing_closely() -> None:
    waits = op("all_reduce", 3, since=3 * S, signature="float32 [4]")
    assert doing("rank 0", [waits], 5 * S, closely=True) == (
        "rank 0 was waiting in all_reduce number 3 of float32 [4] (cell 5, line 3) for 2.0 s"
    )


def fragments() -> list[str]:
    """The parts of the sentences on deadlocks, between what is filled in, that have at least three words."""
    tree = ast.parse(Path(deadlock_words.__file__).read_text().partition("# Long waits")[0])
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    documented = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Module))
    texts -= {ast.get_docstring(node, clean=False) for node in documented}
    return [text.strip() for text in texts if len(text.split()) >= 3]


def test_no_other_test_depends_on_these_words() -> None:
    parts, found = fragments(), []
    assert "for a message that nobody will send" in parts
    for path in TESTS.rglob("*.py"):
        if path.name not in QUOTING:
            text = path.read_text()
            quoted = [string for string in re.findall(r'"([^"\n]+)"', text) if len(string) >= 20]
            found += [f"{path.name}: {part}" for part in parts if part in text or any(string in part for string in quoted)]
    assert found == []
