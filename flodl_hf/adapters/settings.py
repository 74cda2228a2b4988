"""What an adapter is asked to be: rank, scale, dropout and where it goes, what it scales, how many virtual tokens.

Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from flodl.errors import ConfigError

__all__ = [
    "ALL_LINEAR",
    "BIASES",
    "IA3",
    "Lora",
    "Prefix",
    "Prompt",
    "Settings",
    "adapter_faults",
    "adapter_of",
    "adapter_words",
    "fits",
]

ALL_LINEAR = "all-linear"
MOST_RANK = 65_536
MOST_TOKENS = 4_096
KINDS = ("mlp", "lstm")
BIASES = ("none", "all", "lora_only")


@dataclass(frozen=True)
class Lora:
    """A low-rank sum beside projections (Hu et al. 2021): ``W x + scale * up(down(x))``.

    Args:
        rank: width between ``down`` and ``up``.
        alpha: the scale is ``alpha / rank``; None for a scale of 1.
        dropout: probability of dropping a value that goes into ``down`` in training, in [0, 1).
        targets: which projections: names or ends of names, ours (``query``, ``layers.3.attention.value``) or
            transformers' (``q_proj``), patterns with ``*``, or ``"all-linear"`` for all outside of the head. By
            default query and value, and the whole matrix where a family has one for query, key and value.
        rslora: the scale is ``alpha / sqrt(rank)`` (Kalajdzievski 2023).
        dora: a length for each row of the sum, learned too (Liu et al. 2024).
        ranks: other ranks by name of a projection, as ``targets`` has them.
        alphas: other alphas, likewise.
        bias: which biases of the base are trained too: "none", "all" or "lora_only" (those of the projections).
        lora_bias: give each ``up`` a bias.
        trainable_token_indices: ids whose rows of the word embeddings are trained; or ids by name of a table.

    Raises:
        ConfigError: a value that cannot be; all are listed.
    """

    rank: int = 8
    alpha: float | None = None
    dropout: float = 0.0
    targets: str | Sequence[str] = ()
    rslora: bool = False
    dora: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)
    bias: str = "none"
    lora_bias: bool = False
    trainable_token_indices: Mapping[str, Sequence[int]] | Sequence[int] = ()

    def __post_init__(self) -> None:
        problems = [f"rank {rank!r}" for rank in (self.rank, *self.ranks.values()) if not _is_rank(rank)]
        for alpha in (self.alpha, *self.alphas.values()):
            number = alpha is None or (isinstance(alpha, (int, float)) and not isinstance(alpha, bool))
            if not number or (alpha is not None and not math.isfinite(alpha)):
                problems.append(f"alpha {alpha!r}")
        if not isinstance(self.dropout, (int, float)) or not 0 <= self.dropout < 1:
            problems.append(f"dropout {self.dropout!r}")
        if not isinstance(self.targets, str) and not all(isinstance(name, str) and name for name in self.targets):
            problems.append(f"targets {self.targets!r}")
        if self.bias not in BIASES:
            problems.append(f"bias {self.bias!r}")
        if self.lora_bias and self.dora:
            problems.append("lora_bias with dora, which peft does not have")
        tokens = self.trainable_token_indices
        for ids in tokens.values() if isinstance(tokens, Mapping) else (tokens,):
            if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
                problems.append(f"trainable_token_indices {tokens!r}")
        if problems:
            raise ConfigError(
                f"Lora: found {', '.join(problems)}; expected a rank from 1 to {MOST_RANK:,}, a finite alpha, a "
                f"dropout from 0 to below 1, names of projections, a bias of {', '.join(BIASES)}, and ids from 0",
                problems=problems,
            )

    @property
    def wanted(self) -> tuple[str, ...]:
        """The targets as a tuple; empty for the usual ones."""
        return _listed(self.targets)

    @property
    def usual(self) -> tuple[str, ...]:
        """The targets where none are named."""
        return ("query", "value")

    def rank_of(self, *names: str) -> int:
        """Return the rank of a projection that has these names."""
        return next((rank for key, rank in self.ranks.items() if any(fits(key, name) for name in names)), self.rank)

    def alpha_of(self, *names: str) -> float:
        """Return the alpha of a projection that has these names."""
        own = next((a for key, a in self.alphas.items() if any(fits(key, name) for name in names)), self.alpha)
        return float(self.rank_of(*names) if own is None else own)

    def scale_of(self, *names: str) -> float:
        """Return what a projection's sum is multiplied by."""
        rank = self.rank_of(*names)
        return self.alpha_of(*names) / (math.sqrt(rank) if self.rslora else rank)


