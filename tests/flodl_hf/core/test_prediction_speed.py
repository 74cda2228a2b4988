"""Prediction at speed changes no answer: fused, bucketed, recorded-shaped, streamed, shared among devices."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flodl_hf.errors import PredictError
from flodl_hf.families import FAMILIES
from flodl_hf.families.schema.tasks import HEADS
from flodl_hf.inference import RunOptions, forget, spread
from flodl_hf.inference import batch as passes_module
from flodl_hf.inference.batch import Pooled, Scores, States, plan_batches
from flodl_hf.inference.cuda_graphs import Recorder
from flodl_hf.inference.engine import Engine
from flodl_hf.inference.inputs import encode
from flodl_hf.inference.pipeline import Session
from flodl_hf.inference.prepared_graph import _PLACE, _trusts_buckets, prepared, prepared_for, shadow
from flodl_hf.models.encoder_model import EncoderModel
from flodl_hf.nn.attention import attend
from flodl_hf.nn.backends import self_tests
from flodl_hf.nn.backends.cpu import has_int8
from flodl_hf.nn.buckets import Buffer, bucket_of, fill
from flodl_hf.nn.kernels import self_test as trust
from flodl_hf.nn.layout import Packed

CELLS = [(f.model_type, h.name) for f in FAMILIES for h in HEADS if h.name == "base" or h.name in f.heads]
cells = pytest.mark.parametrize(("model_type", "head"), CELLS)
TEXTS = ["the cat sat on the mat", "", "ada lives in paris", "a dog", "good film. very good film! not bad", "on"]
Make = Callable[..., EncoderModel]


def values(model: EncoderModel, engine: Engine, texts: list[str]) -> list[torch.Tensor]:
    assert model.tokenizer is not None
    table = encode(model.tokenizer, texts, max_tokens=model.max_tokens).table
    if model.head == "base":
        found = engine.start(table, States()).placed()
        return found.rows(table)
    if model._per_text:
        return list(engine.start(table, Scores(True)).stacked())
    return engine.start(table, Scores(False)).placed().rows(table)


def engine_of(model: EncoderModel, *, bucketed: bool = False, **options: Any) -> Engine:
    run = RunOptions().changed(options)
    made = Engine.of(model, run)
    # Blocks prepared for a processor count on lengths, which a bucket has slots beside; plain ones do not.
    source = prepared_for(model, "exact") if bucketed else made.prepared
    return Engine(source, run, types=made.types, longest=made.longest, bucketed=bucketed)


@cells
def test_packed_bucketed_exact_and_alone_are_one(make: Make, model_type: str, head: str) -> None:
    model = make(model_type, head)
    exact = values(model, engine_of(model, precision="exact", batch_invariant=True), TEXTS)
    ways = [
        engine_of(model),
        engine_of(model, bucketed=True),
        engine_of(model, token_budget=12),
        engine_of(model, batch_invariant=True),
        engine_of(model, precision="fp32"),
    ]
    for way in ways:
        for mine, other in zip(values(model, way, TEXTS), exact, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("model_type", ["bert", "roberta", "distilbert", "albert"])
def test_a_recorded_pass_needs_no_lengths(make: Make, model_type: str) -> None:
    model = make(model_type, "token_classification")
    lengths = np.array([4, 1, 9, 2])
    ids = np.random.default_rng(0).integers(5, 40, lengths.sum())
    buffer = Buffer(bucket_of(lengths), types=False)
    buffer.write(ids, None, lengths)
    there, _, layout = buffer.on(buffer.packed.clone())
    assert layout.lengths == ()
    with torch.inference_mode():
        expected = model.graph(torch.from_numpy(ids), layout=Packed.of(lengths.tolist()))
        # On a processor the prepared blocks know lengths; the plain ones stand for a device's.
        found = model.graph(there, layout=layout)
    torch.testing.assert_close(found[: len(ids)], expected, rtol=0, atol=1e-5)


@given(st.lists(st.integers(1, 70), min_size=1, max_size=40), st.integers(2, 8))
@settings(max_examples=60, deadline=None)
def test_a_bucket_holds_its_texts_and_their_filling(lengths: list[int], steps: int) -> None:
    bucket = bucket_of(lengths, steps=1 << (steps.bit_length() - 1))
    whole = fill(np.array(lengths), bucket)
    assert whole.sum() == bucket.tokens >= sum(lengths)
    assert len(whole) <= bucket.texts
    assert whole.max() <= bucket.longest
    assert bucket.tokens <= max(32, 2 * sum(lengths))
    buffer = Buffer(bucket)
    buffer.write(np.arange(sum(lengths)), None, np.array(lengths))
    ids, types, layout = buffer.on(buffer.packed)
    assert ids[: sum(lengths)].tolist() == list(range(sum(lengths)))
    assert types is not None
    assert not types.any()
    assert layout.places is not None
    assert layout.ends is not None
    assert layout.opens is not None
    plain = Packed.of(lengths)
    assert torch.equal(layout.places[: sum(lengths)].long(), plain.positions(ids[: sum(lengths)]))
    assert torch.equal(layout.offsets[: len(lengths) + 1], plain.offsets)
    assert layout.ends[: sum(lengths)].tolist() == [
        e for e, n in zip(plain.offsets[1:].tolist(), lengths, strict=True) for _ in range(n)
    ]
    assert int(layout.opens.max()) < bucket.tokens


@given(st.lists(st.integers(1, 60), min_size=0, max_size=80), st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_a_plan_names_every_row_once_within_its_budget(lengths: list[int], budget: int) -> None:
    for options in ({}, {"equal": True}, {"alone": True}):
        plan = plan_batches(lengths, budget, **options)
        assert sorted(int(i) for batch in plan for i in batch) == list(range(len(lengths)))
        for batch in plan:
            sizes = [lengths[i] for i in batch]
            assert sum(sizes) <= budget or len(sizes) == 1
            assert "equal" not in options or len(set(sizes)) == 1
            assert "alone" not in options or len(sizes) == 1


def test_attention_by_rows_of_the_bucket_is_attention_within_texts() -> None:
    lengths = (5, 1, 8, 2)
    buffer = Buffer(bucket_of(lengths))
    known = buffer.write(np.zeros(16, np.int64), None, np.array(lengths))
    _, _, layout = buffer.on(buffer.packed, known, 4)
    q, k, v = torch.randn(3, buffer.bucket.tokens, 8).unbind(0)
    expected = attend(q, k, v, layout, num_heads=2)
    recorded = replace(layout, lengths=(), longest=layout.max_length, real=None)
    torch.testing.assert_close(attend(q, k, v, recorded, num_heads=2), expected)


# --- the prepared graph --------------------------------------------------------------------------


def test_a_shadow_shares_every_tensor_and_leaves_the_model_alone(make: Make) -> None:
    model = make("bert", "sequence_classification").train()
    names = list(model.state_dict())
    copied = shadow(model.graph)
    assert {id(p) for p in copied.parameters()} == {id(p) for p in model.graph.parameters()}
    model.predict(TEXTS)  # type: ignore[attr-defined]
    assert list(model.state_dict()) == names
    assert model.training
    assert all(module.training for module in model.modules())
    made = vars(model)[_PLACE]
    assert pickle.loads(pickle.dumps(made)).graphs == copy.deepcopy(made).graphs == {}


def changes() -> dict[str, Callable[[EncoderModel], None]]:
    def step(model: EncoderModel) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        model.train()
        sum(p.square().sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
        optimizer.step()
        model.eval()

    def load(model: EncoderModel) -> None:
        model.load_state_dict({name: torch.randn_like(t) * 0.3 for name, t in model.state_dict().items()})

    def replace(model: EncoderModel) -> None:
        linear = model.graph.get_submodule("encoder.layers.0.attention.query")
        linear.weight = torch.nn.Parameter(torch.randn_like(linear.weight))  # type: ignore[assignment, arg-type]

    def swap(model: EncoderModel) -> None:
        block: Any = model.graph.get_submodule("encoder.layers.1.feed_forward")
        block.up = torch.nn.Linear(block.up.in_features, block.up.out_features)

    def data(model: EncoderModel) -> None:
        weight = model.graph.get_parameter("encoder.layers.0.attention.value.weight")
        weight.data = torch.randn_like(weight)

    def behind(model: EncoderModel) -> None:
        for parameter in model.parameters():
            parameter.data.mul_(1.5)

    def by_numpy(model: EncoderModel) -> None:
        weight = model.graph.get_parameter("encoder.layers.0.attention.value.weight")
        weight.detach().numpy()[:] = 0.5

    return {
        "an optimiser's step": step,
        "load_state_dict": load,
        "a new parameter": replace,
        "a module": swap,
        ".data": data,
        "writes to .data": behind,
        "writes by NumPy": by_numpy,
    }


@pytest.mark.parametrize("change", list(changes()))
def test_a_changed_model_answers_with_its_new_weights(make: Make, change: str) -> None:
    model = make("bert", "token_classification")
    before = values(model, engine_of(model), TEXTS)
    assert prepared(model) is prepared(model)
    changes()[change](model)
    found = values(model, engine_of(model), TEXTS)
    expected = values(model, engine_of(model, precision="exact"), TEXTS)
    for mine, other, old in zip(found, expected, before, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(mine, old)


def test_moving_and_casting_remake_the_graph(make: Make) -> None:
    model = make("bert", "token_classification")
    first = prepared(model)
    assert prepared(model.to("cpu")) is first
    model.double()
    assert prepared(model) is not first
    forget(model)
    values(model, engine_of(model), TEXTS)


@pytest.mark.skipif(not has_int8(), reason="the processor multiplies no integers")
@pytest.mark.parametrize("change", list(changes()))
def test_weights_in_eight_bits_follow_the_model(make: Make, change: str) -> None:
    model = make("bert", "token_classification")
    before = values(model, engine_of(model, precision="int8"), TEXTS)
    changes()[change](model)
    found = values(model, engine_of(model, precision="int8"), TEXTS)
    forget(model)
    expected = values(model, engine_of(model, precision="int8"), TEXTS)
    for mine, other, old in zip(found, expected, before, strict=True):
        assert torch.equal(mine, other)
        assert not torch.allclose(mine, old)


def test_writes_that_torch_does_not_see_have_to_be_told(make: Make) -> None:
    model = make("bert", "token_classification")
    first = prepared(model)
    torch.autograd.graph.increment_version(list(model.parameters()))
    assert prepared(model) is not first


def test_eight_threads_get_their_own_answers(make: Make) -> None:
    model = make("bert", "sequence_classification")
    expected = [model.predict(text) for text in TEXTS]  # type: ignore[attr-defined]
    forget(model)
    gate = threading.Barrier(8)

    def work(_: int) -> list[Any]:
        gate.wait(timeout=20)
        return [model.predict(text) for text in TEXTS]  # type: ignore[attr-defined]

    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(work, range(8)):
            for mine, other in zip(found, expected, strict=True):
                assert [r.label for r in mine] == [r.label for r in other]
                assert all(abs(a.score - b.score) < 1e-6 for a, b in zip(mine, other, strict=True))


# --- options ----------------------------------------------------------------------------------------


def ask(model: EncoderModel, **run: Any) -> list[Any]:
    """Return answers of any head."""
    anyone: Any = model
    if model.head == "question_answering":
        return anyone.answer_batch([("who lives in paris?", text) for text in TEXTS if text], **run)
    if model.head == "masked_lm":
        return anyone.fill_mask([f"{text} [MASK]" for text in TEXTS], **run)
    if model.head == "base":
        return anyone.embed(TEXTS, **run).tolist()
    if model.head == "multiple_choice":
        return anyone.predict([(text, ["a cat sat", "a dog"]) for text in TEXTS if text], **run)
    if model.head in ("next_sentence", "pretraining"):
        return anyone.predict([("a cat sat", text) for text in TEXTS if text], **run)
    return anyone.predict(TEXTS, **run)


def scores_in(found: Any) -> list[float]:
    if isinstance(found, Sequence):
        return [score for part in found for score in scores_in(part)]
    return [found] if isinstance(found, float) else [found.score]


@pytest.mark.parametrize("head", [h.name for h in HEADS if h.name != "replaced_tokens"])
def test_every_task_takes_the_keywords_and_the_models_own(make: Make, head: str) -> None:
    model = make("bert", head)
    expected = scores_in(ask(model))
    for run in (
        {"precision": "fp32"},
        {"precision": "exact"},
        {"batch_invariant": True},
        {"devices": ["cpu", "cpu"]},
        {"token_budget": 10, "window": 2},
    ):
        assert scores_in(ask(model, **run)) == pytest.approx(expected, abs=1e-5)
    assert model.runtime(batch_invariant=True, window=3) is model
    assert model.run_options.batch_invariant
    assert scores_in(ask(model)) == pytest.approx(expected, abs=1e-5)
    with pytest.raises(TypeError, match="precison"):
        ask(model, precison="fp32")


@pytest.mark.parametrize(
    "run", [{"precision": "fp8"}, {"precision": "tf32"}, {"precision": "fp16"}, {"devices": []}, {"devices": "cpu"}, {"token_budget": 0}, {"window": -1}], ids=str
)  # fmt: skip
def test_what_the_device_lacks_or_makes_no_sense_is_refused(make: Make, run: dict[str, Any]) -> None:
    with pytest.raises(PredictError):
        make("bert", "sequence_classification").predict(TEXTS, **run)  # type: ignore[attr-defined]


def test_rerank_and_zero_shot_take_the_keywords(make: Make) -> None:
    ranker: Any = make("bert", "sequence_classification", id2label={"0": "fits"})
    documents = TEXTS * 3
    alone = ranker.rerank("a cat", documents, batch_invariant=True)
    assert [r.score for r in ranker.rerank("a cat", documents)] == pytest.approx([r.score for r in alone], abs=1e-6)
    judge: Any = make("bert", "sequence_classification", id2label={"0": "contradiction", "1": "entailment"})
    assert len(judge.zero_shot(TEXTS[:2], ["a", "b"], devices=["cpu", "cpu"])) == 2
    assert ranker.rerank("a cat", []) == []


@pytest.mark.parametrize("head", ["sequence_classification", "token_classification", "base"])
def test_batch_invariant_answers_are_equal_to_the_bit(make: Make, head: str) -> None:
    model = make("bert", head)
    measured = spread(model, TEXTS * 4, batch_invariant=True)
    assert measured.largest == 0.0
    assert measured.texts == 24
    assert spread(model, TEXTS * 4).largest < 1e-5
    alone = [ask_one(model, text) for text in TEXTS]
    together: Any = model
    found = (
        together.embed(TEXTS, batch_invariant=True) if head == "base" else together.predict(TEXTS, batch_invariant=True)
    )
    for mine, other in zip(found, alone, strict=True):
        assert torch.equal(mine, other) if head == "base" else mine == other


@pytest.mark.parametrize("head", ["sequence_classification", "token_classification", "base"])
def test_a_models_first_answer_has_the_bits_of_its_later_ones(
    make: Make, head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flodl_hf.inference import cpu
    from flodl_hf.nn.backends.cpu import has_onednn

    if not has_onednn(torch.float32):
        pytest.skip("this build of torch has no reordered products")
    monkeypatch.setattr(cpu, "_reorders", lambda: True)  # as processors with AVX-512 do; the second use keeps a copy
    for text in TEXTS[:3]:
        model = make("bert", head)
        first, *later = [ask_one(model, text) for _ in range(3)]
        for again in later:
            assert torch.equal(first, again) if head == "base" else first == again


def ask_one(model: Any, text: str) -> Any:
    return (
        model.embed(text, batch_invariant=True) if model.head == "base" else model.predict(text, batch_invariant=True)
    )


# --- streams ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["sequence_classification", "token_classification", "masked_lm"])
def test_windows_of_a_stream_give_the_answers_of_a_list(make: Make, monkeypatch: pytest.MonkeyPatch, head: str) -> None:
    model: Any = make("bert", head)
    texts = [f"{text} [MASK]" for text in TEXTS * 5]
    call = model.fill_mask if head == "masked_lm" else model.predict
    expected = scores_in(call(texts))
    monkeypatch.setattr("flodl_hf.inference.pipeline.works_by_itself", lambda device: True)
    model.runtime(window=3)
    assert scores_in(list(call(iter(texts)))) == pytest.approx(expected, abs=1e-6)
    assert call(iter([])) is not None
    assert call([]) == []


# --- memory -----------------------------------------------------------------------------------------


def test_memory_that_runs_out_halves_the_budget_and_goes_on(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = make("bert", "token_classification")
    texts = TEXTS * 10
    expected = scores_in(model.predict(texts, ignore_labels=()))
    plain = passes_module.scored

    def scored(graph: Any, ids: torch.Tensor, types: Any, layout: Any, **given: Any) -> torch.Tensor:
        if len(ids) > 50:
            raise torch.OutOfMemoryError("out of memory (made in a test)")
        return plain(graph, ids, types, layout, **given)

    monkeypatch.setattr(passes_module, "scored", scored)
    assert scores_in(model.predict(texts, ignore_labels=())) == pytest.approx(expected, abs=1e-6)
    assert Session(model, {}).runner().budget <= 50  # type: ignore[union-attr]
    monkeypatch.setattr(
        passes_module, "scored", lambda *a, **b: (_ for _ in ()).throw(torch.OutOfMemoryError("never fits"))
    )
    with pytest.raises(torch.OutOfMemoryError):
        model.predict(texts)


def test_a_fault_on_one_of_several_devices_is_raised(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = make("bert", "token_classification")

    def scored(*_: Any, **given: Any) -> torch.Tensor:
        raise RuntimeError("broken device")

    monkeypatch.setattr(passes_module, "scored", scored)
    with pytest.raises(RuntimeError, match="broken device"):
        model.predict(TEXTS, devices=["cpu", "cpu"])


@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "mean_sqrt_len", "weighted_mean", "last_token", "pooler"])
def test_pooling_of_a_bucket_is_pooling_of_each_text(make: Make, pooling: str) -> None:
    model: Any = make("bert", "base")
    assert model.tokenizer is not None
    table = encode(model.tokenizer, TEXTS, max_tokens=None).table
    found = engine_of(model, bucketed=True).start(table, Pooled((pooling,))).stacked()
    expected = engine_of(model, precision="exact", batch_invariant=True).start(table, Pooled((pooling,))).stacked()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("fault", [None, "differs", "raises"])
def test_a_device_on_which_buckets_differ_goes_on_without(
    make: Make, monkeypatch: pytest.MonkeyPatch, fault: str | None
) -> None:
    def case(*_: Any) -> tuple[float, str]:
        if fault == "raises":
            raise RuntimeError("no kernel image is available")
        return (0.5 if fault else 1e-4), "attention in buckets"

    trust.forget()
    monkeypatch.setattr(trust, "find_spec", lambda _: object())
    monkeypatch.setattr(self_tests, "buckets", case)
    graph = prepared(make("bert", "sequence_classification"))
    if fault is None:
        assert _trusts_buckets(graph)
    else:
        with pytest.warns(UserWarning, match="limit|no kernel image"):
            assert not _trusts_buckets(graph)
        assert not _trusts_buckets(graph)  # and says so once
    trust.forget()


class Played:
    """A recorded pass on a device that records none; like one, it overwrites its result and knows no lengths."""

    def __init__(self, step: Callable[[torch.Tensor], torch.Tensor], input: torch.Tensor) -> None:
        self.step, self.input, self.output = step, input, step(input).clone()

    def replay(self) -> None:
        self.output.copy_(self.step(self.input))


class Tape(Recorder):
    def records_on(self, device: torch.device) -> bool:
        return True

    def stream_of(self, device: torch.device) -> str:
        return "main"

    def capture(self, step: Callable[[torch.Tensor], torch.Tensor], input: torch.Tensor) -> Played:
        return Played(step, input)


@pytest.mark.parametrize("head", ["sequence_classification", "token_classification"])
def test_large_batches_are_recorded_and_give_what_they_gave(
    make: Make, monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    model = make("bert", head)
    assert model.tokenizer is not None
    monkeypatch.setattr("flodl_hf.inference.engine.SMALL", 30)
    # A copy home is a copy, unlike on a processor, where results are handed on as they are.
    monkeypatch.setattr(Engine, "_back", lambda self, found, count: (found[:count].clone(), None))
    work = Scores(model._per_text)

    def ask(engine: Engine, table: Any) -> torch.Tensor:
        found = engine.start(table, work)
        return found.stacked() if model._per_text else torch.cat(found.placed().rows(table))

    engine = engine_of(model, bucketed=True, token_budget=64)
    engine.recorder = Tape()
    plain = engine_of(model, precision="exact", batch_invariant=True)
    for turn in range(5):
        texts = [TEXTS[(i + turn) % len(TEXTS)] for i in range(40)]
        table = encode(model.tokenizer, texts, max_tokens=None).table
        torch.testing.assert_close(ask(engine, table), ask(plain, table), rtol=0, atol=1e-5)
    assert len(engine.recorder) > 0
    known = len(engine.recorder)
    few = encode(model.tokenizer, TEXTS[:1], max_tokens=None).table
    for _ in range(3):
        ask(engine, few)  # somebody who waits for one small answer is served by a recording as well
    assert len(engine.recorder) == known + 1


@pytest.mark.parametrize("texts", ["a good cat", ["a good cat", "a bad dog"]], ids=["one", "several"])
def test_a_change_is_seen_although_the_device_starts_before_anybody_looked(
    make: Make, monkeypatch: pytest.MonkeyPatch, texts: Any
) -> None:
    model: Any = make("bert", "sequence_classification")
    started: list[Any] = []
    plain = Engine.start
    monkeypatch.setattr(Engine, "start", lambda self, *a: (started.append(self.prepared), plain(self, *a))[1])

    def ask(starts: int) -> Any:
        started.clear()
        found = model.predict(texts)
        assert len(started) == starts
        return found

    first = ask(1)
    monkeypatch.setattr("flodl_hf.inference.pipeline.works_by_itself", lambda device: True)
    assert ask(1) == first
    bias = model.graph.get_parameter("head.classifier.bias")
    with torch.no_grad():
        bias[0] += 3
    second = ask(2)  # for nothing, and again
    assert started[0] is not started[1]
    assert second != first
    assert ask(1) == second
    with torch.no_grad():
        bias.data = bias.detach() + torch.tensor([0.0, 5.0])
    # Memory that the graph reads is gone: nothing may run before that is known.
    third = ask(1)
    assert third != second
    monkeypatch.setattr("flodl_hf.inference.pipeline.works_by_itself", lambda device: False)
    forget(model)
    assert ask(1) == third


def test_a_fault_of_a_stale_graph_is_not_told_and_any_other_is(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = make("bert", "sequence_classification")
    monkeypatch.setattr("flodl_hf.inference.pipeline.works_by_itself", lambda device: True)
    first = model.predict("a good cat")
    stale = vars(model)[_PLACE].graphs[(None, None, False)]
    plain = Engine.start

    def start(self: Engine, *args: Any) -> Any:
        if self.prepared is stale:
            raise RuntimeError("shapes do not fit")
        return plain(self, *args)

    monkeypatch.setattr(Engine, "start", start)
    with pytest.raises(RuntimeError, match="do not fit"):
        model.predict("a good cat")
    with torch.no_grad():
        model.graph.get_parameter("head.classifier.bias")[0] += 3
    assert model.predict("a good cat") != first


def test_switches_of_cuda_are_read_only_where_a_precision_needs_them() -> None:
    # torch refuses to read its old switch once a program has set the new one.
    program = """
import contextlib, torch
from flodl_hf.inference.engine import current
torch.backends.cuda.matmul.fp32_precision = "tf32"
torch.cuda.device = lambda device: contextlib.nullcontext()
for precision in (None, "bf16", "fp16"):
    with current(torch.device("cuda"), precision):
        print(precision)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["None", "bf16", "fp16"]
