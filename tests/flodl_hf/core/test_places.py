"""Entities and answers stand where they should: alone, buried in long texts, at seams, and as exact slices."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flodl_hf.families import FAMILIES

Maker = Callable[..., Any]
Padded = Callable[..., torch.Tensor]
FILLER = [
    "the", "a", "cat", "dog", "sat", "on", "mat", "ran", "good", "bad", "film", "is", "was", "not", "very", "lives", "in",
    "works", "for", "unheard-of", "stitch,", "!", "?",
]  # fmt: skip
ENTITIES = {"ada": 1, "paris": 3, "acme": 5, "corp": 6}
NER = {str(i): name for i, name in enumerate(["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-ORG", "I-ORG"])}
FOUND = {"Ada": "PER", "Paris": "LOC", "Acme Corp": "ORG", "ACME": "ORG"}
families = pytest.mark.parametrize("model_type", [f.model_type for f in FAMILIES if "token_classification" in f.heads])
filler = st.lists(st.sampled_from(FILLER), max_size=70)
pure = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


# --- entities ----------------------------------------------------------------------------------------


@families
@pure
@given(
    before=filler, after=filler, surface=st.sampled_from(sorted(FOUND)), gap=st.sampled_from([" ", "  ", "\n", " ("])
)
def test_an_entity_found_alone_is_found_when_buried(
    crafted: Maker, model_type: str, before: list[str], after: list[str], surface: str, gap: str
) -> None:
    model = crafted("token_classification", ENTITIES, model_type, other=0, id2label=NER)
    (alone,) = model.predict(surface)
    assert (alone.label, alone.word) == (FOUND[surface], surface)
    lead = " ".join(before) + gap
    text = f"{lead}{surface} {' '.join(after)}"
    (found,) = model.predict(text)
    assert (found.label, found.word, found.start, found.end) == (
        alone.label,
        surface,
        len(lead),
        len(lead) + len(surface),
    )
    assert found.score == pytest.approx(alone.score, abs=1e-5)


@pure
@given(before=filler, after=filler, surface=st.sampled_from(sorted(FOUND)))
def test_an_entity_is_found_among_given_words(
    crafted: Maker, before: list[str], after: list[str], surface: str
) -> None:
    model = crafted("token_classification", ENTITIES, other=0, id2label=NER)
    parts = surface.split()
    (found,) = model.predict([[*before, *parts, *after]], words=True)[0]
    assert (found.label, found.word) == (FOUND[surface], surface)
    assert found.words == (len(before), len(before) + len(parts))


@pure
@given(words=st.lists(st.sampled_from([*FILLER, *FOUND]), min_size=80, max_size=160), stride=st.integers(0, 64))
def test_every_entity_of_a_long_text_is_found_once_whatever_the_stride(
    crafted: Maker, words: list[str], stride: int
) -> None:
    model = crafted("token_classification", ENTITIES, other=0, id2label=NER)
    text = " ; ".join(words)
    expected = [(m.group(), *m.span()) for m in re.finditer("|".join(sorted(FOUND, reverse=True)), text)]
    assert [(e.word, e.start, e.end) for e in model.predict(text, stride=stride)] == expected


@pytest.mark.parametrize("aggregation", ["none", "simple", "first", "average", "max"])
@pure
@given(text=st.text(alphabet="ab cat.Ada-Paris'  \u00e9e\u0301\u6771\u4eac\U0001f389\u0130\ufb01\u00a0\n", max_size=90))
def test_words_of_entities_are_slices_of_the_text(make: Maker, aggregation: str, text: str) -> None:
    model = make("bert", "token_classification", id2label=NER)
    found = model.predict(text, aggregation=aggregation, ignore_labels=())
    assert all(text[e.start : e.end] == e.word and e.word.strip() for e in found)
    assert [e.start for e in found] == sorted(e.start for e in found)
    assert all(a.end <= b.start for a, b in pairwise(found))
    assert all(0 <= e.score <= 1 for e in found)
    assert {e.label for e in found} <= ({*NER.values()} if aggregation == "none" else {"O", "PER", "LOC", "ORG"})


def test_token_scores_are_those_of_a_padded_call(make: Maker, padded: Padded) -> None:
    model = make("bert", "token_classification", id2label=NER)
    text = "ada lives in paris"
    expected = padded(model, text).softmax(-1)[1:-1]
    found = model.predict(text, aggregation="none", ignore_labels=())
    assert [e.label for e in found] == [NER[str(i)] for i in expected.argmax(-1).tolist()]
    torch.testing.assert_close(torch.tensor([e.score for e in found]), expected.amax(-1), rtol=0, atol=1e-5)


def test_a_word_of_several_pieces_is_one_entity_by_its_first(crafted: Maker) -> None:
    # "adax" is ada + ##x, whose own label is O; "paris" within a word does not break it.
    model = crafted("token_classification", {**ENTITIES, "##x": 3}, other=0, id2label=NER)
    (found,) = model.predict("adax ran")
    assert (found.label, found.word) == ("PER", "adax")
    by_token = model.predict("adax ran", aggregation="simple")
    assert [(e.label, e.word) for e in by_token] == [("PER", "ada"), ("LOC", "x")]


def test_constrained_decoding_allows_no_inside_without_a_begin(crafted: Maker) -> None:
    model = crafted("token_classification", ENTITIES, other=0, id2label=NER)
    assert [e.word for e in model.predict("the corp ran", constrained=True)] in ([], ["corp"], ["the corp"])
    (found,) = model.predict("for acme corp in the mat", constrained=True)
    assert (found.label, found.word) == ("ORG", "acme corp")


# --- answers -----------------------------------------------------------------------------------------

SPAN = "ada works for acme corp"


@pytest.mark.parametrize("model_type", [f.model_type for f in FAMILIES if "question_answering" in f.heads])
@pure
@given(before=filler, after=filler)
def test_an_answer_is_found_wherever_it_stands(
    crafted: Maker, model_type: str, before: list[str], after: list[str]
) -> None:
    model = crafted("question_answering", {"ada": 0, "corp": 1}, model_type)
    lead = " ".join(before) + "\n"
    context = f"{lead}{SPAN}. {' '.join(after)}"
    found = model.answer("who works?", context)
    assert (found.text, found.start, found.end) == (SPAN, len(lead), len(lead) + len(SPAN))
    assert found.score > 0.9


def test_scores_do_not_depend_on_the_windows(crafted: Maker) -> None:
    classes = {"ada": 0, "corp": 1}
    context = " ".join(["the cat sat"] * 40) + f" {SPAN} " + " ".join(["on a mat"] * 30)
    one = crafted("question_answering", classes, sure=0.5, max_position_embeddings=400).answer(
        "who?", context, stride=4
    )
    many = crafted("question_answering", classes, sure=0.5).answer("who?", context)
    assert (one.text, one.start) == (many.text, many.start)
    assert 0.001 < many.score < 0.99
    assert many.score == pytest.approx(one.score, rel=1e-4)


def test_answers_of_a_padded_call_score_the_product_of_both_ends(make: Maker, padded: Padded) -> None:
    model = make("bert", "question_answering")
    question, context = "who sat?", "the cat sat on a mat"
    start, end = (padded(model, question, context, f"{side}_logits") for side in ("start", "end"))
    rows = model.tokenizer.encode_rows([question], [context])[0]
    inside = [i for i, s in enumerate(rows[0].sequence_ids) if s == 1]
    p_start, p_end = start[[0, *inside]].softmax(0)[1:], end[[0, *inside]].softmax(0)[1:]
    table = torch.triu(p_start[:, None] * p_end[None])
    best = divmod(int(table.argmax()), len(inside))
    found = model.answer(question, context)
    spans = [rows[0].offsets[i] for i in inside]
    assert (found.start, found.end) == (spans[best[0]][0], spans[best[1]][1])
    assert found.score == pytest.approx(float(table.max()), abs=1e-5)


def test_several_answers_are_distinct_best_first_and_exact(crafted: Maker) -> None:
    model = crafted("question_answering", {"ada": 0, "corp": 1}, sure=1.0)
    context = f"{SPAN}. " + "the cat sat on a mat " * 20 + f"{SPAN}!"
    found = model.answer("who?", context, top_k=5)
    assert [(a.text, a.start) for a in found[:2]] == [(SPAN, 0), (SPAN, context.rindex(SPAN))]
    assert [a.score for a in found] == sorted((a.score for a in found), reverse=True)
    assert sum(a.score for a in found) <= 1 + 1e-6
    assert len({(a.start, a.end) for a in found}) == len(found)
    assert all(context[a.start : a.end] == a.text for a in found)


def test_no_answer_is_given_only_when_allowed_and_likelier(crafted: Maker) -> None:
    # [CLS] scores high as both ends, so "nothing here" beats the cat.
    model = crafted("question_answering", {"ada": 0, "corp": 1})
    with torch.no_grad():
        cls = model.graph.get_parameter("encoder.embeddings.word.weight")[2]
        cls.zero_()
        cls[:2] = 1.0
    assert not model.answer("who?", "the cat sat").no_answer
    nothing = model.answer("who?", "the cat sat", no_answer=True)
    assert nothing.no_answer
    assert nothing.text == ""
    assert not model.answer("who?", "the cat sat", no_answer=True, null_margin=1e4).no_answer


def test_questions_come_in_any_form_and_answers_in_their_order(crafted: Maker) -> None:
    model = crafted("question_answering", {"ada": 0, "corp": 1, "paris": 1, "cat": 1})
    contexts = ["ada corp", "the ada cat ran " * 30, "ada in paris"]
    as_pairs = [("who?", c) for c in contexts]
    expected = [[("ada corp", 0)], [("ada cat", 4)], [("ada in paris", 0)]]

    def short(answers: Any) -> list[list[tuple[str, int]]]:
        return [[(a.text, a.start) for a in found][:1] for found in answers]

    assert short(model.answer_batch(as_pairs)) == expected
    assert short(model.answer_batch([{"question": "who?", "context": c} for c in contexts])) == expected
    streamed = model.answer_batch(iter(as_pairs))
    assert isinstance(streamed, Iterator)
    assert short(streamed) == expected


# --- windows -----------------------------------------------------------------------------------------


def widest(model: Any, text: str, stride: int, field: str = "logits") -> dict[int, list[torch.Tensor]]:
    """For each token of a long text what the windows say in which it stands furthest from both ends."""
    best: dict[int, tuple[int, list[torch.Tensor]]] = {}
    for row in model.tokenizer.encode_rows([text], max_tokens=40, stride=stride)[0]:
        with torch.no_grad():
            states = model(torch.tensor([row.ids]))[field][0]
        content = [i for i, special in enumerate(row.special) if not special]
        for place, i in enumerate(content):
            context, token = min(place, len(content) - 1 - place), row.first_token + place
            kept, said = best.get(token, (-1, []))
            best[token] = (
                (context, [states[i]]) if context > kept else (kept, [*said, states[i]] if context == kept else said)
            )
    return {token: said for token, (_, said) in best.items()}


@pytest.mark.parametrize("stride", [4, 11, 64])
def test_a_token_in_two_windows_is_judged_where_it_has_more_context(make: Maker, stride: int) -> None:
    model = make("bert", "token_classification", id2label=NER)
    words = [FILLER[(i * 7) % 17] for i in range(110)]
    found = model.predict(" ".join(words), aggregation="none", ignore_labels=(), stride=stride)
    expected = widest(model, " ".join(words), min(stride, 19))
    assert len(found) == len(expected) > 100
    for token, entity in enumerate(found):
        assert any(entity.score == pytest.approx(float(s.softmax(-1).max()), abs=1e-5) for s in expected[token]), token


def test_a_mask_in_two_windows_is_filled_where_it_has_more_context(make: Maker) -> None:
    model = make("bert", "masked_lm")
    limit = 40
    for lead in (5, 30, 36, 41, 60):
        text = "the cat " * lead + "[MASK] " + "dog ran " * 40
        windows = model.tokenizer.encode_rows([text], max_tokens=limit, stride=limit // 4, snap=False)[0]
        places = [
            (row, row.ids.index(model.tokenizer.mask_token_id))
            for row in windows
            if model.tokenizer.mask_token_id in row.ids
        ]
        row, place = max(places, key=lambda found: min(found[1], len(found[0].ids) - 1 - found[1]))
        with torch.no_grad():
            scores, ids = model(torch.tensor([row.ids])).logits[0, place].softmax(-1).topk(3)
        (found,) = model.fill_mask(text, top_k=3)
        assert [f.token_ids for f in found] == [(i,) for i in ids.tolist()]
        assert [f.score for f in found] == pytest.approx(scores.tolist(), abs=1e-5)
