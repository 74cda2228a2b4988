"""A patched JSON text keeps the order, indentation and line ends of its source."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flodl_hf.checkpoints.config.file import patch_json
from flodl_hf.errors import ExportError

CONFIG = """{
  "architectures": [
    "BertForMaskedLM"
  ],
  "attention_probs_dropout_prob": 0.1,
  "layer_norm_eps": 1e-12,
  "model_type": "bert",
  "odd": {
    "b": 1,
    "a": []
  },
  "vocab_size": 30522
}
"""

# Source, changes, keys to remove, expected.
CASES: dict[str, tuple[str, dict[str, Any], list[str], str]] = {
    "nothing": (CONFIG, {}, [], CONFIG),
    "equal values": (
        CONFIG,
        {"layer_norm_eps": 1e-12, "odd": {"b": 1, "a": []}, "architectures": ["BertForMaskedLM"]},
        ["absent"],
        CONFIG,
    ),
    "a number": (CONFIG, {"vocab_size": 7}, [], CONFIG.replace("30522", "7")),
    "a list": (CONFIG, {"architectures": ["A", "B"]}, [], CONFIG.replace('"BertForMaskedLM"', '"A",\n    "B"')),
    "a table": (
        CONFIG,
        {"odd": {"0": "x"}},
        [],
        CONFIG.replace('"b": 1,\n    "a": []', '"0": "x"'),
    ),
    "1 is not true": ('{"a": 1}', {"a": True}, [], '{"a": true}'),
    "1 is not 1.0": ('{"a": 1}', {"a": 1.0}, [], '{"a": 1.0}'),
    "null": ('{"a": 1}', {"a": None}, [], '{"a": null}'),
    "a new key in its place": (
        CONFIG,
        {"id2label": {"0": "NO"}},
        [],
        CONFIG.replace('  "layer_norm', '  "id2label": {\n    "0": "NO"\n  },\n  "layer_norm'),
    ),
    "a new first key": ('{"b": 1}', {"a": 0}, [], '{"a": 0, "b": 1}'),
    "a new last key": (CONFIG, {"z": 1}, [], CONFIG.replace("30522\n", '30522,\n  "z": 1\n')),
    "unsorted, at the end": ('{"b": 1, "a": 2}', {"aa": 0}, [], '{"b": 1, "a": 2, "aa": 0}'),
    "compact": ('{"a":1,"b":[1,2]}', {"b": [1, 3], "c": {"x": 1}}, [], '{"a":1,"b":[1,3],"c":{"x":1}}'),
    "tabs": ('{\n\t"a": 1\n}', {"a": [2]}, [], '{\n\t"a": [\n\t\t2\n\t]\n}'),
    "windows": (
        '{\r\n  "a": 1\r\n}\r\n',
        {"a": [2], "b": 3},
        [],
        '{\r\n  "a": [\r\n    2\r\n  ],\r\n  "b": 3\r\n}\r\n',
    ),
    "empty": ("{}", {"a": 1}, [], '{"a": 1}'),
    "removed in the middle": (CONFIG, {}, ["model_type"], CONFIG.replace('  "model_type": "bert",\n', "")),
    "removed at the end": (CONFIG, {}, ["vocab_size"], CONFIG.replace(',\n  "vocab_size": 30522', "")),
    "all removed": ('{"a": 1}', {}, ["a"], "{}"),
    "replaced by another": ('{"a": 1}', {"b": 2}, ["a"], '{"b": 2}'),
    "ascii stays ascii": ('{"a": "x"}', {"a": "\u00fc"}, [], '{"a": "\\u00fc"}'),
    "letters stay letters": ('{"a": "\u00f6", "b": 1}', {"b": "\u00fc"}, [], '{"a": "\u00f6", "b": "\u00fc"}'),
    "unusual text, unchanged": ('{"\\u0061":  1E3}', {"a": 1000.0}, [], '{"\\u0061":  1E3}'),
    "unusual text": ('{"\\u0061":  1E3}', {"b": 3}, [], '{"a": 1000.0, "b": 3}'),
    "a key twice, unchanged": ('{"b": 1, "a": 1, "b": 2}', {"b": 2}, [], '{"b": 1, "a": 1, "b": 2}'),
    "a key twice": ('{"b": 1, "a": 1, "b": 2}', {"a": 3}, [], '{"b": 2, "a": 3}'),
    "a key twice, removed": ('{"b": 1, "a": 1, "b": 2}', {}, ["b"], '{"a": 1}'),
    "constants that JSON lacks are kept": ('{"a": NaN, "b": 1}', {"b": 2}, [], '{"a": NaN, "b": 2}'),
    "same text in other places": ('{"a": "\\"b\\": 1", "b": 1}', {"b": 2}, [], '{"a": "\\"b\\": 1", "b": 2}'),
    "order of a table counts": ('{"a": {"x": 1, "y": 2}}', {"a": {"y": 2, "x": 1}}, [], '{"a": {"y": 2, "x": 1}}'),
}


@pytest.mark.parametrize(("source", "changes", "remove", "expected"), CASES.values(), ids=list(CASES))
def test_patch(source: str, changes: dict[str, Any], remove: list[str], expected: str) -> None:
    assert patch_json(source, changes, remove=remove) == expected


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
TABLES = st.dictionaries(st.text(max_size=4), VALUES, max_size=5)
STYLES = st.fixed_dictionaries(
    {
        "indent": st.sampled_from([None, 0, 1, 2, 4, "\t"]),
        "ensure_ascii": st.booleans(),
        "sort_keys": st.booleans(),
    }
)


@settings(max_examples=100, deadline=None)
@given(table=TABLES, changes=TABLES, style=STYLES, data=st.data())
def test_a_patched_text_means_the_patched_table(
    table: dict[str, Any], changes: dict[str, Any], style: dict[str, Any], data: st.DataObject
) -> None:
    remove = data.draw(st.sets(st.sampled_from(sorted(table)))) if table else set()
    remove -= set(changes)
    source = json.dumps(table, **style)
    patched = patch_json(source, changes, remove=remove)
    expected = {key: value for key, value in (table | changes).items() if key not in remove}
    assert json.loads(patched) == expected
    assert patch_json(source, json.loads(source)) == source


@pytest.mark.parametrize(
    "source",
    [
        "",
        "[]",
        "1",
        '{"a": 1',
        '{"a": 1,}',
        '{"a" 1}',
        "{a: 1}",
        '{"a": 1 "b": 2}',
        '{"a": 1} x',
        "{" * 9,
        '{"a": ' + "[" * 100000,
        '{"a": 1}{}',
        '{"a": .5}',
        '{"a": "\n"}',
        '\ufeff{"a": 1}',
    ],
    ids=repr,
)
def test_what_is_not_one_object_is_refused(source: str) -> None:
    with pytest.raises(ExportError):
        patch_json(source, {"a": 5})


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), {1, 2}, object(), b"x", [float("-inf")]],
    ids=["nan", "inf", "set", "object", "bytes", "nested inf"],
)
def test_values_that_json_lacks_are_refused(value: object) -> None:
    with pytest.raises(ExportError) as caught:
        patch_json('{"a": 1}', {"a": value})
    assert caught.value.key == "a"


def test_numbers_and_characters_that_cannot_be_written_are_refused_or_escaped() -> None:
    with pytest.raises(ExportError):
        patch_json('{"a": 1, "b": [1e400]}', {"a": 2})
    assert patch_json('{"a": 1, "b": [1e400]}', {"a": 1}) == '{"a": 1, "b": [1e400]}'
    half = '{"a": 1, "b": "\\ud800", "c": "é"}'
    patched = patch_json(half, {"a": 2})
    assert json.loads(patched.encode()) == {"a": 2, "b": "\ud800", "c": "é"}
