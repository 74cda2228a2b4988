"""Models, configurations and answers that go elsewhere: pickled, copied, saved by torch, sent to other processes."""

from __future__ import annotations

import copy
import io
import multiprocessing
import multiprocessing.reduction
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flodl.errors import ConfigError
from flodl_hf import families as known
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.families import FAMILIES
from flodl_hf.families.schema.tasks import HEADS
from flodl_hf.models.encoder_model import EncoderModel
from flodl_hf.models.outputs import Output

CELLS = [(f.model_type, h.name) for f in FAMILIES for h in HEADS if h.name == "base" or h.name in f.heads]
cells = pytest.mark.parametrize(("model_type", "head"), CELLS)
Make = Callable[..., EncoderModel]
IDS = torch.tensor([[2, 7, 9, 6, 3], [2, 8, 5, 3, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]])


def by_torch(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
    "torch.save": by_torch,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "shared memory": lambda thing: pickle.loads(
        multiprocessing.reduction.ForkingPickler.dumps(thing)  # as multiprocessing and torch's DataLoader send it
    ),
}


def same(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for name in one.keys():  # noqa: SIM118
        assert torch.equal(one[name], other[name])


@cells
def test_a_model_is_itself_after_every_way(make: Make, model_type: str, head: str) -> None:
    model: Any = make(model_type, head)
    method = {"base": "embed", "masked_lm": "fill_mask", "question_answering": "answer_batch"}.get(head, "predict")
    pairs = [("the cat", "a cat sat on the mat")]
    asked = {
        "masked_lm": ["the [MASK] sat"], "question_answering": pairs, "next_sentence": pairs, "pretraining": pairs,
        "multiple_choice": [("the cat", ["sat on the mat", "ran"])],
    }  # fmt: skip
    texts = asked.get(head, ["the cat sat", "a dog"])
    getattr(model, method)(texts)  # the model has been used, and holds prepared graphs
    answers = getattr(model, method)(texts, precision="exact")
    with torch.no_grad():
        before = model(input_ids=IDS, attention_mask=MASK)
        for name, way in WAYS.items():
            found = way(model)
            assert type(found) is type(model), name
            same(before, found(input_ids=IDS, attention_mask=MASK))
            again = getattr(found, method)(texts, precision="exact")
            assert torch.equal(again, answers) if head == "base" else again == answers, name
            assert pickle.loads(pickle.dumps(again)) == answers if head != "base" else True
            assert found.config.family is model.config.family
            tied = [n for n, p in model.named_parameters(remove_duplicate=False)]
            assert [n for n, p in found.named_parameters(remove_duplicate=False)] == tied
            assert len(list(found.parameters())) == len(list(model.parameters())), "ties are kept"


def test_a_loaded_model_takes_its_source_along(saved: Callable[..., Path], tmp_path: Path) -> None:
    from flodl_hf import load

    folder = saved("bert", "sequence_classification")
    for name, way in WAYS.items():
        found = way(load(folder))
        written = found.save_pretrained(tmp_path / f"again-{name}")
        for file in folder.iterdir():
            assert (written / file.name).read_bytes() == file.read_bytes(), (name, file.name)


def test_random_weights_stay_known_as_random(make: Make) -> None:
    model: Any = make("bert", "sequence_classification")
    fresh = ["head.classifier.weight", "head.classifier.bias"]
    model._mark_untrained(fresh)
    with torch.no_grad():
        model.graph.get_parameter(fresh[1]).add_(1)
    for name, way in WAYS.items():
        found = way(model)
        assert found.untrained == fresh[:1], name
        if name != "copy":  # which shares its weights
            found.load_state_dict(found.state_dict())
            assert found.untrained == []
    assert model.untrained == fresh[:1]


@pytest.mark.parametrize("way", WAYS)
def test_configurations_and_outputs(make: Make, way: str) -> None:
    for family in FAMILIES:
        config = make(family.model_type).config.changed(labels=["no", "yes"])
        found = WAYS[way](config)
        assert found.family is family
        assert (found.encoder, found.labels, found.to_dict()) == (config.encoder, config.labels, config.to_dict())
    output = make("bert", "sequence_classification")(input_ids=IDS, attention_mask=MASK)
    output.logits = output.logits.detach()
    assert torch.equal(WAYS[way](output).logits, output.logits)


def test_families_from_outside_travel_by_their_name(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "_registered", {})
    own = FAMILIES[0].renamed("bert-of-ours", "OurBert")
    model: Any = make("bert", "sequence_classification")
    model.config = ModelConfig(own, model.config.encoder, model.config.labels, source=model.config.source)
    with pytest.raises(ConfigError, match=r"'bert-of-ours'.*register\(FAMILY\)"):
        pickle.dumps(model)
    assert copy.deepcopy(model).config.family is own
    known.register(own)
    sent = pickle.dumps(model)
    assert pickle.loads(sent).config.family is own
    known._registered.clear()
    with pytest.raises(ConfigError, match="bert, roberta") as caught:
        pickle.loads(sent)
    assert caught.value.problems == ["model_type"]


# Seconds each: every head, each in another family; the record that is returned depends on the head alone.
OTHERS = [
    (h.name, next(f.model_type for f in (*FAMILIES[i:], *FAMILIES) if h.name == "base" or h.name in f.heads))
    for i, h in enumerate(HEADS)
]


@pytest.mark.parametrize(("head", "model_type"), OTHERS)
def test_exported_programs_return_the_same_output(make: Make, model_type: str, head: str) -> None:
    model: Any = make(model_type, head)
    batch = torch.export.Dim("batch", min=2, max=8)
    program = torch.export.export(
        model, (), {"input_ids": IDS, "attention_mask": MASK},
        dynamic_shapes={"input_ids": {0: batch}, "attention_mask": {0: batch}},
    )  # fmt: skip
    if head == "sequence_classification":
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        program = torch.export.load(file)
    with torch.no_grad():
        ids, mask = IDS.repeat(2, 1), MASK.repeat(2, 1)
        found = program.module()(input_ids=ids, attention_mask=mask)
        expected = model(input_ids=ids, attention_mask=mask)
    assert isinstance(found, Output)
    assert type(found) is type(expected)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-6)


