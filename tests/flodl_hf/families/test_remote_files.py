"""Files that were written for the code of a repository load without that code, and are written back as they were.

Each is the family's own model under the other names, so it has to give the same numbers to the bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flodl.errors import ConfigError
from flodl_hf import load
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.heads.auto import head_named
from flodl_hf.nn.positions import Rotary, RotarySettings

Tensors = dict[str, torch.Tensor]

NOMIC: dict[str, Any] = {
    "activation_function": "swiglu", "attn_pdrop": 0.0, "bos_token_id": None, "causal": False, "dense_seq_output": True,
    "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"}, "embd_pdrop": 0.0,
    "eos_token_id": None, "fused_bias_fc": True, "fused_dropout_add_ln": True, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-12, "max_trained_positions": 2048, "mlp_fc1_bias": False, "mlp_fc2_bias": False,
    "model_type": "nomic_bert", "n_embd": 768, "n_head": 12, "n_inner": 3072, "n_layer": 12, "n_positions": 8192,
    "pad_vocab_size_multiple": 64, "parallel_block": False, "parallel_block_tied_norm": False, "prenorm": False,
    "qkv_proj_bias": False, "reorder_and_upcast_attn": False, "resid_pdrop": 0.0, "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None, "scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True,
    "summary_activation": None, "summary_first_dropout": 0.0, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True, "torch_dtype": "float32", "type_vocab_size": 2,
    "use_cache": True, "use_flash_attn": True, "use_rms_norm": False, "use_xentropy": True, "vocab_size": 30528,
}  # fmt: skip
GTE: dict[str, Any] = {
    "attention_probs_dropout_prob": 0.0, "auto_map": {"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"},
    "classifier_dropout": 0.0, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768,
    "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-12, "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False, "logn_attention_scale": False, "max_position_embeddings": 8192, "model_type": "new",
    "num_attention_heads": 12, "num_hidden_layers": 12, "pack_qkv": True, "pad_token_id": 1,
    "position_embedding_type": "rope", "rope_scaling": {"factor": 8.0, "type": "ntk"}, "rope_theta": 20000,
    "torch_dtype": "float16", "type_vocab_size": 1, "unpad_inputs": False, "use_memory_efficient_attention": False,
    "vocab_size": 250048,
}  # fmt: skip
SMALL = {
    "vocab_size": 90, "hidden_size": 16, "n_embd": 16, "num_hidden_layers": 2, "n_layer": 2, "num_attention_heads": 2,
    "n_head": 2, "intermediate_size": 24, "n_inner": 24, "n_positions": 64, "max_trained_positions": 32,
    "max_position_embeddings": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Remote:
    """One published file: its settings, the family's own settings, and the names it has for the family's tensors."""

    name: str
    config: Mapping[str, Any]
    head: str
    family: str
    native: Mapping[str, Any]
    renamed: Callable[[str], str]


def without(prefix: str) -> Callable[[str], str]:
    return lambda name: name.removeprefix(prefix + ".")


def under(old: str, new: str) -> Callable[[str], str]:
    return lambda name: name.replace(f"{old}.", f"{new}.", 1) if name.startswith(f"{old}.") else name


FILES = [
    Remote(
        "nomic-ai/nomic-embed-text-v1.5", NOMIC | {"architectures": ["NomicBertModel"]}, "base", "nomic_bert",
        {"rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"}}, without("nomic_bert"),
    ),
    *(
        Remote(
            name, NOMIC | {"architectures": ["NomicBertModel"]}, "base", "nomic_bert",
            {"rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"}}, without("nomic_bert"),
        )
        for name in ("nomic-ai/nomic-embed-text-v1", "Snowflake/snowflake-arctic-embed-m-long")
    ),
    Remote(
        "Snowflake/snowflake-arctic-embed-m-v2.0",
        GTE | {
            "architectures": ["GteModel"], "auto_map": {"AutoModel": "modeling_hf_alibaba_nlp_gte.GteModel"},
            "model_type": "gte", "rope_scaling": None, "rope_theta": 160000,
        },
        "base", "gte", {"rope_parameters": {"rope_theta": 160000.0, "rope_type": "default"}}, without("gte"),
    ),
    Remote(
        "Alibaba-NLP/gte-large-en-v1.5",
        GTE | {
            "architectures": ["NewModel"], "pad_token_id": 0, "rope_scaling": {"factor": 2.0, "type": "ntk"},
            "rope_theta": 160000, "type_vocab_size": 2, "vocab_size": 30528,
        },
        "base", "gte",
        {"rope_theta": 160000.0, "rope_scaling": {"factor": 2.0, "type": "ntk"}, "type_vocab_size": 2, "pad_token_id": 0},
        lambda name: f"new.{name}",
    ),
    Remote(
        "nomic-ai/nomic-bert-2048", NOMIC | {"architectures": ["NomicBertForPreTraining"], "n_positions": 2048}, "mlm",
        "nomic_bert", {"rotary_emb_base": 1000}, under("nomic_bert", "bert"),
    ),
    Remote(
        "Alibaba-NLP/gte-multilingual-base", GTE | {"architectures": ["NewModel", "NewForTokenClassification"]}, "base",
        "gte", {"rope_parameters": {"rope_theta": 20000.0, "rope_type": "ntk", "factor": 8.0}, "type_vocab_size": 1},
        lambda name: f"new.{name}",
    ),
    Remote(
        "Alibaba-NLP/gte-base-en-v1.5",
        GTE | {
            "architectures": ["NewModel"], "pad_token_id": 0, "rope_scaling": {"factor": 2.0, "type": "ntk"},
            "rope_theta": 500000, "type_vocab_size": 0,
        },
        "base", "gte",
        {"rope_theta": 500000.0, "rope_scaling": {"factor": 2.0, "type": "ntk"}, "type_vocab_size": 0, "pad_token_id": 0},
        lambda name: f"new.{name}",
    ),
    Remote(
        "Alibaba-NLP/gte-multilingual-reranker-base",
        GTE | {"architectures": ["NewForSequenceClassification"], "id2label": {"0": "LABEL_0"}}, "seqcls", "gte",
        {"rope_theta": 20000.0, "rope_scaling": {"factor": 8.0, "type": "ntk"}, "type_vocab_size": 1, "num_labels": 1},
        under("gte", "new"),
    ),
]  # fmt: skip
files = pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)


def small(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: SMALL.get(key, value) for key, value in config.items() if key != "torch_dtype"}


def pair(file: Remote, folder: Path) -> tuple[Path, Path]:
    """Return a folder with the family's own names and settings, and one with the same tensors as the file has them."""
    sizes = {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"}
    settings = {key: SMALL[key] for key in sizes} | {"max_position_embeddings": 64} | dict(file.native)
    torch.manual_seed(4)
    model = head_named(file.head).model.from_config(ModelConfig.for_model(file.family, **settings), pooler=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    own = model.save_pretrained(folder / "own")
    other = folder / "other"
    other.mkdir()
    tensors = {file.renamed(name): value for name, value in load_file(own / "model.safetensors").items()}
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    (other / "config.json").write_text(json.dumps(small(file.config), indent=2))
    return own, other


@files
def test_it_gives_the_familys_own_numbers(file: Remote, tmp_path: Path) -> None:
    own, other = pair(file, tmp_path)
    right, found = load(own), load(other)
    assert found.head == right.head == head_named(file.head).name
    assert found.load_report is not None
    assert found.load_report.trained
    assert any(note.startswith("auto_map: ") for note in found.load_report.notes)
    ids = torch.tensor([[2, 9, 17, 33, 3, 8, 41], [2, 30, 3, 1, 1, 1, 1]])
    mask = torch.tensor([[1] * 7, [1] * 3 + [0] * 4])
    with torch.no_grad():
        assert all(map(torch.equal, right(ids, mask).to_tuple(), found(ids, mask).to_tuple()))


@files
def test_it_is_written_back_byte_for_byte(file: Remote, tmp_path: Path) -> None:
    _, other = pair(file, tmp_path)
    again = load(other).save_pretrained(tmp_path / "again")
    assert {p.name: (again / p.name).read_bytes() for p in other.iterdir()} == {
        p.name: p.read_bytes() for p in other.iterdir()
    }


@files
def test_its_published_configuration_is_read(file: Remote) -> None:
    config = ModelConfig.from_dict(file.config, where=file.name)
    assert config.encoder.hidden_size == 768
    assert config.max_tokens == file.config.get("n_positions", 8192)
    assert [note.split(":")[0] for note in config.notes] == ["auto_map"]


def test_experts_are_refused_by_their_key() -> None:
    source = NOMIC | {"architectures": ["NomicBertModel"], "num_experts": 8, "moe_every_n_layers": 2, "moe_top_k": 2}
    with pytest.raises(ConfigError, match="num_experts: found 8"):
        ModelConfig.from_dict(source, where="nomic-ai/nomic-embed-text-v2-moe")


def test_gliners_folders_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "gliner_config.json").write_text('{"model_name": "microsoft/deberta-v3-base"}')
    with pytest.raises(ConfigError, match=r"By gliner_config\.json this is GLiNER, another architecture"):
        load(tmp_path)


def test_the_page_names_them() -> None:
    page = (Path(__file__).parents[3] / "docs" / "which-models.md").read_text("utf-8")
    assert [file.name for file in FILES if f"`{file.name}`" not in page] == []


def test_what_depends_on_the_batch_bounds_the_length_instead() -> None:
    config = ModelConfig.from_dict(NOMIC | {"rotary_scaling_factor": 2})
    assert config.max_tokens == 2048


def test_positions_are_stretched_as_the_repository_does() -> None:
    for theta, factor in ((20000.0, 8.0), (500000.0, 2.0)):
        found = Rotary(64, theta, RotarySettings(None, "ntk", factor)).frequencies(torch.device("cpu")).double()
        steps = torch.arange(0, 64, 2, dtype=torch.float64) / 64
        expected = (theta * factor) ** -steps / factor ** (2 / 64)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        linear = Rotary(64, theta, RotarySettings(None, "linear", factor)).frequencies(torch.device("cpu")).double()
        torch.testing.assert_close(linear, theta**-steps / factor, rtol=1e-6, atol=0)
