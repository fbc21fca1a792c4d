"""The networks that several lessons share: a classic CNN (in PyTorch and Keras) and a recurrent text classifier.

Each framework has its own file, which is imported when one of its models is first used, so that this import loads
neither framework. A lesson shows a model's code with `inspect.getsource(CNN)`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from labkit.errors.exceptions import missing

if TYPE_CHECKING:
    from labkit.teaching.models.in_keras import keras_cnn
    from labkit.teaching.models.in_torch import CNN, TextClassifier

__all__ = ["CNN", "TextClassifier", "keras_cnn"]


def __getattr__(name: str) -> Any:
    """Import a framework's file when one of its models is first used (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"labkit.models has no {name!r}; it has {', '.join(__all__)}")
    framework, extra = ("keras", "tf") if name == "keras_cnn" else ("torch", "torch")
    try:
        module = importlib.import_module(f"labkit.teaching.models.in_{framework}")
    except ModuleNotFoundError as error:
        raise missing(str(error.name), extra) from None
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
