"""Check adapters: compare our outputs with transformers' given the adapter's files."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from flodl_hf.parity.cell import REORDERED, Bench, Evidence, gap, verdict

VIRTUAL = 3
ROUNDING = 2e-6
"""Usual error of float32 in outputs near one; models with a larger error amplify differences of other sums as much."""


def adapters(bench: Bench) -> Evidence:
    """Apply an adapter's files in transformers: sums in its weights, prompts before words, prefixes before keys."""
    from flodl_hf.models.adapters.settings import Prefix, Prompt

    model = bench.load()
    before = {name: value.clone() for name, value in model.graph.named_parameters()}
    kinds = [Prompt(VIRTUAL), *([Prefix(VIRTUAL)] if bench.cell.record.takes_prefix else [])]
    gaps: dict[str, float] = {}
    for settings in (None, *kinds):
        found = _sums(bench, model) if settings is None else _virtual(bench, model, settings)
        if isinstance(found, Evidence):
            return found
        gaps |= found
        model.remove_adapter()
        lost = [name for name, value in model.graph.named_parameters() if not torch.equal(value, before[name])]
        if lost:
            return Evidence("adapters", "fail", f"the base changed: {', '.join(lost[:3])}", None, lost[0])
    return verdict("adapters", gaps, "outputs and transformers' with the adapter's files applied", REORDERED)


def _sums(bench: Bench, model: Any) -> dict[str, float] | Evidence:
    """Return how far low-rank sums are from transformers' weights with the sums in them."""
    from flodl_hf.models.adapters.settings import Lora

    out, stored = _written(bench, model, Lora(rank=3, alpha=6, targets="all-linear"), "base_model.model.")
    theirs = bench.load_theirs()
    with torch.no_grad():
        for name, tensor in stored.items():
            module, _, leaf = name.partition(".lora_")
            if leaf == "A.weight":
                weight = theirs.model.get_parameter(f"{module}.weight")
                weight += (2.0 * stored[f"{module}.lora_B.weight"].double() @ tensor.double()).to(weight.dtype)
            elif not leaf:
                theirs.model.get_parameter(name).copy_(tensor)
    again = type(model).from_pretrained(bench.folder, adapter=out)
    whole = type(model).from_pretrained(bench.folder, adapter=out).merge_and_unload()
    exact = replace(theirs, model=deepcopy(theirs.model).double())
    gaps: dict[str, float] = {}
    for batch in bench.batches():
        with torch.no_grad():
            found, back, merged = (m.eval()(**batch.inputs) for m in (model, again, whole))
        unrounded = exact(batch.inputs)
        for name, value in theirs(batch.inputs).items():
            if not torch.equal(found[name], back[name]):
                return Evidence("adapters", "fail", f"{batch.name}: {name} after reading the file again", None, name)
            # The limit follows the size of the outputs, and the error that transformers itself makes in float32.
            size = max(1.0, float(value.abs().max()), gap(value, unrounded[name]) / ROUNDING)
            gaps |= {f"{batch.name}, {name}": max(gap(value, each[name]) for each in (found, merged)) / size}
    return gaps


def _virtual(bench: Bench, model: Any, settings: Any) -> dict[str, float] | Evidence:
    """Return how far a prompt or a prefix is from transformers, given its embeddings, or its keys and values."""
    from flodl_hf.models.adapters.settings import Prompt

    kind = type(settings).__name__
    out, stored = _written(bench, model, settings, "base_model.")
    held, theirs = stored.pop("prompt_embeddings"), bench.load_theirs()
    with torch.no_grad():
        for name, tensor in stored.items():
            theirs.model.get_parameter(name).copy_(tensor)
    again = type(model).from_pretrained(bench.folder, adapter=out)
    gaps: dict[str, float] = {}
    for batch in bench.batches():
        if "position_ids" in batch.inputs:
            continue
        given, ids = dict(batch.inputs), batch.inputs["input_ids"]
        real = given.get("attention_mask", torch.ones_like(ids))
        given["attention_mask"] = torch.cat([real.new_ones(*ids.shape[:-1], VIRTUAL), real], -1)
        if isinstance(settings, Prompt):
            words = theirs.model.get_input_embeddings()(given.pop("input_ids")).detach()
            given["inputs_embeds"] = torch.cat([held.expand(*ids.shape[:-1], -1, -1), words], -2)
            if "token_type_ids" in given:
                types = given["token_type_ids"]
                given["token_type_ids"] = torch.cat([types.new_zeros(*ids.shape[:-1], VIRTUAL), types], -1)
        else:
            given["past_key_values"] = theirs.keys_before(held, len(ids.flatten(0, -2)))
        with torch.no_grad():
            found, back = model.eval()(**batch.inputs), again.eval()(**batch.inputs)
        for name, value in theirs(given).items():
            if name == "past_key_values":
                continue
            mine = found[name]
            if not torch.equal(mine, back[name]):
                return Evidence("adapters", "fail", f"{kind}, {batch.name}: {name} read again", None, name)
            if value.shape != mine.shape:
                value = value[:, VIRTUAL:]
            if mine.shape[:2] == ids.shape:  # padding stands elsewhere there, and nothing reads it
                value, mine = value[real.bool()], mine[real.bool()]
            size = max(1.0, float(value.abs().max()))
            gaps |= {f"{kind}, {batch.name}, {name}": gap(value, mine) / size}
    return gaps


def _written(bench: Bench, model: Any, settings: Any, prefix: str) -> tuple[Path, dict[str, Tensor]]:
    """Return the folder of an adapter that is as if trained, and its tensors by transformers' names."""
    model.add_adapter(settings)
    draw = torch.Generator().manual_seed(bench.seed)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.05)
    out = model.save_pretrained(bench.room / "adapter", overwrite=True)
    stored = load_file(out / "adapter_model.safetensors")
    return out, {name.removeprefix(prefix): tensor for name, tensor in stored.items()}
