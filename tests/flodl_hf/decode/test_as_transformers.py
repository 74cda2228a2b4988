"""Compat outputs equal the pipelines of transformers 5 key by key; where those are wrong, both are shown."""

from __future__ import annotations

import warnings
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flodl_hf.errors import PredictError
from flodl_hf.inference.classes import decode_classes
from flodl_hf.inference.entities import TagScheme
from flodl_hf.inference.transformers_results import (
    fill_mask,
    text_classification,
    token_classification,
    zero_shot_classification,
)
from flodl_hf.tokenization.alignment import join_words

from .conftest import decode_entities

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.transformers

TEXTS = [
    "Ada Lovelace lives in Paris.",
    "Jean-Pierre O'Brien moved from New York to Zürich in 1994, with 3.14 % interest.",
    "Microsoft and Google met in London, (not in Paris) on Monday! 🎉 東京",
]
BIO = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]


def config(**options: Any) -> Any:
    return transformers.BertConfig(
        vocab_size=400,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=128,
        initializer_range=0.6,
        **options,
    )


def named(labels: list[str]) -> dict[str, Any]:
    return {"id2label": dict(enumerate(labels)), "label2id": {name: i for i, name in enumerate(labels)}}


def made(kind: str, seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    return getattr(transformers, kind)(config(**options)).eval()


def wrapped(tokenizer: Any, **options: Any) -> Any:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=type(tokenizer).from_str(tokenizer.to_str()),
        cls_token="[CLS]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        unk_token="[UNK]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **{"model_max_length": 128, **options},
    )


def facts(tokenizer: Any) -> Any:
    return SimpleNamespace(
        convert_ids_to_tokens=tokenizer.convert_ids_to_tokens,
        convert_tokens_to_string=tokenizer.convert_tokens_to_string,
        continuing_prefix=getattr(tokenizer._tokenizer.model, "continuing_subword_prefix", None) or None,
        unk_token_id=tokenizer.unk_token_id,
    )


def run(net: Any, rows: list[Any], field: str = "logits") -> list[torch.Tensor]:
    """One row at a time, as the pipelines run them, so that not a bit differs."""
    with torch.no_grad():
        return [
            net(
                input_ids=torch.tensor([row.ids]),
                token_type_ids=torch.tensor([row.type_ids]),
                attention_mask=torch.ones(1, len(row.ids), dtype=torch.long),
            )[field][0]
            for row in rows
        ]


@lru_cache(maxsize=2)
def pipeline(task: str, net: Any, tokenizer: Any) -> Any:
    return transformers.pipeline(task, model=net, tokenizer=tokenizer, device="cpu")


