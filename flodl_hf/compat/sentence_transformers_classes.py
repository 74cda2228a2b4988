"""SentenceTransformer, CrossEncoder and SparseEncoder of the installed sentence-transformers, computed here.

The classes are subclasses of the installed ones: only the transformer and the loop over batches are replaced.
Prompts, pools of processes, similarities, training and saving are the library's own. BERTopic and KeyBERT recognise a
model by the name of this module.
"""

# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false, reportOptionalMemberAccess=false

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import sentence_transformers
import torch
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.sparse_encoder.modules import SpladePooling
from torch import Tensor

_LOG = logging.getLogger(__name__)
_HEADS = {
    "feature-extraction": "base",
    "sequence-classification": "sequence_classification",
    "fill-mask": "masked_lm",
}
USUAL_BATCH = 32
"""Default ``batch_size`` of sentence-transformers; batches of the device's best size then give the same vectors."""


def _load_model(
    self: Any, name: str, transformer_task: str, config: Any, backend: str, is_peft_model: bool, **options: Any
) -> Any:
    """Load a model of this package, as a Transformer module loads transformers' model."""
    from flodl_hf.compat.transformers import pretrained_model
    from flodl_hf.heads.auto import load

    self.__class__ = original = type(self).__base__  # saved and pickled as the library's own module
    if backend != "torch" or transformer_task not in _HEADS:
        return original._load_model(self, name, transformer_task, config, backend, is_peft_model, **options)
    given = {key: value for key, value in options.items() if key not in ("trust_remote_code", "code_revision")}
    if given.get("revision") is not None:
        given["revision"] = str(given["revision"])
    given["subfolder"] = given.get("subfolder") or ""
    if transformer_task == "sequence-classification":
        given["labels"] = [config.id2label[number] for number in range(config.num_labels)]
    return pretrained_model(load(name, head=_HEADS[transformer_task], **given), config)


def _loading(kind: type) -> type:
    """Return a class of modules that loads models of this package, if ``kind`` is a Transformer."""
    return type(kind.__name__, (kind,), {"_load_model": _load_model}) if issubclass(kind, Transformer) else kind


class _Computed:
    """The part of a model that computes here what the library computes in its loop over batches."""

    _task = "feature-extraction"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._loaded_state = self._state()
        self._reported: set[str] = set()

    def _load_module_class_from_ref(self, *args: Any, **options: Any) -> type:
        return _loading(super()._load_module_class_from_ref(*args, **options))  # type: ignore[misc]

    def _load_default_modules(self, model_name_or_path: str, **options: Any) -> tuple[list[Any], dict[str, Any]]:
        own: Any = self
        shared = {key: options.get(key) for key in ("token", "trust_remote_code", "revision", "local_files_only")}
        given = {
            key: {**shared, **(options.get(key) or {})} for key in ("model_kwargs", "processor_kwargs", "config_kwargs")
        }
        for keywords in given.values():
            keywords.setdefault("cache_dir", options.get("cache_folder"))
        module: Any = _loading(Transformer)(
            model_name_or_path, transformer_task=self._task, backend=own.backend, **given
        )
        if not options.get("local_files_only"):
            own.model_card_data.set_base_model(model_name_or_path, revision=options.get("revision"))
        return [module, *self._default_later(module)], {}

    def _default_later(self, module: Any) -> list[Any]:
        return []

    def _state(self) -> list[Any]:
        """Return settings and sums of the weights of the modules after the first, to notice changes."""
        own: Any = self
        later = list(own.children())[1:]
        sums = [float(tensor.detach().double().sum()) for module in later for tensor in module.parameters()]
        return [(type(module).__name__, module.get_config_dict()) for module in later] + sums

    def _engine(self, texts: Sequence[Any], options: dict[str, Any]) -> Any:
        """Return the model that computes a call, with this object's length of texts; None if the library must.

        Args:
            texts: all strings of the call.
            options: further keywords of the call.
        """
        from flodl_hf.compat.transformers import PreTrained

        own: Any = self
        backbone = getattr(own[0], "model", None)
        reason = None
        if not isinstance(backbone, PreTrained):
            reason = "the first module is not a Transformer that was loaded by this class"
        elif self._state() != self._loaded_state:
            reason = "modules after the first were changed or trained"
        elif options:
            reason = f"of the options {', '.join(options)}"
        elif not all(isinstance(text, str) for text in texts):
            reason = "inputs are not texts"
        if reason is not None:
            if reason not in self._reported:
                _LOG.warning(
                    "%s: sentence-transformers' own loop computes this call, because %s", type(self).__name__, reason
                )
            self._reported.add(reason)
            return None
        engine = backbone.encoder
        longest, wanted = engine.config.max_tokens, own.max_seq_length
        wanted = min((number for number in (longest, wanted) if number is not None), default=None)
        if wanted is not None and wanted != engine.max_seq_length:
            engine.max_seq_length = int(wanted)
        own.eval()
        return engine

    @staticmethod
    def _run_options(batch_size: int, show_progress_bar: bool) -> dict[str, Any]:
        size = None if batch_size == USUAL_BATCH else batch_size
        return {"batch_size": size, "progress": bool(show_progress_bar)}


