"""What all tests share: no network, no stray environment, fixed seeds, and the folders they load from."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch

# Tests write thousands of small files, and none of them has to survive a power failure. A flush takes milliseconds.
os.fsync = lambda descriptor: None

HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None


# Quick runs take a part of the combinations of parameters; `make test-slow` runs the others.
# Families with the code of another family: one in six combinations is quick.
ALIASES = (
    "camembert", "xlm-roberta", "xlm-roberta-xl", "roberta-prelayernorm", "data2vec-text", "new", "jina_embeddings_v3_tasks",
)  # fmt: skip
# Families whose parts are shared with other families: one in three combinations is quick.
RELATED = (
    "albert", "electra", "mpnet", "nomic_bert", "gte", "eurobert", "jina_bert", "jina_embeddings_v3", "deberta", "esm",
)  # fmt: skip
# Rare heads: quick with one family each.
RARE_HEADS = {
    "multiple_choice": "distilbert", "next_sentence": "bert", "pretraining": "bert", "replaced_tokens": "electra",
}  # fmt: skip
# Long tests whose combinations differ little: one in this number is quick.
SAMPLED = {
    "test_graphs_compile_without_a_break": 6, "test_compiles": 3, "test_the_same_steps_on_two_ranks": 2,
    "test_answers_are_those_of_the_models_own_methods": 2,
}  # fmt: skip
FAMILY = {"model_type", "family", "variant"}
"""Parameters that name a family or a variant of a task. A quick run has each value of each parameter of their tests."""

PAIRED = 12
"""A test with as many combinations of three or more parameters has each pair of values at least once in a quick run."""

FAST = {
    "flodl/checkpoint": ("formats",),
    "flodl/data": ("loader", "order"),
    "flodl/distributed": ("cadence", "shares"),
    "flodl/graph": ("models",),
    "flodl/metrics": ("metrics",),
    "flodl/monitor": ("conditions", "monitor", "record", "records", "trend"),
    "flodl/train": ("adam", "compared", "decide", "misuse", "schedule", "settings"),
    "flodl_hf/adapters": ("lora_options",),
    "flodl_hf/backends": ("arrange", "training_table"),
    "flodl_hf/bulk": ("identity", "wrong_usage"),
    "flodl_hf/cli": ("new", "project_commands"),
    "flodl_hf/core": ("task_table", "similarity"),
    "flodl_hf/decode": ("classes", "entities", "labels", "masks"),
    "flodl_hf/families": ("deberta", "deberta_fast"),
    "flodl_hf/finetune": ("columns", "options"),
    "flodl_hf/integrations": ("pretrained",),
    "flodl_hf/parity": ("verify_matrix_command",),
    "flodl_hf/readers": ("files",),
    "flodl_hf/report": ("page",),
    "flodl_hf/runtime": ("rounded_rows", "windows"),
    "flodl_hf/serving": ("batching",),
    "flodl_hf/text": ("windows",),
    "flodl_hf/torture": ("rig",),
    "flodl_hf/vectors": ("chunks", "list_losses"),
    "flodl_hf/weights": ("json_text", "layouts", "reading"),
    "flodl_hf/workers": ("ends", "messages"),
}  # fmt: skip
"""Files of the fast set of each folder: ``pytest -m fast FOLDER`` takes less than 20 seconds."""

Values = frozenset[Any]


def _params(item: pytest.Item) -> dict[str, Any]:
    return getattr(getattr(item, "callspec", None), "params", {})


def _is_slow(item: pytest.Item) -> bool:
    """Return whether an item is left to the slow run. The result depends on the item only."""
    params = _params(item)
    values = [value for value in params.values() if isinstance(value, str)]
    chosen = {RARE_HEADS[value] for value in values if value in RARE_HEADS}
    if chosen and "model_type" in params and params["model_type"] not in chosen:
        return True
    part = 6 if any(v in ALIASES for v in values) else 3 if any(v in RELATED for v in values) else 1
    part *= SAMPLED.get(getattr(item, "originalname", ""), 1)
    return crc32(item.nodeid.encode()) % part != 0


def _values(item: pytest.Item) -> Values:
    """Return the values, or the pairs of values, that a quick run of the item's test must contain."""
    simple = (str, int, float, bool, type(None))
    indices = item.callspec.indices  # type: ignore[attr-defined]
    named = [(name, v if isinstance(v, simple) else (indices[name],)) for name, v in sorted(_params(item).items())]
    return frozenset(named if FAMILY & _params(item).keys() else combinations(named, 2))


