"""Calls that cannot be answered say why, and odd ones that can be are answered in full."""

from __future__ import annotations

import gc
import json
import re
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flodl.errors import ConfigError, FlodlError
from flodl_hf import AutoConfig, AutoModel, AutoModelForSequenceClassification, load
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.errors import HubError, PredictError, TokenizerError
from flodl_hf.families.schema.tasks import HEADS
from flodl_hf.heads.auto import head_named
from flodl_hf.models.encoder_model import FAMILIAR, METHODS

Maker = Callable[..., Any]
Saved = Callable[..., Path]
TASKS = ["base", "sequence_classification", "token_classification", "question_answering", "masked_lm"]
TRAINED = TASKS[1:]
tasks = pytest.mark.parametrize("head", TASKS)
LONG = " ".join(["the cat sat on a mat and ran"] * 1250)  # 10,000 words


def ask(model: Any, text: Any, **options: Any) -> Any:
    """Ask a model of any task about one text."""
    if model.head == "base":
        return model.embed(text, **options)
    if model.head == "question_answering":
        return model.answer("was it good?", text, **options)
    if model.head == "masked_lm":
        return model.fill_mask(text if isinstance(text, list) else f"{text} [MASK] ran", **options)
    return model.predict(text, **options)


# --- names that lead nowhere -------------------------------------------------------------------------


def test_a_file_is_not_a_folder(saved: Saved) -> None:
    file = saved() / "config.json"
    with pytest.raises((HubError, ConfigError)) as caught:
        AutoModel.from_pretrained(file)
    assert re.search(r"config\.json", str(caught.value))
    assert "folder" in str(caught.value)


@pytest.mark.parametrize("name", ["no/such/folder", "./missing", "/missing", ""])
def test_a_path_that_does_not_exist_is_said_to_be_missing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((HubError, ConfigError)) as caught:
        AutoModel.from_pretrained(name, local_files_only=True)
    assert repr(name) in str(caught.value) or name in str(caught.value)
    assert re.search("exist|expected|owner/name", str(caught.value))


def test_an_empty_folder_says_what_it_should_hold(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: does not exist.*contains: nothing") as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_an_unknown_head_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'tokcls'"):
        head_named("tokcl")


def test_doors_cannot_be_called() -> None:
    with pytest.raises(TypeError, match=r"AutoModel\.from_pretrained"):
        AutoModel()


# --- labels ------------------------------------------------------------------------------------------


def test_gaps_between_labels_are_filled_as_transformers_fills_them(saved: Saved) -> None:
    folder = saved("bert", "sequence_classification", id2label={"0": "no", "1": "yes"})
    config = json.loads((folder / "config.json").read_text()) | {"id2label": {"2": "yes", "0": "no"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="id2label: names 2 labels"):
        model: Any = load(folder)
    assert model.config.id2label == {0: "no", 1: "LABEL_1"}
    assert model.config.label2id == {"no": 0, "LABEL_1": 1}
    assert {found.label for found in model.predict("the cat")} == {"no", "LABEL_1"}


def test_labels_that_are_numbers_become_text() -> None:
    config = ModelConfig.for_model("bert", **_sizes(), id2label={"0": 5, "1": 2.5})
    assert config.labels == ("5", "2.5")


def _sizes() -> dict[str, Any]:
    return {
        "vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8,
        "max_position_embeddings": 16, "type_vocab_size": 2,
    }  # fmt: skip


def test_other_labels_start_a_fresh_head_and_half_a_head_never(saved: Saved) -> None:
    folder = saved("bert", "sequence_classification")
    model = AutoModelForSequenceClassification.from_pretrained(folder, labels=["a", "b", "c"])
    assert model.untrained == ["head.classifier.weight", "head.classifier.bias"]
    assert model.config.labels == ("a", "b", "c")


def test_a_key_can_be_passed_over_by_name(saved: Saved) -> None:
    folder = saved()
    config = json.loads((folder / "config.json").read_text()) | {"rope_theta": 3}
    (folder / "config.json").write_text(json.dumps(config))
    assert load(folder, ignore_config_keys=("rope_theta",)).config.rope_theta == 3
    assert AutoConfig.from_pretrained(folder, ignore_config_keys=("rope_theta",)).hidden_size == 16


# --- models that are not ready -----------------------------------------------------------------------


@pytest.mark.parametrize("head", TRAINED)
def test_an_untrained_head_answers_only_when_told_to_and_training_ends_that(head: str, saved: Saved) -> None:
    model = head_named(head).model.from_pretrained(saved("bert", "base"))
    assert model.load_report is not None
    assert not model.load_report.trained
    assert set(model.untrained) >= {name for name in model.load_report.new if name.startswith("head.")}
    assert all(name in str(model.load_report) for name in model.load_report.new)
    with pytest.raises(PredictError, match=r"new and untrained \(.*head\..*untrained=True"):
        ask(model, "the cat sat")
    assert ask(model, "the cat sat", untrained=True) is not None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.cat([out.flatten() for out in model(torch.tensor([[2, 7, 8, 9, 3]])).values()]).square().sum().backward()
    optimizer.step()
    assert model.untrained == []
    assert ask(model, "the cat sat") is not None


@pytest.mark.parametrize("head", TRAINED)
def test_a_model_made_from_a_configuration_is_untrained(head: str, make: Maker) -> None:
    config = make("bert", head).config
    fresh = head_named(head).model.from_config(config)
    assert len(fresh.untrained) == len(list(fresh.graph.named_parameters()))


@tasks
def test_without_a_tokenizer_a_model_runs_but_does_not_predict(head: str, saved: Saved) -> None:
    folder = saved("bert", head)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).unlink()
    model = load(folder)
    assert model.tokenizer is None
    assert model(torch.tensor([[2, 7, 3]])) is not None
    with pytest.raises(PredictError, match=r"no tokenizer.*tokenizer\.json.*model\.tokenizer"):
        ask(model, "the cat")


