"""Configurations of peft on small models: each library reads what the other wrote, and the logits are equal."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flodl_hf.heads.auto import head_named
from flodl_hf.parity.cell import Bench, Cell
from tests.peers.case import CLOSE, Case

__all__ = ["cases"]

# A family's names of the query and value, of one feed-forward matrix, and of its word table.
NAMES: dict[str, tuple[list[str], list[str], str]] = {
    "bert": (["query", "value"], ["output.dense"], "word_embeddings"),
    "roberta": (["query", "value"], ["output.dense"], "word_embeddings"),
    "distilbert": (["q_lin", "v_lin"], ["lin2"], "word_embeddings"),
    "modernbert": (["Wqkv"], ["Wi"], "tok_embeddings"),
}
TASKS = {"sequence_classification": "SEQ_CLS", "token_classification": "TOKEN_CLS", "base": "FEATURE_EXTRACTION"}
LORA: dict[str, dict[str, Any]] = {
    "plain": {}, "all linear": {"target_modules": "all-linear"}, "biases": {"bias": "all"},
    "biases of targets": {"bias": "lora_only"}, "bias of LoRA": {"lora_bias": True},
    "bias of LoRA on all": {"lora_bias": True, "target_modules": "all-linear", "bias": "all"},
    "DoRA": {"use_dora": True}, "DoRA with biases": {"use_dora": True, "bias": "lora_only", "target_modules": "all-linear"},
    "rsLoRA": {"use_rslora": True}, "rsLoRA with DoRA": {"use_rslora": True, "use_dora": True, "lora_dropout": 0.1},
    "ranks by pattern": {"rank_pattern": {"QUERY": 2}}, "alphas by pattern": {"alpha_pattern": {"QUERY": 32}},
    "ranks and alphas by expression": {"rank_pattern": {r".*\.1\..*QUERY": 6}, "alpha_pattern": {r"^.*0\..*QUERY$": 3}},
    "rsLoRA by pattern": {"rank_pattern": {"QUERY": 8}, "alpha_pattern": {"QUERY": 5}, "use_rslora": True},
    "one layer": {"layers_to_transform": [1]}, "targets as an expression": {"target_modules": r".*\.0\..*QUERY"},
    "all but some": {"target_modules": "all-linear", "exclude_modules": ["QUERY"]},
    "embeddings": {"target_modules": ["TABLE"]}, "embeddings and more": {"target_modules": ["TABLE", "QUERY"], "use_dora": True},
    "tokens": {"trainable_token_indices": [5, 9, 11]}, "tokens by name": {"trainable_token_indices": {"TABLE": [9, 5]}},
    "tokens alone": {"target_modules": ["QUERY"], "trainable_token_indices": [0, 1, 2], "bias": "all"},
    "orthogonal": {"init_lora_weights": "orthogonal"}, "gaussian": {"init_lora_weights": "gaussian"},
    "feed-forward": {"target_modules": ["FORWARD"], "use_rslora": True},
    "saved modules": {"modules_to_save": ["TABLE"]},
}  # fmt: skip
IA3: dict[str, dict[str, Any]] = {
    "usual": {"target_modules": ["QUERY", "FORWARD"], "feedforward_modules": ["FORWARD"]},
    "outputs alone": {"target_modules": ["QUERY"], "feedforward_modules": []},
    "expression": {"target_modules": r".*(QUERY|FORWARD)", "feedforward_modules": ["FORWARD"]},
}
VIRTUAL: dict[str, tuple[str, dict[str, Any]]] = {
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 4}),
    "prompt of a single token": ("PromptTuningConfig", {"num_virtual_tokens": 1}),
    "prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 3}),
    "projected prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 3, "prefix_projection": True, "encoder_hidden_size": 8}),
    "p-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 3, "encoder_hidden_size": 8}),
    "p-tuning with an LSTM": (
        "PromptEncoderConfig",
        {"num_virtual_tokens": 3, "encoder_hidden_size": 8, "encoder_reparameterization_type": "LSTM", "encoder_num_layers": 2},
    ),
}  # fmt: skip
# Kinds that this library refuses, and what the error names.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *((f"{kind}Config", {"target_modules": ["QUERY"]}, kind.upper()) for kind in ("LoHa", "LoKr", "OFT", "VBLoRA", "HRA")),
    ("AdaLoraConfig", {"target_modules": ["QUERY"], "total_step": 9}, "ADALORA"),
    ("FourierFTConfig", {"target_modules": ["QUERY"], "n_frequency": 8}, "FOURIERFT"),
    ("LNTuningConfig", {}, "LN_TUNING"), ("VeraConfig", {"target_modules": ["QUERY"]}, "VERA"),
    ("BOFTConfig", {"target_modules": ["QUERY"]}, "BOFT"), ("XLoraConfig", {}, "XLORA"), ("PolyConfig", {}, "POLY"),
    ("LoraConfig", {"target_modules": ["QUERY"], "init_lora_weights": "pissa"}, "init_lora_weights"),
    ("LoraConfig", {"target_modules": ["QUERY"], "target_parameters": ["a.weight"]}, "target_parameters"),
    ("LoraConfig", {"target_modules": ["QUERY"], "use_qalora": True}, "use_qalora"),
]  # fmt: skip


def named(value: Any, family: str) -> Any:
    """Return a setting with the family's names in it."""
    (query, *_), forward, table = NAMES[family]
    if isinstance(value, str):
        return (
            value.replace("QUERY", query)
            .replace("FORWARD", forward[0].replace(".", r"\.") if ".*" in value else forward[0])
            .replace("TABLE", table)
        )
    if isinstance(value, list):
        return [named(one, family) for one in value]
    if isinstance(value, dict):
        return {named(key, family): named(one, family) for key, one in value.items()}
    return value


