"""Models, tokenizers and pipelines as objects of the installed transformers library.

For libraries that check the class: ``transformers.Trainer``, gradio, shap and MLflow. The computation stays here.
"""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import safetensors.torch
import transformers
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from flodl_hf.compat.pipelines import Pipeline
from flodl_hf.compat.pipelines import pipeline as own_pipeline
from flodl_hf.errors import InputTypeError
from flodl_hf.models.saving import architecture, config_text

if TYPE_CHECKING:
    from flodl_hf.models.encoder_model import EncoderModel
    from flodl_hf.tokenization.tokenizer import Tokenizer

__all__ = ["PreTrained", "pipeline", "pretrained_model", "pretrained_tokenizer"]

_CLASSES = {
    "text-classification": "TextClassificationPipeline",
    "token-classification": "TokenClassificationPipeline",
    "question-answering": "QuestionAnsweringPipeline",
    "fill-mask": "FillMaskPipeline",
    "zero-shot-classification": "ZeroShotClassificationPipeline",
    "feature-extraction": "FeatureExtractionPipeline",
}
_WEIGHTS = ("config.json", "model*.safetensors", "model.safetensors.index.json")


class PreTrained(transformers.PreTrainedModel):
    """A model of this package as a ``PreTrainedModel``; made by `pretrained_model`.

    The parameters are the model's own: training this object trains the model.

    Attributes:
        encoder: the model.
        config: the configuration, as transformers reads the model's ``config.json``.
    """

    _supports_sdpa = True

    def __init__(self, config: transformers.PreTrainedConfig, encoder: EncoderModel) -> None:
        super().__init__(config)
        self.encoder = encoder

    def forward(self, *args: Any, return_dict: bool | None = None, **inputs: Any) -> Any:
        """Return the output of the model with transformers' field names."""
        found = ModelOutput(**dict(self.encoder(*args, **inputs).items()))
        return found.to_tuple() if return_dict is False else found

    def get_input_embeddings(self) -> nn.Module:
        """Return the table of words."""
        return self.encoder.get_input_embeddings()

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, *args: Any, **options: Any) -> PreTrained:  # type: ignore[override]
        """Load a folder or Hub repository, with the keywords of `flodl_hf.load`."""
        from flodl_hf.heads.auto import load

        return pretrained_model(load(name_or_path, **options))

    def save_pretrained(self, save_directory: str | Path, *args: Any, **options: Any) -> None:
        """Write weights and ``config.json`` into a folder, which may contain other files.

        Args:
            save_directory: the folder.
            *args: ignored.
            **options: ``max_shard_size``; other keywords of transformers are ignored.
        """
        target = Path(save_directory)
        target.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".flodl-hf-", dir=target) as space:
            written = self.encoder.save_pretrained(Path(space) / "model", max_shard_size=options.get("max_shard_size"))
            for pattern in _WEIGHTS:
                for file in written.glob(pattern):
                    shutil.move(file, target / file.name)

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True, assign: bool = False) -> Any:
        """Load tensors by the names of this module or of the checkpoint, as `save_pretrained` writes them."""
        if state_dict.keys() <= self.state_dict().keys():
            return super().load_state_dict(state_dict, strict=strict, assign=assign)
        with TemporaryDirectory(prefix="flodl-hf-") as folder:
            safetensors.torch.save_file(dict(state_dict), Path(folder) / "model.safetensors", {"format": "pt"})
            (Path(folder) / "config.json").write_text(config_text(self.encoder), encoding="utf-8")
            loaded = type(self.encoder).from_pretrained(folder, device="cpu")
            return self.encoder.load_state_dict(loaded.state_dict(), strict=strict)

    def __reduce__(self) -> tuple[Any, ...]:
        return pretrained_model, (self.encoder, self.config)


def pretrained_model(model: EncoderModel, config: transformers.PreTrainedConfig | None = None) -> PreTrained:
    """Return a ``PreTrainedModel`` that computes with the model, for ``transformers.Trainer`` and others.

    Its class has the name of transformers' class, such as ``BertForSequenceClassification``.

    Args:
        model: a model of this package; its parameters are shared.
        config: the configuration of the result; None reads the model's ``config.json`` with transformers.
    """

    def forward(self: PreTrained, *args: Any, **inputs: Any) -> Any:
        return PreTrained.forward(self, *args, **inputs)

    # Trainer removes columns, and sentence-transformers features, that the signature does not contain.
    forward.__signature__ = inspect.signature(type(model).forward)  # type: ignore[attr-defined]
    kind = type(architecture(model), (PreTrained,), {"forward": forward, "__doc__": PreTrained.__doc__})
    found: PreTrained = kind(config or _config(model), model)
    return found.train(model.training)


def _config(model: EncoderModel) -> transformers.PreTrainedConfig:
    with TemporaryDirectory(prefix="flodl-hf-") as folder:
        (Path(folder) / "config.json").write_text(config_text(model), encoding="utf-8")
        known = model.config.model_type in transformers.CONFIG_MAPPING
        kind = transformers.AutoConfig if known else transformers.PreTrainedConfig
        config = kind.from_pretrained(folder)
    config.name_or_path = "" if model.source is None else str(model.source.name)
    return config


def pretrained_tokenizer(tokenizer: Tokenizer, config: Mapping[str, Any]) -> transformers.PreTrainedTokenizerFast:
    """Return the tokenizer as transformers' ``PreTrainedTokenizerFast``.

    Args:
        tokenizer: a tokenizer of this package.
        config: values of ``config.json`` that decide transformers' class, such as ``model_type``.
    """
    with TemporaryDirectory(prefix="flodl-hf-") as folder:
        tokenizer.save_pretrained(folder)
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return transformers.AutoTokenizer.from_pretrained(folder)


def pipeline(task: str | None = None, model: Any = None, tokenizer: Any = None, **options: Any) -> Any:
    """Return a pipeline of `flodl_hf.pipeline` that is also an instance of transformers' class for the task.

    Args:
        task: as of `flodl_hf.pipeline`.
        model: as of `flodl_hf.pipeline`, or a `PreTrained`.
        tokenizer: as of `flodl_hf.pipeline`.
        **options: as of `flodl_hf.pipeline`.
    """
    if isinstance(model, PreTrained):
        model = model.encoder
    return _called(own_pipeline(task, model, tokenizer, **options))


def _called(own: Pipeline) -> Any:
    name = _CLASSES[own.task]
    base = getattr(transformers, name, transformers.Pipeline)  # transformers 5 has none for questions
    return type(name, (_Called, base), {"__module__": base.__module__})(own)  # gradio checks the module


class _Called:
    """The part of a pipeline that answers calls, before transformers' class in the order of methods."""

    def __init__(self, own: Pipeline) -> None:
        self.own = own
        given = {"tokenizer": own.tokenizer.to_transformers(), "task": own.task, "device": own.device}
        super().__init__(model=pretrained_model(own.model), **given)  # type: ignore[call-arg]

    def __reduce__(self) -> tuple[Any, ...]:
        return _called, (self.own,)

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return self.own(*inputs, **options)

    def _sanitize_parameters(self, **options: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        return {}, {}, {}

    def preprocess(self, *args: Any, **options: Any) -> Any:
        """Raise: a call of the pipeline has no separate steps."""
        raise InputTypeError("pipeline: found a call of one step, expected a call of the pipeline. Call it with texts.")

    _forward = postprocess = preprocess
