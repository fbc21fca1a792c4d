"""The exercises of lesson 15: name four faults, and fix each program so that it computes what one rank computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor

from labkit.teaching.exercises.answer_ranks import run_on_ranks
from labkit.teaching.exercises.comparisons import TOLERANCE, equal, expect, wrong_if
from labkit.teaching.exercises.exercise import Results, exercise
from labkit.teaching.faults import fault
from labkit.tracing.silent_faults import FaultKind, faults_in

LESSON = "15_find_the_fault"
NAMES: Final = ("decides alone", "unequal batches", "other groups", "split sizes", "not waited for",
                "mean of means", "unused layer", "equal shards", "padding", "own buffers")
PROGRAMS: Final = (  # in the order of the lesson, each with the name of its fault, and where to look
    ("early_stopping", "decides alone",
     "the report names the line where the ranks parted: which of them knows that it is time to stop?"),
    ("gradient_average", "not waited for", "what do the crosses in its timeline stand for?"),
    ("sentences", "mean of means",
     "how many words has each rank, and how much does each rank's gradient count in the average?"),
    ("adapt", "unused layer", "two tensors got no gradient: which, and what does the forward pass do with them?"),
)
CASES: Final = ((2, 0), (4, 0))  # numbers of ranks, and what is added to the program's seed
Edits = list[tuple[str, str]]


@exercise(LESSON, "All four faults have their names.", number=True)
def name_the_faults(answer: Any) -> None:
    """name_the_faults is a list of four names from the table: the faults of early_stopping, gradient_average,
    sentences and adapt, in this order."""
    wrong_if(not isinstance(answer, (list, tuple)) or len(answer) != len(PROGRAMS),
             f"given {answer!r}: expected a list of four names from the table")
    for given, (program, name, hint) in zip(answer, PROGRAMS, strict=True):
        wrong_if(given not in NAMES, f"{program}: the table has no {given!r}")
        wrong_if(given != name, f"{program}: not {given!r}; {hint}")


def _called(answer: Callable[..., Any], seed: int) -> Any:
    """Call a program with other random numbers, if the seed is not 0."""
    manual_seed = torch.manual_seed
    with mock.patch.object(torch, "manual_seed", lambda own: manual_seed(own + seed)):
        return answer()


def _in_words(name: str, ranks: int, seed: int) -> str:
    return f"{name}() on {ranks} ranks" + (f", with torch.manual_seed({seed})" if seed else "")


def _of_grader(random: Random) -> tuple[int, int]:
    return 2, random.randrange(1, 8)


def _of_program(name: str, ranks: int, seed: int, *edits: tuple[str, str]) -> list[Any]:
    """Return what the lesson's program returns on each rank, after texts of it were replaced."""
    source = fault(name).source
    for old, new in edits:
        assert old in source, old
        source = source.replace(old, new)
    names: dict[str, Any] = {"__name__": name}
    exec(compile(source, f"{name}.py", "exec"), names)
    return list(run_on_ranks(ranks, _called, names["train"], seed))


def _expect_serial(
    name: str, results: Results, seed: int, mistakes: list[tuple[Edits, str, str]], hint: str, serial: Edits | None = None
) -> None:
    """Accept results that are that of the program on one rank, where its fault has no effect.

    Args:
        name: the program.
        results: of the fixed program.
        seed: what was added to its seed.
        mistakes: known ones: the edits of the program that make them, a hint and a cure.
        hint: of any other result.
        serial: edits for the run on one rank.
    """
    wrong_if(any(not isinstance(result, Tensor) for result in results),
             f"expected a function that returns what train() of {name} returns")
    ranks = len(results)
    right = _of_program(name, 1, seed, *(serial or ())) * ranks
    known = [(_of_program(name, ranks, seed, *edits), words, cure) for edits, words, cure in mistakes]
    expect(list(results), right, known, hint, same=partial(equal, within=TOLERANCE))


