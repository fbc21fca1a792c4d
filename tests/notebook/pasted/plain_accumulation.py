"""In the style of tutorials on gradient accumulation: four micro-batches for each step, without synchronization but in
the last."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ACCUMULATION_STEPS = 4


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [(torch.randn(48, 512), torch.randn(48, 512)) for _ in range(8 * ACCUMULATION_STEPS)]
    for i, (inputs, targets) in enumerate(batches):
        last = (i + 1) % ACCUMULATION_STEPS == 0
        with contextlib.nullcontext() if last else model.no_sync():
            loss = nn.functional.mse_loss(model(inputs), targets) / ACCUMULATION_STEPS
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    print(f"the loss is a number: {loss.item() < 100}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
