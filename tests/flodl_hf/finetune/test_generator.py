"""A generator and a discriminator learn together: the loss beside transformers' models in float64, draws, cuts, files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finetune_tables import lines
from torch import Tensor
from torch.nn import functional as F

from flodl.data import Batch, Where
from flodl.errors import ConfigError
from flodl_hf import load
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.export.verify import verify_export
from flodl_hf.heads.auto import head_named
from flodl_hf.models.adapters import IA3, Lora, Prefix, Prompt
from flodl_hf.training import batching, demo, dry_run, finetune
from flodl_hf.training.generator import drawn
from flodl_hf.training.job import plan_job
from flodl_hf.training.options import make_options
from flodl_hf.training.start import set_dropout

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64, "type_vocab_size": 2,
    "initializer_range": 0.2,
}  # fmt: skip
WIDTHS = {  # width of states, of the feed-forward part, of embeddings
    "discriminator": (32, 64, 16),
    "shared": (16, 32, 16),
    "apart": (16, 32, 8),
}
FIXED: dict[str, Any] = {
    "task": "replaced", "epochs": 9, "batch_size": 8, "lr": 2e-3, "max_length": 40, "report": False,
    "optimizer": "sgd", "dropout": 0.0, "schedule": "constant", "max_grad_norm": 0.0, "max_steps": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return folders of a discriminator and of two generators, untrained, with one tokenizer."""
    tokenizer, found = demo.learn_vocabulary(), {}
    for name, (hidden, inner, embedding) in WIDTHS.items():
        torch.manual_seed(len(name))
        config = ModelConfig.for_model(
            "electra", vocab_size=tokenizer.vocab_size, hidden_size=hidden, intermediate_size=inner,
            embedding_size=embedding, **SIZES,
        )  # fmt: skip
        kind: Any = head_named("replaced_tokens" if name == "discriminator" else "masked_lm").model
        model = kind.from_config(config)
        model.tokenizer = tokenizer
        found[name] = model.save_pretrained(tmp_path_factory.mktemp("starts") / name)
    return found


def glued(rows: Any) -> list[dict[str, str]]:
    """Return lines of long words, of which few are masked whole."""
    words = [row["text"].split() for row in rows]
    return [{"text": " ".join("".join(line[i : i + 3]) for i in range(0, len(line), 3))} for line in words]


def planned(starts: dict[str, Path], generator: str, layout: str = "padded", **more: Any) -> Any:
    before = batching._layout
    batching._layout = lambda options: layout  # type: ignore[assignment]
    try:
        options = make_options({**FIXED, "generator": str(starts[generator]), **more})
        texts = glued if options.whole_words else list
        job = plan_job(starts["discriminator"], texts(lines(24)), texts(lines(11)), options)
    finally:
        batching._layout = before
    set_dropout(job.model, 0.0)
    return job


def batch_of(job: Any, which: tuple[int, ...], number: int = 0) -> Batch:
    return Batch(job.collate(job.rows.__getitems__(which), Where(42, 0, number, which)), len(which))


def first(job: Any) -> tuple[int, ...]:
    return tuple(job.batches.plan(0)[0].tolist())


