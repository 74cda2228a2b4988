"""Entities are where the text says, joined as the scheme says, and never lost at a seam."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flodl_hf.errors import PredictError
from flodl_hf.inference.entities import TagScheme, best_paths
from flodl_hf.tokenization.alignment import join_words
from flodl_hf.tokenization.cuts import Row

from .conftest import decode_entities, entities_of

BIO = TagScheme.detect(["O", "B-PER", "I-PER", "B-LOC", "I-LOC"])


def row(tokens, first_token=0, specials=True):
    """A row of ``(start, end, word)`` tokens between two specials."""
    edge = [(0, 0, None)] if specials else []
    full = [*edge, *tokens, *edge]
    special = [w is None and specials and i in (0, len(full) - 1) for i, (_, _, w) in enumerate(full)]
    return Row(
        ids=list(range(len(full))),
        type_ids=[0] * len(full),
        offsets=[(s, e) for s, e, _ in full],
        word_ids=[w for _, _, w in full],
        sequence_ids=[None if flag else 0 for flag in special],
        special=special,
        first_token=first_token,
        window=0,
    )


def one_token_per_word(text):
    tokens, place = [], 0
    for number, word in enumerate(text.split(" ")):
        tokens.append((place, place + len(word), number))
        place += len(word) + 1
    return tokens


def sure(labels, size, strength=9.0, specials=True):
    """Logits that prefer the given label ids."""
    edge = [0] if specials else []
    return torch.eye(size)[[*edge, *labels, *edge]] * strength


def spell(scheme, tags):
    return [scheme.labels.index(tag) for tag in tags]


@pytest.mark.parametrize(
    ("labels", "tags", "expected"),
    [
        ("O B-PER I-PER B-LOC I-LOC", "B-PER I-PER O B-LOC", [("PER", "a b"), ("LOC", "d")]),
        (
            "O B-PER I-PER B-LOC I-LOC",
            "B-PER B-PER I-PER I-LOC",
            [("PER", "a"), ("PER", "b c"), ("LOC", "d")],
        ),
        ("O B-PER I-PER B-LOC I-LOC", "I-PER I-PER I-LOC O", [("PER", "a b"), ("LOC", "c")]),
        ("O I-PER I-LOC", "I-PER I-PER I-LOC O", [("PER", "a b"), ("LOC", "c")]),
        ("O B-X I-X E-X S-X", "S-X B-X I-X E-X", [("X", "a"), ("X", "b c d")]),
        ("O B-X I-X E-X S-X", "B-X E-X I-X S-X", [("X", "a b"), ("X", "c"), ("X", "d")]),
        ("O B-X I-X L-X U-X", "U-X U-X B-X L-X", [("X", "a"), ("X", "b"), ("X", "c d")]),
        ("O B-X M-X E-X S-X", "B-X M-X E-X S-X", [("X", "a b c"), ("X", "d")]),
        (
            "O credit-card e-mail",
            "credit-card credit-card e-mail O",
            [("credit-card", "a b"), ("e-mail", "c")],
        ),
        ("NOUN VERB", "NOUN NOUN VERB NOUN", [("NOUN", "a"), ("NOUN", "b"), ("VERB", "c"), ("NOUN", "d")]),
    ],
)
def test_words_join_as_the_scheme_says(labels, tags, expected) -> None:
    scheme = TagScheme.detect(labels.split())
    logits = sure(spell(scheme, tags.split()), len(scheme.labels))
    found = decode_entities(logits[None], [row(one_token_per_word("a b c d"))], "a b c d", scheme)
    assert [(e.label, e.word) for e in found] == expected


SUBWORDS = [(0, 5, 0), (5, 9, 0), (10, 13, 1)]  # "Micro" "soft" "pays"
TEXT = "Microsoft pay"
# The first piece says person, the second place and surer, their mean place.
SPLIT = torch.log(
    torch.tensor(
        [
            [1.0, 0.0, 0.0, 0.0, 0.0],
            [0.10, 0.50, 0.00, 0.30, 0.10],
            [0.05, 0.05, 0.00, 0.80, 0.10],
            [0.90, 0.10, 0.00, 0.00, 0.00],
            [1.0, 0.0, 0.0, 0.0, 0.0],
        ]
    ).clamp(min=1e-9)
)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("first", [("PER", "Microsoft", 0.50)]),
        ("average", [("LOC", "Microsoft", 0.55)]),
        ("max", [("LOC", "Microsoft", 0.80)]),
        ("simple", [("PER", "Micro", 0.50), ("LOC", "soft", 0.80)]),
        ("none", [("B-PER", "Micro", 0.50), ("B-LOC", "soft", 0.80)]),
    ],
)
def test_aggregation_decides_what_carries_the_label(aggregation, expected) -> None:
    found = decode_entities(SPLIT[None], [row(SUBWORDS)], TEXT, BIO, aggregation=aggregation)
    assert [(e.label, e.word) for e in found] == [(label, word) for label, word, _ in expected]
    assert [e.score for e in found] == pytest.approx([score for *_, score in expected], abs=1e-6)


def test_first_is_the_default() -> None:
    assert decode_entities(SPLIT[None], [row(SUBWORDS)], TEXT, BIO) == decode_entities(
        SPLIT[None], [row(SUBWORDS)], TEXT, BIO, aggregation="first"
    )


def test_the_score_is_the_mean_over_words() -> None:
    logits = torch.log(torch.tensor([[0.2, 0.8, 0.0, 0.0, 0.0], [0.4, 0.0, 0.6, 0.0, 0.0]]).clamp(min=1e-9))
    (found,) = decode_entities(logits, [row([(0, 1, 0), (2, 3, 1)], specials=False)], "a b", BIO)
    assert found.score == pytest.approx(0.7, abs=1e-6)
    assert (found.words, found.tokens) == ((0, 2), (0, 2))


def test_nothing_is_ignored_when_nothing_should_be() -> None:
    logits = sure([0, 0, 1, 0], 5)
    found = decode_entities(logits[None], [row(one_token_per_word("a b c d"))], "a b c d", BIO, ignore_labels=())
    assert [(e.label, e.word) for e in found] == [("O", "a b"), ("PER", "c"), ("O", "d")]


@pytest.mark.parametrize("ignored", ["PER", "B-PER"])
def test_entities_can_be_ignored_by_name_or_label(ignored) -> None:
    logits = sure([1, 2, 0, 3], 5)
    rows = [row(one_token_per_word("a b c d"))]
    found = decode_entities(logits[None], rows, "a b c d", BIO, ignore_labels=("O", ignored))
    assert [e.label for e in found] == ["LOC"]


def test_several_texts_are_decoded_as_each_alone() -> None:
    rows = [row(one_token_per_word("a b c d")), row(one_token_per_word("e f"))]
    parts, texts = [sure([1, 2, 0, 3], 5), sure([3, 4], 5)], ["a b c d", "e f"]
    listed = entities_of(parts, rows, texts, BIO)
    assert [[e.word for e in es] for es in listed] == [["a b", "d"], ["e f"]]
    assert listed == [decode_entities([p], [r], t, BIO) for p, r, t in zip(parts, rows, texts, strict=True)]


def test_an_entity_ends_with_its_text() -> None:
    rows = [row(one_token_per_word("a b")), row(one_token_per_word("c d"))]
    found = entities_of([sure([0, 1], 5), sure([2, 0], 5)], rows, ["a b", "c d"], BIO)
    assert [[(e.word, e.start) for e in es] for es in found] == [[("b", 2)], [("c", 0)]]


def test_texts_without_tokens_have_no_entities() -> None:
    assert decode_entities(torch.zeros(1, 2, 5), [row([])], "", BIO) == []
    rows = [row([]), row(one_token_per_word("a")), row([])]
    found = entities_of([torch.zeros(2, 5), sure([1], 5), torch.zeros(2, 5)], rows, ["", "a", " "], BIO)
    assert [len(es) for es in found] == [0, 1, 0]


def test_a_space_at_the_edge_of_a_token_is_no_part_of_the_entity() -> None:
    tokens = [(0, 3, 0), (3, 9, 1), (9, 10, 1), (10, 11, None)]
    text = "Ada\u00a0\u2003Paris\n"[: 3 + 8]
    found = decode_entities(sure([1, 3, 4, 4], 5)[None], [row(tokens)], text, BIO)
    assert [(e.word, text[e.start : e.end]) for e in found] == [("Ada", "Ada"), ("Paris", "Paris")]


def test_bytes_of_one_character_are_never_parted() -> None:
    text = "a 🎉 b"
    tokens = [(0, 1, 0), (1, 2, 1), (2, 3, 1), (2, 3, 1), (2, 3, 1), (3, 5, 2)]
    logits = sure([0, 1, 3, 1, 3, 0], 5)
    for aggregation in ("simple", "first", "average", "max"):
        found = decode_entities(logits[None], [row(tokens)], text, BIO, aggregation=aggregation)
        assert all(a.end <= b.start for a, b in pairwise(found))
        assert {e.word for e in found} == {"🎉"}


def test_punctuation_outside_a_word_leaves_it_and_inside_it_stays() -> None:
    text = "(O'Brien) left."
    tokens = [(0, 1, 0), (1, 2, 0), (2, 3, 0), (3, 8, 0), (8, 9, 0), (9, 14, 1), (14, 15, 1)]
    logits = sure([0, 1, 3, 3, 0, 0, 3], 5)
    found = decode_entities(logits[None], [row(tokens)], text, BIO)
    assert [(e.label, e.word) for e in found] == [("PER", "O'Brien"), ("LOC", ".")]


def test_the_mark_of_a_words_beginning_stays_with_the_word() -> None:
    # Metaspace pieces: "▁" alone, then the word; the label of the word is that of its first piece.
    tokens = [(0, 3, 0), (3, 4, 1), (4, 9, 1), (9, 10, 1)]
    found = decode_entities(sure([0, 3, 1, 0], 5)[None], [row(tokens)], "See Paris.", BIO)
    assert [(e.label, e.word) for e in found] == [("LOC", "Paris")]
    tokens = [(0, 3, 0), (3, 4, 1), (4, 5, 1), (5, 10, 1)]
    found = decode_entities(sure([0, 0, 0, 3], 5)[None], [row(tokens)], "See (Paris", BIO)
    assert [(e.label, e.word) for e in found] == [("LOC", "Paris")]


def test_presplit_words_keep_their_numbers_and_their_punctuation() -> None:
    words = ["Mr.", "O'Brien-Smith,", "of", "Paris"]
    text, spans = join_words(words)
    assert [text[s:e] for s, e in spans] == words
    # Offsets count from each word's own beginning.
    tokens = [(0, 2, 0), (2, 3, 0), (0, 7, 1), (7, 14, 1), (0, 2, 2), (0, 5, 3)]
    logits = sure([1, 0, 2, 0, 0, 3], 5)
    found = decode_entities(logits[None], [row(tokens)], text, BIO, word_spans=spans)
    assert [(e.label, e.word, e.words) for e in found] == [
        ("PER", "Mr. O'Brien-Smith,", (0, 2)),
        ("LOC", "Paris", (3, 4)),
    ]
    batch = entities_of(
        [logits, sure([1], 5)],
        [row(tokens), row([(0, 3, 0)])],
        [text, "Ada"],
        BIO,
        word_spans=[spans, None],
    )
    assert [[e.word for e in es] for es in batch] == [["Mr. O'Brien-Smith,", "Paris"], ["Ada"]]


def test_constrained_decoding_takes_the_best_legal_path() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.4, 0.1, 0.0, 0.0], [0.1, 0.0, 0.9, 0.0, 0.0]]).clamp(min=1e-9))
    rows = [row([(0, 3, 0), (4, 12, 1)], specials=False)]
    text = "Ada Lovelace"
    assert [e.word for e in decode_entities(logits, rows, text, BIO)] == ["Lovelace"]
    (found,) = decode_entities(logits, rows, text, BIO, constrained=True)
    assert (found.word, found.score) == ("Ada Lovelace", pytest.approx(0.65, abs=1e-6))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_the_constrained_path_is_the_best_of_all_legal_ones(seed, lengths) -> None:
    scheme = TagScheme.detect(["O", "B-X", "I-X", "E-X", "S-X"])
    probabilities = np.random.default_rng(seed).dirichlet(np.ones(5), sum(lengths))
    found = best_paths(probabilities, np.array(lengths), scheme)
    place = 0
    for length in lengths:
        if length == 0:
            continue

        def weight(path, place=place):
            if not (scheme.may_start[path[0]] and scheme.may_end[path[-1]]):
                return -np.inf
            if not all(scheme.allowed[a, b] for a, b in pairwise(path)):
                return -np.inf
            return sum(np.log(probabilities[place + i, label]) for i, label in enumerate(path))

        best = max(weight(path) for path in product(range(5), repeat=length))
        assert weight(tuple(found[place : place + length])) == pytest.approx(best)
        place += length


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"logits": torch.full((1, 4, 5), torch.nan)}, "finite"),
        ({"aggregation": "best"}, "aggregation"),
    ],
)
def test_what_does_not_fit_is_refused(change, word) -> None:
    given = {"logits": torch.zeros(1, 4, 5), "rows": [row([(0, 1, 0), (2, 3, 1)])], "text": "a b", **change}
    with pytest.raises(PredictError, match=word):
        decode_entities(
            given["logits"], given["rows"], given["text"], BIO, aggregation=given.get("aggregation", "first")
        )


# Pieces of texts: words of several tokens, spaces, punctuation, characters of several bytes.
PIECES = st.lists(
    st.tuples(
        st.lists(st.sampled_from(["Ada", "ü", "東", ".", "-", "🎉", "x"]), min_size=1, max_size=3),
        st.booleans(),
    ),
    min_size=1,
    max_size=10,
)


def stream(pieces):
    """A text and its tokens; words part at spaces, emoji come as two tokens on one character."""
    text, tokens = "", []
    for number, (parts, wide) in enumerate(pieces):
        for i, part in enumerate(parts):
            start = len(text)
            text += (" " if i == 0 else "") + part
            # Some tokenizers count the space before a word as part of its first token.
            token = (start if wide else len(text) - len(part), len(text), number)
            tokens += [token, (len(text) - 1, len(text), number)] if part == "🎉" else [token]
    return text, tokens


@st.composite
def windowings(draw, total):
    """Windows that cover ``total`` tokens and overlap or touch."""
    cuts, start = [], 0
    while True:
        end = draw(st.integers(start + 1, total))
        cuts.append((start, end))
        if end == total:
            return cuts
        start = draw(st.integers(start + 1, end))


@settings(max_examples=60, deadline=None)
@given(
    st.data(),
    PIECES,
    st.integers(0, 10**6),
    st.sampled_from(["none", "simple", "first", "average", "max"]),
    st.booleans(),
)
def test_windows_change_nothing_and_every_entity_is_in_its_place(data, pieces, seed, aggregation, constrained) -> None:
    text, tokens = stream(pieces)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(tokens), 5, generator=generator) * 3
    # With nothing ignored every unit comes out, so nothing can hide.
    options = {"aggregation": aggregation, "constrained": constrained, "ignore_labels": ()}
    whole = decode_entities(logits, [row(tokens, specials=False)], text, BIO, **options)
    cuts = data.draw(windowings(len(tokens)))
    rows = [row(tokens[a:b], first_token=a) for a, b in cuts]
    edge = torch.randn(1, 5, generator=generator)
    parts = [torch.cat([edge, logits[a:b], edge]) for a, b in cuts]
    order = data.draw(st.permutations(range(len(rows))))
    assert whole == decode_entities([parts[i] for i in order], [rows[i] for i in order], text, BIO, **options)
    for entity in whole:
        assert text[entity.start : entity.end] == entity.word != ""
        assert entity.word == entity.word.strip()
        assert 0.0 <= entity.score <= 1.0
        assert 0 <= entity.words[0] < entity.words[1]
    if aggregation != "none":
        assert all(a.end <= b.start for a, b in pairwise(whole))
        covered = "".join(e.word for e in whole)
        assert "".join(covered.split()) == "".join(text.split())


def believed(cuts):
    """Return for each token the window that speaks for it, told by logits that differ by window."""
    total = cuts[-1][1]
    text = "x" * total
    tokens = [(i, i + 1, i) for i in range(total)]
    scheme = TagScheme.detect([f"W{i}" for i in range(len(cuts))])
    rows = [row(tokens[a:b], first_token=a) for a, b in cuts]
    parts = [sure([i] * (b - a), len(cuts)) for i, (a, b) in enumerate(cuts)]
    found = decode_entities(parts, rows, text, scheme)
    assert [e.start for e in found] == list(range(total))
    return [int(e.label[1:]) for e in found]


@pytest.mark.parametrize(
    ("cuts", "expected"),
    [
        # Of two shared tokens each side has one; of three the middle one is the earlier window's.
        ([(0, 4), (2, 6)], [0, 0, 0, 1, 1, 1]),
        ([(0, 4), (1, 6)], [0, 0, 0, 1, 1, 1]),
        # Nothing is missing before the beginning nor behind the end.
        ([(0, 5), (1, 6), (2, 7)], [0, 0, 0, 1, 2, 2, 2]),
        ([(0, 7), (1, 9)], [0, 0, 0, 0, 1, 1, 1, 1, 1]),
        ([(0, 3), (3, 5)], [0, 0, 0, 1, 1]),
    ],
)
def test_windows_share_tokens_in_the_middle_of_their_overlap(cuts, expected) -> None:
    assert believed(cuts) == expected


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 12))
def test_each_token_is_seen_where_it_has_most_context(data, total) -> None:
    cuts = data.draw(windowings(total))

    def context(place, cut):
        left = total if cut[0] == 0 else place - cut[0]
        right = total if cut[1] == total else cut[1] - 1 - place
        return min(left, right)

    for place, window in enumerate(believed(cuts)):
        holding = [cut for cut in cuts if cut[0] <= place < cut[1]]
        best = max(context(place, cut) for cut in holding)
        assert context(place, cuts[window]) == best