@dataclass(frozen=True)
class IA3:
    """Learned scales of what projections give, or of what goes into them (Liu et al. 2022): ``s * (W x + b)``.

    Args:
        targets: which projections, as `Lora` has them. By default key, value and the last of the feed-forward part; the
            whole matrix where a family has one for query, key and value.
        inputs: those of them whose inputs are scaled, ``W (s * x) + b``. By default the last of the feed-forward part.

    Raises:
        ConfigError: names that are none.
    """

    targets: str | Sequence[str] = ()
    inputs: str | Sequence[str] = ("feed_forward.down",)

    def __post_init__(self) -> None:
        wrong = [
            f"{name} {value!r}"
            for name, value in (("targets", self.targets), ("inputs", self.inputs))
            if not isinstance(value, str) and not all(isinstance(one, str) and one for one in value)
        ]
        if wrong:
            raise ConfigError(f"IA3: found {', '.join(wrong)}; expected names of projections", problems=wrong)

    @property
    def wanted(self) -> tuple[str, ...]:
        """The targets as a tuple; empty for the usual ones."""
        return _listed(self.targets)

    @property
    def usual(self) -> tuple[str, ...]:
        """The targets where none are named."""
        return ("key", "value", "feed_forward.down")

    def on_input(self, *names: str) -> bool:
        """Return whether what goes into a projection that has these names is scaled, rather than what it gives."""
        return any(fits(wanted, name) for wanted in _listed(self.inputs) for name in names)


@dataclass(frozen=True)
class Prompt:
    """Vectors that learn and stand before each text in the place of words (prompt tuning, Lester et al. 2021).

    Args:
        tokens: how many.
        text: whose words they begin as, repeated or cut to so many; None for words drawn from the vocabulary.
        encoder: width of a network that makes them while they are trained (P-tuning, Liu et al. 2021); files hold what
            it made. None for none.
        kind: "mlp" for a network of three layers, "lstm" for one that reads them both ways in two and has two more.

    Raises:
        ConfigError: a value that cannot be; all are listed.
    """

    tokens: int = 20
    text: str | None = None
    encoder: int | None = None
    kind: str = "mlp"

    def __post_init__(self) -> None:
        problems = [] if _is_count(self.tokens) else [f"tokens {self.tokens!r}"]
        problems += [] if self.kind in KINDS else [f"kind {self.kind!r}"]
        problems += [] if self.text is None or (isinstance(self.text, str) and self.text) else [f"text {self.text!r}"]
        problems += [] if self.encoder is None or _is_rank(self.encoder) else [f"encoder {self.encoder!r}"]
        if problems:
            raise ConfigError(
                f"Prompt: found {', '.join(problems)}; expected 1 to {MOST_TOKENS:,} tokens, a text that is not empty, "
                f"a width from 1 to {MOST_RANK:,}, and mlp or lstm",
                problems=problems,
            )


@dataclass(frozen=True)
class Prefix:
    """Keys and values that learn and stand before each text's in every layer (prefix tuning, Li and Liang 2021).

    Args:
        tokens: how many.
        encoder: width of a network of two layers that makes them while they are trained; files hold what it made. None
            for none.

    Raises:
        ConfigError: a number that cannot be.
    """

    tokens: int = 20
    encoder: int | None = None

    def __post_init__(self) -> None:
        problems = [] if _is_count(self.tokens) else [f"tokens {self.tokens!r}"]
        problems += [] if self.encoder is None or _is_rank(self.encoder) else [f"encoder {self.encoder!r}"]
        if problems:
            raise ConfigError(
                f"Prefix: found {', '.join(problems)}; expected 1 to {MOST_TOKENS:,} tokens, and a width from 1 to "
                f"{MOST_RANK:,}",
                problems=problems,
            )