@pytest.mark.transformers
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("generator", ["shared", "apart"])
def test_a_step_is_that_of_transformers_models_in_double_precision(
    generator: str, mode: str, starts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    job = planned(starts, generator)
    job.model.train(mode == "train")
    batch = batch_of(job, first(job))
    chosen = torch.randint(5, job.model.config.encoder.vocab_size, batch["mask_labels"].shape)
    chosen[::3] = batch["mask_labels"][::3]  # the generator may find the right word
    monkeypatch.setattr("flodl_hf.training.generator.drawn", lambda scores, seeds, places: chosen)
    loss = job.objective(job.model, batch)
    loss.as_mean().backward()

    theirs = transformers.ElectraForPreTraining.from_pretrained(starts["discriminator"]).double().train(mode == "train")
    words = transformers.ElectraForMaskedLM.from_pretrained(starts[generator]).double().train(mode == "train")
    for module in [*theirs.modules(), *words.modules()]:
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if generator == "shared":
        for table in ("word_embeddings", "position_embeddings", "token_type_embeddings", "LayerNorm"):
            setattr(words.electra.embeddings, table, getattr(theirs.electra.embeddings, table))
        words.generator_lm_head.weight = theirs.electra.embeddings.word_embeddings.weight
    mask, labels = batch["attention_mask"], batch["labels"]
    own = torch.where(labels == -100, batch["input_ids"], labels)
    filled = own.clone()
    filled.view(-1)[batch["mask_places"]] = chosen
    masked = words(batch["input_ids"], attention_mask=mask, labels=labels).loss
    told = theirs(filled, attention_mask=mask, labels=(filled != own).long()).loss
    wanted = masked + 50 * told
    wanted.backward()
    assert 0 < int((filled != own).sum()) < len(chosen)
    assert loss.as_mean().item() == pytest.approx(wanted.item(), rel=2e-7)
    assert loss.metrics["generator_loss"][0].item() / len(chosen) == pytest.approx(masked.item(), rel=5e-7)

    pairs = [*_paired(job.model, theirs), *_paired(job.model.beside, words)]
    if generator == "shared":
        assert job.model.beside.graph.get_parameter("encoder.embeddings.word.weight") is pairs[0][0]
    most = max(float(other.grad.abs().max()) for _, other in pairs)
    assert max(float((ours.grad - other.grad).abs().max()) for ours, other in pairs) < 1e-6 * most


def _paired(model: Any, other: Any) -> list[tuple[Any, Any]]:
    """Return the parameters of our model beside those of transformers'."""
    theirs = dict(other.named_parameters(remove_duplicate=False))
    source = model.source.placed
    return [(p, theirs[source[name]]) for name, p in model.graph.named_parameters() if name in source]


def test_words_are_drawn_by_their_probabilities_and_alike_however_rows_are_cut() -> None:
    scores = torch.tensor([0.5, 0.25, 0.15, 0.1, 0.0]).log()
    seeds = torch.arange(40).repeat_interleave(500)
    places = torch.arange(500).repeat(40)
    found = drawn(scores.expand(20000, -1), seeds, places)
    counts = torch.bincount(found, minlength=5) / 20000
    assert torch.allclose(counts, scores.exp(), atol=0.012)
    assert counts[4] == 0
    again = torch.cat(
        [drawn(scores.expand(len(p), -1), s, p) for s, p in zip(seeds.split(700), places.split(700), strict=True)]
    )
    assert torch.equal(found, again)
    assert not torch.equal(found, drawn(scores.expand(20000, -1), seeds + 1, places))


def test_masks_are_as_published_and_rows_know_how_many_there_are(starts: dict[str, Path]) -> None:
    job = planned(starts, "shared", concatenate=True, batch_size=4)
    rows = list(range(len(job.rows)))
    batch = batch_of(job, tuple(rows[:4]))
    labels, ids, mask_id = batch["labels"], batch["input_ids"], job.model.tokenizer.mask_token_id
    masked = labels != -100
    assert masked.sum().item() == job.collate.masked(Where(42, 0, 0, ()), torch.arange(4).numpy())
    hidden = ids[masked] == mask_id
    assert torch.equal(ids[masked][~hidden], labels[masked][~hidden])  # no word of the text is another one's
    seen = [job.collate(job.rows.__getitems__(rows), Where(42, epoch, 0, tuple(rows))) for epoch in range(20)]
    found = torch.cat([part["input_ids"][part["labels"] != -100] == mask_id for part in seen])
    assert float(found.float().mean()) == pytest.approx(0.85, abs=0.04)
    assert torch.equal(labels.view(-1)[batch["mask_places"]], batch["mask_labels"])


def test_loss_and_figures_are_the_same_however_rows_lie(starts: dict[str, Path]) -> None:
    losses, figures = [], []
    for layout in ("padded", "packed", "bucketed"):
        job = planned(starts, "apart", layout)
        job.model.eval()
        losses.append(float(job.objective(job.model, batch_of(job, first(job))).as_mean().detach()))
        figures.append(job.evaluation(job.model))
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-5)
    assert {"eval_loss", "precision", "recall", "f1", "accuracy", "generator_accuracy"} < figures[0].keys()
    for other in figures[1:]:
        assert other == pytest.approx(figures[0], rel=1e-4)


