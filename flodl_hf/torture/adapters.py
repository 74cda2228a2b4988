"""Suite ``adapters``: folders of adapters whose three files are damaged, exchanged, lost or elsewhere.

What is loaded is right where the adapter holds, to the bit, the tensors that the file plainly has, all of those that it
had, with the scale that the settings plainly say. A folder without its head, or with half of a layer, must not answer.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from flodl_hf.torture.case import Case, Fault, Kind, Verdict, dealt, right, silent, stated
from flodl_hf.torture.checkpoints import checkpoint, encoded, tensors_in, write_files
from flodl_hf.torture.damage import (
    BYTE_DAMAGE,
    ENTRIES,
    ESCAPES,
    NUMBERS,
    RAW,
    VALUES,
    damaged_bytes,
    put_entry,
    spelled,
)
from flodl_hf.torture.judging import judge
from flodl_hf.torture.subjects import Subject

__all__ = ["NAME", "SUBJECTS", "cases", "prepare", "run"]

NAME = "adapters"
SUBJECTS = ("ours",)
WEIGHTS, CONFIG, HEAD = "adapter_model.safetensors", "adapter_config.json", "head_config.json"
FILES = (WEIGHTS, CONFIG, HEAD)
HEADED = "classifier"
RANK, ALPHA = 2, 6
OF = ("lora", "lora", "ia3", "prompt", "prefix")
"""Kinds of adapters, as often as each is damaged."""


@cache
def files(of: str) -> Mapping[str, bytes]:
    """Return the folder of an adapter of a kind with its head, for the base that `checkpoint` makes."""
    from flodl_hf.adapters import IA3, Lora, Prefix, Prompt
    from flodl_hf.auto import AutoModelForSequenceClassification

    with tempfile.TemporaryDirectory() as place:
        base = Path(place) / "base"
        write_files(base, checkpoint())
        model: Any = AutoModelForSequenceClassification.from_pretrained(base)
        settings = {"lora": Lora(rank=RANK, alpha=ALPHA), "ia3": IA3(), "prompt": Prompt(3), "prefix": Prefix(3)}
        model.add_adapter(settings[of])
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape, generator=draw))
        folder = model.save_adapter(Path(place) / "adapter")
        return {name: (folder / name).read_bytes() for name in FILES}


# --- damage -----------------------------------------------------------------------------------------------------------


def _undamaged(_random: Random, number: int) -> Fault:
    return Fault({"of": OF[number % len(OF)]})


def _bytes(random: Random, number: int) -> Fault:
    file, of = FILES[number % len(FILES)], random.choice(OF)
    way = ("flip", "put", "cut", "flip")[number // len(FILES) % 4]
    damage = BYTE_DAMAGE[way](random, random.randrange(10**6), len(files(of)[file]))
    return Fault({"of": of, "file": file, **damage}, FILES)


KEYS = {
    CONFIG: (
        *("peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "target_modules", "task_type"),
        *("modules_to_save", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights", "exclude_modules"),
        *("layers_to_transform", "layers_pattern", "base_model_name_or_path", "use_qalora", "new"),
        *("feedforward_modules", "num_virtual_tokens", "token_dim", "num_layers", "num_transformer_submodules"),
        *("prefix_projection", "encoder_hidden_size"),
    ),
    HEAD: ("architectures", "id2label", "problem_type", "new"),
}
OTHERS = (
    "IA3", "LORA", "PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", ["output.dense"],
    "pissa", "query", "all-linear", "(a+)+$", "[", ["query"], ["key"], ["query", "value", "key"], [[]],
    {"query": 1}, {"query": "x"}, {".*": 3}, {"0": "a", "1": "b", "2": "c"}, {"0": 1}, {"1": "a"}, 4, 6.5, True,
)  # fmt: skip


def _value(random: Random, number: int) -> Fault:
    file = (CONFIG, HEAD)[number % 4 == 3]
    numbers = tuple(f"{RAW}{text}" for text in NUMBERS)
    value = random.choice((*VALUES, *numbers, *ESCAPES, *OTHERS))
    return Fault({"of": random.choice(OF), "file": file, "set": [[random.choice(KEYS[file]), value]]}, FILES)


TALES = (
    "drop", "rename", "extra", "reshape", "half", "whole-numbers", "not-finite", "headless", "head-of-another",
    "swapped", "empty", "one-layer", "prefix", "rank", "dora", "tokens", "kind",
)  # fmt: skip


def _tensors(random: Random, number: int) -> Fault:
    tale = TALES[number % len(TALES)]
    return Fault({"of": random.choice(OF), "tale": tale, "draw": random.randrange(2**32)}, FILES)


def _entry(random: Random, number: int) -> Fault:
    return Fault(
        {
            "of": random.choice(OF),
            "entry": [FILES[number // len(ENTRIES) % len(FILES)], ENTRIES[number % len(ENTRIES)]],
        },
        FILES,
    )


KINDS = (
    Kind("undamaged", 1, _undamaged),
    Kind("bytes", 30, _bytes),
    Kind("value", 34, _value),
    Kind("tensors", 24, _tensors),
    Kind("entry", 6, _entry, {"wall_s": 20.0}),
)

cases = partial(dealt, NAME, KINDS)


def prepare(_subject: Subject) -> None:
    """Make the adapters before workers are forked."""
    for of in OF:
        files(of)


# --- what is written --------------------------------------------------------------------------------------------------


def made(what: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files of a case."""
    found = dict(files(what["of"]))
    if "how" in what:
        found[what["file"]] = damaged_bytes(found[what["file"]], what)
    elif "set" in what:
        values = {**json.loads(found[what["file"]]), **dict(map(tuple, what["set"]))}
        found[what["file"]] = spelled(values).encode("utf-8", "surrogatepass")
    elif "tale" in what:
        found[WEIGHTS] = encoded(list(_told(tensors_in(found[WEIGHTS]), what["tale"], Random(what["draw"])).items()))
    return found


