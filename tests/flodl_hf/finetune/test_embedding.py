"""Vectors trained: forms of data and losses, the numbers of a plain loop, the same step however it is cut or shared."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finetune_tables import sentences
from torch import Tensor
from torch.nn import functional as F

from flodl.errors import ConfigError, DataError
from flodl.train.schedule import Constant
from flodl_hf import load
from flodl_hf.training import evaluate, finetune
from flodl_hf.training.job import plan_job
from flodl_hf.training.losses import LOSSES, AdaptiveLayerLoss
from flodl_hf.training.losses.ranking import MultipleNegativesRankingLoss
from flodl_hf.training.options import make_options
from flodl_hf.training.vectors.step import TextBatches
from flodl_hf.training.vectors.tables import read_table

TEXTS = sentences()
ONE: dict[str, Any] = {"task": "embedding", "max_steps": 2, "epochs": 9, "batch_size": 8, "lr": 1e-3, "report": False}
EXACT: dict[str, Any] = {**ONE, "max_steps": 3, "dropout": 0.0, "optimizer": "sgd", "lr": 0.1, "schedule": "constant",
                         "max_grad_norm": 0.0}  # fmt: skip


def rows(form: str, count: int = 24) -> list[dict[str, Any]]:
    a, b, c, d = (TEXTS[i * count : (i + 1) * count] for i in range(4))
    made = {
        "pairs": lambda i: {"anchor": a[i], "positive": b[i]},
        "triplets": lambda i: {"query": a[i], "positive": b[i], "negative_1": c[i], "negative_2": d[i]},
        "scored": lambda i: {"sentence1": a[i], "sentence2": b[i], "score": (i % 6) / 5},
        "binary": lambda i: {"sentence1": a[i], "sentence2": b[i], "label": i % 2},
        "classes": lambda i: {"text": a[i], "label": f"class {i % 3}"},
        "texts": lambda i: {"text": a[i]},
        "teacher_scores": lambda i: {
            "query": a[i],
            "positive": b[i],
            "negative": [c[i], d[i]],
            "scores": [2.0, i % 2, 0],
        },
        "teacher_vectors": lambda i: {"text": a[i], "label": [float((i * k) % 5) for k in range(64)]},
    }[form]
    return [made(i) for i in range(count)]


FORMS = ("pairs", "triplets", "scored", "binary", "classes", "texts", "teacher_scores", "teacher_vectors")


def weights(base: Path, data: Any, **options: Any) -> dict[str, Tensor]:
    model = finetune(base, train=data, **{**EXACT, **options}).model
    return {name: value.detach().clone() for name, value in model.graph.named_parameters()}


def nearly(a: dict[str, Tensor], b: dict[str, Tensor], bound: float = 1e-5) -> bool:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a) < bound


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_trains_and_is_judged_and_written(form: str, base: Path, tmp_path: Path) -> None:
    data = rows(form)
    size = load(base).config.hidden_size
    if form == "teacher_vectors":
        data = [{**row, "label": (row["label"] * size)[:size]} for row in data]
    assert read_table(data).form == form
    result = finetune(base, train=data, eval=data, out=tmp_path / "out", **ONE)
    assert result.task == "embedding"
    assert all(np.isfinite(value) for value in result.metrics.values()), result.metrics
    assert {"pairs": "ndcg@10", "scored": "spearman", "binary": "ap", "classes": "v_measure"}.get(
        form, "eval_loss"
    ) in result.metrics
    before, after = load(base, head="base"), load(tmp_path / "out")
    found = after.embed(TEXTS[:4])
    assert torch.equal(found, result.model.embed(TEXTS[:4]))
    assert not torch.equal(found, before.embed(TEXTS[:4]))
    kinds = [module["type"].rpartition(".")[2] for module in json.loads((tmp_path / "out/modules.json").read_text())]
    assert kinds == ["Transformer", "Pooling", "Normalize"]
    assert "sentence-transformers" in (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_trains(name: str, base: Path) -> None:
    form = LOSSES[name].forms[0]
    guide = {"guide": str(base)} if name in ("GISTEmbedLoss", "MSELoss") else {}
    data = rows("texts" if name == "MSELoss" else form, 16)
    result = finetune(base, train=data, loss=name, **{**ONE, "max_steps": 1, **guide})
    assert np.isfinite(result.losses[0])
    assert result.recipe["vector_loss"] == name


def plain_loop(base: Path, data: list[dict[str, str]], loss: Any = None) -> dict[str, Tensor]:
    """Train as written out by hand, on the same batches."""
    job = plan_job(base, data, None, make_options(EXACT))
    model: Any = load(base, head="base", dtype=torch.float32)
    tokenizer = model.tokenizer
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in list(job.batches.plan(0))[:3]:
        columns = []
        for column in ("anchor", "positive"):
            given = tokenizer([data[i][column] for i in batch.tolist()], padding=True, return_tensors="pt")
            inputs = {name: torch.as_tensor(given[name]) for name in given.keys() if name in NAMES}  # noqa: SIM118
            states, mask = model(**inputs).last_hidden_state, inputs["attention_mask"][:, :, None]
            columns.append(F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1))
        scores = 20 * columns[0] @ columns[1].T
        F.cross_entropy(scores, torch.arange(len(scores))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.graph.named_parameters()}


NAMES = ("input_ids", "attention_mask", "token_type_ids")


def test_steps_are_those_of_a_plain_loop(base: Path) -> None:
    assert nearly(weights(base, rows("pairs")), plain_loop(base, rows("pairs")), 2e-6)


@pytest.mark.parametrize(
    "options",
    [{"layout": "packed"}, {"cache_tokens": 40}, {"cache_tokens": 40, "layout": "packed"}],
    ids=str,
)
def test_a_step_is_the_same_however_its_batch_goes_through_the_model(base: Path, options: dict[str, Any]) -> None:
    data = rows("triplets")
    whole, other = weights(base, data), weights(base, data, **options)
    assert nearly(whole, other)
    assert not nearly(whole, weights(base, rows("triplets")[::-1], **options), 1e-7)


@pytest.mark.parametrize(
    ("form", "loss"),
    [
        ("triplets", None),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("scored", "CoSENT"),
                ("classes", "BatchHardTriplet"),
                ("pairs", "GISTEmbed"),
                ("binary", None),
            )
        ),
    ],
)
def test_ranks_learn_from_the_whole_batch(base: Path, form: str, loss: str | None) -> None:
    guide = {"guide": str(base)} if loss == "GISTEmbed" else {}
    both = weights(base, rows(form), vector_loss=loss, devices=["cpu", "cpu"], **guide)
    assert nearly(weights(base, rows(form), vector_loss=loss, **guide), both)


def test_batches_filled_up_to_shapes_that_come_again_give_the_same_step(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pooling in ("mean", "cls+max", "mean_sqrt_len+weighted_mean+last_token"):
        whole = weights(base, rows("triplets"), pooling=pooling)
        with monkeypatch.context() as patch:
            patch.setattr("flodl_hf.training.batching._layout", lambda options: "bucketed")
            assert nearly(whole, weights(base, rows("triplets"), pooling=pooling))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.filterwarnings("error")
def test_vectors_train_on_a_gpu_in_recorded_steps(base: Path, precision: str) -> None:
    given: dict[str, Any] = {**EXACT, "max_steps": 12, "epochs": 9, "lr": 0.05}
    plain = finetune(base, train=rows("triplets"), devices="cpu", **given)
    events: list[Any] = []
    fast = finetune(
        base, train=rows("triplets"), devices="cuda:0", precision=precision, on_event=events.append, **given
    )
    assert not [event for event in events if "one operation at a time" in getattr(event, "message", "")]
    assert fast.losses == pytest.approx(plain.losses, rel=1e-3 if precision == "fp32" else 0.1)


def test_dropout_is_the_same_when_a_part_is_computed_again(base: Path) -> None:
    """With dropout the gradient of parts is that of what they gave: twice the same run, and a loss that falls."""
    runs = [finetune(base, train=rows("texts"), **{**ONE, "cache_tokens": 40, "max_steps": 4}) for _ in range(2)]
    assert runs[0].losses == runs[1].losses
    assert runs[0].losses[0] > 0.01  # a text and itself differ by their dropout alone


def test_sizes_and_layers_are_learned_on_request(base: Path) -> None:
    wrapped = finetune(
        base, train=rows("pairs"), **ONE, matryoshka=[16, 8], loss=AdaptiveLayerLoss(MultipleNegativesRankingLoss())
    )
    plain = finetune(base, train=rows("pairs"), **ONE)
    assert wrapped.losses[0] > 2 * plain.losses[0]
    assert wrapped.recipe["matryoshka"] == ["16", "8"]


def test_several_tables_are_mixed_and_each_has_its_loss(base: Path) -> None:
    tables = {"pairs": rows("pairs", 32), "sts": rows("scored", 16)}
    job = plan_job(base, tables, None, make_options(ONE))
    kinds = [np.unique(job.rows.owners[batch] >= 32).tolist() for batch in job.batches.plan(0)]
    assert sorted(kinds) == [[False]] * 4 + [[True]] * 2
    turns = plan_job(base, tables, None, make_options({**ONE, "mixing": "round_robin"})).batches.plan(0)
    assert [bool(batch[0] >= 32) for batch in turns] == [False, True, False, True]
    result = finetune(base, train=tables, **{**ONE, "vector_loss": {"sts": "CosineSimilarity"}, "max_steps": 6})
    assert len(result.losses) == 6


def test_no_text_comes_twice_in_a_batch() -> None:
    texts = np.array([[i, 100 + i // 4] for i in range(40)])  # four questions of each passage
    plan = TextBatches([texts], 8, apart=[True]).plan(3)
    assert sorted(np.concatenate(list(plan)).tolist()) == list(range(40))
    assert all(len(np.unique(texts[batch])) == texts[batch].size for batch in plan)
    freely = TextBatches([texts], 8, apart=[False]).plan(3)
    assert any(len(np.unique(texts[batch])) < texts[batch].size for batch in freely)
    assert [len(batch) for batch in TextBatches([texts[:17]], 8, least=2).plan(0)] == [8, 8]


def test_an_own_loss_sees_the_whole_batch(base: Path) -> None:
    seen: list[Any] = []

    def loss(vectors: list[Tensor], labels: Tensor | None) -> Tensor:
        seen.append((len(vectors), len(vectors[0]), labels))
        return F.mse_loss(vectors[0], vectors[1])

    finetune(base, train=rows("pairs"), loss=loss, **ONE)
    assert seen[0] == (2, 8, None)


def test_the_command_trains_vectors(base: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from flodl_hf.cli.app import app

    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows("pairs")))
    said = [str(base), "--train", f"a={data},b={data}", "--eval", str(data), "--out", str(tmp_path / "out")]
    said += [
        "--task",
        "embedding",
        "--max-steps",
        "2",
        "--batch-size",
        "8",
        "--vector-loss",
        "MultipleNegativesRanking",
    ]
    said += ["--loss-options", "scale=30", "--matryoshka", "16,8", "--json", "--no-report"]
    ran = CliRunner().invoke(app, ["finetune", *said])
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["task"] == "embedding"
    recipe = (tmp_path / "out/recipe.yaml").read_text()
    assert "scale: '30'" in recipe
    assert "given as an object" not in recipe
    again = CliRunner().invoke(app, ["finetune", "--recipe", str(tmp_path / "out/recipe.yaml"), "--no-report"])
    assert again.exit_code == 0, again.output


@pytest.mark.parametrize(
    ("data", "options", "fault", "said"),
    [
        ("pairs", {"vector_loss": "CoSENT"}, ConfigError, "takes scored, binary; the table train has pairs"),
        ("pairs", {"vector_loss": "GISTEmbed"}, ConfigError, "guide"),
        ("pairs", {"micro_batch_size": 2}, ConfigError, "micro_batch_size"),
        ("pairs", {"matryoshka": [4096]}, ConfigError, "4096"),
        ("pairs", {"pooling": "pooler"}, ConfigError, "pooler"),
        ("pairs", {"columns": {"anchor": "nothing"}}, DataError, "no column 'nothing'"),
        ("pairs", {"columns": {"text": "anchor"}}, ConfigError, "no role 'text'"),
        ("pairs", {"vector_loss": {"other": "CoSENT"}}, ConfigError, "no table 'other'"),
        # a rank without a share would let the others wait for its vectors
        ("pairs", {"batch_size": 2, "devices": ["cpu"] * 3}, ConfigError, "batch_size: 2, shared by 3 ranks"),
        ("pairs", {"batch_size": 1}, ConfigError, "batch_size: 1, of a loss that compares examples; expected at least"),
    ],
)
def test_what_does_not_fit_is_refused(
    data: str, options: dict[str, Any], fault: type[Exception], said: str, base: Path
) -> None:
    with pytest.raises(fault, match=said):
        finetune(base, train=rows(data), **{**ONE, **options})


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (rows("pairs")[:1], {}),
        (rows("triplets")[:2], {"devices": ["cpu"] * 3}),
        ([{"anchor": "the same", "positive": text} for text in TEXTS[:9]], {}),
    ],
)
def test_a_table_of_which_no_batch_can_be_made_is_refused(data: Any, options: dict[str, Any], base: Path) -> None:
    with pytest.raises(DataError, match=f"train: of {len(data)} rows no batch") as caught:
        finetune(base, train=data, **{**ONE, **options})
    assert caught.value.rows == len(data)
    if not options:
        assert len(finetune(base, train=data * 2, **{**ONE, "no_duplicates": False}).losses) == 2


def test_a_folder_with_further_modules_is_refused(base: Path) -> None:
    from dataclasses import replace

    from flodl_hf.checkpoints.sentence.recipe import SentenceTransformerConfig
    from flodl_hf.checkpoints.sentence.steps import Dense
    from flodl_hf.heads.base import BaseModel

    model = BaseModel.from_pretrained(base)
    model.sentence_recipe = replace(SentenceTransformerConfig(), dense=(Dense(torch.eye(model.config.hidden_size)),))
    with pytest.raises(ConfigError, match="further modules"):
        finetune(model, train=rows("pairs"), **ONE)


def test_columns_that_say_nothing_are_refused(base: Path) -> None:
    with pytest.raises(DataError, match="which of the columns"):
        finetune(base, train=[{"id": 3, "title": "a", "body": "b"}] * 8, **ONE)
    named = finetune(
        base, train=[{"id": i, "title": TEXTS[i], "body": TEXTS[50 + i]} for i in range(16)],
        columns={"anchor": "title", "positive": "body"}, **ONE,
    )  # fmt: skip
    assert len(named.losses) == 2


@pytest.mark.filterwarnings("ignore")
def test_sentence_transformers_loads_the_folder_with_equal_vectors(base: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    for pooling, normalize in (("mean", True), ("cls", False)):
        out = tmp_path / pooling
        result = finetune(base, train=rows("pairs"), out=out, pooling=pooling, normalize=normalize, **ONE)
        theirs = library.SentenceTransformer(str(out), device="cpu").encode(TEXTS[:20])
        ours = result.model.encode(TEXTS[:20])
        assert np.abs(theirs - ours).max() < 1e-6


# ---- prompts ----------------------------------------------------------------------------------------------

BY_COLUMN = {"anchor": "query: ", "positive": "passage: ", "sentence1": "query: ", "sentence2": "passage: "}
OF_TRAINER: dict[tuple[str, str], float] = {
    ("pairs", "none"): 3.2659473, ("pairs", "text"): 3.2438858, ("pairs", "columns"): 3.2144859,
    ("scored", "none"): 5.5351853, ("scored", "text"): 5.5766950, ("scored", "columns"): 5.5481110,
}  # fmt: skip
"""``eval_loss`` of sentence-transformers 6.2's trainer with ``prompts`` of `with_prompts`, all rows in a batch."""
OF_EVALUATORS: dict[str, dict[str, float]] = {
    "pairs": {"recall@1": 0.0416667, "recall@10": 0.5, "mrr@10": 0.1321759, "ndcg@10": 0.2147693, "map@100": 0.1597908},
    "scored": {"pearson": -0.1730394, "spearman": -0.1973741},
}
"""Metrics of its InformationRetrievalEvaluator and EmbeddingSimilarityEvaluator, which use the folder's prompts."""


