"""An ONNX file of an encoder, run by ONNX Runtime: tensors in and out, or texts in and arrays out.

Any ONNX file with the usual inputs is supported; the package ``onnx`` is not needed to run one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flodl_hf.errors import ExportError, PredictError

if TYPE_CHECKING:
    from flodl_hf.checkpoints.sentence.recipe import SentenceTransformerConfig
    from flodl_hf.tokenization.tokenizer import Tokenizer

__all__ = ["OnnxModel"]

_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_DTYPES = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}
_USUAL = ("onnx/model.onnx", "model.onnx")


def require(*packages: str) -> None:
    """Raise if a package is not installed.

    Raises:
        ExportError: a package is missing; the message contains the installation command.
    """
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ExportError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed; expected the packages for "
            "ONNX: pip install 'flodl-hf[onnx]'",
            problems=missing,
        )


def find_onnx(location: str | os.PathLike[str]) -> Path:
    """Return the ONNX file at a path: the path itself, or the file in a folder.

    Raises:
        ExportError: no file was found.
    """
    path = Path(location)
    if path.is_file():
        return path
    found = next((path / name for name in _USUAL if (path / name).is_file()), None)
    if found is None:
        raise ExportError(
            f"{path}: found no ONNX file; expected the file, or a folder with {' or '.join(_USUAL)}. Write one with "
            "`flodl-hf export MODEL --format onnx --out DIR`",
            path=str(path),
        )
    return found


class OnnxModel:
    """An ONNX file that answers.

    Args:
        location: the file, or a folder with ``onnx/model.onnx`` or ``model.onnx``.
        tokenizer: for texts; None reads it from the file's folder or the one above, once texts come.
        providers: where it runs, in ONNX Runtime's names; None for the processor.

    Raises:
        ExportError: there is no file, ONNX Runtime is not installed or cannot read it, or the file has inputs that
            an encoder of texts has not.

    Attributes:
        path: the file.
        inputs: names of inputs.
        outputs: names of outputs with their axes: names, or numbers.
    """

    def __init__(
        self,
        location: str | os.PathLike[str],
        *,
        tokenizer: Tokenizer | None = None,
        providers: Sequence[str] | None = None,
    ) -> None:
        require("onnxruntime")
        import onnxruntime  # pyright: ignore[reportMissingImports]

        self.path = find_onnx(location)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # what it warns of is its own optimising, and errors are raised too
        try:
            self._session: Any = onnxruntime.InferenceSession(
                str(self.path), options, providers=list(providers or ("CPUExecutionProvider",))
            )
        except Exception as fault:  # its errors are classes of a compiled module, without a common one
            raise ExportError(
                f"{self.path}: ONNX Runtime {onnxruntime.__version__} cannot read it ({fault}); expected an ONNX file "
                "with its external data. Export it again, or install a newer ONNX Runtime",
                path=str(self.path),
            ) from fault
        given = {one.name: one.type for one in self._session.get_inputs()}
        self._token_axes = {one.shape[1] for one in self._session.get_inputs() if len(one.shape) == 2}
        strange = [f"{name}: {kind}" for name, kind in given.items() if name not in _INPUTS or kind not in _DTYPES]
        if strange:
            raise ExportError(
                f"{self.path}: found the inputs {', '.join(strange)}; expected {', '.join(_INPUTS)}, integers. "
                "Rename them where the file was made",
                path=str(self.path),
                problems=strange,
            )
        self.inputs = tuple(given)
        self._dtypes = {name: _DTYPES[kind] for name, kind in given.items()}
        self.outputs: dict[str, tuple[int | str, ...]] = {
            one.name: tuple(one.shape) for one in self._session.get_outputs()
        }
        self._tokenizer = tokenizer

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the file's folder.

        Raises:
            TokenizerError: there is none.
        """
        if self._tokenizer is None:
            from flodl_hf.tokenization.tokenizer import Tokenizer

            self._tokenizer = Tokenizer.from_pretrained(self.folder)
        return self._tokenizer

    @property
    def folder(self) -> Path:
        """The folder with configuration and tokenizer: the file's own, or the one above ``onnx``."""
        own = self.path.parent
        return own.parent if own.name == "onnx" and not (own / "config.json").is_file() else own

    @cached_property
    def recipe(self) -> SentenceTransformerConfig | None:
        """The folder's settings for text vectors; None without settings, or if the file returns scores."""
        from flodl_hf.checkpoints.sentence.recipe import read_recipe

        return None if "logits" in self.outputs else read_recipe(self.folder)

    @cached_property
    def max_tokens(self) -> int | None:
        """The longest row that folder, tokenizer and configuration allow; None where nothing bounds it."""
        from flodl_hf.checkpoints.config.model_config import read_config_file

        known = (self.folder / "config.json").is_file()
        bounds = [read_config_file(self.folder).max_tokens if known else None, self.tokenizer.model_max_length]
        bounds.append(self.recipe.max_tokens if self.recipe else None)
        return min((bound for bound in bounds if bound), default=None)

    def run(self, **inputs: Any) -> dict[str, np.ndarray]:
        """Return the outputs of one batch by name; inputs are tensors or arrays, unknown inputs are ignored.

        Raises:
            PredictError: an input is missing, or ONNX Runtime cannot compute the file.
        """
        missing = [name for name in self.inputs if inputs.get(name) is None]
        if missing:
            raise PredictError(f"{self.path.name}: found no {', '.join(missing)}; expected {', '.join(self.inputs)}")
        fed = {name: np.ascontiguousarray(inputs[name], dtype=self._dtypes[name]) for name in self.inputs}
        try:
            found = self._session.run(None, fed)
        except Exception as fault:  # its errors are classes of a compiled module, without a common one
            raise PredictError(
                f"{self.path.name}: ONNX Runtime cannot compute inputs of the shape "
                f"{fed[self.inputs[0]].shape} ({fault}); expected a file that takes rows of any number and length"
            ) from fault
        return dict(zip(self.outputs, found, strict=True))

    def answer(
        self,
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        *,
        batch_size: int = 32,
    ) -> dict[str, list[np.ndarray]]:
        """Return for each output one array per text, without padding; long texts are truncated.

        Texts are lower-cased if the sentence-transformers folder specifies it; the caller adds prompts.

        Args:
            texts: the texts.
            pairs: the second text of each.
            batch_size: texts of a batch, in the given order.
        """
        if self.recipe is not None and self.recipe.lower_case:
            texts, pairs = [text.lower() for text in texts], pairs and [text.lower() for text in pairs]
        found: dict[str, list[np.ndarray]] = {name: [] for name in self.outputs}
        length = self.max_tokens
        limit = {} if length is None else {"truncation": True, "max_length": length}
        for first in range(0, len(texts), batch_size):
            part = slice(first, first + batch_size)
            batch = self.tokenizer(
                list(texts[part]), None if pairs is None else list(pairs[part]), padding=True, padding_side="right",
                return_tensors="np", return_token_type_ids=True, **limit,
            )  # fmt: skip
            mask = batch["attention_mask"]
            lengths = mask.sum(1)
            for name, values in self.run(**batch).items():
                of_tokens = values.ndim > 1 and values.shape[1] == mask.shape[1] and self._is_of_tokens(name)
                found[name] += [row[:n] for row, n in zip(values, lengths, strict=True)] if of_tokens else list(values)
        return found

    def _is_of_tokens(self, name: str) -> bool:
        """Return whether the second axis of an output is tokens.

        It has the name of the inputs' axis; states of tokens, which have a third axis, may have any name. A vector of a
        text may have one too, and must not be cut where it happens to be as long as the batch.
        """
        axes = self.outputs[name]
        return len(axes) > 1 and not isinstance(axes[1], int) and (len(axes) > 2 or axes[1] in self._token_axes)
