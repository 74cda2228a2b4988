"""Folders with dense layers, prompts, SPLADE's, ColBERT's and bge-m3's files, each beside a forward written out here."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from typer.testing import CliRunner

from flodl.errors import ConfigError
from flodl_hf import load
from flodl_hf.cli.app import app
from flodl_hf.errors import PredictError
from flodl_hf.inference.similarity import max_sim

sys.path.insert(0, str(Path(__file__).parent))
from sentence_folders import ST, TEXTS, layer, modules, states_of, write

Saved = Callable[..., Path]
pytestmark = pytest.mark.filterwarnings("ignore:.*truncated")


@pytest.fixture
def dense(saved: Saved) -> Path:
    folder, two, three = saved("bert"), layer(6, 16), layer(4, 6, "linear.Identity", bias=False)
    chain = modules((ST + "Transformer", ""), (ST + "Pooling", "1_Pooling"), (ST + "Dense", "2_Dense"),
                    (ST + "Dense", "3_Dense"), (ST + "Normalize", "4_Normalize"))  # fmt: skip
    return write(folder, {
        "modules.json": chain, "1_Pooling/config.json": {"pooling_mode_mean_tokens": True},
        "2_Dense/config.json": two["config.json"], "2_Dense/model.safetensors": two["model.safetensors"],
        "3_Dense/config.json": three["config.json"], "3_Dense/model.safetensors": three["model.safetensors"],
        "config_sentence_transformers.json": {"prompts": {"query": "a cat: ", "none": ""}, "default_prompt_name": None},
    })  # fmt: skip


def test_dense_layers_follow_the_pooling(dense: Path) -> None:
    model: Any = load(dense)
    found = model.embed(TEXTS)
    two, three = layer(6, 16)["tensors"], layer(4, 6, bias=False)["tensors"]
    for vector, text in zip(found, TEXTS, strict=True):
        pooled = states_of(model, text).double().mean(0)
        middle = (two["linear.weight"].double() @ pooled + two["linear.bias"].double()).tanh()
        exact = torch.nn.functional.normalize(three["linear.weight"].double() @ middle, dim=0)
        torch.testing.assert_close(vector.double(), exact, rtol=0, atol=1e-6)
    assert found.shape == (3, 4)
    assert torch.equal(model.embed(TEXTS[0]), model.embed(TEXTS[:1])[0])
    assert model.embed([]).shape == (0, 4)
    assert model.embed(TEXTS, truncate_dim=2).shape == (3, 2)
    assert model.embed(TEXTS, pooling="cls").shape == (3, 16)
    torch.testing.assert_close(torch.stack(list(model.embed(iter(TEXTS)))), found)
    long = model.embed("the cat sat on the mat " * 12)
    assert long.norm().item() == pytest.approx(1, abs=1e-6)


def test_inspect_tells_how_texts_become_vectors(dense: Path, saved: Saved) -> None:
    from flodl_hf.cli.inspect import describe

    write(dense, {"sentence_bert_config.json": {"max_seq_length": 12, "do_lower_case": True}})
    assert describe(str(dense), "auto", {})["vectors"] == [
        "pooling: mean, scaled to length 1",
        "a dense layer to 6 features, Tanh",
        "a dense layer to 4 features, Identity",
        "at most 12 tokens: longer texts are truncated",
        "texts are lower-cased first",
        "prompts: 'query', 'none'",
    ]
    write(dense, {"config_sentence_transformers.json": {"truncate_dim": 3}})
    assert "the first 3 features are kept" in describe(str(dense), "auto", {})["vectors"]
    assert "vectors" not in describe(str(saved("bert", "sequence_classification")), "auto", {})


LONG = "the cat's programming friends sat on our unbelievable mats " * 4


@pytest.mark.parametrize("name", ["sentence_bert_config.json", "sentence_roberta_config.json"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_what_is_cut_is_cut_at_the_last_token_that_fits(name: str, side: str, saved: Saved) -> None:
    chain = modules((ST + "Transformer", ""), (ST + "Pooling", "1_Pooling"))
    folder = write(saved("bert"), {"modules.json": chain, "1_Pooling/config.json": {"pooling_mode_mean_tokens": True}})
    settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    # What the folder says holds over what its tokenizer says.
    write(folder, {"tokenizer_config.json": {**settings, "truncation_side": side, "model_max_length": 9}})
    for most in (7, 8, 11, 12, 13, 30):
        model: Any = load(write(folder, {name: {"max_seq_length": most}}))
        row = model.tokenizer([LONG], truncation=True, max_length=most, return_tensors="pt")["input_ids"]
        assert row.shape[1] == most
        with torch.no_grad():
            whole = model(row)[0][0].mean(0)
        for found in (model.encode(LONG), model.embed([LONG, "a dog"], normalize=False)[0].numpy()):
            torch.testing.assert_close(torch.from_numpy(found), whole, rtol=0, atol=1e-6)


def test_features_are_cut_as_the_folder_says_and_not_scaled_again(dense: Path) -> None:
    former: Any = load(dense)
    whole = former.encode(TEXTS, convert_to_tensor=True)
    write(dense, {"config_sentence_transformers.json": {"truncate_dim": 2}})
    model: Any = load(dense)
    assert torch.equal(model.encode(TEXTS, convert_to_tensor=True), whole[:, :2])
    assert torch.equal(model.encode(TEXTS, truncate_dim=3, convert_to_tensor=True), whole[:, :3])
    assert torch.equal(model.encode(TEXTS, truncate_dim=4, convert_to_tensor=True), whole)
    scaled = torch.nn.functional.normalize(whole[:, :2], dim=-1)
    for found in (model.encode(TEXTS, normalize_embeddings=True, convert_to_tensor=True), model.embed(TEXTS)):
        torch.testing.assert_close(found, scaled, rtol=0, atol=1e-6)
    assert model.embed([]).shape == (0, 2)
    assert model.embed_chunks(TEXTS[0], chunks=4).vectors.shape[1] == 2
    for wrong in (0, -1, "2", 2.0, True):
        write(dense, {"config_sentence_transformers.json": {"truncate_dim": wrong}})
        with pytest.raises(ConfigError, match="truncate_dim is"):
            load(dense)


def test_prompts_go_by_their_names(dense: Path) -> None:
    model: Any = load(dense)
    plain = model.embed(["a cat: " + text for text in TEXTS])
    assert torch.equal(model.embed(TEXTS, prompt_name="query"), plain)
    as_text = model.embed(["query" + text for text in TEXTS])
    for call in (model.encode, model.embed):
        with pytest.warns(UserWarning, match="prompt_name='query'"):
            assert torch.equal(torch.as_tensor(call(TEXTS, prompt="query")), as_text)
    assert torch.equal(model.embed(TEXTS, prompt="a cat: "), plain)
    assert torch.equal(torch.from_numpy(model.encode(TEXTS, prompt_name="query")), plain)
    assert not torch.equal(model.embed(TEXTS), plain)
    with pytest.raises(PredictError, match="'quary', did you mean 'query'"):
        model.encode(TEXTS, prompt_name="quary")
    with pytest.raises(ValueError):
        model.encode(["a", None], prompt_name="query")
    said = {"prompts": {"query": "a cat: "}, "default_prompt_name": "query"}
    again: Any = load(write(dense, {"config_sentence_transformers.json": said}))
    assert torch.equal(again.embed(TEXTS), plain)
    assert not torch.equal(again.embed(TEXTS, prompt=""), plain)
    write(dense, {"config_sentence_transformers.json": {"prompts": {"a": 1}}})
    with pytest.raises(ConfigError, match="prompts is"):
        load(dense)
    for usual in ("other", [], {}, ["query"], 3):
        write(dense, {"config_sentence_transformers.json": {**said, "default_prompt_name": usual}})
        with pytest.raises(ConfigError, match="default_prompt_name is"):
            load(dense)


def test_tokens_of_a_prompt_may_be_left_out_of_the_pooling(dense: Path) -> None:
    write(dense, {"1_Pooling/config.json": {"pooling_mode_mean_tokens": True, "include_prompt": False}})
    model: Any = load(dense)
    found = model.embed(TEXTS, prompt_name="query", pooling="mean", normalize=False)
    first = len(model.tokenizer("a cat: ")["input_ids"]) - 1
    for vector, text in zip(found, TEXTS, strict=True):
        torch.testing.assert_close(vector, states_of(model, "a cat: " + text)[first:].mean(0), rtol=0, atol=1e-6)
    assert model.embed(TEXTS, prompt_name="query").shape == (3, 4)


def test_such_folders_are_written_back(dense: Path, tmp_path: Path) -> None:
    model: Any = load(dense)
    out = model.save_pretrained(tmp_path / "out")
    names = [str(p.relative_to(dense)) for p in dense.rglob("*") if p.is_file()]
    assert [n for n in names if (dense / n).read_bytes() != (out / n).read_bytes()] == ["checksums.json"]
    # Where the transformer lay in a folder of its own, the small files are made anew.
    model.sentence_recipe = type(model.sentence_recipe)(**{**vars(model.sentence_recipe), "files": {}})
    again: Any = load(model.save_pretrained(tmp_path / "anew"))
    assert torch.equal(again.embed(TEXTS, prompt_name="query"), model.embed(TEXTS, prompt_name="query"))
    assert [m["type"].rpartition(".")[2] for m in json.loads((tmp_path / "anew" / "modules.json").read_text())] == [
        "Transformer", "Pooling", "Dense", "Dense", "Normalize",
    ]  # fmt: skip


@pytest.mark.parametrize("below", ["", "0_Transformer"])
def test_such_folders_of_bin_files_are_converted_whole(dense: Path, tmp_path: Path, below: str) -> None:
    expected = load(dense).embed(TEXTS)
    sparse = {"weight": torch.randn(1, 16), "bias": torch.randn(1)}
    torch.save(sparse, dense / "sparse_linear.pt")
    for file in [*dense.rglob("model.safetensors")]:
        torch.save(load_file(file), file.with_name("pytorch_model.bin"))
        file.unlink()
    if below:
        (dense / below).mkdir()
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "pytorch_model.bin"):
            (dense / name).rename(dense / below / name)
        said = json.loads((dense / "modules.json").read_text())
        said[0]["path"] = below
        write(dense, {"modules.json": said})
    done = CliRunner().invoke(app, ["convert", str(dense), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    names = {p.relative_to(dense).as_posix().replace("pytorch_model.bin", "model.safetensors"): p
             for p in dense.rglob("*") if p.is_file()}  # fmt: skip
    assert {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file()} == {
        *names
    }
    assert torch.equal(load(tmp_path / "out", verified=True).embed(TEXTS), expected)
    again = CliRunner().invoke(app, ["convert", str(dense), "--out", str(tmp_path / "out"), "--overwrite"])
    assert again.exit_code == 0, again.output


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"activation_function": "evil.Evil"}, "activation_function"),
        ({"activation_function": "torch.nn.modules.activation.PReLU"}, "activation_function"),
        ({"module_input_name": "mine"}, "module_input_name"),
        ({"use_residual": True}, "linear.bias"),  # of other sizes, without its tensor
        ({"out_features": 5}, "linear.bias"),
    ],
)
def test_a_dense_layer_that_is_not_understood_is_refused(dense: Path, change: dict[str, Any], key: str) -> None:
    write(dense, {"2_Dense/config.json": layer(6, 16)["config.json"] | change})
    with pytest.raises(ConfigError) as caught:
        load(dense)
    assert caught.value.details["where"] == str(dense / "2_Dense/config.json")
    assert caught.value.details["problems"][0] == key
    # Tensors may be of another release than their settings: one file alone does not repair that.
    assert ("Fetch the folder again" in caught.value.message) == (key == "linear.bias")


def test_absolute_folders_of_modules_are_read_below_a_relative_folder(
    dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load(dense).embed(TEXTS)  # type: ignore[attr-defined]
    chain = json.loads((dense / "modules.json").read_text())
    write(dense, {"modules.json": [{**module, "path": str(dense / module["path"])} for module in chain]})
    (dense.parent / "link").symlink_to(dense)
    monkeypatch.chdir(dense.parent)
    for folder in (dense, dense.name, "link"):
        assert torch.equal(load(folder).embed(TEXTS), expected)  # type: ignore[attr-defined]


# --- sparse vectors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "activation"), [("max", "relu"), ("sum", "relu"), ("max", "log1p_relu")])
def test_splade_is_the_logarithm_of_the_largest_scores(
    saved: Saved, tmp_path: Path, strategy: str, activation: str
) -> None:
    folder = saved("distilbert", "masked_lm")
    kind = "sentence_transformers.sparse_encoder.models."
    write(folder, {
        "modules.json": modules((kind + "MLMTransformer", ""), (kind + "SpladePooling", "1_SpladePooling")),
        "1_SpladePooling/config.json": {"pooling_strategy": strategy, "activation_function": activation},
    })  # fmt: skip
    model: Any = load(folder)
    found = model.embed_sparse(TEXTS)
    assert len(found) == 3
    for place, text in enumerate(TEXTS):
        encoded = model.tokenizer([text], return_tensors="pt")
        with torch.no_grad():
            weights = model(encoded["input_ids"]).logits[0].double().clamp(min=0).log1p()
        weights = weights.log1p() if activation == "log1p_relu" else weights
        exact = weights.amax(0) if strategy == "max" else weights.sum(0)
        torch.testing.assert_close(found.to_tensor().to_dense()[place].double(), exact, rtol=1e-5, atol=1e-5)
        assert list(found[place].values()) == sorted(found[place].values(), reverse=True)
    whole = found.to_tensor().to_dense()
    torch.testing.assert_close(found.similarity(found), whole @ whole.T)
    assert [len(row) for row in model.embed_sparse(TEXTS, most=2)] == [2, 2, 2]
    assert set(found.words(0)) <= set(model.tokenizer.convert_ids_to_tokens(list(range(found.size))))
    exactly = model.embed_sparse(TEXTS, precision="exact").to_tensor().to_dense()
    torch.testing.assert_close(exactly, whole, rtol=0, atol=1e-5)
    out = model.save_pretrained(tmp_path / "out")
    assert (out / "1_SpladePooling/config.json").read_bytes() == (folder / "1_SpladePooling/config.json").read_bytes()
    assert torch.equal(load(out).embed_sparse(TEXTS).to_tensor().to_dense(), whole)  # type: ignore[attr-defined]


def test_a_masked_word_model_makes_sparse_vectors_without_a_word_about_it(saved: Saved) -> None:
    model: Any = load(saved("bert", "masked_lm"))
    one = model.embed_sparse(TEXTS[0])
    assert len(one) == 1
    assert list(one[0]) == list(model.embed_sparse(TEXTS)[0])
    # Each word of a long text has its largest weight of all windows; without windows=True the text is truncated.
    text = "the cat sat on the mat " * 12
    whole = model.embed_sparse(text, windows=True).to_tensor().to_dense()[0]
    parts = model.embed_sparse([text, "the cat sat"], windows=True).to_tensor().to_dense()
    torch.testing.assert_close(parts[0], whole, rtol=0, atol=1e-5)
    with pytest.warns(UserWarning, match="truncated 1 of 2 texts"):
        first = model.embed_sparse([text, "the cat sat"]).to_tensor().to_dense()
    row = model.tokenizer(text, truncation=True, max_length=model.max_tokens)["input_ids"]
    kept = model.embed_sparse(model.tokenizer.decode(row[1:-1])).to_tensor().to_dense()[0]
    torch.testing.assert_close(first[0], kept, rtol=0, atol=1e-5)
    assert not torch.allclose(first[0], whole, atol=1e-3)
    with pytest.raises(PredictError, match="sparse_linear"):
        load(saved("bert")).embed_sparse(TEXTS)  # type: ignore[attr-defined]


def test_bge_m3s_layers_are_read_without_pickle(saved: Saved, tmp_path: Path) -> None:
    folder = saved("xlm-roberta")
    draw = torch.Generator().manual_seed(5)
    sparse = {"weight": torch.randn(1, 16, generator=draw), "bias": torch.randn(1, generator=draw)}
    colbert = {"weight": torch.randn(16, 16, generator=draw), "bias": torch.randn(16, generator=draw)}
    torch.save(sparse, folder / "sparse_linear.pt")
    torch.save(colbert, folder / "colbert_linear.pt")
    chain = modules((ST + "Transformer", ""), (ST + "Pooling", "1_Pooling"), (ST + "Normalize", "2_Normalize"))
    write(folder, {"modules.json": chain, "1_Pooling/config.json": {"pooling_mode_cls_token": True}})
    model: Any = load(folder)
    vectors, weights = model.embed_tokens(TEXTS), model.embed_sparse(TEXTS)
    special = set(model.tokenizer.all_special_ids)
    for place, text in enumerate(TEXTS):
        ids, states = model.tokenizer(text)["input_ids"], states_of(model, text).double()
        exact = torch.nn.functional.normalize(
            states[1:] @ colbert["weight"].double().T + colbert["bias"].double(), dim=-1
        )
        torch.testing.assert_close(vectors[place].double(), exact, rtol=0, atol=1e-5)
        own = (states @ sparse["weight"].double().T + sparse["bias"].double()).clamp(min=0)[:, 0].tolist()
        expected: dict[int, float] = {}
        for token, weight in zip(ids, own, strict=True):
            if token not in special and weight > 0:
                expected[token] = max(weight, expected.get(token, 0.0))
        assert weights[place] == pytest.approx(expected, abs=1e-5)
    out = model.save_pretrained(tmp_path / "out")
    for name in ("sparse_linear.pt", "colbert_linear.pt"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()
    assert model.save_pretrained(out, overwrite=True) == out
    # For other engines it makes vectors of texts all the same.
    from flodl_hf.export.traced import Traced

    given = model.tokenizer(TEXTS, padding=True, return_tensors="pt")
    found = Traced(model)(given["input_ids"], given["attention_mask"])["sentence_embedding"]
    torch.testing.assert_close(found, model.embed(TEXTS, precision="exact"), rtol=0, atol=1e-6)


# --- several vectors a text --------------------------------------------------------------------------


def colbert(folder: Path, *, attended: bool) -> Path:
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["HF_ColBERT"]}
    held = {f"bert.{name}": value for name, value in load_file(folder / "model.safetensors").items()}
    held["linear.weight"] = torch.randn(4, 16, generator=torch.Generator().manual_seed(2))
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    return write(folder, {
        "config.json": config,
        "artifact.metadata": {
            "query_token_id": "for", "doc_token_id": "in", "query_maxlen": 12, "doc_maxlen": 9, "dim": 4,
            "mask_punctuation": True, "attend_to_mask_tokens": attended, "similarity": "cosine",
        },
    })  # fmt: skip


@pytest.mark.parametrize("attended", [False, True])
def test_colberts_files_give_a_vector_a_token(saved: Saved, tmp_path: Path, attended: bool) -> None:
    folder = colbert(saved("bert"), attended=attended)
    model: Any = load(folder)
    weight = load_file(folder / "model.safetensors")["linear.weight"].double()
    to_id = model.tokenizer.convert_tokens_to_ids
    queries, documents = model.embed_tokens(TEXTS, query=True), model.embed_tokens(TEXTS)
    for place, text in enumerate(TEXTS):
        plain = model.tokenizer(text)["input_ids"]
        ids = [plain[0], to_id("for"), *plain[1:]]
        real, ids = len(ids), ids + [to_id("[MASK]")] * (12 - len(ids))
        mask = torch.ones(1, 12) if attended else (torch.arange(12)[None] < real).float()
        with torch.no_grad():
            states = model(torch.tensor([ids]), attention_mask=mask)[0][0].double()
        exact = torch.nn.functional.normalize(states @ weight.T, dim=-1)
        torch.testing.assert_close(queries[place].double(), exact, rtol=0, atol=1e-5)
        ids = [plain[0], to_id("in"), *(plain[1:] if len(plain) < 9 else [*plain[1:7], plain[-1]])]
        with torch.no_grad():
            states = model(torch.tensor([ids]))[0][0].double()
        kept = torch.tensor([token not in (to_id("."), to_id("!")) for token in ids])
        exact = torch.nn.functional.normalize(states @ weight.T, dim=-1)[kept]
        torch.testing.assert_close(documents[place].double(), exact, rtol=0, atol=1e-5)
    scores = max_sim(queries, documents)
    for i, query in enumerate(queries):
        for j, document in enumerate(documents):
            torch.testing.assert_close(scores[i, j], (query @ document.T).amax(1).sum())
    assert torch.equal(model.embed_tokens(TEXTS[0]), model.embed_tokens(TEXTS[:1])[0])
    assert model.embed_tokens([]) == []
    with pytest.raises(TypeError, match=r"'long_texts'.* expected one of precision"):
        model.embed_tokens(TEXTS, long_texts="error")
    out = model.save_pretrained(tmp_path / "out")
    for name in ("model.safetensors", "config.json", "artifact.metadata"):
        assert (out / name).read_bytes() == (folder / name).read_bytes(), name


def test_pylates_folders_give_the_same_vectors(saved: Saved, tmp_path: Path) -> None:
    folder = colbert(saved("bert"), attended=False)
    by_class: Any = load(folder)
    held = load_file(folder / "model.safetensors")
    weight = held.pop("linear.weight")
    save_file(
        {n.removeprefix("bert."): v for n, v in held.items()}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    (folder / "artifact.metadata").unlink()
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["BertModel"]}
    said = {
        "in_features": 16,
        "out_features": 4,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    write(folder, {
        "config.json": config,
        "modules.json": modules((ST + "Transformer", ""), ("pylate.models.Dense.Dense", "1_Dense")),
        "1_Dense/config.json": said, "1_Dense/model.safetensors": save({"linear.weight": weight}, {"format": "pt"}),
        "config_sentence_transformers.json": {
            "query_prefix": "for ", "document_prefix": "in ", "query_length": 12, "document_length": 9,
            "attend_to_expansion_tokens": False, "skiplist_words": list(".!,?"),
        },
    })  # fmt: skip
    model: Any = load(folder)
    for query in (True, False):
        for mine, other in zip(
            model.embed_tokens(TEXTS, query=query), by_class.embed_tokens(TEXTS, query=query), strict=True
        ):
            assert torch.equal(mine, other)
    out = model.save_pretrained(tmp_path / "out")
    for path in folder.rglob("*"):
        if path.is_file() and path.name != "checksums.json":
            assert (out / path.relative_to(folder)).read_bytes() == path.read_bytes(), path.name
    write(folder, {"config_sentence_transformers.json": {"query_prefix": "[Q] "}})
    with pytest.raises(PredictError, match=r"no token '\[Q\] '"):
        load(folder).embed_tokens("a cat", query=True)  # type: ignore[attr-defined]


def test_multivector_encoders_folders_give_the_same_vectors(saved: Saved, tmp_path: Path) -> None:
    folder = colbert(saved("bert"), attended=False)
    by_class: Any = load(folder)
    held = load_file(folder / "model.safetensors")
    weight = held.pop("linear.weight")
    save_file(
        {n.removeprefix("bert."): v for n, v in held.items()}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    (folder / "artifact.metadata").unlink()
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["BertModel"]}
    tokens = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    base = "sentence_transformers.base.modules."
    chain = modules(
        (base + "transformer.Transformer", ""), (base + "dense.Dense", "1_Dense"),
        ("sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask", "2_MultiVectorMask"),
        (base + "normalize.Normalize", "3_Normalize"),
    )  # fmt: skip
    dense = {"in_features": 16, "out_features": 4, "bias": False,
             "activation_function": "torch.nn.modules.linear.Identity", **tokens}  # fmt: skip
    expansion = {"strategy": "fixed", "attend": False, "token": None, "length": 12}
    mask = {"skiplist_words": list(".!,?"), "skiplist_tasks": ["document"], "keep_only_token_ids": None}
    write(folder, {
        "config.json": config, "modules.json": chain, "1_Dense/config.json": dense,
        "1_Dense/model.safetensors": save({"linear.weight": weight}, {"format": "pt"}),
        "2_MultiVectorMask/config.json": mask, "3_Normalize/config.json": tokens,
        "config_sentence_transformers.json": {
            "model_type": "MultiVectorEncoder", "prompts": {"query": "for ", "document": "in "},
            "default_prompt_name": None, "similarity_fn_name": None,
        },
        "sentence_bert_config.json": {"document_length": 9, "query_expansion": expansion},
    })  # fmt: skip
    model: Any = load(folder)
    for query in (True, False):
        for mine, other in zip(
            model.embed_tokens(TEXTS, query=query), by_class.embed_tokens(TEXTS, query=query), strict=True
        ):
            assert torch.equal(mine, other)
    out = model.save_pretrained(tmp_path / "out")
    for path in folder.rglob("*"):
        if path.is_file() and path.name != "checksums.json":
            assert (out / path.relative_to(folder)).read_bytes() == path.read_bytes(), path.name
    for name, changed in (
        ("sentence_bert_config.json", {"query_expansion": {"strategy": "minimum", "length": 12}}),
        ("2_MultiVectorMask/config.json", {**mask, "skiplist_tasks": ["query", "document"]}),
        ("2_MultiVectorMask/config.json", {**mask, "keep_only_token_ids": [3]}),
    ):
        kept = (folder / name).read_bytes()
        write(folder, {name: changed})
        with pytest.raises(ConfigError) as caught:
            load(folder)
        assert set(caught.value.problems) <= {"query_expansion", "skiplist_tasks", "keep_only_token_ids"}
        write(folder, {name: kept})
    write(folder, {"modules.json": chain[:3]})
    with pytest.raises(ConfigError, match="MultiVectorMask and Normalize"):
        load(folder)


def test_plain_folders_have_no_vectors_of_tokens(saved: Saved) -> None:
    with pytest.raises(PredictError, match="token vectors"):
        load(saved("bert")).embed_tokens("a cat")  # type: ignore[attr-defined]
    with pytest.raises(PredictError, match="sizes"):
        max_sim([torch.ones(2, 3)], [torch.ones(2, 4)])
    assert max_sim([torch.ones(2, 3)], [torch.ones(0, 3)]).tolist() == [[float("-inf")]]
