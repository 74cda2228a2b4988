"""A model written as a Hugging Face folder: weights, configuration, tokenizer, all or nothing.

Decides which names, which ``config.json`` and which other files a folder gets. An unchanged model is
written back byte for byte; changes are patched into the original files. `state` and `write` define order and
bytes, `publish` renames the folder into place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flodl_hf.checkpoints.config.file import patch_json
from flodl_hf.checkpoints.folders import SAFETENSORS, SAFETENSORS_INDEX, WEIGHTS_KEY
from flodl_hf.checkpoints.saving.publish import publish_folder
from flodl_hf.checkpoints.saving.state import WritePlan, WrittenFile, plan_state, verify_files, write_bytes, write_state
from flodl_hf.checkpoints.weights.checksums import write_checksums
from flodl_hf.checkpoints.weights.loading import canonical_names
from flodl_hf.errors import ExportError
from flodl_hf.families.schema.tasks import task_named
from flodl_hf.models.building import FLOATS
from flodl_hf.nn.joined_tensors import joined

if TYPE_CHECKING:
    from flodl_hf.inference.graph_model import GraphModel


DTYPE_NAMES = {getattr(torch, name): name for name in FLOATS}


@dataclass(frozen=True)
class Contents:
    """The contents of a folder to write.

    Attributes:
        plans: its weights, by subfolder.
        others: its other files, by file name.
    """

    plans: Mapping[str, WritePlan]
    others: Mapping[str, bytes]


def export_model(
    model: GraphModel,
    folder: str | Path,
    *,
    overwrite: bool = False,
    max_shard_size: int | str | None = None,
    extra_files: Mapping[str, bytes] | None = None,
    check: Callable[[Path], object] | None = None,
) -> Path:
    """Write ``model`` to ``folder``, every byte read again and compared before it is put in place; return the folder.

    ``checksums.json`` lists length and SHA-256 of every file, for `load` with ``verified=True`` and `flodl-hf verify`.

    A model that was not changed gives the tensor names, order, dtypes and bytes it was read from, and
    the same ``config.json``. A trained or relabelled one gives today's Hugging Face names, and
    ``config.json`` with the changed values patched in.

    Args:
        model: any model of this package.
        folder: where to; parents are made.
        overwrite: replace a folder that contains a model.
        max_shard_size: cut the weights above this size, as ``"5GB"`` or bytes; None keeps the source's layout.
        extra_files: further files to write into the folder, by file name.
        check: called with the written folder before it is published; an exception prevents publication.

    Raises:
        ExportError: the folder is in use or not empty, the disk is full or read-only, or the written files do
            not read back as the same bytes. An older folder is then unchanged.
    """
    contents = model_contents(model, max_shard_size=max_shard_size)
    return write_contents(folder, {"": contents}, overwrite=overwrite, extra_files=extra_files, check=check)


def model_contents(model: GraphModel, *, max_shard_size: int | str | None = None) -> Contents:
    """Return the contents of a model's folder: weights, configuration, tokenizer; arguments as of `export_model`."""
    if (recipe := model.sentence_recipe) is not None and not recipe.routes:
        model = model.on_route()  # one route's recipe was put in the place of all
    plans = {
        inside: plan_state(
            stored_tensors(part), part.source.manifest if part.source and part.source.same_head else None,
            ties=stored_ties(part), max_shard_size=max_shard_size,
        )
        for inside, part in _parts(model).items()
    }  # fmt: skip
    return Contents(plans, surroundings(model))


def write_contents(
    folder: str | Path,
    parts: Mapping[str, Contents],
    *,
    overwrite: bool = False,
    extra_files: Mapping[str, bytes] | None = None,
    check: Callable[[Path], object] | None = None,
) -> Path:
    """Write a folder, every byte read again and compared before it is put in place; return it.

    Args:
        folder: where to; parents are made.
        parts: its contents, by subfolder; "" for the folder itself.
        overwrite: replace a folder that contains a model.
        extra_files: further files to write into the folder, by file name.
        check: as of `export_model`.

    Raises:
        ExportError: as of `export_model`.
    """
    plans = {_inside(at, name): plan for at, part in parts.items() for name, plan in part.plans.items()}
    others = {_inside(at, name): data for at, part in parts.items() for name, data in part.others.items()}
    others |= dict(extra_files or {})
    return publish_folder(
        folder,
        writer(plans, others, [], check),
        overwrite=overwrite,
        needed_bytes=needed_bytes(plans, others),
    )


