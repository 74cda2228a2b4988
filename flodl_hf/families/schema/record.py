"""The records that describe a family.

A `Family` contains the tables of one architecture: the rows of its configuration, the names of its tensors, the graph
of its encoder, and the body of each head. Loading, export, prediction, parity checks and the generated documents are
computed from these records.

Names of tensors are one table that is read in both directions. A row pairs our prefix with the prefix in Hugging Face
files; ``{i}`` stands for the number of a layer. Rows name modules and cover their ``.weight`` and ``.bias``; a row
names a whole tensor where the last parts of the names differ. The same rows rename tensors when loading and exporting,
pair modules when a parity check fails, and are a table in the documents.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from flodl.errors import CheckpointError
from flodl.graph import Graph
from flodl_hf.families.schema.config_rows import IgnoredKey, Row


@dataclass(frozen=True)
class Ignored:
    """A tensor that a file may contain and the model does not use: its Hugging Face name and the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class PassthroughTensor:
    """A tensor that no layer uses and that is not trained; a model keeps it and writes it for any head.

    Args:
        name: its Hugging Face name.
        reason: its meaning.
        also: other names of it in files.
        module: our module that reads it (``take``); None where none does.
    """

    name: str
    reason: str
    also: tuple[str, ...] = ()
    module: str | None = None


