"""ESM: frequencies of rotations as files state them, masked tokens scaled text by text, tokens wherever they stand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flodl.errors import CheckpointError
from flodl_hf import load
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.errors import PredictError, TokenizerError
from flodl_hf.export.engine import export_onnx, export_program
from flodl_hf.families import named
from flodl_hf.heads.auto import head_named
from flodl_hf.nn.layout import Packed, Padded
from flodl_hf.parity.cell import settings_of
from flodl_hf.tokenization.tokenizer import Tokenizer

IDS = torch.tensor([[0, 9, 4, 33, 41, 8, 2], [0, 30, 2, 1, 1, 1, 1]])
MASK = torch.tensor([[1] * 7, [1] * 3 + [0] * 4])
WORDS = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", "<mask>"]
LAYER = "esm.encoder.layer.{}.attention.self.rotary_embeddings.inv_freq"


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """Return a folder as published ones are: frequencies in each layer, rounded to half precision long ago."""
    family = named("esm")
    assert family is not None
    config = ModelConfig.for_model("esm", **settings_of(family, "tiny") | {"architectures": ["EsmForMaskedLM"]})
    model = head_named("mlm").model.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    folder = model.save_pretrained(tmp_path / "older")
    rounded = (1 / 10_000 ** (torch.arange(0, 8, 2) / 8)).half().float()
    tensors = load_file(folder / "model.safetensors") | {LAYER.format(i): rounded.clone() for i in range(2)}
    tensors["esm.contact_head.regression.weight"] = torch.ones(1, 8)
    tensors["esm.contact_head.regression.bias"] = torch.ones(1)
    save_file(tensors, folder / "model.safetensors")
    return folder


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS, MASK)[0]


def test_frequencies_are_the_files_and_written_back(older: Path, tmp_path: Path) -> None:
    model = load(older)
    tensors = load_file(older / "model.safetensors")
    plain = {name: value for name, value in tensors.items() if "inv_freq" not in name}
    (tmp_path / "plain").mkdir()
    save_file(plain, tmp_path / "plain" / "model.safetensors")
    (tmp_path / "plain" / "config.json").write_text((older / "config.json").read_text("utf-8"), "utf-8")
    assert not torch.equal(logits(model), logits(load(tmp_path / "plain")))
    written = load_file(model.save_pretrained(tmp_path / "again") / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)


def test_another_head_keeps_them_and_no_dtype_rounds_them(older: Path, tmp_path: Path) -> None:
    model = load(older, head="tokcls", labels=["a", "b"])
    expected = logits(model)
    folder = model.save_pretrained(tmp_path / "tokcls")
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(
        stored["esm.rotary_embeddings.inv_freq"], load_file(older / "model.safetensors")[LAYER.format(0)]
    )
    assert stored["esm.contact_head.regression.weight"].shape == (1, 8)
    assert torch.equal(logits(load(folder)), expected)
    rotary: Any = model.to(torch.bfloat16).graph.get_submodule("encoder.embeddings.rotary")
    assert torch.equal(rotary.frequencies(torch.device("cpu")), stored["esm.rotary_embeddings.inv_freq"])


@pytest.mark.parametrize("way", [pytest.param("onnx", marks=pytest.mark.slow), "program"])
def test_frequencies_go_along_to_other_engines(older: Path, tmp_path: Path, way: str) -> None:
    for name in ("onnx", "onnxscript", "onnxruntime") if way == "onnx" else ():
        pytest.importorskip(name)
    model: Any = load(older)
    # What is compared there is this model; a table that is far from the formula shows that the file's is used.
    model.graph.get_submodule("encoder.embeddings.rotary").take(torch.rand(4))
    write = export_onnx if way == "onnx" else export_program
    found = write(model, tmp_path / way)
    assert found.receipt.passed
    assert found.largest_difference <= (1e-4 if way == "onnx" else 0)


def test_frequencies_of_other_heads_are_refused(older: Path) -> None:
    tensors = load_file(older / "model.safetensors") | {LAYER.format(0): torch.ones(7)}
    save_file(tensors, older / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"inv_freq: found shape \[7\]; expected \[4\]"):
        load(older)


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")
def test_transformers_reads_both_the_same(older: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = load(older)
    theirs = transformers.EsmForMaskedLM.from_pretrained(older).eval()
    for parameter in theirs.parameters():
        parameter.data = parameter.data.clone()
    with torch.no_grad():
        assert torch.equal(logits(model), theirs(IDS, MASK).logits)
    folder = load(older, head="base").save_pretrained(tmp_path / "base")
    again = transformers.EsmModel.from_pretrained(folder, add_pooling_layer=False).eval()
    with torch.no_grad():
        found = again(IDS, MASK).last_hidden_state
    torch.testing.assert_close(load(older, head="base").eval()(IDS, MASK)[0], found, rtol=0, atol=1e-6)


PLACES = torch.tensor([[3, 4, 5, 9, 10, 11, 12], [7, 6, 5, 4, 3, 2, 1]])
TURNED = {
    "esm": "EsmForMaskedLM", "nomic_bert": "NomicBertForMaskedLM", "modernbert": "ModernBertForMaskedLM",
    "eurobert": "EuroBertForMaskedLM", "gte": "GteForMaskedLM", "jina_embeddings_v3": "JinaEmbeddingsV3ForMaskedLM",
}  # fmt: skip


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", TURNED)
def test_places_that_are_given_turn_queries_and_keys(model_type: str, attention: str, tmp_path: Path) -> None:
    """Of ESM in both its forms, and of the other families whose queries and keys are turned."""
    transformers = pytest.importorskip("transformers")
    family = named(model_type)
    assert family is not None
    for variant in ("base", "first") if model_type == "esm" else ("base",):
        settings = settings_of(family, "tiny", variant) | {"architectures": [TURNED[model_type]]}
        made = head_named("mlm").model.from_config(ModelConfig.for_model(model_type, **settings))
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.normal_(0, 0.2)
        folder = made.save_pretrained(tmp_path / variant)
        model: Any = load(folder, attention=attention)
        theirs = getattr(transformers, TURNED[model_type]).from_pretrained(folder, attn_implementation=attention).eval()
        for parameter in theirs.parameters():
            parameter.data = parameter.data.clone()
        with torch.no_grad():
            for places in (PLACES, PLACES[:1]):
                found = model(IDS, MASK, position_ids=places)[0]
                assert torch.equal(found, theirs(IDS, MASK, position_ids=places).logits), variant
            assert not torch.equal(found, model(IDS, MASK)[0])


def _contacts(folder: Path) -> Path:
    """Make the regression's numbers differ, and give the folder a tokenizer."""
    tensors = load_file(folder / "model.safetensors")
    tensors["esm.contact_head.regression.weight"] = torch.linspace(-9, 8, 8)[None]
    save_file(tensors, folder / "model.safetensors")
    (folder / "vocab.txt").write_bytes(vocabulary()["vocab.txt"])
    return folder


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("head", ["base", "mlm"])
def test_contacts_are_those_of_transformers_to_the_bit(head: str, older: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = _contacts(older)
    theirs = transformers.EsmForMaskedLM.from_pretrained(folder, attn_implementation="eager").eval()
    for parameter in theirs.parameters():
        parameter.data = parameter.data.clone()
    with torch.no_grad():
        expected = theirs.predict_contacts(IDS, MASK)
    model = load(folder, head=head, attention="eager")
    found = model.predict_contacts(IDS, MASK)
    kept = torch.isfinite(expected)  # of padding alone there is nothing to compare with
    assert torch.equal(torch.isfinite(found), kept)
    assert torch.equal(found[kept], expected[kept])
    assert found[0].std() > 0.01


def test_contacts_of_texts_are_of_their_residues_and_what_lacks_them_is_refused(older: Path, tmp_path: Path) -> None:
    model: Any = load(_contacts(older), attention="eager")
    one, both = model.predict_contacts("MKTVRQ"), model.predict_contacts(["MKTVRQ", "MKT"])
    assert [tuple(part.shape) for part in both] == [(6, 6), (3, 3)]
    assert torch.equal(one, both[0])
    ids = torch.tensor([model.tokenizer.encode("MKTVRQ")])
    assert torch.equal(model.predict_contacts(ids)[0], one)
    assert torch.allclose(one, one.T)
    with pytest.raises(PredictError, match="set_attention"):
        load(older).predict_contacts("MKT")
    config = ModelConfig.for_model("esm", **settings_of(model.config.family, "tiny"))
    with pytest.raises(PredictError, match=r"found no contact_head\.regression\."):
        head_named("base").model.from_config(config).predict_contacts(ids)
    with pytest.raises(PredictError, match="longer than"):
        model.predict_contacts(["M" * 2000])


def test_packed_texts_scale_by_their_own_masked_tokens(older: Path) -> None:
    model = load(older).eval()
    ids = IDS.clone()
    ids[1, 1] = 4
    with torch.no_grad():
        padded = model(ids, MASK)[0]
        packed = model.graph(torch.cat([ids[0], ids[1, :3]]), layout=Packed.of([7, 3]))
    torch.testing.assert_close(packed, torch.cat([padded[0], padded[1, :3]]), rtol=0, atol=1e-5)


TEXTS = ["MKTVRQ", "M K T V", "MK<mask>TV", "MJJTab", "  M.-K\n", "<null_1>A", "", "mkt", "<cls>MA"]


def vocabulary() -> dict[str, bytes]:
    return {"vocab.txt": "\n".join(WORDS).encode()}


def test_tokens_are_found_wherever_they_stand() -> None:
    tokenizer = Tokenizer.from_files(vocabulary(), model_type="esm")
    assert tokenizer("MJJT<mask> A").tokens() == ["<cls>", "M", "<unk>", "T", "<mask>", "A", "<eos>"]
    assert tokenizer("M", "K").tokens() == ["<cls>", "M", "<eos>", "K", "<eos>"]
    assert tokenizer.mask_token_id == 32
    assert tokenizer.sep_token is None
    with pytest.raises(TokenizerError, match="eos_token"):
        Tokenizer.from_files({"vocab.txt": "\n".join(WORDS[:2] + WORDS[3:]).encode()}, model_type="esm")


@pytest.mark.transformers
def test_ids_are_those_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "vocab.txt").write_bytes(vocabulary()["vocab.txt"])
    theirs = transformers.EsmTokenizer(str(tmp_path / "vocab.txt"))
    ours = Tokenizer.from_files(vocabulary(), model_type="esm")
    for text in TEXTS:
        assert ours(text).input_ids == theirs(text)["input_ids"], text
        assert ours(text, "KT").input_ids == theirs(text, "KT")["input_ids"], text
        ids = ours(text).input_ids
        assert ours.decode(ids) == theirs.decode(ids), text


