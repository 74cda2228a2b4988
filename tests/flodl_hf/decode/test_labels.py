"""Label names are read in order, and tagging schemes are told from plain names."""

from __future__ import annotations

import re
from itertools import pairwise, product

import pytest

from flodl_hf.inference.entities import TagScheme


@pytest.mark.parametrize(
    ("labels", "parts", "entities"),
    [
        (["O", "B-PER", "I-PER", "B-LOC", "I-LOC"], "OBIBI", ["O", "PER", "PER", "LOC", "LOC"]),
        (["O", "B_PER", "I_PER"], "OBI", ["O", "PER", "PER"]),
        (["O", "I-PER", "I-LOC"], "OII", ["O", "PER", "LOC"]),
        (["O", "B-X", "I-X", "E-X", "S-X"], "OBIES", ["O", "X", "X", "X", "X"]),
        (["B-X", "L-X", "I-X", "O", "U-X"], "BEIOS", ["X", "X", "X", "O", "X"]),
        (["O", "B-X", "M-X", "E-X", "S-X"], "OBIES", ["O", "X", "X", "X", "X"]),
        (["O", "credit-card", "e-mail"], "OII", ["O", "credit-card", "e-mail"]),
        (["O", "E-mail", "S-bahn"], "OII", ["O", "E-mail", "S-bahn"]),
        (["O", "I-94", "passport"], "OII", ["O", "I-94", "passport"]),
        (["O", "B-PER", "I-PER", "E-mail"], "OBII", ["O", "PER", "PER", "E-mail"]),
        (["O", "B-PER", "I-PER", "X", "[SEP]"], "OBIII", ["O", "PER", "PER", "X", "[SEP]"]),
        (["O", "B-X", "I-X", "E-X", "S-X", "S-Y"], "OBIESS", ["O", "X", "X", "X", "X", "Y"]),
        (["O", "B-credit-card", "I-credit-card"], "OBI", ["O", "credit-card", "credit-card"]),
        (["NOUN", "VERB"], "SS", ["NOUN", "VERB"]),
        (["O", "PER"], "OI", ["O", "PER"]),
    ],
)
def test_schemes_are_told_from_the_labels(labels, parts, entities) -> None:
    found = TagScheme.detect(labels)
    assert "".join("OBIES"[part] for part in found.parts) == parts
    assert [found.entity_names[e] for e in found.entities] == entities


# What a legal tag sequence of one entity looks like, as patterns over the letters.
GRAMMARS = {
    ("O", "B", "I"): r"(O|BI*)*",
    ("O", "I"): r"[OI]*",
    ("O", "B", "I", "E", "S"): r"(O|S|BI*E)*",
    ("O", "B", "I", "L", "U"): r"(O|U|BI*L)*",
    ("O", "B", "M", "E", "S"): r"(O|S|BM*E)*",
}


@pytest.mark.parametrize("letters", GRAMMARS, ids="".join)
def test_transitions_allow_exactly_the_legal_sequences(letters: tuple[str, ...]) -> None:
    scheme = TagScheme.detect([letter if letter == "O" else f"{letter}-X" for letter in letters])
    pattern = re.compile(GRAMMARS[letters])
    counted = 0
    for length in range(1, 6):
        for path in product(range(len(letters)), repeat=length):
            allowed = bool(scheme.may_start[path[0]] and scheme.may_end[path[-1]]) and all(
                scheme.allowed[a, b] for a, b in pairwise(path)
            )
            legal = pattern.fullmatch("".join(letters[i] for i in path)) is not None
            assert allowed == legal, [letters[i] for i in path]
            counted += legal
    assert counted > 10


def test_inside_never_continues_another_entity() -> None:
    scheme = TagScheme.detect(["O", "B-PER", "I-PER", "B-LOC", "I-LOC"])
    assert not scheme.allowed[1, 4]
    assert scheme.allowed[1, 2]
    assert not scheme.allowed[0, 2]
