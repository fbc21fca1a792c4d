"""The shared networks in PyTorch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class CNN(nn.Module):
    """The small convolutional network of the classic digit tutorials: 431,080 parameters.

    It follows LeNet-5 with the sizes that Caffe's MNIST example made common. Pooling comes before ReLU: for max-pooling
    the result is the same, and ReLU then touches a quarter of the values.

    Source: LeCun et al., "Gradient-based learning applied to document recognition", Proceedings of the IEEE, 1998.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, kernel_size=5)
        self.conv2 = nn.Conv2d(20, 50, kernel_size=5)
        self.fc1 = nn.Linear(800, 500)
        self.fc2 = nn.Linear(500, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Give a score for each of ten digits: (batch, 1, 28, 28) in, (batch, 10) out."""
        x = F.relu(F.max_pool2d(self.conv1(images), 2))  # (batch, 20, 12, 12)
        x = F.relu(F.max_pool2d(self.conv2(x), 2))  # (batch, 50, 4, 4)
        x = F.relu(self.fc1(x.flatten(1)))  # (batch, 500)
        scores: Tensor = self.fc2(x)
        return scores


class TextClassifier(nn.Module):
    """A recurrent classifier: word numbers → embedding → GRU → linear layer on the GRU's state after the last word.

    Args:
        words: size of the vocabulary; word 0 is the padding, and its embedding is zero.
        classes: number of classes.

    Source: Cho et al., "Learning phrase representations using RNN encoder-decoder", EMNLP 2014, for the GRU.
    """

    def __init__(self, words: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 64, padding_idx=0)
        self.gru = nn.GRU(64, 64, batch_first=True)
        self.output = nn.Linear(64, classes)

    def forward(self, words: Tensor) -> Tensor:
        """Give a score for each class: (batch, length) word numbers in, (batch, classes) out."""
        states, _ = self.gru(self.embedding(words))  # (batch, length, hidden)
        scores: Tensor = self.output(states[:, -1])
        return scores
