"""The exercises of lesson 01: right answers pass, and wrong ones get an explanation."""

from __future__ import annotations

import torch
import torch.distributed as dist
from answers import Answers
from store_exchange import through_the_store

answers = Answers()

right, wrong, mutant = answers.of("link_from_times")


@right
def link_by_elimination(n1, t1, n2, t2):
    return [(t1 * n2 - t2 * n1) / (n2 - n1), 1 / ((t2 - t1) / (n2 - n1))]


LINK = "t1 - n1 / bandwidth, bandwidth"
mutant(LINK, "bandwidth, t1 - n1 / bandwidth", "in the other order")
mutant(LINK, "t1 - n1 / bandwidth, 8 * bandwidth", "in bits per second")
mutant(LINK, "t1 - n1 / bandwidth, 1 / bandwidth", "the time per byte", cure="its inverse")
SECOND, SIZES = "the bandwidth comes from the second time alone", "divide the difference of the sizes"
mutant(LINK, "t1, n2 / t2", SECOND, cure=SIZES)
mutant(LINK, "t2, bandwidth", "the bandwidth is right", cure="what is left of a time")
mutant(LINK, "bandwidth", "expected two numbers")


right, wrong, mutant = answers.of("ring_all_reduce")


@right
def ring_of_batches_with_padding(x):
    rank, p = dist.get_rank(), dist.get_world_size()
    size = -(-len(x) // p)
    padded = torch.zeros(size * p)
    padded[: len(x)] = x
    for step in range(2 * p - 2):
        outgoing, incoming = padded.view(p, size)[(rank - step) % p].clone(), torch.empty(size)
        both = [dist.P2POp(dist.isend, outgoing, (rank + 1) % p), dist.P2POp(dist.irecv, incoming, (rank - 1) % p)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        part = padded.view(p, size)[(rank - step - 1) % p]
        part.copy_(part + incoming if step < p - 1 else incoming)
    x.copy_(padded[: len(x)])


@wrong("whole tensors go round")
def ring_of_whole_tensors(x):
    rank, p = dist.get_rank(), dist.get_world_size()
    outgoing = x.clone()
    for _ in range(p - 1):
        incoming = torch.empty_like(x)
        sending = dist.isend(outgoing, (rank + 1) % p)
        dist.recv(incoming, (rank - 1) % p)
        sending.wait()
        x += incoming
        outgoing = incoming
    if p > 1:
        sending = dist.isend(x, (rank + 1) % p)
        dist.recv(torch.empty_like(x), (rank - 1) % p)
        sending.wait()


def known_input(rank, x):
    """The input of any rank, which no rank could know outside of an exercise."""
    return torch.randint(-9, 10, x.shape, generator=torch.Generator().manual_seed(100 * len(x) + rank)).float()


@wrong("right, but not by messages")
def ring_without_messages(x):
    x.copy_(sum(known_input(rank, x) for rank in range(dist.get_world_size())))


@wrong("right, but not by messages")
def ring_through_the_store(x):
    x.copy_(sum(through_the_store(x)))


@wrong("too many messages")
def ring_of_single_numbers(x):
    p, rank = dist.get_world_size(), dist.get_rank()
    parts = x.tensor_split(p)
    for step in range(2 * (p - 1)):
        sent, received = parts[(rank - step) % p], parts[(rank - step - 1) % p]
        works = [dist.isend(number.clone(), dst=(rank + 1) % p) for number in sent.split(1)]
        for number in received.split(1) if len(received) else []:
            arrived = torch.empty_like(number)
            dist.recv(arrived, src=(rank - 1) % p)
            number.copy_(number + arrived if step < p - 1 else arrived)
        for work in works:
            work.wait()


RANK = "rank, p = dist.get_rank(), dist.get_world_size()"
COPIED = "part.copy_(part + incoming if step < p - 1 else incoming)"
PARTS = "parts = x.tensor_split(p)"
mutant(RANK, f"return dist.all_reduce(x)\n    {RANK}", "all_reduce does the work")
mutant("isend", "send", "waits in send until its neighbour receives", cure="dist.isend starts a message")
mutant(PARTS, "parts = x.chunk(p)", "do not divide the length", cure="`tensor_split(p)` always gives p parts")
mutant(PARTS, "parts = x.clone().tensor_split(p)", "x is unchanged")
mutant("range(2 * p - 2)", "range(p - 1)", "only a part is complete", cure="come p-1 rounds of copying")
mutant(COPIED, "part += incoming", "added more than once", cure="replaces the part and is not added")
mutant(COPIED, COPIED + "\n    x /= p", "that is the mean")


right, wrong, mutant = answers.of("tree_broadcast")


@right
def tree_from_far_to_near(x):
    rank, p = dist.get_rank(), dist.get_world_size()
    distance = 1 << (p - 1).bit_length() >> 1
    while distance:
        if rank % (2 * distance) == 0 and rank + distance < p:
            dist.send(x, rank + distance)
        elif rank % (2 * distance) == distance:
            dist.recv(x, rank - distance)
        distance //= 2


@wrong("rank 0 sends everything itself", cure="every rank that has the data can send")
def tree_as_a_star(x):
    if dist.get_rank() == 0:
        for other in range(1, dist.get_world_size()):
            dist.send(x, other)
    else:
        dist.recv(x, 0)


@wrong("too many rounds", cure="every rank that has the data can send")
def tree_as_a_chain(x):
    rank, p = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        dist.recv(x, rank - 1)
    if rank + 1 < p:
        dist.send(x, rank + 1)


@wrong("right, but not by messages")
def tree_without_messages(x):
    x.copy_(known_input(0, x))


mutant(
    "if rank < distance and rank + distance < p:",
    "if rank < distance:",
    "3 is not a power of two",
    cure="only to ranks below the world size",
)
RANK = "rank, p, distance ="
mutant(RANK, f"return dist.broadcast(x, 0)\n    {RANK}", "broadcast does the work")
mutant(RANK, f"x = x.clone()\n    {RANK}", "no rank has in its x what rank 0 has", cure="receive into x itself")


test_the_verdict_fits_the_answer = answers.test_of_verdicts()
test_every_exercise_has_right_and_wrong_answers_here = answers.test_of_completeness("messages")