def theirs(task: str, net: Any, tokenizer: Any, *inputs: Any, **options: Any) -> Any:
    """What the pipeline answers; its warnings are about its own heuristics."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pipeline(task, net, tokenizer)(*inputs, **options)


@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
@pytest.mark.parametrize("kind", ["wordpiece", "byte_bpe", "metaspace"])
@pytest.mark.parametrize("labels", [BIO, ["O", "credit-card", "e-mail", "I-X", "B-X"]], ids=["bio", "odd"])
def test_token_classification(strategy, kind, labels, encode, request) -> None:
    own = request.getfixturevalue(kind)
    tokenizer = wrapped(own)
    net = made("BertForTokenClassification", **named(labels))
    ignoring = [["O"], [], ["PER", "B-LOC"]]
    seen = 0
    for text, ignored in zip(TEXTS, ignoring, strict=True):
        options = {"aggregation_strategy": strategy, "ignore_labels": ignored}
        expected = theirs("token-classification", net, tokenizer, text, **options)
        rows = encode(own, text)
        found = token_classification(run(net, rows), rows, text, labels, facts(tokenizer), **options)
        assert found == expected
        assert [list(entity) for entity in found] == [list(entity) for entity in expected]
        seen += len(found)
    assert seen >= 5


@pytest.mark.parametrize("strategy", ["simple", "first", "average", "max"])
@pytest.mark.parametrize("kind", ["wordpiece", "byte_bpe"])
def test_token_classification_in_windows(strategy, kind, encode, request) -> None:
    own = request.getfixturevalue(kind)
    tokenizer = wrapped(own, model_max_length=24)
    net = made("BertForTokenClassification", seed=3, **named(BIO))
    text = " ".join(TEXTS)
    expected = theirs("token-classification", net, tokenizer, text, aggregation_strategy=strategy, stride=6)
    rows = encode(own, text, size=24, stride=6)
    assert len(rows) > 3
    with torch.no_grad():
        # The pipeline pads the windows of a text to one length.
        widest = max(len(row.ids) for row in rows)
        ids = torch.tensor([row.ids + [0] * (widest - len(row.ids)) for row in rows])
        logits = [
            net(
                input_ids=i[None],
                token_type_ids=torch.zeros_like(i[None]),
                attention_mask=(i != 0).long()[None],
            ).logits[0]
            for i in ids
        ]
    found = token_classification(logits, rows, text, BIO, facts(tokenizer), aggregation_strategy=strategy)
    assert found == expected


@pytest.mark.parametrize("strategy", ["none", "simple", "first"])
def test_token_classification_of_presplit_words(strategy, wordpiece, encode) -> None:
    tokenizer = wrapped(wordpiece)
    net = made("BertForTokenClassification", seed=1, **named(BIO))
    words = ["Jean-Pierre", "O'Brien", "moved", "to", "Zürich", "."]
    expected = theirs(
        "token-classification",
        net,
        tokenizer,
        words,
        aggregation_strategy=strategy,
        is_split_into_words=True,
        delimiter="__",
    )
    rows = encode(wordpiece, words)
    text, spans = join_words(words, "__")
    found = token_classification(
        run(net, rows),
        rows,
        text,
        BIO,
        facts(tokenizer),
        aggregation_strategy=strategy,
        word_spans=spans,
    )
    assert [found] == (expected if isinstance(expected[0], list) else [expected])


def test_an_unknown_strategy_is_refused(wordpiece) -> None:
    with pytest.raises(PredictError, match="aggregation_strategy"):
        token_classification([], [], "", BIO, facts(wrapped(wordpiece)), aggregation_strategy="best")


@pytest.mark.parametrize(
    ("problem", "labels"),
    [
        (None, ["no", "maybe", "yes"]),
        ("single_label_classification", ["no", "maybe", "yes"]),
        ("multi_label_classification", ["no", "maybe", "yes"]),
        ("regression", ["x", "y", "z"]),
        (None, ["stars"]),
        ("multi_label_classification", ["stars"]),
        ("regression", ["stars"]),
    ],
)
def test_text_classification(problem, labels, wordpiece, encode) -> None:
    tokenizer = wrapped(wordpiece)
    net = made("BertForSequenceClassification", problem_type=problem, **named(labels))
    functions = {TEXTS[0]: (None,), TEXTS[1]: (None, "softmax", "sigmoid", "none")}
    for text, asked in [(text, name) for text, names in functions.items() for name in names]:
        logits = torch.stack(run(net, encode(wordpiece, text)))
        options = {"function_to_apply": asked}
        ours = {"problem_type": problem, **options}
        for top_k in (2, None):
            expected = theirs("text-classification", net, tokenizer, text, top_k=top_k, **options)
            assert text_classification(logits, labels, top_k=top_k, **ours) == [expected]
            typed = decode_classes(logits, labels, top_k=top_k, **ours)[0]
            assert [c.label for c in typed] == [entry["label"] for entry in expected]
            assert [c.score for c in typed] == pytest.approx([entry["score"] for entry in expected], rel=1e-5)


def test_text_classification_of_pairs(wordpiece, encode) -> None:
    net = made("BertForSequenceClassification", **named(["no", "yes"]))
    expected = theirs(
        "text-classification", net, wrapped(wordpiece), {"text": TEXTS[0], "text_pair": TEXTS[1]}, top_k=None
    )
    logits = torch.stack(run(net, encode(wordpiece, TEXTS[0], TEXTS[1])))
    assert text_classification(logits, ["no", "yes"], top_k=None) == [expected]


@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize(
    "labels",
    [["contradiction", "neutral", "entailment"], ["Entailment", "neutral", "contradiction"], ["a", "b", "c"]],
    ids=lambda labels: labels[0],
)
def test_zero_shot(multi_label, labels, wordpiece, encode) -> None:
    net = made("BertForSequenceClassification", **named(labels))
    for candidates in (["sport", "politics", "Paris"], ["sport"]):
        expected = theirs(
            "zero-shot-classification", net, wrapped(wordpiece), TEXTS, candidates, multi_label=multi_label
        )
        rows = [
            row for text in TEXTS for name in candidates for row in encode(wordpiece, text, f"This example is {name}.")
        ]
        logits = torch.stack(run(net, rows))
        assert zero_shot_classification(logits, TEXTS, candidates, labels, multi_label=multi_label) == expected


@pytest.mark.parametrize("kind", ["wordpiece", "byte_bpe"])
def test_fill_mask(kind, encode, request) -> None:
    own = request.getfixturevalue(kind)
    tokenizer = wrapped(own)
    net = made("BertForMaskedLM")

    def decode(ids: list[int], skip: bool) -> str:
        return tokenizer.decode(ids, skip_special_tokens=skip)

    words = ["Paris", "London", "in", "Ada", "zebra"]
    for text in ("The [MASK] of France.", "The [MASK] of [MASK] is [MASK]."):
        (row,) = encode(own, text)
        (logits,) = run(net, [row])
        at = logits[torch.tensor(row.ids) == tokenizer.mask_token_id]
        for options in ({}, {"top_k": 1}, {"top_k": 9}, {"targets": words}, {"targets": words, "top_k": 2}):
            expected = theirs("fill-mask", net, tokenizer, text, **options)
            ours = dict(options)
            if "targets" in ours:
                vocabulary = tokenizer.get_vocab()
                ours["targets"] = [
                    vocabulary.get(word, tokenizer(word, add_special_tokens=False)["input_ids"][0]) for word in words
                ]
            found = fill_mask(
                at,
                row.ids,
                mask_id=tokenizer.mask_token_id,
                pad_id=tokenizer.pad_token_id,
                decode=decode,
                **ours,
            )
            assert found == expected
    with pytest.raises(PredictError) as fault:
        fill_mask(at, [2, 3], mask_id=4, pad_id=0, decode=decode)
    assert (fault.value.masks, fault.value.logits) == (0, len(at))


def forced(net: Any, labels: list[str], tags: dict[int, str]) -> Any:
    """A model that labels each token id as told, and all others ``O``, whatever the text."""

    class Told(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            chosen = [[labels.index(tags.get(int(i), "O")) for i in row] for row in input_ids]
            return torch.eye(len(labels))[torch.tensor(chosen)] * 9.0

    told = Told()

    def forward(input_ids: torch.Tensor, **_: Any) -> Any:
        return transformers.modeling_outputs.TokenClassifierOutput(logits=told(input_ids))

    net.forward = forward
    return net


def both(own: Any, encode: Any, text: str, labels: list[str], tags: dict[str, str], **options: Any) -> Any:
    """``(theirs, ours)`` as (label, text at the reported place) for a model that labels pieces as told."""
    tokenizer = wrapped(own, **({"model_max_length": options["size"]} if "size" in options else {}))
    ids = {own.token_to_id(piece): tag for piece, tag in tags.items()}
    assert None not in ids
    net = forced(made("BertForTokenClassification", **named(labels)), labels, ids)
    strategy = options.get("strategy", "simple")
    other = theirs("token-classification", net, tokenizer, text, aggregation_strategy=strategy)
    rows = encode(own, text, **({"size": options["size"], "stride": 4} if "size" in options else {}))
    logits = [net.forward(torch.tensor([row.ids])).logits[0] for row in rows]
    ours = decode_entities(logits, rows, text, TagScheme.detect(labels))
    assert all(text[e.start : e.end] == e.word for e in ours)
    return [(e["entity_group"], text[e["start"] : e["end"]]) for e in other], [(e.label, e.word) for e in ours]


def test_ours_keeps_hyphenated_names_whole(wordpiece, encode) -> None:
    text = "credit card number is 1234"
    pieces = wordpiece.encode("1234").tokens[1:-1]
    other, ours = both(wordpiece, encode, text, ["O", "credit-card"], dict.fromkeys(pieces, "credit-card"))
    assert other == [("card", "1234")]
    assert ours == [("credit-card", "1234")]


def test_ours_reads_bioes(wordpiece, encode) -> None:
    labels = ["O", "B-LOC", "I-LOC", "E-LOC", "S-LOC"]
    other, ours = both(wordpiece, encode, "in Paris Paris", labels, {"Paris": "S-LOC"})
    assert ours == [("LOC", "Paris"), ("LOC", "Paris")]
    # Two places that each stand alone are run together.
    assert other == [("LOC", "Paris Paris")]


def test_ours_leaves_out_the_leading_space(byte_bpe, encode) -> None:
    other, ours = both(byte_bpe, encode, "lives in Paris", BIO, {"ĠParis": "B-LOC"})
    assert ours == [("LOC", "Paris")]
    assert other == [("LOC", " Paris")]


def test_ours_ends_a_bpe_word_where_the_tokenizer_does(byte_bpe, encode) -> None:
    other, ours = both(byte_bpe, encode, "met in Paris, (not in London)", BIO, {"ĠParis": "B-LOC"}, strategy="first")
    assert ours == [("LOC", "Paris")]
    # The comma has no space before it, so it is taken for a part of the word.
    assert other == [("LOC", " Paris,")]


def test_ours_reads_long_texts_to_their_end(wordpiece, encode) -> None:
    text = "Ada lives in Paris. " * 8 + "No more of Paris"
    tags = {"Paris": "B-LOC"}
    other, ours = both(wordpiece, encode, text, BIO, tags, size=20)
    assert len(other) < len(ours)
    assert ours == [("LOC", "Paris")] * 9
