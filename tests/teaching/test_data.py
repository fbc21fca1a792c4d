"""The lessons' data: shapes, balance, the same numbers every time, and something to learn."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from labkit.errors.exceptions import LabError
from labkit.teaching import data
from labkit.teaching.data import TOPICS, Vocabulary, digits, sentences


def test_digits_have_the_promised_shapes_and_types() -> None:
    import torch

    train, test = digits()
    assert train.inputs.shape == (1536, 1, 28, 28)
    assert test.inputs.shape == (261, 1, 28, 28)
    assert (train.inputs.dtype, train.labels.dtype) == (torch.float32, torch.int64)
    assert (train.labels.shape, test.labels.shape) == ((1536,), (261,))
    images, labels = digits("tensorflow")[0]
    assert (images.shape, images.dtype, labels.dtype) == ((1536, 28, 28, 1), np.float32, np.int64)
    assert np.array_equal(images[..., 0], train.inputs[:, 0].numpy())
    assert np.array_equal(labels, train.labels.numpy())


def test_digits_are_normalised_and_both_parts_have_all_ten() -> None:
    train, test = digits()
    assert abs(train.inputs.mean()) < 1e-6
    assert abs(train.inputs.std() - 1) < 1e-5
    assert set(train.labels.tolist()) == set(test.labels.tolist()) == set(range(10))


def test_the_split_of_the_digits_is_always_the_same() -> None:
    one, same = digits()[1], digits()[1]
    assert one.inputs.equal(same.inputs)
    assert one.labels.equal(same.labels)
    assert one.labels[:12].tolist() == [
        9,
        9,
        7,
        2,
        3,
        3,
        3,
        7,
        2,
        7,
        8,
        1,
    ]  # RandomState guarantees the same numbers in all versions


def test_no_digit_is_in_both_parts() -> None:
    train, test = digits("tensorflow")
    both = np.concatenate([train.inputs, test.inputs]).reshape(1797, -1)
    assert len(np.unique(both, axis=0)) == len(np.unique(train.inputs.reshape(1536, -1), axis=0)) + len(
        np.unique(test.inputs.reshape(261, -1), axis=0)
    )


def test_enlarging_keeps_flat_pictures_flat_and_ramps_straight() -> None:
    flat = data._enlarge(np.full((1, 8, 8), 3.0), 28)
    assert flat.shape == (1, 28, 28)
    assert np.allclose(flat, 3.0)
    ramp = data._enlarge(np.broadcast_to(np.arange(8.0), (1, 8, 8)), 28)[0, 0]
    inner = ramp[2:-2]  # beyond the outermost centres the border's value continues
    assert np.allclose(np.diff(inner), 8 / 28)
    assert (ramp[0], ramp[-1]) == (0.0, 7.0)


@pytest.mark.slow
def test_the_cnn_learns_the_digits() -> None:
    import torch
    import torch.nn.functional as F

    from labkit.teaching.models import CNN

    train, test = digits()
    torch.manual_seed(0)
    model = CNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for images, labels in zip(train.inputs.split(64), train.labels.split(64), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    assert (model(test.inputs).argmax(1) == test.labels).float().mean() > 0.6  # one epoch; guessing gives 0.1


def test_sentences_are_balanced_and_have_the_promised_shapes() -> None:
    import torch

    train, test, vocabulary = sentences()
    assert (train.inputs.shape, test.inputs.shape) == ((1024, 24), (128, 24))
    assert (train.inputs.dtype, train.labels.dtype) == (torch.int64, torch.int64)
    assert torch.bincount(train.labels).tolist() == [256] * 4
    assert torch.bincount(test.labels).tolist() == [32] * 4
    assert len(vocabulary) == 1024
    assert int(train.inputs.max()) == 1023
    assert len(TOPICS) == 4


def test_sentences_are_always_the_same() -> None:
    one, same = sentences()[0], sentences()[0]
    assert np.array_equal(one.inputs, same.inputs)
    assert np.array_equal(one.labels, same.labels)


def test_any_prefix_of_the_sentences_has_equally_many_of_each_topic() -> None:
    labels = sentences()[0].labels
    assert np.bincount(labels[:64]).tolist() == [16] * 4


def test_no_sentence_is_drawn_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_CHAPTERS", {"one": ("a", "b"), "two": ("c",)})
    monkeypatch.setattr(data, "TOPICS", ("one", "two"))
    chapters = {
        "a": "Only a has this sentence.  Both of a and b say so.",
        "b": "Both of a and b say so.",
        "c": "Only c has this sentence.",
    }
    monkeypatch.setattr("pydoc_data.topics.topics", chapters)
    texts, labels = data._manual(1)
    assert len(set(texts)) == 2
    with pytest.raises(LookupError, match="2 sentences on one; 3 are needed"):
        data._manual(3)
    monkeypatch.setitem(chapters, "c", "Only a has this sentence.  Only c has this sentence.")
    assert set(data._manual(1)[0]) == {"Both of a and b say so.", "Only c has this sentence."}
    assert sorted(labels) == [0, 1]


def test_sentences_are_prose() -> None:
    chapter = (
        "A Heading\n*********\n\nIt is a rule. Code follows it\n   here: >>> x = print(1 + 1).\n\nToo short.\n\n"
        '   "yield" gives a value\n   back to its caller.\n'
    )
    assert data._sentences(chapter) == ['"yield" gives a value back to its caller.']


def test_the_vocabulary_pads_in_front_and_marks_unknown_words() -> None:
    vocabulary = Vocabulary(("<pad>", "<unknown>", "the", "loop", "ends"), length=4)
    numbers = vocabulary.encode(["The loop ends.", "the the the the loop", "A loop!"])
    assert numbers.tolist() == [[0, 2, 3, 4], [2, 2, 2, 2], [0, 0, 1, 3]]
    assert vocabulary.decode(numbers[0]) == "the loop ends"
    assert vocabulary.encode([]).shape == (0, 4)
    with pytest.raises(TypeError, match=r"expected several sentences; encode\(\[sentence\]\) takes one"):
        vocabulary.encode("The loop ends.")


@pytest.mark.slow
def test_the_text_classifier_learns_the_topics() -> None:
    import torch
    import torch.nn.functional as F

    from labkit.teaching.models import TextClassifier

    train, test, vocabulary = sentences()
    torch.manual_seed(0)
    model = TextClassifier(len(vocabulary), len(TOPICS))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(3):
        for words, topics in zip(train.inputs.split(64), train.labels.split(64), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(words), topics).backward()
            optimizer.step()
    assert (model(test.inputs).argmax(1) == test.labels).float().mean() > 0.45  # guessing gives 0.25


def test_a_manual_with_too_few_sentences_is_reported() -> None:
    with pytest.raises(LookupError, match=r"the manual of this Python has \d+ sentences on strings; 10000 are needed|statements"):
        data._manual(10_000)


def test_an_unknown_framework_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"digits\('jax'\): expected 'torch' or 'tensorflow'"):
        digits("jax")


def test_without_scikit_learn_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [m for m in sys.modules if m.split(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(LabError, match=r'scikit-learn is not installed; .*  pip install "labkit\[hosted\]"'):
        digits()