Settings = Lora | IA3 | Prompt | Prefix
"""What an adapter is asked to be."""


def _listed(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_RANK


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_TOKENS


def adapter_words(adapter: Settings | None) -> dict[str, Any]:
    """Return the options of a fine-tuning run that say what an adapter is; none for None.

    Raises:
        ConfigError: it has ranks or alphas by name, or inputs of its own, which options cannot say.
    """
    if adapter is None:
        return {}
    if isinstance(adapter, Prefix):
        return {"prefix_tokens": adapter.tokens, "prefix_encoder": adapter.encoder}
    if isinstance(adapter, Prompt):
        return {
            "prompt_tokens": adapter.tokens, "prompt_text": adapter.text, "prompt_encoder": adapter.encoder,
            "prompt_encoder_kind": adapter.kind,
        }  # fmt: skip
    if isinstance(adapter, IA3):
        if adapter.inputs != IA3().inputs:
            raise ConfigError(
                "adapter: inputs of your own are no option of a run; add_adapter it to the model, and give that",
                problems=["inputs"],
            )
        return {"ia3": adapter.wanted or ("usual",)}
    if adapter.ranks or adapter.alphas:
        raise ConfigError(
            "adapter: ranks and alphas by name are no options of a run; add_adapter it to the model, and give that",
            problems=["ranks" if adapter.ranks else "alphas"],
        )
    if adapter.bias != "none" or adapter.lora_bias or adapter.trainable_token_indices:
        raise ConfigError(
            "adapter: found bias, lora_bias or trainable_token_indices; expected settings that are options of a run. "
            "Call add_adapter on the model, and pass the model to finetune.",
            problems=["bias", "lora_bias", "trainable_token_indices"],
        )
    kinds = [name for name in ("rslora", "dora") if getattr(adapter, name)]
    return {
        "lora": adapter.rank, "lora_alpha": adapter.alpha, "lora_dropout": adapter.dropout,
        "lora_targets": adapter.wanted, "lora_kinds": kinds,
    }  # fmt: skip


def adapter_of(options: Any) -> Settings | None:
    """Return the adapter that the options of a fine-tuning run ask for; None where all weights are trained."""
    if options.prompt_tokens is not None:
        return Prompt(options.prompt_tokens, options.prompt_text, options.prompt_encoder, options.prompt_encoder_kind)
    if options.prefix_tokens is not None:
        return Prefix(options.prefix_tokens, options.prefix_encoder)
    if options.ia3:
        return IA3() if tuple(options.ia3) == ("usual",) else IA3(options.ia3)
    if options.lora is None:
        return None
    return Lora(
        options.lora, options.lora_alpha, options.lora_dropout, options.lora_targets,
        rslora="rslora" in options.lora_kinds, dora="dora" in options.lora_kinds,
    )  # fmt: skip


def adapter_faults(options: Any) -> list[str]:
    """Return what is wrong with a run's options of adapters that are right by themselves."""
    problems = []
    asked = [name for name in ("lora", "ia3", "prompt_tokens", "prefix_tokens") if getattr(options, name)]
    if len(asked) > 1:
        problems.append(f"{' and '.join(asked)}: expected one of them")
    lone = [name for name in ("prompt_text", "prompt_encoder") if getattr(options, name) is not None]
    if lone and options.prompt_tokens is None:
        problems.append(f"{' and '.join(lone)}: expected prompt_tokens besides")
    if options.prefix_encoder is not None and options.prefix_tokens is None:
        problems.append("prefix_encoder: expected prefix_tokens besides")
    if options.prompt_encoder_kind != "mlp" and options.prompt_encoder is None:
        problems.append("prompt_encoder_kind: expected prompt_encoder besides")
    if options.prompt_tokens is not None and options.adaptive_layers:
        problems.append("adaptive_layers: layers' states hold those of prompt_tokens too; expected one of the two")
    if options.prompt_tokens is not None and options.neftune:
        problems.append("neftune: prompt_tokens learns embeddings of its own; expected no noise")
    return problems


def fits(wanted: str, name: str) -> bool:
    """Return whether a path is what was named: itself, its end, or by a pattern."""
    return name == wanted or name.endswith("." + wanted) or ("*" in wanted and fnmatchcase(name, wanted))
