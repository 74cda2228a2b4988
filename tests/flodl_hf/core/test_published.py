"""The configurations of the encoders that people download most load, and compute what transformers computes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flodl.errors import ConfigError
from flodl_hf import load
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.checkpoints.weights.loading import head_of
from flodl_hf.families import FAMILIES
from flodl_hf.heads.auto import head_named
from flodl_hf.parity.matrix import checkpoints_of, published

sys.path.insert(0, str(Path(__file__).parent))
from published import FURTHER, PUBLISHED, REFUSED, shrunk

ALL = PUBLISHED | FURTHER
DOCS = Path(__file__).parents[3] / "docs"
# Sizes by which each file becomes a tiny one of the same architecture; heads and groups stay odd where they were.
SMALL = [
    ("vocab_size", 90), ("hidden_size", 16), ("dim", 16), ("num_hidden_layers", 2), ("n_layers", 2),
    ("num_attention_heads", 2), ("n_heads", 2), ("intermediate_size", 24), ("hidden_dim", 24),
    ("max_position_embeddings", 40), ("pooler_hidden_size", 16), ("emb_size", 16), ("attention_head_size", 8),
    ("local_attention", 4), ("head_dim", 8), ("num_key_value_heads", 2),
]  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_a_published_configuration_is_read(name: str) -> None:
    source, head = ALL[name]
    config = ModelConfig.from_dict(source, where=name)
    assert (head_of(config.family, source.get("architectures")) or "base") == head_named(head).name
    assert not [note for note in config.notes if "not known to any family" in note]
    if "id2label" in source:
        assert list(config.labels) == list(source["id2label"].values())


@pytest.mark.parametrize("name", REFUSED)
def test_another_model_under_a_familys_name_is_refused_by_its_key(name: str) -> None:
    source, key = REFUSED[name]
    with pytest.raises(ConfigError, match=f"{key}: found"):
        ModelConfig.from_dict(source, where=name)


def test_the_list_is_long_and_holds_every_checkpoint_of_the_live_matrix() -> None:
    # Files for the code of a repository are tried in tests of their own.
    remote = {"gte", "new", "nomic_bert", "jina_bert", "jina_embeddings_v3", "jina_embeddings_v3_tasks"}
    ours = [family for family in FAMILIES if family.model_type not in remote]
    pinned = {name for family in ours for name in checkpoints_of(family).values()}
    assert {family.model_type for family in FAMILIES if family.checkpoints} == set()
    heads = {family.model_type: {"base", *family.heads} for family in FAMILIES}
    assert all(set(named) <= heads[model_type] for model_type, named in published().items())
    assert len(PUBLISHED) >= 60
    assert not PUBLISHED.keys() & FURTHER.keys()
    assert {FAMILIES[0].model_type, *(source["model_type"] for source, _ in ALL.values())} == {
        family.model_type for family in FAMILIES
    } - remote
    assert pinned - set(PUBLISHED) == set()


def test_the_page_names_what_is_tested() -> None:
    page = "".join((DOCS / f"{name}-models.md").read_text("utf-8") for name in ("which", "tested"))
    named = set(re.findall(r"`([\w.-]+/[\w.-]+)`", page))
    assert set(ALL) | set(REFUSED) <= named


@pytest.mark.transformers
@pytest.mark.parametrize("name", ALL)
def test_a_tiny_model_of_each_is_transformers_to_the_bit(name: str, tmp_path: Path) -> None:
    """The file as it stands but for its sizes, beside weights that transformers wrote."""
    import transformers

    transformers.logging.set_verbosity_error()  # it warns of special tokens beyond the small vocabulary
    source, head = ALL[name]
    rows = SMALL + ([] if source["model_type"] == "albert" else [("embedding_size", 16)])
    config = shrunk(source, rows)
    if (config.get("pad_token_id") or 0) >= 90:
        config["pad_token_id"] = 0
    stated: Any = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
    kind = {
        "base": transformers.AutoModel, "mlm": transformers.AutoModelForMaskedLM,
        "seqcls": transformers.AutoModelForSequenceClassification, "qa": transformers.AutoModelForQuestionAnswering,
        "tokcls": transformers.AutoModelForTokenClassification, "replaced": transformers.AutoModelForPreTraining,
    }[head]  # fmt: skip
    torch.manual_seed(3)
    theirs = kind.from_config(stated).float().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.2)
    theirs.save_pretrained(tmp_path)
    if config.get("architectures") == ["HF_ColBERT"]:  # its projection is tried in test_sentence_modules
        del config["architectures"]
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "torch_dtype"}))
    ours, theirs = load(tmp_path), kind.from_pretrained(tmp_path).eval()
    for parameter in theirs.parameters():  # where they lie in the mapped file decides the last bit of a product
        parameter.data = parameter.data.clone()
    assert ours.head == head_named(head).name
    ids = torch.tensor([[2, 9, 17, 33, 3], [2, 30, 3, 1, 1]])
    mask = torch.tensor([[1] * 5, [1] * 3 + [0] * 2])
    with torch.no_grad():
        found, expected = ours(ids, mask).to_tuple(), theirs(ids, mask).to_tuple()
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    if head in ("seqcls", "tokcls"):
        assert ours.config.id2label == theirs.config.id2label
