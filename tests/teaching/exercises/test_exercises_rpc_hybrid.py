"""The exercises of lesson 08: right answers pass, and wrong ones get an explanation."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.nn.functional as F
from answers import Answers, edited_solution
from time_limits import LIMITS_S, some_limit_does

from labkit.teaching.exercises.check import check

# The reference solutions import DistributedOptimizer.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")
answers = Answers()

right, wrong, mutant = answers.of("overlapped_time")


@right
def overlapped_step_by_step(first, second, parts):
    end1 = end2 = 0.0
    for _ in range(parts):
        end1 += first / parts
        end2 = max(end1, end2) + second / parts
    return end2


TIME = "(first + second + (parts - 1) * max(first, second)) / parts"
mutant(TIME, "first + second", "without any overlap")
mutant(TIME, "max(first, second)", "the slower worker alone takes that long")
mutant(" / parts", "", "belong to the whole batch", cure="a part takes 1/parts")
mutant("max", "min", "sets the pace, not the faster one")
SECTION_1 = "parts * (first + second) - min(first, second)"
mutant(TIME, SECTION_1, "belong to the whole batch, not to a part", cure="a part takes 1/parts")
mutant(TIME, "(first + second) / parts", "the other parts follow it")
mutant(TIME, "first + second - min(first, second) / 2", "right for two parts")
mutant(TIME, "(first + second) / 3", "not the time at which the last part ends")
mutant(TIME, 'f"{first + second} ms"', "expected one number")


right, wrong, mutant = answers.of("both_workers")


@right
def both_workers_by_references(workers, images):
    references = [worker.remote().forward(half) for worker, half in zip(workers, images.chunk(2), strict=True)]
    return torch.cat([reference.to_here() for reference in references])


@wrong("rpc_sync waits")
def one_after_the_other(workers, images):
    return torch.cat([worker.rpc_sync().forward(half) for worker, half in zip(workers, images.chunk(2), strict=True)])


@wrong("a wait() right after rpc_async")
def asked_and_waited_for_one_by_one(workers, images):
    halves = zip(workers, images.chunk(2), strict=True)
    return torch.cat([worker.rpc_async().forward(half).wait() for worker, half in halves])


CALL, JOINED = "worker.rpc_async().forward(half)", "return torch.cat(torch.futures.wait_all(futures))"
ONE, METHOD = "expected one tensor", "workers[0].rpc_async().forward(half)"
FIRST_ONLY = "return workers[0].rpc_sync().forward(images)"
mutant(CALL, "worker(half)", "an RRef is not the module", cure=METHOD)
mutant(CALL, "worker.forward(half)", "an RRef is not the module", cure=METHOD)
mutant("wait_all(futures)", "wait_all(futures[::-1])", "joined in the wrong order")
mutant("forward(half)", "forward(images)", "more than its half", cure="chunk(2)")
mutant(JOINED, "torch.futures.wait_all(futures); return futures", ONE, cure="wait for the parts and join them")
mutant(JOINED, "return futures", ONE, cure="wait for the parts and join them")
mutant("futures = [", f"{FIRST_ONLY}\n    futures = [", "only worker1 worked")
mutant(JOINED, f"{JOINED}.reshape(2, -1, 3)", "the wrong shape", cure="torch.cat")
mutant(JOINED, f"{JOINED} + 1", "not those of the whole batch")
mutant(JOINED, f"{JOINED}.tolist()[0][0]", "the answer is a float: expected one tensor with the scores")


right, wrong, mutant = answers.of("distributed_step")


@right
def distributed_step_by_hand(forward, optimizer, images, labels):
    with dist_autograd.context() as context_id:
        loss = -F.log_softmax(forward(images), dim=1)[range(len(labels)), labels].mean()
        dist_autograd.backward(context_id, [loss])
        optimizer.step(context_id)


@wrong("which the optimizer does not know", cure="optimizer.step(context)")
def context_forgotten(forward, optimizer, images, labels):
    F.cross_entropy(forward(images), labels).backward()
    optimizer.step()


STEP, CONTEXT = "optimizer.step(context)", "with dist_autograd.context() as context:"
REMOTE_LOSS, BACKWARD = "loss = cross_entropy(forward(images), labels)", "dist_autograd.backward(context, [loss])"
OUTSIDE, UNDER_ONE = "the forward pass was outside a context", "under one `with dist_autograd.context()`"
UNKNOWN, LOCAL = "which the optimizer does not know", "loss.backward() cannot leave"
SUM = 'loss = cross_entropy(forward(images), labels, reduction="sum")'
mutant(STEP, "pass", "the parameters on the workers have not changed", cure="optimizer.step(context_id)")
mutant(REMOTE_LOSS, SUM, "belong to the summed loss of 6 examples")
mutant("loss = ", "loss = -", "have the wrong sign")
mutant(STEP, "optimizer.step()", UNKNOWN, cure=STEP)
mutant(CONTEXT, f"optimizer.zero_grad()\n    {CONTEXT}", "zero_grad is not needed")
mutant("[loss]", "loss", "takes a list of losses", cure="backward(context, [loss])")
mutant(f"    {STEP}", STEP, "the context ends with its `with` block", cure="belongs inside")
mutant("images)", 'images + "")', "TypeError")
mutant(f"{CONTEXT}\n        {REMOTE_LOSS}", f"{REMOTE_LOSS}\n    {CONTEXT}", OUTSIDE, cure=UNDER_ONE)
mutant(BACKWARD, "loss.backward()", LOCAL, cure=BACKWARD)


right, wrong, mutant = answers.of("hybrid_master")


@right
def hybrid_master_by_functions(shard1, shard2, batches, parts, rate):
    def forward(x):
        pieces = [rpc.remote(shard1.owner(), forward_on, args=(shard1, part)) for part in x.chunk(parts)]
        return shard2.rpc_async().score(*pieces).wait()

    from torch.distributed.optim import DistributedOptimizer  # its import warns, which only ranks may do

    references = [reference for shard in (shard2, shard1) for reference in shard.rpc_sync().parameter_rrefs()]
    optimizer, losses = DistributedOptimizer(torch.optim.SGD, references, lr=rate, momentum=0.9), []
    for x, y in batches:
        with dist_autograd.context() as context:
            loss = F.cross_entropy(forward(x), y)
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.item())
    return losses


def forward_on(shard, x):
    return shard.local_value().forward(x)


PARTS, CALL_1 = "images.chunk(parts)", "shard1.remote().forward(part)"
FEATURES = f"features = [{CALL_1} for part in {PARTS}]"
THROUGH_MASTER = f"features = torch.futures.wait_all([shard1.rpc_async().forward(part) for part in {PARTS}])"
SCORE = "shard2.rpc_sync().score(*features)"
LOSS = f"loss = cross_entropy({SCORE}, labels)"
BOTH = f"{FEATURES}\n            {LOSS}"
IN_TURN = f"torch.cat([shard2.rpc_sync().score({CALL_1}) for part in {PARTS}])"
PART_BY_PART = "torch.cat([shard2.rpc_sync().score(feature) for feature in features])"
LOOP = "for images, labels in batches:"
OPTIMIZER = "optimizer = DistributedOptimizer(torch.optim.SGD, rrefs, lr=rate, momentum=0.9)"
MEANS = f"scores = {SCORE}; loss = sum(map(cross_entropy, scores.chunk(parts), labels.chunk(parts))) / parts"
ONE_BY_ONE, TRAVELLED = "sent only when another had been computed", "the features came to the master"
EARLIER = "the gradients of earlier batches are still in this context"
SHARD_2 = "parameters of shard 2 have not changed"
mutant(BOTH, LOSS.replace(SCORE, IN_TURN), ONE_BY_ONE, cure="with remote first")
mutant(FEATURES, THROUGH_MASTER, TRAVELLED, cure="returns a reference")
mutant(SCORE, PART_BY_PART, "a worker answers twice in a context", cure="call it once per batch")
mutant(PARTS, "images.chunk(1)", "3 batches came to shard 1 in 3 parts", cure="chunk(parts)")
mutant(PARTS, "images.chunk(2)", "parts is 3 here", cure="chunk(parts)")
mutant("shard1.remote()", "shard1.rpc_async()", "a future cannot be sent", cure="a reference can")
mutant(BOTH, LOSS.replace(SCORE, "shard2.score(shard1.forward(images))"), "is not the shard", cure=CALL_1)
mutant(STEP, "pass", "no parameter has changed", cure=STEP)
mutant("(shard1, shard2)", "(shard1,)", SHARD_2, cure="of both shards")
mutant(LOOP, f"{LOOP}\n        {OPTIMIZER}", "there was no momentum", cure="make one optimizer before the loop")
mutant(f"{LOOP}\n        {CONTEXT}", f"{CONTEXT}\n        {LOOP}", EARLIER, cure="each batch needs a new one")
mutant(BACKWARD, "loss.backward()", LOCAL, cure=BACKWARD)
mutant(f"{CONTEXT}\n            {BOTH}", f"{FEATURES}\n        {LOSS}\n        {CONTEXT}", OUTSIDE, cure=UNDER_ONE)
ON_WORKERS, SGD = "which are on the workers", "DistributedOptimizer(torch.optim.SGD, references"
mutant(OPTIMIZER, "torch.optim.SGD(rrefs, lr=rate, momentum=0.9)", ON_WORKERS, cure=SGD)
mutant(STEP, "optimizer.step()", "the gradients are in a context", cure=STEP)
mutant(LOSS, MEANS, "mean cross-entropy of all its examples")
mutant("loss.item()", "torch.tensor(loss.item())", "in place of a number", cure="loss.item()")
mutant("return losses", "", "expected the list of losses")
mutant("return losses", "return losses[-1:]", "not those of the batches, in order")
mutant("rrefs = [", "return [0.0 for _ in batches]\n    rrefs = [", "shard1.forward was never called")


test_the_verdict_fits_the_answer = answers.test_of_verdicts()
test_every_exercise_has_right_and_wrong_answers_here = answers.test_of_completeness("rpc_hybrid")


@pytest.mark.processes  # `check` starts ranks, which names in the test do not show
def test_a_result_that_the_loss_leaves_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """`dist_autograd.backward` waits for ever; the limit must leave it the time to begin."""

    features_fetched = edited_solution("hybrid_master", LOSS, f"features[0].to_here()\n            {LOSS}")

    def named(limit_s: float) -> bool:
        monkeypatch.setattr("labkit.teaching.exercises.answer_ranks.RUN_LIMIT_S", limit_s)
        verdict = check("hybrid_master", features_fetched)
        assert not verdict.passed
        return "does the loss use every result of a remote call in its context?" in verdict.message

    assert some_limit_does(named, LIMITS_S)
