"""The shared networks: sizes, equality of the two frameworks, and imports that cost nothing."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import numpy as np
import pytest

import labkit.teaching.models


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.processes
def test_importing_the_models_loads_no_framework() -> None:
    code = "import sys, labkit.teaching.models; print([m for m in ('torch', 'tensorflow', 'keras') if m in sys.modules])"
    assert python(code) == "[]"


@pytest.mark.parametrize(
    ("missing", "name", "command"), [("torch", "CNN", "labkit[torch]"), ("keras", "keras_cnn", "labkit[tf]")]
)
@pytest.mark.processes
def test_a_missing_framework_is_named_with_the_command_that_installs_it(missing: str, name: str, command: str) -> None:
    code = (
        "import importlib.abc, sys\n"
        "class Gone(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {missing!r}: raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)\n"
        "sys.meta_path.insert(0, Gone())\n"
        f"try: from labkit.teaching.models import {name}\n"
        "except Exception as error: print(error)\n"
    )
    assert re.match(f'{missing} is not installed; .*: +pip install "{re.escape(command)}"', python(code))


def test_an_unknown_model_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"labkit\.models has no 'ResNet'; it has CNN, TextClassifier, keras_cnn"):
        _ = labkit.teaching.models.ResNet
    assert dir(labkit.teaching.models) == ["CNN", "TextClassifier", "keras_cnn"]


def test_the_cnn_has_the_sizes_of_the_classic_tutorial() -> None:
    import torch

    cnn = labkit.teaching.models.CNN()
    sizes = {name: p.numel() for name, p in cnn.named_parameters()}
    assert sizes == {
        "conv1.weight": 500, "conv1.bias": 20, "conv2.weight": 25_000, "conv2.bias": 50,
        "fc1.weight": 400_000, "fc1.bias": 500, "fc2.weight": 5_000, "fc2.bias": 10,
    }  # fmt: skip
    assert sum(sizes.values()) == 431_080
    assert cnn(torch.zeros(3, 1, 28, 28)).shape == (3, 10)


def test_pooling_before_relu_equals_relu_before_pooling() -> None:
    import torch
    import torch.nn.functional as F

    cnn, images = labkit.teaching.models.CNN(), torch.randn(4, 1, 28, 28)
    x = F.max_pool2d(F.relu(cnn.conv1(images)), 2)
    x = F.max_pool2d(F.relu(cnn.conv2(x)), 2)
    expected = cnn.fc2(F.relu(cnn.fc1(x.flatten(1))))
    assert torch.equal(cnn(images), expected)


def test_a_lesson_can_show_the_code() -> None:
    assert inspect.getsource(labkit.teaching.models.CNN).startswith("class CNN(nn.Module):")
    assert inspect.getsource(labkit.teaching.models.TextClassifier).startswith("class TextClassifier(nn.Module):")


def test_the_text_classifier_uses_every_word_and_ignores_the_padding() -> None:
    import torch

    torch.manual_seed(0)
    model = labkit.teaching.models.TextClassifier(words=10, classes=4)
    sentence = torch.tensor([[0, 0, 3, 4, 5]])
    scores = model(sentence)
    assert scores.shape == (1, 4)
    for at in (2, 3, 4):
        other = sentence.clone()
        other[0, at] = 7
        assert not torch.allclose(model(other), scores), f"word {at} makes no difference"
    scores.sum().backward()
    touched = model.embedding.weight.grad.abs().sum(1) > 0
    assert touched.tolist() == [False, False, False, True, True, True, False, False, False, False]


@pytest.mark.tf
@pytest.mark.slow
@pytest.mark.processes
def test_the_keras_network_computes_the_same_as_the_pytorch_one() -> None:
    """In a process of its own: the tests' process runs no TensorFlow, as the notebook's kernel does not."""
    pytest.importorskip("tensorflow")
    code = """
import numpy as np, torch
from labkit.teaching.models import CNN, keras_cnn
cnn, model = CNN(), keras_cnn()
own = {name: p.detach().numpy() for name, p in cnn.named_parameters()}
for name in ("conv1", "conv2"):
    model.get_layer(name).set_weights([own[f"{name}.weight"].transpose(2, 3, 1, 0), own[f"{name}.bias"]])
by_channel = own["fc1.weight"].reshape(500, 50, 4, 4)  # PyTorch flattens channel by channel, Keras pixel by pixel
model.get_layer("fc1").set_weights([by_channel.transpose(2, 3, 1, 0).reshape(800, 500), own["fc1.bias"]])
model.get_layer("fc2").set_weights([own["fc2.weight"].T, own["fc2.bias"]])
images = np.random.RandomState(0).randn(8, 28, 28).astype(np.float32)
expected = cnn(torch.from_numpy(images[:, None])).detach().numpy()
print(model.count_params(), np.abs(model(images[..., None]).numpy() - expected).max())
"""
    parameters, difference = python(code).split()
    assert int(parameters) == 431_080
    assert np.float32(difference) < 1e-5
