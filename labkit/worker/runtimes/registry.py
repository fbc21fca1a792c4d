"""The runtimes by name: what a group may be asked for."""

from __future__ import annotations

from typing import Final

from labkit.worker.runtimes.base import Runtime
from labkit.worker.runtimes.tensorflow.runtime import TensorFlow
from labkit.worker.runtimes.torch import Rpc, Torch

RUNTIMES: Final[dict[str, type[Runtime]]] = {"torch": Torch, "rpc": Rpc, "tensorflow": TensorFlow, "bare": Runtime}
FRAMEWORKS: Final = tuple(dict.fromkeys(kind.package for kind in RUNTIMES.values() if kind.package))  # as pip names them
