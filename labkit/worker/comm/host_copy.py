"""The copy of a GPU tensor in the host's memory, through which gloo sends and receives messages.

gloo copies the GPU tensors of collectives to the host and back by itself, those of messages not: it passes a GPU's
address to the operating system, which answers "Bad address"; a small message even ends the process.
"""

from __future__ import annotations

import torch


class HostCopy:
    """The copy of one message. Both directions block the calling thread, and wait for earlier work of the GPU.

    The student's thread issues a message, and any thread may complete it. So the copies are on a stream of their own,
    which begins where the student's stream is when the message is issued. `host` is the copy in pinned memory.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.host = pinned_like(tensor)
        self._tensor = tensor
        self._stream = torch.cuda.Stream(tensor.device)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))

    def from_gpu(self) -> None:
        """Fill the copy once the GPU has computed the tensor."""
        self._copy(self._tensor, self.host)

    def to_gpu(self) -> None:
        """Fill the tensor once the GPU's earlier work no longer reads it."""
        self._copy(self.host, self._tensor)

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        # Like gloo on a CPU, unseen by autograd: the tensor may be a leaf that requires a gradient.
        # `device`: a thread that works on GPU 0 otherwise, and returns to it, would open a context there.
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream), torch.inference_mode():
            target.data.copy_(source)


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same layout in pinned memory, so that gloo still rejects one that is not contiguous."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu", pin_memory=True)