def test_fill_mask_needs_a_mask(make: Maker) -> None:
    with pytest.raises(PredictError, match=r"no \[MASK\]; put one"):
        make("bert", "masked_lm").fill_mask("the cat")
    with pytest.raises(PredictError, match="top_k"):
        make("bert", "masked_lm").fill_mask("the [MASK]", top_k=0)


# --- texts -------------------------------------------------------------------------------------------


@tasks
def test_half_a_surrogate_pair_is_named_with_its_place(head: str, make: Maker) -> None:
    with pytest.raises(TokenizerError, match=r"character 8 is the lone surrogate U\+D800.*replace"):
        ask(make("bert", head), "the cat \ud800 sat")


@tasks
@pytest.mark.parametrize("wrong", [None, 3, b"bytes", ["x", None], [["a", 3]]], ids=repr)
def test_what_is_no_text_is_refused_with_its_type(head: str, wrong: Any, make: Maker) -> None:
    model = make("bert", head)
    calls: dict[str, Callable[[], Any]] = {
        "question_answering": lambda: model.answer_batch([("who?", wrong)]),
        "masked_lm": lambda: model.fill_mask(["x [MASK]", None] if wrong == ["x", None] else wrong),
    }
    with pytest.raises((FlodlError, TypeError)) as caught:
        calls.get(head, lambda: ask(model, wrong))()
    assert re.search("NoneType|int|bytes|list|str", str(caught.value))


@pytest.mark.parametrize("pairs", [[("a", "b"), "c"], [("a", "b", "c")], [{"texts": "a"}], [{"text": 3}]], ids=repr)
def test_pairs_that_are_none_are_refused(pairs: Any, make: Maker) -> None:
    with pytest.raises(PredictError, match=r"item|items"):
        make("bert", "sequence_classification").predict(pairs)


@pytest.mark.parametrize("given", ["a text", ["a", "list"]], ids=repr)
def test_a_call_with_texts_is_told_where_texts_go(given: Any, make: Maker) -> None:
    model = make("bert", "base")
    with pytest.raises(PredictError, match=r"expected a tensor of token ids.*predict, embed, answer"):
        model(given)
    with pytest.raises(PredictError, match=r"found Encoded; .*: model\(\*\*model\.tokenizer"):
        model(model.tokenizer(["the cat"], return_tensors="pt"))


def test_no_texts_give_no_answers(make: Maker) -> None:
    assert make("bert", "sequence_classification").predict([]) == []
    assert make("bert", "token_classification").predict([]) == []
    assert make("bert", "question_answering").answer_batch([]) == []
    assert make("bert", "masked_lm").fill_mask([]) == []
    assert make("bert", "base").embed([]).shape == (0, 16)


@tasks
def test_a_text_that_does_not_fit_is_refused_when_strict(head: str, make: Maker) -> None:
    if head == "masked_lm":
        pytest.skip("masks are filled from the window around them; nothing is merged")
    model = make("bert", head)
    with pytest.raises(TokenizerError, match=r"text 0.*40"):
        ask(model, LONG, strict=True)
    assert ask(model, "the cat sat", strict=True) is not None


def test_ten_thousand_words_are_classified_whole(make: Maker) -> None:
    model = make("bert", "sequence_classification")
    assert model.tokenizer is not None
    rows = model.tokenizer.encode_rows([LONG], max_tokens=40)[0]
    weights = torch.tensor([float(row.special.count(False)) for row in rows])
    assert weights.sum() == len(model.tokenizer.encode(LONG, add_special_tokens=False))
    with torch.no_grad():
        each = torch.cat([model(torch.tensor([row.ids])).logits.softmax(-1) for row in rows])
    expected = (each * weights[:, None]).sum(0) / weights.sum()
    found = {c.label: c for c in model.predict(LONG)}
    assert {c.windows for c in found.values()} == {len(rows)}
    assert len(rows) > 250
    for label, score in zip(model.config.labels, expected.tolist(), strict=True):
        assert found[label].score == pytest.approx(score, abs=1e-6)


