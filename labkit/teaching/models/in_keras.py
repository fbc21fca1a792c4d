"""The shared network in Keras, for the TensorFlow lessons."""

from __future__ import annotations

import keras
from keras import layers


def keras_cnn() -> keras.Model:
    """Build the same network as `CNN` of `in_torch`, not compiled: (batch, 28, 28, 1) in, (batch, 10) scores out.

    Channels come last, the only order that TensorFlow's convolutions support on the CPU.
    """
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(20, 5, name="conv1"),
            layers.MaxPooling2D(2),
            layers.ReLU(),
            layers.Conv2D(50, 5, name="conv2"),
            layers.MaxPooling2D(2),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(500, activation="relu", name="fc1"),
            layers.Dense(10, name="fc2"),
        ],
        name="cnn",
    )
