"""Installed packages add families and heads with entry points."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from flodl.errors import ConfigError
from flodl_hf import families

PACKAGE = Path(__file__).parents[2] / "examples" / "family_package"
if not PACKAGE.exists():
    pytest.skip("examples are not part of an installed package", allow_module_level=True)
CONFIG = {
    "model_type": "roc_bert", "architectures": ["RoCBertModel"], "vocab_size": 20, "hidden_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 16,
    "concat_input": False,
}  # fmt: skip
PROGRAM = """
import json, sys, torch
from flodl_hf import AutoConfig, AutoModel, AutoModelForQuestionAnswering, load
config = AutoConfig.for_model(**json.loads(sys.argv[1]))
folder = AutoModel.from_config(config).save_pretrained("roc")
print(load(folder)(input_ids=torch.tensor([[1, 2, 3]])).last_hidden_state.shape[2])
gte = AutoConfig.for_model(**json.loads(sys.argv[1]) | {"model_type": "gte", "architectures": ["GteModel"]})
print(type(AutoModelForQuestionAnswering.from_config(gte)).__name__)
"""


def test_an_installed_package_adds_a_family_and_a_head(tmp_path: Path) -> None:
    """The package is installed into a folder; a new process loads a checkpoint without importing the package."""
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", tmp_path / "site", PACKAGE]
    installed = subprocess.run(install, capture_output=True, text=True, check=False)
    if installed.returncode and "hatchling" in installed.stderr:
        pytest.skip("the build backend cannot be downloaded")
    assert installed.returncode == 0, installed.stderr
    path = os.pathsep.join([str(tmp_path / "site"), *sys.path])
    run = [sys.executable, "-c", PROGRAM, json.dumps(CONFIG)]
    ended = subprocess.run(
        run, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["16", "QuestionAnswerer"]


@pytest.mark.parametrize("value", ["flodl_hf.families.bert:FAMILY", "flodl_hf.families.bert:HEADS"])
def test_a_wrong_entry_point_is_refused_by_name(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    points = {"my_bert": EntryPoint("my_bert", value, "flodl_hf.families")}
    monkeypatch.setattr(families, "_installed", lambda: points)
    with pytest.raises(ConfigError) as caught:
        families.named("my_bert")
    assert caught.value.problems == ["my_bert"]
    assert families.named("another") is None
