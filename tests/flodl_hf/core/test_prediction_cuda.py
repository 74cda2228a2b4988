"""Prediction on a CUDA device: kernels and recorded passes give what the plain graph gives."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from flodl_hf.inference import RunOptions, spread
from flodl_hf.inference.batch import Batch, Scores
from flodl_hf.inference.engine import Engine
from flodl_hf.inference.inputs import encode
from flodl_hf.inference.prepared_graph import prepared
from flodl_hf.models.encoder_model import EncoderModel
from flodl_hf.nn.buckets import Buffer, bucket_of

pytestmark = pytest.mark.gpu
Make = Callable[..., EncoderModel]
FAMILIES = ("bert", "roberta", "distilbert", "albert", "xlm-roberta", "deberta-v2", "roformer", "ernie")
TEXTS = ["the cat sat on the mat", "a dog", "ada lives in paris", "", "good film. very good film! not bad"] * 5
# Widths that the kernels take.
SIZES = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96}
WIDE = {"bert": SIZES, "roformer": SIZES | {"rotary_value": True}, "ernie": SIZES | {"use_task_id": True}}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_answers_on_the_device_are_those_of_the_processor(make: Make, family: str, precision: str) -> None:
    model = make(family, "sequence_classification", **WIDE.get(family, {}))
    expected = {r.label: r.score for r in model.predict(TEXTS[0])}  # type: ignore[attr-defined]
    whole = model.predict(TEXTS)  # type: ignore[attr-defined]
    model.to("cuda")
    bound = {"fp32": 1e-4, "bf16": 0.2, "fp16": 0.03}[precision]
    for _ in range(4):
        found = model.predict(TEXTS, precision=precision)  # type: ignore[attr-defined]
        for mine, other in zip(found, whole, strict=True):
            scores = {r.label: r.score for r in other}
            assert all(abs(r.score - scores[r.label]) < bound for r in mine)
        alone = {r.label: r.score for r in model.predict(TEXTS[0], precision=precision)}  # type: ignore[attr-defined]
        assert all(abs(alone[label] - score) < bound for label, score in expected.items())


@pytest.mark.parametrize("lengths", [(9, 1, 5, 5, 12), (64,), (33, 40, 1, 1, 1, 90, 128), (3,) * 50])
def test_attention_over_token_blocks_is_attention_within_texts(lengths: tuple[int, ...]) -> None:
    from flodl_hf.nn.attention import attend
    from flodl_hf.nn.kernels.operations import mix, norm_of_sum

    torch.manual_seed(0)
    bucket = bucket_of(lengths)
    buffer = Buffer(bucket)
    buffer.write(np.zeros(sum(lengths), np.int64), None, np.array(lengths))
    _, _, layout = buffer.on(buffer.packed.cuda())
    for width in (32, 64, 128):
        qkv = torch.randn(bucket.tokens, 3 * 2 * width, device="cuda", dtype=torch.bfloat16)
        assert layout.places is not None
        assert layout.ends is not None
        found = mix(*qkv.chunk(3, -1), layout.places, layout.ends, heads=2)  # type: ignore[call-arg]
        q, k, v = qkv.float().chunk(3, -1)
        expected = attend(q, k, v, layout, num_heads=2)
        real = sum(lengths)
        torch.testing.assert_close(found[:real].float(), expected[:real], rtol=0.02, atol=0.02)
    a, b = (torch.randn(37, 768, device="cuda", dtype=torch.float16) for _ in range(2))
    weight, bias = (torch.randn(768, device="cuda", dtype=torch.float16) for _ in range(2))
    expected = torch.nn.functional.layer_norm((a + b).float(), (768,), weight.float(), bias.float(), 1e-12)
    found = norm_of_sum(a, b, weight, bias, eps=1e-12)[1]
    torch.testing.assert_close(found.float(), expected, rtol=0.01, atol=0.01)


def test_small_batches_are_recorded_and_replayed(make: Make) -> None:
    model = make("bert", "sequence_classification", **WIDE["bert"]).to("cuda")
    first = model.predict(TEXTS[0], precision="bf16")  # type: ignore[attr-defined]
    for _ in range(4):
        assert model.predict(TEXTS[0], precision="bf16") == first  # type: ignore[attr-defined]
    recorder = Engine.of(model, RunOptions(precision="bf16")).recorder
    assert recorder.refused is None
    assert len(recorder) == 1
    with torch.no_grad():
        model.graph.get_parameter("head.classifier.bias")[0] += 3
    assert model.predict(TEXTS[0], precision="bf16") != first  # type: ignore[attr-defined]


@pytest.mark.parametrize("head", ["sequence_classification", "token_classification"])
def test_large_batches_are_recorded_and_their_replays_give_the_same(make: Make, head: str) -> None:
    model = make("bert", head, **WIDE["bert"]).to("cuda")
    assert model.tokenizer is not None
    engine = Engine.of(model, RunOptions(precision="bf16"))
    first, second = (
        encode(model.tokenizer, [" ".join(["good film"] * (1 + (i * step) % 17)) for i in range(900)], max_tokens=40)
        for step in (5, 7)
    )
    work = Scores(model._per_text)

    def scores(found: object) -> torch.Tensor:
        started = engine.start(found.table, work)  # type: ignore[attr-defined]
        return started.stacked() if model._per_text else started.placed().values

    known = [scores(first), scores(second)]
    for _ in range(3):
        for table, before in zip((first, second), known, strict=True):
            torch.testing.assert_close(scores(table), before, rtol=0, atol=2e-2)
    assert engine.recorder.refused is None, engine.recorder.refused
    assert len(engine.recorder) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_passes_of_each_family_can_be_recorded(make: Make, family: str) -> None:
    model = make(family, "token_classification", **WIDE.get(family, {})).to("cuda")
    for _ in range(4):
        model.predict(TEXTS[0], precision="bf16")  # type: ignore[attr-defined]
    recorder = Engine.of(model, RunOptions(precision="bf16")).recorder
    assert recorder.refused is None, recorder.refused
    assert len(recorder) == 1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_batch_invariant_answers_are_equal_to_the_bit(make: Make, precision: str) -> None:
    model = make("bert", "sequence_classification", **WIDE["bert"]).to("cuda")
    assert spread(model, TEXTS, precision=precision, batch_invariant=True).largest == 0.0
    alone = [model.predict(text, precision=precision, batch_invariant=True) for text in TEXTS]  # type: ignore[attr-defined]
    assert model.predict(TEXTS, precision=precision, batch_invariant=True) == alone  # type: ignore[attr-defined]


def test_memory_that_runs_out_halves_the_budget(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("bert", "sequence_classification").to("cuda")
    expected = model.predict(TEXTS)  # type: ignore[attr-defined]
    whole = Engine._run

    def fails(self: Engine, batch: Batch, alone: bool) -> object:
        if len(batch.ids) > 40:
            raise torch.OutOfMemoryError("CUDA out of memory (made in a test)")
        return whole(self, batch, alone)

    monkeypatch.setattr(Engine, "_run", fails)
    found = model.predict(TEXTS)  # type: ignore[attr-defined]
    for mine, other in zip(found, expected, strict=True):
        assert [r.label for r in mine] == [r.label for r in other]
    assert prepared(model) is not None
    assert Engine.of(model).budget <= 40


def test_windows_overlap_and_keep_their_order(make: Make) -> None:
    model = make("bert", "token_classification", id2label={"0": "O", "1": "B-LOC"}).to("cuda")
    texts = [" ".join(["paris"] * (1 + i % 9)) for i in range(400)]
    expected = model.predict(texts, window=1000)  # type: ignore[attr-defined]
    found = list(model.predict(iter(texts), window=16))  # type: ignore[attr-defined]
    assert [[e.start for e in es] for es in found] == [[e.start for e in es] for es in expected]
