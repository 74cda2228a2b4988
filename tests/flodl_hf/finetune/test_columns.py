"""What the columns of a table are for is told by their names and kinds, and doubts are not guessed."""

import pytest

from flodl.errors import ConfigError, DataError
from flodl_hf.jobs.columns import ColumnArgs, choose_columns
from flodl_hf.tokenization.readers.columns import Columns, infer_columns
from flodl_hf.training.choices import choice_columns
from flodl_hf.training.vectors.tables import read_table

SENTENCE = {"words": ["a"], "tags": ["O"]}
ANSWERS = {"text": ["a"], "answer_start": [0]}
COLUMNS = [
    ({"sentence": "a", "label": 1, "idx": 3}, Columns(task="sequence-classification", text="sentence", label="label")),
    ({"premise": "a", "hypothesis": "b", "label": "x"}, Columns(task="sequence-classification", text="premise", text_pair="hypothesis", label="label")),
    ({"Headline text": "long enough", "Topic": "x"}, Columns(task="sequence-classification", text="Headline text", label="Topic")),
    ({"text": "a", "labels": ["x", "y"]}, Columns(task="sequence-classification", text="text", label="labels")),
    ({"id": "3", "tokens": ["a"], "ner_tags": [0]}, Columns(task="token-classification", words="tokens", tags="ner_tags")),
    (SENTENCE, Columns(task="token-classification", words="words", tags="tags")),
    ({"text": "a", "entities": [{"start": 0, "end": 1, "label": "x"}]}, Columns(task="token-classification", text="text", spans="entities")),
    ({"id": "1", "question": "a", "context": "b", "answers": ANSWERS}, Columns(task="question-answering", question="question", context="context", answers="answers")),
    ({"text": "a"}, Columns(task="masked-lm", text="text")),
]  # fmt: skip


@pytest.mark.parametrize(("row", "expected"), COLUMNS, ids=[" ".join(row) for row, _ in COLUMNS])
def test_columns_are_told_by_names_and_kinds(row, expected):
    assert infer_columns([row]) == expected


@pytest.mark.parametrize("index", ["Unnamed: 0", "Unnamed: 0.1", "Unnamed: 3", "__index_level_0__"])
@pytest.mark.parametrize(("row", "expected"), COLUMNS, ids=[" ".join(row) for row, _ in COLUMNS])
def test_row_numbers_of_data_frames_are_no_column(row, expected, index):
    for numbered in ({index: "0", **row}, {index: 0, **row}, {**row, index: None}):
        assert infer_columns([numbered]) == expected


@pytest.mark.parametrize("index", ["Unnamed: 0", "__index_level_0__"])
def test_row_numbers_are_no_text_of_an_example_and_no_text_to_predict(index):
    assert infer_columns([{index: "a", "other": "b"}] * 4, text=index, label="other").text == index
    table = read_table([{index: "0", "one": "a", "other": "b"}])
    assert table.texts == [("a", "b")]
    choice = choose_columns("base", [index, "headline"], ColumnArgs(), own=False)
    assert (choice.first, choice.keep) == ("headline", (index, "headline"))


def test_sentences_without_entities_do_not_hide_the_spans():
    rows = [{"text": "a", "spans": []}, {"text": "b", "spans": []}]
    assert infer_columns(rows).spans == "spans"


def test_columns_can_be_said_and_doubts_are_not_guessed():
    rows = [{"a": "x", "b": "y", "c": "z"}]
    with pytest.raises(DataError) as caught:
        infer_columns(rows)
    assert caught.value.problems == ["a: text", "b: text", "c: text"]
    assert infer_columns(rows, text="b", label="c") == Columns(task="sequence-classification", text="b", label="c")
    two = [{"a": f"text {i}", "b": "xy"[i % 2]} for i in range(6)]
    assert infer_columns(two, text="a") == Columns(task="sequence-classification", text="a", label="b")
    for said in ({"text": "q"}, {"txet": "a"}):
        with pytest.raises(DataError):
            infer_columns(rows, **said)
    with pytest.raises(DataError):
        infer_columns([])


def test_several_columns_are_joined_only_for_roles_that_take_them():
    row = {"a": "x", "b": "y", "first": "p", "second": "q", "label": 0, "c+d": "z"}
    assert choice_columns(row, {"prompt": "first", "choices": "a+b"}).choices == ("a", "b")
    assert choice_columns(row, {"prompt": "c+d", "choices": "a+b"}).prompt == "c+d"
    with pytest.raises(ConfigError) as caught:
        choice_columns(row, {"prompt": "first+second", "choices": "a+b"})
    assert caught.value.problems == ["prompt='first+second'"]


@pytest.mark.parametrize("texts", [[], None, [None]])
def test_an_example_of_vectors_has_a_text(texts):
    rows = [{"texts": ["a", "b"]}, {"texts": texts}]
    with pytest.raises(DataError):
        read_table(rows, {"anchor": "texts"})
