"""The words of deadlocks, mismatches and waiting ranks, on states made by hand, without processes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from rank_states import CERTAIN, THREADS, call, deadlock_of, message, op, serve, standing

from labkit.group import deadlock_words
from labkit.group.deadlock import RankState
from labkit.group.deadlock_words import deadlock_in_words, doing, mismatch_in_words, serving_for_ever

S = 1_000_000_000
TESTS = Path(__file__).resolve().parents[1]
# The files that may quote the sentences: this one, and those whose reports are made by hand.
QUOTING = {"test_deadlock_words.py", "test_exceptions.py", "test_judge.py"}


def words_of(*ranks: RankState) -> tuple[str, str]:
    found = deadlock_of(*ranks)
    assert found is not None
    return deadlock_in_words(found, [f"rank {i}" for i in range(len(ranks))])


# Of each deadlock in `CERTAIN` with a sentence or a hint of its own: the sentence, and a part of the hint.
AT = "(cell 5, line 1)"
SAID = {
    "one returned": ("returned while rank 0 and rank 2 still wait for it in all_reduce (cell 5, line 3)", "an early return"),
    "one of TensorFlow returned": (
        f"returned while rank 0 still waits for it in TensorFlow's train {AT}",
        "All ranks of a strategy must run the same steps",
    ),
    "one returned and creates no group": (
        f"returned while rank 0 still waits for it in new_group {AT}", "Every rank must call new_group",
    ),
    "the receiver returned": (
        f"returned while rank 0 still waits for it in send {AT}", "look for a receive that is missing",
    ),
    "the sender returned": (f"returned while rank 0 still waits for it in recv {AT}", "Look for a send that is missing"),
    "a rank not called": (f"was not called, and rank 0 still waits for it in barrier {AT}", "need all of their ranks"),
    "three ranks not called": (
        f"was not called, nor was rank 2 or rank 3, and rank 0 still waits for them in barrier {AT}", "need all of their ranks",
    ),
    "two collectives in another order": (
        f"collective number 1 is all_reduce of float32 [3] {AT} on rank 0, and broadcast of float32 [3], root 0 {AT} on rank 1",
        "in the same order",
    ),
    "messages of different sizes": (
        f"rank 0 sends float32 [5] {AT}, and rank 1 receives it as float32 [9] {AT}", "of the size and type that is sent",
    ),
    "two groups": (
        f"rank 0 waits in all_reduce {AT} for rank 1; rank 1 waits in all_reduce {AT} for rank 0", "several groups",
    ),
    "two groups are created": (
        f"rank 0 waits in init_device_mesh {AT} for rank 1; rank 1 waits in new_group {AT} for rank 0",
        "Every rank must call init_device_mesh",
    ),
    "two sends to each other": (f"rank 0 waits in send {AT} for rank 1; rank 1 waits in send {AT} for rank 0", "use isend"),
    "two receives, while another rank computes": (
        f"rank 0 waits in recv {AT} for rank 1; rank 1 waits in recv {AT} for rank 0", "is a send missing",
    ),
    "two tags": (
        f"rank 0 waits in send {AT} for rank 1; rank 1 waits in recv with tag 7 {AT} for rank 0",
        "the tag that it is sent with: rank 0 sends with tag 0, and rank 1 receives with tag 7.",
    ),
    "a message and a collective": (
        f"rank 0 waits in recv {AT} for rank 1; rank 1 waits in barrier {AT} for rank 0", "messages and collectives",
    ),
    "a message from anybody when all have returned": ("rank 0 waits for a message that nobody will send", ""),
    "a future": (
        f"rank 0 and rank 1 wait in rpc_sync f {AT}: on rank 2 it has returned a future that nobody will complete", "set_result",
    ),
    "a rendezvous of too many ranks": (
        f"rank 0 waits in init_process_group at h:1 of 4 ranks {AT}; rank 1 waits in init_process_group at h:1 of 4 ranks {AT}",
        "4 ranks, and this group has 2",
    ),
    "a rank uses another's number": (
        f"rank 0 waits in all_gather {AT} for rank 1; rank 1 waits in init_process_group at h:1 of 2 ranks {AT} for rank 0",
        "each must come with a rank of its own",
    ),
    "calls that wait for each other until no thread is left": (
        "rank 0 waits in rpc_sync f (cell 5, line 5) for rank 1; rank 1 waits in rpc_sync f (cell 5, line 4) for rank 0",
        "Calls wait for one another",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SAID)
def test_a_deadlock(case: str) -> None:
    said, (headline, hint) = words_of(*CERTAIN[case][0]), SAID[case]
    assert said[0] == headline
    assert hint in said[1] if hint else said[1] == ""


def test_a_rank_without_a_thread_for_replies() -> None:
    full = [p for i in range(THREADS) for p in (serve(0, 1, i + 1, thread=i), call(1, 0, 1 + i // 2, thread=i))]
    caller = standing(call(0, 1, 1, thread=99), serving=THREADS, receiving=True)
    headline, hint = words_of(caller, standing(*full, returned=True, serving=THREADS, receiving=True))
    assert headline == (
        "rank 1 waits in rpc_sync f (cell 5, line 1) and rpc_sync f (cell 5, line 2) on every thread that serves calls: "
        "none is left to receive a reply"
    )
    assert "return a future" in hint


def test_servers_that_nobody_calls() -> None:
    assert serving_for_ever(["worker1"])[0] == "worker1 serves others, and no other rank was called"
    assert serving_for_ever(["a", "b"])[0] == "a and b serve others, and no other rank was called"


def test_mismatches() -> None:
    same, other = op("all_reduce", signature="float32 [2]"), op("all_reduce", signature="float64 [2]")
    assert mismatch_in_words([("rank 0", same), ("rank 1", same)]) == ("", "")
    text, hint = mismatch_in_words([("rank 0", same), ("rank 1", same), ("rank 2", other)])
    assert (
        text == f"collective number 1 is all_reduce of float32 [2] {AT} on rank 0, and all_reduce of float64 [2] {AT} on rank 2"
    )
    assert "same collectives, in the same order" in hint
    sent, received = message("send", 1, 0, signature="float32 [8]"), message("recv", 1, 0, signature="float32 [4]")
    text, hint = mismatch_in_words([("rank 0", received), ("rank 1", sent)])
    assert text == f"rank 1 sends float32 [8] {AT}, and rank 0 receives it as float32 [4] {AT}"
    assert hint == "A receive needs a tensor of the size and type that is sent."


def test_doing() -> None:
    assert doing("rank 0", [], 5 * S) == "rank 0 was computing"
    assert doing("rank 0", [], 5 * S, returned=True) == "rank 0 had returned"
    assert doing("rank 0", [op("all_reduce", since=0)], 5 * S) == "rank 0 was computing, with all_reduce under way"
    received = doing("rank 0", [message("recv", 1, 0, since=3 * S)], 5 * S, names=["rank 0", "rank 1"])
    assert received == f"rank 0 was waiting in recv with rank 1 {AT} for 2.0 s"
    closely = doing("rank 0", [op("all_reduce", 3, since=3 * S, signature="float32 [4]")], 5 * S, closely=True)
    assert closely == "rank 0 was waiting in all_reduce number 3 of float32 [4] (cell 5, line 3) for 2.0 s"
    assert doing("rank 0", [op("all_reduce", since=5 * S)], 4 * S).endswith(" for 0.0 s"), "no wait is negative"


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
