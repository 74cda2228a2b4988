"""Settings of an adapter: rank, scale, dropout and targets, scaled activations, number of virtual tokens.

Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any, TypeVar

from flodl.errors import ConfigError
from flodl_hf.checkpoints.keywords import KeywordAlias, accept_keywords

ALL_LINEAR = "all-linear"
MOST_RANK = 65_536
MOST_TOKENS = 4_096
KINDS = ("mlp", "lstm")
BIASES = ("none", "all", "lora_only")
PEFT_ALPHA = 8
"""The alpha of peft's ``LoraConfig`` where none is given."""
K = TypeVar("K", bound=type)


def _modules(value: Any, _: Any) -> Any:
    if value is None:
        return ()
    if isinstance(value, str) and value != ALL_LINEAR and not value.replace("_", "").replace(".", "").isalnum():
        raise ValueError("a regular expression; expected names, patterns with *, or 'all-linear'")
    return value if isinstance(value, str) else tuple(value)


def _kind(value: Any, _: Any) -> str:
    return str(getattr(value, "value", value)).lower()


_COMMON = {
    **{
        name: KeywordAlias(harmless=None)
        for name in ("task_type", "peft_type", "auto_mapping", "base_model_name_or_path")
    },
    "inference_mode": KeywordAlias(reason="freeze the adapter after loading instead"),
    "modules_to_save": KeywordAlias(
        reason="the head is trained and saved with every adapter, and no other module is",
        harmless=(None, [], *([name] for name in ("classifier", "score", "qa_outputs", "head"))),
    ),
}
_PLACES = {
    **_COMMON,
    "target_modules": KeywordAlias("targets", _modules),
    "exclude_modules": KeywordAlias(reason="name the projections in target_modules"),
    "layers_to_transform": KeywordAlias(reason="name the layers in target_modules: layers.3.attention.query"),
    "layers_pattern": KeywordAlias(reason="name the layers in target_modules: layers.3.attention.query"),
    "fan_in_fan_out": KeywordAlias(reason="weights are (out, in) in every family"),
}
LORA = {
    **_PLACES,
    "r": KeywordAlias("rank"),
    "lora_alpha": KeywordAlias("alpha"),
    "lora_dropout": KeywordAlias("dropout"),
    "use_rslora": KeywordAlias("rslora"),
    "use_dora": KeywordAlias("dora"),
    "rank_pattern": KeywordAlias("ranks", lambda value, _: value or {}),
    "alpha_pattern": KeywordAlias("alphas", lambda value, _: value or {}),
    "init_lora_weights": KeywordAlias(reason="down is drawn and up is zero, as with True", harmless=(None, True)),
}
IA3_WORDS = {
    **_PLACES,
    "feedforward_modules": KeywordAlias("inputs", _modules),
    "init_ia3_weights": KeywordAlias(reason="scales begin as 1, as with True", harmless=(None, True)),
}
_TOKENS = {**_COMMON, "num_virtual_tokens": KeywordAlias("tokens"), "encoder_hidden_size": KeywordAlias("encoder")}
PROMPT = {
    **_TOKENS,
    "prompt_tuning_init_text": KeywordAlias("text"),
    "prompt_tuning_init": KeywordAlias(harmless=None),  # the text decides
    "tokenizer_name_or_path": KeywordAlias(harmless=None),  # the tokenizer of the model
    "encoder_reparameterization_type": KeywordAlias("kind", _kind),
    "encoder_num_layers": KeywordAlias(reason="the network has the layers of peft's default", harmless=(None, 2)),
    "encoder_dropout": KeywordAlias(reason="the network has no dropout", harmless=(None, 0.0)),
}
PREFIX = {
    **_TOKENS,
    "prefix_projection": KeywordAlias(
        reason="encoder= is the width of a network that makes the prefixes", harmless=None
    ),
}


def _ordered(value: Any) -> Any:
    """Return a set as a sorted tuple, also inside of a mapping; another value as it is."""
    # The order of a set differs from process to process, and with it the identity of a run.
    if isinstance(value, (set, frozenset)):
        return tuple(sorted(value, key=str))
    return {name: _ordered(inner) for name, inner in value.items()} if isinstance(value, Mapping) else value