def _told(tensors: dict[str, Tensor], tale: str, random: Random) -> dict[str, Tensor]:
    name = random.choice(list(tensors))
    heads = [name for name in tensors if HEADED in name]
    if tale in ("drop", "rename"):
        moved = tensors.pop(name)
        if tale == "rename":
            tensors[name.replace("layer.", "layer.7") + random.choice(("", ".weight", "\u202e"))] = moved
    elif tale == "extra":
        tensors[name + random.choice((".more", ".lora_A.weight", ".modules_to_save.weight"))] = tensors[name]
    elif tale == "reshape":
        tensors[name] = tensors[name].reshape(-1) if random.random() < 0.5 else tensors[name][..., :-1].contiguous()
    elif tale in ("half", "whole-numbers"):
        tensors[name] = tensors[name].to(torch.float16 if tale == "half" else torch.int64)
    elif tale == "not-finite":
        tensors[name].view(-1)[0] = random.choice((float("nan"), float("inf")))
    elif tale == "headless":
        for head in heads if random.random() < 0.5 else heads[:1]:
            del tensors[head]
    elif tale == "head-of-another":
        rows = random.choice((1, 2, 5))
        tensors |= {head: tensors[head][:1].repeat(rows, *[1] * (tensors[head].ndim - 1)) for head in heads}
    elif tale == "swapped":
        other = random.choice(list(tensors))
        tensors[name], tensors[other] = tensors[other], tensors[name]
    elif tale == "empty":
        tensors.clear()
    elif tale == "one-layer":
        tensors = {name: tensor for name, tensor in tensors.items() if "layer.1" not in name}
    elif tale == "prefix":
        cut = random.choice(("base_model.", "base_model.model.", "base_model.model.bert."))
        tensors = {name.removeprefix(cut): tensor for name, tensor in tensors.items()}
    elif tale == "rank":
        tensors = {n: t[:1].contiguous() if "lora_A" in n else t[:, :1].contiguous() if "lora_B" in n else t
                   for n, t in tensors.items()}  # fmt: skip
    elif tale == "dora":
        ups = {n.replace("lora_B.weight", "lora_magnitude_vector"): t for n, t in tensors.items() if "lora_B" in n}
        tensors |= {n: torch.ones(len(t)) for n, t in ups.items()}
    elif tale == "tokens":
        cut = slice(1, None) if random.random() < 0.5 else slice(0, 1)
        tensors = {n: t[cut].contiguous() if HEADED not in n else t for n, t in tensors.items()}
    elif tale == "kind":
        # What belongs to an adapter of another kind, beside this one's or in its place.
        other = tensors_in(files(random.choice(OF))[WEIGHTS])
        kept = tensors if random.random() < 0.5 else {head: tensors[head] for head in heads}
        tensors = {**other, **kept}
    return tensors


# --- what is right ----------------------------------------------------------------------------------------------------


def run(case: Case, folder: Path, subject: Subject) -> Verdict:
    """Load the adapter that the case made into its base, and compare what it holds."""
    base = folder.parent / f"base-{NAME}"
    if not base.is_dir():
        write_files(base, checkpoint())
    found = made(case.what)
    write_files(folder, found)
    if "entry" in case.what:
        put_entry(folder, *case.what["entry"])
    return judge(case, subject, lambda: _opened(base, folder), lambda model: _right(model, found, case.what["of"]))


def _opened(base: Path, folder: Path) -> Any:
    from flodl_hf.auto import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(base, adapter=folder)


def _right(model: Any, found: Mapping[str, bytes], of: str) -> Verdict:
    from flodl_hf.adapters.attach import adapters_of
    from flodl_hf.adapters.write import stored_adapter

    adapter = adapters_of(model).named("default")
    held = stored_adapter(model, adapter)
    try:
        said = tensors_in(found[WEIGHTS])
        values = json.loads(found[CONFIG])
    except (ValueError, KeyError, TypeError, RecursionError):
        return silent("loaded, though a file cannot plainly be read")
    clean = tensors_in(files(of)[WEIGHTS])
    if held.keys() != clean.keys() or set(said) - set(held):
        return silent(f"other tensors than the folder had: {sorted(set(held) ^ set(clean))[:3]}")
    heads = [name for name in clean if HEADED in name]
    plain = {name: said[name].to(held[name].dtype) for name in held if name in said}
    if plain.keys() != held.keys() or not all(torch.equal(plain[name], held[name]) for name in held):
        return silent("other numbers than the file holds")
    if model.untrained or len(heads) != 2:
        return silent("a head that nobody trained")
    usual = True
    if of == "lora":
        rank, alpha = values.get("r", 8), values.get("lora_alpha", 8)
        patterns = values.get("rank_pattern") or values.get("alpha_pattern")
        scale = alpha / (rank**0.5 if values.get("use_rslora") else rank)
        scales = {getattr(part, "scale", None) for part in adapter.parts.values()}
        if not patterns and scales != {scale}:
            return silent(f"scales {scales}, and the settings say {scale}")
        usual = scales == {ALPHA / RANK}
    same = all(torch.equal(clean[name], held[name]) for name in held) and usual
    return right() if same else stated("as the files plainly say")
