"""Answers from raw text are right: on models whose right answer is known, and against plain padded calls."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flodl.errors import ConfigError
from flodl_hf import load
from flodl_hf.families import FAMILIES
from flodl_hf.tokenization.tokenizer import Tokenizer

Maker = Callable[..., Any]
Padded = Callable[..., torch.Tensor]
FILLER = [
    "the", "a", "cat", "dog", "sat", "on", "mat", "ran", "good", "bad", "film", "is", "was", "not", "very", "lives", "in",
    "works", "for", "unheard-of", "stitch,", "!", "?",
]  # fmt: skip
families = pytest.mark.parametrize("model_type", [family.model_type for family in FAMILIES])


def having(head: str) -> pytest.MarkDecorator:
    """Return each family that has the head."""
    return pytest.mark.parametrize("model_type", [family.model_type for family in FAMILIES if head in family.heads])


pure = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
TEXTS = [
    "the cat sat on a mat", "", "x", "good film!", "a very very good film, not bad " * 6, "ada lives in paris", "was",
    "dog ran " * 30, "on the mat sat the cat, and ran", "bad bad bad",
]  # fmt: skip


# --- classes -----------------------------------------------------------------------------------------


@having("sequence_classification")
def test_scores_are_the_softmax_of_a_padded_call(make: Maker, model_type: str, padded: Padded) -> None:
    model = make(model_type, "sequence_classification", id2label={"0": "a", "1": "b", "2": "c"})
    for text in (text for text in TEXTS if 0 < len(text) < 60):
        expected = padded(model, text).softmax(-1)
        found = model.predict(text)
        assert [c.score for c in found] == sorted((c.score for c in found), reverse=True)
        assert {c.windows for c in found} == {1}
        by_label = {c.label: c.score for c in found}
        assert by_label == pytest.approx(dict(zip("abc", expected.tolist(), strict=True)), abs=1e-5)


def test_pairs_carry_token_types(make: Maker, padded: Padded) -> None:
    model = make("bert", "sequence_classification")
    expected = padded(model, "the cat", "sat on a mat").softmax(-1).tolist()
    written = {"text": "the cat", "text_pair": "sat on a mat"}
    for answers in [model.predict([("the cat", "sat on a mat")]), model.predict([written]), [model.predict(written)]]:
        for found in answers:
            assert {c.label: c.score for c in found} == pytest.approx(
                dict(zip(model.config.labels, expected, strict=True)), abs=1e-5
            )
    alone = padded(model, "the cat sat on a mat").softmax(-1).tolist()
    assert expected != pytest.approx(alone, abs=1e-3)


def test_the_longer_share_of_a_long_text_wins(crafted: Maker) -> None:
    model = crafted(
        "sequence_classification", {"good": 0, "bad": 1}, mix=2.0, sure=8.0, id2label={"0": "good", "1": "bad"}
    )
    assert model.predict("good good good", top_k=1)[0].label == "good"
    assert model.predict("bad bad", top_k=1)[0].label == "bad"
    for share, label in ((300, "good"), (500, "bad")):
        found = model.predict("bad " * share + "good " * (800 - share), top_k=1)[0]
        assert (found.label, found.windows) == (label, 22)
        # Windows are counted by their words, so the score is close to the share of words.
        assert found.score == pytest.approx(max(share, 800 - share) / 800, abs=0.03)


def test_top_k_thresholds_and_functions(make: Maker, padded: Padded) -> None:
    labels = {"0": "a", "1": "b", "2": "c"}
    model = make("bert", "sequence_classification", id2label=labels)
    everything = model.predict("the cat")
    assert model.predict("the cat", top_k=2) == everything[:2]
    assert model.predict("the cat", threshold=everything[0].score - 1e-6) == everything[:1]
    assert model.predict("the cat", threshold=1.1) == []
    cut = model.predict("the cat", threshold={everything[0].label: 1.1})
    assert cut == everything[1:]
    raw = padded(model, "the cat")
    for name, values in (("none", raw), ("sigmoid", raw.sigmoid()), ("softmax", raw.softmax(-1))):
        found = {c.label: c.score for c in model.predict("the cat", function_to_apply=name)}
        assert found == pytest.approx(dict(zip("abc", values.tolist(), strict=True)), abs=1e-5)


@pytest.mark.parametrize(
    ("problem", "labels", "function"),
    [
        ("multi_label_classification", 3, torch.sigmoid),
        ("regression", 1, lambda x: x),
        ("regression", 2, lambda x: x),
        ("single_label_classification", 3, lambda x: x.softmax(-1)),
    ],
)
def test_the_problem_type_says_what_scores_mean(
    make: Maker, problem: str, labels: int, function: Any, padded: Padded
) -> None:
    names = {str(i): f"L{i}" for i in range(labels)}
    model = make("bert", "sequence_classification", problem_type=problem, id2label=names)
    expected = function(padded(model, "the cat sat")).tolist()
    found = {c.label: c.score for c in model.predict("the cat sat")}
    assert found == pytest.approx(dict(zip(names.values(), expected, strict=True)), abs=1e-5)


# --- order and streams -------------------------------------------------------------------------------


def rough(value: Any) -> Any:
    """Answers with scores rounded, for comparing runs whose batches differ."""
    if isinstance(value, torch.Tensor):
        return [round(v, 4) for v in value.flatten().tolist()]
    if isinstance(value, (list, tuple)):
        return [rough(v) for v in value]
    if isinstance(value, float):
        return round(value, 4)
    return rough([getattr(value, f) for f in value.__slots__]) if hasattr(value, "__slots__") else value


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "base": lambda model, texts: model.embed(texts, windows=True),
    "sequence_classification": lambda model, texts: model.predict(texts),
    "token_classification": lambda model, texts: model.predict(texts, ignore_labels=()),
    "question_answering": lambda model, texts: model.answer_batch(
        [("who?", f"the {t}") for t in texts] if isinstance(texts, list) else (("who?", f"the {t}") for t in texts)
    ),
    "masked_lm": lambda model, texts: model.fill_mask(
        [f"a [MASK] {t}" for t in texts] if isinstance(texts, list) else (f"a [MASK] {t}" for t in texts), top_k=2
    ),
}


@pytest.mark.parametrize("head", CALLS)
def test_order_is_kept_and_lists_give_lists_and_iterators_iterators(make: Maker, head: str) -> None:
    model = make("bert", head)
    expected = [rough(CALLS[head](model, [text])[0]) for text in TEXTS]
    listed, streamed = CALLS[head](model, TEXTS), CALLS[head](model, iter(TEXTS))
    assert rough(list(listed)) == expected
    assert isinstance(streamed, Iterator)
    assert not isinstance(listed, Iterator)
    assert rough(list(streamed)) == expected
    assert list(CALLS[head](model, iter(()))) == []


def test_more_texts_than_a_chunk_holds(make: Maker) -> None:
    model = make("bert", "sequence_classification", num_hidden_layers=1)
    texts = [FILLER[i % 18] + " x" * (i % 3) for i in range(2100)]
    expected = {text: rough(model.predict([text])[0]) for text in set(texts)}
    assert rough(model.predict(texts)) == [expected[text] for text in texts]
    assert rough(list(model.predict(iter(texts)))) == [expected[text] for text in texts]


def test_a_model_in_training_mode_predicts_without_dropout_and_stays_in_training(make: Maker) -> None:
    model = make("bert", "sequence_classification").train()
    assert model.predict("the cat") == model.predict("the cat")
    assert model.training
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("head", CALLS)
def test_eight_threads_share_one_model(make: Maker, head: str) -> None:
    model = make("bert", head)
    expected = rough(list(CALLS[head](model, TEXTS)))
    results: dict[int, Any] = {}
    barrier = threading.Barrier(8)

    def work(number: int) -> None:
        barrier.wait()
        results[number] = [rough(list(CALLS[head](model, TEXTS))) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == list(range(8))
    assert all(found == expected for runs in results.values() for found in runs)
    assert not model.training


# --- masks -------------------------------------------------------------------------------------------


@having("masked_lm")
def test_masks_are_filled_as_a_padded_call_scores_them(make: Maker, model_type: str, padded: Padded) -> None:
    model = make(model_type, "masked_lm")
    text = "the [MASK] sat on a [MASK] mat"
    places = [i for i, t in enumerate(model.tokenizer.encode(text)) if t == model.tokenizer.mask_token_id]
    scores, ids = padded(model, text)[places].softmax(-1).topk(4)
    found = model.fill_mask(text, top_k=4)
    assert [[f.token_ids for f in fills] for fills in found] == [[(i,) for i in row] for row in ids.tolist()]
    torch.testing.assert_close(torch.tensor([[f.score for f in fills] for fills in found]), scores, rtol=0, atol=1e-5)
    first, second = found
    assert first[0].sequence == f"the {first[0].token} sat on a [MASK] mat"
    assert second[0].sequence == f"the [MASK] sat on a {second[0].token} mat"


@pure
@given(lead=st.integers(0, 150), tail=st.integers(0, 150), gap=st.integers(0, 120))
def test_masks_far_apart_in_a_long_text_are_each_filled_once(crafted: Maker, lead: int, tail: int, gap: int) -> None:
    model = crafted("masked_lm", {"[MASK]": 3})
    with torch.no_grad():
        bias = model.graph.get_parameter("head.decoder.bias")
        bias[model.tokenizer.token_to_id("paris")] = 2.0
        bias[model.tokenizer.token_to_id("film")] = 1.0
    short = model.fill_mask("[MASK]", top_k=2)[0]
    assert [f.token for f in short][-1] in ("paris", "film")
    text = "the cat " * lead + "[MASK] " + "dog ran " * gap + "[MASK]" + " on" * tail
    found = model.fill_mask(text, top_k=2)
    assert [[f.token for f in fills] for fills in found] == [[f.token for f in short]] * 2
    for n, fills in enumerate(found):
        pieces = text.split("[MASK]")
        pieces[n : n + 2] = [pieces[n] + fills[0].token + pieces[n + 1]]
        assert fills[0].sequence == "[MASK]".join(pieces)
        assert [f.score for f in fills] == pytest.approx([f.score for f in short], abs=1e-6)


def test_targets_are_scored_over_the_whole_vocabulary(make: Maker, padded: Padded) -> None:
    model = make("bert", "masked_lm")
    text = "the [MASK] sat"
    place = model.tokenizer.encode(text).index(model.tokenizer.mask_token_id)
    odds = padded(model, text)[place].softmax(-1)
    words = ["cat", "dog", "mat"]
    expected = {word: float(odds[model.tokenizer.token_to_id(word)]) for word in words}
    found = model.fill_mask(text, targets=words)[0]
    assert {f.token: f.score for f in found} == pytest.approx(expected, abs=1e-6)
    assert [f.token for f in found] == sorted(words, key=lambda w: -expected[w])
    # Every mask of a text has its own scores.
    two = "the [MASK] [MASK]"
    masks = [i for i, t in enumerate(model.tokenizer.encode(two)) if t == model.tokenizer.mask_token_id]
    pairs = padded(model, two)[masks].softmax(-1)
    for fills, odd in zip(model.fill_mask(two, targets=words), pairs, strict=True):
        assert {f.token: f.score for f in fills} == pytest.approx(
            {word: float(odd[model.tokenizer.token_to_id(word)]) for word in words}, abs=1e-6
        )
    # A word of several pieces is scored with as many masks.
    wide = "the [MASK][MASK] sat"
    ids = model.tokenizer.encode("adax", add_special_tokens=False)
    masks = [i for i, t in enumerate(model.tokenizer.encode(wide)) if t == model.tokenizer.mask_token_id]
    both = padded(model, wide)[masks].softmax(-1)
    (long,) = model.fill_mask(text, targets=["adax"])[0]
    assert long.token_ids == tuple(ids)
    assert long.score == pytest.approx(float(both[0, ids[0]] * both[1, ids[1]]), rel=1e-3)
    assert long.sequence == "the adax sat"


# --- embeddings --------------------------------------------------------------------------------------


@families
@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "mean_sqrt_len", "weighted_mean", "last_token"])
def test_embeddings_are_the_pooled_states_of_a_padded_call(
    make: Maker, model_type: str, pooling: str, padded: Padded
) -> None:
    model = make(model_type, "base")
    reference: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "mean": lambda s: s.mean(0),
        "cls": lambda s: s[0],
        "max": lambda s: s.amax(0),
        "mean_sqrt_len": lambda s: s.sum(0) / len(s) ** 0.5,
        "weighted_mean": lambda s: (s * torch.arange(1, len(s) + 1)[:, None]).sum(0) / sum(range(1, len(s) + 1)),
        "last_token": lambda s: s[-1],
    }
    texts = [text for text in TEXTS if len(text) < 60]
    found = model.embed(texts, pooling=pooling, normalize=False)
    expected = torch.stack([reference[pooling](padded(model, t, field="last_hidden_state")) for t in texts])
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    unit = torch.nn.functional.normalize(expected, dim=-1)
    torch.testing.assert_close(model.embed(texts, pooling=pooling), unit, rtol=0, atol=2e-5)


def test_embeddings_by_pooler_joined_and_shortened(make: Maker, padded: Padded) -> None:
    model = make("bert", "base")
    pooled = padded(model, "the cat", field="pooler_output")
    torch.testing.assert_close(model.embed("the cat", pooling="pooler", normalize=False), pooled, rtol=0, atol=1e-5)
    joined = model.embed("the cat", pooling=["cls", "mean"], normalize=False)
    torch.testing.assert_close(joined[:16], model.embed("the cat", pooling="cls", normalize=False))
    assert joined.shape == (32,)
    short = model.embed("the cat", truncate_dim=5)
    torch.testing.assert_close(short, torch.nn.functional.normalize(model.embed("the cat")[:5], dim=0))


# --- zero-shot and reranking -------------------------------------------------------------------------


def test_zero_shot_compares_entailment(make: Maker, padded: Padded) -> None:
    nli = {"0": "contradiction", "1": "neutral", "2": "entailment"}
    model = make("bert", "sequence_classification", id2label=nli)
    labels, text = ["film", "cat", "paris"], "the cat sat"
    logits = torch.stack([padded(model, text, f"This example is {label}.") for label in labels])
    for many, expected in ((False, logits[:, 2].softmax(0)), (True, logits[:, [0, 2]].softmax(-1)[:, 1])):
        found = model.zero_shot(text, labels, multi_label=many)
        assert {c.label: c.score for c in found} == pytest.approx(
            dict(zip(labels, expected.tolist(), strict=True)), abs=1e-5
        )
        assert [c.score for c in found] == sorted((c.score for c in found), reverse=True)
    several = model.zero_shot(TEXTS, labels, template="{}?")
    assert rough(several) == rough([model.zero_shot(t, labels, template="{}?") for t in TEXTS])
    streamed = model.zero_shot(iter(TEXTS), labels, template="{}?")
    assert isinstance(streamed, Iterator)
    assert rough(list(streamed)) == rough(several)


NO_TYPES = [{"tokenizer_class": "TokenizersBackend"}, {"model_input_names": ["input_ids", "attention_mask"]}]


@pytest.mark.parametrize("stated", [{}, *NO_TYPES])
def test_pairs_are_marked_where_the_tokenizers_class_marks_them(stated: dict[str, Any], make: Maker) -> None:
    """Folders that transformers 5 writes name no inputs; what their class does not give, predictions have not."""
    model = make("bert", "sequence_classification", num_labels=3)
    files = model.tokenizer.files()
    files["tokenizer_config.json"] = json.dumps(json.loads(files["tokenizer_config.json"]) | stated).encode()
    model.tokenizer = Tokenizer.from_files(files, model_type="bert")
    encoded = model.tokenizer([["the cat", "a dog"]], return_tensors="pt")
    assert ("token_type_ids" in encoded) == (not stated)
    with torch.no_grad():
        expected = model(**encoded).logits[0].softmax(-1)
        marked = model(encoded["input_ids"], token_type_ids=torch.tensor([[0, 0, 0, 0, 1, 1, 1]])).logits[0].softmax(-1)
    found = {answer.label: answer.score for answer in model.predict([("the cat", "a dog")])[0]}
    assert [found[label] for label in model.config.labels] == pytest.approx(expected.tolist(), abs=1e-6)
    assert torch.allclose(expected, marked, atol=1e-4) == (not stated)


OLD, NEW = "sbert_ce_default_activation_function", "sentence_transformers"
IDENTITY, SIGMOID = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"
TANH = "torch.nn.modules.activation.Tanh"


@pytest.mark.parametrize(
    ("stated", "function"),
    [
        ({}, torch.sigmoid),
        ({OLD: IDENTITY}, lambda logits: logits),
        ({OLD: TANH}, torch.tanh),
        ({NEW: {"activation_fn": IDENTITY, "version": "4.1.0.dev0"}}, lambda logits: logits),
        ({NEW: {"activation_fn": "torch.nn.Tanh"}}, torch.tanh),
        ({NEW: {"activation_fn": SIGMOID}, OLD: IDENTITY}, torch.sigmoid),
        ({NEW: {"version": "4.1.0.dev0"}, OLD: IDENTITY}, lambda logits: logits),
        ({NEW: {"activation_fn": "torch.nn.modules.activation.Softplus"}}, torch.nn.functional.softplus),
    ],
)
def test_scores_are_made_by_the_stored_activation(stated: dict[str, Any], function: Any, make: Maker) -> None:
    model: Any = make("bert", "sequence_classification", num_labels=1, **stated)
    documents = ["the cat sat", "on a mat", ""]
    logits = torch.tensor([r.score for r in _by_place(model.rerank("cat", documents, function_to_apply="none"))])
    expected = function(logits).tolist()
    found = _by_place(model.rerank("cat", documents))
    assert [r.score for r in found] == pytest.approx(expected, abs=1e-6)
    assert [r.empty for r in found] == [False, False, True]
    predicted = model.predict([("cat", document) for document in documents[:2]])
    assert [labels[0].score for labels in predicted] == pytest.approx(expected[:2], abs=1e-6)
    given = model.predict([("cat", documents[0])], activation_fn=torch.nn.Tanh())
    assert given[0][0].score == pytest.approx(logits.tanh()[0].item(), abs=1e-6)


def _by_place(ranking: Any) -> list[Any]:
    return sorted(ranking, key=lambda document: document.index)


@pytest.mark.parametrize("path", ["mine.Tanh", "torch.nn.modules.activation.GLU", "torch.nn.modules.activation.PReLU"])
def test_an_activation_that_is_not_known_is_refused_by_name(path: str, saved: Any) -> None:
    folder = saved("bert", "sequence_classification", num_labels=1)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, NEW: {"activation_fn": path}}), "utf-8")
    with pytest.raises(ConfigError, match=r"config\.json") as caught:
        load(folder)
    assert caught.value.details["found"] == path
    (folder / "config.json").write_text(json.dumps({**config, OLD: path}), "utf-8")
    with pytest.raises(ConfigError, match=OLD):
        load(folder)
    load(folder, head="base")


def test_reranking_sorts_by_the_best_window(make: Maker, padded: Padded) -> None:
    model = make("bert", "sequence_classification", id2label={"0": "relevance"})
    documents = ["the cat sat", "on a mat", "ada lives in paris", "bad film"]
    scores = torch.stack([padded(model, "cat", document)[0] for document in documents]).sigmoid()
    found = model.rerank("cat", documents)
    assert [r.index for r in found] == scores.argsort(descending=True).tolist()
    assert [r.score for r in found] == pytest.approx(sorted(scores.tolist(), reverse=True), abs=1e-5)
    assert model.rerank("cat", documents, top_k=2) == found[:2]
    assert {r.windows for r in model.rerank("cat", ["the cat " * 60])} == {4}


def test_a_pair_that_is_cut_loses_of_its_longer_text_first(make: Maker) -> None:
    """As transformers' pipeline with ``truncation=True`` and sentence-transformers' cross-encoders cut it."""
    for long, short in (("the cat sat " * 30, "a good film"), ("a good film", "the cat sat " * 30), ("cat " * 40,) * 2):
        model = make("bert", "sequence_classification", num_labels=1, problem_type="multi_label_classification")
        tokens = model.tokenizer([long], [short], truncation=True, max_length=model.max_tokens, return_tensors="pt")
        with torch.no_grad():
            expected = model(**tokens).logits.sigmoid().item()
        ((label,),) = model.predict([(long, short)], truncate=True, precision="exact")
        assert label.score == pytest.approx(expected, abs=1e-6)
        (found,) = model.rerank(long, [short], truncate=True, precision="exact", function_to_apply="sigmoid")
        assert found.score == pytest.approx(expected, abs=1e-6)


def test_dense_layers_are_batch_invariant(make: Maker) -> None:
    """The vector of a text by itself is that of the text among others, to the bit; products of rows are not."""
    from flodl_hf.checkpoints.sentence.recipe import SentenceTransformerConfig
    from flodl_hf.checkpoints.sentence.steps import Dense

    model = make("bert", "base")
    torch.manual_seed(0)
    width = model.config.hidden_size
    dense = Dense(torch.randn(37, width), torch.randn(37), "Tanh")
    model.sentence_recipe = SentenceTransformerConfig(
        dense=(dense,), normalize=True, lexical=Dense(torch.randn(1, width))
    )
    texts = [" ".join([("the", "cat", "sat", "on", "mat")[n % 5]] * (n % 5 + 1)) for n in range(30)]
    found = model.embed(texts, batch_invariant=True)
    assert all(
        torch.equal(row, model.embed(text, batch_invariant=True)) for text, row in zip(texts, found, strict=True)
    )
    sparse = model.embed_sparse(texts, batch_invariant=True)
    assert [sparse[n] for n in range(30)] == [model.embed_sparse([text], batch_invariant=True)[0] for text in texts]
    torch.testing.assert_close(found, model.embed(texts), atol=1e-5, rtol=0)
