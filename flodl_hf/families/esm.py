"""ESM-2 and ESM-1b, encoders of proteins (Lin et al. 2023, https://doi.org/10.1126/science.ade2574), and of DNA.

They depart from BERT in:

* positions are learned and counted after the padding id, or queries and keys are turned by them;
* masked tokens are zeroed, and the others are scaled by the number of masks, as in training;
* norms come first, and once at the end; embeddings may be normalised too, and nothing of them is dropped;
* the file contains the frequencies of rotations: those of training, with their rounding;
* tokens are found at any position of a text, as in "MKTV".
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from flodl.graph import Graph
from flodl_hf.families import bert, mpnet, roberta
from flodl_hf.families.schema import Family, FamilyHead, FamilyTokenizer, Ignored, PassthroughTensor
from flodl_hf.families.schema.config_rows import (
    IgnoredKey,
    Row,
    boolean,
    count,
    epsilon,
    fraction,
    one_of,
    optional,
    token_id,
    within_vocabulary,
)
from flodl_hf.families.schema.record import KeyRow, Tie, rows_under
from flodl_hf.families.schema.shared_keys import BASE_SIZES, HEAD_WIDTH, SIZES, EncoderSizes, wavelength
from flodl_hf.nn import task_heads
from flodl_hf.nn.encoder import Embeddings, bert_block, chain, pooler, stack
from flodl_hf.nn.layers import EncoderLayer
from flodl_hf.nn.layout import Layout
from flodl_hf.nn.positions import Rotary, StatedRotary

# Of the tokens of a text, how many were masked in training: 80 % of 15 %.
MASKED_IN_TRAINING = 0.15 * 0.8
# Written with its reference's own operations; the curve is GELU's.
GELU = "gelu_python"


@dataclass(frozen=True, kw_only=True)
class EsmConfig(EncoderSizes):
    """The settings of an ESM encoder.

    Attributes:
        max_positions: rows of the position table where there is one.
        positions: "absolute" for a table of positions, "rotary" for queries and keys that are turned.
        theta: base of the wavelengths of rotations, if the file contains no frequencies.
        embedding_norm: whether embeddings are normalised.
        token_dropout: whether masked tokens are zeroed and the others scaled.
        mask_token_id: the id of masked tokens.
        pad_token_id: the id that positions skip; its rows get no gradient.
        hidden_dropout: probability of dropping a value of a state, in [0, 1).
        attention_dropout: probability of dropping an attention weight, in [0, 1).
        norm_eps: epsilon of every norm.
    """

    max_positions: int = 1026
    positions: str = "absolute"
    theta: float = 10_000.0
    embedding_norm: bool | None = None
    token_dropout: bool = False
    mask_token_id: int | None = None
    pad_token_id: int = 1
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    norm_eps: float = 1e-12
    activation = GELU  # no setting

    def __post_init__(self) -> None:
        if self.token_dropout and self.mask_token_id is None:
            raise ValueError("mask_token_id: found none; expected the mask's id, because token_dropout counts them")


# fmt: off
CONFIG = (
    *SIZES,
    Row("max_positions",     "max_position_embeddings",      count(most=1_000_000), 1026),
    Row("positions",         "position_embedding_type",      one_of("absolute", "rotary"), "absolute"),
    Row("theta",             "rope_theta",                   wavelength(), 10_000.0),
    Row("embedding_norm",    "emb_layer_norm_before",        optional(boolean()), None),
    Row("token_dropout",     "token_dropout",                boolean(), False),
    Row("mask_token_id",     "mask_token_id",                optional(token_id()), None),
    Row("pad_token_id",      "pad_token_id",                 roberta.PADDING, within_vocabulary(1)),
    Row("hidden_dropout",    "hidden_dropout_prob",          fraction(), 0.1),
    Row("attention_dropout", "attention_probs_dropout_prob", fraction(), 0.1),
    Row("norm_eps",          "layer_norm_eps",               epsilon(), 1e-12),
)

IGNORED_KEYS = (
    HEAD_WIDTH,
    IgnoredKey("hidden_act",         "its activation is always GELU"),
    IgnoredKey("classifier_dropout", "classifiers drop as the states do"),
    IgnoredKey("is_folding_model",   "ESMFold's structures are no head here", (False,)),
    IgnoredKey("esmfold_config",     "of ESMFold", (None,)),
    IgnoredKey("vocab_list",         "of ESMFold", (None,)),
)

MOVED = {
    "encoder.embeddings.norm": "embeddings.layer_norm",
    "encoder.embeddings.token_type": None,
    "encoder.layers.{i}.attention_norm": "encoder.layer.{i}.attention.LayerNorm",
    "encoder.layers.{i}.feed_forward_norm": "encoder.layer.{i}.LayerNorm",
    "encoder.layers.{i}.feed_forward.activation": None,
}
KEYS = (*rows_under("esm", bert.KEYS, MOVED), KeyRow("encoder.norm", "esm.encoder.emb_layer_norm_after"))

IGNORED = (
    Ignored("esm.embeddings.position_embeddings.weight", "position_embedding_type is rotary: there is no table"),
    Ignored("esm.encoder.layer.{i}.attention.self.rotary_embeddings.inv_freq", "the first layer's serve all"),
)
# Older files have one per layer, those of transformers 5.23 a name with a star.
OLDER = tuple(f"esm.encoder.layer.{i}.attention.self.rotary_embeddings.inv_freq" for i in "0*")
_CONTACTS = "scores contacts from attention weights (predict_contacts)"
KEPT = (
    PassthroughTensor(
        "esm.rotary_embeddings.inv_freq", "frequencies of rotations, taken as they are",
        OLDER, "encoder.embeddings.rotary",
    ),
    PassthroughTensor("esm.contact_head.regression.weight", _CONTACTS),
    PassthroughTensor("esm.contact_head.regression.bias",   _CONTACTS),
)
# fmt: on


class EsmEmbeddings(Embeddings):
    """Words and positions, summed, normalised if the settings specify it, and zeroed at padding.

    Args:
        c: the settings.
    """

    given_whole = True  # as the reference takes them: without positions, norm and scale

    def __init__(self, c: EsmConfig) -> None:
        table = c.positions == "absolute"
        super().__init__(
            c.vocab_size, c.hidden_size, c.norm_eps if c.embedding_norm else None, 0.0,
            max_positions=c.max_positions if table else 0, pad_token_id=c.pad_token_id, positions_after_pad=True,
        )  # fmt: skip
        self.mask_token_id = c.mask_token_id if c.token_dropout else None
        self.rotary = None if table else StatedRotary(c.hidden_size // c.num_heads, c.theta, widened=True)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        layout: Layout | None = None,
    ) -> Tensor:
        """Return the embedded tokens, ``(..., size)``; ``token_type_ids`` are not read."""
        assert layout is not None
        states = self.word(input_ids)
        # From a table with virtual tokens the reference gets embeddings, not ids, and takes them as all there is: no
        # masks are counted, and neither positions nor the norm are applied.
        if type(self.word) is nn.Embedding:
            if self.mask_token_id is not None:
                masked = (input_ids == self.mask_token_id).unsqueeze(-1)
                share = layout.spread(layout.mean(masked.float()))
                states = states.masked_fill(masked, 0.0) * (1 - MASKED_IN_TRAINING) / (1 - share)
                states = states.to(self.word.weight.dtype)
            if self.position is not None:
                places = self._positions(input_ids, layout) if position_ids is None else position_ids
                states = states + self.position(places)
            if self.norm is not None:
                states = self.norm(states)
        keep = layout.keep(states)
        if self.rotary is not None:
            self.rotary.angles(states, layout)  # which all layers of the call find
        return states if keep is None else states * keep.to(states.dtype)


def block(c: EsmConfig) -> EncoderLayer:
    """Return one layer: norms first, queries scaled before they are turned."""
    rotary = None if c.positions == "absolute" else Rotary(c.hidden_size // c.num_heads, c.theta, widened=True)
    return bert_block(c, attention={"rotary": rotary, "scale_first": True}, order="pre")


def encoder(c: EsmConfig) -> Graph:
    """Return the graph from ids to token states."""
    layers = stack(block(c) for _ in range(c.num_layers))
    return chain(EsmEmbeddings(c), layers, norm=nn.LayerNorm(c.hidden_size, eps=c.norm_eps))


HEADS = {
    "sequence_classification": mpnet.HEADS["sequence_classification"],
    "token_classification": bert.DROPPED_TOKENS,
    "masked_lm": FamilyHead(
        body=lambda c, _: task_heads.shifted_lm(c.hidden_size, c.vocab_size, GELU, c.norm_eps, "", "shift"),
        keys=(
            KeyRow("head.dense", "lm_head.dense"),
            KeyRow("head.norm", "lm_head.layer_norm"),
            KeyRow("head.decoder", "lm_head.decoder"),
            KeyRow("head.shift", "lm_head"),
        ),
        ties=(Tie("encoder.embeddings.word.weight", "head.decoder.weight"),),
    ),
}

TOKENIZER = FamilyTokenizer(
    special={
        "cls_token": "<cls>", "pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>", "mask_token": "<mask>",
    },
    type_ids=False,
    files=("vocab.txt",),
    build="anywhere",
)  # fmt: skip

TINY = {
    "position_embedding_type": "rotary", "token_dropout": True, "mask_token_id": 4, "pad_token_id": 1,
    "emb_layer_norm_before": False, "layer_norm_eps": 1e-5,
}  # fmt: skip
FIRST = TINY | {"position_embedding_type": "absolute", "emb_layer_norm_before": True}

FAMILY = Family(
    model_type="esm",
    class_prefix="Esm",
    base_prefix="esm",
    config=EsmConfig,
    left_out=BASE_SIZES,
    rows=CONFIG,
    ignored_keys=IGNORED_KEYS,
    keys=KEYS,
    ignored=IGNORED,
    methods={"predict_contacts": "flodl_hf.models.protein_contacts:predict_contacts"},
    kept=KEPT,
    encoder=encoder,
    pooler=lambda c: pooler(c.hidden_size),
    heads=HEADS,
    unused_positions=lambda c: c.pad_token_id + 1,
    tokenizer=TOKENIZER,
    tiny={"base": TINY, "first": FIRST},
    real={"base": TINY | {"vocab_size": 33, "max_position_embeddings": 1026, "mask_token_id": 32}},
)
