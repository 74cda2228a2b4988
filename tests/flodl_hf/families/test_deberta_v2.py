"""DeBERTa-v2 and v3 equal the reference to the bit, in every setting that the reference honours."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from flodl.errors import ConfigError
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.families.deberta_v2 import FAMILY
from flodl_hf.heads.auto import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from flodl_hf.models.encoder_model import EncoderModel
from flodl_hf.nn.disentangled.parts import MaskedEmbeddings, table_rows
from flodl_hf.nn.layout import Packed, Padded

LENGTHS = (19, 11, 1, 7)
SIZES: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 40, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2,
}  # fmt: skip
V3: dict[str, Any] = {
    **SIZES, "relative_attention": True, "position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True,
    "pos_att_type": "p2c|c2p", "max_relative_positions": -1, "position_biased_input": False, "type_vocab_size": 0,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "v3": V3,
    "v2-xlarge": {**V3, "conv_kernel_size": 3, "conv_act": "gelu", "attention_head_size": 8},
    "grouped convolution": {**V3, "conv_kernel_size": 5, "conv_groups": 4},
    "own keys": {**V3, "share_att_key": False, "pos_att_type": ["c2p", "p2c"]},
    "own keys, c2p": {**V3, "share_att_key": False, "pos_att_type": ["c2p"]},
    "own keys, p2c": {**V3, "share_att_key": False, "pos_att_type": "p2c"},
    "shared, c2p": {**V3, "pos_att_type": "c2p"},
    "shared, p2c": {**V3, "pos_att_type": ["p2c"]},
    "no kinds": {**V3, "pos_att_type": None},
    "no buckets": {**V3, "position_buckets": -1, "max_relative_positions": 6},
    "wide span": {**V3, "position_buckets": 0},
    "buckets and range": {**V3, "position_buckets": 6, "max_relative_positions": 30, "num_hidden_layers": 3},
    "table not normalised": {**V3, "norm_rel_ebd": "none"},
    "absolute only": {**SIZES, "type_vocab_size": 2},
    "absolute, kinds scale": {**SIZES, "pos_att_type": "c2p", "norm_rel_ebd": "layer_norm", "position_buckets": 8},
    "everything added": {**V3, "position_biased_input": True, "type_vocab_size": 3, "pad_token_id": None},
    "narrow embeddings": {**V3, "embedding_size": 20, "position_biased_input": True, "type_vocab_size": 2},
    "poolers": {**V3, "pooler_dropout": 0.2, "pooler_hidden_act": "tanh", "cls_dropout": 0.3, "pooler_hidden_size": 32},
    "new masked-word head": {**V3, "legacy": False, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5},
}  # fmt: skip
HEADS: dict[str, tuple[str, Any]] = {
    "base": ("DebertaV2Model", AutoModel),
    "sequence_classification": ("DebertaV2ForSequenceClassification", AutoModelForSequenceClassification),
    "token_classification": ("DebertaV2ForTokenClassification", AutoModelForTokenClassification),
    "question_answering": ("DebertaV2ForQuestionAnswering", AutoModelForQuestionAnswering),
    "masked_lm": ("DebertaV2ForMaskedLM", AutoModelForMaskedLM),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def config_of(name: str, **more: Any) -> ModelConfig:
    return ModelConfig.from_dict({"model_type": "deberta-v2", **CONFIGS[name], **more})


def fresh(name: str, head: str = "base", **more: Any) -> EncoderModel:
    torch.manual_seed(3)
    return HEADS[head][1].from_config(config_of(name, **more)).eval()


def pair(name: str, head: str, **more: Any) -> tuple[Any, EncoderModel]:
    """Return the reference and ours with the same weights, all of them away from their initial zeros and ones."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(7)
    config = transformers.DebertaV2Config(**CONFIGS[name], **more)
    theirs = getattr(transformers, HEADS[head][0])(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    ours = fresh(name, head, **more)
    copy_weights(theirs, ours)
    return theirs, ours


def copy_weights(theirs: Any, ours: EncoderModel) -> None:
    names = hf_names(ours)
    source = dict(theirs.named_parameters())
    own = dict(ours.graph.named_parameters())
    assert {names[name] for name in own} == set(source), "a tensor of one side has no counterpart"
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(source[names[name]])


def hf_names(model: EncoderModel) -> dict[str, str]:
    names = FAMILY.key_map(model.config.encoder, model.head).names(n for n, _ in model.graph.named_parameters())
    prefix = "deberta." if model.head == "base" else ""
    return {ours: theirs.removeprefix(prefix) for ours, theirs in names.items()}


def batch(head: str, vocab: int = 60, types: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(11)
    rows, seq = len(LENGTHS), max(LENGTHS)
    mask = (torch.arange(seq) < torch.tensor(LENGTHS)[:, None]).long()
    ids = torch.randint(1, vocab, (rows, seq), generator=generator) * mask
    inputs = {"input_ids": ids, "attention_mask": mask}
    if types > 1:
        inputs["token_type_ids"] = torch.randint(0, types, (rows, seq), generator=generator) * mask
    if head == "sequence_classification":
        inputs["labels"] = torch.tensor([0, 1, 1, 0])
    elif head == "token_classification":
        inputs["labels"] = torch.where(mask == 1, ids % 2, -100)
    elif head == "masked_lm":
        inputs["labels"] = torch.where((ids % 3 == 0) & (mask == 1), ids, -100)
    elif head == "question_answering":
        inputs["start_positions"] = torch.tensor([3, 0, 0, 99])
        inputs["end_positions"] = torch.tensor([5, 10, 0, 2])
    return inputs


def loss_of(output: Any) -> Tensor:
    if getattr(output, "loss", None) is not None:
        return output.loss
    states = output.last_hidden_state
    return (states * torch.linspace(-1, 1, states.numel()).view_as(states)).sum()


def results(output: Any) -> list[Tensor]:
    names = ("last_hidden_state", "logits", "start_logits", "end_logits")
    return [getattr(output, name) for name in names if getattr(output, name, None) is not None]


def assert_gradients_equal(theirs: Any, ours: EncoderModel) -> None:
    reference = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    names = hf_names(ours)
    differing = []
    for name, parameter in ours.graph.named_parameters():
        expected = reference[names[name]]
        if (parameter.grad is None) != (expected is None):
            differing.append(f"{name}: one side has no gradient")
        elif parameter.grad is not None and not torch.equal(parameter.grad, expected):
            differing.append(f"{name}: {(parameter.grad - expected).abs().max()}")
    assert not differing


@pytest.mark.transformers
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", CONFIGS)
def test_forward_loss_and_gradients_are_the_references(name: str, head: str) -> None:
    theirs, ours = pair(name, head)
    inputs = batch(head, types=CONFIGS[name].get("type_vocab_size", 0))
    expected, found = theirs(**inputs), ours(**inputs)
    assert len(results(found)) == len(results(expected)) > 0
    assert all(torch.equal(a, b) for a, b in zip(results(found), results(expected), strict=True))
    assert torch.equal(loss_of(found), loss_of(expected))
    loss_of(expected).backward()
    loss_of(found).backward()
    assert_gradients_equal(theirs, ours)


@pytest.mark.transformers
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", CONFIGS)
def test_dropout_draws_the_same_numbers_in_the_same_order(name: str, head: str) -> None:
    theirs, ours = pair(name, head)
    inputs = batch(head, types=CONFIGS[name].get("type_vocab_size", 0))
    torch.manual_seed(5)
    expected = loss_of(theirs.train()(**inputs))
    after = torch.rand(1)
    torch.manual_seed(5)
    found = loss_of(ours.train()(**inputs))
    assert torch.equal(torch.rand(1), after)
    assert torch.equal(found, expected)
    expected.backward()
    found.backward()
    assert_gradients_equal(theirs, ours)


@pytest.mark.transformers
@pytest.mark.parametrize("name", ["v3", "v2-xlarge", "everything added"])
def test_states_after_each_layer_are_the_references(name: str) -> None:
    theirs, ours = pair(name, "base")
    inputs = batch("base")
    expected = theirs(**inputs, output_hidden_states=True).hidden_states
    found = ours(**inputs, output_hidden_states=True).hidden_states
    assert len(found) == len(expected) == CONFIGS[name]["num_hidden_layers"] + 1
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.transformers
@pytest.mark.parametrize("name", ["v3", "v2-xlarge", "everything added"])
def test_a_call_without_mask_or_with_position_ids_is_the_references(name: str) -> None:
    theirs, ours = pair(name, "base")
    ids = batch("base")["input_ids"]
    places = torch.arange(ids.shape[1]).flip(0)[None].expand_as(ids)
    for inputs in ({"input_ids": ids.clamp(min=1)}, {"input_ids": ids, "position_ids": places}):
        assert torch.equal(ours(**inputs).last_hidden_state, theirs(**inputs).last_hidden_state)


@pytest.mark.transformers
@pytest.mark.parametrize(("buckets", "longest"), [(-1, 40), (-1, 512), (8, 40), (7, 64), (2, 12), (64, 32), (256, 512)])
def test_table_rows_are_the_references(buckets: int, longest: int) -> None:
    module = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")
    span = buckets if buckets > 0 else longest
    for length in (1, 2, 3, 17, 130, 513, 700):
        states = torch.empty(1, length, 1)
        distances = module.build_relative_position(states, states, buckets, longest)[0]
        expected = torch.clamp(distances + span, 0, 2 * span - 1)
        rows = table_rows(length, span, buckets, longest)
        places = torch.arange(length)
        assert torch.equal(rows[places[:, None] - places + length - 1], expected)
        # Read by key, the reference looks up the opposite distance: the same table, transposed.
        assert torch.equal(expected.t(), torch.clamp(span - distances, 0, 2 * span - 1))


@pytest.mark.transformers
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", ["v3", "v2-xlarge", "own keys", "absolute only", "narrow embeddings", "poolers",
                                  "absolute, kinds scale", "new masked-word head"])  # fmt: skip
