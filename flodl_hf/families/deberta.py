"""DeBERTa, the first version (He et al. 2020, https://arxiv.org/abs/2006.03654).

It departs from its second version in:

* query, key and value are one matrix in files, in which they alternate by head; keys have no bias;
* distances have separate projections, and each has its own row: there are no buckets;
* queries are divided before they are scored, and norms are computed step by step in float32;
* there is no convolution; text is byte-level BPE.
"""

from __future__ import annotations

from flodl.graph import Graph
from flodl_hf.families import deberta_v2
from flodl_hf.families.deberta_v2 import DebertaConfig
from flodl_hf.families.schema import FamilyTokenizer
from flodl_hf.families.schema.config_rows import IgnoredKey
from flodl_hf.families.schema.record import KeyRow, rows_under
from flodl_hf.families.schema.shared_keys import BASE_SIZES
from flodl_hf.nn.disentangled.parts import RelativePositions
from flodl_hf.nn.encoder import chain, stack
from flodl_hf.nn.layers import StepwiseNorm

LATER = (
    "head_size", "position_buckets", "share_keys", "relative_norm", "conv_kernel_size", "conv_groups",
    "conv_activation",
)  # fmt: skip
CONFIG = tuple(row for row in deberta_v2.CONFIG if row.field not in LATER)

# fmt: off
IGNORED_KEYS = (
    *deberta_v2.IGNORED_KEYS,
    IgnoredKey("attention_head_size", "heads have hidden_size / num_attention_heads, for any value"),
    IgnoredKey("talking_head",        "mixes the weights of heads, which no published file does", (False,)),
)

LAYER = "encoder.layers.{i}.attention."
SELF = "deberta.encoder.layer.{i}.attention.self."
MOVED: dict[str, str | None] = {
    LAYER + "query":     "encoder.layer.{i}.attention.self.in_proj[0/3 of {heads}]",
    LAYER + "key":       "encoder.layer.{i}.attention.self.in_proj[1/3 of {heads}]",
    LAYER + "value":     "encoder.layer.{i}.attention.self.in_proj[2/3 of {heads}]",
    LAYER + "pos_key":   "encoder.layer.{i}.attention.self.pos_proj",
    LAYER + "pos_query": "encoder.layer.{i}.attention.self.pos_q_proj",
    "encoder.relative.norm": None, "encoder.layers.0.conv.filter": None, "encoder.layers.0.conv.norm": None,
}
KEYS = (
    *rows_under("deberta", deberta_v2.KEYS, MOVED),
    KeyRow(LAYER + "query.bias", SELF + "q_bias"),
    KeyRow(LAYER + "value.bias", SELF + "v_bias"),
)
PARTS = ("query", "key", "value", "pos_key", "pos_query")
# The module names of transformers, which files use, and then the names that the authors' code writes.
ALSO = (
    *(row for row in KEYS if row.ours in [LAYER + part for part in PARTS]),
    *(KeyRow(LAYER + part, f"{SELF}{part}_proj") for part in PARTS),
)
# fmt: on


def encoder(c: DebertaConfig) -> Graph:
    """Return the graph from ids to token states."""
    embeddings = deberta_v2.embeddings(c, StepwiseNorm)
    relative = RelativePositions(c.hidden_size, c.span, -1, c.max_distance, None)
    blocks = (deberta_v2.block(c, i, StepwiseNorm, joined=True) for i in range(c.num_layers))
    return chain(embeddings, stack(blocks, "relative"), bias=relative, bias_name="relative")


HEADS = {name: head for name, head in deberta_v2.HEADS.items() if name != "multiple_choice"}

TOKENIZER = FamilyTokenizer(
    special=deberta_v2.TOKENIZER.special,
    type_ids=True,
    inputs=("input_ids", "attention_mask", "token_type_ids"),
    files=("vocab.json", "merges.txt"),
    template="doubled",  # as in transformers 5; transformers 4 had one separator between two texts
)

TINY = {
    "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": -1,
    "position_biased_input": False, "type_vocab_size": 0, "pooler_hidden_size": 32, "legacy": False,
}  # fmt: skip
FAR = {
    "max_relative_positions": 6, "position_biased_input": True, "type_vocab_size": 2, "pos_att_type": ["p2c"],
    "legacy": True, "embedding_size": 16,
}  # fmt: skip

FAMILY = deberta_v2.FAMILY.renamed(
    "deberta",
    "Deberta",
    rows=CONFIG,
    left_out=BASE_SIZES | {"vocab_size": 50265},
    ignored_keys=IGNORED_KEYS,
    keys=KEYS,
    also=ALSO,
    prefixes=("bert",),
    indices=lambda c: [{"i": i, "heads": c.num_heads} for i in range(c.num_layers)],
    encoder=encoder,
    heads=HEADS,
    tokenizer=TOKENIZER,
    tiny={"base": TINY, "far and narrow": TINY | FAR},
    real={"base": TINY | {"pooler_hidden_size": 768, "vocab_size": 50265}},
)
