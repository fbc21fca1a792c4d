"""The exercises of lessons 00 and 04: right answers pass, and wrong ones get an explanation."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from answers import Answers, judge
from torch import nn

answers = Answers()
right, wrong = answers.right, answers.wrong


# 00: introduce


@right("introduce")
def introduce():
    return f"rank {dist.get_rank()} of {dist.get_world_size()}"


@wrong("introduce", "Ranks are counted from 0")
def introduce_from_one():
    return f"rank {dist.get_rank() + 1} of {dist.get_world_size()}"


@wrong("introduce", "`return` gives it to the notebook")
def introduce_by_print():
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}")


@wrong("introduce", "All ranks return the same text")
def introduce_the_first():
    return f"rank 0 of {dist.get_world_size()}"


@wrong("introduce", "The number of ranks is wrong")
def introduce_of_constant():
    return f"rank {dist.get_rank()} of 2"


@wrong("introduce", "not the one asked for")
def introduce_otherwise():
    return f"{dist.get_rank()}/{dist.get_world_size()}"


@wrong("introduce", "with an f before the quotes")
def introduce_in_four_parts():
    return "rank", dist.get_rank(), "of", dist.get_world_size()


@wrong("introduce", "ZeroDivisionError")
def introduce_and_fail():
    return 1 / 0


# 00: my_share


@right("my_share")
def my_share(items):
    return range(items)[dist.get_rank() :: dist.get_world_size()]


@right("my_share")
def my_share_in_blocks(items):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return list(range(items * rank // ranks, items * (rank + 1) // ranks))


@wrong("my_share", "10 // 4 rounds down")
def my_share_rounded_down(items):
    each = items // dist.get_world_size()
    return range(dist.get_rank() * each, (dist.get_rank() + 1) * each)


@wrong("my_share", "every rank takes everything")
def my_share_of_all(items):
    return range(items)


@wrong("my_share", "there is no item 10")
def my_share_rounded_up(items):
    each = -(-items // dist.get_world_size())
    return range(dist.get_rank() * each, (dist.get_rank() + 1) * each)


@wrong("my_share", "all wait for the slowest")
def my_share_rest_to_the_last(items):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    each = items // ranks
    return range(rank * each, items if rank == ranks - 1 else (rank + 1) * each)


@wrong("my_share", "items 2, 5 and 8 belong to more than one rank")
def my_share_with_seams(items):
    each = -(-items // dist.get_world_size())
    start = dist.get_rank() * each
    return range(max(0, start - 1), min(items, start + each))


@wrong("my_share", "expected its item numbers")
def my_share_as_a_count(items):
    return items // dist.get_world_size()


@wrong("my_share", "`items` is a number, not a list: here it was 10")
def my_share_of_a_list(items):
    return items[dist.get_rank() :: dist.get_world_size()]


@wrong("my_share", "unsupported operand")
def my_share_and_fail(items):
    return range(items + "1")


# 00: waiting_share

right("waiting_share", 0.5)
wrong("waiting_share", "the share of one fast rank", 2 / 3)
wrong("waiting_share", "right as a percentage", 50)
wrong("waiting_share", "the seconds that all ranks wait", 0.6)
wrong("waiting_share", "the seconds that one rank waits", 0.2)
wrong("waiting_share", "add up what each rank waits", 0.11)
wrong("waiting_share", "expected a number between 0 and 1", "half")


# 04: activation_bytes


def _outputs(model, inputs, names, size, remove=True):
    found, hooks = {}, []
    for name, module in model.named_modules():
        if names(name, module):
            hooks.append(module.register_forward_hook(lambda _m, _i, out, name=name: found.update({name: size(out)})))
    model(inputs)
    for hook in hooks if remove else ():
        hook.remove()
    return found


def _is_leaf(name, module):
    return not list(module.children())


def _bytes(out):
    return out.numel() * out.element_size()


@right("activation_bytes")
def activation_bytes(model, inputs):
    return _outputs(model, inputs, _is_leaf, _bytes)


@wrong("activation_bytes", "numbers, not bytes")
def activation_numbers(model, inputs):
    return _outputs(model, inputs, _is_leaf, lambda out: out.numel())


@wrong("activation_bytes", "that is one example")
def activation_bytes_of_one(model, inputs):
    return _outputs(model, inputs, _is_leaf, lambda out: _bytes(out[0]))


@wrong("activation_bytes", "'' and '1' are containers")
def activation_bytes_of_containers(model, inputs):
    return _outputs(model, inputs, lambda *_: True, _bytes)


@wrong("activation_bytes", "look into containers")
def activation_bytes_of_children(model, inputs):
    return _outputs(model, inputs, lambda name, _: name in ("0", "2"), _bytes)


@wrong("activation_bytes", "as note_shape does")
def activation_bytes_under_the_last_name(model, inputs):
    found, hooks = {}, []
    for name, module in model.named_modules():
        if _is_leaf(name, module):
            hooks.append(module.register_forward_hook(lambda _m, _i, out: found.update({name: _bytes(out)})))  # noqa: B023 - the mistake
    model(inputs)
    for hook in hooks:
        hook.remove()
    return found


@wrong("activation_bytes", "call its remove()")
def activation_bytes_with_hooks_left(model, inputs):
    return _outputs(model, inputs, _is_leaf, _bytes, remove=False)


@wrong("activation_bytes", "left in eval mode")
def activation_bytes_in_eval_mode(model, inputs):
    return activation_bytes(model.eval(), inputs)


@wrong("activation_bytes", "a float64 has 8 bytes")
def activation_bytes_of_float32(model, inputs):
    return _outputs(model, inputs, _is_leaf, lambda out: 4 * out.numel())


@wrong("activation_bytes", "expected a dict")
def activation_bytes_in_all(model, inputs):
    return sum(_outputs(model, inputs, _is_leaf, _bytes).values())


@wrong("activation_bytes", "not those of the layers' outputs")
def parameter_bytes(model, inputs):
    return {name: sum(_bytes(p) for p in m.parameters()) for name, m in model.named_modules() if _is_leaf(name, m)}


# 04: best_cut


@right("best_cut")
def best_cut(costs):
    return min(range(1, len(costs)), key=lambda cut: max(sum(costs[:cut]), sum(costs[cut:])))


@wrong("best_cut", "the middle by number of layers")
def cut_in_the_middle(costs):
    return len(costs) // 2


@wrong("best_cut", "another cut has a faster slower part")
def cut_when_half_is_passed(costs):
    for cut in range(1, len(costs)):
        if sum(costs[:cut]) >= sum(costs) / 2:
            return cut
    return len(costs) - 1


@wrong("best_cut", "expected how many layers the first part has")
def cut_before_the_first(costs):
    return 0


# 04: TwoDevices


@right("TwoDevices")
class TwoDevices(nn.Module):
    def __init__(self, first, second, device0, device1):
        super().__init__()
        self.first, self.second = first.to(device0), second.to(device1)
        self.devices = device0, device1

    def forward(self, x):
        return self.second(self.first(x.to(self.devices[0])).to(self.devices[1]))


@wrong("TwoDevices", "move the activation to device1")
class ActivationStays(TwoDevices):
    def forward(self, x):
        return self.second(self.first(x.to(self.devices[0])))


@wrong("TwoDevices", "move the input to device0")
class InputStays(TwoDevices):
    def forward(self, x):
        return self.second(self.first(x).to(self.devices[1]))


@wrong("TwoDevices", "not on their devices")
class PartsStay(TwoDevices):
    def __init__(self, first, second, device0, device1):
        nn.Module.__init__(self)
        self.first, self.second, self.devices = first, second, (device0, device1)


@wrong("TwoDevices", "is the activation detached")
class Detached(TwoDevices):
    def forward(self, x):
        return self.second(self.first(x.to(self.devices[0])).detach().to(self.devices[1]))


@wrong("TwoDevices", "each part runs once per forward; the first ran 2 times")
class FirstTwice(TwoDevices):
    def forward(self, x):
        self.first(x.to(self.devices[0]))
        return super().forward(x)


@wrong("TwoDevices", "not that of the first part followed by the second")
class FirstOnly(TwoDevices):
    def forward(self, x):
        return self.first(x.to(self.devices[0])).to(self.devices[1])


@wrong("TwoDevices", "an optimizer would train nothing")
class Hidden(TwoDevices):
    def __init__(self, first, second, device0, device1):
        nn.Module.__init__(self)
        self.parts, self.devices = [first.to(device0), second.to(device1)], (device0, device1)

    def forward(self, x):
        return self.parts[1](self.parts[0](x.to(self.devices[0])).to(self.devices[1]))


@wrong("TwoDevices", "derive the class from nn.Module")
class NoModule:
    def __init__(self, *parts):
        self.parts = parts


# 04: middle_step


@right("middle_step")
def middle_step(stage, shape):
    activation = torch.empty(shape)
    dist.recv(activation, src=0)
    output = stage(activation.requires_grad_())
    dist.send(output.detach(), dst=2)
    gradient = torch.empty(shape)
    dist.recv(gradient, src=2)
    output.backward(gradient)
    dist.send(activation.grad, dst=0)


@wrong("middle_step", "gradient of your stage's output, as it came from rank 2")
def middle_step_hands_on(stage, shape):
    activation, gradient = torch.empty(shape), torch.empty(shape)
    dist.recv(activation, src=0)
    output = stage(activation)
    dist.send(output.detach(), dst=2)
    dist.recv(gradient, src=2)
    output.backward(gradient)
    dist.send(gradient, dst=0)


@wrong("middle_step", "has to start from the gradient that rank 2 sends")
def middle_step_of_its_own_loss(stage, shape):
    activation, gradient = torch.empty(shape), torch.empty(shape)
    dist.recv(activation, src=0)
    output = stage(activation.requires_grad_())
    dist.send(output.detach(), dst=2)
    dist.recv(gradient, src=2)
    output.mean().backward()
    dist.send(activation.grad, dst=0)


@wrong("middle_step", "Rank 0 got nothing back")
def middle_step_keeps_the_gradient(stage, shape):
    activation, gradient = torch.empty(shape), torch.empty(shape)
    dist.recv(activation, src=0)
    output = stage(activation)
    dist.send(output.detach(), dst=2)
    dist.recv(gradient, src=2)
    output.backward(gradient)


@wrong("middle_step", "rank 1 did not receive 1 message")
def middle_step_ignores_rank_2(stage, shape):
    activation = torch.empty(shape)
    dist.recv(activation, src=0)
    output = stage(activation.requires_grad_())
    dist.send(output.detach(), dst=2)
    output.mean().backward()
    dist.send(activation.grad, dst=0)


@wrong("middle_step", "has to go through `stage` first")
def middle_step_passes_on(stage, shape):
    activation, gradient = torch.empty(shape), torch.empty(shape)
    dist.recv(activation, src=0)
    dist.send(activation, dst=2)
    dist.recv(gradient, src=2)
    dist.send(gradient, dst=0)


@wrong("middle_step", "did not get the output of `stage`")
def middle_step_without_receiving(stage, shape):
    gradient = torch.empty(shape)
    output = stage(torch.zeros(shape))
    dist.send(output.detach(), dst=2)
    dist.recv(gradient, src=2)
    dist.send(gradient, dst=0)


@wrong("middle_step", "must require a gradient")
def middle_step_without_requires_grad(stage, shape):
    activation, gradient = torch.empty(shape), torch.empty(shape)
    dist.recv(activation, src=0)
    output = stage(activation)
    dist.send(output.detach(), dst=2)
    dist.recv(gradient, src=2)
    output.backward(gradient)
    dist.send(activation.grad, dst=0)


@wrong("middle_step", "Rank 2 got nothing")
def middle_step_takes_only(stage, shape):
    dist.recv(torch.empty(shape), src=0)


@wrong("middle_step", "one message to each neighbour is enough")
def middle_step_twice(stage, shape):
    middle_step(stage, shape)
    dist.send(torch.zeros(shape), dst=0)


@pytest.mark.parametrize("answer", answers.parameters())
@pytest.mark.processes
def test_the_verdict_fits_the_answer(answer) -> None:
    judge(answer)


@pytest.mark.parametrize("lesson", ["start_here", "model_parallel"])
def test_every_exercise_has_right_and_wrong_answers_here(lesson) -> None:
    answers.complete(lesson)
