"""JinaBERT's files, written for the code of a repository, beside a forward in float64 written out here."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flodl.errors import ConfigError
from flodl_hf import load
from flodl_hf.checkpoints.config.model_config import ModelConfig

# As published for jinaai/jina-embeddings-v2-base-en, smaller.
PUBLISHED: dict[str, Any] = {
    "_name_or_path": "jinaai/jina-bert-implementation", "model_max_length": 8192, "architectures": ["JinaBertForMaskedLM"],
    "attention_probs_dropout_prob": 0.0, "attn_implementation": None, "classifier_dropout": None, "emb_pooler": "mean",
    "auto_map": {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"}, "gradient_checkpointing": False,
    "feed_forward_type": "geglu", "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768,
    "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-12, "max_position_embeddings": 8192,
    "model_type": "bert", "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0,
    "position_embedding_type": "alibi", "torch_dtype": "float16", "type_vocab_size": 2, "use_cache": True, "vocab_size": 30528,
}  # fmt: skip
SMALL = {
    "vocab_size": 90,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 20,
    "torch_dtype": "float32",
}
IDS = torch.tensor([[2, 9, 17, 33, 41, 8, 3], [2, 30, 3, 0, 0, 0, 0]])
MASK = torch.tensor([[1] * 7, [1] * 3 + [0] * 4])


def written(folder: Path, architecture: str = "JinaBertModel", **settings: Any) -> Path:
    """Return a folder with a file under the repository's names."""
    config = PUBLISHED | SMALL | {"architectures": [architecture]} | settings
    draw = torch.Generator().manual_seed(4)
    width, inside = config["hidden_size"], config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (90, width), "embeddings.token_type_embeddings.weight": (2, width),
        "embeddings.LayerNorm.weight": (width,), "embeddings.LayerNorm.bias": (width,),
    }  # fmt: skip
    for i in range(config["num_hidden_layers"]):
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            shapes |= {f"encoder.layer.{i}.attention.{part}.weight": (width, width)}
            shapes |= {f"encoder.layer.{i}.attention.{part}.bias": (width,)}
        shapes |= {f"encoder.layer.{i}.mlp.gated_layers.weight": (2 * inside, width)}
        shapes |= {f"encoder.layer.{i}.mlp.wo.weight": (width, inside), f"encoder.layer.{i}.mlp.wo.bias": (width,)}
        for norm in ("attention.output.LayerNorm", "mlp.layernorm"):
            shapes |= {f"encoder.layer.{i}.{norm}.weight": (width,), f"encoder.layer.{i}.{norm}.bias": (width,)}
    tensors = {name: torch.randn(shape, generator=draw) * 0.3 for name, shape in shapes.items()}
    if architecture != "JinaBertModel":
        tensors = {f"bert.{name}": value for name, value in tensors.items()}
        for name, shape in {"transform.dense.weight": (width, width), "transform.dense.bias": (width,), "bias": (90,),
                            "transform.LayerNorm.weight": (width,), "transform.LayerNorm.bias": (width,)}.items():  # fmt: skip
            tensors[f"cls.predictions.{name}"] = torch.randn(shape, generator=draw) * 0.3
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def slopes(heads: int) -> list[float]:
    """Return ALiBi's slopes as its paper has them."""
    if math.log2(heads).is_integer():
        return [2 ** (-8 / heads * (i + 1)) for i in range(heads)]
    near = 2 ** math.floor(math.log2(heads))
    return slopes(near) + slopes(2 * near)[::2][: heads - near]


def exact(folder: Path, ids: list[int], act: Any = torch.nn.functional.gelu) -> Tensor:
    """Return the states of one text in float64."""
    config = json.loads((folder / "config.json").read_text())
    held = {n.removeprefix("bert."): v.double() for n, v in load_file(folder / "model.safetensors").items()}

    def norm(x: Tensor, name: str) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-12).sqrt() * held[f"{name}.weight"] + held[f"{name}.bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ held[f"{name}.weight"].T + held[f"{name}.bias"]

    words = held["embeddings.word_embeddings.weight"][ids] + held["embeddings.token_type_embeddings.weight"][0]
    x, n, heads = norm(words, "embeddings.LayerNorm"), len(ids), config["num_attention_heads"]
    away = (torch.arange(n)[:, None] - torch.arange(n)[None]).abs().double()
    for i in range(config["num_hidden_layers"]):
        at, inside = f"encoder.layer.{i}", config["intermediate_size"]
        q, k, v = (
            linear(x, f"{at}.attention.self.{p}").view(n, heads, -1).transpose(0, 1) for p in ("query", "key", "value")
        )
        scores = q @ k.mT / q.shape[-1] ** 0.5 - torch.tensor(slopes(heads)).double()[:, None, None] * away
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, -1)
        x = norm(linear(mixed, f"{at}.attention.output.dense") + x, f"{at}.attention.output.LayerNorm")
        both = x @ held[f"{at}.mlp.gated_layers.weight"].T
        x = norm(linear(act(both[:, :inside]) * both[:, inside:], f"{at}.mlp.wo") + x, f"{at}.mlp.layernorm")
    return x


@pytest.mark.parametrize(("heads", "gate"), [(6, "geglu"), (4, "geglu"), (12, "reglu"), (3, "reglu")])
def test_states_are_those_of_the_arithmetic_in_float64(tmp_path: Path, heads: int, gate: str) -> None:
    folder = written(tmp_path, num_attention_heads=heads, feed_forward_type=gate)
    model: Any = load(folder)
    assert model.load_report.trained
    act = torch.nn.functional.gelu if gate == "geglu" else torch.relu
    for attention in ("sdpa", "eager"):
        with torch.no_grad():
            found = model.set_attention(attention)(IDS, MASK)[0]
        for row, ids in enumerate([IDS[0].tolist(), IDS[1, :3].tolist()]):
            torch.testing.assert_close(found[row, : len(ids)].double(), exact(folder, ids, act), rtol=0, atol=5e-6)
    twice = model.double().set_attention("eager")
    with torch.no_grad():
        # Slopes are float32 numbers, exact where the heads are a power of two.
        torch.testing.assert_close(twice(IDS)[0][0], exact(folder, IDS[0].tolist(), act), rtol=0, atol=1e-6)


def test_a_file_is_written_back_as_it_was(tmp_path: Path) -> None:
    for architecture in ("JinaBertModel", "JinaBertForMaskedLM"):
        folder = written(tmp_path / architecture, architecture)
        model = load(folder)
        assert model.config.model_type == "jina_bert"
        assert model.head == ("base" if architecture == "JinaBertModel" else "masked_lm")
        out = model.save_pretrained(tmp_path / f"{architecture}-out")
        for name in ("config.json", "model.safetensors"):
            assert (out / name).read_bytes() == (folder / name).read_bytes()


def test_the_published_configuration_is_read() -> None:
    config = ModelConfig.from_dict(PUBLISHED)
    assert config.encoder.hidden_size == 768
    assert config.max_tokens == 8192
    assert [note.split(":")[0] for note in config.notes if "auto_map" not in note and "not known" in note] == []
    with pytest.raises(ConfigError, match="feed_forward_type"):
        ModelConfig.from_dict(PUBLISHED | {"feed_forward_type": "original"})
