"""The page of a run is well formed for every kind of task, holds no text of the data, and cannot run anything."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from flodl_hf.training.evaluation import EvalPredictions
from flodl_hf.training.report.page import report_page

EVIL = "</script><script>alert(1)</script>"
VOID = {"meta", "br", "img"}


class Checked(HTMLParser):
    """Notes what is opened and never closed, scripts, and addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.faults: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        names = dict(attrs)
        if tag == "script" or any(name.startswith("on") or name in ("src", "href") for name in names):
            self.faults.append(f"{tag} {names}")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID and (not self.open or self.open.pop() != tag):
            self.faults.append(f"</{tag}>")


def checked(page: str) -> Checked:
    found = Checked()
    found.feed(page)
    return found


def drawn(kind: str) -> dict[str, Any]:
    """Return labels, predictions and truth of a kind."""
    draw = np.random.default_rng(0)
    if kind == "single_label":
        truth = draw.integers(0, 3, 60)
        return {
            "labels": ["a", EVIL, "c"],
            "predictions": draw.normal(size=(60, 3)) + 2 * np.eye(3)[truth],
            "truth": truth,
        }
    if kind == "multi_label":
        truth = draw.integers(0, 2, (60, 3))
        return {"labels": ["a", EVIL, "c"], "predictions": draw.normal(size=(60, 3)) + 2 * truth - 1, "truth": truth}
    if kind == "regression":
        truth = draw.normal(size=60)
        return {"labels": ["score"], "predictions": (truth + draw.normal(size=60) / 4)[:, None], "truth": truth}
    if kind == "tokens":
        tags = [["B-PER", "I-PER", "O"], ["O", f"B-{EVIL}", "O"]] * 5
        return {
            "labels": ["O", "B-PER", "I-PER"],
            "predictions": [["B-PER", "O", "O"], ["O", "O", "B-PER"]] * 5,
            "truth": tags,
        }
    if kind == "spans":
        return {"labels": [], "predictions": ["Paris", "", "red wine"], "truth": [["Paris"], [], ["the wine"]]}
    return {"labels": []}


def page_of(kind: str, **changes: Any) -> str:
    """Return the page of a run with a kind of loss."""
    history = [{"step": 5 * n, "epoch": n, "eval_loss": 1 / n, "accuracy": 1 - 1 / (n + 1)} for n in (1, 2, 3)]
    values = {"predictions": None, "truth": None, **drawn(kind), **changes}
    job: Any = SimpleNamespace(
        task=SimpleNamespace(kind=kind, names=None, labels=values["labels"]), notes=[EVIL],
        rows=SimpleNamespace(lengths=np.array([3, 9, 12, 12])), options=SimpleNamespace(max_length=12),
    )  # fmt: skip
    result: Any = SimpleNamespace(
        task="some_task", metrics={"accuracy": 0.75, "eval_loss": 0.3}, best_step=15, history=history, tuned=None,
        losses=[2 / (n + 1) for n in range(15)] + [float("nan")],
    )  # fmt: skip
    has_any = values["predictions"] is not None
    seen = EvalPredictions("", values["predictions"], values["truth"]) if has_any else None
    return report_page(f"model {EVIL}", job, result, seen)


KINDS = {
    "single_label": ("Confusion matrix", "Reliability", "Precision and recall", "By label"),
    "multi_label": ("best threshold", "Reliability", "Precision and recall"),
    "regression": (),
    "tokens": ("What became of spans", "Words, by label"),
    "spans": (),
    "words": (),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_page(kind: str) -> None:
    page = page_of(kind)
    found = checked(page)
    assert found.faults == []
    assert found.open == []
    assert "<script" not in page
    assert "default-src 'none'" in page
    for title in ("Loss", "Tokens of training rows", "Metrics of evaluation data", *KINDS[kind]):
        assert title in page, title
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) >= 3
    for picture in pictures:
        root = ElementTree.fromstring(picture)
        assert root.get("role") == "img"
        assert root.get("aria-label")
        assert "nan" not in picture


def test_a_run_without_anything() -> None:
    job: Any = SimpleNamespace(
        rows=SimpleNamespace(lengths=np.zeros(0)), options=SimpleNamespace(max_length=12), notes=[]
    )
    result: Any = SimpleNamespace(task="masked_lm", metrics={}, best_step=0, losses=[], history=[])
    page = report_page("empty", job, result)
    assert checked(page).faults == []
    assert "There was no evaluation data" in page


def test_it_is_written_beside_the_model(tmp_path: Path) -> None:
    from flodl_hf import finetune
    from flodl_hf.training.demo import LABELS, demo_model, learn_vocabulary, sentences

    rows = [{"text": text, "label": LABELS[label]} for text, label in sentences()[:64]]
    model = demo_model(learn_vocabulary())
    folder = finetune(model, train=rows[:40], eval=rows[40:], epochs=1, out=tmp_path / "tuned", progress=False).folder
    assert folder is not None
    page = (folder / "report.html").read_text("utf-8")
    assert checked(page).faults == []
    assert "24 examples" in page
    assert "complaint" in page
    assert not [row["text"] for row in rows if row["text"] in page], "no text of the data"
    assert "(report.html)" in (folder / "README.md").read_text("utf-8")
    again = finetune(model, train=rows[:40], epochs=1, out=folder, overwrite=True, report=False, progress=False)
    assert again.folder == folder
    assert not (folder / "report.html").exists()


def test_a_label_without_examples_has_no_figures_and_no_curve() -> None:
    one: dict[str, Any] = {"predictions": np.array([[0.2, 0.9]])}
    page = page_of("single_label", labels=["a", "b"], truth=np.array([1]), **one)
    assert "Evaluation data: 1 example</h2>" in page
    assert "<td>a</td><td>–</td><td>–</td><td>–</td><td>0</td>" in page
    assert "nan" not in page
    assert page_of("single_label", labels=["b", "a"], truth=np.array([0]), **one).count("<svg") < page.count("<svg")
