"""Makes the golden cells: tiny checkpoints of every family and head, with what transformers computed on them.

Run once, by hand, from the root of the repository, in an environment with transformers:

    python tests/golden/make.py            # every cell anew
    python tests/golden/make.py electra    # those of some families, beside the others

Each cell is a folder as transformers saves it (``config.json``, ``model.safetensors``, a tokenizer), and a
file ``expected/<cell>.safetensors``: awkward batches (``in.*``), outputs (``out.*``), the loss and the
gradients of some tensors (``loss``, ``grad.*``). ``provenance.json`` says what made them, and on what.
Nothing here is imported by the tests; they need neither transformers nor this file.
"""

from __future__ import annotations

import json
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import models, normalizers, pre_tokenizers, processors

HERE = Path(__file__).resolve().parent
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "on",
    "mat",
    "ran",
    "good",
    "bad",
    "film",
    "is",
    "was",
    "not",
    "very",
    "ada",
    "lives",
    "in",
    "paris",
    "works",
    "for",
    "acme",
    "corp",
    "who",
]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCABULARY = list(
    dict.fromkeys([*SPECIALS, *WORDS, *LETTERS, *(f"##{c}" for c in LETTERS), *".,!?'-", "é", "東", "##é"])
)
TEXTS = ["", "The cat sat.", "Ada lives in Paris, café 東京!", "unheard-of things", "x" * 120, "don't [MASK] 🎉"]
LABELS = {"sequence_classification": 3, "token_classification": 5}
SUFFIX = {
    "base": "Model",
    "sequence_classification": "ForSequenceClassification",
    "token_classification": "ForTokenClassification",
    "question_answering": "ForQuestionAnswering",
    "masked_lm": "ForMaskedLM",
}
_SIZES = {
    "vocab_size": 120, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20,
    "max_position_embeddings": 20, "type_vocab_size": 2, "pad_token_id": 0,
}  # fmt: skip
_ROBERTA = _SIZES | {"type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", _SIZES),
    "roberta": ("Roberta", _ROBERTA),
    "xlm-roberta": ("XLMRoberta", _ROBERTA),
    "camembert": ("Camembert", _ROBERTA),
    "distilbert": (
        "DistilBert",
        {
            "vocab_size": 120, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 20, "max_position_embeddings": 20,
            "pad_token_id": 0,
        },
    ),
    "albert": (
        "Albert",
        _SIZES | {"embedding_size": 8, "num_hidden_layers": 3, "num_hidden_groups": 2, "inner_group_num": 2, "hidden_act": "gelu_new"},
    ),
    "deberta-v2": (
        "DebertaV2",
        _SIZES
        | {
            "type_vocab_size": 0, "num_hidden_layers": 2, "relative_attention": True, "position_buckets": 4,
            "max_relative_positions": -1, "share_att_key": True, "pos_att_type": ["p2c", "c2p"], "legacy": False,
            "norm_rel_ebd": "layer_norm", "position_biased_input": False, "layer_norm_eps": 1e-7, "pooler_hidden_size": 16,
        },
    ),
    "deberta": (
        "Deberta",
        _SIZES
        | {
            "type_vocab_size": 0, "num_hidden_layers": 2, "relative_attention": True, "max_relative_positions": 6,
            "pos_att_type": ["c2p", "p2c"], "legacy": False, "position_biased_input": False, "layer_norm_eps": 1e-7,
            "pooler_hidden_size": 16,
        },
    ),
    "electra": ("Electra", _SIZES | {"embedding_size": 8}),
    "mpnet": ("MPNet", {key: value for key, value in _ROBERTA.items() if key != "type_vocab_size"}),
    "modernbert": (
        "ModernBert",
        {key: value for key, value in _SIZES.items() if key != "type_vocab_size"}
        | {"num_hidden_layers": 2, "local_attention": 6, "classifier_pooling": "mean"},
    ),
    "nomic_bert": ("NomicBert", _SIZES),
    "gte": ("Gte", _SIZES),
    "eurobert": (
        "EuroBert",
        {key: value for key, value in _SIZES.items() if key != "type_vocab_size"}
        | {"num_hidden_layers": 2, "num_key_value_heads": 1, "tie_word_embeddings": False},
    ),
    "jina_embeddings_v3": ("JinaEmbeddingsV3", _SIZES),
    "xlm-roberta-xl": ("XLMRobertaXL", _ROBERTA),
    "roberta-prelayernorm": ("RobertaPreLayerNorm", _ROBERTA),
    "data2vec-text": ("Data2VecText", _ROBERTA),
    "esm": (
        "Esm",
        {key: value for key, value in _ROBERTA.items() if key != "type_vocab_size"}
        | {"position_embedding_type": "rotary", "token_dropout": True, "mask_token_id": 4, "emb_layer_norm_before": False},
    ),
    "roformer": ("RoFormer", _SIZES | {"embedding_size": 8}),
    "ernie": ("Ernie", _SIZES | {"use_task_id": True}),
}  # fmt: skip
# Families with every head; the others have those of classification and of masked words.
WHOLE = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "albert", "deberta-v2")
LENGTHS = {"one row": (7,), "mixed lengths": (6, 3, 9, 1), "single tokens": (1, 1), "second texts": (8, 5)}
ROW: dict[str, int] = dict.fromkeys(
    ("roberta", "xlm-roberta", "camembert", "mpnet", "xlm-roberta-xl", "roberta-prelayernorm", "data2vec-text", "esm"),
    18,
)


