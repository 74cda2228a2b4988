"""Modules of sentence-transformers that transform token or text vectors in sequence.

Each is computed in float32, read without pickle and written back. A dense layer follows a pooling and changes the
vector of a text (LaBSE, GTR), or it follows the transformer and changes the vector of each token (ColBERT).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flodl.errors import printable
from flodl_hf.checkpoints.config.file import ACTIVATIONS, activate, activation_at
from flodl_hf.checkpoints.sentence.files import (
    bytes_of,
    folder_of,
    module_files,
    read_module,
    refuse_setting,
    settings_in,
    wrong_tensors,
)

STEPS = ("Dense", "LayerNorm", "Dropout", "Normalize", "CNN", "WeightedLayerPooling")
"""Kinds of modules that are read by `read_step`."""

_CNN = "cnn_config.json"
_EMBEDDINGS = "token_embeddings"


class Step:
    """A function of vectors.

    Attributes:
        kind: the module's class.
        of_tokens: whether the module changes token vectors rather than text vectors.
        size: number of features of the output; None if equal to the input's.
    """

    kind: str
    of_tokens: Any = False
    size: Any = None

    def __call__(self, values: Tensor) -> Tensor:
        """Return ``(..., out)`` for ``(..., in)``; for tokens, the vectors of one text, ``(tokens, in)``."""
        raise NotImplementedError

    def files(self, part: str) -> dict[str, bytes]:
        """Return the files of the module in this folder."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Scaled(Step):
    """Vectors scaled to length 1 (Normalize)."""

    of_tokens: bool = False
    kind = "Normalize"

    def __call__(self, values: Tensor) -> Tensor:
        """Return vectors of length 1."""
        return F.normalize(values.float(), dim=-1)

    def files(self, part: str) -> dict[str, bytes]:
        """Return the files of the module in this folder."""
        name = _EMBEDDINGS if self.of_tokens else "sentence_embedding"
        return module_files(part, {"module_input_name": name, "module_output_name": name}, {})


@dataclass(frozen=True, eq=False)
class Dropped(Step):
    """Dropout, which changes nothing outside of training.

    Args:
        settings: of its file.
    """

    settings: Mapping[str, Any]
    kind = "Dropout"

    def __call__(self, values: Tensor) -> Tensor:
        """Return the same vectors."""
        return values

    def files(self, part: str) -> dict[str, bytes]:
        """Return the files of the module in this folder."""
        return module_files(part, self.settings, {})


@dataclass(frozen=True, eq=False)
class Normed(Step):
    """Vectors after a layer norm.

    Args:
        weight: ``(size,)``.
        bias: ``(size,)``.
    """

    weight: Tensor
    bias: Tensor
    kind = "LayerNorm"

    @property
    def size(self) -> int:
        """Number of features."""
        return len(self.weight)

    def __call__(self, values: Tensor) -> Tensor:
        """Return vectors of the same size."""
        place = values.device
        return F.layer_norm(values.float(), (self.size,), self.weight.to(place), self.bias.to(place))

    def files(self, part: str) -> dict[str, bytes]:
        """Return the files of the module in this folder."""
        return module_files(part, {"dimension": self.size}, {"norm.weight": self.weight, "norm.bias": self.bias})


