"""Blocks of documents that need a library (``needs=MODULE``): executed where it is installed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.blocks import blocks_of, run_python

PAGES = sorted((Path(__file__).parents[2] / "docs" / "guides").glob("use-with*.md"))
LIBRARIES = [
    (path, library) for path in PAGES for library in {block.library: 0 for block in blocks_of(path)} if library
]

# Libraries whose blocks of the same page make what a library's block uses.
PREPARES = {
    "shap": ("transformers",), "mlflow.transformers": ("transformers",), "gradio": ("transformers",),
    "onnxruntime": ("onnxscript",), "openvino": ("onnxscript", "onnxruntime"), "lightning": ("optuna",),
}  # fmt: skip


@pytest.mark.parametrize(("path", "library"), LIBRARIES, ids=lambda value: getattr(value, "stem", value))
@pytest.mark.usefixtures("working_folder", "demo_is_trained")
@pytest.mark.filterwarnings("ignore")
def test_the_blocks_with_a_library_run(path: Path, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of one library run after those before them that need no other library."""
    for needed in (library, *PREPARES.get(library, ())):
        pytest.importorskip(needed)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    module = ModuleType("document")
    monkeypatch.setitem(sys.modules, "document", module)
    blocks = [block for block in blocks_of(path) if block.is_run and block.language == "python"]
    last = max(number for number, block in enumerate(blocks) if block.library == library)
    for block in blocks[: last + 1]:
        if block.library in (None, library, *PREPARES.get(library, ())):
            run_python(block, module.__dict__)


def test_every_library_is_in_the_documents() -> None:
    text = "\n".join(path.read_text("utf-8") for path in PAGES).lower()
    named = ("optimum", "transformers.js", "openvino", "onnxruntime", "faiss", "qdrant", "lancedb", "chroma", "captum")
    named += (
        "lightning",
        "infinity",
        "bertopic",
        "keybert",
        "mteb",
        "setfit",
        "llama",
        "langchain",
        "haystack",
        "gradio",
    )
    named += ("shap", "optuna", "spacy", "scikit-learn", "ray", "accelerate")
    assert [name for name in named if name not in text] == []