@pytest.mark.parametrize("whole_words", [False, True])
def test_parts_of_a_step_add_up_to_the_whole_one(whole_words: bool, starts: dict[str, Path]) -> None:
    job = planned(starts, "shared", batch_size=8, whole_words=whole_words)
    whole = first(job)
    found = job.objective(job.model, batch_of(job, whole))
    parted = 0
    for row, labels in zip((job.rows.get(i) for i in whole), batch_of(job, whole)["labels"], strict=True):
        asked = [[label != -100 for word, label in zip(row["words"], labels, strict=False) if word == one]
                 for one in {*row["words"].tolist()}]  # fmt: skip
        parted += sum(any(word) and not all(word) for word in asked)
    assert (parted == 0) is whole_words
    counted, usual = (
        counts(Where(42, 0, 0, ()), np.asarray(whole))
        for counts in (
            job.collate.masked,
            replace(job.collate, masking=replace(job.collate.masking, whole_words=False)).masked,
        )
    )
    assert (counted < usual) is whole_words
    parts = [job.objective(job.model, batch_of(job, part)) for part in (whole[:1], whole[1:4], whole[4:])]
    total = sum(part.as_sum().item() for part in parts) / sum(float(part.count) for part in parts)
    assert total == pytest.approx(found.as_mean().item(), rel=1e-6)
    # a mean over masks for each part would be another number
    shares = [float(batch_of(job, part)["words_share"]) for part in (whole, whole[:1])]
    assert shares[0] == 1.0 != shares[1]
    sizes = (11, 2)
    judged = [planned(starts, "shared", eval_batch_size=n, whole_words=whole_words).evaluation for n in sizes]
    assert judged[0](job.model.eval()) == pytest.approx(judged[1](job.model), rel=1e-6)


def weights(starts: dict[str, Path], **options: Any) -> dict[str, Tensor]:
    given: dict[str, Any] = {**FIXED, "generator": str(starts["shared"]), **options}
    result = finetune(starts["discriminator"], train=lines(24), **given)
    assert result.generator is not None
    found = {
        name: value for part in (result.model, result.generator) for name, value in part.graph.state_dict().items()
    }
    return {name: value.detach().clone() for name, value in found.items()}


