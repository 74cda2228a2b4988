"""jina-embeddings-v3 (Sturua et al. 2024, https://arxiv.org/abs/2409.10173), as transformers has it.

XLM-RoBERTa's vocabulary and heads over rotary positions. It departs from RoBERTa in:

* queries and keys are turned by their places instead of positions being added;
* there is one token type, and every token gets its row;
* files contain query, key and value in one matrix; they are computed one by one.

The first files were written for the code of a repository, with five low-rank differences for each weight, one per
task (`flodl_hf.models.adapters.task_adapters`); that is the family ``TASKED`` below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flodl.graph import Graph
from flodl_hf.families import bert, gte, roberta
from flodl_hf.families.schema import Ignored
from flodl_hf.families.schema.config_rows import Check, IgnoredKey, Row, boolean, changed, count, padding_id
from flodl_hf.families.schema.record import KeyRow, rows_under
from flodl_hf.families.schema.shared_keys import HEAD_WIDTH, rotary_rows, wavelength
from flodl_hf.nn.encoder import bert_block, chain, stack


@dataclass(frozen=True, kw_only=True)
class JinaEmbeddingsV3Config(gte.GteConfig):
    """The settings of a jina-embeddings-v3 encoder: GTE's, with another base of wavelengths.

    Attributes:
        theta: base of the wavelengths, where ``rotary`` does not state it.
    """

    theta: float = 20_000.0


# fmt: off
CHANGED = {
    "max_positions":   {"default": 8194},
    "type_vocab_size": {"default": 1},
    "norm_eps":        {"default": 1e-5},
    "pad_token_id":    {"default": 1, "check": padding_id()},
}
CONFIG = (*changed(bert.CONFIG, CHANGED), *rotary_rows(20_000.0))

LAYER = "roberta.encoder.layers.{i}"
KEYS = (
    KeyRow("encoder.embeddings.word",              "roberta.embeddings.word_embeddings"),
    KeyRow("encoder.embeddings.token_type",        "roberta.embeddings.token_type_embeddings"),
    KeyRow("encoder.embeddings.norm",              "roberta.emb_ln"),
    KeyRow("encoder.layers.{i}.attention.query",   LAYER + ".mixer.Wqkv[0/3]"),
    KeyRow("encoder.layers.{i}.attention.key",     LAYER + ".mixer.Wqkv[1/3]"),
    KeyRow("encoder.layers.{i}.attention.value",   LAYER + ".mixer.Wqkv[2/3]"),
    KeyRow("encoder.layers.{i}.attention.output",  LAYER + ".mixer.out_proj"),
    KeyRow("encoder.layers.{i}.attention_norm",    LAYER + ".norm1"),
    KeyRow("encoder.layers.{i}.feed_forward.up",   LAYER + ".mlp.fc1"),
    KeyRow("encoder.layers.{i}.feed_forward.down", LAYER + ".mlp.fc2"),
    KeyRow("encoder.layers.{i}.feed_forward_norm", LAYER + ".norm2"),
    KeyRow("pooler.dense",                         "roberta.pooler.dense"),
)
# What transformers calls its modules; its files have the names above.
OTHERS: dict[str, str | None] = {
    "encoder.layers.{i}.feed_forward.up":   "layers.{i}.mlp.fc1",
    "encoder.layers.{i}.feed_forward.down": "layers.{i}.mlp.fc2",
    "encoder.layers.{i}.feed_forward.gate": None, "head.norm": None,
}
ALSO = (
    KeyRow("encoder.embeddings.norm", "roberta.embeddings.LayerNorm"), *rows_under("roberta", gte.ALSO, OTHERS),
)
# fmt: on


def encoder(c: JinaEmbeddingsV3Config) -> Graph:
    """Return the graph from ids to token states."""
    blocks = (bert_block(c, attention={"rotary": gte.rotary(c)}) for _ in range(c.num_layers))
    return chain(bert.embeddings(c, max_positions=0), stack(blocks))


TASKS = ("sequence_classification", "token_classification", "question_answering", "masked_lm")

FAMILY = bert.FAMILY.renamed(
    "jina_embeddings_v3", "JinaEmbeddingsV3", base_prefix="roberta", config=JinaEmbeddingsV3Config, rows=CONFIG,
    keys=KEYS, also=ALSO, ignored_keys=(HEAD_WIDTH,), ignored=(), encoder=encoder,
    heads={task: roberta.HEADS[task] for task in TASKS}, pretraining={},
    takes_prefix=False, tokenizer=roberta.PIECES,
    left_out={
        "vocab_size": 250002, "hidden_size": 1024, "num_layers": 24, "num_heads": 16, "intermediate_size": 4096,
    },
    tiny={"base": {}, "one type": {"type_vocab_size": 1}},
    real={"base": {"vocab_size": 250002, "max_position_embeddings": 8194, "type_vocab_size": 1, "pad_token_id": 1}},
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TaskedConfig(JinaEmbeddingsV3Config):
    """The settings of a file with adapters: the family's, and the adapters' tasks.

    Attributes:
        tasks: the tasks, in the order of their adapters.
        adapter_rank: rank of each difference.
        adapter_alpha: by what times the rank a difference is divided.
        has_adapters: whether the file contains trained adapters.
    """

    tasks: tuple[str, ...] = ()
    adapter_rank: int = 4
    adapter_alpha: int = 1
    has_adapters: bool = True


def _tasks(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(task, str) for task in value):
        raise ValueError
    return tuple(value)


# fmt: off
TASKED_CONFIG = (
    *(row for row in CONFIG if row.field not in ("theta", "rotary", "scaling")),
    Row("theta",         "rotary_emb_base",       wavelength(), 20_000.0),
    Row("tasks",         "lora_adaptations",      Check("a list of tasks", _tasks), ()),
    Row("adapter_rank",  "lora_rank",             count(), 4),
    Row("adapter_alpha", "lora_alpha",            count(), 1),
    Row("has_adapters",  "load_trained_adapters", boolean(), True),
)

TASKED_IGNORED_KEYS = (
    HEAD_WIDTH,
    IgnoredKey("position_embedding_type",    "positions are rotations", ("rotary",)),
    IgnoredKey("task_instructions",          "what `embed` puts before texts of a task"),
    IgnoredKey("lora_dropout_p",             "an option of training adapters"),
    IgnoredKey("lora_main_params_trainable", "an option of training adapters"),
    IgnoredKey("matryoshka_dimensions",      "what `truncate_dim` may be"),
    IgnoredKey("truncate_dim",               "an option of each call of `embed`", (None,)),
    IgnoredKey("emb_pooler",                 "sentence-transformers' files specify the pooling of texts"),
    IgnoredKey("use_flash_attn",             "chooses kernels, not numbers"),
    IgnoredKey("use_reg_tokens",             "there are no registers", (False, None)),
)
# fmt: on


def _tasked_keys() -> tuple[KeyRow, ...]:
    """Return the family's rows, with each weight of a table or a projection under its name in files with adapters."""
    found = []
    for row in KEYS:
        found.append(row)
        if not row.ours.endswith("norm"):
            # The suffix of a parametrization precedes the last component.
            stem, mark, rest = row.theirs.partition("[")
            found.append(KeyRow(f"{row.ours}.weight", f"{stem}.parametrizations.weight{mark}{rest}.original"))
    return tuple(found)


LAYERS = 24
ADAPTED = (
    "embeddings.word_embeddings", "embeddings.token_type_embeddings", "pooler.dense",
    *(f"encoder.layers.{i}.{part}" for i in range(LAYERS)
      for part in ("mixer.Wqkv", "mixer.out_proj", "mlp.fc1", "mlp.fc2")),
)  # fmt: skip

TASKED = FAMILY.renamed(
    "jina_embeddings_v3_tasks", "XLMRoberta", config=TaskedConfig, rows=TASKED_CONFIG, ignored_keys=TASKED_IGNORED_KEYS,
    keys=_tasked_keys(), also=(), heads={}, tiny={}, real={},
    claims={"model_type": ("xlm-roberta",), "position_embedding_type": ("rotary",), "lora_adaptations": ()},
    ignored=tuple(
        Ignored(f"roberta.{name}.parametrizations.weight.0.lora_{side}", "an adapter, which `embed(task=)` adds")
        for name in ADAPTED for side in "AB"
    ),
)  # fmt: skip
