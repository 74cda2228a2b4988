"""Dense layers of sentence-transformers: computed in float32, read without pickle and written back.

A dense layer follows a pooling and changes the vector of a text (LaBSE, GTR), or it follows the transformer and changes
the vector of each token (ColBERT).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from flodl.errors import printable
from flodl_hf.checkpoints.config.labels import ACTIVATIONS, activate, activation_at
from flodl_hf.checkpoints.sentence.module_files import module_files, read_module, refuse_setting, wrong_tensors

_KEYS = (
    "in_features", "out_features", "bias", "activation_function", "module_input_name", "module_output_name",
    "use_residual",
)  # fmt: skip


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
        return (self.source or {}).get("module_input_name") == "token_embeddings"

    @property
    def of_scores(self) -> bool:
        """Whether the layer makes the scores of a cross-encoder."""
        return (self.source or {}).get("module_output_name") == "scores"

    def files(self, part: str) -> dict[str, bytes]:
        """Return the files of the layer in this folder."""
        return dense_files(part, self)


def dense(values: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Return ``(..., out)`` of ``(..., in)``, in float32, where the values are."""
    place = values.device
    found = F.linear(values.float(), weight.to(place), None if bias is None else bias.to(place))
    return activate(activation, found)


def read_dense(root: Path, part: str) -> tuple[Dense, dict[str, bytes]]:
    """Return the layer in a folder below ``root``, and its files by relative names.

    Raises:
        ConfigError: its configuration is damaged, or has a setting that is not supported.
        CheckpointError: its weights are damaged.
    """
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


def dense_files(part: str, layer: Dense) -> dict[str, bytes]:
    """Return the files of a layer as sentence-transformers reads them."""
    rows, columns = layer.weight.shape
    settings = dict(layer.source or {}) | {"in_features": columns, "out_features": rows, "bias": layer.bias is not None}
    where = "linear" if layer.activation == "Identity" else "activation"
    settings["activation_function"] = f"torch.nn.modules.{where}.{layer.activation}"
    tensors = {"linear.weight": layer.weight, "linear.bias": layer.bias, "residual.weight": layer.shortcut}
    return module_files(part, settings, {name: tensor for name, tensor in tensors.items() if tensor is not None})
