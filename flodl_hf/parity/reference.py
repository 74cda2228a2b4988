"""The reference side: transformers, imported here and nowhere else, and only when something is compared."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flodl_hf.errors import ParityError


def available() -> bool:
    """Return whether transformers is installed."""
    return find_spec("transformers") is not None


def version() -> str:
    """Return the version of transformers that is compared with."""
    return _transformers().__version__


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ParityError(
            "transformers is not installed, but this comparison requires it; "
            "install it with: pip install 'flodl-hf[parity]'"
        ) from None
    return transformers


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress transformers' progress bars and load tables; their content is read from its return values."""
    transformers = _transformers()
    logger = logging.getLogger("transformers")
    level = logger.level
    transformers.utils.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        logger.setLevel(level)


@dataclass
class Reference:
    """A model of transformers and what its loading reported.

    Attributes:
        model: in evaluation mode.
        missing: names that the file lacks.
        unexpected: names that the model does not take.
    """

    model: Any
    missing: list[str]
    unexpected: list[str]

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs of one batch as a dict, without gradients."""
        with torch.no_grad():
            return dict(self.model(**inputs).items())

    def keys_before(self, held: Tensor, rows: int) -> Any:
        """Return keys and values to insert before each row's own, in the model's cache format for one call.

        Args:
            held: keys and values of all layers concatenated, ``(tokens, layers * 2 * width)``, keys before values.
            rows: how many rows the call has.
        """
        config = self.model.config
        layers, heads = config.num_hidden_layers, config.num_attention_heads
        parts = held.view(len(held), layers, 2, heads, -1).permute(1, 2, 3, 0, 4)
        pairs = [tuple(part.expand(rows, -1, -1, -1) for part in layer) for layer in parts]
        return _transformers().DynamicCache(pairs)


def load_reference(
    folder: str | Path,
    architecture: str,
    *,
    attention: str = "sdpa",
    dtype: torch.dtype | None = None,
    pooler: bool | None = None,
) -> Reference:
    """Return the transformers model of a folder.

    Args:
        folder: a local folder.
        architecture: class name, as in ``config.json``.
        attention: "sdpa" or "eager".
        dtype: dtype of the weights; None keeps the file's.
        pooler: for base models, whether the file has a pooler; None for the class default.

    Raises:
        ParityError: transformers has no such class.
    """
    transformers = _transformers()
    kind = getattr(transformers, architecture, None)
    if kind is None:
        raise ParityError(f"transformers {version()} has no class {architecture}", architecture=architecture)
    # A family with only the eager implementation specifies it.
    options: dict[str, Any] = {"attn_implementation": attention if getattr(kind, "_supports_sdpa", False) else "eager"}
    pooling = signature(kind.__init__).parameters.get("add_pooling_layer")
    if pooler is not None and pooling is not None and pooling.default is not pooler:
        options["add_pooling_layer"] = pooler
    with quiet():
        model, info = kind.from_pretrained(
            str(folder), output_loading_info=True, dtype=dtype or "auto", local_files_only=True, **options
        )
    # transformers leaves tensors mapped at the offsets of the file, and the product of one row with a
    # matrix rounds differently for other alignments (measured: 4.5e-8 on a real checkpoint). A copy puts
    # both sides on the allocator's alignment, so that only the arithmetic is compared.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    return Reference(model.eval(), sorted(info["missing_keys"]), sorted(info["unexpected_keys"]))


def reference_ids(folder: str | Path, texts: list[str]) -> list[list[int]]:
    """Return the ids that transformers' ``AutoTokenizer`` gives each text."""
    with quiet():
        tokenizer = _transformers().AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    return [tokenizer(text)["input_ids"] for text in texts]


def make_checkpoint(
    folder: str | Path,
    architecture: str,
    settings: Mapping[str, Any],
    *,
    seed: int = 0,
    scale: float | None = None,
) -> Path:
    """Write a checkpoint with random weights, made and saved by transformers; return its folder.

    Args:
        folder: where to.
        architecture: class name.
        settings: keyword arguments of its configuration.
        seed: of the weights.
        scale: redraw every tensor from a normal distribution of this deviation, so that biases and norms are
            not at their special values; None keeps transformers' own initialisation.
    """
    transformers = _transformers()
    kind = getattr(transformers, architecture)
    torch.manual_seed(seed)
    with quiet():
        model = kind(kind.config_class(**settings))
        if scale is not None:
            with torch.no_grad():
                norms = {id(m.weight) for m in model.modules() if "Norm" in type(m).__name__ and hasattr(m, "weight")}
                for parameter in model.parameters():
                    parameter.normal_(1.0 if id(parameter) in norms else 0.0, scale)
        model.save_pretrained(str(folder))
    return Path(folder)


def parameter_names(architecture: str, folder: str | Path) -> set[str]:
    """Return the names of every parameter that transformers gives a class at a folder's configuration, on ``meta``."""
    transformers = _transformers()
    kind = getattr(transformers, architecture)
    with quiet(), torch.device("meta"):
        model = kind(kind.config_class.from_pretrained(str(folder)))
    return {name for name, _ in model.named_parameters(remove_duplicate=False)}
