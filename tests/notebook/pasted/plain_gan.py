"""In the style of tutorials on adversarial networks: two models and two optimizers, both under DDP."""

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817  # as tutorials call it


def network(inputs, outputs):
    return nn.Sequential(
        nn.Linear(inputs, 512), nn.LeakyReLU(0.2), nn.Linear(512, 512), nn.LeakyReLU(0.2), nn.Linear(512, outputs)
    )


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    net_g, net_d = DDP(network(64, 784)), DDP(network(784, 1))
    optimizer_g, optimizer_d = optim.Adam(net_g.parameters(), lr=2e-4), optim.Adam(net_d.parameters(), lr=2e-4)
    criterion = nn.BCEWithLogitsLoss()
    real_label, fake_label = torch.ones(64, 1), torch.zeros(64, 1)
    for _ in range(12):
        real, noise = torch.randn(64, 784), torch.randn(64, 64)
        net_d.zero_grad()
        fake = net_g(noise)
        error_d = criterion(net_d(torch.cat([real, fake.detach()])), torch.cat([real_label, fake_label]))
        error_d.backward()
        optimizer_d.step()
        net_g.zero_grad()
        error_g = criterion(net_d(fake), real_label)
        error_g.backward()
        optimizer_g.step()
    print(f"both learn: {error_d.item() < 2 and error_g.item() < 5}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