def tokenizer(pad: int) -> tokenizers.Tokenizer:
    """Return a WordPiece tokenizer whose padding token has the id that the family pads with."""
    words = list(VOCABULARY)
    if pad == 1:
        words[0], words[1] = words[1], words[0]
    inner = tokenizers.Tokenizer(models.WordPiece({t: i for i, t in enumerate(words)}, unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=False)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    inner.decoder = tokenizers.decoders.WordPiece()
    inner.add_special_tokens(SPECIALS)
    return inner


def batches(family: str, pad: int, types: bool) -> dict[str, dict[str, torch.Tensor]]:
    """Return batches of random ids, rows filled on the right; the longest rows fill the position table."""
    generator = torch.Generator().manual_seed(11)
    made = {}
    for name, lengths in {**LENGTHS, "longest rows": (ROW.get(family, 20),)}.items():
        if name == "second texts" and not types:
            continue
        width = max(lengths)
        ids = torch.randint(2, 120, (len(lengths), width), generator=generator)
        mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
        made[name] = {"input_ids": torch.where(mask, ids, pad), "attention_mask": mask.long()}
        if name == "second texts":
            second = torch.arange(width)[None] >= 3
            made[name]["token_type_ids"] = (second & mask).long()
    return made


def labels(head: str, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return labels for a batch; one position of question answering lies outside its row."""
    generator = torch.Generator().manual_seed(12)
    rows, width = inputs["input_ids"].shape
    if head == "sequence_classification":
        return {"labels": torch.randint(0, LABELS[head], (rows,), generator=generator)}
    if head == "question_answering":
        start = torch.randint(0, width, (rows,), generator=generator)
        start[-1] = width + 3
        return {"start_positions": start, "end_positions": start + 1}
    if head == "base":
        return {}
    chosen = torch.randint(0, LABELS.get(head, 120), (rows, width), generator=generator)
    return {"labels": torch.where(inputs["attention_mask"].bool(), chosen, -100)}


def chosen_gradients(model: torch.nn.Module) -> list[str]:
    """Return the word table, the first query (or its like), and the last tensor of the model."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    words = ("word_embeddings", "tok_embeddings", "embed_tokens")
    queries = ("query", "q_lin", "attn.q.", "q_proj", "attn.Wo", "attention.output.dense")
    word, query = (next(n for part in parts for n in names if part in n) for parts in (words, queries))
    return list(dict.fromkeys([word, query, names[-1]]))


def make(family: str, head: str) -> list[list[int]]:
    prefix, settings = FAMILIES[family]
    kind = getattr(transformers, prefix + SUFFIX[head])
    torch.manual_seed(5)
    config = kind.config_class(**settings, num_labels=LABELS.get(head, 2))
    model = kind(config).eval()
    with torch.no_grad():
        # Spread out, so that neither biases nor norms are at their special values.
        norms = {id(m.weight) for m in model.modules() if "Norm" in type(m).__name__ and hasattr(m, "weight")}
        for parameter in model.parameters():
            parameter.normal_(1.0 if id(parameter) in norms else 0.0, 0.3)
    folder = HERE / f"{family}-{head}"
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    pad = settings["pad_token_id"]
    text = tokenizer(pad).to_str()
    (folder / "tokenizer.json").write_text(text, "utf-8")
    roles = {f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(roles | {"model_max_length": ROW.get(family, 20)}), "utf-8"
    )

    held: dict[str, torch.Tensor] = {}
    for attention in ("sdpa", "eager") if getattr(kind, "_supports_sdpa", False) else ("eager",):
        again = kind.from_pretrained(folder, attn_implementation=attention).eval()
        for parameter in again.parameters():
            parameter.data = parameter.data.clone()
        for name, inputs in batches(
            family, pad, family != "distilbert" and settings.get("type_vocab_size", 0) > 1
        ).items():
            with torch.no_grad():
                outputs = again(**inputs)
            held |= {f"in.{name}.{key}": value for key, value in inputs.items()}
            if attention == "sdpa" or name == "mixed lengths" or not getattr(kind, "_supports_sdpa", False):
                held |= {f"out.{attention}.{name}.{key}": value.clone() for key, value in outputs.items()}
            if name == "mixed lengths" and attention == ("sdpa" if getattr(kind, "_supports_sdpa", False) else "eager"):
                targets = labels(head, inputs)
                outputs = again(**inputs, **targets)
                tensors = [v for v in outputs.to_tuple() if isinstance(v, torch.Tensor)]
                loss: Any = outputs.loss if targets else sum(t.square().sum() for t in tensors)
                loss.backward()
                held |= {f"label.{key}": value for key, value in targets.items()} | {"loss": loss.detach()}
                known = dict(again.named_parameters(remove_duplicate=False))
                held |= {f"grad.{n}": known[n].grad.clone() for n in chosen_gradients(again)}
    save_file(
        {name: value.contiguous().clone() for name, value in held.items()},
        HERE / "expected" / f"{folder.name}.safetensors",
    )
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer(pad), **roles)
    return [theirs(t)["input_ids"] for t in TEXTS]


def processor() -> str:
    """Return the processor's name: another one may round sums in another order."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main(chosen: list[str]) -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    (HERE / "expected").mkdir(exist_ok=True)
    facts = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "python": platform.python_version(),
        "processor": processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "command": "python tests/golden/make.py",
        "texts": TEXTS,
    }
    ids = {}
    if chosen:
        before = json.loads((HERE / "provenance.json").read_text("utf-8"))
        ids = before.pop("ids")
        if before != facts:
            raise SystemExit(f"the other cells were made with {before}, and this is {facts}: make all of them")
    for family in chosen or FAMILIES:
        for head in SUFFIX if family in WHOLE else ("sequence_classification", "masked_lm"):
            ids[f"{family}-{head}"] = make(family, head)
    (HERE / "provenance.json").write_text(
        json.dumps(facts | {"ids": ids}, ensure_ascii=False, indent=1) + "\n", "utf-8"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
