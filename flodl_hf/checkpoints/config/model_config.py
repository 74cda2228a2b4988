"""``config.json`` as read: the family's typed settings, labels, and the source text.

Decides what is common to all families: labels, problem type, ties. A family's own rows are in its file, and
`flodl_hf.families.schema.config_rows` refuses keys that no row reads. The source
text is stored, so that export writes it back and patches only the changes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

from flodl.errors import ConfigError, nearest, printable, shown
from flodl_hf.checkpoints.config.file import (
    LABEL_THRESHOLDS,
    PROBLEM_TYPES,
    activation_changes,
    config_text_of,
    label_names,
    read_json,
    stored_activation,
    thresholds_of,
    without_unknown_problem,
)
from flodl_hf.checkpoints.folders import CONFIG_NAME, WEIGHTS_KEY, refused
from flodl_hf.checkpoints.hub.download import resolve_folder
from flodl_hf.checkpoints.keywords import CONFIG, accept_keywords
from flodl_hf.families import match_config, model_types, named, row_of
from flodl_hf.families.schema import Family
from flodl_hf.families.schema.config_rows import REQUIRED, boolean, one_of, read_rows, refuse, triage
from flodl_hf.families.schema.config_rows import Row as Row
from flodl_hf.families.schema.shared_keys import COMMON_IGNORED_KEYS, FOREIGN

__all__ = ["ModelConfig"]

_SHARED_ROWS = (
    Row("problem_type", "problem_type", one_of(None, *PROBLEM_TYPES), None),
    Row("tie_words", "tie_word_embeddings", boolean(), True),
)
# Names from other libraries that are not misspellings of ours.
_OTHERS = (
    "xlnet", "longformer", "big-bird", "xlm", "neobert", "mobilebert", "megatron-bert", "squeezebert", "flaubert",
    "funnel", "gliner", "gliclass", "convbert", "rembert", "ibert", "luke", "layoutlm", "gpt2",
    "t5", "bart", "llama", "qwen2",
)  # fmt: skip
_LABEL_KEYS = ("id2label", "label2id", "num_labels")
# Keys that are read by other means than rows.
_READ = (
    *_LABEL_KEYS, "model_type", "architectures", "auto_map", "dtype", "torch_dtype", "initializer_range",
    LABEL_THRESHOLDS, WEIGHTS_KEY,
)  # fmt: skip


@dataclass(repr=False, eq=False)
class ModelConfig:
    """The configuration of one model.

    Reads like a transformers config (``config.hidden_size``, ``config.id2label``, any key of the
    file) and like ours (``config.encoder`` is the family's own frozen record).

    Attributes:
        family: the architecture.
        encoder: its settings in our words.
        labels: label names by id.
        problem_type: "regression", "single_label_classification", "multi_label_classification" or None.
        label_thresholds: the minimum score of each label, tuned on held-out data; None without.
        score_activation: path of the activation that turns logits of a cross-encoder into scores; None without.
        tie_words: whether the masked-word decoder is the word table.
        source: the JSON as read, unknown keys included.
        text: the file's text, or None when the config was made in memory.
        where: the file's path, for messages.
        notes: a sentence for each key or value without effect that may matter.
        overruled: settings that contradict others of the file and are ignored, as in transformers.
        left_out: missing sizes by key, with transformers' defaults.
    """

    family: Family
    encoder: Any
    labels: Sequence[str]
    _: KW_ONLY
    problem_type: str | None = None
    label_thresholds: dict[str, float] | None = None
    score_activation: str | None = None
    tie_words: bool = True
    source: dict[str, Any] = field(default_factory=dict)
    text: str | None = None
    where: str = "config"
    notes: Sequence[str] = ()
    overruled: Sequence[str] = ()
    left_out: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Copies, which no caller shares.
        self.labels, self.notes, self.overruled = tuple(self.labels), tuple(self.notes), tuple(self.overruled)
        self.source, self.left_out = dict(self.source), dict(self.left_out)
        self.label_thresholds = None if self.label_thresholds is None else dict(self.label_thresholds)

    @classmethod
    def from_text(
        cls,
        text: str,
        where: str = "config.json",
        ignore_config_keys: Sequence[str] = (),
        *,
        strict_config: bool = False,
    ) -> ModelConfig:
        """Return the configuration that this JSON describes.

        Args:
            text: the JSON.
            where: its name, for messages.
            ignore_config_keys: unsupported keys to ignore.
            strict_config: also refuse keys unknown to every family, and conflicting settings that are
                ignored; without it they are only noted.

        Raises:
            ConfigError: not JSON, an unknown ``model_type``, or values that are missing, wrong or not
                understood; all faults are listed at once in ``problems``.
        """
        repeated: list[str] = []
        return cls.from_dict(
            read_json(text, where, repeated), where=where, text=text, ignore_config_keys=ignore_config_keys,
            strict_config=strict_config, repeated=repeated,
        )  # fmt: skip

    @classmethod
    def from_dict(
        cls, source: Mapping[str, Any], *, where: str = "config", text: str | None = None,
        ignore_config_keys: Sequence[str] = (), strict_config: bool = False, whole: bool = False,
        repeated: Sequence[str] = (),
    ) -> ModelConfig:  # fmt: skip
        """Return the configuration that a mapping describes; see `from_text`.

        Args:
            source: the mapping.
            where: its name, for messages.
            text: the JSON that it was read from.
            ignore_config_keys: unsupported keys to ignore.
            strict_config: as of `from_text`.
            whole: every size has to be stated.
            repeated: duplicate keys of the text.
        """
        family = family_of(source, where)
        problems: list[str] = []
        # Code of the repository may read settings that transformers ignores: then the effective one is unknown.
        settled = bool(family.tiny) and not strict_config and not source.get("auto_map")
        overruled: list[str] | None = [] if settled else None
        usual = family.left_out if settled and not whole else {}
        fields = read_rows(source, family.rows, problems, overruled, usual)
        absent = (row for row in family.rows if row.field in usual and not source.keys() & {row.key, *row.aliases})
        left_out = {row.key: fields[row.field] for row in absent if row.default is REQUIRED}
        shared = read_rows(without_unknown_problem(source, overruled), _SHARED_ROWS, problems)
        if "tie_word_embeddings" not in source:
            shared["tie_words"] = family.ties_words
        notes: list[str] = []
        labels = label_names(source, problems, notes, overruled)
        thresholds, activation = thresholds_of(source.get(LABEL_THRESHOLDS), labels, notes), stored_activation(source)
        ignored = (*family.ignored_keys, *COMMON_IGNORED_KEYS)
        notes += triage(
            source, fields, problems, rows=(*family.rows, *_SHARED_ROWS), ignored_keys=ignored, foreign=FOREIGN,
            elsewhere=row_of, read=(*_LABEL_KEYS, *ignore_config_keys), overruled=overruled, strict=strict_config,
        )  # fmt: skip
        odd = [f"{printable(key, 60)} is present twice; the last one is used" for key in dict.fromkeys(repeated)]
        if strict_config:
            problems += odd
        if text is not None and ("NaN" in text or "Infinity" in text):
            # Rows refuse such values of their keys.
            rows = {key for row in (*family.rows, *_SHARED_ROWS) for key in (row.key, *row.aliases)}
            others = {key: value for key, value in source.items() if key not in (*rows, *ignore_config_keys)}
            odd += _not_finite(others, problems, strict=strict_config)
        notes += [f"{said}; it is ignored, as by transformers" for said in overruled or ()]
        notes += odd
        notes += [f"{key}: absent, taken as {value}, as by transformers" for key, value in left_out.items()]
        if not problems:
            _consistent(fields, source, family.rows, problems)
        if problems:
            raise refuse(problems, where, family.model_type)
        try:
            encoder = family.config(**fields)
        except ValueError as fault:  # a family's own rules between fields
            raise refuse([str(fault)], where, family.model_type) from None
        return cls(
            family, encoder, labels, label_thresholds=thresholds, score_activation=activation,
            source=dict(source), text=text, where=where, notes=notes, overruled=(*(overruled or ()), *odd),
            left_out=left_out, **shared,
        )  # fmt: skip

    @classmethod
    def for_model(cls, model_type: str, **values: Any) -> ModelConfig:
        """Return a configuration made in memory: ``for_model("bert", hidden_size=64, ...)`` with HF's keys.

        ``labels=["no", "yes"]`` is a short way to give ``id2label``.
        """
        labels = values.pop("labels", None)
        if labels is not None:
            values["id2label"] = {str(i): name for i, name in enumerate(labels)}
        config = cls.from_dict({"model_type": model_type, **values}, where="for_model(...)", whole=True)
        if "id2label" in config.source:
            # Transformers takes neither of the two from the other.
            config.source.setdefault("label2id", config.label2id)
        return config

    @classmethod
    @accept_keywords(CONFIG, ConfigError)
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        revision: str | None = None,
        subfolder: str = "",
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        ignore_config_keys: Sequence[str] = (),
        strict_config: bool = False,
        labels: Sequence[str] | None = None,
        num_labels: int | None = None,
        problem_type: str | None = None,
    ) -> ModelConfig:
        """Return the configuration of a folder or Hub repository; keywords as in ``AutoModel.from_pretrained``."""
        found = read_config(
            name_or_path, revision=revision, subfolder=subfolder, token=token, cache_dir=cache_dir,
            local_files_only=local_files_only, ignore_config_keys=ignore_config_keys, strict_config=strict_config,
        )  # fmt: skip
        if labels is None and num_labels is not None:
            labels = [f"LABEL_{number}" for number in range(num_labels)]
        return found.changed(labels=labels, problem_type=problem_type)

    @property
    def model_type(self) -> str:
        """The family's word."""
        return self.family.model_type

    @property
    def id2label(self) -> dict[int, str]:
        """Label names by id. Assignment renames the labels; the model fixes their number."""
        return dict(enumerate(self.labels))

    @id2label.setter
    def id2label(self, names: Mapping[int, str]) -> None:
        new = {int(number): str(name) for number, name in names.items()}
        if sorted(new) != list(range(len(self.labels))):
            found = f"id2label: found the ids {sorted(new)[:20]}, expected 0 to {len(self.labels) - 1}"
            advice = "Pass num_labels= or id2label= to from_pretrained for another number of labels."
            raise ConfigError(f"{found}. {advice}", problems=["id2label"])
        if self.label_thresholds is not None:
            renamed = {label: new[number] for number, label in enumerate(self.labels)}
            self.label_thresholds = {renamed[label]: value for label, value in self.label_thresholds.items()}
        self.labels = tuple(new[number] for number in range(len(new)))

    @property
    def label2id(self) -> dict[str, int]:
        """Ids by label name; of two labels with one name the first counts."""
        result: dict[str, int] = {}
        for index, name in enumerate(self.labels):
            result.setdefault(name, index)
        return result

    @label2id.setter
    def label2id(self, numbers: Mapping[str, int]) -> None:
        self.id2label = {number: name for name, number in numbers.items()}

    @property
    def num_labels(self) -> int:
        """How many labels there are."""
        return len(self.labels)

    @property
    def token_types(self) -> int:
        """Rows of the token type table; 0 where the family or this model has none."""
        return getattr(self.encoder, "type_vocab_size", 0) or 0

    @cached_property
    def uses_token_types(self) -> bool:
        """Whether the model has more than one token type."""
        return self.token_types > 1

    @cached_property
    def max_tokens(self) -> int | None:
        """The longest row of tokens that the position table allows, or that the model was made for without one."""
        positions = getattr(self.encoder, "max_positions", None)
        rows = positions and positions - self.family.unused_positions(self.encoder)
        return min((limit for limit in (rows, self.family.max_tokens(self.encoder)) if limit), default=None)

    def changed(
        self,
        *,
        labels: Sequence[str] | None = None,
        problem_type: str | None = None,
        encoder: Any = None,
        label_thresholds: Mapping[str, float] | None = None,
        score_activation: str | None = None,
    ) -> ModelConfig:
        """Return a copy with other labels, problem type or encoder settings; the source text stays to be patched.

        Thresholds and the activation of scores belong to their labels: with other labels or another problem type, only
        those given here are kept. ``""`` and ``{}`` remove a value.
        """
        if problem_type and problem_type not in PROBLEM_TYPES:
            expected = ", ".join(PROBLEM_TYPES)
            raise ConfigError(f"problem_type={problem_type!r}; expected one of {expected}", problems=["problem_type"])
        same = (labels is None or tuple(labels) == self.labels) and problem_type in (None, self.problem_type)
        kept, own = (self.label_thresholds, self.score_activation) if same else (None, None)
        # transformers refuses one label of this type.
        single = labels is not None and len(labels) == 1 and self.problem_type == "single_label_classification"
        return replace(
            self,
            encoder=self.encoder if encoder is None else encoder,
            labels=self.labels if labels is None else labels,
            problem_type=(None if single else self.problem_type) if problem_type is None else problem_type or None,
            label_thresholds=kept if label_thresholds is None else dict(label_thresholds) or None,
            score_activation=(own if score_activation is None else score_activation) or None,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration with HF's keys: the source values with the current labels and problem type."""
        result = dict(self.source)
        for row in self.family.rows:
            value = getattr(self.encoder, row.field)
            if not any(key in result for key in (row.key, *row.aliases)) and value != row.default:
                result[row.key] = value
        if "vocab_size" in result:
            result["vocab_size"] = self.encoder.vocab_size
        result["model_type"] = self.source.get("model_type", self.model_type)
        result.update(self.label_changes())
        if self.problem_type is not None:
            result["problem_type"] = self.problem_type
        changed, gone = self.stored_changes()
        return {key: value for key, value in result.items() if key not in gone} | changed

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> ModelConfig:
        """Return this configuration; transformers' Trainer compares its special tokens with the tokenizer's."""
        return self

    def label_changes(self) -> dict[str, Any]:
        """Return ``id2label`` and ``label2id`` if the labels differ from the source, else nothing."""
        if self.source and tuple(label_names(self.source, [], [], [])) == self.labels:
            return {}
        return {"id2label": {str(k): v for k, v in self.id2label.items()}, "label2id": self.label2id}

    def stored_changes(self, beside: str | None = None) -> tuple[dict[str, Any], list[str]]:
        """Return keys of this package and of sentence-transformers that differ from the source, and keys to remove.

        Args:
            beside: the activation of scores that another file of the folder stores.
        """
        own = beside is None or self.score_activation != beside
        changed, gone = activation_changes(self.source, self.score_activation) if own else ({}, [])
        if self.problem_type is None and self.source.get("problem_type") in PROBLEM_TYPES:
            gone = [*gone, "problem_type"]
        read = thresholds_of(self.source.get(LABEL_THRESHOLDS), label_names(self.source, [], [], []), [])
        if self.label_thresholds is None and read is not None:
            gone = [*gone, LABEL_THRESHOLDS]
        elif self.label_thresholds is not None and read != self.label_thresholds:
            changed[LABEL_THRESHOLDS] = dict(self.label_thresholds)
        return changed, gone

    def __getattr__(self, name: str) -> Any:
        # Reached only for names without an attribute: HF's keys, first as rows, then as the file has them.
        if name.startswith("__") or "source" not in self.__dict__:
            raise AttributeError(name)
        for row in self.family.rows:
            if name in (row.key, row.field, *row.aliases):
                return getattr(self.encoder, row.field)
        if name in self.source:
            return self.source[name]
        if name == "tie_word_embeddings":
            return self.tie_words
        known = [row.key for row in self.family.rows] + list(self.source)
        raise AttributeError(f"{self.where} has no setting {name!r}{nearest(name, known)}")

    def __repr__(self) -> str:
        return f"ModelConfig({self.model_type}, {self.encoder}, labels={list(self.labels)[:6]})"


def read_config(
    name_or_path: str | Path,
    *,
    ignore_config_keys: Sequence[str] = (),
    strict_config: bool = False,
    verified: bool | str = False,
    **hub: Any,
) -> ModelConfig:
    """Return the configuration of a folder or Hub repository; only ``config.json`` is fetched.

    Args:
        name_or_path: the folder or repository.
        ignore_config_keys: as of `ModelConfig.from_text`.
        strict_config: as of `ModelConfig.from_text`.
        verified: compare the file with its checksum first.
        **hub: ``revision``, ``subfolder``, ``token``, ``cache_dir`` and ``local_files_only``.
    """
    folder, _ = resolve_folder(name_or_path, hub, (CONFIG_NAME, *(("checksums.json",) if verified else ())))
    if verified:
        from flodl_hf.checkpoints.weights.checksums import hold

        hold(folder, verified, (CONFIG_NAME,))
    from flodl_hf.checkpoints.sentence.settings import transformer_folder

    return read_config_file(transformer_folder(folder), ignore_config_keys, strict_config=strict_config)


def read_config_file(
    folder: Path, ignore_config_keys: Sequence[str] = (), *, strict_config: bool = False
) -> ModelConfig:
    """Return the configuration of a local folder; arguments as in `ModelConfig.from_text`.

    Raises:
        ConfigError: no ``config.json``, or one that cannot be used.
    """
    ignored = listed_texts(ignore_config_keys, "ignore_config_keys")
    where = str(folder / CONFIG_NAME)
    return ModelConfig.from_text(config_text_of(folder), where, ignored, strict_config=strict_config)


def listed_texts(values: Any, what: str) -> list[str]:
    """Return a collection of texts as a list.

    Raises:
        ConfigError: it is a single text, or contains none.
    """
    if isinstance(values, Iterable) and not isinstance(values, str):
        return list(values)
    raise ConfigError(f"{what}={shown(values, 60)}; expected a list of texts", problems=[what])


def family_of(source: Mapping[str, Any], name: str) -> Family:
    """Return the family that ``model_type`` names.

    Raises:
        ConfigError: no such key, or a type that is not among the families; the nearest is suggested.
    """
    model_type = source.get("model_type")
    family = match_config(source) or (named(model_type) if isinstance(model_type, str) else None)
    if family is not None:
        return family
    known = model_types()
    word = "" if model_type is None else str(model_type)
    is_other = word.replace("_", "-") in _OTHERS
    close = [] if is_other else get_close_matches(word, known, n=1, cutoff=0.8)
    hint = f", did you mean {close[0]!r}?" if close else ", another architecture" if is_other else ""
    found = f"model_type {f'is {printable(word, 60)}' if word else 'is missing'}{hint}"
    advice = "Use transformers for other ones, or add a similar one: flodl_hf.families.register(FAMILY)"
    expected = f"one of {', '.join(known)}. {advice}"
    raise refused(name, found, expected, problems=["model_type"], kind=ConfigError, known=known)


def _not_finite(source: Mapping[str, Any], problems: list[str], *, strict: bool) -> list[str]:
    """Return notes on NaN and infinities in keys that nothing reads; others are added to the problems."""
    notes = []
    for key, value in source.items():
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            found = json.dumps(value) if isinstance(value, float) else "NaN or Infinity in it"
            if strict or key in _READ:
                problems.append(f"{printable(key, 60)}: found {found}; expected finite numbers")
            else:
                notes.append(f"{printable(key, 60)}: contains NaN or Infinity, and nothing reads it")
    return notes


def _consistent(fields: Mapping[str, Any], source: Mapping[str, Any], rows: Sequence[Row], problems: list[str]) -> None:
    """Append what single values cannot show: heads that do not divide the width, ids outside the vocabulary."""

    def key(field: str) -> str:
        keys = [name for row in rows if row.field == field for name in (row.key, *row.aliases)]
        return next((name for name in keys if name in source), (*keys, field)[0])

    hidden, heads = fields.get("hidden_size"), fields.get("num_heads")
    if hidden and heads and hidden % heads:
        found = "found" if key("num_heads") in source else "absent, taken as"
        expected = f"a divisor of the hidden size {hidden} ({key('hidden_size')})"
        problems.append(f"{key('num_heads')}: {found} {heads}; expected {expected}")
    pad, vocab = fields.get("pad_token_id"), fields.get("vocab_size")
    if pad is not None and vocab is not None and pad >= vocab:
        problems.append(f"pad_token_id: found {pad}; expected an id below vocab_size {vocab}")
