"""Modules of sentence-transformers that transform token or text vectors in sequence.

Each is computed in float32, read without pickle and written back. A dense layer follows a pooling and changes the
vector of a text (LaBSE, GTR), or it follows the transformer and changes the vector of each token (ColBERT).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flodl.errors import ConfigError, printable, shown
from flodl_hf.checkpoints.config.file import ACTIVATIONS, activate, activation_at
from flodl_hf.checkpoints.folders import refused
from flodl_hf.checkpoints.sentence.settings import (
    folder_of,
    module_files,
    read_module,
    refuse_setting,
)

_TEXTS, _TOKENS = "sentence_embedding", "token_embeddings"
STEPS = {
    "Dense": (
        "in_features", "out_features", "bias", "activation_function", "module_input_name", "module_output_name",
        "use_residual",
    ),
    "LayerNorm": ("dimension",),
    "Dropout": ("dropout",),
    "Normalize": ("module_input_name", "module_output_name"),
    "CNN": (
        "in_embedding_dimension", "in_word_embedding_dimension", "out_channels", "kernel_sizes", "stride_sizes",
    ),
    "WeightedLayerPooling": ("embedding_dimension", "word_embedding_dimension", "layer_start", "num_hidden_layers"),
}  # fmt: skip
"""Kinds of modules that are read by `read_step`, with the known settings of each."""


@dataclass(frozen=True, eq=False)
class Step:
    """A module that changes vectors: Normalize, Dropout, LayerNorm, CNN; or the weights of WeightedLayerPooling.

    Attributes:
        kind: the module's class.
        settings: of its file, to be written back.
        tensors: of its file, in float32.
        of_tokens: whether the module changes token vectors rather than text vectors.
        size: number of features of the output; None if equal to the input's.
    """

    kind: str
    settings: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    of_tokens: bool = False
    size: int | None = None

    def __call__(self, values: Tensor) -> Tensor:
        """Return ``(..., out)`` for ``(..., in)``; for tokens, the vectors of one text, ``(tokens, in)``.

        As in sentence-transformers, convolutions also read the padding after shorter texts of a batch.
        """
        held = {name: tensor.to(values.device) for name, tensor in self.tensors.items()}
        if self.kind == "Dropout":  # changes nothing outside of training
            return values
        if self.kind == "Normalize":
            return F.normalize(values.float(), dim=-1)
        if self.kind == "LayerNorm":
            return F.layer_norm(values.float(), values.shape[-1:], held["norm.weight"], held["norm.bias"])
        rows = values.float().transpose(-1, -2)
        found = [
            F.conv1d(rows, held[f"convs.{place}.weight"], held[f"convs.{place}.bias"], padding=width // 2)
            for place, width in enumerate(self.settings["kernel_sizes"])
        ]
        return torch.cat(found, -2).transpose(-1, -2)

    def files(self, part: str) -> dict[str, bytes]:
        """Return the files of the module in this folder."""
        return module_files(part, self.settings, self.tensors, _file(self.kind))

    def shares(self) -> tuple[tuple[int, float], ...]:
        """Return the number of each hidden state with its share of the mean (WeightedLayerPooling)."""
        weights, start = self.tensors["layer_weights"], self.settings.get("layer_start", 4)
        total = weights.sum()
        return tuple((start + place, float(weight / total)) for place, weight in enumerate(weights))


@dataclass(frozen=True, eq=False)
class Dense:
    """A projection with an activation.

    Args:
        weight: ``(out, in)``, float32.
        bias: ``(out,)``, or None.
        activation: the name of torch's class.
        source: settings in the `config.json` of its folder, to be written back.
        residual: the input is added to the output.
        shortcut: ``(out, in)``, a matrix applied to the input before it is added; None adds the input unchanged.
    """

    weight: Tensor
    bias: Tensor | None = None
    activation: str = "Identity"
    source: Mapping[str, Any] | None = None
    residual: bool = False
    shortcut: Tensor | None = None
    kind = "Dense"

    def __call__(self, values: Tensor) -> Tensor:
        """Return ``(..., out)`` of ``(..., in)``, in float32."""
        found = dense(values, self.weight, self.bias, self.activation)
        if not self.residual:
            return found
        values = values.float()
        return found + (values if self.shortcut is None else F.linear(values, self.shortcut.to(values.device)))

    @property
    def size(self) -> int:
        """Number of features of the output."""
        return len(self.weight) // (2 if self.activation == "GLU" else 1)

    @property
    def of_tokens(self) -> bool:
        """Whether the layer changes token vectors rather than text vectors."""
        return (self.source or {}).get("module_input_name") == _TOKENS

    def files(self, part: str) -> dict[str, bytes]:
        """Return the files of the layer in this folder, as sentence-transformers reads them."""
        rows, columns = self.weight.shape
        settings = dict(self.source or {}) | {
            "in_features": columns,
            "out_features": rows,
            "bias": self.bias is not None,
        }
        where = "linear" if self.activation == "Identity" else "activation"
        settings["activation_function"] = f"torch.nn.modules.{where}.{self.activation}"
        tensors = {"linear.weight": self.weight, "linear.bias": self.bias, "residual.weight": self.shortcut}
        return module_files(part, settings, {name: tensor for name, tensor in tensors.items() if tensor is not None})


Layer = Step | Dense
"""Any module that is read by `read_step`."""


def dense(values: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Return ``(..., out)`` of ``(..., in)``, in float32, where the values are."""
    place = values.device
    found = F.linear(values.float(), weight.to(place), None if bias is None else bias.to(place))
    return activate(activation, found)


