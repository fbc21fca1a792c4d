"""`Transformer`: the shape of a decoder-only transformer, and the shapes of published ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final

from labkit.errors.lists import listed
from labkit.errors.wrong_calls import check_number, public_class

STYLES: Final = ("gpt", "llama")
ATTENTIONS: Final = ("flash", "math")
SIZES: Final = ("layers", "width", "sequence", "vocabulary", "heads", "kv_heads", "mlp_width", "experts", "active_experts")


@public_class
@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """A decoder-only transformer: `lab.Transformer(layers=32, width=4096, sequence=8192, vocabulary=128256)`.

    Args:
        layers: l, the number of layers.
        width: h, the size of a token's vector.
        sequence: s, the tokens of a sequence.
        vocabulary: V, the number of different tokens.
        heads: the number of attention heads, among which tensor parallelism divides a layer; default: width / 64, or 1.
        kv_heads: the number of heads of keys and values; default: `heads`.
        mlp_width: the width between the products of the MLP; default: 4·h.
        style: "gpt" (GELU, LayerNorm, biases, learned positions, output tied to the embedding) or "llama" (SwiGLU,
            RMSNorm, no biases, rotary positions, an output of its own).
        tied: whether the output shares its weights with the embedding; default: that of the style.
        attention: "flash", which keeps no s×s matrix, or "math", which does.
        dropout: whether layers use dropout, whose masks and results are kept for the backward pass.
        experts: the number of MLPs in a layer, among which a router chooses.
        active_experts: how many of them compute a token.

    `parameters` is their number.

    Predefined, with the sequences of their training, are `gpt2`, `gpt2_xl`, `gpt_neox_20b`, `llama2_7b`, `llama2_13b`,
    `llama2_70b`, `llama3_8b`, `llama3_70b`, `llama3_405b`, `mistral_7b`, `mixtral_8x7b`, `qwen2_5_7b`.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: it is out of range.
    """

    layers: int
    width: int
    sequence: int
    vocabulary: int
    heads: int | None = None
    kv_heads: int | None = None
    mlp_width: int | None = None
    style: str = "gpt"
    tied: bool | None = None
    attention: str = "flash"
    dropout: bool = False
    experts: int = 1
    active_experts: int = 1

    gpt2: ClassVar[Transformer]
    gpt2_xl: ClassVar[Transformer]
    gpt_neox_20b: ClassVar[Transformer]
    llama2_7b: ClassVar[Transformer]
    llama2_13b: ClassVar[Transformer]
    llama2_70b: ClassVar[Transformer]
    llama3_8b: ClassVar[Transformer]
    llama3_70b: ClassVar[Transformer]
    llama3_405b: ClassVar[Transformer]
    mistral_7b: ClassVar[Transformer]
    mixtral_8x7b: ClassVar[Transformer]
    qwen2_5_7b: ClassVar[Transformer]

    def __post_init__(self) -> None:
        for name, known in (("style", STYLES), ("attention", ATTENTIONS)):
            if getattr(self, name) not in known:
                raise ValueError(f"Transformer({name}={getattr(self, name)!r}): expected {listed(map(repr, known), word='or')}")
        for name in ("tied", "dropout"):
            if getattr(self, name) not in (None, True, False):
                raise TypeError(f"Transformer({name}={getattr(self, name)!r}): expected True or False")
        for name in SIZES:
            value = getattr(self, name)
            if value is not None:
                expected = f"Transformer({name}={value!r}): expected a whole number from 1 to 10⁷"
                check_number(value, expected, whole=True, at_least=1, below=10**7 + 1)
                object.__setattr__(self, name, int(value))  # numpy's whole numbers may overflow
        if self.width % self.all_heads:
            raise ValueError(f"Transformer(heads={self.heads}): expected a divisor of the width, {self.width}")
        if self.style == "llama" and self.width // self.all_heads % 2:
            raise ValueError(f"Transformer(heads={self.heads}): expected heads of an even size, for rotary positions")
        if self.all_heads % self.key_heads:
            raise ValueError(f"Transformer(kv_heads={self.kv_heads}): expected a divisor of the {self.all_heads} heads")
        if self.active_experts > self.experts:
            raise ValueError(f"Transformer(active_experts={self.active_experts}): there are {self.experts} experts")

    @property
    def all_heads(self) -> int:
        """The number of attention heads."""
        return self.heads or (self.width // 64 if self.width % 64 == 0 else 1)

    @property
    def key_heads(self) -> int:
        """The number of heads of keys and values."""
        return self.kv_heads or self.all_heads

    @property
    def inner_width(self) -> int:
        """The width between the products of the MLP."""
        return self.mlp_width or 4 * self.width

    @property
    def shares_output(self) -> bool:
        """Whether the output shares its weights with the embedding."""
        return self.style == "gpt" if self.tied is None else self.tied

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return self._parameters_with(self.experts)

    def _parameters_with(self, experts: int) -> int:
        """Their number if each layer has so many experts."""
        h, gpt = self.width, self.style == "gpt"
        of_key = h * self.key_heads // self.all_heads
        attention = 2 * h * h + 2 * h * of_key + gpt * (2 * h + 2 * of_key)
        of_expert = (2 if gpt else 3) * h * self.inner_width + gpt * (h + self.inner_width)
        norm = (2 if gpt else 1) * h
        layer = attention + experts * of_expert + (self.experts > 1) * h * self.experts + 2 * norm
        return self.layers * layer + norm + self.embedding_parameters + (not self.shares_output) * self.vocabulary * h

    @property
    def embedding_parameters(self) -> int:
        """Those of the embedding and of learned positions."""
        return (self.vocabulary + (self.sequence if self.style == "gpt" else 0)) * self.width

    @property
    def active_parameters(self) -> int:
        """Those that compute a token: `parameters` without the experts that the router does not choose."""
        return self._parameters_with(self.active_experts)

    def lora_parameters(self, rank: int) -> int:
        """Return the number of parameters of LoRA's adapters beside all linear layers, the experts' excepted."""
        h, of_key = self.width, self.width * self.key_heads // self.all_heads
        of_mlp = (2 if self.style == "gpt" else 3) * (h + self.inner_width) if self.experts == 1 else 0
        return self.layers * rank * (2 * 2 * h + 2 * (h + of_key) + of_mlp)


def _named(name: str, layers: int, width: int, heads: int, sequence: int, vocabulary: int, **others: Any) -> None:
    shape: dict[str, Any] = {"layers": layers, "width": width, "heads": heads, "sequence": sequence, "vocabulary": vocabulary}
    setattr(Transformer, name, Transformer(**shape, **others))


# The shapes of their configuration files.
_named("gpt2", 12, 768, 12, 1024, 50257)
_named("gpt2_xl", 48, 1600, 25, 1024, 50257)
_named("gpt_neox_20b", 44, 6144, 64, 2048, 50432, tied=False)
_named("llama2_7b", 32, 4096, 32, 4096, 32000, style="llama", mlp_width=11008)
_named("llama2_13b", 40, 5120, 40, 4096, 32000, style="llama", mlp_width=13824)
_named("llama2_70b", 80, 8192, 64, 4096, 32000, style="llama", mlp_width=28672, kv_heads=8)
_named("llama3_8b", 32, 4096, 32, 8192, 128256, style="llama", mlp_width=14336, kv_heads=8)
_named("llama3_70b", 80, 8192, 64, 8192, 128256, style="llama", mlp_width=28672, kv_heads=8)
_named("llama3_405b", 126, 16384, 128, 8192, 128256, style="llama", mlp_width=53248, kv_heads=8)
_named("mistral_7b", 32, 4096, 32, 8192, 32000, style="llama", mlp_width=14336, kv_heads=8)
_named("mixtral_8x7b", 32, 4096, 32, 8192, 32000, style="llama", mlp_width=14336, kv_heads=8, experts=8, active_experts=2)
_named("qwen2_5_7b", 28, 3584, 28, 4096, 152064, style="llama", mlp_width=18944, kv_heads=4)
