"""Shares of tokens add up to the score for every family and head, and point at the words that decide."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from flodl_hf.errors import PredictError
from flodl_hf.heads.saliency import saliency
from flodl_hf.training.demo import demo_model, learn_vocabulary, train


@pytest.fixture(scope="module")
def classifier() -> Any:
    model = demo_model(learn_vocabulary())
    train(model, 200, 0)
    return model.eval()


def test_completeness_and_the_words_that_decide(classifier: Any) -> None:
    found = saliency(classifier, "I love it.")
    assert found.target == "praise"
    difference = found.score - found.baseline
    assert abs(found.gap) <= 0.01 * max(abs(difference), 1e-3)
    words = dict(zip(found.tokens, found.scores.tolist(), strict=True))
    assert words["[CLS]"] == words["[SEP]"] == 0
    assert words["love"] > 0
    other = saliency(classifier, "I love it.", target="complaint")
    assert other.scores.sum() < 0


def test_more_points_come_closer(classifier: Any) -> None:
    with pytest.warns(UserWarning, match="still miss"):
        rough = saliency(classifier, "It was rude and cold.", steps=512, tolerance=0.0)
    fine = saliency(classifier, "It was rude and cold.")
    assert abs(rough.gap) < 1e-4
    assert abs(rough.scores - fine.scores).max() < 0.02


def test_it_agrees_with_differences_of_a_linear_score(classifier: Any) -> None:
    # Where nothing but the word table and a linear head remain, each token's share is its own difference.
    torch.manual_seed(1)
    found = saliency(classifier, "cold")
    assert len([side for side in found.sides if side is not None]) == 1
    assert found.scores.sum() == pytest.approx(found.score - found.baseline, rel=0.02, abs=1e-3)


def test_it_shows_itself(classifier: Any) -> None:
    page = saliency(classifier, "I <b>love</b> it.")._repr_html_()
    assert re.sub(r"<[^>]*>", "", page).endswith("I &lt;b&gt;love&lt;/b&gt; it.")
    content = saliency(classifier, ("Was it good?", "I love it.")).to_dict()
    assert {token["side"] for token in content["tokens"]} == {None, 0, 1}
    assert "praise" in repr(saliency(classifier, "I love it."))


def test_tokens_and_answers() -> None:
    from flodl_hf.heads.auto import AutoModelForQuestionAnswering, AutoModelForTokenClassification

    torch.manual_seed(0)
    from flodl_hf.checkpoints.config.model_config import ModelConfig

    tokenizer = learn_vocabulary()
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    sizes |= {"type_vocab_size": 2, "vocab_size": tokenizer.vocab_size, "max_position_embeddings": 64}
    ner: Any = AutoModelForTokenClassification.from_config(
        ModelConfig.for_model("bert", architectures=["BertForTokenClassification"], labels=["O", "B-X", "I-X"], **sizes)
    )
    ner.tokenizer = tokenizer
    text = "The pizza was cold."
    at = text.index("pizza")
    found = saliency(ner, text, target=("B-X", at), tolerance=0.02)
    assert found.target == f"B-X at {at}"
    assert abs(found.gap) <= 0.02 * max(abs(found.score - found.baseline), 1e-3)
    assert saliency(ner, text, tolerance=0.05).target.split(" at ")[0] in ("B-X", "I-X")
    qa: Any = AutoModelForQuestionAnswering.from_config(
        ModelConfig.for_model("bert", architectures=["BertForQuestionAnswering"], **sizes)
    )
    qa.tokenizer = tokenizer
    answered = saliency(qa, ("What was cold?", text), tolerance=0.05)
    assert answered.target in text
    with pytest.raises(PredictError, match="no token is at character 400"):
        saliency(ner, text, target=("B-X", 400))
    with pytest.raises(PredictError, match="did you mean"):
        saliency(ner, text, target=("B-Y", 1))


def test_what_it_refuses(classifier: Any) -> None:
    from flodl_hf.heads.auto import AutoModelForMaskedLM

    with pytest.raises(PredictError, match="no label"):
        saliency(classifier, "I love it.", target="prais")
    with pytest.raises(PredictError, match="window"):
        saliency(classifier, "cold " * 200)
    mlm: Any = AutoModelForMaskedLM.from_config(classifier.config)
    mlm.tokenizer = classifier.tokenizer
    with pytest.raises(PredictError, match="masked_lm"):
        saliency(mlm, "I love it.")


def test_the_model_is_left_as_it_was(classifier: Any) -> None:
    classifier.train()
    classifier.zero_grad(set_to_none=True)
    try:
        saliency(classifier, "I love it.")
        assert classifier.training
        assert all(parameter.grad is None for parameter in classifier.parameters())
    finally:
        classifier.eval()


def test_answers_as_a_page(classifier: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from flodl_hf.cli.app import app

    monkeypatch.chdir(tmp_path)
    classifier.save_pretrained("model")
    call = ["predict", "model", "I <script>love</script> it.", "It was rude.", "--html", "a.html"]
    result = CliRunner().invoke(app, call)
    assert result.exit_code == 0, result.output
    page = (tmp_path / "a.html").read_text("utf-8")
    assert "&lt;script&gt;love" in page
    assert "<script" not in page
    assert page.count("<section>") == 2
    result = CliRunner().invoke(app, ["predict", "model", "cold", "warm", "late", "--head", "base", "--html", "v.html"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "v.html").read_text("utf-8").count("<circle") == 3
    assert CliRunner().invoke(app, ["predict", "model", "--in", "a", "--out", "b", "--html", "c.html"]).exit_code == 2