@dataclass(frozen=True)
class FamilyHead:
    """One task in one family.

    Args:
        body: ``body(config, num_labels)`` returns the head's graph: hidden states and ``layout`` in, logits out.
        keys: rows of the head's tensors, ours below ``head``.
        pooled: the head reads the pooler's output rather than the token states.
        classifier: our name of the layer with one row for each label; another number of labels initialises it
            again.
        ties: tensors that are shared when the configuration ties words.
        kept: tensors of a file that this head does not use and that a model keeps and writes back.
        aliases: Hugging Face names under which a file may repeat a tensor, as ``(alias, canonical)``.
        untyped_loss: ``loss(logits, labels)`` for configurations without a problem type, where the reference differs
            from the common rule; None for the common rule.
        relation: ``relation(config, num_labels)`` returns a second head (`task_heads.Relation`), which
            scores the relation of two texts from the pooler's output; None where there is none.
        relation_output: the name of those scores in transformers.
    """

    body: Callable[[Any, int], Graph]
    keys: tuple[KeyRow, ...]
    pooled: bool = False
    classifier: str | None = None
    ties: tuple[Tie, ...] = ()
    kept: tuple[PassthroughTensor, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    untyped_loss: Callable[[Tensor, Tensor], Tensor] | None = None
    relation: Callable[[Any, int], nn.Module] | None = None
    relation_output: str = "seq_relationship_logits"

    def scoring_choices(self) -> FamilyHead:
        """Return the multiple choice head with this classifier's body: one score for each choice."""
        return replace(self, body=lambda config, _: self.body(config, 1), classifier=None, untyped_loss=None)


@dataclass(frozen=True, kw_only=True)
class FamilyTokenizer:
    """Rules of a tokenizer class: how it is built, where the files of a folder do not specify it.

    Args:
        special: the token of each role, such as ``"mask_token"``.
        type_ids: whether the class returns segment ids.
        inputs: the entries that a call returns, where these are not ids, segment ids if any, and attention mask.
        classes: further names in ``tokenizer_class`` for this tokenizer, without "Tokenizer" and "Fast"; the class
            prefix of the family always is one.
        files: the vocabulary files that the tokenizer is built from; empty where only ``tokenizer.json`` is read.
        build: the name of the builder in ``tokenization/build.py``; by default the builder of the first of ``files``.
        template: the name of the special tokens around texts, in ``tokenization/definition.py``.
        mask_takes_space: whether the mask token includes the space before it, unless the settings files specify it.
        prefix: the default of ``add_prefix_space``.
        padding_side: the default of ``padding_side``.
        lowercase: the default of ``do_lower_case``; None where the class does not read it.
        split_punctuation: the default of ``split_by_punct``; None where the class does not read it.
        cleaned: whether accents are removed by default where the class reads ``keep_accents``.
        first: tokens that are numbered before the pieces of a sentencepiece model: a role, a token, or a role and its
            default (``"mask_token=<mask>"``).
        skipped: how many of the first pieces of the model ``first`` replaces.
        last: tokens that are numbered after the pieces, like ``first``; ``"extra_ids"`` are the sentinels of T5.
        unknown: the id of unknown pieces; None for the id of the unknown token.
        steps: normalizers that transformers applies before a sentencepiece model (``tokenization/sentencepiece.py``).
        spaces: how words are split for those classes: "words" (at white space), "always" (at spaces), "first" (at
            spaces; without ``add_prefix_space`` only the first word of a text is marked), or "" (no splitting).
        words: what splits words that is in no file of a folder; empty where the files specify everything. Such a
            tokenizer is not built from ``vocab.txt``, and ``tokenizer.json`` of that class is read with a warning.
    """

    special: Mapping[str, str]
    type_ids: bool
    classes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    build: str = ""
    template: str = "bert"
    mask_takes_space: bool = False
    prefix: bool = False
    padding_side: str = "right"
    inputs: tuple[str, ...] = ()
    lowercase: bool | None = None
    split_punctuation: bool | None = None
    cleaned: bool = False
    first: tuple[str, ...] = ()
    skipped: int = 0
    last: tuple[str, ...] = ()
    unknown: int | None = None
    steps: tuple[str, ...] = ()
    spaces: str = ""
    words: str = ""


@dataclass(frozen=True)
class Family:
    """One architecture.

    Args:
        model_type: the word in ``config.json``.
        class_prefix: the first part of class names, as in ``BertForMaskedLM``.
        base_prefix: the first part of the encoder's tensor names in the file of a task model.
        config: the frozen dataclass of the encoder's settings.
        rows: the rows that read ``config`` from ``config.json``.
        ignored_keys: keys without effect in this family.
        keys: rows of embeddings, layers and pooler; their names begin with ``base_prefix``.
        also: rows of other names of the same tensors in files: older names, or transformers' names of modules where
            its files differ.
        prefixes: other prefixes of the encoder's names.
        left_out: required field -> default of transformers where a file lacks its key; empty for families that
            transformers does not have.
        claims: keys with their values (any value where none is listed) that identify a ``config.json`` of another
            ``model_type`` as this family; empty where only ``model_type`` decides.
        ignored: tensors of files that are not used; ``{i}`` in a name stands for the layer.
        kept: tensors that a model keeps without using them.
        encoder: ``encoder(config)`` returns the graph from ids to token states.
        pooler: ``pooler(config)`` returns the graph from token states to one state for each text, or None.
        heads: the head of each task, by the name of the task.
        indices: the values of the placeholders of key rows, one mapping for each layer.
        pretraining: further class names in ``architectures``, with the task of each.
        max_tokens: ``max_tokens(config)`` is the longest row of tokens, where no position table limits it; None for no
            limit.
        methods: further methods of its models, as ``name -> "module:function"``; the function takes the model first.
        unused_positions: ``unused_positions(config)`` is the number of rows of the position table that no token uses.
        takes_prefix: whether transformers' model accepts keys and values of a prefix.
        ties_words: the default of ``tie_word_embeddings``.
        tokenizer: the rules of its tokenizers where files do not specify them; None to read ``tokenizer.json`` only.
        tiny: variant -> settings in keys of ``config.json``, added to the common small sizes, for tests and
            ``verify-matrix``; several variants where the family's files differ in kind.
        real: the same, added to the common base sizes, for ``verify-matrix --size real``.
        checkpoints: task -> repository of the Hub for ``verify-matrix --live``, for families from outside of the
            package; `flodl_hf.parity.matrix.published` lists the others.
    """

    model_type: str
    class_prefix: str
    base_prefix: str
    config: type[Any]
    rows: tuple[Row, ...]
    keys: tuple[KeyRow, ...]
    encoder: Callable[[Any], Graph]
    heads: Mapping[str, FamilyHead]
    pooler: Callable[[Any], Graph] | None = None
    ignored_keys: tuple[IgnoredKey, ...] = ()
    also: tuple[KeyRow, ...] = ()
    prefixes: tuple[str, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)
    claims: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignored: tuple[Ignored, ...] = ()
    kept: tuple[PassthroughTensor, ...] = ()
    indices: Callable[[Any], Sequence[Mapping[str, int]]] = field(
        default=lambda config: [{"i": i} for i in range(config.num_layers)]
    )
    pretraining: Mapping[str, str] = field(default_factory=dict)
    unused_positions: Callable[[Any], int] = field(default=lambda config: 0)
    max_tokens: Callable[[Any], int | None] = field(default=lambda config: None)
    methods: Mapping[str, str] = field(default_factory=dict)
    takes_prefix: bool = False
    ties_words: bool = True
    tokenizer: FamilyTokenizer | None = None
    tiny: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"base": {}})
    real: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"base": {}})
    checkpoints: Mapping[str, str] = field(default_factory=dict)

    def key_map(self, config: Any, head: str) -> KeyMap:
        """Return the names of this family's model for one task (or ``"base"``)."""
        rows = self.keys if head == "base" else (*self.keys, *self.heads[head].keys)
        return KeyMap(rows, self.indices(config), self.also)

    def kept_by(self, head: str) -> tuple[PassthroughTensor, ...]:
        """Return the tensors that a model of one task (or ``"base"``) keeps without using them."""
        return self.kept if head == "base" else (*self.kept, *self.heads[head].kept)

    def renamed(self, model_type: str, class_prefix: str, **changes: Any) -> Family:
        """Return an alias: the same architecture under another ``model_type`` and class prefix.

        With another ``base_prefix``, tensor names follow it where ``changes`` do not state them. Published
        checkpoints, and sizes that files may leave out, belong to the name: none where ``changes`` names none.
        """
        changes.setdefault("checkpoints", {})
        changes.setdefault("left_out", {})
        prefix = changes.get("base_prefix", self.base_prefix)
        if prefix != self.base_prefix:
            changes.setdefault("keys", rows_under(prefix, self.keys))
            changes.setdefault("also", rows_under(prefix, self.also))
            old = self.base_prefix + "."
            same = [
                replace(e, name=prefix + "." + e.name.removeprefix(old)) for e in self.ignored if e.name.startswith(old)
            ]
            changes.setdefault("ignored", (*same, *(e for e in self.ignored if not e.name.startswith(old))))
        return replace(self, model_type=model_type, class_prefix=class_prefix, **changes)

    def __reduce__(self) -> tuple[Any, ...]:
        # A family contains functions, so its pickle contains only its name; the table of names imports this file.
        # Unpickling the configuration's class imports the module of a family from outside, which registers the family.
        found, names = import_module("flodl_hf.families")._travelled, (self.model_type, self.config)
        found(*names)  # raises here rather than where the pickle is read
        return found, names

    def __deepcopy__(self, memo: Any) -> Family:
        # A family is immutable and compared by identity.
        return self