def test_ten_thousand_words_hold_every_entity(crafted: Maker) -> None:
    model = crafted("token_classification", {"paris": 1}, other=0, id2label={"0": "O", "1": "B-LOC"})
    words = LONG.split()
    for place in range(0, 10_000, 777):
        words[place] = "Paris"
    text = " ".join(words)
    expected = [m.span() for m in re.finditer("Paris", text)]
    assert [(e.start, e.end) for e in model.predict(text)] == expected
    assert [(e.start, e.end) for e in model.predict([words], words=True)[0]] == expected


def test_ten_thousand_words_are_searched_to_the_end(crafted: Maker) -> None:
    model = crafted("question_answering", {"ada": 0, "corp": 1})
    context = LONG + " ada works for acme corp."
    found = model.answer("who works?", context)
    assert found.text == "ada works for acme corp"
    assert context[found.start : found.end] == found.text


def test_ten_thousand_words_around_a_mask_leave_it_its_neighbours(make: Maker) -> None:
    model = make("bert", "masked_lm")
    text = f"{LONG} [MASK] {LONG}"
    first = model.fill_mask(text, top_k=3)
    assert len(first) == 1
    assert [fill.sequence for fill in first[0]] == [text.replace("[MASK]", fill.token) for fill in first[0]]


def test_ten_thousand_words_are_embedded_in_windows(make: Maker) -> None:
    model = make("bert", "base")
    assert model.tokenizer is not None
    rows = model.tokenizer.encode_rows([LONG], max_tokens=40)[0]
    weights = torch.tensor([float(row.special.count(False)) for row in rows])
    with torch.no_grad():
        means = torch.stack([model(torch.tensor([row.ids])).last_hidden_state[0].mean(0) for row in rows])
    expected = torch.nn.functional.normalize((means * weights[:, None]).sum(0) / weights.sum(), dim=0)
    torch.testing.assert_close(model.embed(LONG, windows=True), expected, rtol=0, atol=1e-5)


# --- streams -----------------------------------------------------------------------------------------


def test_a_generator_is_read_as_answers_are_taken_and_memory_stays_flat(make: Maker) -> None:
    model = make("bert", "sequence_classification")
    read = 0

    def texts() -> Iterator[str]:
        nonlocal read
        while True:
            read += 1
            yield f"the cat sat {'on a mat ' * (read % 5)}"

    answers = model.predict(texts())
    assert read == 0
    next(answers)
    assert 0 < read <= 1024
    for _ in range(1023):
        next(answers)
    assert read <= 1024
    tracemalloc.start()
    next(answers)
    for _ in range(1022):
        next(answers)
    gc.collect()
    start = tracemalloc.get_traced_memory()[0]
    for _ in range(3 * 1024):
        next(answers)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - start
    tracemalloc.stop()
    assert grown < 200_000
    assert read <= 6 * 1024


# --- tensors -----------------------------------------------------------------------------------------

IDS = torch.tensor([[2, 7, 8, 3], [2, 9, 3, 0]])


@tasks
@pytest.mark.parametrize("shape", [(4,), (1, 2, 4), ()])
def test_ids_of_another_rank_are_refused(head: str, shape: tuple[int, ...], make: Maker) -> None:
    with pytest.raises(PredictError, match=r"input_ids has shape .*expected \(batch, seq\)"):
        make("bert", head)(torch.zeros(shape, dtype=torch.long))


@tasks
@pytest.mark.parametrize("shape", [(4,), (2, 1, 4), (2, 1, 4, 4)])
def test_masks_of_another_rank_are_refused(head: str, shape: tuple[int, ...], make: Maker) -> None:
    with pytest.raises(PredictError, match=r"attention_mask has shape .*expected \(batch, seq\).*2-d"):
        make("bert", head)(IDS, attention_mask=torch.ones(shape))


@pytest.mark.parametrize(
    ("head", "labels", "says"),
    [
        ("sequence_classification", [0, 2], "run from 0 to 2; expected 0 to 1"),
        ("sequence_classification", [-1, 1], "run from -1 to 1"),
        ("token_classification", [[0, 1, 0, 5], [-100, 0, 0, 0]], "to 5; expected 0 to 1"),
        ("token_classification", [[0, 1, 0, -7], [0, 0, 0, 0]], "from -7"),
        ("masked_lm", [[0, 1, 0, 10_000], [0, 0, 0, 0]], "to 10000"),
    ],
)
def test_labels_out_of_range_are_refused_with_their_range(head: str, labels: Any, says: str, make: Maker) -> None:
    with pytest.raises(PredictError, match=f"labels run {says}|labels .*{says}") as caught:
        make("bert", head)(IDS, labels=torch.tensor(labels))
    assert "num_labels" in str(caught.value)


