"""Folders whose queries and documents go through layers of their own, beside a forward written out here."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from sentence_folders import ST, TEXTS, layer, modules, states_of, write
from torch import Tensor

from flodl.errors import ConfigError
from flodl_hf import load
from flodl_hf.errors import ExportError, PredictError

Saved = Callable[..., Path]
pytestmark = pytest.mark.filterwarnings("ignore:.*truncated")
QUERY, DOCUMENT = layer(6, 16), layer(4, 16, "linear.Identity", bias=False)


def router(types: dict[str, str], structure: dict[str, list[str]], **parameters: Any) -> dict[str, Any]:
    return {
        "types": {name: ST + kind for name, kind in types.items()},
        "structure": structure,
        "parameters": {"default_route": None, "allow_empty_key": True} | parameters,
    }


def files_of(folder: str, dense: dict[str, Any]) -> dict[str, Any]:
    return {f"{folder}/config.json": dense["config.json"], f"{folder}/model.safetensors": dense["model.safetensors"]}


def behind(folder: Path, name: str = "router_config.json", **parameters: Any) -> Path:
    """Make of a model's folder one whose router stands behind a pooling, as Asym's were."""
    (folder / "2_Router").mkdir(exist_ok=True)
    said = router(
        {"query_0_Dense": "Dense", "document_0_Dense": "Dense", "document_1_Normalize": "Normalize"},
        {"query": ["query_0_Dense"], "document": ["document_0_Dense", "document_1_Normalize"]},
        **parameters,
    )
    return write(folder, {
        "modules.json": modules((ST + "Transformer", ""), (ST + "Pooling", "1_Pooling"), (ST + "Router", "2_Router")),
        "1_Pooling/config.json": {"pooling_mode_mean_tokens": True, "word_embedding_dimension": 16},
        f"2_Router/{name}": said,
        **files_of("2_Router/query_0_Dense", QUERY), **files_of("2_Router/document_0_Dense", DOCUMENT),
        "config_sentence_transformers.json": {"prompts": {"query": "a cat: ", "document": "good "}},
    })  # fmt: skip


def before(folder: Path) -> Path:
    """Make one whose router comes first, with one transformer for both routes and a pooling of each."""
    inner = folder / "query_0_Transformer"
    files = [path for path in folder.iterdir() if path.is_file()]
    inner.mkdir()
    for path in files:
        shutil.move(path, inner / path.name)
    said = router(
        {"query_0_Transformer": "Transformer", "query_1_Pooling": "Pooling", "document_1_Pooling": "Pooling",
         "document_2_Dense": "Dense"},
        {"query": ["query_0_Transformer", "query_1_Pooling"],
         "document": ["query_0_Transformer", "document_1_Pooling", "document_2_Dense"]},
        default_route="document",
    )  # fmt: skip
    return write(folder, {
        "modules.json": modules((ST + "Router", ""), (ST + "Normalize", "1_Normalize")), "router_config.json": said,
        "query_1_Pooling/config.json": {"pooling_mode": "cls", "embedding_dimension": 16},
        "document_1_Pooling/config.json": {"pooling_mode": "mean", "embedding_dimension": 16},
        "query_0_Transformer/sentence_bert_config.json": {"max_seq_length": 8, "do_lower_case": False},
        **files_of("document_2_Dense", DOCUMENT),
    })  # fmt: skip


def through(pooled: Tensor, dense: dict[str, Any]) -> Tensor:
    tensors, activation = dense["tensors"], dense["config.json"]["activation_function"]
    found = tensors["linear.weight"].double() @ pooled.double()
    found = found + tensors["linear.bias"].double() if "linear.bias" in tensors else found
    return found.tanh() if activation.endswith("Tanh") else found


def close(found: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(found.double(), exact.double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["router_config.json", "config.json"])
def test_each_route_has_its_layers_behind_one_encoder(saved: Saved, name: str) -> None:
    model: Any = load(behind(saved("bert"), name))
    recipe = model.sentence_recipe
    assert (list(recipe.routes), recipe.usual_route) == (["query", "document"], "query")
    assert "routes: query, document; texts take 'query' by default" in model.load_report.notes
    for text in TEXTS:
        pooled = states_of(model, text).mean(0)
        close(model.embed(text, route="query"), through(pooled, QUERY))
        close(model.embed(text, route="document"), torch.nn.functional.normalize(through(pooled, DOCUMENT), dim=0))
    assert torch.equal(model.embed(TEXTS), model.embed(TEXTS, route="query"))
    assert torch.equal(model.embed(TEXTS, task="document"), model.embed(TEXTS, route="document"))
    assert (model.embed([], route="query").shape, model.embed([], route="document").shape) == ((0, 6), (0, 4))
    parts = model.embed_chunks(TEXTS[1], route="document")
    assert parts.vectors.shape == (2, 4)
    close(parts.vectors.norm(dim=1), torch.ones(2))
    assert model.embed_chunks(TEXTS[1]).vectors.shape == (2, 6)


def test_queries_and_documents_take_their_prompts_and_routes(saved: Saved) -> None:
    model: Any = load(behind(saved("bert")))
    asked, found = model.encode_query(TEXTS, convert_to_tensor=True), model.encode_document(TEXTS)
    assert torch.equal(asked, model.embed(["a cat: " + text for text in TEXTS], route="query"))
    assert found.tolist() == model.encode(TEXTS, prompt="good ", route="document").tolist()
    assert found.tolist() == model.encode(TEXTS, prompt_name="document", task="document").tolist()
    assert model.encode_query(TEXTS, prompt="").tolist() == model.encode(TEXTS, task="query").tolist()


def test_a_folder_without_routes_takes_prompts_alone(saved: Saved) -> None:
    folder = write(saved("bert"), {
        "modules.json": modules((ST + "Transformer", ""), (ST + "Pooling", "1_Pooling")),
        "1_Pooling/config.json": {"pooling_mode_mean_tokens": True},
        "config_sentence_transformers.json": {"prompts": {"query": "a cat: "}, "default_prompt_name": "query"},
    })  # fmt: skip
    model: Any = load(folder)
    assert model.encode_query(TEXTS).tolist() == model.encode(TEXTS, prompt_name="query").tolist()
    assert model.encode_document(TEXTS).tolist() == model.encode(TEXTS, prompt="").tolist()
    assert model.encode(TEXTS).tolist() == model.encode_query(TEXTS).tolist()
    for call in (model.embed, model.encode, model.embed_chunks):
        with pytest.raises(PredictError, match="route='query': this model has no routes"):
            call(TEXTS, route="query")


def test_one_transformer_of_several_routes_may_come_behind_the_router(saved: Saved, tmp_path: Path) -> None:
    model: Any = load(before(saved("bert")))
    assert model.sentence_recipe.max_tokens == 8
    for text in (TEXTS[0], TEXTS[2]):
        states = states_of(model, text)
        close(model.embed(text, route="query"), torch.nn.functional.normalize(states[0], dim=0))
        exact = torch.nn.functional.normalize(through(states.mean(0), DOCUMENT), dim=0)
        close(model.embed(text), exact)
    # Its weights are written at the root, so the small files are made anew; a second time they stay.
    again: Any = load(model.save_pretrained(tmp_path / "anew"))
    third: Any = load(again.save_pretrained(tmp_path / "third"))
    for other in (again, third):
        assert other.sentence_recipe.usual_route == "document"
        for route in ("query", "document"):
            assert torch.equal(other.embed(TEXTS, route=route), model.embed(TEXTS, route=route))
    names = [path.relative_to(tmp_path / "anew") for path in (tmp_path / "anew").rglob("*") if path.is_file()]
    written = {str(n): [(tmp_path / part / n).read_bytes() for part in ("anew", "third")] for n in names}
    assert [name for name, (one, two) in written.items() if one != two] == []


def test_routes_are_written_back(saved: Saved, tmp_path: Path) -> None:
    folder = behind(saved("bert"), default_route="document")
    model: Any = load(folder)
    out = model.save_pretrained(tmp_path / "out")
    names = [str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()]
    assert [n for n in names if (folder / n).read_bytes() != (out / n).read_bytes()] == ["checksums.json"]
    kept = load(folder, head="seqcls", num_labels=2).save_pretrained(tmp_path / "classifier")
    assert (kept / "2_Router" / "document_0_Dense" / "model.safetensors").is_file()


def test_what_texts_are_for_is_mapped_to_routes(saved: Saved) -> None:
    mapped = {"('question', 'text')": "query", "('answer', None)": "document", "(None, 'image')": "document"}
    model: Any = load(behind(saved("bert"), route_mappings=mapped, default_route="document"))
    recipe = model.sentence_recipe
    asked = [recipe.route_of(name) for name in ("question", "answer", "query", None)]
    assert asked == ["query", "document", "query", "document"]
    all_one: Any = load(behind(Path(model.source.folder), route_mappings={"(None, None)": "document"}))
    assert [all_one.sentence_recipe.route_of(name) for name in ("query", None)] == ["document", "document"]


def test_a_route_has_to_be_said_where_none_is_usual(saved: Saved) -> None:
    model: Any = load(behind(saved("bert"), allow_empty_key=False))
    assert "routes: query, document; a route is required" in model.load_report.notes
    for call in (model.embed, model.encode, model.embed_chunks):
        with pytest.raises(PredictError, match=r"route=None: this model has no such route.* one of query, document"):
            call(TEXTS)
    with pytest.raises(PredictError, match=r"no such route, did you mean 'query'.* query, document"):
        model.embed(TEXTS, route="quary")
    assert model.encode_query(TEXTS).shape == (3, 6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"structure": {}}, "the structure of one route"),
        ({"structure": {"query": ["gone"]}}, "the structure of one route"),
        ({"types": ["Dense"]}, "the structure of one route"),
        ({"types": {"query_0_Dense": ST + "LSTM"}, "structure": {"query": ["query_0_Dense"]}}, "module 'LSTM'"),
        ({"types": {"query_0_Dense": ST + "Transformer"}, "structure": {"query": ["query_0_Dense"]}}, "found the modules"),
        ({"parameters": {"default_route": "other"}}, "default_route is 'other'"),
        ({"parameters": {"route_mappings": {"query": "query"}}}, "route_mappings has"),
        ({"parameters": {"route_mappings": {"('a', 'text')": "gone"}}}, "route_mappings has"),
    ],
)  # fmt: skip
def test_a_router_that_is_not_understood_is_refused(saved: Saved, change: dict[str, Any], words: str) -> None:
    folder = behind(saved("bert"))
    said = json.loads((folder / "2_Router" / "router_config.json").read_text()) | change
    with pytest.raises(ConfigError, match=words):
        load(write(folder, {"2_Router/router_config.json": said}))


def apart(folder: Path, other: Path, **parameters: Any) -> Path:
    """Make one whose queries go through a transformer of their own, ``other``."""
    before(folder)
    said = json.loads((folder / "router_config.json").read_text())
    shutil.move(folder / "query_0_Transformer", folder / "document_0_Transformer")
    shutil.copytree(other, folder / "query_0_Transformer")
    said["types"]["document_0_Transformer"] = ST + "Transformer"
    said["structure"]["document"][0] = "document_0_Transformer"
    said["parameters"] |= parameters
    prompts = {"prompts": {"query": "a cat: "}}
    return write(folder, {"router_config.json": said, "config_sentence_transformers.json": prompts})


def test_routes_may_have_transformers_of_their_own(saved: Saved, tmp_path: Path) -> None:
    folder = apart(saved("bert"), saved("distilbert"))
    model: Any = load(folder)
    alone = {route: load(folder / f"{route}_0_Transformer", head="base") for route in ("query", "document")}
    assert model.load_report.notes[-2:] == [
        "routes: query, document; texts take 'document' by default",
        "routes have separate transformers; calls with ids use document_0_Transformer",
    ]
    assert (model.on_route("query").config.model_type, model.on_route().config.model_type) == ("distilbert", "bert")
    for text in (TEXTS[0], TEXTS[2]):
        first = states_of(alone["query"], text)[0]
        close(model.embed(text, route="query"), torch.nn.functional.normalize(first, dim=0))
        exact = torch.nn.functional.normalize(through(states_of(alone["document"], text).mean(0), DOCUMENT), dim=0)
        close(model.embed(text), exact)
    assert torch.equal(model.embed(TEXTS, task="query"), model.embed(TEXTS, route="query"))
    asked = model.embed(["a cat: " + text for text in TEXTS], route="query")
    assert model.encode_query(TEXTS).tolist() == asked.tolist()
    assert (model.embed([], route="query").shape, model.embed([]).shape) == ((0, 16), (0, 4))
    assert model.embed_chunks(TEXTS[1], route="query").vectors.shape == (2, 16)
    assert model.double().on_route("query").dtype == torch.float64


def test_transformers_of_their_own_are_written_where_they_lay(saved: Saved, tmp_path: Path) -> None:
    folder = apart(saved("bert"), saved("distilbert"))
    model: Any = load(folder)
    out = model.save_pretrained(tmp_path / "out", max_shard_size=None)
    out = model.save_pretrained(out, overwrite=True)
    names = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    written = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()}
    # Every folder's checksums were those of a folder by itself; the whole has one list.
    assert {name for name in names ^ written if not name.endswith("checksums.json")} == set()
    assert [n for n in names & written if (folder / n).read_bytes() != (out / n).read_bytes()] == []
    again: Any = load(out, verified=True)
    for route in ("query", "document"):
        assert torch.equal(again.embed(TEXTS, route=route), model.embed(TEXTS, route=route))
    # One route by itself is a folder without routes.
    one: Any = load(model.on_route("query").save_pretrained(tmp_path / "query"))
    assert torch.equal(one.embed(TEXTS), model.embed(TEXTS, route="query"))
    model.sentence_recipe = model.sentence_recipe.on("query")
    assert torch.equal(model.embed(TEXTS), one.embed(TEXTS))
    same: Any = load(model.save_pretrained(tmp_path / "set"))
    assert torch.equal(same.embed(TEXTS), one.embed(TEXTS))


def test_each_transformer_of_an_export_is_verified(saved: Saved, tmp_path: Path) -> None:
    from flodl_hf.export.verify import verify_export

    folder = apart(saved("bert"), saved("distilbert"))
    out = load(folder).save_pretrained(tmp_path / "out")
    found = verify_export(out, source=folder, receipt=False)
    states = {check.name: check.status for check in found.checks}
    assert states["files as they were written"] == "pass"
    for part in ("query_0_Transformer", "document_0_Transformer"):
        for name in ("opens", "tensors equal the source's", "config.json equals the source's"):
            assert states[f"{part}: {name}"] == "pass"
    assert found.passed
    weights = out / "query_0_Transformer" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 128
    weights.write_bytes(data)
    states = {check.name: check.status for check in verify_export(out, source=folder, receipt=False).checks}
    assert states["files as they were written"] == states["query_0_Transformer: tensors equal the source's"] == "fail"
    assert states["document_0_Transformer: tensors equal the source's"] == "pass"


def test_routes_that_share_one_of_several_transformers(saved: Saved) -> None:
    folder = apart(saved("bert"), saved("distilbert"), route_mappings={"('question', 'text')": "short"})
    said = json.loads((folder / "router_config.json").read_text())
    said["structure"]["short"] = ["query_0_Transformer", "document_1_Pooling"]
    model: Any = load(write(folder, {"router_config.json": said}))
    query = model.on_route("query")
    assert (model.on_route("short"), model.on_route("question")) == (query, query)
    for text in (TEXTS[0], TEXTS[2]):
        exact = torch.nn.functional.normalize(states_of(query, text).mean(0), dim=0)
        close(model.embed(text, route="short"), exact)
        assert torch.equal(model.embed(text, task="question"), model.embed(text, route="short"))
    assert not torch.equal(model.embed(TEXTS, route="query"), model.embed(TEXTS, route="short"))


def test_a_classifier_takes_the_usual_transformer_alone(saved: Saved, tmp_path: Path) -> None:
    folder = apart(saved("bert"), saved("distilbert"))
    model: Any = load(folder, head="seqcls", num_labels=2)
    assert (model.config.model_type, model.routed) == ("bert", None)
    assert any("the transformers of other routes are not" in note for note in model.load_report.notes)
    model._mark_untrained([])
    kept: Any = load(model.save_pretrained(tmp_path / "classifier"), head="base")
    assert torch.equal(kept.embed(TEXTS), load(folder).embed(TEXTS))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kind", "words"),
    [("StaticEmbedding", "module 'StaticEmbedding', which is not supported"), ("CLIPModel", "module 'CLIPModel'")],
)
def test_routes_through_other_modules_are_refused(saved: Saved, kind: str, words: str) -> None:
    folder = apart(saved("bert"), saved("distilbert"))
    said = json.loads((folder / "router_config.json").read_text())
    said["types"]["query_0_Transformer"] = ST + kind
    with pytest.raises(ConfigError, match=words):
        load(write(folder, {"router_config.json": said}))


def test_an_adapter_belongs_to_one_transformer(saved: Saved) -> None:
    from flodl_hf.models.adapters import Lora

    model: Any = load(apart(saved("bert"), saved("distilbert")))
    with pytest.raises(ConfigError, match="each route of this folder has a separate transformer"):
        model.add_adapter(Lora(rank=2))


def test_one_graph_computes_one_route(saved: Saved) -> None:
    from flodl_hf.export.traced import Traced

    own: Any = load(apart(saved("roberta"), saved("distilbert")))
    with pytest.raises(ExportError, match=r"export model\.on_route\('query'\)"):
        Traced(own)
    assert Traced(own.on_route("query")).outputs["sentence_embedding"]
    model: Any = load(behind(saved("bert")))
    with pytest.raises(ExportError, match="the routes query, document"):
        Traced(model)
    model.sentence_recipe = model.sentence_recipe.on("document")
    assert Traced(model).outputs["sentence_embedding"]


@pytest.mark.filterwarnings("ignore")  # of the library's own keywords
@pytest.mark.parametrize("shape", [behind, before, apart])
def test_sentence_transformers_gives_these_vectors(saved: Saved, tmp_path: Path, shape: Any) -> None:
    """The folder as it was made, and as it is written by us."""
    library = pytest.importorskip("sentence_transformers")
    folder = shape(saved("bert"), *([saved("distilbert")] if shape is apart else []))
    model: Any = load(folder)
    for place in (folder, model.save_pretrained(tmp_path / "ours")):
        theirs = library.SentenceTransformer(str(place), device="cpu")
        for task in ("query", "document", None):
            expected = torch.from_numpy(theirs.encode(TEXTS, task=task))
            torch.testing.assert_close(
                torch.from_numpy(model.encode(TEXTS, task=task)), expected, rtol=0, atol=1e-6
            )  # fmt: skip
        close(torch.from_numpy(model.encode_query(TEXTS)), torch.from_numpy(theirs.encode_query(TEXTS)))
        close(torch.from_numpy(model.encode_document(TEXTS)), torch.from_numpy(theirs.encode_document(TEXTS)))


def test_requests_say_what_texts_are_for(saved: Saved) -> None:
    from flodl_hf.serving.request import WorkerRequest
    from flodl_hf.serving.tasks import TASKS, describe, warm_items

    model: Any = load(behind(saved("bert"), default_route="document"))
    embed = TASKS["embed"]

    def asked(items: Any = TEXTS, **options: Any) -> Tensor:
        return torch.from_numpy(embed(model, items, options, WorkerRequest())[1][0])

    said = describe(model)
    assert (said["routes"], said["width"]) == (["query", "document"], 4)
    assert torch.equal(asked(), model.embed(TEXTS, route="document"))
    assert torch.equal(asked(route="query"), model.embed(TEXTS, route="query"))
    assert torch.equal(asked(kind="query"), model.embed(TEXTS, route="query", prompt_name="query"))
    assert torch.equal(
        asked(kind="document", dimensions=3),
        model.embed(TEXTS, task="document", prompt_name="document", truncate_dim=3),
    )
    for items, options in (
        (TEXTS, {"route": "quary"}),
        (TEXTS, {"route": "document", "dimensions": 5}),
    ):
        with pytest.raises(PredictError):
            asked(items, **options)
    own: Any = load(apart(saved("roberta"), saved("distilbert")))
    assert (describe(own)["width"], embed(own, [[2, 9, 3]], {"route": "query"}, WorkerRequest())[1][0].shape) == (
        4,
        (1, 16),
    )
    found = embed(own, TEXTS, {"route": "query", "dimensions": 16}, WorkerRequest())[1][0]
    assert torch.equal(torch.from_numpy(found), own.embed(TEXTS, route="query"))
    unsaid: Any = load(behind(Path(model.source.folder), allow_empty_key=False))
    assert (describe(unsaid)["width"], warm_items(unsaid)[0]) == (6, "embed_all")


def test_the_command_takes_a_route(saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from flodl_hf.cli.app import app

    folder, source = behind(saved("bert")), tmp_path / "texts.txt"
    source.write_text("\n".join(TEXTS) + "\n")
    for route in ("query", "document"):
        given = [
            str(folder),
            "--in",
            str(source),
            "--out",
            str(tmp_path / f"{route}.npy"),
            "--route",
            route,
            "--device",
            "cpu",
        ]
        app(["encode", *given], standalone_mode=False)
    found = {route: np.load(tmp_path / f"{route}.npy") for route in ("query", "document")}
    model: Any = load(folder)
    assert {route: vectors.tolist() for route, vectors in found.items()} == {
        route: model.encode(TEXTS, route=route).tolist() for route in found
    }
    capsys.readouterr()


def test_routes_are_not_trained(saved: Saved) -> None:
    from flodl_hf import finetune

    pairs = [{"anchor": text, "positive": text + " cat"} for text in TEXTS]
    with pytest.raises(ConfigError, match=r"the folder has routes \(query, document\)"):
        finetune(behind(saved("bert")), train=pairs, task="embedding", devices="cpu", max_steps=1)