def _file(kind: str) -> str:
    return "cnn_config.json" if kind == "CNN" else "config.json"


def read_step(root: Path, kind: str, module: Mapping[str, Any]) -> tuple[Layer, dict[str, bytes]]:
    """Return a module of one of the `STEPS`, and its files by relative names below ``root``.

    Raises:
        ConfigError: its settings are damaged, or have a value that is not supported.
        CheckpointError: its weights are damaged.
    """
    part = folder_of(root, module)
    bare = kind in ("Dropout", "Normalize")
    if bare and not module.get("path"):
        settings, tensors, files = {}, {}, {}
    else:
        settings, tensors, files = read_module(root, part, STEPS[kind], _file(kind), weights=not bare)
    where = root / part / _file(kind)
    if kind in ("Dense", "Normalize"):
        given = settings.get("module_input_name") or _TEXTS
        made = settings.get("module_output_name") or given
        if given not in (_TEXTS, _TOKENS) or made not in ((given, "scores") if kind == "Dense" else (given,)):
            expected = f"{_TEXTS} or {_TOKENS} for both, or scores as the output of a dense layer"
            key = "module_input_name" if given not in (_TEXTS, _TOKENS) else "module_output_name"
            raise refuse_setting(where, key, settings.get(key), expected)
        if kind == "Dense":
            return _dense(settings, tensors, where), files
        return Step(kind, {"module_input_name": given, "module_output_name": given}, of_tokens=given == _TOKENS), files
    size, shapes = None, {}
    if kind == "LayerNorm":
        size = settings.get("dimension")
        shapes = {"norm.weight": (size,), "norm.bias": (size,)}
        settings = {"dimension": size}
    elif kind == "CNN":
        widths, strides = settings.get("kernel_sizes"), settings.get("stride_sizes")
        if not isinstance(widths, list) or not widths or not all(type(w) is int and w > 0 and w % 2 for w in widths):
            raise refuse_setting(where, "kernel_sizes", widths, "a list of odd numbers")
        if strides is not None and strides != [1] * len(widths):
            raise refuse_setting(where, "stride_sizes", strides, "1 for each of the kernel_sizes")
        inside = settings.get("in_embedding_dimension", settings.get("in_word_embedding_dimension"))
        out = settings.get("out_channels", 256)
        for place, width in enumerate(widths):
            shapes |= {f"convs.{place}.weight": (out, inside, width), f"convs.{place}.bias": (out,)}
        size = out * len(widths) if type(out) is int else None  # another type fits no tensor
    elif kind == "WeightedLayerPooling":
        start, layers = settings.get("layer_start", 4), settings.get("num_hidden_layers", 12)
        if type(start) is not int or type(layers) is not int or not 0 <= start <= layers:
            raise refuse_setting(where, "layer_start", start, f"a number from 0 to {layers}")
        shapes = {"layer_weights": (layers + 1 - start,)}
    _check_shapes(where, tensors, shapes)
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    return Step(kind, settings, tensors, kind == "CNN", size), files


def _check_shapes(where: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise if the tensors of a module contradict its settings."""
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != expected:
        expected_shapes = f"{printable(str(expected))}. Fetch the folder again"
        raise refused(
            where, f"found tensors {shown(found, 120)}", expected_shapes, problems=sorted(found), kind=ConfigError
        )


def _dense(settings: dict[str, Any], tensors: Mapping[str, Tensor], where: Path) -> Dense:
    path = settings.get("activation_function", "torch.nn.modules.activation.Tanh")
    activation = activation_at(path)
    if activation is None:
        classes = f"a class of torch.nn without settings: {', '.join(ACTIVATIONS)}"
        raise refuse_setting(where, "activation_function", path, classes)
    found = {name: tensor.float() for name, tensor in tensors.items()}
    weight, residual = found.get("linear.weight"), settings.get("use_residual") is True
    rows, columns = (None, None) if weight is None or weight.dim() != 2 else weight.shape
    expected: dict[str, tuple[Any, ...]] = {
        "linear.weight": (settings.get("out_features") or rows, settings.get("in_features") or columns)
    }
    if "linear.bias" in found:
        expected["linear.bias"] = (rows,)
    if residual and rows != columns:
        expected["residual.weight"] = (rows, columns)
    _check_shapes(where, found, expected)
    shortcut = found.get("residual.weight")
    return Dense(found["linear.weight"], found.get("linear.bias"), activation, settings, residual, shortcut)
