"""What ``import flodl_hf`` costs a program that has torch already: little time, and none of the optional libraries."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

BUDGET_MS = 220.0
# On a machine that is busy or slow all imports take longer; beside torch's own the cost is still little.
BUDGET_OF_TORCH = 0.18
ABSENT = ("transformers", "tokenizers", "huggingface_hub", "typer", "rich", "pyarrow", "pandas", "sympy")

_PROGRAM = """
import json, sys, time
first = time.process_time()
import torch
before = set(sys.modules)
started, cpu = time.perf_counter(), time.process_time()
torch_s = cpu - first
import {module}
took, cpu = time.perf_counter() - started, time.process_time() - cpu
new = sorted(set(sys.modules) - before)
print(json.dumps({{"ms": min(took, cpu) * 1000, "torch_ms": torch_s * 1000, "new": new}}))
"""


def imported(module: str) -> dict[str, object]:
    run = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(module=module)], capture_output=True, text=True, check=True
    )
    return json.loads(run.stdout)


@pytest.mark.parametrize("module", ["flodl", "flodl_hf"])
def test_importing_costs_little(module: str) -> None:
    # Processor time of the best of several fresh interpreters: what a busy machine adds is not the package's.
    tries = []
    for _ in range(5):
        result = imported(module)
        roots = {str(name).partition(".")[0] for name in result["new"]}  # type: ignore[attr-defined]
        assert not roots & set(ABSENT)
        ms, torch_ms = float(result["ms"]), float(result["torch_ms"])  # type: ignore[arg-type]
        if ms < max(BUDGET_MS, BUDGET_OF_TORCH * torch_ms):
            return
        tries.append(f"{ms:.0f} ms beside torch's {torch_ms:.0f}")
    raise AssertionError(f"import {module} costs too much processor time: {tries}")


@pytest.mark.parametrize("module", ["flodl", "flodl_hf", "flodl_hf.heads.auto", "flodl_hf.cli.app"])
def test_torch_comes_with_the_first_model(module: str) -> None:
    # Names, errors and --help do without; and weights are read while it is imported.
    code = f"import sys, {module}; print(sorted({{'torch', 'numpy'}} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["[]"]


def test_flodl_alone_never_loads_flodl_hf() -> None:
    assert not [name for name in imported("flodl")["new"] if str(name).startswith("flodl_hf")]  # type: ignore[attr-defined]


def test_a_configuration_takes_one_family_with_it() -> None:
    code = """
import sys
from flodl_hf.checkpoints.config.model_config import ModelConfig, family_of
from flodl_hf.tokenization.settings import class_family
from flodl_hf.tokenization.settings import read_settings

def files():
    names = sorted(name for name in sys.modules if name.startswith("flodl_hf.families."))
    return [name for name in names if not name.startswith("flodl_hf.families.schema")]

sizes = dict.fromkeys(("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"), 4)
sizes |= dict.fromkeys(("intermediate_size", "max_position_embeddings", "type_vocab_size"), 4)
ModelConfig.for_model("bert", **sizes, position_embedding_type="absolute", use_cache=True, of_nobody=1)
known = {"tokenizer_config.json": b'{"tokenizer_class": "BertTokenizerFast"}'}
read_settings(known, lambda token: False, folder="", model_type="bert", config={})
assert class_family({"tokenizer_class": "PreTrainedTokenizerFast"}) is None
assert files() == ["flodl_hf.families.bert"], files()
assert family_of({"model_type": "gte"}, "config.json").class_prefix == "Gte"
assert files() == ["flodl_hf.families." + name for name in ("bert", "gte", "roberta")], files()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_command_takes_no_other_with_it() -> None:
    pytest.importorskip("typer")
    code = """
import sys
from flodl_hf.cli.app import app_for
app_for(["predict", "MODEL", "a text"])
others = ("finetune", "serve", "export", "runs", "verify_matrix", "flodl_hf.training", "flodl_hf.serving", "torch")
print(sorted({name for name in others if {name, "flodl_hf.cli." + name} & set(sys.modules)}))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["[]"]


@pytest.mark.parametrize(
    "module", ["flodl_hf.jobs.file", "flodl_hf.cli.predict", "flodl_hf.inference.vector_files", "flodl.signals"]
)
def test_prediction_comes_without_training(module: str) -> None:
    assert not [name for name in imported(module)["new"] if str(name).startswith("flodl.train")]  # type: ignore[attr-defined]


_TRAINING = """
import sys
import torch
from torch import nn
from torch.nn.functional import cross_entropy

