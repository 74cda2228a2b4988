"""Keywords of other libraries: each is one of ours, passed over, or refused with the method, our word and the reason."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

import flodl_hf
from flodl.errors import CheckpointError, ConfigError
from flodl_hf.checkpoints import keywords
from flodl_hf.checkpoints.keywords import KeywordAlias, _own
from flodl_hf.errors import ExportError, HubError, PredictError, TokenizerError
from flodl_hf.heads import prediction_keywords as words
from flodl_hf.heads.auto import load
from flodl_hf.models.encoder_model import EncoderModel
from flodl_hf.models.opening import LoadKeywords

Maker = Callable[..., Any]
Saved = Callable[..., Path]
NLI = {"0": "contradiction", "1": "neutral", "2": "entailment"}
TEXT = "ada lives in paris"
# Each method that predicts: its table, and how it is asked with some keywords.
METHODS: dict[str, tuple[dict[str, KeywordAlias], str, Callable[..., Any]]] = {
    "predict a class": (words.CLASSES, "sequence_classification", lambda m, **k: m.predict(TEXT, **k)),
    "zero_shot": (words.ZERO_SHOT, "sequence_classification", lambda m, **k: m.zero_shot(TEXT, **{"labels": ["a", "b"], **k})),
    "rerank": (words.RERANK, "sequence_classification", lambda m, **k: m.rerank("who?", [TEXT], **k)),
    "predict entities": (words.ENTITIES, "token_classification", lambda m, **k: m.predict(TEXT, **k)),
    "answer": (words.ANSWER, "question_answering", lambda m, **k: m.answer("who?", TEXT, **k)),
    "answer_batch": (words.ANSWER, "question_answering", lambda m, **k: m.answer_batch([("who?", TEXT)], **k)),
    "fill_mask": (words.MASKS, "masked_lm", lambda m, **k: m.fill_mask("ada [MASK] in paris", **k)),
    "embed": (words.EMBED, "base", lambda m, **k: m.embed(TEXT, **k)),
}  # fmt: skip
REFUSED = [
    (name, word)
    for name, (table, _, _) in METHODS.items()
    for word, is_ in table.items()
    if is_.ours is None and is_.harmless is not None
]
PASSED = [
    (name, word, value)
    for name, (table, _, _) in METHODS.items()
    for word, is_ in table.items()
    if is_.ours is None
    for value in (is_.harmless or ("anything",))
]


def model_for(name: str, make: Maker) -> Any:
    labels = {"0": "fits"} if name == "rerank" else NLI
    head = METHODS[name][1]
    return make("bert", head, **({"id2label": labels} if head == "sequence_classification" else {}))


@pytest.mark.parametrize(("name", "word"), REFUSED)
def test_a_word_with_another_meaning_is_refused_with_ours(name: str, word: str, make: Maker) -> None:
    with pytest.raises(PredictError) as refused:
        METHODS[name][2](model_for(name, make), **{word: "x"})
    said = str(refused.value)
    assert said.startswith(name.split()[0] if name != "answer" else "answer")
    assert f"{word}='x'" in said
    assert len(said) > 50, "no reason"


@pytest.mark.parametrize(("name", "word", "value"), PASSED)
def test_a_value_that_changes_nothing_is_passed_over(name: str, word: str, value: Any, make: Maker) -> None:
    METHODS[name][2](model_for(name, make), **{word: value})


@pytest.mark.parametrize("name", METHODS)
def test_every_word_of_ours_exists(name: str, make: Maker) -> None:
    method = getattr(model_for(name, make), name.split()[0])
    own = _own(inspect.signature(method))
    assert {word.ours for word in METHODS[name][0].values() if word.ours} <= own
    assert not set(METHODS[name][0]) & own, "ours, and never read from the table"


def test_every_way_to_run_is_known() -> None:
    from flodl_hf.inference import RunKeywords

    def like(**run: Any) -> None: ...

    assert _own(inspect.signature(like)) == set(get_type_hints(RunKeywords)) - {"long_texts"}


SAME: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("predict a class", {"return_all_scores": True}, {"top_k": None}),
    ("predict a class", {"return_all_scores": False}, {"top_k": 1}),
    ("predict a class", {"apply_softmax": True}, {"function_to_apply": "softmax"}),
    ("zero_shot", {"candidate_labels": "cats, dogs"}, {"labels": ["cats", "dogs"]}),
    ("zero_shot", {"hypothesis_template": "it is {}."}, {"template": "it is {}."}),
    ("predict entities", {"aggregation_strategy": "max"}, {"aggregation": "max"}),
    ("predict entities", {"grouped_entities": True}, {"aggregation": "simple"}),
    ("answer", {"max_answer_len": 1, "align_to_words": False}, {"max_answer_length": 1, "whole_words": False}),
    ("answer", {"topk": 3, "handle_impossible_answer": True}, {"top_k": 3, "no_answer": True}),
    ("answer_batch", {"max_seq_len": 12, "doc_stride": 2}, {"window_tokens": 12, "stride": 2}),
    ("embed", {"normalize_embeddings": False}, {"normalize": False}),
    ("embed", {"batch_size": 1, "show_progress_bar": False}, {}),
    *[(name, {"batch_size": 8, "device": "cpu", "num_workers": 2, "padding": True}, {}) for name in METHODS],
]  # fmt: skip


@pytest.mark.parametrize(("name", "theirs", "ours"), SAME)
def test_a_word_of_the_same_meaning_is_taken(
    name: str, theirs: dict[str, Any], ours: dict[str, Any], make: Maker
) -> None:
    model = model_for(name, make)
    ask = (lambda m, **k: m.zero_shot(TEXT, **k)) if "candidate_labels" in theirs else METHODS[name][2]
    found = ask(model, **theirs)
    expected = METHODS[name][2](model, **ours)
    if isinstance(found, torch.Tensor):
        assert torch.allclose(found, expected, atol=1e-5)
    else:
        assert re.sub(r"\d\.\d+", "", repr(found)) == re.sub(r"\d\.\d+", "", repr(expected))


def test_batch_size_bounds_tokens_and_no_more(make: Maker) -> None:
    model = make("bert", "base")
    assert words.budget_of(1, model) == 40
    assert words.budget_of(10_000, model) == 1024
    for wrong in (0, -1, "8", True):
        with pytest.raises(PredictError, match=r"batch_size=.*integer"):
            model.embed(TEXT, batch_size=wrong)


def test_two_words_for_one_thing_must_agree(make: Maker) -> None:
    model = make("bert", "token_classification")
    model.predict(TEXT, aggregation="max", aggregation_strategy="max")
    with pytest.raises(PredictError, match="different values"):
        model.predict(TEXT, aggregation="max", aggregation_strategy="first")


def test_a_word_of_nobody_is_refused_with_the_nearest(make: Maker) -> None:
    with pytest.raises(
        TypeError,
        match=r"predict: unexpected keyword argument 'agregation_strategy', did you mean 'aggregation_strategy'",
    ):
        make("bert", "token_classification").predict(TEXT, agregation_strategy="max")


def test_targets_that_stand_in_the_vocabulary_are_taken_as_they_are(make: Maker) -> None:
    model = make("bert", "masked_lm")
    tokenizer = model.tokenizer
    for written in ("##s", "paris", "[SEP]"):
        (fills,) = model.fill_mask("ada [MASK] in", targets=[written])
        assert fills[0].token_ids == (tokenizer.convert_tokens_to_ids(written),)
    # A word of pieces goes on being scored with as many masks, and one word alone is no list of letters.
    (fills,) = model.fill_mask("ada [MASK] in", targets="sats")
    assert [fill.token for fill in fills] == ["sats"]
    assert len(fills[0].token_ids) == 2


# --- loading -----------------------------------------------------------------------------------------

DOORS: dict[str, Callable[..., Any]] = {
    "AutoModelForSequenceClassification.from_pretrained": flodl_hf.AutoModelForSequenceClassification.from_pretrained,
    "load": load,
}
doors = pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
LOADED: list[tuple[dict[str, Any], Callable[[Any], Any]]] = [
    ({"torch_dtype": torch.bfloat16}, lambda m: m.dtype == torch.bfloat16),
    ({"torch_dtype": "float16"}, lambda m: m.dtype == torch.float16),
    ({"torch_dtype": "auto"}, lambda m: m.dtype == torch.float32),
    ({"device_map": "cpu"}, lambda m: m.device.type == "cpu"),
    ({"device_map": {"": "cpu"}}, lambda m: m.device.type == "cpu"),
    ({"device_map": "auto"}, lambda m: m.device.type == ("cuda" if torch.cuda.is_available() else m.device.type)),
    ({"attn_implementation": "eager"}, lambda m: {b.implementation for b in m.modules() if hasattr(b, "implementation")} == {"eager"}),
    ({"id2label": {"0": "no", "1": "yes"}}, lambda m: list(m.config.labels) == ["no", "yes"]),
    ({"label2id": {"yes": 1, "no": 0}}, lambda m: list(m.config.labels) == ["no", "yes"]),
    ({"low_cpu_mem_usage": True, "use_safetensors": True, "trust_remote_code": False, "return_dict": True}, lambda m: True),
]  # fmt: skip


@doors
@pytest.mark.parametrize(("theirs", "holds"), LOADED, ids=[str(theirs) for theirs, _ in LOADED])
def test_words_of_loading_are_taken(door: Callable[..., Any], theirs: dict[str, Any], holds: Any, saved: Saved) -> None:
    folder = saved("bert", "sequence_classification")
    assert holds(door(folder, **theirs))
    assert holds(door(pretrained_model_name_or_path=folder, **theirs))


@doors
@pytest.mark.parametrize(
    "word", [name for name, word in keywords.LOAD.items() if word.ours is None and word.harmless is not None]
)
def test_words_of_loading_with_another_meaning_are_refused(door: Callable[..., Any], word: str, saved: Saved) -> None:
    with pytest.raises(ConfigError, match=rf"{word}='x': \w+"):
        door(saved("bert", "sequence_classification"), **{word: "x"})


@doors
@pytest.mark.parametrize(
    "given", [{"attn_implementation": "flash_attention_2"}, {"device_map": {"a": 0, "b": 1}}, {"id2label": ["a"]}]
)
def test_values_of_loading_that_cannot_be_are_refused(
    door: Callable[..., Any], given: dict[str, Any], saved: Saved
) -> None:
    (word,) = given
    with pytest.raises(ConfigError, match=word):
        door(saved("bert", "sequence_classification"), **given)


@doors
def test_a_classifier_of_another_size_is_new_and_other_shapes_are_faults(
    door: Callable[..., Any], saved: Saved
) -> None:
    folder = saved("bert", "sequence_classification")
    model = door(folder, num_labels=5, ignore_mismatched_sizes=True)
    assert (model.config.num_labels, len(model.untrained)) == (5, 2)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 7}))
    with pytest.raises(CheckpointError, match="position_embeddings"):
        door(folder, ignore_mismatched_sizes=True)


NO_NAMES: tuple[Any, ...] = (None, 3, b"folder", ["folder"], object())


@pytest.mark.parametrize("given", NO_NAMES, ids=lambda given: type(given).__name__)
@pytest.mark.parametrize("door", [load, flodl_hf.AutoConfig.from_pretrained, flodl_hf.AutoTokenizer.from_pretrained])
def test_what_is_no_name_is_told(door: Callable[..., Any], given: Any) -> None:
    with pytest.raises((ConfigError, HubError), match=r"expected,? a folder"):
        door(given)


@doors
def test_the_doors_name_their_keywords(door: Callable[..., Any]) -> None:
    shown = inspect.signature(door).parameters
    there = inspect.signature(EncoderModel.from_pretrained).parameters
    assert [p.kind for p in shown.values() if p.kind is inspect.Parameter.VAR_KEYWORD] == []
    assert set(there) <= set(shown)
    assert set(LoadKeywords.__annotations__) == set(there) - {"name_or_path"}
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'revison', did you mean 'revision'"):
        door("nowhere", revison="main")


# --- tokenizers, configurations, saving --------------------------------------------------------------

OTHERS: dict[str, tuple[dict[str, KeywordAlias], type[Exception], Callable[..., Any]]] = {
    "AutoTokenizer": (keywords.TOKENIZER, TokenizerError, lambda folder, **k: flodl_hf.AutoTokenizer.from_pretrained(folder, **k)),
    "AutoConfig": (keywords.CONFIG, ConfigError, lambda folder, **k: flodl_hf.AutoConfig.from_pretrained(folder, **k)),
    "save_pretrained": (keywords.SAVE, ExportError, lambda folder, **k: load(folder).save_pretrained(**{"folder": folder.parent / "out", **k})),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "word"),
    [(name, word) for name, (table, *_) in OTHERS.items() for word, is_ in table.items() if is_.ours is None],
)
def test_other_words_are_refused_or_passed_over(name: str, word: str, saved: Saved) -> None:
    table, fault, call = OTHERS[name]
    folder = saved("bert", "sequence_classification")
    if table[word].harmless is None:
        call(folder, **{word: "x"})
        return
    with pytest.raises(fault, match=rf"{word}='x': \w+"):
        call(folder, **{word: "x"})
    call(folder, **{word: (table[word].harmless or (None,))[-1]})


@pytest.mark.parametrize("name", OTHERS)
def test_other_methods_name_their_keywords(name: str, saved: Saved) -> None:
    methods = {
        "AutoTokenizer": flodl_hf.AutoTokenizer.from_pretrained, "AutoConfig": flodl_hf.AutoConfig.from_pretrained,
        "save_pretrained": EncoderModel.save_pretrained,
    }  # fmt: skip
    shown = inspect.signature(methods[name]).parameters
    assert [p for p in shown.values() if p.kind is inspect.Parameter.VAR_KEYWORD] == []
    assert {word.ours for word in OTHERS[name][0].values() if word.ours} <= set(shown)
    assert not set(shown) & set(OTHERS[name][0])
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        OTHERS[name][2](saved("bert", "base"), nonsense=1)


def test_a_configuration_may_have_other_labels(saved: Saved) -> None:
    folder = saved("bert", "sequence_classification")
    read = flodl_hf.AutoConfig.from_pretrained
    assert read(folder, num_labels=3).id2label == {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}
    assert read(folder, id2label={0: "no", 1: "yes"}, problem_type="regression").label2id == {"no": 0, "yes": 1}
    assert read(pretrained_model_name_or_path=folder).num_labels == 2
    written = load(folder).save_pretrained(save_directory=folder.parent / "there")
    assert load(written).num_labels == 2