class Asked(torch.utils.data.Dataset[Any]):
    """Rows that a model answers in a worker process."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        texts = ["the cat sat", "a dog"]
        return os.getpid(), self.model.predict(texts), self.model.config, self.model.tokenizer(texts).input_ids


def as_is(row: Any) -> Any:
    # torch's own conversion of rows takes results for dictionaries.
    return row


def test_workers_of_a_data_loader_take_models(make: Make) -> None:
    """The worker is a spawned process: what holds here holds for multiprocessing's pools, and joblib's and Ray's."""
    model: Any = make("bert", "sequence_classification", labels=["no", "yes"])
    loader = torch.utils.data.DataLoader(
        Asked(model), batch_size=None, num_workers=1, multiprocessing_context="spawn", collate_fn=as_is
    )  # fmt: skip
    [(process, answers, config, ids)] = list(loader)
    assert process != os.getpid()
    texts = ["the cat sat", "a dog"]
    expected = model.predict(texts)
    assert [[(s.label, round(s.score, 5)) for s in row] for row in answers] == [
        [(s.label, round(s.score, 5)) for s in row] for row in expected
    ]
    assert config.family is model.config.family
    assert model.tokenizer is not None
    assert ids == model.tokenizer(texts).input_ids


def test_what_a_run_and_its_model_give_travels(saved: Callable[..., Path]) -> None:
    from flodl_hf import finetune, load

    folder = saved("bert", "sequence_classification")
    rows = [{"text": "a good film", "label": "good"}, {"text": "a bad film", "label": "bad"}] * 4
    run = finetune(str(folder), train=rows, eval=rows[:2], max_steps=2)
    model: Any = run.model
    things = [run, model, model.explain(), model.run_options, load(folder).load_report, model.tokenizer,
              model.tokenizer(["a cat"], return_tensors="pt"), model.predict(["a cat", ""])]  # fmt: skip
    for thing in things:
        assert type(pickle.loads(pickle.dumps(thing))) is type(copy.deepcopy(thing)) is type(thing)
    again = pickle.loads(pickle.dumps(run))
    assert (again.metrics, again.steps) == (run.metrics, run.steps)
    texts = ["a good film", "a cat"]
    assert again.model.predict(texts, precision="exact") == model.predict(texts, precision="exact")


def test_by_cloudpickle_as_joblib_and_ray_send_it(make: Make) -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    model: Any = make("bert", "sequence_classification")
    task = pickle.loads(cloudpickle.dumps(lambda: model.predict(["the cat"])))
    assert task() == model.predict(["the cat"])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_after_use_predicts(make: Make) -> None:
    """With threads of torch in the parent a fork waits for ever, unless it is told to go on with one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        settings = {"hidden_size": 128, "intermediate_size": 256}
        model: Any = make("bert", "sequence_classification", **settings)
        texts = ["the cat sat on the mat", "a dog ran"] * 150
        expected = model.predict(texts)
        reader, writer = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=_answer, args=(model, texts, writer))
        process.start()
        assert reader.poll(30), "the fork hangs"
        answers, told, many = reader.recv()
        process.join()
    finally:
        torch.set_num_threads(threads)
    assert [row[0].label for row in answers] == [row[0].label for row in expected]
    assert (len(told), many) == (1, 1)
    assert "forked after a model had run" in told[0]


def _answer(model: Any, texts: list[str], pipe: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.predict(texts)
        answers = model.predict(texts)
    pipe.send((answers, [str(w.message) for w in caught], torch.get_num_threads()))
