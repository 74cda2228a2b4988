"""What people know from transformers' models: embeddings in and out, attention weights, sizes, freezing, the Hub."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import EvalResultEntry, ModelCard, parse_eval_result_entries

from flodl.errors import ConfigError
from flodl_hf import load
from flodl_hf.errors import HubError, PredictError
from flodl_hf.families import FAMILIES

Maker = Callable[..., Any]
Saved = Callable[..., Path]
HEADS = {
    "base": "Model", "sequence_classification": "ForSequenceClassification",
    "token_classification": "ForTokenClassification", "question_answering": "ForQuestionAnswering",
    "masked_lm": "ForMaskedLM",
}  # fmt: skip
PREFIX = {family.model_type: family.class_prefix for family in FAMILIES}
CELLS = [(f.model_type, head) for f in FAMILIES for head in HEADS if head == "base" or head in f.heads]
families = pytest.mark.parametrize("family", PREFIX)
cells = pytest.mark.parametrize(("family", "head"), CELLS)
TEXTS = ["ada lives in paris", "the cat"]


def batch(model: Any) -> dict[str, torch.Tensor]:
    encoded = model.tokenizer(TEXTS, padding=True, return_tensors="pt")
    names = ["input_ids", "attention_mask"] + ["token_type_ids"] * model.config.uses_token_types
    return {name: encoded[name] for name in names if name in encoded}


def reference(folder: Path, family: str, head: str, attention: str = "eager") -> Any:
    transformers = pytest.importorskip("transformers")
    from flodl_hf.parity.reference import load_reference

    if family not in transformers.CONFIG_MAPPING:
        pytest.skip("transformers has no such family")

    model = load(folder)
    pooler = getattr(model, "has_pooler", True)
    return load_reference(folder, PREFIX[family] + HEADS[head], attention=attention, pooler=bool(pooler)).model


@pytest.mark.transformers
@families
def test_states_of_all_layers_are_those_of_transformers(family: str, saved: Saved) -> None:
    folder = saved(family, "base")
    ours: Any = load(folder, attention="eager")
    theirs = reference(folder, family, "base")
    inputs = batch(ours)
    with torch.no_grad():
        found = ours(**inputs, output_hidden_states=True).hidden_states
        expected = theirs(**inputs, output_hidden_states=True).hidden_states
    real = inputs["attention_mask"].bool()
    assert len(found) == len(expected) == ours.config.encoder.num_layers + 1
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a[real], b[real], atol=1e-5, rtol=1e-4)


@pytest.mark.transformers
@cells
def test_attentions_hidden_states_and_sizes_are_those_of_transformers(family: str, head: str, saved: Saved) -> None:
    folder = saved(family, head)
    ours: Any = load(folder, attention="eager")
    theirs = reference(folder, family, head)
    inputs = batch(ours)
    with torch.no_grad():
        found = ours(**inputs, output_attentions=True)
        expected = theirs(**inputs, output_attentions=True)
    # An encoder has no other text to look at; some classes of theirs give an empty tuple for that.
    assert list(found.keys()) == [name for name in expected if name != "cross_attentions"]
    assert len(found.attentions) == ours.config.encoder.num_layers
    real = inputs["attention_mask"].bool()
    for a, b in zip(found.attentions, expected.attentions, strict=True):
        assert a.shape == b.shape
        a, b = (x.permute(0, 2, 1, 3)[real] for x in (a, b))
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    # What is kept beside a model here is a part of theirs, be it used or not.
    kept = {entry.name for entry in ours.config.family.kept}
    prefix = ours.config.family.base_prefix + "."
    beside = [p for name, p in theirs.named_parameters() if {name, prefix + name} & kept]
    tables = {id(m.weight) for m in theirs.modules() if isinstance(m, torch.nn.Embedding)}
    for only_trainable in (False, True):
        # Where the head comes first, theirs finds its tied table under a name that is no embedding's.
        for exclude in (False, True) if head != "masked_lm" else (False,):
            counted = [p for p in beside if p.requires_grad or not only_trainable]
            found = ours.num_parameters(only_trainable, exclude)
            found += sum(p.numel() for p in counted if not (exclude and id(p) in tables))
            assert found == theirs.num_parameters(only_trainable, exclude)
    assert ours.get_input_embeddings().weight.equal(theirs.get_input_embeddings().weight)


@pytest.mark.transformers
@cells
def test_embeddings_in_place_of_ids(family: str, head: str, saved: Saved) -> None:
    folder = saved(family, head)
    ours: Any = load(folder)
    inputs = batch(ours)
    ids = inputs.pop("input_ids")
    with torch.no_grad():
        embeds = ours.get_input_embeddings()(ids) + 0.1
        found = ours(inputs_embeds=embeds, **inputs, output_hidden_states=True)
        theirs = reference(folder, family, head, "sdpa")
        expected = theirs(inputs_embeds=embeds, **inputs)
    real = inputs["attention_mask"].bool()
    name = next(n for n in ("last_hidden_state", "logits", "start_logits") if n in found.keys())  # noqa: SIM118
    a, b = found[name], expected[name]
    if head != "sequence_classification":
        a, b = a[real], b[real]
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert len(found.hidden_states) == ours.config.encoder.num_layers + 1
    # The table is as it was, and the gradient reaches what was given.
    embeds.requires_grad_(True)
    ours(inputs_embeds=embeds, **inputs)[name].square().sum().backward()  # plain sums after a norm are constant
    assert embeds.grad is not None
    assert bool((embeds.grad[real] != 0).any())
    with torch.no_grad():
        assert torch.equal(ours(ids, **inputs)[name], ours(ids, **inputs)[name])


def test_ids_or_embeddings_and_of_the_right_shape(make: Maker) -> None:
    model = make("bert", "base")
    ids = torch.tensor([[2, 5, 3]])
    for given in ({}, {"input_ids": ids, "inputs_embeds": torch.zeros(1, 3, 16)}):
        with pytest.raises(PredictError, match="either input_ids or inputs_embeds"):
            model(**given)
    for shape in ((3, 16), (1, 3, 15)):
        with pytest.raises(PredictError, match=r"expected \(batch, seq, 16\)"):
            model(inputs_embeds=torch.zeros(shape))


def test_weights_that_a_kernel_never_has_are_refused(make: Maker) -> None:
    model = make("bert", "base")
    with pytest.raises(PredictError, match=r'set_attention\("eager"\)'):
        model(torch.tensor([[2, 5, 3]]), output_attentions=True)
    model.set_attention("eager")
    assert len(model(torch.tensor([[2, 5, 3]]), output_attentions=True).attentions) == 2
    assert model(torch.tensor([[2, 5, 3]])).attentions is None
    assert (
        len(model(torch.tensor([[2, 5, 3]]), output_attentions=True, return_dict=False))
        == len(model(torch.tensor([[2, 5, 3]]), return_dict=False)) + 1
    )


# --- words -------------------------------------------------------------------------------------------


@cells
@pytest.mark.parametrize("change", [5, -3])
def test_a_resized_table_is_saved_and_loaded(family: str, head: str, change: int, saved: Saved, tmp_path: Path) -> None:
    if (family, head) == ("esm", "masked_lm"):
        pytest.skip("the bias of its word scores stands alone and keeps its rows, as in transformers")
    folder = saved(family, head)
    model: Any = load(folder)
    table = model.get_input_embeddings()
    old, before = table.num_embeddings, table.weight.detach().clone()
    inputs = batch(model)
    tied = head == "masked_lm" and model.graph.get_parameter("head.decoder.weight") is table.weight
    with torch.no_grad():
        first = model(**inputs)
    assert model.resize_token_embeddings(old + change) is table
    kept = min(old, old + change)
    assert table.num_embeddings == len(table.weight) == model.config.vocab_size == old + change
    assert torch.equal(table.weight[:kept], before[:kept])
    for row in table.weight[kept:]:
        torch.testing.assert_close(row, before.mean(0))
    if head == "masked_lm":
        decoder = model.graph.get_submodule("head.decoder")
        assert (decoder.weight is table.weight) == tied
        assert {len(parameter) for parameter in decoder.parameters()} == {old + change}
    if change < 0:
        model.tokenizer = None  # it has more tokens than the table now
        inputs["input_ids"] = inputs["input_ids"].clamp(max=kept - 1)
        with torch.no_grad():
            first = model(**inputs)
    model.save_pretrained(tmp_path / "resized")
    assert json.loads((tmp_path / "resized" / "config.json").read_text())["vocab_size"] == old + change
    again: Any = load(tmp_path / "resized")
    name = list(first.keys())[0]  # noqa: RUF015
    with torch.no_grad():
        found, expected = again(**inputs)[name], first[name]
    if head == "masked_lm":
        found, expected = found[..., :kept], expected[..., :kept]
    torch.testing.assert_close(found, expected)
    if change > 0:
        with torch.no_grad():
            again(torch.full((1, 3), old + change - 1))
        assert again.tokenizer is not None


def test_rows_are_rounded_up_and_drawn_at_random(make: Maker) -> None:
    model = make("bert", "masked_lm")
    old = model.get_input_embeddings().num_embeddings
    model.resize_token_embeddings(pad_to_multiple_of=64)
    assert model.config.vocab_size == -(-old // 64) * 64
    predicted = model.fill_mask("ada [MASK] in", untrained=True)
    assert len(predicted[0]) == 5
    model.resize_token_embeddings(200, mean_resizing=False)
    more = model.get_input_embeddings().weight[128:].detach()
    assert more.std() == pytest.approx(0.02, rel=0.2)
    with pytest.raises(ConfigError, match="0 tokens"):
        model.resize_token_embeddings(0)


def test_another_table_of_words_takes_the_tie_along(make: Maker) -> None:
    model = make("bert", "masked_lm")
    table = torch.nn.Embedding(model.get_input_embeddings().num_embeddings, 16)
    model.set_input_embeddings(table)
    assert torch.equal(model.get_input_embeddings().weight, table.weight)
    assert model.graph.get_parameter("head.decoder.weight") is model.get_input_embeddings().weight
    with pytest.raises(ConfigError, match=r"\(3, 16\)"):
        model.set_input_embeddings(torch.nn.Embedding(3, 16))


# --- training ----------------------------------------------------------------------------------------


def test_parts_are_frozen_by_path(make: Maker) -> None:
    model = make("bert", "sequence_classification", num_hidden_layers=4)
    assert model.freeze("layers.0-2", "embeddings") is model
    learning = {name for name, p in model.graph.named_parameters() if p.requires_grad}
    assert {name.split(".")[2] for name in learning if name.startswith("encoder.layers")} == {"3"}
    assert not any("embeddings" in name for name in learning)
    model.unfreeze("layers.2")
    assert model.num_parameters(only_trainable=True) < model.num_parameters()
    assert all(p.requires_grad for p in model.graph.get_submodule("encoder.layers.2").parameters())
    with pytest.raises(ConfigError, match=r"layers\.9"):
        model.freeze("head", "layers.9")
    for wrong, said in (
        ("layers.0-40", r"at layers\.0-40; there are layers\.0-3\."),
        ("layers.9-40.attention", r"at layers\.9-40\.attention; there are layers\.0-3\.attention\."),
        ("layers.2-1", r"at layers\.2-1 ends before it begins; there are layers\.0-3\."),
        ("layers.0-1.atention", r"at layers\.0-1\.atention has no numbered parts under layers"),
        ("blocks.0-1", r"at blocks\.0-1 has no numbered parts under blocks\."),
    ):
        with pytest.raises(ConfigError, match=said):
            model.freeze("head", wrong)
    assert all(p.requires_grad for p in model.graph.get_submodule("head").parameters())
    model.freeze()
    assert model.num_parameters(only_trainable=True) == 0
    assert model.unfreeze().num_parameters(only_trainable=True) == model.num_parameters()


# --- being looked at ---------------------------------------------------------------------------------


@cells
def test_a_model_says_in_a_line_what_it_is(family: str, head: str, saved: Saved) -> None:
    folder = saved(family, head)
    model = load(folder)
    said = repr(model)
    assert len(said.splitlines()) == 1
    assert len(said) < 250 + len(str(folder))
    assert f"({family})" in said
    assert "2 of width 16" in said
    assert "float32" in said
    assert str(folder) in said
    assert "kB" in said
    assert str(folder) in model._repr_html_()
    assert "<svg" in model.graph._repr_html_()
    assert len(repr(model.source)) < 120 + 2 * len(str(folder))


@cells
def test_inspect_shows_layers_width_parameters_and_size(family: str, head: str, saved: Saved) -> None:
    pytest.importorskip("typer")
    from flodl_hf.cli.inspect import describe

    folder = saved(family, head)
    facts, model = describe(str(folder), "auto", {}), load(folder)
    assert (facts["layers"], facts["width"], facts["heads"]) == (2, 16, 2)
    assert facts["parameters"] == model.num_parameters()
    assert facts["vocabulary"] == model.config.vocab_size
    assert facts["size"].endswith(" kB")
    assert float(facts["size"].split()[0]) == pytest.approx(facts["bytes"] / 1000, abs=0.06)


# --- the Hub -----------------------------------------------------------------------------------------


class Repository:
    """A Hub on the loopback interface that takes one commit."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.files: dict[str, bytes] = {}
        self.message = ""
        self.status = 200
        self.token: str | None = None
        self.tokens: set[str | None] = set()
        self.storage: str | None = None  # the server that takes weights, and checks them
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                path = self.path.split("?")[0]
                hub.requests.append(path)
                hub.token = self.headers.get("Authorization")
                hub.tokens.add(hub.token)
                answer: Any = {}
                if path == "/api/repos/create":
                    answer = {"url": f"{hub.url}/ada/tiny"}
                elif path.endswith("/info/lfs/objects/batch"):
                    steps = {name: {"href": f"{hub.storage}/{name}"} for name in ("upload", "verify")}
                    answer = {"objects": [{**each, "actions": steps} for each in json.loads(body)["objects"]]}
                elif path.endswith("/preupload/main"):
                    files = json.loads(body)["files"]
                    apart = ".safetensors" if hub.storage else "nothing"
                    modes = {f["path"]: "lfs" if f["path"].endswith(apart) else "regular" for f in files}
                    answer = {
                        "files": [{"path": p, "uploadMode": mode, "shouldIgnore": False} for p, mode in modes.items()]
                    }
                elif path.endswith("/commit/main"):
                    for line in body.decode().splitlines():
                        entry = json.loads(line)
                        if entry["key"] == "header":
                            hub.message = entry["value"]["summary"]
                        elif entry["key"] == "file":
                            hub.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
                    answer = {"commitUrl": f"{hub.url}/ada/tiny/commit/abc", "commitOid": "abc"}
                text = json.dumps(answer).encode()
                self.send_response(hub.status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def do_GET(self) -> None:
                hub.requests.append(self.path)
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_PUT = do_POST

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()


@pytest.fixture
def repository(monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    hub = Repository()
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


def test_what_is_pushed_is_what_is_saved(make: Maker, repository: Repository, tmp_path: Path) -> None:
    model = make("bert", "sequence_classification")
    address = model.push_to_hub("ada/tiny", commit_message="first", token="hf_test")
    assert address == f"{repository.url}/ada/tiny/commit/abc"
    assert repository.message == "first"
    assert repository.token == "Bearer hf_test"
    folder = model.save_pretrained(tmp_path / "saved")
    written = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    card = repository.files.pop("README.md").decode()
    # The card is in the list of checksums.
    assert repository.files.keys() == written.keys()
    assert [name for name, data in written.items() if repository.files[name] != data] == ["checksums.json"]
    again: Any = load(folder)
    assert again.num_parameters() == model.num_parameters()
    head = ModelCard(card).data.to_dict()
    assert head == {
        "library_name": "transformers", "pipeline_tag": "text-classification", "tags": ["flodl-hf"],
    }  # fmt: skip


def test_pushed_metadata_and_results(make: Maker, repository: Repository, tmp_path: Path) -> None:
    folder = make("bert", "sequence_classification").save_pretrained(tmp_path / "saved")
    model: Any = load(folder)
    model.source.name, model.source.commit = "ada/base", "1" * 40
    text = "---\nlicense: mit\npipeline_tag: text-ranking\n---\n# A ranker\n"
    result = {"dataset_id": "ada/bench", "task_id": "default", "value": 0.5, "dataset_revision": "2" * 40}
    model.push_to_hub("ada/tiny", token="hf_test", card=text, results=[result])
    card = ModelCard(repository.files["README.md"].decode())
    assert card.text.strip() == "# A ranker"
    assert card.data.to_dict() == {
        "license": "mit", "pipeline_tag": "text-ranking", "library_name": "transformers", "base_model": "ada/base",
        "base_model_revision": "1" * 40, "tags": ["flodl-hf"],
    }  # fmt: skip
    (entry,) = parse_eval_result_entries(yaml.safe_load(repository.files[".eval_results/flodl-hf.yaml"]))
    assert entry == EvalResultEntry(**result)
    sent = len(repository.requests)
    for wrong in ({**result, "dataset_revision": "main"}, {"dataset_id": "ada/bench"}, {**result, "score": 1}):
        with pytest.raises(HubError):
            model.push_to_hub("ada/tiny", token="hf_test", results=[wrong])
    assert len(repository.requests) == sent


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of the client
def test_a_token_is_not_sent_where_an_answer_has_weights_put(
    make: Maker, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True, raising=False)  # which asks the endpoint alone
    storage = Repository()
    try:
        repository.storage = storage.url
        model = make("bert", "sequence_classification")
        # several files, which the client uploads in threads of its own
        model.push_to_hub("ada/tiny", token="hf_test", max_shard_size="10KB")
        assert storage.requests.count("/upload") == storage.requests.count("/verify") > 1
        assert (repository.tokens, storage.tokens) == ({"Bearer hf_test"}, {None})
        storage.status = 403
        with pytest.raises(HubError, match=r"ada/tiny: nothing was uploaded .*model-0000.*: .*403"):
            model.push_to_hub("ada/tiny", token="hf_test", max_shard_size="10KB")
    finally:
        storage.server.shutdown()
        storage.server.server_close()


def test_a_hub_that_refuses_is_one_error(make: Maker, repository: Repository) -> None:
    repository.status = 403
    with pytest.raises(HubError, match="ada/tiny: nothing was uploaded"):
        make("bert", "base").push_to_hub("ada/tiny", token="hf_test")
