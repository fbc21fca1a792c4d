"""The exercises of lesson 07: right answers pass, and wrong ones get an explanation."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch.distributed.rpc as rpc
from answers import Answers

answers = Answers()

right, wrong, mutant = answers.of("ask_all")


@right
def ask_all_from_threads(workers, function, inputs):
    with ThreadPoolExecutor(len(workers)) as pool:
        where = [workers[i % len(workers)] for i in range(len(inputs))]
        return list(pool.map(lambda worker, x: rpc.rpc_sync(worker, function, args=(x,)), where, inputs))


IN_TURN, RESULTS = "workers[i % len(workers)]", "return torch.futures.wait_all(calls)"
FOR_EACH = "\n             for i, x in enumerate(inputs)]\n    "
CALL = f"rpc.rpc_async({IN_TURN}, function, args=(x,))"
CALLS = f"{CALL}{FOR_EACH}{RESULTS}"
BY_WORKER = f"""rpc.rpc_async(workers[w], function, args=(x,))
             for w in range(len(workers)) for x in inputs[w :: len(workers)]]
    {RESULTS}"""
COLLECTED = """return torch.futures.collect_all(calls).then(
        lambda done: [call.value() for call in done.value()]
    ).wait()"""
mutant(RESULTS, COLLECTED)  # right
mutant(CALLS, f"rpc.remote({IN_TURN}, function, args=(x,)){FOR_EACH}return [reference.to_here() for reference in calls]")  # right
mutant(CALLS, f"rpc.rpc_sync({IN_TURN}, function, args=(x,)){FOR_EACH}return calls", "rpc_sync waits")
mutant(CALLS, f"{CALL}.wait(){FOR_EACH}return calls", "so does wait() right after rpc_async")
mutant(RESULTS, "return calls", "contains a Future", cure="torch.futures.wait_all")
mutant(
    CALLS,
    f"rpc.remote({IN_TURN}, function, args=(x,)){FOR_EACH}return calls",
    "contains a PyRRef",
    cure="torch.futures.wait_all",
)
mutant(RESULTS, "return [function(x) for x in inputs]", "ran on the master", cure="pass it to rpc_async")
mutant("function, args=(x,)", "function(x)", "has run before the call was made", cure="args=(x,)")
mutant("args=(x,)", "args=(x)", "`args` is a tuple", cure="with the comma")
mutant("enumerate(inputs)", "enumerate(inputs[: len(workers)])", "workers get several")
mutant(CALLS, BY_WORKER, "another order")
mutant(
    IN_TURN,
    "workers[i // -(-len(inputs) // len(workers))]",
    "input 1 went to worker1, and 1 modulo 2 workers is worker2",
)
mutant(IN_TURN, "workers[0]", "had nothing to do")
mutant(RESULTS, "return sum(part.sum() for part in torch.futures.wait_all(calls))", "expected a list")
mutant(RESULTS, "return [part + 1 for part in torch.futures.wait_all(calls)]", "not what the function returns")
mutant(RESULTS, f"{RESULTS}[1:]", "given 4 results for 5 inputs")


right, wrong, mutant = answers.of("remote_tallies")


@right
def remote_tallies_one_by_one(tally_class, owners, amounts):
    totals = []
    for owner, some in zip(owners, amounts, strict=True):
        tally = rpc.remote(owner, tally_class)
        for x in some:
            tally.rpc_sync().add(x)
        totals.append(tally.remote().total().to_here())
    return totals


@wrong("brings a copy", cure="tally.rpc_sync().add(x)")
def copies_fetched(tally_class, owners, amounts):
    copies = [rpc.remote(owner, tally_class).to_here() for owner in owners]
    for tally, some in zip(copies, amounts, strict=True):
        for x in some:
            tally.add(x)
    return [tally.total() for tally in copies]


@wrong("each rpc.remote(owner, tally_class) makes a new one", cure="keep its reference")
def a_new_object_each_time(tally_class, owners, amounts):
    for owner, some in zip(owners, amounts, strict=True):
        for x in some:
            rpc.remote(owner, tally_class).rpc_sync().add(x)
    return [rpc.remote(owner, tally_class).rpc_sync().total() for owner in owners]


MADE, ADD = "rpc.remote(owner, tally_class)", "tally.rpc_async().add(x)"
WAITED = "torch.futures.wait_all(additions)\n    "
ONLY_BUSY = """owners = [owner for owner, own in zip(owners, amounts, strict=True) if own]
    amounts = [own for own in amounts if own]
    """
TOTALS = "return [tally.rpc_sync().total() for tally in tallies]"
mutant(MADE, "rpc.remote(owner, tally_class())", "the object was made before the call", cure="pass the class")
mutant(ADD, "tally.add(x)", "an RRef is not the object", cure="reference.rpc_sync().the_method()")
mutant(ADD, "tally.local_value().add(x)", "works only on the owner", cure="through the reference")
mutant(MADE, "rpc.RRef(tally_class())", "built on the master", cure="rpc.remote(owner, tally_class)")
mutant(WAITED, "", "rpc_async and remote only send the call", cure="wait for the additions first")
mutant(TOTALS, TOTALS.replace("sync", "async"), "in place of a number", cure="wait() for a future")
mutant("tallies = [", f"{ONLY_BUSY}tallies = [", "every owner gets one")
mutant(TOTALS, f"{TOTALS}[::-1]", "another order")
mutant(TOTALS, "return sum(tally.rpc_sync().total() for tally in tallies)", "expected a list")
mutant("for x in own", "for x in (own if len(owners) == 1 else [*own, 1.0])", "3 additions, and has 2 amounts")
mutant(TOTALS, TOTALS.replace("total()", "total() + 0.5"), "not those of the owners' amounts")


test_the_verdict_fits_the_answer = answers.test_of_verdicts()
test_every_exercise_has_right_and_wrong_answers_here = answers.test_of_completeness("calls_and_references")
