"""The exercises of lesson 07: right answers pass, and wrong ones get an explanation."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed.rpc as rpc
from answers import Answers, judge

answers = Answers()
right, wrong = answers.right, answers.wrong


# ask_all


@right("ask_all")
def ask_all(workers, function, inputs):
    calls = [rpc.rpc_async(workers[i % len(workers)], function, args=(x,)) for i, x in enumerate(inputs)]
    return torch.futures.wait_all(calls)


@right("ask_all")
def ask_all_by_references(workers, function, inputs):
    references = [rpc.remote(workers[i % len(workers)], function, args=(x,)) for i, x in enumerate(inputs)]
    return [reference.to_here() for reference in references]


@right("ask_all")
def ask_all_collected(workers, function, inputs):
    calls = [rpc.rpc_async(workers[i % len(workers)], function, args=(x,)) for i, x in enumerate(inputs)]
    return torch.futures.collect_all(calls).then(lambda done: [call.value() for call in done.value()]).wait()


@right("ask_all")
def ask_all_from_threads(workers, function, inputs):
    with ThreadPoolExecutor(len(workers)) as pool:
        where = [workers[i % len(workers)] for i in range(len(inputs))]
        return list(pool.map(lambda worker, x: rpc.rpc_sync(worker, function, args=(x,)), where, inputs))


@wrong("ask_all", "rpc_sync waits")
def asked_one_by_one(workers, function, inputs):
    return [rpc.rpc_sync(workers[i % len(workers)], function, args=(x,)) for i, x in enumerate(inputs)]


@wrong("ask_all", "so does wait() right after rpc_async")
def waited_in_the_loop(workers, function, inputs):
    return [rpc.rpc_async(workers[i % len(workers)], function, args=(x,)).wait() for i, x in enumerate(inputs)]


@wrong("ask_all", "contains a Future", cure="torch.futures.wait_all")
def futures_not_waited_for(workers, function, inputs):
    return [rpc.rpc_async(workers[i % len(workers)], function, args=(x,)) for i, x in enumerate(inputs)]


@wrong("ask_all", "contains a PyRRef", cure="torch.futures.wait_all")
def references_not_fetched(workers, function, inputs):
    return [rpc.remote(workers[i % len(workers)], function, args=(x,)) for i, x in enumerate(inputs)]


@wrong("ask_all", "ran on the master", cure="pass it to rpc_async")
def computed_here(workers, function, inputs):
    return [function(x) for x in inputs]


@wrong("ask_all", "has run before the call was made", cure="args=(x,)")
def called_too_early(workers, function, inputs):
    return torch.futures.wait_all([rpc.rpc_async(w, function(x)) for w, x in zip(workers, inputs, strict=False)])


@wrong("ask_all", "`args` is a tuple", cure="with the comma")
def comma_forgotten(workers, function, inputs):
    return torch.futures.wait_all([rpc.rpc_async(workers[0], function, args=(x)) for x in inputs])


@wrong("ask_all", "workers get several")
def one_input_for_each_worker(workers, function, inputs):
    calls = [rpc.rpc_async(worker, function, args=(x,)) for worker, x in zip(workers, inputs, strict=False)]
    return torch.futures.wait_all(calls)


@wrong("ask_all", "another order")
def results_by_worker(workers, function, inputs):
    p = len(workers)
    calls = [rpc.rpc_async(workers[w], function, args=(x,)) for w in range(p) for x in inputs[w::p]]
    return torch.futures.wait_all(calls)


@wrong("ask_all", "input 1 went to worker1, and 1 modulo 2 workers is worker2")
def inputs_in_blocks(workers, function, inputs):
    each = -(-len(inputs) // len(workers))
    return torch.futures.wait_all([rpc.rpc_async(workers[i // each], function, args=(x,)) for i, x in enumerate(inputs)])


@wrong("ask_all", "had nothing to do")
def first_worker_only(workers, function, inputs):
    return torch.futures.wait_all([rpc.rpc_async(workers[0], function, args=(x,)) for x in inputs])


@wrong("ask_all", "expected a list")
def results_added(workers, function, inputs):
    return sum(part.sum() for part in ask_all(workers, function, inputs))


@wrong("ask_all", "not what the function returns")
def results_changed(workers, function, inputs):
    return [part + 1 for part in ask_all(workers, function, inputs)]


# remote_tallies


@right("remote_tallies")
def remote_tallies(tally_class, owners, amounts):
    tallies = [rpc.remote(owner, tally_class) for owner in owners]
    adds = [tally.rpc_async().add(x) for tally, some in zip(tallies, amounts, strict=True) for x in some]
    torch.futures.wait_all(adds)
    return [tally.rpc_sync().total() for tally in tallies]


@right("remote_tallies")
def remote_tallies_one_by_one(tally_class, owners, amounts):
    totals = []
    for owner, some in zip(owners, amounts, strict=True):
        tally = rpc.remote(owner, tally_class)
        for x in some:
            tally.rpc_sync().add(x)
        totals.append(tally.remote().total().to_here())
    return totals


@wrong("remote_tallies", "the object was made before the call", cure="pass the class")
def an_object_instead_of_the_class(tally_class, owners, amounts):
    references = [rpc.remote(owner, tally_class()) for owner in owners]
    return [reference.rpc_sync().total() for reference in references]


@wrong("remote_tallies", "an RRef is not the object", cure="reference.rpc_sync().the_method()")
def methods_of_references(tally_class, owners, amounts):
    tallies = [rpc.remote(owner, tally_class) for owner in owners]
    for tally, some in zip(tallies, amounts, strict=True):
        for x in some:
            tally.add(x)
    return [tally.total() for tally in tallies]


@wrong("remote_tallies", "brings a copy", cure="tally.rpc_sync().add(x)")
def copies_fetched(tally_class, owners, amounts):
    copies = [rpc.remote(owner, tally_class).to_here() for owner in owners]
    for tally, some in zip(copies, amounts, strict=True):
        for x in some:
            tally.add(x)
    return [tally.total() for tally in copies]


@wrong("remote_tallies", "works only on the owner", cure="through the reference")
def local_values(tally_class, owners, amounts):
    for owner, some in zip(owners, amounts, strict=True):
        tally = rpc.remote(owner, tally_class)
        for x in some:
            tally.local_value().add(x)


@wrong("remote_tallies", "built on the master", cure="rpc.remote(owner, tally_class)")
def built_here(tally_class, owners, amounts):
    tallies = [rpc.RRef(tally_class()) for _ in owners]
    for tally, some in zip(tallies, amounts, strict=True):
        for x in some:
            tally.rpc_sync().add(x)
    return [tally.rpc_sync().total() for tally in tallies]


@wrong("remote_tallies", "each rpc.remote(owner, tally_class) makes a new one", cure="keep its reference")
def a_new_object_each_time(tally_class, owners, amounts):
    for owner, some in zip(owners, amounts, strict=True):
        for x in some:
            rpc.remote(owner, tally_class).rpc_sync().add(x)
    return [rpc.remote(owner, tally_class).rpc_sync().total() for owner in owners]


@wrong("remote_tallies", "rpc_async and remote only send the call", cure="wait for the additions first")
def additions_not_waited_for(tally_class, owners, amounts):
    tallies = [rpc.remote(owner, tally_class) for owner in owners]
    for tally, some in zip(tallies, amounts, strict=True):
        for x in some:
            tally.rpc_async().add(x)
    return [tally.rpc_sync().total() for tally in tallies]


@wrong("remote_tallies", "in place of a number", cure="wait() for a future")
def totals_as_futures(tally_class, owners, amounts):
    tallies = [rpc.remote(owner, tally_class) for owner in owners]
    torch.futures.wait_all([t.rpc_async().add(x) for t, some in zip(tallies, amounts, strict=True) for x in some])
    return [tally.rpc_async().total() for tally in tallies]


@wrong("remote_tallies", "every owner gets one")
def only_where_something_is_added(tally_class, owners, amounts):
    busy = [owner for owner, some in zip(owners, amounts, strict=True) if some]
    return remote_tallies(tally_class, busy, [some for some in amounts if some])


@wrong("remote_tallies", "another order")
def totals_reversed(tally_class, owners, amounts):
    return remote_tallies(tally_class, owners, amounts)[::-1]


@wrong("remote_tallies", "expected a list")
def one_total(tally_class, owners, amounts):
    return sum(remote_tallies(tally_class, owners, amounts))


@wrong("remote_tallies", "3 additions, and has 2 amounts")
def everything_to_each(tally_class, owners, amounts):
    if len(owners) == 1:
        return remote_tallies(tally_class, owners, amounts)
    return remote_tallies(tally_class, owners, [[*some, 1.0] for some in amounts])


@pytest.mark.parametrize("answer", answers.parameters())
@pytest.mark.processes
def test_the_verdict_fits_the_answer(answer) -> None:
    judge(answer)


def test_every_exercise_has_right_and_wrong_answers_here() -> None:
    answers.complete("calls_and_references")