def needed_bytes(plans: Mapping[str, WritePlan], others: Mapping[str, bytes]) -> int:
    """Return the size of weights and other files."""
    return sum(plan.nbytes for plan in plans.values()) + sum(map(len, others.values()))


def _inside(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder and name else folder or name


def surroundings(model: GraphModel) -> dict[str, bytes]:
    """Return the files other than weights, by file name: configuration, tokenizer, a recipe of sentence vectors."""
    found: dict[str, bytes] = {}
    for inside, part in _parts(model).items():
        stored = {} if part.source is None else part.source.tokenizer_files
        tokenizer = stored if part.tokenizer is None else part.tokenizer.files()
        files = {"config.json": config_text(part).encode(), **tokenizer}
        found |= {_inside(inside, name): data for name, data in files.items()}
    return found | _recipe(model)


def _parts(model: GraphModel) -> dict[str, GraphModel]:
    """Return the modules with weights, by folder: the model at the root, or each route's encoder in its folder."""
    if model.routed is None:
        return {"": model}
    assert model.sentence_recipe is not None
    return {model.sentence_recipe.transformer: model, **dict(model.routed.items())}


def writer(
    plans: Mapping[str, WritePlan],
    others: Mapping[str, bytes],
    written: list[WrittenFile],
    check: Callable[[Path], object] | None = None,
) -> Callable[[Path], None]:
    """Return a function that fills a folder and compares it; it adds the files to ``written``, weights first."""

    def write(stage: Path) -> None:
        for inside, plan in plans.items():
            (stage / inside).mkdir(parents=True, exist_ok=True)
            files = write_state(stage / inside, plan)
            written.extend(replace(file, name=_inside(inside, file.name)) for file in files)
        for name, data in others.items():
            place = stage / name
            place.parent.mkdir(parents=True, exist_ok=True)
            written.append(replace(write_bytes(place, data), name=name))
        write_checksums(stage, ((file.name, file.size, file.sha256) for file in written))
        verify_files(stage, written)
        if check is not None:
            check(stage)

    return write


def stored_tensors(model: GraphModel) -> dict[str, Tensor]:
    """Return every tensor to write under the name it gets in the file: ties, carried tensors and joined parts too."""
    state = {name: value.detach() for name, value in model.graph.named_parameters(remove_duplicate=False)}
    tied = {tie.also: tie.kept for tie in _live_ties(model)}
    source, names = model.source, model.config.family.key_map(model.config.encoder, model.head)
    if source is not None and source.same_head:
        result = {source.placed[ours]: value for ours, value in state.items() if ours in source.placed}
        for repeated, kept in source.duplicates:
            if kept in result:
                result[repeated] = result[kept]
        unplaced = [ours for ours in state if ours not in source.placed and ours not in tied]
        if unplaced:
            raise ExportError(f"export: tensors without a stored name: {', '.join(unplaced[:5])}", problems=unplaced)
        result |= {name: state[kept] for name, kept in _names_of_ties(model) if name not in result}
        return joined(result) | dict(source.carried) | _late_weight(model, source.carried)
    written = canonical_names(
        model.config.family, names, [name for name in state if name not in tied], bare=model.head == "base"
    )
    result = {theirs: state[ours] for ours, theirs in written.items()}
    if model.head != "base" and not model.config.tie_words:
        # Untied, the reference keeps both names of a repeated tensor as separate tensors.
        for alias, canonical in model.config.family.heads[model.head].aliases:
            result[alias] = result[canonical].clone()
    bare = model.config.family.base_prefix + "." if model.head == "base" else ""
    kept = {} if source is None else source.kept
    return joined(result) | {name.removeprefix(bare): value for name, value in kept.items()}


def _late_weight(model: GraphModel, carried: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ColBERT's projection, stored with the weights of its class, if it was trained."""
    late = None if model.sentence_recipe is None else model.sentence_recipe.late
    name = next((name for name in ("linear.weight", "module.linear.weight") if name in carried), None)
    weight = getattr(late.projections[0], "weight", None) if late is not None else None
    if name is None or weight is None or torch.equal(weight, carried[name].float()):
        return {}
    return {name: weight}


def stored_ties(model: GraphModel) -> dict[str, str]:
    """Return, by stored name, which repeated names refer to the same tensor."""
    source = model.source
    if source is None or not source.same_head:
        return {}
    ties = {repeated: kept for repeated, kept in source.duplicates if repeated not in source.carried}
    tied = {name: source.placed.get(kept) for name, kept in _names_of_ties(model)}
    return ties | {name: kept for name, kept in tied.items() if kept is not None and name != kept}


def _names_of_ties(model: GraphModel) -> list[tuple[str, str]]:
    """Return stored names of repeated tensors, with our name of the tensor: a file with both names gets both again."""
    assert model.source is not None
    renamed = {} if model.load_report is None else model.load_report.renamed
    names = model.config.family.key_map(model.config.encoder, model.head)
    kept = {names.theirs(tie.also): tie.kept for tie in _live_ties(model)}
    stored = ((name, renamed.get(name, name)) for name in model.source.manifest.tensors)
    return [(name, kept[canonical]) for name, canonical in stored if canonical in kept]


def _live_ties(model: GraphModel) -> list[Any]:
    """Return the declared ties with two names for one tensor."""
    if model.head == "base":
        return []
    parameters = dict(model.graph.named_parameters(remove_duplicate=False))
    ties = model.config.family.heads[model.head].ties
    return [tie for tie in ties if parameters[tie.kept] is parameters[tie.also]]


def config_text(model: GraphModel) -> str:
    """Return the text of ``config.json``: the source's, with what changed patched in."""
    config = model.config
    recipe = model.sentence_recipe
    scored = recipe is not None and recipe.scorer is not None and recipe.scorer.size == config.num_labels
    changes: dict[str, Any] = {} if scored else dict(config.label_changes())
    if changes and "num_labels" in config.source:
        changes["num_labels"] = config.num_labels
    if config.problem_type is not None and config.source.get("problem_type") != config.problem_type:
        changes["problem_type"] = config.problem_type
    if "vocab_size" in config.source and config.source["vocab_size"] != config.encoder.vocab_size:
        changes["vocab_size"] = config.encoder.vocab_size
    if model.source is None or not model.source.same_head:
        changes["architectures"] = [architecture(model)]
    stored, gone = config.stored_changes(recipe.activation if recipe is not None else None)
    changes |= stored
    if config.source.get(WEIGHTS_KEY) not in (None, SAFETENSORS, SAFETENSORS_INDEX):
        gone = [*gone, WEIGHTS_KEY]  # they are written under their usual names
    dtype = DTYPE_NAMES.get(model.dtype)
    for key in ("dtype", "torch_dtype"):
        if dtype is not None and config.source.get(key) not in (None, dtype):
            changes[key] = dtype
    if config.text is None:
        base = config.to_dict() | {"dtype": dtype} if dtype else config.to_dict()
        return json.dumps(base | changes, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    return patch_json(config.text, changes, remove=gone)


def architecture(model: GraphModel) -> str:
    """Return the class name that transformers loads this model with."""
    return model.config.family.class_prefix + task_named(model.head).hf_suffix


def _recipe(model: GraphModel) -> dict[str, bytes]:
    from flodl_hf.checkpoints.sentence.writing import recipe_files

    # A classifier that was trained on such an encoder keeps them too: its encoder still makes vectors.
    recipe = model.sentence_recipe
    if recipe is None or (recipe.activation is not None and recipe.activation != model.config.score_activation):
        return {}
    if recipe.late is not None:
        return dict(recipe.files)
    return dict(recipe.files) or recipe_files(recipe, model.config.encoder.hidden_size)
