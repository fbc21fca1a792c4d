"""In the style of FSDP2's examples, for torchrun: transformer blocks that are sharded one by one."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True) for _ in range(3)]
    model = nn.Sequential(*blocks)
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(8, 32, 256)
    for _ in range(16):
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(f"the loss is a number: {loss.item() < 100}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
