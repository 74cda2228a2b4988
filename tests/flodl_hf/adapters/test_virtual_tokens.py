"""Prompts and prefixes: what they compute, their folders with the head, in training and prediction; beside peft."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from adapted_models import moved  # pyright: ignore[reportMissingImports]
from safetensors.torch import load_file, save_file

from flodl.errors import CheckpointError, ConfigError
from flodl_hf import AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification, load
from flodl_hf.errors import PredictError
from flodl_hf.jobs.identity import _adapter_settings
from flodl_hf.models.adapters import Lora, Prefix, Prompt
from flodl_hf.nn.layout import Packed, Padded
from flodl_hf.parity.cell import Bench, Cell, all_cells
from flodl_hf.training import demo, finetune

IDS = torch.tensor([[2, 5, 6, 7, 3], [2, 8, 9, 10, 3]])
TEXTS = ["a good film", "bad", "the soup was cold and the waiter rude", "a good film that was bad"]
KINDS: dict[str, Any] = {"prompt": Prompt(3), "prefix": Prefix(3)}
FALLS_BACK = "ignore:prediction. .* run on torch's own operations"


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def led(base: Path, kind: str) -> Any:
    torch.manual_seed(0)
    model: Any = AutoModelForSequenceClassification.from_pretrained(base)
    return moved(model.add_adapter(KINDS[kind]))


def test_they_and_the_head_alone_learn_and_the_base_stays(base: Path, led: Any, kind: str) -> None:
    plain: Any = AutoModelForSequenceClassification.from_pretrained(base)
    learning = {name for name, p in led.named_parameters() if p.requires_grad and ".head." not in name}
    assert learning
    assert all(f".{kind}." in name for name in learning)
    assert not torch.allclose(logits(led), logits(plain), atol=1e-3)
    assert led.max_tokens == plain.max_tokens - 3
    for name, value in led.set_adapter(None).state_dict().items():
        assert torch.equal(value, plain.state_dict()[name])
    assert torch.equal(logits(led), logits(plain))
    assert led.max_tokens == plain.max_tokens


def test_they_are_printed_and_add_no_settings_to_the_identity_of_a_job(led: Any, kind: str) -> None:
    assert "tokens=3" in repr(led.graph)
    found = {name.rpartition(".")[2] for name in _adapter_settings(led.graph)}
    assert found.isdisjoint({"count", "implementation", "num_heads"}) if kind == "prompt" else not found


def test_a_prompt_is_embeddings_before_those_of_the_words(base: Path) -> None:
    model: Any = AutoModelForSequenceClassification.from_pretrained(base)
    words = model.graph.get_submodule("encoder.embeddings.word")
    made = moved(copy.deepcopy(model).add_adapter(Prompt(3)))
    vectors = made.graph.get_parameter("encoder.embeddings.word.prompt.vectors")
    whole = torch.cat([vectors.expand(2, -1, -1), words(IDS)], 1)
    head = {n: p for n, p in made.graph.named_parameters() if n.startswith("head.")}
    with torch.no_grad():
        for name, value in head.items():
            model.graph.get_parameter(name).copy_(value)
        assert torch.equal(model.eval()(inputs_embeds=whole).logits, logits(made))
        assert torch.equal(made(inputs_embeds=words(IDS)).logits, logits(made))
    with pytest.raises(PredictError, match="counts places itself"):
        made(IDS, position_ids=torch.arange(5)[None])


def test_a_text_begins_a_prompt_and_a_network_may_make_it(base: Path, tmp_path: Path) -> None:
    model: Any = AutoModelForSequenceClassification.from_pretrained(base)
    ids = model.tokenizer.encode_rows(["good or bad"], max_tokens=None)[0][0].ids
    words = model.graph.get_submodule("encoder.embeddings.word").weight
    count = len(ids) + 2
    model.add_adapter(Prompt(count, text="good or bad"))
    assert torch.equal(model.graph.get_submodule("encoder.embeddings.word").prompt.vectors, words[[*ids, *ids[:2]]])
    model.add_adapter(Prompt(4, encoder=8), "made")
    moved(model, "made").save_adapter(tmp_path / "made")
    found: Any = load(tmp_path / "made")
    assert torch.equal(logits(found), logits(model))
    assert found.adapters["default"] == Prompt(4, encoder=8)
    assert json.loads((tmp_path / "made" / "adapter_config.json").read_text())["peft_type"] == "P_TUNING"
    model.tokenizer = None
    with pytest.raises(ConfigError, match="no tokenizer to read the text"):
        model.add_adapter(Prompt(4, text="good"), "another")


@pytest.mark.filterwarnings(FALLS_BACK)
def test_rows_end_to_end_give_what_padded_ones_give(base: Path, led: Any) -> None:
    exact = led.predict(TEXTS, precision="exact")
    alone = [led.predict([text], precision="exact")[0] for text in TEXTS]
    assert exact == alone
    for found, right in zip(led.predict(TEXTS), exact, strict=True):
        assert {a.label: a.score for a in found} == pytest.approx({a.label: a.score for a in right}, abs=1e-5)
    rows = [led.tokenizer.encode_rows([text], max_tokens=None)[0][0].ids for text in TEXTS]
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
    with torch.no_grad():
        scores = led.eval()(ids, mask).logits
    right = [{a.label: a.score for a in answer} for answer in exact]
    for answer, row in zip(right, scores.softmax(-1).tolist(), strict=True):
        assert sorted(answer.values()) == pytest.approx(sorted(row), abs=1e-5)


@pytest.mark.filterwarnings(FALLS_BACK)
def test_results_of_tokens_are_the_texts_own(base: Path, kind: str) -> None:
    torch.manual_seed(0)
    AutoModel.from_pretrained(base).save_pretrained(base.parent / f"plain-{kind}", overwrite=True)
    model: Any = AutoModelForTokenClassification.from_pretrained(base.parent / f"plain-{kind}", labels=["O", "B-A"])
    moved(model.add_adapter(KINDS[kind]))
    with torch.no_grad():
        assert model.eval()(IDS).logits.shape == (2, 5, 2)
        loss = model(IDS, labels=torch.ones_like(IDS)).loss
    assert torch.isfinite(loss)
    exact = model.predict(TEXTS, precision="exact", untrained=True)
    for found, right in zip(model.predict(TEXTS, untrained=True), exact, strict=True):
        assert [(e.start, e.end, e.label) for e in found] == [(e.start, e.end, e.label) for e in right]
    vectors: Any = AutoModel.from_pretrained(base.parent / f"plain-{kind}")
    moved(vectors.add_adapter(KINDS[kind]))
    with torch.no_grad():
        states = vectors.eval()(IDS).last_hidden_state
    assert states.shape[:2] == (2, 5)
    assert torch.allclose(vectors.embed(TEXTS), vectors.embed(TEXTS, precision="exact"), atol=1e-5)
    row = torch.tensor([vectors.tokenizer.encode_rows([TEXTS[0]], max_tokens=None)[0][0].ids])
    with torch.no_grad():
        mean = vectors(row).last_hidden_state.mean(1)
    found = vectors.embed(TEXTS[:1], pooling="mean", normalize=False)
    assert torch.allclose(found, mean, atol=1e-5)
    first = vectors.embed(TEXTS[:1], pooling="pooler", normalize=False)
    with torch.no_grad():
        assert torch.allclose(first, vectors(row).pooler_output, atol=1e-5)


@pytest.mark.filterwarnings(FALLS_BACK)
def test_vectors_are_those_that_were_trained(base: Path, kind: str, tmp_path: Path) -> None:
    from flodl_hf.training.vectors.step import VectorObjective

    seen: list[torch.Tensor] = []
    score = VectorObjective._vectors

    def watched(self: Any, model: Any, part: Any) -> torch.Tensor:
        found = score(self, model.eval(), part)
        seen.append(found.detach())
        return found

    texts = [text for text, _ in demo.sentences()]
    rows = [{"anchor": a, "positive": b} for a, b in zip(texts[:4], texts[4:8], strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VectorObjective, "_vectors", watched)
        model: Any = finetune(
            base, train=rows, out=tmp_path / "out", task="embedding", adapter=KINDS[kind], batch_size=4, max_steps=1,
            lr=1e-9, pooling="mean", layout="packed",
        ).model  # fmt: skip
    again: Any = load(tmp_path / "out")
    found = again.embed([text for row in rows for text in row.values()])
    trained = torch.cat([each.view(-1, each.shape[-1]) for each in seen])
    assert torch.allclose((trained @ found.T).amax(1), torch.ones(len(trained)), atol=1e-4)
    assert model.active_adapter is not None


def test_a_written_structure_of_a_packed_layout_is_the_same() -> None:
    spec = pytree.tree_structure(Packed.of([3, 1]))
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


def test_layouts_agree_on_what_stands_before() -> None:
    lead, lengths = torch.tensor([70, 71]), [3, 1, 4]
    rows = [torch.arange(10 * n, 10 * n + length) for n, length in enumerate(lengths)]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
    mask = Padded(padded >= 0)
    packed, flat = Packed.of(lengths), torch.cat(rows)
    bucket = Packed(
        torch.tensor([0, 3, 4, 8, 8], dtype=torch.int32), (), 4, packed.positions(flat), torch.tensor([0, 3, 4, 7]), 3
    )
    wide = mask.before(lead, padded)
    assert torch.equal(mask.behind(2, wide), padded)
    found = mask.led(2)
    assert found.mask is not None
    for layout in (packed, bucket):
        long, there = layout.before(lead, flat), layout.led(2)
        assert torch.equal(layout.behind(2, long), flat)
        real = int(there.offsets[3])
        assert torch.equal(long[:real], wide[found.mask])
        assert there.num_texts == layout.num_texts
        assert there.num_tokens == len(long)
        assert torch.equal(there.positions(long)[:real], torch.cat([torch.arange(n + 2) for n in lengths]))
        assert there.max_length == 6
        assert torch.equal(
            long[there.segment_ends().long() - 1][:real], torch.cat([row[-1:].repeat(len(row) + 2) for row in rows])
        )


def test_a_folder_keeps_the_head_and_is_refused_without(base: Path, led: Any, kind: str, tmp_path: Path) -> None:
    led.save_pretrained(tmp_path / "led")
    again: Any = load(tmp_path / "led")
    assert torch.equal(logits(again), logits(led))
    assert again.adapters == {"default": KINDS[kind]}
    AutoModel.from_pretrained(base).save_pretrained(tmp_path / "headless")
    file, settings = tmp_path / "led" / "adapter_model.safetensors", tmp_path / "led" / "adapter_config.json"
    tensors, values = load_file(file), json.loads(settings.read_text())
    save_file({n: t for n, t in tensors.items() if "classifier" not in n}, file)
    with pytest.raises(CheckpointError, match=r"no head: head\.classifier"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "headless", adapter=tmp_path / "led")
    wrong = {
        "shape": tensors | {"prompt_embeddings": tensors["prompt_embeddings"][:2].contiguous()},
        "missing": {n: t for n, t in tensors.items() if n != "prompt_embeddings"},
        "not finite": tensors | {"prompt_embeddings": tensors["prompt_embeddings"] / 0},
        "no such tensor": tensors | {"base_model.more": torch.ones(2)},
        "no tensor of an adapter": tensors | {"more": torch.ones(2)},
    }
    for said, held in wrong.items():
        save_file(held, file)
        with pytest.raises(CheckpointError, match=said):
            load(tmp_path / "led")
    save_file(tensors, file)
    for name, value in {"num_virtual_tokens": "3", "num_transformer_submodules": 2, "unheard_of": 3}.items():
        settings.write_text(json.dumps(values | {name: value}))
        with pytest.raises(ConfigError, match=name):
            load(tmp_path / "led")
    settings.write_text(json.dumps(values | {"num_virtual_tokens": 0}))
    with pytest.raises(ConfigError, match="0"):
        load(tmp_path / "led")


def test_what_cannot_be_is_refused_with_the_reason(base: Path, led: Any, kind: str) -> None:
    with pytest.raises(ConfigError, match="cannot be merged into weights"):
        led.merge_adapter()
    moved(led.add_adapter(Lora(rank=2), "sums"), "sums")
    with pytest.raises(PredictError, match="before texts"):
        led.predict_mixed(TEXTS[:2], ["default", "sums"])
    with pytest.raises(ConfigError, match="expected at most"):
        led.add_adapter(type(KINDS[kind])(4000), "long")
    assert led.active_adapter == "sums"
    counts: Any = ({"tokens": 0}, {"tokens": True}, {"tokens": "3"})
    for wrong in counts:
        with pytest.raises(ConfigError, match="tokens"):
            type(KINDS[kind])(**wrong)
    further: Any = ({"text": ""}, {"encoder": 0})
    for more in further:
        with pytest.raises(ConfigError, match="Prompt: found"):
            Prompt(**more)
    together: Any = (
        ({"adapter": Prompt(2), "lora": 2}, "expected only one adapter"),
        ({"adapter": Prompt(2), "neftune": 5}, "no noise"),
    )
    for given, said in together:
        with pytest.raises(ConfigError, match=said):
            finetune(base, train=[{"text": "a", "label": "b"}], out="nowhere", **given)


def test_merge_refuses_them_and_writes_nothing(base: Path, led: Any, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from flodl_hf.cli.app import app

    folder = led.save_pretrained(tmp_path / "led")
    ran = CliRunner().invoke(app, ["merge", str(base), str(folder), "--out", str(tmp_path / "full")])
    assert ran.exit_code != 0
    assert "cannot be merged into weights" in " ".join(ran.output.split())
    assert not (tmp_path / "full").exists()


@pytest.mark.transformers
def test_a_family_whose_reference_takes_no_prefix_says_so() -> None:
    with Bench(Cell("distilbert", "base")) as bench, pytest.raises(ConfigError, match="transformers' DistilBert"):
        bench.load().add_adapter(Prefix(3))


@pytest.mark.filterwarnings(FALLS_BACK)
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_fine_tuning_trains_them_and_the_head_alone(base: Path, kind: str, layout: str, tmp_path: Path) -> None:
    rows = [{"text": text, "label": demo.LABELS[label]} for text, label in demo.sentences()[:24]]
    result = finetune(
        base, train=rows, out=tmp_path / "out", adapter=KINDS[kind], epochs=1, batch_size=8, lr=1e-2, layout=layout
    )
    found: Any = load(tmp_path / "out")
    assert found.adapters["default"] == KINDS[kind]
    assert torch.equal(logits(found), logits(result.model.to("cpu")))
    start = load(base).state_dict()
    fixed = result.model._fixed_names()
    assert fixed
    assert all(torch.equal(result.model.state_dict()[name], start[name]) for name in fixed if name in start)
    learned = load_file(tmp_path / "out" / "adapter_model.safetensors")["prompt_embeddings"]
    assert len(learned) == 3
    assert "peft_type" in (tmp_path / "out" / "adapter_config.json").read_text()


def test_gradients_are_those_of_padded_rows(base: Path, led: Any) -> None:
    from flodl_hf.training.step import score

    rows = [led.tokenizer.encode_rows([text], max_tokens=None)[0][0].ids for text in TEXTS]
    lengths = [len(row) for row in rows]
    flat = torch.cat([torch.tensor(row) for row in rows])
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    mask = (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).long()
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    places = Packed.of(lengths).positions(flat)
    batches = [
        {"input_ids": ids, "attention_mask": mask},
        {"input_ids": flat, "cu_seqlens": offsets, "row_lengths": lengths},
        {"input_ids": flat, "cu_seqlens": offsets, "places": places, "opens": offsets[:-1].long(), "longest": 16},
    ]
    learning = [p for p in led.eval().parameters() if p.requires_grad]
    found = []
    for batch in batches:
        scores = score(led, batch)
        found.append([scores, *torch.autograd.grad(scores.square().sum(), learning)])
    for other in found[1:]:
        for mine, right in zip(other, found[0], strict=True):
            assert torch.allclose(mine, right, atol=1e-4 * max(1.0, float(right.detach().abs().max())))


# --- beside peft ------------------------------------------------------------------------------------------------------

HEADS = ("base", "sequence_classification", "token_classification", "question_answering")
LEFT_OUT = ("base", "question_answering")  # of which peft leaves token types out
QUICK = (("bert", "sequence_classification"), ("roberta", "token_classification"), ("esm", "base"))


def cells() -> list[Any]:
    found = []
    for cell in all_cells():
        if (
            cell.head not in HEADS
            or not cell.record.tiny
            or not (cell.head == "base" or cell.head in cell.record.heads)
        ):
            continue
        for name in KINDS:
            if name == "prompt" or cell.record.takes_prefix:
                quick = (cell.family, cell.head) in QUICK and cell.variant == "base"
                found.append(
                    pytest.param(cell, name, id=f"{cell.name}-{name}", marks=() if quick else pytest.mark.slow)
                )
    return found


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")  # of transformers, which peft calls by older names
@pytest.mark.parametrize(("cell", "name"), cells())
def test_peft_reads_them_and_what_it_writes_is_read(cell: Cell, name: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    with Bench(cell) as bench:
        try:
            theirs = bench.load_theirs().model
        except ValueError:
            pytest.skip("the reference has no such class")
        model: Any = bench.load()
        moved(model.add_adapter(KINDS[name])).save_pretrained(tmp_path / "ours")
        theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "ours").eval()
        theirs.save_pretrained(tmp_path / "theirs")
        again: Any = type(model).from_pretrained(bench.folder, adapter=tmp_path / "theirs")
        for batch in bench.batches():
            inputs = {n: v for n, v in batch.inputs.items() if n != "token_type_ids" or cell.head not in LEFT_OUT}
            with torch.no_grad():
                ours, back, right = model.eval()(**inputs), again.eval()(**inputs), theirs(**inputs)
            for output, value in right.items():
                found = ours[output]
                assert torch.equal(found, back[output]), (batch.name, output)
                value = value if value.shape == found.shape else value[:, 3:]
                if found.ndim > 1 and found.shape[:2] == inputs["input_ids"].shape:
                    real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
                    found, value = found[real], value[real]  # padding has other places there, and nothing reads it
                assert torch.equal(found, value), (batch.name, output)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.filterwarnings(FALLS_BACK)
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_predictions_on_a_gpu_are_those_of_a_processor(led: Any, precision: Any) -> None:
    texts = TEXTS * 20
    right = [{a.label: a.score for a in found} for found in led.predict(texts, precision="exact")]
    model = led.to("cuda")
    for _ in range(3):  # launched, recorded, replayed
        for found, wanted in zip(model.predict(texts, precision=precision), right, strict=True):
            near = 1e-4 if precision is None else 5e-2
            assert {a.label: a.score for a in found} == pytest.approx(wanted, abs=near)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.* run on torch's own operations")
def test_recorded_steps_train_them_as_launched_ones(base: Path, kind: str) -> None:
    rows = [{"text": text, "label": demo.LABELS[label]} for text, label in demo.sentences()[:96]]
    chosen: Any = {"epochs": 3, "batch_size": 16, "precision": "bf16", "dropout": 0.0, "lr": 1e-2}
    recorded = finetune(base, train=rows, devices=["cuda:0"], adapter=KINDS[kind], **chosen)
    launched = finetune(
        base, train=rows, devices=["cuda:0"], adapter=KINDS[kind], **chosen
    )  # compared with plain steps in the tests of fine-tuning
    assert recorded.losses[-1] < recorded.losses[0]
    assert recorded.losses == pytest.approx(launched.losses, rel=5e-2)
