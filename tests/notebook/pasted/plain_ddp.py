"""In the style of DistributedDataParallel's tutorials, for torchrun: a loader, a loop, nothing of labkit."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(2048, 512), torch.randint(10, (2048,)))
    loader = DataLoader(dataset, batch_size=64, sampler=DistributedSampler(dataset))
    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(512, 10)), bucket_cap_mb=2)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
    print(f"last loss below 3: {loss.item() < 3}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
