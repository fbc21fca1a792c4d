"""In the style of tutorials on nn.DataParallel: one process, and as many replicas as there are devices."""

import torch
from torch import nn

input_size, output_size, batch_size = 5, 2, 30


class Model(nn.Module):
    def __init__(self, input_size, output_size):
        super().__init__()
        self.fc = nn.Linear(input_size, output_size)

    def forward(self, batch):
        output = self.fc(batch)
        print("\tIn Model: input size", batch.size(), "output size", output.size())
        return output


device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
model = Model(input_size, output_size)
if torch.cuda.device_count() > 1:
    print("Let's use", torch.cuda.device_count(), "GPUs!")
model = nn.DataParallel(model)
model.to(device)
for _ in range(2):
    output = model(torch.randn(batch_size, input_size).to(device))
    print("Outside: output size", output.size())
