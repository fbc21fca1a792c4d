"""Data sets for the lessons, without a download: handwritten digits, and sentences of Python's manual."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.errors.exceptions import missing

__all__ = ["TOPICS", "Examples", "Vocabulary", "digits", "sentences"]

# Of 1,797 digits: the largest multiple of 512, so that 2, 3, 4, 6 or 8 ranks with batches of 2^k get equal shares.
TRAIN_DIGITS = 1536
TRAIN_SENTENCES, TEST_SENTENCES = 1024, 128
SEED = 0  # of the order in which examples are divided
WORDS = 1024  # size of the vocabulary: the words that occur at least twice; half of all different words occur once
LENGTH = 24  # words; longer sentences, one in five, are truncated


class Examples(NamedTuple):
    """Inputs and their labels, to be unpacked (`images, labels = train`) or passed on (`TensorDataset(*train)`)."""

    inputs: Any
    labels: Any


def digits(framework: str = "torch") -> tuple[Examples, Examples]:
    """Load handwritten digits, enlarged to 28×28, mean 0 and standard deviation 1: 1,536 for training, 261 for testing.

    The split is the same on every machine.

    Args:
        framework: "torch" returns tensors: images (n, 1, 28, 28) float32 and labels (n,) int64. "tensorflow" returns
            NumPy arrays, as tf.data and Keras take them: images (n, 28, 28, 1) and labels (n,) of the same dtypes.

    Returns:
        the training examples and the test examples.

    Raises:
        ValueError: the framework is unknown.
        LabError: scikit-learn is not installed.

    Source: Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998;
    8×8 images, as scikit-learn ships them.
    """
    if framework not in ("torch", "tensorflow"):
        raise ValueError(f"digits({framework!r}): expected 'torch' or 'tensorflow'")
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise missing("scikit-learn", "hosted") from None
    small, labels = load_digits(return_X_y=True)
    images = _enlarge(small.reshape(-1, 8, 8), 28)
    order = np.random.RandomState(SEED).permutation(len(images))  # RandomState's numbers are guaranteed not to change
    images, labels = images[order], labels[order].astype(np.int64)
    images = (images - images[:TRAIN_DIGITS].mean()) / images[:TRAIN_DIGITS].std()
    images = np.expand_dims(images.astype(np.float32), 1 if framework == "torch" else 3)
    return _split(images, labels, TRAIN_DIGITS, framework)


def _enlarge(images: NDArray[Any], size: int) -> NDArray[Any]:
    """Interpolate square images bilinearly: (n, k, k) → (n, size, size). Pixel centres keep their positions."""
    old = images.shape[-1]
    centres = np.clip((np.arange(size) + 0.5) * old / size - 0.5, 0, old - 1)
    weights = np.maximum(0, 1 - np.abs(centres[:, None] - np.arange(old)))  # (size, old): each row adds up to 1
    enlarged: NDArray[Any] = weights @ images @ weights.T
    return enlarged


# Chapters of the manual that `help("...")` shows, by topic, with the names that Python's module pydoc_data gives them.
_CHAPTERS = {
    "statements": ("compound", "assignment", "import", "augassign", "raise", "global", "del", "assert"),
    "objects": ("specialnames", "types", "objects", "customization", "attribute-access"),
    "strings": ("string-methods", "formatstrings", "strings"),
    "containers": ("typesseq", "typesmapping", "subscriptions", "slicings", "dict", "lists", "comparisons", "exprlists"),
}
TOPICS = tuple(_CHAPTERS)  # the meanings of the labels of `sentences`


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary of a text classifier; converts sentences to word numbers and back.

    Args:
        words: the words by number; 0 is the padding, and 1 stands for all unknown words.
        length: the number of words to which sentences are truncated or padded.
    """

    words: tuple[str, ...]
    length: int = LENGTH

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, texts: Iterable[str]) -> NDArray[np.int64]:
        """Convert sentences to word numbers, shape (n, length).

        The padding comes first, so that the last word is the last input of a recurrent network.

        Raises:
            TypeError: `texts` is a single string.
        """
        if isinstance(texts, str):
            raise TypeError(f"encode({texts!r}): expected several sentences; encode([sentence]) takes one")
        numbers = {word: i for i, word in enumerate(self.words)}
        rows = [[numbers.get(word, 1) for word in _words(text)][: self.length] for text in texts]
        return np.array([[0] * (self.length - len(row)) + row for row in rows], np.int64).reshape(-1, self.length)

    def decode(self, numbers: Iterable[int]) -> str:
        """Convert the numbers of one sentence to words, without the padding."""
        return " ".join(self.words[i] for i in numbers if i != 0)