@dataclass(frozen=True)
class KeyRow:
    """``ours`` and ``theirs`` are prefixes (modules) or whole tensor names, with ``{placeholders}`` for repeated parts.

    ``[0/3]`` behind a module in ``theirs`` means a part of its tensors (`flodl_hf.nn.joined_tensors`).
    """

    ours: str
    theirs: str


@dataclass(frozen=True)
class Tie:
    """Two of our names that share one tensor when the configuration ties them.

    A file must contain ``kept``; ``also`` repeats it.
    """

    kept: str
    also: str


def rows_under(prefix: str, rows: Iterable[KeyRow], moved: Mapping[str, str | None] = {}) -> tuple[KeyRow, ...]:
    """Return rows with another first part of the names in files.

    Args:
        prefix: replaces the first part of each name in files.
        rows: the rows of a similar family.
        moved: our name -> the rest of the name in files; None removes the row.
    """
    found = []
    for row in rows:
        rest = moved.get(row.ours, row.theirs.partition(".")[2])
        if rest is not None:
            found.append(KeyRow(row.ours, f"{prefix}.{rest}"))
    return tuple(found)


class KeyMap:
    """The names of one model in both directions.

    Args:
        rows: the table in the order of the graph, which the parity probe follows.
        indices: the values of the placeholders, one mapping for each layer: ``[{"i": 0}, {"i": 1}, ...]``.
        also: rows of further names of the same modules in files.

    Raises:
        CheckpointError: two rows give the same name on one side.
    """

    def __init__(
        self, rows: Sequence[KeyRow], indices: Sequence[Mapping[str, int]], also: Sequence[KeyRow] = ()
    ) -> None:
        self._also = list(_expand(also, indices))
        self._ours: dict[str, str] = {}
        self._theirs: dict[str, str] = {}
        clashes: list[str] = []
        # Rows with placeholders are repeated for each layer, in the order of the graph.
        for ours, theirs in _expand(rows, indices):
            if ours in self._ours or theirs in self._theirs:
                clashes.append(f"{ours} <-> {theirs}")
                continue
            self._ours[ours] = theirs
            self._theirs[theirs] = ours
        if clashes:
            raise CheckpointError(
                "key rows collide, so names could not be read back: " + ", ".join(clashes), clashes=clashes
            )

    @property
    def pairs(self) -> Mapping[str, str]:
        """Our prefixes with those in files, in the order of the graph."""
        return self._ours

    def theirs(self, name: str) -> str:
        """Return the Hugging Face name of our tensor.

        Raises:
            CheckpointError: no row covers the name.
        """
        found = translated(name, self._ours)
        if found is None:
            raise CheckpointError(f"no key row covers our tensor {name!r}", name=name)
        return found

    def ours(self, name: str) -> str | None:
        """Return our name of a Hugging Face tensor; None if no row covers it."""
        return translated(name, self._theirs)

    def also(self, name: str) -> list[str]:
        """Return the further names of our tensor in files."""
        return [found for ours, theirs in self._also if (found := translated(name, {ours: theirs})) is not None]

    def names(self, tensors: Iterable[str]) -> dict[str, str]:
        """Return ``{our name: their name}`` for all ``tensors``; the names are unique.

        Raises:
            CheckpointError: a tensor has no row, or two tensors share a name.
        """
        result = {name: self.theirs(name) for name in tensors}
        if len(set(result.values())) != len(result):
            raise CheckpointError("two of our tensors have one name in the file", names=sorted(result))
        return result


