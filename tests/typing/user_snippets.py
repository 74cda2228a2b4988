"""What a user's editor should know: checked by pyright (`make check`), never run.

`assert_type` fails the check where an annotation gets worse; a line marked ``type: ignore`` fails it where a mistake
stops being one (`reportUnnecessaryTypeIgnoreComment`).
"""

# pyright: strict, reportUnnecessaryTypeIgnoreComment=true, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import torch
from torch import Tensor, nn

from flodl import FlowBuilder, Graph
from flodl.errors import ConfigError, FlodlError
from flodl_hf import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    load,
)
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.checkpoints.weights.loaded import LoadReport
from flodl_hf.families import FAMILIES, register
from flodl_hf.families.schema import Family
from flodl_hf.heads.base import BaseModel
from flodl_hf.heads.masked_lm import MaskedLM
from flodl_hf.heads.question_answering import QuestionAnswerer
from flodl_hf.heads.sequence_classification import SequenceClassifier
from flodl_hf.heads.token_classification import TokenClassifier
from flodl_hf.models.encoder_model import EncoderModel
from flodl_hf.tokenization.tokenizer import Tokenizer


def loading() -> None:
    assert_type(AutoModel.from_pretrained("folder"), BaseModel)
    assert_type(AutoModelForSequenceClassification.from_pretrained(Path("folder")), SequenceClassifier)
    assert_type(AutoModelForTokenClassification.from_pretrained("folder", labels=["O"]), TokenClassifier)
    assert_type(AutoModelForQuestionAnswering.from_pretrained("folder", revision="main"), QuestionAnswerer)
    assert_type(AutoModelForMaskedLM.from_pretrained("folder", dtype=torch.float16), MaskedLM)
    assert_type(load("folder"), EncoderModel)
    assert_type(AutoConfig.from_pretrained("folder"), ModelConfig)
    assert_type(AutoConfig.for_model("bert", hidden_size=64), ModelConfig)
    assert_type(AutoTokenizer.from_folder("folder"), Tokenizer)
    AutoModel.from_pretrained(3)  # type: ignore[arg-type]


def a_model(model: SequenceClassifier) -> None:
    assert_type(model.graph, Graph)
    assert_type(model.config, ModelConfig)
    assert_type(model.tokenizer, Tokenizer | None)
    assert_type(model.load_report, LoadReport | None)
    assert_type(model.num_labels, int)
    assert_type(model.device, torch.device)
    assert_type(model.untrained, list[str])
    assert_type(model.compute_loss({"input_ids": torch.zeros(1, 2)}, [0]), Tensor)
    assert_type(model.save_pretrained("out"), Path)
    assert_type(model.eval(), SequenceClassifier)
    model.predict(["a"], top_kk=3)  # type: ignore[call-arg]
    model.predict(["a"], compat="something else")  # type: ignore[arg-type]


def a_graph() -> None:
    graph = FlowBuilder(nn.Linear(2, 2)).through(nn.GELU()).tag("mixed").build()
    assert_type(graph, Graph)
    module: nn.Module = graph
    module.train()


def families() -> None:
    assert_type(FAMILIES, tuple[Family, ...])
    assert_type(register(FAMILIES[0].renamed("mine", "Mine")), Family)


def errors() -> None:
    try:
        loading()
    except ConfigError as fault:
        fault.problems.append("details are readable by name")
    except FlodlError as fault:
        assert_type(fault.message, str)