def test_a_saved_folder_loads_whole(name: str, head: str, tmp_path: Any) -> None:
    theirs, _ = pair(name, head)
    theirs.save_pretrained(tmp_path)
    ours = HEADS[head][1].from_pretrained(tmp_path)
    assert ours.load_report.trained
    assert not ours.load_report.ignored
    inputs = {k: v for k, v in batch(head).items() if "labels" not in k and "positions" not in k}
    assert all(torch.equal(a, b) for a, b in zip(results(ours(**inputs)), results(theirs(**inputs)), strict=True))


@pytest.mark.transformers
def test_a_pretraining_folder_gives_either_masked_word_head(tmp_path: Any) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    theirs, _ = pair("new masked-word head", "masked_lm")
    theirs.save_pretrained(tmp_path)
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    extra = {"mask_predictions.dense.weight": (32, 32), "mask_predictions.dense.bias": (32,),
             "mask_predictions.LayerNorm.weight": (32,), "mask_predictions.LayerNorm.bias": (32,),
             "mask_predictions.classifier.weight": (1, 32), "mask_predictions.classifier.bias": (1,),
             "deberta.embeddings.position_embeddings.weight": (40, 32)}  # fmt: skip
    tensors |= {name: torch.zeros(shape) for name, shape in extra.items()}
    safetensors.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ours = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert ours.load_report is not None
    inputs = {k: v for k, v in batch("masked_lm").items() if k != "labels"}
    assert torch.equal(ours(**inputs).logits, theirs(**inputs).logits)
    assert set(ours.load_report.ignored) == set(extra)

    config = json.loads((tmp_path / "config.json").read_text())
    del config["legacy"], config["architectures"]  # as Microsoft's files are
    (tmp_path / "config.json").write_text(json.dumps(config))
    legacy = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert legacy.load_report is not None
    assert not legacy.load_report.trained
    assert set(extra) < set(legacy.load_report.ignored)
    base = AutoModel.from_pretrained(tmp_path)
    assert base.load_report is not None
    assert base.load_report.trained
    assert any("masked" in why for why in base.load_report.ignored.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_equals_padded_and_alone(name: str) -> None:
    model = fresh(name)
    inputs = batch("base", types=CONFIGS[name].get("type_vocab_size", 0))
    lengths = (11, 7, 7, 1, 19)  # two neighbours of one length share a call
    order = (1, 3, 3, 2, 0)
    types = inputs.get("token_type_ids")
    layout = Packed.of(lengths)
    with torch.no_grad():
        padded = model(**inputs).last_hidden_state
        packed = model.graph(
            torch.cat([inputs["input_ids"][row, :n] for row, n in zip(order, lengths, strict=True)]),
            token_type_ids=None
            if types is None
            else torch.cat([types[row, :n] for row, n in zip(order, lengths, strict=True)]),
            layout=layout,
        )
        for row, length, states in zip(order, lengths, layout.unpack(packed), strict=True):
            torch.testing.assert_close(states, padded[row, :length], rtol=0, atol=2e-6)
            one = {
                "input_ids": inputs["input_ids"][row, :length],
                "token_type_ids": None if types is None else types[row, :length],
            }
            alone = model(one["input_ids"][None], token_type_ids=None if types is None else one["token_type_ids"][None])
            assert torch.equal(model.graph(**_entry(one), layout=Packed.of([length])), alone.last_hidden_state[0])


def _entry(inputs: dict[str, Any]) -> dict[str, Any]:
    return {"input": inputs["input_ids"], "token_type_ids": inputs["token_type_ids"]}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_learns(name: str, head: str) -> None:
    model = fresh(name, head).train()
    inputs = batch(head, types=CONFIGS[name].get("type_vocab_size", 0))
    loss_of(model(**inputs)).backward()
    idle = {n for n, p in model.graph.named_parameters() if p.grad is None}
    expected = set()
    if name == "no kinds":  # a table that no score reads
        expected = {n for n, _ in model.graph.named_parameters() if n.startswith("encoder.relative")}
    elif name == "absolute, kinds scale":  # the norm of a table that is not there
        expected = {"encoder.relative.norm.weight", "encoder.relative.norm.bias"}
    assert idle == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["v3", "own keys", "v2-xlarge"])