def kinds(family: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for name, options in LORA.items():
        yield f"LoRA, {name}", "LoraConfig", {"r": 4, "lora_alpha": 8, "target_modules": NAMES[family][0], **options}
    for name, options in IA3.items():
        yield f"IA3, {name}", "IA3Config", options
    for name, (config, options) in VIRTUAL.items():
        yield name, config, options


def cases(room: Path, *, quick: bool = False) -> Iterator[Case]:
    """Return both directions of each configuration for each family and task, and the kinds that are refused."""
    number = itertools.count()
    for family, head in itertools.product(list(NAMES)[: 1 if quick else None], TASKS):
        with Bench(Cell(family, head)) as bench:
            for name, config, options in kinds(family):
                place = room / str(next(number))
                title = f"{family}/{head}, {name}"
                options = named(options, family)
                if name in VIRTUAL:
                    sizes = bench.theirs.model.config
                    options |= {"token_dim": sizes.hidden_size, "num_layers": sizes.num_hidden_layers}
                    options |= {"num_attention_heads": sizes.num_attention_heads}
                if config == "LoraConfig" and isinstance(options.get("target_modules"), str):
                    options["target_modules"] = options["target_modules"].replace("\\\\", "\\")
                theirs = memoised(partial(written, bench, config, options, place / "theirs"))
                # Sums of LoRA are equal to the bit; a folder contains the result of a network that made virtual tokens.
                close = 0.0 if config == "LoraConfig" else CLOSE
                yield Case(f"{title}: their folder", theirs, partial(read, bench, theirs, place / "theirs"), close)
                yield Case(f"{title}: our folder", theirs, partial(rewritten, bench, theirs, place), close)
            for config, options, word in REFUSED if head == "sequence_classification" else ():
                place = room / str(next(number))
                refused = partial(stated, bench, config, named(options, family), place)
                yield Case(f"{family}, {config} {options}", lambda: None, refused, refused=word)


def memoised(make: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that computes its result once, or raises its error again."""
    found: list[Any] = []

    def once() -> Any:
        if not found:
            try:
                found.append(make())
            except Exception as error:
                found.append(error)
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    return once


def written(bench: Bench, config: str, options: dict[str, Any], folder: Path) -> list[Any]:
    """Return the logits of an adapter of peft that is as if trained, and write its folder."""
    import peft

    settings = getattr(peft, config)(task_type=TASKS[bench.cell.head], **options)
    model = peft.get_peft_model(bench.load_theirs().model, settings)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.1)
    model.save_pretrained(folder)
    return of_peft(model, bench)


def of_peft(model: Any, bench: Bench) -> list[Any]:
    """Return peft's outputs without those at the places of a prompt, which this library leaves out."""
    settings = model.eval().active_peft_config
    found = outputs(model if settings.is_prompt_learning else model.get_base_model(), bench)
    widths = [batch.inputs["input_ids"].shape[1] for batch in bench.batches()]
    own = [one[:, -width:] if one.ndim == 3 else one for one, width in zip(found, widths, strict=True)]
    return at_words(own, bench)


def outputs(model: Any, bench: Bench) -> list[Any]:
    name = "last_hidden_state" if bench.cell.head == "base" else "logits"
    # With virtual tokens peft leaves out token types, with one task or another.
    inputs = [{key: one for key, one in batch.inputs.items() if key != "token_type_ids"} for batch in bench.batches()]
    with torch.no_grad():
        return [model(**one)[name] for one in inputs]


def at_words(found: list[Any], bench: Bench) -> list[Any]:
    """Return the outputs with zeros at the places of padding."""
    masks = [batch.inputs.get("attention_mask") for batch in bench.batches()]
    return [
        one if one.ndim < 3 or mask is None else one * mask[:, :, None] for one, mask in zip(found, masks, strict=True)
    ]


def read(bench: Bench, theirs: Callable[[], Any], folder: Path) -> list[Any]:
    """Return the logits of this library for a folder that peft wrote."""
    theirs()
    return at_words(outputs(opened(bench, folder), bench), bench)


def opened(bench: Bench, folder: Path) -> Any:
    return head_named(bench.cell.head).model.from_pretrained(bench.folder, adapter=folder).eval()


def rewritten(bench: Bench, theirs: Callable[[], Any], place: Path) -> list[Any]:
    """Return the logits of peft for the folder that this library writes for the same adapter."""
    import peft

    theirs()
    opened(bench, place / "theirs").save_pretrained(place / "ours")
    return of_peft(peft.PeftModel.from_pretrained(bench.load_theirs().model, place / "ours"), bench)


def stated(bench: Bench, config: str, options: dict[str, Any], folder: Path) -> Any:
    """Open a folder with this configuration and no weights; the configuration is read first."""
    import peft

    getattr(peft, config)(task_type=TASKS[bench.cell.head], **options).save_pretrained(folder)
    (folder / "adapter_model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    return str(opened(bench, folder))