@exercise(
    LESSON, "All ranks stop after the same step, with the weights of one rank.", ((2, 0), (4, 1)), on_ranks=_called,
    call=partial(_in_words, "fix_early_stopping"), other=_of_grader,
    errors={"still waits for it": ("one rank leaves the loop, and another begins a step",
                         "broadcast the decision of rank 0, and let every rank act on it")},
)
def fix_early_stopping(results: Results, ranks: int, seed: int) -> None:  # noqa: ARG001
    """fix_early_stopping() is the function `train` of early_stopping, fixed: on any number of ranks, all stop
    after the same step, and return what it returns on one rank."""
    _expect_serial("early_stopping", results, seed, [],
                   "the ranks stop together, but not when one rank does: after how many steps without improvement?")


@exercise(
    LESSON, "All gradients are waited for, and every rank has the weights of one rank.", CASES, on_ranks=_called,
    call=partial(_in_words, "fix_gradient_average"), other=_of_grader,
)
def fix_gradient_average(results: Results, ranks: int, seed: int) -> None:  # noqa: ARG001
    """fix_gradient_average() is the function `train` of gradient_average, fixed: it returns what it returns on
    one rank."""
    unwaited = [found for found in faults_in(results.trace) if found.kind is FaultKind.NEVER_WAITED_FOR]
    wrong_if(unwaited, "an all-reduce is still not waited for",
             "keep what each all_reduce returns, and call wait() on all of them before the gradients are used",
             *(found.sentence for found in unwaited))
    wait = ("async_op=True)", "async_op=True).wait()")
    _expect_serial("gradient_average", results, seed, [
        ([wait, ("p.grad /= ranks", "pass")], "the gradients are added up, but not averaged",
         "divide each of them by the number of ranks"),
        ([wait, ("dist.all_reduce(p.grad, ", "dist.all_reduce(p.grad.clone(), ")],
         "the sums arrive in other tensors than those with which the optimizer steps",
         "all_reduce works in place: give it p.grad itself"),
    ], "all is waited for, but the weights are not those of one rank: when is a gradient added up, divided and used?",
        serial=[wait])


@exercise(
    LESSON, "Every word has the same weight, on whatever rank it is.", CASES, on_ranks=_called,
    call=partial(_in_words, "fix_sentences"), other=_of_grader,
)
def fix_sentences(results: Results, ranks: int, seed: int) -> None:  # noqa: ARG001
    """fix_sentences() is the function `train` of sentences, fixed: it returns what it returns on one rank."""
    loss = "cross_entropy(model(words), following)"
    total, count = "len(words)", "    for _ in range(8):\n"
    summed = (count, f"    total = torch.tensor(float({total}))\n    dist.all_reduce(total)\n{count}")
    by_sum = 'cross_entropy(model(words), following, reduction="sum")'
    _expect_serial("sentences", results, seed, [
        ([], "that is the result of the program as it was: a mean of two means",
         "add up the losses of the words, and divide by the number of words of all ranks"),
        ([summed, (loss, f"({by_sum} / total)")],
         "every word has the same weight, but all gradients are too small: what does DDP do with the sum of the ranks?",
         "DDP divides by the number of ranks, so multiply the loss by it"),
        ([(loss, by_sum)], "the losses are added up, and never divided by the number of words",
         "divide by the number of words of all ranks"),
        ([summed, (loss, f"({by_sum} / total * ranks**2)")], "all gradients are too large, by the number of ranks",
         "multiply by the number of ranks once"),
    ], "one process averages over all words: over which words does each of your terms average, and with what weight?")


@exercise(
    LESSON, "Every rank has the weights of one rank.", CASES, on_ranks=_called,
    call=partial(_in_words, "fix_adapt"), other=_of_grader,
)
def fix_adapt(results: Results, ranks: int, seed: int) -> None:  # noqa: ARG001
    """fix_adapt() is the function `train` of adapt, fixed: it returns what it returns on one rank."""
    _expect_serial("adapt", results, seed, [
        ([], "that is the result of the program as it was: rank 0 has the gradients of its own examples only",
         "leave the unused layer out, or let DDP look for unused parameters"),
        ([("return self.score(self.body(x).tanh())", "h = self.body(x).tanh()\n        return self.score(h) + self.spare(h)")],
         "now the forward pass uses the layer, and the model has become another one",
         "the layer must not change what the model computes"),
    ], "the weights are not those of one rank: is each gradient the average, and is the model what it was?")