class _Dense(_Computed):
    """Vectors of a SentenceTransformer."""

    def _default_later(self, module: Any) -> list[Any]:
        return [Pooling(module.get_embedding_dimension(), "mean")]

    def _inference(
        self, inputs: list[Any], *, prompt: str | None, batch_size: int, show_progress_bar: bool,
        output_value: str | None, save_to_cpu: bool, normalize_embeddings: bool, truncate_dim: int | None,
        device: Any = None, **options: Any,
    ) -> Any:  # fmt: skip
        own: Any = self
        engine = self._engine(inputs, options | ({} if output_value else {"output_value=None": None}))
        if engine is None or not inputs:
            return super()._inference(  # type: ignore[misc]
                inputs, prompt=prompt, batch_size=batch_size, show_progress_bar=show_progress_bar,
                output_value=output_value, save_to_cpu=save_to_cpu, normalize_embeddings=normalize_embeddings,
                truncate_dim=truncate_dim, device=device, **options,
            )  # fmt: skip
        place = own._resolve_inference_device(device)
        if truncate_dim is None:
            with own.truncate_embeddings(None):
                truncate_dim = own.get_embedding_dimension()
        found = engine.encode(
            inputs, prompt=prompt or "", output_value=output_value, normalize_embeddings=normalize_embeddings,
            truncate_dim=truncate_dim, convert_to_tensor=True, untrained=True,
            **self._run_options(batch_size, show_progress_bar),
        )  # fmt: skip
        if output_value == "token_embeddings":
            return [states.to(place) for states in found]
        return found if save_to_cpu else found.to(place)


class _Scores(_Computed):
    """Scores of a CrossEncoder."""

    _task = "sequence-classification"

    def _inference(
        self, inputs: list[Any], *, prompt: str | None, batch_size: int, show_progress_bar: bool, activation_fn: Any,
        apply_softmax: bool | None, device: Any = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        own: Any = self
        pairs = all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in inputs)
        engine = self._engine([text for pair in inputs for text in pair] if pairs else [None], options)
        if engine is None or engine.head != "sequence_classification" or not inputs:
            return super()._inference(  # type: ignore[misc]
                inputs, prompt=prompt, batch_size=batch_size, show_progress_bar=show_progress_bar,
                activation_fn=activation_fn, apply_softmax=apply_softmax, device=device, **options,
            )  # fmt: skip
        place = own._resolve_inference_device(device)
        scores = _logits(engine, [tuple(pair) for pair in inputs], prompt or "", progress=show_progress_bar).to(place)
        with torch.inference_mode():
            scores = scores if activation_fn is None else activation_fn(scores)
            if own.num_labels == 1 and scores.ndim > 1:
                scores = scores.squeeze(-1)
            return torch.softmax(scores, dim=1) if apply_softmax and scores.ndim > 1 else scores


def _logits(engine: Any, pairs: list[tuple[str, str]], prompt: str, *, progress: bool) -> Tensor:
    """Return the scores of pairs before any activation, ``(pairs, labels)``."""
    from flodl_hf.inference.batch import Scores
    from flodl_hf.inference.pipeline import Session

    def rows(chunk: list[Any], encoded: Any, scores: Any) -> list[Tensor]:
        return list(scores.stacked()[np.argsort(encoded.table.owners)])

    encode = partial(engine._encode, truncate=True, prompt=prompt)
    found = Session(engine, {"progress": bool(progress)}).answer(
        pairs, encode, Scores(True), rows, single=False, what="predict"
    )
    return torch.stack(list(found))


class _Sparse(_Computed):
    """Sparse vectors of a SparseEncoder."""

    _task = "fill-mask"

    def _default_later(self, module: Any) -> list[Any]:
        return [SpladePooling(pooling_strategy="max")]

    def _inference(
        self, inputs: list[Any], *, prompt: str | None, batch_size: int, show_progress_bar: bool,
        convert_to_sparse_tensor: bool, save_to_cpu: bool, max_active_dims: int | None, device: Any = None,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        own: Any = self
        engine = self._engine(inputs, options)
        if engine is None or engine.head != "masked_lm" or not inputs:
            return super()._inference(  # type: ignore[misc]
                inputs, prompt=prompt, batch_size=batch_size, show_progress_bar=show_progress_bar,
                convert_to_sparse_tensor=convert_to_sparse_tensor, save_to_cpu=save_to_cpu,
                max_active_dims=max_active_dims, device=device, **options,
            )  # fmt: skip
        place = own._resolve_inference_device(device)
        found = engine.embed_sparse(
            inputs, prompt=prompt or "", most=max_active_dims or engine.config.encoder.vocab_size, untrained=True,
            **self._run_options(batch_size, show_progress_bar),
        ).to_tensor()  # fmt: skip
        found = found if convert_to_sparse_tensor else found.to_dense()
        return found if save_to_cpu else found.to(place)


class SentenceTransformer(_Dense, sentence_transformers.SentenceTransformer):
    """A SentenceTransformer with embeddings computed by this package.

    ``encode``, ``encode_query``, ``encode_document`` and ``similarity`` take the library's arguments; ``fit``, its
    Trainer and ``save_pretrained`` are the library's own.

    Args:
        *args: as of ``sentence_transformers.SentenceTransformer``.
        **options: as of ``sentence_transformers.SentenceTransformer``.
    """


class CrossEncoder(_Scores, sentence_transformers.CrossEncoder):
    """A CrossEncoder with scores computed by this package.

    ``predict`` and ``rank`` take the library's arguments.

    Args:
        *args: as of ``sentence_transformers.CrossEncoder``.
        **options: as of ``sentence_transformers.CrossEncoder``.
    """


class SparseEncoder(_Sparse, sentence_transformers.SparseEncoder):
    """A SparseEncoder with embeddings computed by this package.

    ``encode``, ``encode_query`` and ``encode_document`` take the library's arguments.

    Args:
        *args: as of ``sentence_transformers.SparseEncoder``.
        **options: as of ``sentence_transformers.SparseEncoder``.
    """