def _covering(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return few of the items with all their values or pairs of values."""
    left = {item: _values(item) for item in sorted(items, key=lambda item: crc32(item.nodeid.encode()))}
    missing = set().union(*left.values())
    found = set()
    while missing:
        best = max(left, key=lambda item: len(left[item] & missing))
        missing -= left.pop(best)
        found.add(best)
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--family", help="run every test of one family, by its model_type")


def _of_family(item: pytest.Item, family: str) -> bool:
    """Return whether a test has the family among its parameters, or is in the family's own file."""
    own = f"test_{family.replace('-', '_')}"
    values = [value for name, value in _params(item).items() if name in FAMILY]
    return item.path.stem == own or any(getattr(value, "model_type", value) == family for value in values)


def _is_fast(path: Path) -> bool:
    return path.stem.removeprefix("test_") in FAST.get("/".join(path.parts[-3:-1]), ())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import other files when only fast tests were requested."""
    if config.getoption("markexpr") == "fast" and collection_path.suffix == ".py":
        return not _is_fast(collection_path) or None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if family := config.getoption("--family"):
        config.hook.pytest_deselected(items=[item for item in items if not _of_family(item, family)])
        items[:] = [item for item in items if _of_family(item, family)]
        if not items:
            raise pytest.UsageError(f"--family {family}: found no test; expected a model_type, such as roberta")
    missing = pytest.mark.skip(reason="transformers is not installed")
    no_gpu = pytest.mark.skip(reason="no CUDA device")
    tests: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if _is_slow(item):
            item.add_marker("slow")
        elif not item.get_closest_marker("slow"):
            params = _params(item)
            if len(params) > 2 or (len(params) > 1 and FAMILY & params.keys()):
                tests.setdefault((item.path, getattr(item, "originalname", item.name)), []).append(item)
        if item.get_closest_marker("transformers") and not HAS_TRANSFORMERS:
            item.add_marker(missing)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
    for group in tests.values():
        if FAMILY & _params(group[0]).keys() or len(group) >= PAIRED:
            quick = _covering(group)
            for item in group:
                if item not in quick:
                    item.add_marker("slow")
    for item in items:
        if _is_fast(item.path) and not item.get_closest_marker("slow"):
            item.add_marker("fast")


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model, trained once a session."""
    from flodl_hf.training.demo import write_demo

    return write_demo(tmp_path_factory.mktemp("demo") / "demo-model")


@pytest.fixture
def demo_is_trained(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Path]:
    """Have `write_demo` copy the demo's model, for programs that would train the same one again."""

    def copied(folder: str | Path) -> Path:
        return Path(shutil.copytree(demo_model, folder, dirs_exist_ok=True))

    monkeypatch.setattr("flodl_hf.training.demo.write_demo", copied)
    return copied


@pytest.fixture(autouse=True)
def fixed_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear what the caller's environment says about the Hub, and start every test from one seed."""
    for name in list(os.environ):
        if name.startswith(("HF_", "HUGGING_FACE", "TRANSFORMERS_", "FLODL_")):
            monkeypatch.delenv(name)
    # torch.manual_seed keeps the stack of every call for each kind of device that is not there; here it is called for
    # thousands of tests.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sockets reach this machine alone, so that no test depends on a network."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: object) -> None:
        host = address[0] if isinstance(address, tuple) else ""
        if self.family in (socket.AF_INET, socket.AF_INET6) and host not in ("127.0.0.1", "::1", "localhost"):
            raise AssertionError(f"a test tried to reach {address}")
        return connect(self, address)  # type: ignore[arg-type]

    monkeypatch.setattr(socket.socket, "connect", guarded)
