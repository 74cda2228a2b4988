"""A reference classifier: the scores that a ``config.json`` specifies, computed with plain torch in float64.

It reads keys as transformers documents them, without any code of this library, and so checks whether an accepted
configuration was applied. It returns nothing for configurations that it does not support.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["plain_scores"]

Weights = Mapping[str, Tensor]

_CURVES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "mish": F.mish,
    "linear": lambda x: x,
}


def plain_scores(config: Mapping[str, Any], weights: Weights, ids: Tensor) -> Tensor | None:
    """Return the scores of a text classifier, ``(batch, labels)``; None where the configuration makes no such model.

    Args:
        config: ``config.json``.
        weights: the file's tensors.
        ids: ``(batch, seq)``, without padding.
    """
    family = config.get("model_type")
    compute = _FAMILIES.get(family) if isinstance(family, str) else None
    if compute is None:
        return None
    try:
        found = compute(config, {name: tensor.double() for name, tensor in weights.items()}, ids)
    except Exception:  # whatever is wrong with the configuration: it makes no model
        return None
    return found if bool(torch.isfinite(found).all()) else None


def _linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def _norm(weights: Weights, name: str, x: Tensor, eps: float) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _block(w: Weights, names: Mapping[str, str], x: Tensor, heads: int, curve: Callable[[Tensor], Tensor],
           eps: float) -> Tensor:  # fmt: skip
    batch, length, width = x.shape
    query, key, value = (
        _linear(w, names[part], x).view(batch, length, heads, -1).transpose(1, 2) for part in ("query", "key", "value")
    )
    shares = (query @ key.transpose(-1, -2) / (width // heads) ** 0.5).softmax(-1)
    mixed = (shares @ value).transpose(1, 2).reshape(batch, length, width)
    x = _norm(w, names["norm"], x + _linear(w, names["out"], mixed), eps)
    return _norm(w, names["norm2"], x + _linear(w, names["down"], curve(_linear(w, names["up"], x))), eps)


def _embedded(w: Weights, prefix: str, ids: Tensor, places: Tensor, eps: float, *, types: bool) -> Tensor:
    x = w[f"{prefix}.word_embeddings.weight"][ids] + w[f"{prefix}.position_embeddings.weight"][places]
    if types:
        x = x + w[f"{prefix}.token_type_embeddings.weight"][0]
    return _norm(w, f"{prefix}.LayerNorm", x, eps)


def _in_order(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1]).expand_as(ids)


def _bert_stack(c: Mapping[str, Any], w: Weights, ids: Tensor, prefix: str, places: Tensor) -> Tensor:
    eps, curve = c.get("layer_norm_eps", 1e-12), _CURVES[c.get("hidden_act", "gelu")]
    x = _embedded(w, f"{prefix}.embeddings", ids, places, eps, types=True)
    for layer in range(c.get("num_hidden_layers", 12)):
        at = f"{prefix}.encoder.layer.{layer}"
        names = {
            **{part: f"{at}.attention.self.{part}" for part in ("query", "key", "value")},
            "out": f"{at}.attention.output.dense", "norm": f"{at}.attention.output.LayerNorm",
            "up": f"{at}.intermediate.dense", "down": f"{at}.output.dense", "norm2": f"{at}.output.LayerNorm",
        }  # fmt: skip
        x = _block(w, names, x, c.get("num_attention_heads", 12), curve, eps)
    return x


def _bert(c: Mapping[str, Any], w: Weights, ids: Tensor) -> Tensor:
    x = _bert_stack(c, w, ids, "bert", _in_order(ids))
    return _linear(w, "classifier", torch.tanh(_linear(w, "bert.pooler.dense", x[:, 0])))


def _roberta(c: Mapping[str, Any], w: Weights, ids: Tensor) -> Tensor:
    padding = c.get("pad_token_id", 1)
    others = (ids != padding).long()  # padding is skipped in counting, and has its own place
    x = _bert_stack(c, w, ids, "roberta", others.cumsum(1) * others + padding)
    return _linear(w, "classifier.out_proj", torch.tanh(_linear(w, "classifier.dense", x[:, 0])))


def _distilbert(c: Mapping[str, Any], w: Weights, ids: Tensor) -> Tensor:
    def stated(*keys: str, usual: int) -> Any:
        return next((c[key] for key in keys if key in c), usual)

    x = _embedded(w, "distilbert.embeddings", ids, _in_order(ids), 1e-12, types=False)
    curve = _CURVES[c.get("activation", "gelu")]
    for layer in range(stated("n_layers", "num_hidden_layers", usual=6)):
        at = f"distilbert.transformer.layer.{layer}"
        names = {
            "query": f"{at}.attention.q_lin", "key": f"{at}.attention.k_lin", "value": f"{at}.attention.v_lin",
            "out": f"{at}.attention.out_lin", "norm": f"{at}.sa_layer_norm", "up": f"{at}.ffn.lin1",
            "down": f"{at}.ffn.lin2", "norm2": f"{at}.output_layer_norm",
        }  # fmt: skip
        x = _block(w, names, x, stated("n_heads", "num_attention_heads", usual=12), curve, 1e-12)
    return _linear(w, "classifier", F.relu(_linear(w, "pre_classifier", x[:, 0])))


def _albert(c: Mapping[str, Any], w: Weights, ids: Tensor) -> Tensor:
    eps, curve = c.get("layer_norm_eps", 1e-12), _CURVES[c.get("hidden_act", "gelu_new")]
    x = _embedded(w, "albert.embeddings", ids, _in_order(ids), eps, types=True)
    x = _linear(w, "albert.encoder.embedding_hidden_mapping_in", x)
    layers, groups = c.get("num_hidden_layers", 12), c.get("num_hidden_groups", 1)
    for layer in range(layers):
        for inner in range(c.get("inner_group_num", 1)):
            at = f"albert.encoder.albert_layer_groups.{layer * groups // layers}.albert_layers.{inner}"
            names = {
                **{part: f"{at}.attention.{part}" for part in ("query", "key", "value")},
                "out": f"{at}.attention.dense", "norm": f"{at}.attention.LayerNorm", "up": f"{at}.ffn",
                "down": f"{at}.ffn_output", "norm2": f"{at}.full_layer_layer_norm",
            }  # fmt: skip
            x = _block(w, names, x, c.get("num_attention_heads", 64), curve, eps)
    return _linear(w, "classifier", torch.tanh(_linear(w, "albert.pooler", x[:, 0])))


_FAMILIES: Mapping[str, Callable[[Mapping[str, Any], Weights, Tensor], Tensor]] = {
    "bert": _bert,
    "roberta": _roberta,
    "xlm-roberta": _roberta,
    "camembert": _roberta,
    "distilbert": _distilbert,
    "albert": _albert,
}