def _check(settings: Any, expected: str, **valid: bool) -> None:
    """Raise for settings that are not valid, all at once.

    Raises:
        ConfigError: a value of ``valid`` is false.
    """
    problems = [f"{name} {getattr(settings, name)!r}" for name, good in valid.items() if not good]
    if problems:
        kind = type(settings).__name__
        raise ConfigError(f"{kind}: found {', '.join(problems)}; expected {expected}", problems=problems)


def _is_count(value: object, most: int = MOST_RANK) -> bool:
    return type(value) is int and 1 <= value <= most


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _are_names(value: str | Sequence[str]) -> bool:
    return isinstance(value, str) or all(isinstance(name, str) and name for name in value)


def _with_words(words: Mapping[str, KeywordAlias]) -> Callable[[K], K]:
    """Return a decorator for settings that take the arguments of peft's configuration too."""

    def decorate(kind: K) -> K:
        made: Any = kind.__init__
        made.__name__ = kind.__name__
        translated = accept_keywords(words, ConfigError)(made)

        @wraps(made)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            args, kwargs = tuple(map(_ordered, args)), _ordered(kwargs)
            if "r" in kwargs and not {"alpha", "lora_alpha"} & kwargs.keys():
                kwargs["lora_alpha"] = PEFT_ALPHA
            translated(self, *args, **kwargs)

        kind.__init__ = init  # type: ignore[misc]
        return kind

    return decorate


@_with_words(LORA)
@dataclass(frozen=True)
class Lora:
    """A low-rank sum added to projections (Hu et al. 2021): ``W x + scale * up(down(x))``.

    Args:
        rank: width between ``down`` and ``up``.
        alpha: the scale is ``alpha / rank``; None for a scale of 1.
        dropout: probability of dropping an input of ``down`` in training, in [0, 1).
        targets: which projections: names or ends of names, ours (``query``, ``layers.3.attention.value``) or
            transformers' (``q_proj``), patterns with ``*``, or ``"all-linear"`` for all outside of the head. By
            default query and value, and the whole matrix where a family has one for query, key and value.
        rslora: the scale is ``alpha / sqrt(rank)`` (Kalajdzievski 2023).
        dora: a length for each row of the sum, learned too (Liu et al. 2024).
        ranks: other ranks by name of a projection, in the form of ``targets``.
        alphas: other alphas, in the form of ``ranks``.
        bias: which biases of the base are trained too: "none", "all" or "lora_only" (biases of the projections).
        lora_bias: give each ``up`` a bias.
        trainable_token_indices: ids of the rows of the word embeddings to train; or ids by name of a table.

    The arguments of peft's ``LoraConfig`` are accepted too (``r``, ``lora_alpha``, ``target_modules``,
    ``lora_dropout``, ``use_rslora``, ``use_dora``, ``rank_pattern``, ``alpha_pattern``); ``r`` without ``lora_alpha``
    has peft's default of 8.

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
    usual_targets = ("query", "value")

    def __post_init__(self) -> None:
        tokens = self.trainable_token_indices
        ids = [i for some in (tokens.values() if isinstance(tokens, Mapping) else (tokens,)) for i in some]
        _check(
            self,
            f"a rank from 1 to {MOST_RANK:,}, a finite alpha, a dropout from 0 to below 1, names of projections, "
            f"a bias of {', '.join(BIASES)}, no lora_bias with dora, and ids from 0",
            rank=_is_count(self.rank),
            ranks=all(map(_is_count, self.ranks.values())),
            alpha=self.alpha is None or _is_number(self.alpha),
            alphas=all(map(_is_number, self.alphas.values())),
            dropout=_is_number(self.dropout) and 0 <= self.dropout < 1,
            targets=_are_names(self.targets),
            rslora=isinstance(self.rslora, bool),
            bias=self.bias in BIASES,
            lora_bias=not (self.lora_bias and self.dora),
            trainable_token_indices=all(type(i) is int and i >= 0 for i in ids),
        )

    def rank_of(self, *names: str) -> int:
        """Return the rank of a projection that has these names."""
        return next((rank for key, rank in self.ranks.items() if any(fits(key, name) for name in names)), self.rank)

    def alpha_of(self, *names: str) -> float:
        """Return the alpha of a projection that has these names."""
        own = next((a for key, a in self.alphas.items() if any(fits(key, name) for name in names)), self.alpha)
        return float(self.rank_of(*names) if own is None else own)

    def scale_of(self, *names: str) -> float:
        """Return the factor of a projection's sum."""
        rank = self.rank_of(*names)
        return self.alpha_of(*names) / (math.sqrt(rank) if self.rslora else rank)