@dataclass(frozen=True, eq=False)
class Convolutions(Step):
    """Convolutions of several widths over the tokens of a text, with concatenated results.

    As in sentence-transformers, the convolutions also read the padding after shorter texts of a batch.

    Args:
        weights: ``(out, in, width)`` of each, of odd width.
        biases: ``(out,)`` of each.
        settings: of its file.
    """

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]
    settings: Mapping[str, Any]
    of_tokens = True
    kind = "CNN"

    @property
    def size(self) -> int:
        """Number of features of the output."""
        return sum(map(len, self.weights))

    def __call__(self, values: Tensor) -> Tensor:
        """Return ``(..., tokens, out)`` of ``(..., tokens, in)``."""
        rows, place = values.float().transpose(-1, -2), values.device
        found = [
            F.conv1d(rows, weight.to(place), bias.to(place), padding=weight.shape[2] // 2)
            for weight, bias in zip(self.weights, self.biases, strict=True)
        ]
        return torch.cat(found, -2).transpose(-1, -2)

    def files(self, part: str) -> dict[str, bytes]:
        """Return the files of the module in this folder."""
        tensors = {f"convs.{place}.weight": weight for place, weight in enumerate(self.weights)}
        tensors |= {f"convs.{place}.bias": bias for place, bias in enumerate(self.biases)}
        return module_files(part, self.settings, tensors, _CNN)


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """A weighted mean of hidden states (WeightedLayerPooling).

    Args:
        weights: of the hidden states from ``start`` to the last, ``(states,)``.
        start: number of the first hidden state; 0 is the state before the first layer.
        settings: of its file.
    """

    weights: Tensor
    start: int
    settings: Mapping[str, Any]

    def shares(self) -> tuple[tuple[int, float], ...]:
        """Return the number of each hidden state with its share of the mean."""
        total = self.weights.sum()
        return tuple((self.start + place, float(weight / total)) for place, weight in enumerate(self.weights))

    def files(self, part: str) -> dict[str, bytes]:
        """Return the files of the module in this folder."""
        return module_files(part, self.settings, {"layer_weights": self.weights})


def read_step(root: Path, kind: str, module: Mapping[str, Any]) -> tuple[Step | LayerWeights, dict[str, bytes]]:
    """Return a module of one of the `STEPS`, and its files by relative names below ``root``.

    Raises:
        ConfigError: its settings are damaged, or have a value that is not supported.
        CheckpointError: its weights are damaged.
    """
    part = folder_of(root, module)
    readers: dict[str, Any] = {
        "Dense": _dense, "LayerNorm": _layer_norm, "CNN": _convolutions, "WeightedLayerPooling": _layer_weights,
    }  # fmt: skip
    if kind in readers:
        return readers[kind](root, part)
    name = f"{part}/config.json"
    known = ("dropout",) if kind == "Dropout" else ("module_input_name", "module_output_name")
    settings = settings_in(root, name, known, optional=True) if module.get("path") else {}
    files = {name: bytes_of(root, name)} if settings else {}
    if kind == "Dropout":
        return Dropped(settings), files
    given = settings.get("module_input_name") or "sentence_embedding"
    made = settings.get("module_output_name") or given
    if given not in ("sentence_embedding", _EMBEDDINGS) or made != given:
        key = "module_output_name" if made != given else "module_input_name"
        raise refuse_setting(root / name, key, settings.get(key), "sentence_embedding or token_embeddings for both")
    return Scaled(given == _EMBEDDINGS), files


def _layer_norm(root: Path, part: str) -> tuple[Step, dict[str, bytes]]:
    settings, tensors, files = read_module(root, part, ("dimension",))
    weight, bias = tensors.get("norm.weight"), tensors.get("norm.bias")
    sizes = {(settings.get("dimension"),), *(tuple(tensor.shape) for tensor in tensors.values())}
    if weight is None or bias is None or len(tensors) > 2 or len(sizes) > 1:
        where = root / part / "config.json"
        raise wrong_tensors(where, tensors, f"norm.weight and norm.bias of {settings.get('dimension')} features")
    return Normed(weight.float(), bias.float()), files


def _convolutions(root: Path, part: str) -> tuple[Step, dict[str, bytes]]:
    known = ("in_embedding_dimension", "in_word_embedding_dimension", "out_channels", "kernel_sizes", "stride_sizes")
    settings, tensors, files = read_module(root, part, known, _CNN)
    where, widths, strides = root / part / _CNN, settings.get("kernel_sizes"), settings.get("stride_sizes")
    if not isinstance(widths, list) or not widths or not all(type(w) is int and w > 0 and w % 2 for w in widths):
        raise refuse_setting(where, "kernel_sizes", widths, "a list of odd numbers")
    if strides is not None and strides != [1] * len(widths):
        raise refuse_setting(where, "stride_sizes", strides, "1 for each of the kernel_sizes")
    inside = settings.get("in_embedding_dimension", settings.get("in_word_embedding_dimension"))
    shape = (settings.get("out_channels", 256), inside)
    names = [(f"convs.{place}.weight", f"convs.{place}.bias") for place in range(len(widths))]
    expected = {name: (*shape, width) for (name, _), width in zip(names, widths, strict=True)}
    expected |= {bias: shape[:1] for _, bias in names}
    if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != expected:
        raise wrong_tensors(where, tensors, str(expected))
    weights = tuple(tensors[name].float() for name, _ in names)
    return Convolutions(weights, tuple(tensors[bias].float() for _, bias in names), settings), files


def _layer_weights(root: Path, part: str) -> tuple[LayerWeights, dict[str, bytes]]:
    known = ("embedding_dimension", "word_embedding_dimension", "layer_start", "num_hidden_layers")
    settings, tensors, files = read_module(root, part, known)
    start, layers = settings.get("layer_start", 4), settings.get("num_hidden_layers", 12)
    weights = tensors.get("layer_weights")
    sound = type(start) is int and type(layers) is int and 0 <= start <= layers
    if not sound or weights is None or len(tensors) > 1 or weights.shape != (layers + 1 - start,):
        expected = f"layer_weights for the hidden states {start} to {layers}"
        raise wrong_tensors(root / part / "config.json", tensors, expected)
    return LayerWeights(weights.float(), start, settings), files


_KEYS = (
    "in_features", "out_features", "bias", "activation_function", "module_input_name", "module_output_name",
    "use_residual",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Dense(Step):
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
        return (self.source or {}).get("module_input_name") == "token_embeddings"

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


def dense(values: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Return ``(..., out)`` of ``(..., in)``, in float32, where the values are."""
    place = values.device
    found = F.linear(values.float(), weight.to(place), None if bias is None else bias.to(place))
    return activate(activation, found)


def _dense(root: Path, part: str) -> tuple[Dense, dict[str, bytes]]:
    settings, tensors, files = read_module(root, part, _KEYS)
    path = settings.get("activation_function", "torch.nn.modules.activation.Tanh")
    activation = activation_at(path)
    where = root / part / "config.json"
    if activation is None:
        expected = f"a class of torch.nn without settings: {', '.join(ACTIVATIONS)}"
        raise refuse_setting(where, "activation_function", path, expected)
    names = (settings.get("module_input_name") or "sentence_embedding", settings.get("module_output_name"))
    known = ("sentence_embedding", "token_embeddings")
    if names[0] not in known or names[1] not in (None, names[0], "scores"):
        key = "module_output_name" if names[0] in known else "module_input_name"
        raise refuse_setting(where, key, settings.get(key), "sentence_embedding, token_embeddings, or scores as output")
    found = {key.removeprefix("linear."): value.float() for key, value in tensors.items()}
    weight, bias, shortcut = (found.pop(name, None) for name in ("weight", "bias", "residual.weight"))
    residual = settings.get("use_residual") is True
    sizes = (settings.get("out_features"), settings.get("in_features"))
    if weight is None or weight.dim() != 2 or found or not _fits(weight, sizes, shortcut, residual=residual):
        expected = f"linear.weight for sizes {printable(str(sizes[1]))} to {printable(str(sizes[0]))}"
        raise wrong_tensors(where, tensors, expected + ", linear.bias or none, and residual.weight where it is used")
    return Dense(weight, bias, activation, settings, residual, shortcut), files


def _fits(weight: Tensor, sizes: tuple[Any, Any], shortcut: Tensor | None, *, residual: bool) -> bool:
    """Return whether tensor sizes match the settings, and a residual's input matches its output."""
    rows, columns = weight.shape
    needed = residual and rows != columns
    stated = all(size in (None, n) for size, n in zip(sizes, weight.shape, strict=True))
    return stated and needed == (shortcut is not None) and (shortcut is None or shortcut.shape == weight.shape)
