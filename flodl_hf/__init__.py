"""Load, run, fine-tune, serve and export Hugging Face encoders.

from flodl_hf import AutoModelForSequenceClassification

model = AutoModelForSequenceClassification.from_pretrained("a folder or a Hub name")
model.predict(["I love this"])
model.save_pretrained("out")
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flodl.garbage_collection import gc_paused
from flodl_hf.heads.auto import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForNextSentencePrediction,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    load,
)

if TYPE_CHECKING:
    from flodl_hf.checkpoints.config.model_config import ModelConfig as AutoConfig
    from flodl_hf.compat.pipelines import pipeline
    from flodl_hf.jobs import encode_file, predict_file
    from flodl_hf.tokenization.tokenizer import Tokenizer as AutoTokenizer
    from flodl_hf.training import evaluate, finetune

__all__ = [
    "AutoConfig",
    "AutoModel",
    "AutoModelForMaskedLM",
    "AutoModelForMultipleChoice",
    "AutoModelForNextSentencePrediction",
    "AutoModelForPreTraining",
    "AutoModelForQuestionAnswering",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoTokenizer",
    "encode_file",
    "evaluate",
    "finetune",
    "load",
    "pipeline",
    "predict_file",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        module, _, attribute = _LAZY[name].rpartition(".")
        with gc_paused(settled=True):
            return getattr(import_module(f"{__name__}.{module}"), attribute)
    if name == "__version__":
        from flodl_hf.checkpoints.system import own_version

        return own_version()
    if not name.startswith("_"):
        from flodl_hf.compat.other_names import equivalent

        text = equivalent(name)
        if text is not None:
            # An AttributeError would lose its message in ``from flodl_hf import name``.
            raise ImportError(f"cannot import name {name!r} from 'flodl_hf'. Equivalent: {text}.", name=__name__)
    raise AttributeError(f"module 'flodl_hf' has no attribute {name!r}")


_LAZY = {
    "AutoConfig": "checkpoints.config.model_config.ModelConfig",
    "AutoTokenizer": "tokenization.tokenizer.Tokenizer",
    "encode_file": "jobs.encode_file",
    "evaluate": "training.evaluate",
    "finetune": "training.finetune",
    "pipeline": "compat.pipelines.pipeline",
    "predict_file": "jobs.predict_file",
}
"""Names that are imported on first use: torch, the tokenizer library, training and files of texts."""

_MOVED = {
    "adapters": "models.adapters",
    "alignment": "tokenization.alignment",
    "auto": "heads.auto",
    "client": "serving.client",
    "columns": "tokenization.readers.columns",
    "config": "checkpoints.config",
    "demo": "training.demo",
    "endpoint_checks": "parity.endpoint_checks",
    "export.onnx_session": "parity.onnx_session",
    "finetuning": "training",
    "inference.decode": "inference",
    "heads.auto.pipelines": "compat.pipelines",  # auto.pipelines, with the row of auto
    "integrations": "compat",
    "ray": "jobs.ray",
    "readers": "tokenization.readers",
    "runtime": "inference",
    "saliency": "heads.saliency",
    "sentence_transformers": "compat.sentence_transformers",
    "similarity": "inference.similarity",
    "spark": "jobs.spark",
    "tokenization.rows": "tokenization.cuts",
    "tokenizer": "tokenization.tokenizer",
    "transformers": "compat.transformers",
    "triton_server": "serving.triton_server",
    "vectors": "inference",
    "vectors.judging": "training.evaluators",
    "verifying": "parity.verifying",
}
"""Former import paths that documents showed, and where their modules are now."""


class _MovedModules(MetaPathFinder, Loader):
    """Import a module of a former path from its new one: both names are one module object."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        former = next((key for key in (name, *_parents(name)) if key in _MOVED), None)
        if package != __name__ or former is None:
            return None
        return ModuleSpec(fullname, self, loader_state=f"{__name__}.{_MOVED[former]}{name.removeprefix(former)}")

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        sys.modules[module.__spec__.name] = import_module(module.__spec__.loader_state)


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


sys.meta_path.insert(0, _MovedModules())


def __dir__() -> list[str]:
    return [*__all__, "__all__", "__doc__", "__file__", "__name__", "__path__", "__spec__"]