@pytest.fixture(scope="module")
def with_prompts(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of sentence-transformers with prompts and a default prompt."""
    folder = tmp_path_factory.mktemp("prompts") / "tiny"
    shutil.copytree(base, folder)
    pooling = {"word_embedding_dimension": load(base).config.hidden_size, "pooling_mode_mean_tokens": True}
    kinds = ("Transformer", ""), ("Pooling", "1_Pooling")
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(kinds)
    ]
    prompts = {"query": "query: the service ", "passage": "passage: ", "document": "the pizza "}
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": prompts, "default_prompt_name": "passage"})
    )
    return folder


@pytest.mark.parametrize(("form", "kind"), OF_TRAINER)
def test_prompts_are_those_of_sentence_transformers(form: str, kind: str, with_prompts: Path) -> None:
    prompts: Any = {"none": None, "text": "query: ", "columns": BY_COLUMN}[kind]
    still = {**EXACT, "lr": 0.0, "max_steps": 1, "batch_size": 24}
    data = rows(form)
    result = finetune(with_prompts, train=data, eval=data, **still, prompts=prompts)
    assert result.losses == pytest.approx([OF_TRAINER[form, kind]], abs=2e-6)
    assert result.metrics["eval_loss"] == pytest.approx(OF_TRAINER[form, kind], abs=2e-6)
    # Recorded on another processor, whose products differ in their last bits.
    assert {name: result.metrics[name] for name in OF_EVALUATORS[form]} == pytest.approx(OF_EVALUATORS[form], abs=5e-6)


@pytest.mark.parametrize("task", ["embedding", "sparse"])
def test_prompts_come_before_texts_of_their_columns(task: str, base: Path, with_prompts: Path) -> None:
    data = [
        {"anchor": row["query"], "positive": row["positive"], "negative": [row["negative_1"], row["negative_2"]][: n % 3]}
        if task == "embedding" else {"anchor": row["query"], "positive": row["positive"], "negative": row["negative_1"]}
        for n, row in enumerate(rows("triplets", 12))
    ]  # fmt: skip
    prompts = {"anchor": "query: ", "negative": "passage: "}

    def prefixed(value: Any, name: str) -> Any:
        return (
            [prompts.get(name, "") + one for one in value] if isinstance(value, list) else prompts.get(name, "") + value
        )

    by_hand = [{name: prefixed(value, name) for name, value in row.items()} for row in data]
    still = {**EXACT, "task": task, "batch_size": 4}
    asked = finetune(base, train=data, **still, prompts=prompts).losses
    assert asked == finetune(base, train=by_hand, **still).losses
    assert asked != finetune(base, train=data, **still).losses
    if task == "embedding":  # examples with different numbers of texts
        start = {**still, "lr": 0.0, "max_steps": 1}
        whole = [finetune(folder, train=data, eval=data, **start).metrics for folder in (base, with_prompts)]
        assert whole[0]["eval_loss"] == pytest.approx(whole[1]["eval_loss"], abs=1e-6)
        assert whole[0] != pytest.approx(whole[1], abs=1e-6)


def test_prompts_that_cannot_be_used_are_reported(base: Path, with_prompts: Path, tmp_path: Path) -> None:
    shutil.copytree(with_prompts, tmp_path / "tiny")
    pooling = tmp_path / "tiny/1_Pooling/config.json"
    pooling.write_text(json.dumps({**json.loads(pooling.read_text()), "include_prompt": False}))
    for start, prompts in ((base, 3), (base, {"anchor": {"anchor": "x"}}), (tmp_path / "tiny", "query: ")):
        with pytest.raises(ConfigError, match="prompts"):
            plan_job(start, rows("pairs"), None, make_options({**ONE, "prompts": prompts}))
    notes = plan_job(base, rows("pairs"), None, make_options({**ONE, "prompts": {"anchors": "query: "}})).notes
    assert len(notes) == 1
    assert "'anchors'" in notes[0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("query: ", "query: "),
        ("anchor=query: ,positive=passage: ", {"anchor": "query: ", "positive": "passage: "}),
        ('{"anchor": "find, in a list: "}', {"anchor": "find, in a list: "}),
    ],
)
def test_prompts_of_the_command_line_keep_their_spaces(text: str, value: Any) -> None:
    from flodl_hf.cli.finetune import parse

    assert parse("prompts", text) == value


def test_losses_given_as_objects_are_written_into_the_recipe_as_text(base: Path, tmp_path: Path) -> None:
    loss = {"": MultipleNegativesRankingLoss(scale=5.0)}
    options = {**ONE, "vector_loss": loss, "schedule": Constant(1e-3)}
    result = finetune(base, train=rows("pairs"), out=tmp_path / "out", **options)
    assert result.recipe["vector_loss"] == loss
    text = (tmp_path / "out" / "recipe.yaml").read_text("utf-8")
    assert "MultipleNegativesRankingLoss(scale=5.0" in text
    assert "# vector_loss and schedule: given as an object" in text
    assert json.loads(json.dumps(result.to_dict()))["recipe"]["vector_loss"] == {"": str(loss[""])}
    assert evaluate(tmp_path / "out", rows("pairs")).metrics.keys() >= {"eval_loss", "ndcg@10"}
    assert result.folder == tmp_path / "out"
