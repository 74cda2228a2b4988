"""Dense layers of sentence-transformers' folders: read without pickle, computed in float32, written back.

One stands behind a pooling and changes the vector of a text (LaBSE, GTR), or behind the transformer and changes the
vector of each token (ColBERT).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flodl.errors import ConfigError, printable, shown
from flodl_hf.weights.checkpoint import Checkpoint
from flodl_hf.weights.checkpoint.members import is_entry, read_member

__all__ = ["Dense", "dense", "dense_files", "read_dense"]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda values: values,
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "GELU": F.gelu,
    "SiLU": F.silu,
    "Sigmoid": torch.sigmoid,
}
_MOST = 1 << 30


@dataclass(frozen=True, eq=False)
class Dense:
    """A projection with an activation.

    Args:
        weight: ``(out, in)``, float32.
        bias: ``(out,)``, or None.
        activation: the name of torch's class.
        source: what `config.json` of its folder says, to be written back.
    """

    weight: Tensor
    bias: Tensor | None = None
    activation: str = "Identity"
    source: Mapping[str, Any] | None = None

    def __call__(self, values: Tensor) -> Tensor:
        """Return ``(..., out)`` of ``(..., in)``, in float32."""
        return dense(values, self.weight, self.bias, self.activation)

    @property
    def size(self) -> int:
        """How many features come out."""
        return len(self.weight)


def dense(values: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Return ``(..., out)`` of ``(..., in)``, in float32, where the values are."""
    place = values.device
    found = F.linear(values.float(), weight.to(place), None if bias is None else bias.to(place))
    return _ACTIVATIONS[activation](found)


def read_dense(root: Path, part: str) -> tuple[Dense, dict[str, bytes]]:
    """Return the layer in a folder below ``root``, and its files by their names from there.

    Raises:
        ConfigError: its configuration is damaged, or asks for what is not supported.
        CheckpointError: its weights are damaged.
    """
    name = f"{part}/config.json"
    where = str(root / name)
    text = read_member(root, name, 1_000_000, ConfigError)
    try:
        said: Any = json.loads(text)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise ConfigError(f"{where}: expected a JSON object with settings. Fetch the file again.", where=where)
    activation = str(said.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS or said.get("use_residual"):
        found = "use_residual" if activation in _ACTIVATIONS else f"the activation {printable(activation, 60)}"
        raise ConfigError(
            f"{where}: found {found}, which is not supported; expected one of {', '.join(_ACTIVATIONS)} and no "
            "residual. Load the transformer's own folder to use it without.",
            where=where,
            problems=["activation_function"],
        )
    with Checkpoint.open(root / part) as held:
        files = {f"{part}/{file.name}" for file in held.manifest.files}
        values = held.read_all()
    found = {key.removeprefix("linear."): value.float() for key, value in values.items()}
    weight, bias = found.pop("weight", None), found.pop("bias", None)
    sizes = (said.get("out_features"), said.get("in_features"))
    if (
        weight is None
        or found
        or weight.dim() != 2
        or any(s not in (None, n) for s, n in zip(sizes, weight.shape, strict=True))
    ):
        raise ConfigError(
            f"{where}: found tensors {shown(sorted(values), 80)} for sizes {sizes[1]} to {sizes[0]}; expected "
            "linear.weight of these sizes, and linear.bias or none. Fetch the folder again.",
            where=where,
            problems=sorted(values),
        )
    layer = Dense(weight, bias, activation, said)
    return layer, {name: text} | {
        file: read_member(root, file, _MOST) for file in sorted(files) if is_entry(root, file)
    }


def dense_files(part: str, layer: Dense) -> dict[str, bytes]:
    """Return the files of a layer as sentence-transformers reads them."""
    from safetensors.torch import save

    rows, columns = layer.weight.shape
    said = dict(layer.source or {}) | {"in_features": columns, "out_features": rows, "bias": layer.bias is not None}
    where = "linear" if layer.activation == "Identity" else "activation"
    said["activation_function"] = f"torch.nn.modules.{where}.{layer.activation}"
    tensors = {"linear.weight": layer.weight.contiguous()}
    if layer.bias is not None:
        tensors["linear.bias"] = layer.bias.contiguous()
    return {
        f"{part}/config.json": (json.dumps(said, indent=2) + "\n").encode(),
        f"{part}/model.safetensors": save(tensors, {"format": "pt"}),
    }
