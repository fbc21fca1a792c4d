"""In the style of scripts for torchrun: all settings come from the environment, and `main` runs at the end."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, loader):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        self.loader = loader
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train(self, max_epochs):
        for epoch in range(max_epochs):
            self.loader.sampler.set_epoch(epoch)
            for source, targets in self.loader:
                self.optimizer.zero_grad()
                nn.functional.mse_loss(self.model(source), targets).backward()
                self.optimizer.step()
            print(f"[{self.global_rank}] Epoch {epoch} | Steps {len(self.loader)}")


def main():
    dist.init_process_group(backend=None)
    world_size = int(os.environ["WORLD_SIZE"])
    dataset = TensorDataset(torch.rand(32, 4), torch.rand(32, 1))
    loader = DataLoader(dataset, batch_size=8, shuffle=False, sampler=DistributedSampler(dataset))
    Trainer(nn.Linear(4, 1), loader).train(2)
    assert world_size == dist.get_world_size()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
