"""Folders as sentence-transformers writes them give its numbers, and are written back as they were.

The expected numbers are those of sentence-transformers 6.2 for the folders that `folder_of` makes;
`test_the_numbers_are_those_of_sentence_transformers` computes them again where the library is installed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from flodl.errors import ConfigError
from flodl_hf import load

sys.path.insert(0, str(Path(__file__).parent))
from sentence_folders import layer, modules, write

Saved = Callable[..., Path]
GOLDEN = Path(__file__).parents[2] / "golden" / "sentence_transformers.json"
TEXTS = ["the cat sat on the mat", "ada lives in paris. Good film!", "a dog"]
PAIRS = [("the cat sat", "a dog ran on the mat"), ("ada lives", "in paris"), ("good film", "a")]
BASE, VECTORS = "sentence_transformers.base.modules.", "sentence_transformers.sentence_transformer.modules."
SPARSE = "sentence_transformers.sparse_encoder.modules.splade_pooling.SpladePooling"
MASK = "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask"
TORCH = "torch.nn.modules.activation."
MEAN = {"embedding_dimension": 16, "pooling_mode": "mean", "include_prompt": True}
SAID, BOUNDS = "config_sentence_transformers.json", "sentence_bert_config.json"


def dense(out: int, size: int, *, bias: Any = True, **settings: Any) -> dict[str, Any]:
    found = layer(out, size, "linear.Identity", bias=bias)
    return {"config.json": found["config.json"] | settings, "model.safetensors": found["model.safetensors"]}


def drawn(name: str, settings: dict[str, Any], **shapes: tuple[int, ...]) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(7)
    tensors = {key.replace("__", "."): torch.rand(shape, generator=draw) + 0.5 for key, shape in shapes.items()}
    return {name: settings, "model.safetensors": save(tensors, {"format": "pt"})}


def chained(*parts: tuple[str, dict[str, Any]], **files: Any) -> dict[str, Any]:
    """Return the files of a folder of a transformer and these modules."""
    places = [(BASE + "transformer.Transformer", "")]
    found: dict[str, Any] = {}
    for place, (kind, own) in enumerate(parts, 1):
        path = f"{place}_{kind.rpartition('.')[2]}"
        places.append((kind, path))
        found |= {f"{path}/{name}": value for name, value in own.items()}
    named = {"said": SAID, "bounds": BOUNDS, "config": "config.json"}
    return {"modules.json": modules(*places), **found, **{named[key]: value for key, value in files.items()}}


def output(name: Any, of: str = "token_embeddings", task: str = "feature-extraction") -> dict[str, Any]:
    text = {"method": "forward", "method_output_name": name}
    return {"transformer_task": task, "modality_config": {"text": text}, "module_output_name": of}


def ranker(activation: str | None, **more: Any) -> dict[str, Any]:
    said = {"model_type": "CrossEncoder", "prompts": {}, "default_prompt_name": None, "activation_fn": activation}
    return chained(said=said | more, bounds=output("logits", "scores", "sequence-classification"))


POOLING = (VECTORS + "pooling.Pooling", {"config.json": MEAN})
POOLED = [POOLING, (BASE + "dense.Dense", dense(1, 16, module_output_name="scores"))]
NORMALIZE = (BASE + "normalize.Normalize", {"config.json": {"module_input_name": "sentence_embedding"}})
OF_TOKENS = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
PROMPTS = {"prompts": {"query": "good film: ", "document": "a cat: "}, "default_prompt_name": "query"}
SPLADE = {"config.json": {"pooling_strategy": "max", "activation_function": "relu", "embedding_dimension": None}}
CNN = {"in_embedding_dimension": 16, "out_channels": 4, "kernel_sizes": [1, 3], "stride_sizes": [1, 1]}
CONVOLUTIONS = {
    "convs__0__weight": (4, 16, 1), "convs__0__bias": (4,), "convs__1__weight": (4, 16, 3), "convs__1__bias": (4,),
}  # fmt: skip

# By name: the head of the folder, its files, and the method of sentence-transformers with its keywords.
CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "tanh": ("one", ranker(TORCH + "Tanh"), "predict", {}),
    "softplus": ("one", ranker(TORCH + "Softplus"), "predict", {}),
    "default activation": ("one", ranker(None), "predict", {}),
    "three labels": ("three", ranker("torch.nn.modules.linear.Identity"), "predict", {}),
    "three labels, softmax": ("three", ranker(TORCH + "Softmax"), "predict", {}),
    "default prompt": ("one", ranker(TORCH + "Sigmoid", **PROMPTS), "predict", {}),
    "named prompt": ("one", ranker(TORCH + "Sigmoid", **PROMPTS), "predict", {"prompt_name": "document"}),
    "pooled scores": (
        "base", chained(*POOLED, said={"model_type": "CrossEncoder", "activation_fn": TORCH + "Tanh"}), "predict", {},
    ),
    "residual": (
        "base", chained(POOLING, (BASE + "dense.Dense", dense(16, 16, use_residual=True, activation_function=TORCH + "Mish"))),
        "encode", {},
    ),
    "layer norm": (
        "base", chained(
            POOLING, (VECTORS + "layer_norm.LayerNorm", drawn("config.json", {"dimension": 16}, norm__weight=(16,), norm__bias=(16,))),
            (VECTORS + "dropout.Dropout", {"config.json": {"dropout": 0.5}}), NORMALIZE, (BASE + "dense.Dense", dense(5, 16)),
        ), "encode", {},
    ),
    "layer weights": (
        "base", chained(
            (VECTORS + "weighted_layer_pooling.WeightedLayerPooling", drawn(
                "config.json", {"embedding_dimension": 16, "layer_start": 1, "num_hidden_layers": 2}, layer_weights=(2,))),
            POOLING, bounds={"config_kwargs": {"output_hidden_states": True}},
        ), "encode", {},
    ),
    "cnn": (
        "base", chained((VECTORS + "cnn.CNN", drawn("cnn_config.json", CNN, **CONVOLUTIONS)),
                        (POOLING[0], {"config.json": MEAN | {"embedding_dimension": 8}})), "encode", {"batch_size": 1},
    ),
    "dense of tokens": (
        "base", chained((BASE + "dense.Dense", dense(6, 16, activation_function=TORCH + "Tanh", **OF_TOKENS)),
                        (POOLING[0], {"config.json": MEAN | {"embedding_dimension": 6, "pooling_mode": ["cls", "max"]}})), "encode", {},
    ),
    "pooler": ("base", chained(NORMALIZE, bounds=output("pooler_output", "sentence_embedding")), "encode", {}),
    "hidden state": ("base", chained(POOLING, bounds=output(["hidden_states", -2])), "encode", {}),
    "length of a call": ("base", chained(POOLING, bounds={"processing_kwargs": {"text": {"max_length": 6}}}), "encode", {}),
    "side of a tokenizer": (
        "base", chained(POOLING, bounds={"processor_kwargs": {"truncation_side": "left", "model_max_length": 6}}), "encode", {},
    ),
    "old name of a setting": ("base", chained(POOLING, bounds={"tokenizer_args": {"model_max_length": 7}}), "encode", {}),
    "value of config.json": ("base", chained(POOLING, bounds={"config_args": {"hidden_act": "relu"}}), "encode", {}),
    "sparse": ("words", chained((SPARSE, SPLADE), bounds=output("logits", task="fill-mask"), said={"model_type": "SparseEncoder"}), "sparse", {}),
    "sparse, prompts": (
        "words", chained((SPARSE, SPLADE), bounds=output("logits", task="fill-mask"),
                         said={"model_type": "SparseEncoder", **PROMPTS, "max_active_dims": 4}), "sparse", {},
    ),
    "sparse document": (
        "words", chained((SPARSE, SPLADE), bounds=output("logits", task="fill-mask"), said={"model_type": "SparseEncoder", **PROMPTS}),
        "sparse document", {},
    ),
    "tokens, text prompt": (
        "base", chained(
            (BASE + "dense.Dense", dense(4, 16, bias=False, **OF_TOKENS)),
            (MASK, {"config.json": {"skiplist_words": [".", "!"], "skiplist_tasks": ["document"], "keep_only_token_ids": None}}),
            (BASE + "normalize.Normalize", {"config.json": OF_TOKENS}),
            said={"model_type": "MultiVectorEncoder", **PROMPTS, "default_prompt_name": None}, bounds={"document_length": 14},
        ), "tokens", {},
    ),
}  # fmt: skip
HEADS = {
    "base": ("base", {}), "one": ("sequence_classification", {"num_labels": 1}), "words": ("masked_lm", {}),
    "three": ("sequence_classification", {"num_labels": 3}),
}  # fmt: skip


def folder_of(name: str, saved: Saved) -> Path:
    head, settings = HEADS[CASES[name][0]]
    return write(saved("bert", head, **settings), CASES[name][1])


def answer(model: Any, method: str, given: dict[str, Any]) -> Any:
    """Return what this package computes, as sentence-transformers returns it."""
    if method == "predict":
        found = [{one.label: one.score for one in labels} for labels in model.predict(PAIRS, **given)]
        rows = torch.tensor([[scores[label] for label in model.config.labels] for scores in found])
        return rows[:, 0] if rows.shape[1] == 1 else rows
    if method == "tokens":
        return torch.cat(model.embed_tokens(TEXTS))
    if method == "sparse document":
        return model.encode_document(TEXTS, convert_to_sparse_tensor=False)
    return model.encode(
        TEXTS, **({"convert_to_sparse_tensor": False} if method == "sparse" else {"convert_to_tensor": True}), **given
    )


@pytest.mark.filterwarnings("ignore:.*truncated")
@pytest.mark.parametrize("name", CASES)
def test_a_folder_gives_these_numbers_and_is_written_back(name: str, saved: Saved, tmp_path: Path) -> None:
    folder = folder_of(name, saved)
    expected = torch.tensor(json.loads(GOLDEN.read_text("utf-8"))[name])
    _, files, method, given = CASES[name]
    model = load(folder)
    torch.testing.assert_close(answer(model, method, given), expected, rtol=0, atol=1e-5)
    out = model.save_pretrained(tmp_path / "out")
    for file in files:
        if (folder / file).exists():
            assert (out / file).read_bytes() == (folder / file).read_bytes(), file
    torch.testing.assert_close(answer(load(out), method, given), expected, rtol=0, atol=1e-5)
    # Files that are made anew, as of a transformer in a folder of its own, specify the same.
    recipe: Any = model.sentence_recipe
    if recipe.late is None:
        model.sentence_recipe = type(recipe)(**{**vars(recipe), "files": {}})
        anew = load(model.save_pretrained(tmp_path / "anew"))
        torch.testing.assert_close(answer(anew, method, given), expected, rtol=0, atol=1e-5)


def theirs(folder: Path, method: str, given: dict[str, Any]) -> Any:
    """Return what sentence-transformers computes."""
    library = pytest.importorskip("sentence_transformers")
    if method == "predict":
        return torch.as_tensor(library.CrossEncoder(str(folder), device="cpu").predict(PAIRS, batch_size=1, **given))
    if method == "tokens":
        found = library.MultiVectorEncoder(str(folder), device="cpu").encode_document(TEXTS, batch_size=1)
        return torch.cat([torch.as_tensor(one) for one in found])
    if method.startswith("sparse"):
        model = library.SparseEncoder(str(folder), device="cpu")
        encode = model.encode_document if method == "sparse document" else model.encode
        return encode(TEXTS, convert_to_sparse_tensor=False, batch_size=1)
    return library.SentenceTransformer(str(folder), device="cpu").encode(TEXTS, convert_to_tensor=True, batch_size=1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_the_numbers_are_those_of_sentence_transformers(name: str, saved: Saved, tmp_path: Path) -> None:
    folder = folder_of(name, saved)
    _, _, method, given = CASES[name]
    expected = torch.tensor(json.loads(GOLDEN.read_text("utf-8"))[name])
    torch.testing.assert_close(theirs(folder, method, given), expected, rtol=0, atol=2e-6)
    # It reads what this package writes.
    out = load(folder).save_pretrained(tmp_path / "out")
    torch.testing.assert_close(theirs(out, method, given), expected, rtol=0, atol=2e-6)


REFUSED: list[tuple[str, dict[str, Any], str, Any]] = [
    (BOUNDS, {"transformer_task": "text-generation"}, "transformer_task", "text-generation"),
    (BOUNDS, {"tokenizer_name_or_path": "other"}, "tokenizer_name_or_path", "other"),
    (BOUNDS, {"query_length": 12}, "query_length", 12),
    (BOUNDS, output("attentions"), "modality_config.text.method_output_name", "attentions"),
    (BOUNDS, output(["hidden_states", "x"]), "modality_config.text.method_output_name", ["hidden_states", "x"]),
    (BOUNDS, output("last_hidden_state", "mine"), "module_output_name", "mine"),
    (BOUNDS, {"processing_kwargs": {"text": {"add_special_tokens": False}}}, "processing_kwargs.text.add_special_tokens", False),
    (BOUNDS, {"processing_kwargs": {"common": {"mine": 1}}}, "processing_kwargs.common.mine", 1),
    (BOUNDS, {"model_args": {"load_in_8bit": True}}, "model_kwargs.load_in_8bit", True),
    ("1_Pooling/../2_Normalize/config.json", {"module_input_name": "mine"}, "module_input_name", "mine"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "settings", "key", "value"), REFUSED, ids=[row[2] for row in REFUSED])
def test_a_setting_that_cannot_be_applied_is_refused(
    file: str, settings: dict[str, Any], key: str, value: Any, saved: Saved
) -> None:
    folder = write(saved("bert"), chained(POOLING, NORMALIZE))
    name = file.rpartition("../")[2]
    write(folder, {name: settings})
    with pytest.raises(ConfigError) as caught:
        load(folder)
    assert caught.value.details["where"] == str(folder / name)
    assert (caught.value.details["key"], caught.value.details["value"]) == (key, value)


@pytest.mark.parametrize("wrong", [{"out_channels": None}, {"kernel_sizes": [2, 3]}, {"stride_sizes": [1, 2]}], ids=str)
def test_convolutions_that_contradict_their_tensors_are_refused(wrong: dict[str, Any], saved: Saved) -> None:
    cnn = (VECTORS + "cnn.CNN", drawn("cnn_config.json", CNN | wrong, **CONVOLUTIONS))
    folder = write(saved("bert"), chained(cnn, (POOLING[0], {"config.json": MEAN | {"embedding_dimension": 8}})))
    with pytest.raises(ConfigError) as caught:
        load(folder)
    assert caught.value.details["where"] == str(folder / "1_CNN" / "cnn_config.json")


def test_a_hidden_state_that_the_model_lacks_is_refused_for_its_folder(saved: Saved) -> None:
    folder = write(saved("bert"), chained(POOLING, bounds=output(["hidden_states", 9])))
    with pytest.raises(ConfigError, match=r"found hidden state 9.* Correct it") as caught:
        load(f"{folder}/../{folder.name}")
    assert caught.value.details["where"] == f"{folder}/../{folder.name}"
    assert caught.value.details["problems"] == ["modality_config"]


@pytest.mark.parametrize("file", [SAID, BOUNDS, "1_Pooling/config.json", "2_Dense/config.json"])
def test_unknown_settings_are_ignored_with_one_warning(file: str, saved: Saved) -> None:
    folder = write(saved("bert"), chained(POOLING, (BASE + "dense.Dense", dense(4, 16)), said={}, bounds={}))
    expected = load(folder).encode(TEXTS, convert_to_tensor=True)  # type: ignore[operator]
    write(folder, {file: {**json.loads((folder / file).read_text("utf-8")), "mine": 1, "also_mine": 2}})
    with pytest.warns(UserWarning, match="'also_mine', 'mine'") as caught:
        model = load(folder)
    assert len(caught) == 1
    assert torch.equal(model.encode(TEXTS, convert_to_tensor=True), expected)  # type: ignore[operator]


def test_unknown_keys_of_modules_are_ignored_with_one_warning(saved: Saved) -> None:
    folder = write(saved("bert"), chained(POOLING, said={}, bounds={}))
    modules = json.loads((folder / "modules.json").read_text("utf-8"))
    write(folder, {"modules.json": [{**module, "mine": 1} for module in modules]})
    with pytest.warns(UserWarning, match=r"modules\.json: found unknown settings.*: 'mine'") as caught:
        load(folder)
    assert len(caught) == 1


@pytest.mark.filterwarnings("ignore")
def test_convolutions_read_the_padding_of_their_batch(saved: Saved) -> None:
    model: Any = load(folder_of("cnn", saved))
    alone = model.encode(TEXTS, batch_size=1)
    together = model.encode(TEXTS)
    assert np.abs(together - alone).max() > 1e-3
    assert np.allclose(model.embed(TEXTS, normalize=False).numpy(), together, atol=1e-6)
    order = np.argsort([-len(text) for text in TEXTS])
    pairs = [model.encode([TEXTS[place] for place in order[at : at + 2]]) for at in range(0, len(TEXTS), 2)]
    assert np.allclose(model.encode(TEXTS, batch_size=2)[order], np.concatenate(pairs), atol=1e-6)
    states = model.encode(TEXTS, output_value="token_embeddings")
    assert np.allclose(np.stack([one.mean(0) for one in states]), together, atol=1e-5)


@pytest.mark.parametrize(
    "kind", ["LSTM", "BoW", "WordEmbeddings", "WordWeights", "StaticEmbedding", "SparseAutoEncoder"]
)
def test_a_module_that_is_not_supported_is_refused_by_name(kind: str, saved: Saved) -> None:
    folder = write(saved("bert"), chained((VECTORS + kind, {}), POOLING))
    with pytest.raises(ConfigError, match=kind) as caught:
        load(folder)
    assert caught.value.details["problems"] == [kind]


@pytest.mark.parametrize("file", ["model_head.pkl", "config_setfit.json"])
def test_the_classifier_of_setfit_is_not_ignored_silently(file: str, saved: Saved) -> None:
    folder = write(saved("bert"), {**chained(POOLING), file: {}})
    with pytest.warns(UserWarning, match="setfit"):
        load(folder)
    with pytest.raises(ConfigError, match="setfit") as caught:
        load(folder, head="sequence_classification")
    assert caught.value.details["where"] == str(folder / file)


def test_pooled_scores_have_the_methods_of_a_classifier(saved: Saved) -> None:
    folder = folder_of("pooled scores", saved)
    model: Any = load(folder, head="sequence_classification")
    ranked = {one.index: one.score for one in model.rerank("the cat", TEXTS)}
    scores = [labels[0].score for labels in model.predict([("the cat", text) for text in TEXTS])]
    assert ranked == pytest.approx(dict(enumerate(scores)), abs=1e-6)
    given = model.tokenizer(["the cat"] * 3, TEXTS, padding=True, return_tensors="pt")
    logits = model(**given).logits
    assert logits[:, 0].tanh().tolist() == pytest.approx(scores, abs=1e-5)
