"""flodl_hf: Hugging Face encoder checkpoints both ways.

from flodl_hf import AutoModelForSequenceClassification

model = AutoModelForSequenceClassification.from_pretrained("a folder or a Hub name")
model.predict(["I love this"])
model.save_pretrained("out")
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flodl_hf.auto import (
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
    from flodl_hf.auto import AutoConfig
    from flodl_hf.bulk import encode_file, predict_file
    from flodl_hf.finetuning import evaluate, finetune
    from flodl_hf.pipelines import pipeline
    from flodl_hf.tokenizer import Tokenizer as AutoTokenizer

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
    # Torch comes with the first model; the tokenizer library, training and files of texts with those who ask for them.
    if name == "AutoConfig":
        from flodl_hf.auto import AutoConfig

        return AutoConfig
    if name == "AutoTokenizer":
        from flodl_hf.tokenizer import Tokenizer

        return Tokenizer
    if name in ("evaluate", "finetune"):
        import flodl_hf.finetuning

        return getattr(flodl_hf.finetuning, name)
    if name in ("encode_file", "predict_file"):
        import flodl_hf.bulk

        return getattr(flodl_hf.bulk, name)
    if name == "pipeline":
        from flodl_hf.pipelines import pipeline

        return pipeline
    if name == "__version__":
        from flodl_hf.version import own_version

        return own_version()
    if not name.startswith("_"):
        from flodl_hf.keywords.other_names import equivalent

        text = equivalent(name)
        if text is not None:
            # An AttributeError would lose its message in ``from flodl_hf import name``.
            raise ImportError(f"cannot import name {name!r} from 'flodl_hf'. Equivalent: {text}.", name=__name__)
    raise AttributeError(f"module 'flodl_hf' has no attribute {name!r}")


# Former import paths of what documents showed. They are not imported until a name of theirs is asked for.
_FORMER = {
    "bodies": "encoder.bodies",
    "config_rows": "family.config_rows",
    "config.sizes": "family.sizes",
    "encoder.layer": "layers.encoder_layer",
    "encoder_layer": "layers.encoder_layer",
    "endpoints": "endpoint_checks",
    "keys": "family.keys",
    "late": "similarity",
}


class _Former(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_FORMER[self.__name__.removeprefix(f'{__name__}.')]}"), name)


sys.modules.update({f"{__name__}.{former}": _Former(f"{__name__}.{former}") for former in _FORMER})


def __dir__() -> list[str]:
    return [*__all__, "__all__", "__doc__", "__file__", "__name__", "__path__", "__spec__"]