def test_the_encoder_alone_has_no_loss(make: Maker) -> None:
    with pytest.raises(PredictError, match="no loss"):
        make("bert", "base").compute_loss({"input_ids": IDS}, [0])


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 0}, {"top_k": -1}, {"threshold": {"nobody": 0.5}}, {"threshold": [0.5]},
        {"function_to_apply": "relu"}, {"max_length": 2}, {"max_length": "x"}, {"max_length": 8.0},
    ],
    ids=str,
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], make: Maker) -> None:
    with pytest.raises(PredictError) as caught:
        make("bert", "sequence_classification").predict("the cat", **options)
    assert re.search("expected", str(caught.value))


@pytest.mark.parametrize("options", [{"aggregation": "mean"}, {"stride": -1}], ids=str)
def test_entity_options_that_make_no_sense_are_refused(options: dict[str, Any], make: Maker) -> None:
    model = make("bert", "token_classification", id2label={"0": "O", "1": "B-LOC"})
    with pytest.raises((PredictError, TokenizerError), match="expected"):
        model.predict("the cat", **options)


def test_one_ignored_label_may_be_given_as_a_text(crafted: Maker) -> None:
    model = crafted(
        "token_classification", {"paris": 1, "ada": 2}, other=0, id2label={"0": "O", "1": "LOC", "2": "PER"}
    )
    assert [e.word for e in model.predict("ada lives in paris", ignore_labels="LOC") if e.label != "O"] == ["ada"]
    assert "lives in" in {e.word for e in model.predict("ada lives in paris", ignore_labels="LOC")}


@pytest.mark.parametrize(
    "options",
    [{"top_k": 0}, {"max_answer_length": 0}, {"distinct": "words"}, {"window_tokens": 3}, {"stride": -1}],
    ids=str,
)
def test_answer_options_that_make_no_sense_are_refused(options: dict[str, Any], make: Maker) -> None:
    with pytest.raises((PredictError, TokenizerError)) as caught:
        make("bert", "question_answering").answer("who ran?", "the cat sat on a mat", **options)
    assert re.search("expected|must be|fit|leave", str(caught.value))


@tasks
def test_methods_of_other_tasks_and_libraries_are_told_where_they_are(head: str, make: Maker) -> None:
    model = make("bert", head)
    for name, heads in METHODS.items():
        has = head in {one.name for one in heads}
        assert hasattr(model, name) == has
        if not has:
            with pytest.raises(AttributeError, match=rf"has no attribute '{name}'; expected .* method of AutoModel"):
                getattr(model, name)
    answering = {n for n in vars(type(model)) if not n.startswith("_")} & {n for one in HEADS for n in vars(one.model)}
    own = {"forward", "loss", "output", "split", "has_pooler", "head", "per_text", "cross_encoder"}
    assert answering - set(METHODS) <= own
    for name, instead in FAMILIAR.items():
        with pytest.raises(AttributeError, match=re.escape(instead)):
            getattr(model, name)
    with pytest.raises(AttributeError, match="'save_pretraind', did you mean 'save_pretrained'"):
        _ = model.save_pretraind
    assert getattr(model, "_repr_png_", None) is None


@pytest.mark.parametrize("options", [{"pooling": "median"}, {"truncate_dim": 0}, {"truncate_dim": 99}], ids=str)
def test_embedding_options_that_make_no_sense_are_refused(options: dict[str, Any], make: Maker) -> None:
    with pytest.raises(PredictError, match="expected"):
        make("bert", "base").embed("the cat", **options)


def test_zero_shot_needs_labels_a_template_and_entailment(make: Maker) -> None:
    model = make("bert", "sequence_classification", id2label={"0": "contradiction", "1": "neutral", "2": "entailment"})
    for labels, template, found in [
        ([], "{}", "labels are"),
        ("a, b", "{}", "labels are"),
        (["a"], "no", "found template"),
    ]:
        with pytest.raises(PredictError, match=f"zero_shot: {found}.*expected"):
            model.zero_shot("the cat", labels, template=template)
    with pytest.raises(PredictError, match="entail"):
        make("bert", "sequence_classification").zero_shot("the cat", ["a"])


def test_reranking_needs_one_score(make: Maker) -> None:
    with pytest.raises(PredictError, match=r"expected.*1|single|one"):
        make("bert", "sequence_classification").rerank("cat", ["the cat", "the dog"])