before = set(sys.modules)
from flodl.data import TensorRows
from flodl.train import Loss, Trainer, adamw

def step(model, batch):
    return Loss(cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"]))

x = torch.randn(64, 8)
rows = TensorRows({"x": x, "y": (x.sum(1) > 0).long()})
for epochs in (1, 2):
    settings = {"num_epochs": epochs, "batch_size": 32, "progress": False, "folder": sys.argv[1], "resume": True}
    Trainer(nn.Linear(8, 2), adamw(1e-2), step, **settings).fit(rows)
print(sorted(set(sys.modules) - before))
"""
UNUSED = (
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed",
    "torch.export",
    "triton",
    "sympy",
    "pandas",
    "pyarrow",
)


def test_a_training_run_imports_no_compiler(tmp_path: Path) -> None:
    # Two runs: the second one resumes, so it also loads the state of the optimiser.
    command = [sys.executable, "-c", _TRAINING, str(tmp_path / "run")]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    new = ast.literal_eval(run.stdout.splitlines()[-1])
    assert "flodl.train.trainer" in new
    assert [name for name in new if name.startswith(UNUSED)] == []


_PREDICTION = """
import sys
from pathlib import Path
import torch

before = set(sys.modules)
from flodl_hf import load

golden = Path(sys.argv[1])
load(golden / "bert-sequence_classification").predict(["a text", "another one"], untrained=True)
load(golden / "bert-token_classification").predict("a text", untrained=True)
load(golden / "bert-question_answering").answer("who?", "a text", untrained=True)
load(golden / "bert-base").embed(["a text", "another one"])
print(sorted(name for name in set(sys.modules) - before if not name.startswith("flodl")))
"""
PREDICTING = {"encodings", "html", "numpy", "tokenizers", "torch"}


def test_a_prediction_imports_the_tokenizers_library_only() -> None:
    golden = Path(__file__).parents[1] / "golden"
    command = [sys.executable, "-W", "ignore", "-c", _PREDICTION, str(golden)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    new = ast.literal_eval(run.stdout.splitlines()[-1])
    assert {name.partition(".")[0] for name in new} <= PREDICTING
    assert [name for name in new if name.startswith(UNUSED)] == []


_SERVING = """
import sys
import torch
torch_itself = set(sys.modules)
from flodl_hf.serving.settings import Served, Settings
settings = Settings(models=(Served("m", {folder!r}),))
if {worker!r}:
    from flodl_hf.serving.worker import Worker
    worker = Worker(settings.for_worker("cpu"))
    worker.warm()
    print(worker.describe("m")["head"], worker.measure()["peak"] > 0)
else:
    from flodl_hf.serving.app import create_app
    from flodl_hf.serving import http_process, running
    create_app(settings)
print(sorted(set(sys.modules) - torch_itself))
"""


@pytest.mark.parametrize("worker", [True, False], ids=["worker", "HTTP process"])
def test_a_server_imports_no_compiler(worker: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "flodl_hf" / "serving"))
    from serving_models import write

    code = _SERVING.format(folder=str(write(tmp_path, "classes")), worker=worker)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    new = ast.literal_eval(run.stdout.splitlines()[-1])
    assert "flodl_hf.serving.tasks" in new if worker else "flodl_hf.serving.app" in new
    assert [name for name in new if name.startswith((*UNUSED, "torch.fsdp", "flodl.train"))] == []
