"""RoCBERT without its additional embeddings (Su et al. 2022), and a question answering head for GTE."""

from __future__ import annotations

from flodl_hf.families import bert
from flodl_hf.families.schema import FamilyHead, IgnoredKey, KeyRow, PassthroughTensor
from flodl_hf.nn import task_heads

__all__ = ["GTE_ANSWERS", "ROC_BERT"]

_NOT_CALLED = "an embedding that a call with ids alone does not use"
_KINDS = ("pronunciation", "shape")

ROC_BERT = bert.FAMILY.renamed(
    "roc_bert",
    "RoCBert",
    base_prefix="roc_bert",
    ignored_keys=(
        IgnoredKey("concat_input", "nothing is concatenated to the word embeddings", (False,)),
        *(IgnoredKey(f"{kind}_{size}", _NOT_CALLED) for kind in _KINDS for size in ("embed_dim", "vocab_size")),
        *(IgnoredKey(f"enable_{kind}", _NOT_CALLED) for kind in _KINDS),
    ),
    kept=tuple(PassthroughTensor(f"roc_bert.embeddings.{kind}_embed.weight", _NOT_CALLED) for kind in _KINDS),
    pretraining={},
    tiny={"base": {"concat_input": False}},
)

GTE_ANSWERS = FamilyHead(
    body=lambda c, labels: task_heads.linear(c.hidden_size, labels, None, name="spans"),
    keys=(KeyRow("head.spans", "qa_outputs"),),
)