def _expand(rows: Sequence[KeyRow], indices: Sequence[Mapping[str, int]]) -> Iterable[tuple[str, str]]:
    position = 0
    while position < len(rows):
        if "{" not in rows[position].ours:
            yield rows[position].ours, rows[position].theirs
            position += 1
            continue
        end = position
        while end < len(rows) and "{" in rows[end].ours:
            end += 1
        for holes in indices:
            for row in rows[position:end]:
                yield row.ours.format(**holes), row.theirs.format(**holes)
        position = end


def translated(name: str, table: Mapping[str, str]) -> str | None:
    """Return the name of a tensor on the other side of a table of prefixes; None if no row covers it."""
    whole = table.get(name)
    if whole is not None:
        return whole
    module, _, leaf = name.rpartition(".")
    prefix = table.get(module)
    return None if prefix is None else f"{prefix}.{leaf}"


IGNORED_TENSORS: tuple[tuple[str, str], ...] = (
    ("position_ids", "positions are counted, not stored"),
    ("token_type_ids", "zeros are made when needed"),
    ("inv_freq", "rotary frequencies are computed from config.json"),
    ("cos_cached", "rotary tables are computed from config.json"),
    ("sin_cached", "rotary tables are computed from config.json"),
    *(
        (name, "class weights of a training loss")
        for name in ("loss.weight", "loss_fct.weight", "loss_fn.weight", "criterion.weight", "class_weights")
    ),
)
"""The last words of a name, between dots and underscores, and why the tensor has no effect on numbers."""

WHOLE_NUMBERS = ("I64", "I32", "BOOL")
"""Dtypes of counters and masks; no weight has them."""

# Names of tensors that libraries of adapters and quantisation add to a layer.
_BESIDE = re.compile(
    r"(?:^|[._])(?:lora|ia3|vera|oft|hada|base_layer|modules_to_save|adapters?|prefix_tuning|prompt_encoder|prefix_encoder|"
    r"weight_scale|weight_format|input_scale|quant_map|quant_state|absmax|SCB|qweight|qzeros|scales|zero_point)(?:[._]|$)"
)
_ENDING = re.compile(rf"(?:^|[._])({'|'.join(re.escape(name) for name, _ in IGNORED_TENSORS)})$")


def ignored_reason(name: str, dtype: str) -> str | None:
    """Return why an unknown tensor has no effect on numbers; None if it may have one.

    Args:
        name: the name in the file.
        dtype: the dtype in the header.
    """
    if (found := _ENDING.search(name)) is not None:
        return dict(IGNORED_TENSORS)[found[1]]
    return "counts or masks, which no layer computes with" if dtype in WHOLE_NUMBERS else None


def changes_a_layer(name: str) -> bool:
    """Return whether a tensor belongs to an adapter or a quantised layer, which gives other numbers without it.

    Args:
        name: the name in the file.
    """
    return _BESIDE.search(name) is not None


def repeated_bias(name: str) -> str | None:
    """Return the name of the bias that a tensor ``decoder.bias`` repeats; None for other tensors."""
    module = name.removesuffix(".decoder.bias")
    return None if module == name else f"{module}.bias"