@_with_words(IA3_WORDS)
@dataclass(frozen=True)
class IA3:
    """Learned scales of the outputs or inputs of projections (Liu et al. 2022): ``s * (W x + b)``.

    Args:
        targets: which projections, as `Lora` has them. By default key, value and the last of the feed-forward part; the
            whole matrix where a family has one for query, key and value.
        inputs: the targets with scaled inputs, ``W (s * x) + b``. By default the last of the feed-forward part.

    The arguments of peft's ``IA3Config`` are accepted too (``target_modules``, ``feedforward_modules``).

    Raises:
        ConfigError: names that are none.
    """

    targets: str | Sequence[str] = ()
    inputs: str | Sequence[str] = ("feed_forward.down",)
    usual_targets = ("key", "value", "feed_forward.down")

    def __post_init__(self) -> None:
        _check(self, "names of projections", targets=_are_names(self.targets), inputs=_are_names(self.inputs))

    def on_input(self, *names: str) -> bool:
        """Return whether the input of a projection with these names is scaled, rather than its output."""
        return any(fits(wanted, name) for wanted in listed(self.inputs) for name in names)


@_with_words(PROMPT)
@dataclass(frozen=True)
class Prompt:
    """Trained vectors before each text, in the positions of words (prompt tuning, Lester et al. 2021).

    Args:
        tokens: how many.
        text: initialise from its words, repeated or cut to this number; None for words drawn from the vocabulary.
        encoder: width of a network that produces them in training (P-tuning, Liu et al. 2021); files contain
            its output. None for none.
        kind: "mlp" for a network of three layers, "lstm" for one that reads them both ways in two and has two more.

    The arguments of peft's ``PromptTuningConfig`` and ``PromptEncoderConfig`` are accepted too
    (``num_virtual_tokens``, ``prompt_tuning_init_text``, ``encoder_hidden_size``, ``encoder_reparameterization_type``).

    Raises:
        ConfigError: a value that cannot be; all are listed.
    """

    tokens: int = 20
    text: str | None = None
    encoder: int | None = None
    kind: str = "mlp"

    def __post_init__(self) -> None:
        _check(
            self,
            f"1 to {MOST_TOKENS:,} tokens, a text that is not empty, a width from 1 to {MOST_RANK:,}, and mlp or lstm",
            tokens=_is_count(self.tokens, MOST_TOKENS),
            text=self.text is None or (isinstance(self.text, str) and self.text != ""),
            encoder=self.encoder is None or _is_count(self.encoder),
            kind=self.kind in KINDS,
        )


@_with_words(PREFIX)
@dataclass(frozen=True)
class Prefix:
    """Trained keys and values before each text's in every layer (prefix tuning, Li and Liang 2021).

    Args:
        tokens: how many.
        encoder: width of a two-layer network that produces them in training; files contain its output. None
            for none.

    The arguments of peft's ``PrefixTuningConfig`` are accepted too (``num_virtual_tokens``, ``encoder_hidden_size``).

    Raises:
        ConfigError: a number that cannot be.
    """

    tokens: int = 20
    encoder: int | None = None

    def __post_init__(self) -> None:
        _check(
            self,
            f"1 to {MOST_TOKENS:,} tokens, and a width from 1 to {MOST_RANK:,}",
            tokens=_is_count(self.tokens, MOST_TOKENS),
            encoder=self.encoder is None or _is_count(self.encoder),
        )