def sentences() -> tuple[Examples, Examples, Vocabulary]:
    """Load sentences of the manual that comes with Python (`help("with")` shows a chapter), to be classified by topic.

    Each of the four `TOPICS` has 256 training sentences and 32 test sentences. The texts differ slightly between
    versions of Python; the counts and shapes do not.

    Returns:
        the training examples, the test examples (words (n, 24) int64 and labels (n,) int64), and the vocabulary:
        padding, "unknown" and the 1,022 most frequent words.

    Raises:
        LookupError: the manual of this Python has too few sentences on a topic.
    """
    texts, labels = _manual((TRAIN_SENTENCES + TEST_SENTENCES) // len(TOPICS))
    counts = Counter(word for text in texts[:TRAIN_SENTENCES] for word in _words(text))
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[: WORDS - 2]
    vocabulary = Vocabulary(("<pad>", "<unknown>", *frequent))
    return *_split(vocabulary.encode(texts), labels, TRAIN_SENTENCES, "torch"), vocabulary


def _manual(per_topic: int) -> tuple[list[str], NDArray[np.int64]]:
    """Return sentences and their topics, shuffled so that the first 4k sentences have k of each topic, for every k."""
    from pydoc_data.topics import topics  # half a megabyte, imported only when needed

    found = {topic: [s for c in chapters for s in _sentences(topics.get(c, ""))] for topic, chapters in _CHAPTERS.items()}
    owners = Counter(s for texts in found.values() for s in set(texts))
    random = np.random.RandomState(SEED)
    columns = []
    for topic, every in found.items():
        own = [s for s in dict.fromkeys(every) if owners[s] == 1]  # chapters quote one another: skip ambiguous sentences
        if len(own) < per_topic:
            raise LookupError(f"the manual of this Python has {len(own)} sentences on {topic}; {per_topic} are needed")
        columns.append([own[i] for i in random.permutation(len(own))[:per_topic]])
    texts, labels = [], []
    for row in zip(*columns, strict=True):
        for topic_number in random.permutation(len(TOPICS)):
            texts.append(row[topic_number])
            labels.append(topic_number)
    return texts, np.array(labels, np.int64)


def _sentences(chapter: str) -> list[str]:
    """Return the sentences of a chapter that have 5 to 60 words, without code and headings."""
    paragraphs = (" ".join(p.replace("|", " ").split()) for p in re.split(r"\n\s*\n", chapter))
    parts = (s for p in paragraphs for s in re.split(r"(?<=[.!?])\s+(?=[A-Z\"])", p))
    return [s for s in parts if re.match(r"[A-Z\"].*[.:!?]$", s) and ">>>" not in s and 5 <= len(_words(s)) <= 60]


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z_]+", text.lower())


def _split(inputs: NDArray[Any], labels: NDArray[Any], train: int, framework: str) -> tuple[Examples, Examples]:
    parts = Examples(inputs[:train], labels[:train]), Examples(inputs[train:], labels[train:])
    if framework == "tensorflow":
        return parts
    import torch

    first, second = (Examples(*(torch.from_numpy(np.ascontiguousarray(a)) for a in part)) for part in parts)
    return first, second
