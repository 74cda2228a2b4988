"""Late chunking: parts of a text have the mean of their tokens' states in one long pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from flodl_hf.errors import PredictError
from flodl_hf.heads.base import BaseModel
from flodl_hf.heads.chunks import sentence_spans
from flodl_hf.training import demo

TEXT = "The pizza was cold. The waiter was rude!  Was it late?\n\nI love the music"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = demo.demo_model(demo.learn_vocabulary()).save_pretrained(tmp_path_factory.mktemp("chunks") / "tiny")
    return BaseModel.from_pretrained(folder)


def states_of(model: Any, text: str) -> tuple[Any, Any]:
    (row,) = model.tokenizer.encode_rows([text])[0]
    ids = torch.tensor([list(row.ids)])
    with torch.no_grad():
        return row, model.eval()(ids).last_hidden_state[0]


def by_hand(row: Any, states: Any, start: int, end: int) -> Any:
    inside = [i for i, (a, b) in enumerate(row.offsets) if not row.special[i] and a < end and b > start]
    return states[inside].mean(0)


def test_sentences_are_found_where_they_end() -> None:
    parts = [TEXT[start:end] for start, end in sentence_spans(TEXT)]
    assert parts == ["The pizza was cold.", "The waiter was rude!", "Was it late?", "I love the music"]
    assert sentence_spans(" \n") == []
    assert [end - start for start, end in sentence_spans("3.5 is a number. 好吗？好。")] == [16, 3, 2]


def test_parts_have_the_mean_of_their_tokens_in_one_pass(model: Any) -> None:
    row, states = states_of(model, TEXT)
    found = model.embed_chunks(TEXT)
    assert found.parts == [TEXT[start:end] for start, end in sentence_spans(TEXT)]
    for vector, (start, end) in zip(found.vectors, found.spans, strict=True):
        assert torch.allclose(vector, F.normalize(by_hand(row, states, start, end), dim=0), atol=1e-5)
    assert not torch.allclose(found.vectors, model.embed(found.parts), atol=1e-2)  # alone they do not know the others
    spans = [(4, 15), (0, 30), (10, 41)]
    given, none = model.embed_chunks([TEXT, "cold"], spans=[spans, []], normalize=False, truncate_dim=8)
    assert (given.spans, none.spans, none.vectors.shape) == (spans, [], (0, 8))
    for vector, (start, end) in zip(given.vectors, spans, strict=True):
        assert torch.allclose(vector, by_hand(row, states, start, end)[:8], atol=1e-5)
    by_tokens = model.embed_chunks(TEXT, chunks=5)
    content = sum(not special for special in row.special)
    assert len(by_tokens.spans) == -(-content // 5)
    assert torch.allclose(model.embed_chunks([TEXT] * 3)[2].vectors, found.vectors, atol=1e-5)
    assert model.embed_chunks([]) == []


def test_a_prompt_is_read_and_is_in_no_part(model: Any) -> None:
    row, states = states_of(model, "query: " + TEXT)
    found = model.embed_chunks(TEXT, prompt="query: ", normalize=False)
    for vector, (start, end) in zip(found.vectors, found.spans, strict=True):
        assert torch.allclose(vector, by_hand(row, states, start + 7, end + 7), atol=1e-5)


def test_a_text_beyond_one_pass_is_read_in_passes_that_overlap(model: Any) -> None:
    text = " ".join(f"{TEXT} {number}." for number in range(40))
    limit, shared = model.max_tokens, 20
    rows = model.tokenizer.encode_rows([text], max_tokens=limit, stride=shared)[0]
    assert len(rows) > 2
    states: dict[tuple[int, int], list[tuple[int, Any]]] = {}
    for row in rows:
        assert len(row.ids) <= limit
        with torch.no_grad():
            found = model.eval()(torch.tensor([list(row.ids)])).last_hidden_state[0]
        own = [i for i, special in enumerate(row.special) if not special]
        for place, i in enumerate(own):
            edge = min(place + (0 if row is not rows[0] else 10**6), len(own) - 1 - place + (10**6) * (row is rows[-1]))
            states.setdefault(tuple(row.offsets[i]), []).append((edge, found[i]))
    assert max(map(len, states.values())) > 1
    result = model.embed_chunks(text, overlap=shared, normalize=False)
    assert result.parts == [text[start:end] for start, end in sentence_spans(text)]
    near = 0
    for vector, (start, end) in zip(result.vectors, result.spans, strict=True):
        inside = [max(seen, key=lambda one: one[0])[1] for (a, b), seen in states.items() if a < end and b > start]
        near += torch.allclose(vector, torch.stack(inside).mean(0), atol=1e-5)
    # A token in the very middle of what is shared is as far from the edge of either pass.
    assert near >= len(result.spans) - len(rows)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"spans": [[(0, 99)]]}, "outside of their text"),
        ({"spans": [[(3, 4)]]}, "no tokens"),
        ({"spans": []}, "a list for each"),
        ({"chunks": "pages"}, "'sentences'"),
        ({"chunks": 0}, "number of tokens"),
        ({"overlap": 10**6}, "overlap"),
    ],
)
def test_what_makes_no_sense_is_refused(how: dict[str, Any], says: str, model: Any) -> None:
    with pytest.raises(PredictError, match=says):
        model.embed_chunks(["The pizza"], **how)
