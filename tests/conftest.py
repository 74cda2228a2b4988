"""What all tests share: no network, no stray environment, fixed seeds, and the folders they load from."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest
import torch

HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None


# Families that are others under another name or with their norms moved: of their cells one in six is quick.
ALIASES = (
    "camembert", "xlm-roberta", "xlm-roberta-xl", "roberta-prelayernorm", "data2vec-text", "new", "jina_embeddings_v3_tasks",
)  # fmt: skip
# Families whose parts stand in other families too, which are tried whole: of their cells one in three is quick.
RELATED = (
    "albert", "electra", "mpnet", "nomic_bert", "gte", "eurobert", "jina_bert", "jina_embeddings_v3", "deberta", "esm",
)  # fmt: skip
# Heads that few people have: quick with one family each, and slow with all others.
RARE_HEADS = {
    "multiple_choice": "distilbert", "next_sentence": "bert", "pretraining": "bert", "replaced_tokens": "electra",
}  # fmt: skip
# Tests whose cells differ little and take long: one in so many is quick.
SAMPLED = {
    "test_graphs_compile_without_a_break": 6, "test_compiles": 3, "test_the_same_steps_on_two_ranks": 2,
    "test_the_same_steps_however_rows_are_cut": 2, "test_answers_are_those_of_the_models_own_methods": 2,
}  # fmt: skip


def _is_slow(item: pytest.Item) -> bool:
    """Return whether an item is one of the cells that are left to the slow run; always the same ones."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    values = [value for value in params.values() if isinstance(value, str)]
    chosen = {RARE_HEADS[value] for value in values if value in RARE_HEADS}
    if chosen and "model_type" in params and params["model_type"] not in chosen:
        return True
    part = 6 if any(v in ALIASES for v in values) else 3 if any(v in RELATED for v in values) else 1
    part *= SAMPLED.get(getattr(item, "originalname", ""), 1)
    return crc32(item.nodeid.encode()) % part != 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="transformers is not installed")
    no_gpu = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if _is_slow(item):
            item.add_marker("slow")
        if item.get_closest_marker("transformers") and not HAS_TRANSFORMERS:
            item.add_marker(missing)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)


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