Settings = Lora | IA3 | Prompt | Prefix
"""Settings of an adapter."""


def listed(names: str | Sequence[str]) -> tuple[str, ...]:
    """Return a name or several as a tuple."""
    return (names,) if isinstance(names, str) else tuple(names)


ADAPTERS: dict[str, type[Settings]] = {"lora": Lora, "ia3": IA3, "prompt": Prompt, "prefix": Prefix}
"""Settings by the ``type`` of a mapping."""


def adapter_mapping(adapter: Settings | None) -> dict[str, Any] | None:
    """Return an adapter as a mapping of ``type`` and the settings that differ from their defaults."""
    if adapter is None:
        return None
    kind = next(name for name, one in ADAPTERS.items() if type(adapter) is one)
    values, usual = vars(adapter), vars(type(adapter)())
    return {"type": kind, **{name: value for name, value in values.items() if value != usual[name]}}


FORMER_NAMES = {
    "lora": {"alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "lora_targets"},
    "ia3": {"targets": "ia3"},
    "prompt": {
        "tokens": "prompt_tokens", "text": "prompt_text", "encoder": "prompt_encoder", "kind": "prompt_encoder_kind"
    },
    "prefix": {"tokens": "prefix_tokens", "encoder": "prefix_encoder"},
}  # fmt: skip
"""The names of settings in the checkpoints of runs, by the ``type`` of a mapping."""


def recorded_adapter(adapter: Settings | None) -> dict[str, Any]:
    """Return an adapter as the checkpoints of a run contain it; a resumed run must have an equal one."""
    found: dict[str, Any] = {"lora_dropout": 0.0, "lora_targets": (), "ia3": (), "prompt_encoder_kind": "mlp"}
    values = adapter_mapping(adapter) or {}
    kind = values.pop("type", "")
    found["lora_kinds"] = [name for name in ("rslora", "dora") if values.pop(name, False)]
    if isinstance(adapter, Lora):
        found["lora"] = adapter.rank
        values.pop("rank", None)
    elif isinstance(adapter, IA3):
        found["ia3"] = ("usual",)
    elif adapter is not None:
        values["tokens"] = adapter.tokens
    for setting, name in FORMER_NAMES.get(kind, {}).items():
        if setting in values:
            value = values.pop(setting)
            found[name] = listed(value) if setting == "targets" else value
    return {**found, "adapter": values or None}


def plain_rank(adapter: Settings | None) -> int | None:
    """Return the rank of a LoRA adapter without further settings; None for other adapters."""
    return adapter.rank if isinstance(adapter, Lora) and adapter == Lora(adapter.rank) else None


def read_adapter(values: Mapping[str, Any]) -> tuple[Settings | None, list[str]]:
    """Return the adapter that the options ``adapter`` and ``lora`` of a run describe, and their problems."""
    adapter, rank = values.get("adapter"), values.get("lora")
    if adapter is None:
        return None if rank is None else Lora(rank), []
    if rank is not None:
        return None, ["adapter and lora: expected only one adapter"]
    if isinstance(adapter, Mapping):
        settings: dict[str, Any] = dict(adapter)
        settings = {name: tuple(v) if isinstance(v, list) else v for name, v in settings.items()}
        kind = ADAPTERS.get(settings.pop("type", ""))
        if kind is None:
            return None, [f"adapter: found {dict(adapter)}; expected a type: {', '.join(ADAPTERS)}"]
        try:
            return kind(**settings), []
        except (ConfigError, TypeError) as fault:
            return None, [f"adapter: {fault}"]
    if not isinstance(adapter, Settings):
        found = repr(adapter) if isinstance(adapter, str) else type(adapter).__name__
        expected = "Lora, IA3, Prompt or Prefix of flodl_hf.models.adapters, or a mapping such as {type: ia3}"
        return None, [f"adapter: found {found}; expected {expected}"]
    return adapter, []


def fits(wanted: str, name: str) -> bool:
    """Return whether a path equals a name, ends with it, or matches it as a pattern."""
    return name == wanted or name.endswith("." + wanted) or ("*" in wanted and fnmatchcase(name, wanted))