def test_half_precision_is_finite_and_near(name: str, dtype: torch.dtype) -> None:
    model = fresh(name)
    inputs = batch("base")
    with torch.no_grad():
        exact = model(**inputs).last_hidden_state
        half = model.to(dtype)(**inputs).last_hidden_state
    assert half.dtype == dtype
    assert torch.isfinite(half).all()
    real = inputs["attention_mask"].bool()
    assert (half.float() - exact)[real].abs().max() < (0.02 if dtype == torch.float16 else 0.15)


def test_float16_scores_do_not_overflow_where_the_product_would() -> None:
    model = fresh("own keys")
    inputs = batch("base")
    with torch.no_grad():
        for name, parameter in model.graph.named_parameters():
            if name.endswith(("attention.pos_key.weight", "attention.query.weight")):
                # Products of about 1e5, past float16's 65504; divided by sqrt(8 * 3) they fit.
                parameter.copy_(torch.eye(32) * 140)
        module = model.graph.get_submodule("encoder.layers.0.attention")
        seen: list[Tensor] = []

        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            seen.append(output)

        hook = module.register_forward_hook(keep)
        model(**inputs)
        model.half()(**inputs)
        hook.remove()
    exact, half = seen
    assert torch.isfinite(half).all()
    assert (half.float() - exact).abs().max() < 0.1


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"pos_att_type": "p2p"}, "pos_att_type"),
        ({"pos_att_type": 3}, "pos_att_type"),
        ({"norm_rel_ebd": "batch_norm"}, "norm_rel_ebd"),
        ({"norm_rel_ebd": None}, "norm_rel_ebd"),
        ({"position_buckets": 1}, "position_buckets"),
        ({"conv_kernel_size": 4}, "conv_kernel_size"),
        ({"conv_kernel_size": 3, "conv_groups": 5}, "conv_groups"),
        ({"attention_head_size": 16}, "attention_head_size"),
        ({"relative_attention": "yes"}, "relative_attention"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused_by_name(change: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of("v3", **change)
    assert [problem for problem in caught.value.problems if problem.startswith(key)]


@pytest.mark.parametrize(
    ("head", "change"),
    [
        ("sequence_classification", {"pooler_hidden_size": 16}),
        ("masked_lm", {"legacy": False, "embedding_size": 20}),
        ("masked_lm", {"legacy": False, "tie_word_embeddings": False}),
    ],
)
def test_a_head_that_cannot_be_built_is_refused_and_the_others_are_not(head: str, change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        fresh("v3", head, **change)
    assert set(caught.value.problems) <= set(change) | {"embedding_size"}
    assert fresh("v3", "token_classification", **change).num_labels == 2


@pytest.mark.parametrize("value", ["p2c|c2p", " C2P | p2c", ["c2p", "p2c"]])
def test_kinds_are_read_from_text_and_lists(value: Any) -> None:
    assert set(config_of("v3", pos_att_type=value).encoder.position_kinds) == {"c2p", "p2c"}


def test_the_files_of_microsoft_are_understood() -> None:
    """v3-base and v2-xlarge as published: keys that change nothing are passed over, none is refused."""
    v3 = {"model_type": "deberta-v2", "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu",
          "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072,
          "max_position_embeddings": 512, "relative_attention": True, "position_buckets": 256,
          "norm_rel_ebd": "layer_norm", "share_att_key": True, "pos_att_type": "p2c|c2p", "layer_norm_eps": 1e-07,
          "max_relative_positions": -1, "position_biased_input": False, "num_attention_heads": 12,
          "num_hidden_layers": 12, "type_vocab_size": 0, "vocab_size": 128100}  # fmt: skip
    xlarge = {**v3, "hidden_size": 1536, "num_attention_heads": 24, "attention_head_size": 64, "conv_kernel_size": 3,
              "conv_act": "gelu", "num_hidden_layers": 24, "intermediate_size": 6144}  # fmt: skip
    for source, span, kernel in ((v3, 256, 0), (xlarge, 256, 3)):
        settings = ModelConfig.from_dict(source).encoder
        assert (settings.span, settings.max_distance, settings.conv_kernel_size) == (span, 512, kernel)
        with torch.device("meta"):
            graph = FAMILY.encoder(settings)
        names = [f"encoder.{name}" for name, _ in graph.named_parameters()]
        assert len(FAMILY.key_map(settings, "base").names(names)) == len(names)


def test_paths_reach_every_projection() -> None:
    model = fresh("own keys")
    for leaf in ("query", "key", "value", "output", "pos_key", "pos_query"):
        model.graph.freeze(f"encoder.layers.1.attention.{leaf}")
    frozen = {name for name, parameter in model.graph.named_parameters() if not parameter.requires_grad}
    assert len(frozen) == 12
    assert all(name.startswith("encoder.layers.1.attention.") for name in frozen)


def test_padded_rows_do_not_reach_the_others() -> None:
    model = fresh("v2-xlarge")
    inputs = batch("base")
    other = inputs["input_ids"].clone()
    other[1, LENGTHS[1] :] = 5
    with torch.no_grad():
        one = model(**inputs).last_hidden_state
        two = model(other, attention_mask=inputs["attention_mask"]).last_hidden_state
    real = Padded.of(inputs["attention_mask"]).mask
    assert real is not None
    assert torch.equal(one[real], two[real])


@pytest.mark.parametrize("option", ["norm_bias", "positions_after_pad"])
def test_embeddings_refuse_options_without_effect(option: str) -> None:
    options: dict[str, Any] = {option: True}
    with pytest.raises(TypeError):
        MaskedEmbeddings(8, 4, 4, 1e-5, 0.0, **options)
