"""jina-embeddings-v3's first files: read without their code, with the adapters of their tasks, written back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flodl.errors import ConfigError
from flodl_hf import load
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.errors import PredictError
from flodl_hf.heads.auto import head_named
from flodl_hf.training.demo import learn_vocabulary

TASKS = ["retrieval.query", "retrieval.passage", "separation", "classification", "text-matching"]
PUBLISHED: dict[str, Any] = {
    "architectures": ["XLMRobertaModel"], "attention_probs_dropout_prob": 0.1, "bos_token_id": 0, "classifier_dropout": None,
    "auto_map": {"AutoModel": "jinaai/xlm-roberta-flash-implementation--modeling_lora.XLMRobertaLoRA"}, "emb_pooler": None,
    "eos_token_id": 2, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 1024, "initializer_range": 0.02,
    "intermediate_size": 4096, "layer_norm_eps": 1e-05, "load_trained_adapters": True, "lora_adaptations": TASKS,
    "lora_alpha": 1, "lora_dropout_p": 0.0, "lora_main_params_trainable": False, "lora_rank": 4,
    "matryoshka_dimensions": [32, 64, 1024], "max_position_embeddings": 8194, "model_type": "xlm-roberta",
    "num_attention_heads": 16, "num_hidden_layers": 24, "output_past": True, "pad_token_id": 1,
    "position_embedding_type": "rotary", "rotary_emb_base": 20000.0, "torch_dtype": "bfloat16", "truncate_dim": None,
    "task_instructions": {task: f"a text for {task}: " for task in TASKS}, "type_vocab_size": 1, "use_cache": False,
    "use_flash_attn": True, "use_reg_tokens": False, "vocab_size": 250002,
}  # fmt: skip
SMALL = {
    "vocab_size": 640, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 64, "pad_token_id": 1, "type_vocab_size": 1,
}  # fmt: skip
TEXTS = ["the soup was good", "a late guide"]


def files(folder: Path) -> tuple[Path, Path, dict[str, Tensor]]:
    """Return the family's own folder, one under the repository's names, and the latter's differences."""
    torch.manual_seed(3)
    config = ModelConfig.for_model("jina_embeddings_v3", **SMALL)
    model = head_named("base").model.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    own = model.save_pretrained(folder / "own")
    tensors: dict[str, Tensor] = {}
    for name, value in load_file(own / "model.safetensors").items():
        name = f"roberta.{name}"
        if value.dim() < 2:
            tensors[name] = value
            continue
        stem = name.removesuffix(".weight") + ".parametrizations.weight"
        rows, columns = value.shape
        table = "embeddings" in name
        tensors[f"{stem}.original"] = value
        tensors[f"{stem}.0.lora_A"] = torch.randn(5, *((rows, 4) if table else (4, columns))) * 0.3
        tensors[f"{stem}.0.lora_B"] = torch.randn(5, *((4, columns) if table else (rows, 4))) * 0.3
    other = folder / "other"
    other.mkdir()
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    (other / "config.json").write_text(json.dumps(PUBLISHED | SMALL | {"torch_dtype": "float32"}, indent=2))
    for place in (own, other):
        learn_vocabulary().save_pretrained(place)
    return own, other, tensors


def test_without_a_task_it_is_the_familys_own_model(tmp_path: Path) -> None:
    own, other, _ = files(tmp_path)
    model: Any = load(other)
    assert model.config.model_type == "jina_embeddings_v3_tasks"
    assert model.load_report.trained
    right: Any = load(own)
    ids, mask = torch.tensor([[2, 9, 17, 33, 3], [2, 30, 3, 1, 1]]), torch.tensor([[1] * 5, [1] * 3 + [0] * 2])
    with torch.no_grad():
        for found, expected in zip(model(ids, mask).values(), right(ids, mask).values(), strict=True):
            assert torch.equal(found, expected)
    out = model.save_pretrained(tmp_path / "out")
    for name in ("model.safetensors", "config.json"):
        assert (out / name).read_bytes() == (other / name).read_bytes()


def test_a_task_adds_its_own_difference_to_every_weight(tmp_path: Path) -> None:
    own, other, tensors = files(tmp_path)
    model: Any = load(other)
    plain = model.embed(TEXTS)
    for place, task in ((0, TASKS[0]), (3, TASKS[3])):
        held = load_file(own / "model.safetensors")
        for name, value in held.items():
            stem = f"roberta.{name.removesuffix('.weight')}.parametrizations.weight.0.lora_"
            if value.dim() == 2:
                a, b = tensors[stem + "A"][place].double(), tensors[stem + "B"][place].double()
                held[name] = (value.double() + (a @ b if "embeddings" in name else b @ a) / 4).float()
        folder = tmp_path / f"merged-{place}"
        folder.mkdir()
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_bytes((own / "config.json").read_bytes())
        learn_vocabulary().save_pretrained(folder)
        merged: Any = load(folder)
        expected = merged.embed(TEXTS, prompt=f"a text for {task}: ")
        found = model.embed(TEXTS, task=task)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
        assert torch.equal(model.embed(TEXTS, task=task), found)
        torch.testing.assert_close(model.embed(TEXTS, task=task, prompt=""), merged.embed(TEXTS), rtol=0, atol=2e-5)
        assert torch.equal(torch.from_numpy(model.encode(TEXTS, task=task, normalize_embeddings=True)), found)
        assert not torch.allclose(found, plain, atol=1e-3)
    assert torch.equal(model.embed(TEXTS), plain)


def test_a_change_of_weights_reaches_tasks(tmp_path: Path) -> None:
    _, other, _ = files(tmp_path)
    model: Any = load(other)
    before = model.embed(TEXTS, task="separation")
    with torch.no_grad():
        model.graph.get_parameter("encoder.layers.0.attention.query.weight").mul_(2)
    assert not torch.equal(model.embed(TEXTS, task="separation"), before)


def test_unknown_tasks_are_refused(tmp_path: Path) -> None:
    own, other, _ = files(tmp_path)
    with pytest.raises(PredictError, match="did you mean 'separation'"):
        load(other).embed(TEXTS, task="seperation")  # type: ignore[attr-defined]
    with pytest.raises(PredictError, match="the file has none"):
        load(own).embed(TEXTS, task="separation")  # type: ignore[attr-defined]


def test_the_published_configuration_is_read() -> None:
    config = ModelConfig.from_dict(PUBLISHED)
    assert config.encoder.tasks == tuple(TASKS)
    assert config.encoder.theta == 20000.0
    assert not [note for note in config.notes if "not known to any family" in note]
    with pytest.raises(ConfigError, match="lora_adaptations"):
        ModelConfig.from_dict(PUBLISHED | {"lora_adaptations": [1]})