@pytest.mark.transformers
@pytest.mark.parametrize("variant", ["base", "first"])
@pytest.mark.parametrize("head", ["base", "masked_lm", "sequence_classification"])
def test_embeddings_in_place_of_ids_are_what_transformers_takes_them_for(
    variant: str, head: str, tmp_path: Path
) -> None:
    """What is given stands for words, positions, norm and the scale of masked tokens together."""
    from flodl_hf.parity.reference import load_reference

    family = named("esm")
    assert family is not None
    model = head_named(head).model.from_config(
        ModelConfig.for_model("esm", **settings_of(family, "tiny") | dict(family.tiny[variant]))
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    folder = model.save_pretrained(tmp_path / "model")
    ours: Any = load(folder, head=head, attention="eager").eval()
    theirs: Any = load_reference(folder, "Esm" + head_named(head).hf_suffix, attention="eager").model.eval()
    given = torch.randn(2, 7, ours.config.encoder.hidden_size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for mask in (None, MASK):
            found, expected = (
                ours(None, mask, inputs_embeds=given)[0],
                theirs(attention_mask=mask, inputs_embeds=given)[0],
            )
            assert torch.equal(found, expected)
        whole = ours.graph.get_submodule("encoder.embeddings")(IDS, layout=Padded.of(MASK))
        assert torch.equal(ours(None, MASK, inputs_embeds=whole)[0], ours(IDS, MASK)[0])


def test_saliency_begins_at_the_texts_own_score() -> None:
    from flodl_hf.heads.saliency import saliency

    family = named("esm")
    assert family is not None
    sizes = settings_of(family, "tiny") | {"vocab_size": len(WORDS), "mask_token_id": len(WORDS) - 1}
    model: Any = head_named("seqcls").model.from_config(ModelConfig.for_model("esm", **sizes))
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    model.eval()._mark_untrained(())
    model.tokenizer = Tokenizer.from_files(vocabulary(), model_type="esm")
    found = saliency(model, "MKTVLAG")
    with torch.no_grad():
        logits = model(model.tokenizer("MKTVLAG", return_tensors="pt")["input_ids"])[0][0]
    assert found.score == pytest.approx(float(logits.max()), abs=1e-5)
    assert float(found.scores.sum()) == pytest.approx(found.score - found.baseline, abs=0.02)