def far(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max((a[name] - b[name]).abs().max().item() for name in a)


def test_a_run_is_the_same_in_micro_batches_and_accumulated(starts: dict[str, Path]) -> None:
    whole = weights(starts)
    assert far(whole, weights(starts, micro_batch_size=3)) < 2e-5
    gathered = weights(starts, batch_size=4, accumulate=2, group_by_length=False)
    assert far(weights(starts, group_by_length=False), gathered) < 2e-5


@pytest.mark.slow
def test_a_run_is_the_same_on_several_ranks(starts: dict[str, Path]) -> None:
    assert far(weights(starts), weights(starts, devices=["cpu", "cpu"])) < 2e-5


def test_both_models_are_written_read_again_and_share_nothing(starts: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    given: dict[str, Any] = {**FIXED, "generator": str(starts["shared"]), "report": True, "eval": lines(12)}
    for steps in (1, 6):
        given |= {"max_steps": steps, "overwrite": steps > 1}
        result = finetune(starts["discriminator"], train=lines(24), out=out, **given)
    made: Any = result.generator
    assert result.model.beside is None
    assert result.losses[-1] < result.losses[0]
    model, generator = load(out), load(out / "generator")
    assert (model.head, generator.head) == ("replaced_tokens", "masked_lm")
    for ours, again in ((result.model, model), (made, generator)):
        named = dict(again.graph.named_parameters())
        assert all(torch.equal(p, named[name]) for name, p in ours.graph.named_parameters())
        assert not again.untrained
    words = [part.graph.get_parameter("encoder.embeddings.word.weight") for part in (result.model, made)]
    assert torch.equal(*words)
    assert words[0].data_ptr() != words[1].data_ptr()
    assert made.graph.get_parameter("head.decoder.weight") is words[1]
    predicted: Any = model
    assert predicted.predict(["The room was cold."], replaced_only=False)
    filling: Any = generator
    assert filling.fill_mask("The [MASK] was cold.")
    assert "generator" in (out / "README.md").read_text()


@pytest.mark.transformers
def test_transformers_reads_both_models(starts: dict[str, Path], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    given: dict[str, Any] = {**FIXED, "generator": str(starts["apart"])}
    result = finetune(starts["discriminator"], train=lines(16), out=tmp_path / "out", **given)
    tokenizer: Any = result.model.tokenizer
    ids = torch.tensor([tokenizer.encode("The room was cold.")])
    both = ((result.model, "", "ElectraForPreTraining"), (result.generator, "generator", "ElectraForMaskedLM"))
    for ours, inside, name in both:
        kind = getattr(transformers, name)
        theirs, report = kind.from_pretrained(tmp_path / "out" / inside, output_loading_info=True)
        assert not any(report.values())
        model: Any = ours
        with torch.no_grad():
            torch.testing.assert_close(theirs.eval()(ids).logits, model.eval()(ids).logits, rtol=1e-6, atol=1e-6)
        theirs.save_pretrained(tmp_path / name)
        named = dict(load(tmp_path / name).graph.named_parameters())
        assert all(torch.equal(value, named[part]) for part, value in model.graph.named_parameters())
        assert verify_export(tmp_path / "out" / inside, receipt=False).passed


def test_a_run_that_was_ended_goes_on_to_the_same_bits(starts: dict[str, Path], tmp_path: Path) -> None:
    def stop(event: Any) -> None:
        if type(event).__name__ == "StepDone" and event.step == 4:
            raise KeyboardInterrupt

    given: dict[str, Any] = {
        **FIXED, "generator": str(starts["shared"]), "max_steps": None, "epochs": 2, "save_every": 1, "dropout": 0.1,
        "optimizer": "adamw", "lr": 5e-3, "train": lines(24), "eval": lines(8),
    }  # fmt: skip
    whole = finetune(starts["discriminator"], out=tmp_path / "whole", **given)
    with pytest.raises(KeyboardInterrupt):
        finetune(starts["discriminator"], out=tmp_path / "out", on_event=stop, **given)
    rest = finetune(starts["discriminator"], out=tmp_path / "out", resume=True, **given)
    assert (rest.losses, rest.history) == (whole.losses, whole.history)
    for name in ("model.safetensors", "generator/model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_model_in_memory_is_left_alone_by_a_trial_and_learns_with_any_generator(starts: dict[str, Path]) -> None:
    model: Any = load(starts["discriminator"])
    found = dry_run(model, train=lines(16), eval=lines(8), generator=str(starts["apart"]), batch_size=8)
    assert "generator_accuracy" in found.metrics
    assert model.beside is None
    given: dict[str, Any] = {**FIXED, "generator": str(starts["shared"]), "task": None}
    result = finetune(model, train=lines(16), **given)
    assert result.model is model
    assert result.task == "replaced_tokens"
    assert result.generator is not None
    assert model.beside is None


def test_what_does_not_fit_is_refused(starts: dict[str, Path], base: Path, tmp_path: Path) -> None:
    other: Any = load(starts["shared"])
    vocabulary = tmp_path / "vocabulary"
    other.save_pretrained(vocabulary)
    text = (vocabulary / "tokenizer.json").read_text()
    (vocabulary / "tokenizer.json").write_text(text.replace('"the"', '"teh"'))
    mine, flat = str(starts["shared"]), str(tmp_path / "flat")
    values: dict[str, Any] = dict(other.config.source) | {"num_hidden_layers": 1}
    shallow = type(other).from_config(ModelConfig.for_model(values.pop("model_type"), **values))
    shallow.tokenizer = other.tokenizer
    shallow.save_pretrained(flat)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"generator": str(base)}, "found a bert model; expected electra"),
        ({"generator": str(vocabulary)}, "words under other numbers .* 'teh'"),
        ({"generator": mine, "task": "mlm"}, "masked_lm has none"),
        ({"generator": mine, "neftune": 5.0}, "neftune: replaced_tokens with a generator"),
        (
            {"generator": mine, "adapter": Lora(2, targets=["layers.1.attention.queri"])},
            "targets that are no projections",
        ),
        (
            {"generator": flat, "adapter": Lora(2, targets=["layers.1.attention.query"])},
            f"generator: {flat}: .*targets",
        ),
    ]
    for options, said in cases:
        with pytest.raises(ConfigError, match=said):
            plan_job(starts["discriminator"], lines(4), None, make_options({"task": "replaced", **options}))
    with pytest.raises(ConfigError, match="no other loss than its own"):
        finetune(starts["discriminator"], train=lines(4), generator=mine, loss=F.mse_loss)
    with pytest.raises(ConfigError, match="expected texts"):
        finetune(starts["discriminator"], train=[{"words": ["a"], "tags": [0]}], task="replaced", generator=mine)


ADAPTERS: list[dict[str, Any]] = [
    {"lora": 2}, {"adapter": Lora(2, dora=True)}, {"adapter": IA3()}, {"adapter": Prompt(3)}, {"adapter": Prefix(3)},
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:prediction. 2 layers run on torch's own")
@pytest.mark.parametrize("adapter", ADAPTERS, ids=str)
def test_both_learn_by_adapters_whose_folders_are_read_again(
    adapter: dict[str, Any], starts: dict[str, Path], tmp_path: Path
) -> None:
    given: dict[str, Any] = {**FIXED, "generator": str(starts["shared"]), "lr": 1e-3, "max_steps": 4} | adapter
    result = finetune(starts["discriminator"], train=lines(24), eval=lines(8), out=tmp_path / "out", **given)
    made: Any = result.generator
    begun = load(starts["discriminator"]), load(starts["shared"])
    again: Any = (load(tmp_path / "out"), load(tmp_path / "out" / "generator"))
    for ours, before, read in zip((result.model, made), begun, again, strict=True):
        assert [type(kind) for kind in read.adapters.values()] == [type(kind) for kind in ours.adapters.values()]
        assert read.active_adapter == "default"
        named = dict(read.graph.named_parameters())
        assert all(torch.equal(p, named[name]) for name, p in ours.graph.named_parameters())
        with ours.disable_adapter():  # the base, its embeddings too, is what it was
            own = dict(ours.graph.named_parameters())
            kept = [name for name, p in before.graph.named_parameters() if torch.equal(p, own[name])]
            assert len(kept) == len(own)
    assert again[0].predict(["It was cold."], replaced_only=False) == result.model.predict(
        ["It was cold."], replaced_only=False
    )
    assert again[1].fill_mask("The [MASK] was cold.") == made.fill_mask("The [MASK] was cold.")
    assert not (tmp_path / "out" / "generator" / "model.safetensors").exists()
    plain: dict[str, Any] = {name: value for name, value in given.items() if name not in adapter}
    plain["generator"] = str(tmp_path / "out" / "generator")
    further = finetune(again[0], train=lines(24), **plain)
    assert further.generator is not None
    assert further.model.active_adapter == further.generator.active_adapter == "default"


@pytest.mark.transformers
def test_what_adapters_learned_is_what_transformers_computes_with_them_merged(
    starts: dict[str, Path], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    given: dict[str, Any] = {**FIXED, "generator": str(starts["shared"]), "adapter": Lora(2, targets="all-linear")}
    result = finetune(starts["discriminator"], train=lines(24), out=tmp_path / "out", **given)
    ids = torch.tensor([result.model.tokenizer.encode("The room was cold.")])  # type: ignore[union-attr]
    both = ((result.model, "ElectraForPreTraining"), (result.generator, "ElectraForMaskedLM"))
    for number, (ours, name) in enumerate(both):
        model: Any = ours
        merged = tmp_path / f"merged-{number}"
        model.merge_adapter().save_pretrained(merged)
        with torch.no_grad():
            theirs = getattr(transformers, name).from_pretrained(merged).eval()(ids).logits
            torch.testing.assert_close(theirs, model.unmerge_adapter().eval()(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("whole_words", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_both_learn_on_a_gpu(precision: str, whole_words: bool, starts: dict[str, Path]) -> None:
    given: dict[str, Any] = {**FIXED, "max_steps": 6, "generator": str(starts["shared"]), "lr": 0.01}
    given["whole_words"] = whole_words
    plain = finetune(starts["discriminator"], train=lines(24), devices="cpu", **given)
    fast = finetune(
        starts["discriminator"], train=lines(24), eval=lines(8), devices="cuda:0", precision=precision, **given
    )  # fmt: skip
    assert fast.losses == pytest.approx(plain.losses, rel=1e-3 if precision == "fp32" else 0.1)


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("adapter", [*ADAPTERS, {"adapter": Lora(2, targets="all-linear")}], ids=str)
@pytest.mark.parametrize("generator", ["shared", "apart"])
def test_peft_reads_both_folders_and_gives_the_same_numbers(
    generator: str, adapter: dict[str, Any], starts: dict[str, Path], tmp_path: Path
) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    given: dict[str, Any] = {**FIXED, "generator": str(starts[generator]), "lr": 0.02} | adapter
    result = finetune(starts["discriminator"], train=lines(24), out=tmp_path / "out", **given)
    ids = torch.tensor([result.model.tokenizer.encode("The room was cold.")])  # type: ignore[union-attr]
    both = (
        (result.model, "discriminator", "", "ElectraForPreTraining"),
        (result.generator, generator, "generator", "ElectraForMaskedLM"),
    )
    for ours, start, inside, name in both:
        model: Any = ours
        base = getattr(transformers, name).from_pretrained(starts[start]).eval()
        with torch.no_grad():
            before = base(ids).logits
            theirs = peft.PeftModel.from_pretrained(base, tmp_path / "out" / inside).eval()
            found, right = _by_peft(theirs, ids), model.eval()(ids).logits
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(before, right, rtol=1e-3, atol=1e-3)


def _by_peft(model: Any, ids: Tensor) -> Tensor:
    """Return the logits of peft's model; it has no task for these heads, and puts virtual tokens in for tasks alone."""
    settings = model.active_peft_config
    if not settings.is_prompt_learning:
        return model(input_ids=ids).logits
    count, lead = settings.num_virtual_tokens, model.get_prompt(batch_size=len(ids))
    mask = torch.ones(len(ids), count + ids.shape[1], dtype=torch.long)
    if not isinstance(lead, Tensor):
        return model.base_model(input_ids=ids, attention_mask=mask, past_key_values=lead).logits
    states = torch.cat([lead, model.base_model.get_input_embeddings()(ids)], 1)
    return model.base_model(inputs_embeds=states, attention_mask=mask).logits[:, count:]
