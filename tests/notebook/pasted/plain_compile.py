"""In the style of scripts that compile a model and train it with DistributedDataParallel."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.compile(DistributedDataParallel(nn.Sequential(*(Block(256) for _ in range(3)))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(128, 256), torch.randn(128, 256)
    for _ in range(12):
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
    print(f"the loss is a number: {loss.item() < 100}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
