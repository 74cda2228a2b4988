"""From a name to a filled model: resolve, read the configuration, match the headers, then read the bytes.

Nothing is half done: every fault that headers can show is raised before a weight is read, and the
model is returned only when it is complete. The files and settings are kept as the model's
`Source`, from which export writes it back.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from flodl.devices import default_device, find_device
from flodl.errors import CheckpointError, ConfigError, DeviceError, FlodlError, capped
from flodl.garbage_collection import gc_paused
from flodl.graph import Graph
from flodl_hf.checkpoints.config.file import MAX_LABELS
from flodl_hf.checkpoints.config.model_config import ModelConfig, listed_texts, read_config_file
from flodl_hf.checkpoints.folders import MODEL_FILES, TOKENIZER_FILES, VOCABULARY_FILES, holds_adapter
from flodl_hf.checkpoints.hub.download import resolve_folder
from flodl_hf.checkpoints.sentence.recipe import SentenceTransformerConfig, read_recipe
from flodl_hf.checkpoints.sentence.settings import transformer_folder
from flodl_hf.checkpoints.sentence.vectors import colbert_recipe
from flodl_hf.checkpoints.weights.checkpoint import Checkpoint
from flodl_hf.checkpoints.weights.loaded import OnDisk, Source, warn_of_unexpected
from flodl_hf.checkpoints.weights.loading import Plan, class_of
from flodl_hf.checkpoints.weights.manifest import Weights, stays_on_disk
from flodl_hf.families.schema import PassthroughTensor
from flodl_hf.inference.classes import score_function
from flodl_hf.models.adapted import Adapted
from flodl_hf.models.building import (
    FiniteCheck,
    assign,
    check_dtype,
    check_duplicates,
    fill,
    initialise,
    open_weights,
    plan_folder,
    settle_dtype,
    settle_ties,
    tie_tensors,
)
from flodl_hf.models.sentence_folder import (
    SETFIT,
    follow_routes,
    note_setfit,
    with_overrides,
    with_scores,
)
from flodl_hf.nn.attention import check_implementation
from flodl_hf.nn.joined_tensors import as_whole, parts_from

if TYPE_CHECKING:
    from flodl_hf.inference.cuda_warmup import Warming
    from flodl_hf.models.adapters.folder import AdapterFolder
    from flodl_hf.tokenization.tokenizer import Tokenizer

ModelT = TypeVar("ModelT", bound=Adapted)


def numbered_labels(count: int | None) -> list[str] | None:
    """Return the names of so many labels, as transformers gives them.

    Raises:
        ConfigError: not a number of labels.
    """
    if count is None:
        return None
    if not isinstance(count, Integral) or not 0 < count <= MAX_LABELS:
        raise ConfigError(f"num_labels={count!r}; expected an integer from 1 to {MAX_LABELS}", problems=["num_labels"])
    return [f"LABEL_{i}" for i in range(count)]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """How folders are loaded: the arguments of `EncoderModel.from_pretrained` that apply to each of them."""

    dtype: torch.dtype | str | None
    device: torch.device | str | None
    attention: str
    labels: Sequence[str] | None
    problem_type: str | None
    ignore_config_keys: Sequence[str]
    strict_config: bool
    allow_nonfinite: bool
    mapped: bool | None
    weights: Weights | None


def load_model(
    model_class: type[ModelT],
    name_or_path: str | Path,
    wanted: Wanted,
    *,
    hub: Mapping[str, Any],
    verified: bool | str,
    adapter: str | Path | None,
) -> ModelT:
    """Return the filled model; see `EncoderModel.from_pretrained` for arguments and errors.

    Raises:
        DeviceError: torch's default device stores no values.
    """
    dtype, attention, around = check_dtype(wanted.dtype), check_implementation(wanted.attention), default_device()
    device = around if wanted.device is None else wanted.device
    if wanted.device is None and around is not None and around.type == "meta":
        raise DeviceError(
            "device: found torch's default device 'meta', which stores no values; expected a device for the weights; "
            "load outside of torch.device('meta'), or pass device='cpu'",
            device="meta",
        )
    device = None if device is None else find_device(device)
    labels = None if wanted.labels is None else listed_texts(wanted.labels, "labels")
    wanted = replace(wanted, dtype=dtype, attention=attention, device=device, labels=labels)
    name_or_path, opened = base_and_adapter(name_or_path, adapter, hub)
    # The default device is where the model goes, not where its parts are put together.
    with gc_paused(settled=True), nullcontext() if around is None else torch.device("cpu"):
        model = _load(model_class, name_or_path, wanted, hub=hub, verified=verified, adapter=opened)
        if opened is not None:
            model._held_adapters.known["default"] = opened.adapter(model)
            model.set_adapter("default")
    return model.eval()


def base_and_adapter(
    name_or_path: str | Path, adapter: str | Path | None, hub: Mapping[str, Any]
) -> tuple[str | Path, AdapterFolder | None]:
    """Return the base's name and its adapter, or None without an adapter."""
    if adapter is None and not holds_adapter(name_or_path):
        return name_or_path, None
    from flodl_hf.models.adapters.folder import open_adapter

    opened = open_adapter(name_or_path if adapter is None else adapter, hub)
    return opened.base if adapter is None else name_or_path, opened


def _load(
    model_class: type[ModelT],
    name_or_path: str | Path,
    wanted: Wanted,
    *,
    hub: Mapping[str, Any],
    verified: bool | str = False,
    adapter: AdapterFolder | None = None,
) -> ModelT:
    """Load the model of one folder and return it."""
    warming = _warming(wanted.device)
    held = recipe = None
    root, commit = resolve_folder(name_or_path, hub, MODEL_FILES)
    if verified:
        from flodl_hf.checkpoints.weights.checksums import hold

        held = hold(root, verified)
    folder = root
    if os.path.lexists(root / "modules.json"):
        folder, recipe = transformer_folder(root), read_recipe(root)
    if any(os.path.lexists(root / name) for name in SETFIT):
        note_setfit(root, model_class.head)
    config, relabelled = _configured(folder, model_class.head, wanted, adapter, recipe)
    # A dense layer computes the scores of such a cross-encoder, so the weight files have no head.
    scored = recipe is not None and recipe.scorer is not None and model_class.head == "sequence_classification"
    head = "base" if scored else model_class.head
    with open_weights(folder, config) as checkpoint:
        manifest = checkpoint.manifest
        plan, graph = plan_folder(
            config, head, manifest.tensors, str(folder), relabelled=relabelled, strict=wanted.strict_config,
            pooler=not scored,
        )  # fmt: skip
        report = plan.report
        if report.unexpected:
            warn_of_unexpected(report, manifest.tensors, stacklevel=2)
        if manifest.passed_over:
            warnings.warn(f"{folder}: {manifest.passed_over}", stacklevel=2)
            report.notes.append(manifest.passed_over)
        dtype = settle_dtype(wanted.dtype, config, plan, manifest)
        if warming is not None:
            warming.layers(graph, dtype)
        same_head = report.source_head == head and not report.new
        carried = list(report.ignored) if same_head else []
        kept = _kept(report.ignored, config, head)
        repeated = (name for pair in plan.duplicates for name in pair)
        names = list(dict.fromkeys([*plan.placed.values(), *repeated, *carried, *kept]))
        values, on_disk = _read(checkpoint, plan, names, folder, dtype, wanted)
    with FiniteCheck(values, plan.placed.values(), dtype, done=on_disk.release if on_disk else None) as finite:
        overrides = recipe.transformer_settings.tokenizer if recipe is not None else {}
        tokenizer = load_tokenizer(folder, config, strict=False, overrides=overrides)
        stored = folder / (manifest.index_name or manifest.files[0].name)
        finite.wait(str(stored), report, allowed=wanted.allow_nonfinite)
    if tokenizer is not None:
        few = tokenizer.few_tokens(config.encoder.vocab_size)
        report.notes += (*tokenizer.notes, *([few] if few else ()))

    ties = [*plan.ties, *settle_ties(plan, values, report)]
    check_duplicates(plan, values, carried)
    beside = _taken(graph, kept, values, str(folder))
    fill(graph, plan, values, dtype)
    if report.new:
        assign(graph, {name: torch.empty(graph.get_parameter(name).shape, dtype=dtype) for name in report.new})
        initialise(graph, report.new, float(config.source.get("initializer_range", 0.02)))
    tie_tensors(graph, ties)
    if recipe is not None and recipe.changes_states:
        recipe.shares(config.encoder.num_layers, str(root))  # raises an error for a hidden state that is not there
    model = model_class(config, with_scores(graph, recipe) if scored and recipe is not None else graph)
    model._mark_untrained(report.new)
    model.load_report = report
    model.tokenizer = tokenizer
    model.sentence_recipe = recipe
    is_colbert = class_of(config.source.get("architectures")) == "HF_ColBERT" and recipe is None
    if is_colbert and "HF_ColBERT" in config.family.pretraining:
        late, files = colbert_recipe(folder)
        model.sentence_recipe = SentenceTransformerConfig(normalize=True, late=late, files=files)
    model.source = Source(
        name=str(name_or_path),
        folder=folder,
        commit=commit,
        manifest=manifest,
        placed=plan.placed,
        duplicates=plan.duplicates,
        carried={name: values[name] for name in carried},
        kept=beside,
        same_head=same_head,
        config_text=config.text or "",
        tokenizer_files=tokenizer_files(folder) if tokenizer is None else {},
    )
    if model.sentence_recipe is not None and model.sentence_recipe.routes:
        mapped = in_hub_cache(folder) if wanted.mapped is None else wanted.mapped
        others = replace(wanted, labels=None, problem_type=None, mapped=mapped)
        follow_routes(model, root, lambda inside: _load(model_class, inside, others, hub={}))
    model.set_attention(wanted.attention)
    model.eval()
    if on_disk is not None:
        model._on_disk = on_disk
    elif wanted.device is not None:
        model.to(wanted.device)
    if warming is not None:
        warming.wait()
    if held is not None:
        held()
    return model


def _warming(device: str | torch.device | None) -> Warming | None:
    """Begin to make a CUDA device ready beside the reading of weights."""
    if device is None or torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return None
    from flodl_hf.inference.cuda_warmup import Warming

    return Warming(torch.device(device))


def _configured(
    folder: Path, head: str, wanted: Wanted, adapter: AdapterFolder | None, recipe: SentenceTransformerConfig | None
) -> tuple[ModelConfig, bool]:
    """Return a folder's configuration, and whether its labels are set by the caller or an adapter."""
    config = read_config_file(folder, wanted.ignore_config_keys, strict_config=wanted.strict_config)
    if recipe is not None:
        config = with_overrides(config, recipe, wanted.ignore_config_keys, strict_config=wanted.strict_config)
    for lines, fault, remedy in (
        (config.overruled, "settings contradict others of the file and are ignored, as by transformers",
         "Remove the wrong ones"),
        ([f"{key}: {value}" for key, value in config.left_out.items()],
         "sizes are not stated; transformers' defaults are used", "Add the correct sizes to the file"),
    ):  # fmt: skip
        if lines:
            warnings.warn(
                f"{config.where}: {fault}:\n{capped(lines)}\n{remedy}; strict_config=True refuses such a file.",
                stacklevel=3,
            )
    labels = wanted.labels
    if adapter is not None and labels is None:
        labels = adapter.labels(config, head)
    if labels is not None or wanted.problem_type is not None:
        config = config.changed(labels=labels, problem_type=wanted.problem_type)
    if head == "sequence_classification" and config.score_activation is not None:
        score_function(config)  # raises an error if the stored activation is not known
    return config, labels is not None


def _read(
    checkpoint: Checkpoint, plan: Plan, names: Sequence[str], folder: Path, dtype: torch.dtype, wanted: Wanted
) -> tuple[dict[str, Tensor], OnDisk | None]:
    """Return the stored tensors of these names, and where weights stay on disk what knows of those.

    Blobs of a Hub cache are never rewritten, so they may be shown instead of copied; a folder that someone may write to
    is copied, so that no later change reaches the model. What goes to another device is copied there, so weights in
    several files, which are large, need not be in memory as well.
    """
    mapped, place = wanted.mapped, torch.device("cpu" if wanted.device is None else wanted.device)
    used = map(as_whole, plan.placed.values())
    stays = stays_on_disk(
        wanted.weights, checkpoint.manifest, used, dtype, place, mapped=mapped, notes=plan.report.notes
    )
    wholes = list(dict.fromkeys(map(as_whole, names)))
    if not stays:
        shown = in_hub_cache(folder) if mapped is None else mapped
        copied_on = place.type != "cpu" and mapped is None and len(checkpoint.manifest.files) > 1
        moved = set(map(as_whole, plan.placed.values())) if copied_on else set()
        values = checkpoint.read_all([name for name in wholes if name in moved], mapped=True)
        values |= checkpoint.read_all([name for name in wholes if name not in moved], mapped=shown)
        return parts_from(values, names), None
    layers = {as_whole(name) for ours, name in plan.placed.items() if ours.startswith("encoder.layers.")}
    values = checkpoint.read_all([name for name in wholes if name in layers], mapped=True)
    values |= checkpoint.read_all([name for name in wholes if name not in layers])
    values = parts_from(values, names)
    return values, OnDisk((values[name] for name in names if as_whole(name) in layers), place)


def _kept(unused: Iterable[str], config: ModelConfig, head: str) -> dict[str, PassthroughTensor]:
    """Return the stored tensors that are kept outside the model, by stored name."""
    prefix = config.family.base_prefix + "."
    stored = {name if name.startswith(prefix) else prefix + name: name for name in unused}
    found = {}
    for kept in config.family.kept_by(head):
        name = next((stored[name] for name in (kept.name, *kept.also) if name in stored), None)
        if name is not None:
            found[name] = kept
    return found


def _taken(
    graph: Graph, passthrough: Mapping[str, PassthroughTensor], values: Mapping[str, Tensor], source: str
) -> dict[str, Tensor]:
    """Give modules their values from kept tensors; return these by their names in new files."""
    modules: dict[str | None, Any] = dict(graph.named_modules())
    for name, entry in passthrough.items():
        if entry.module in modules:
            try:
                modules[entry.module].take(values[name])
            except ValueError as fault:
                raise CheckpointError(
                    f"{source}: {name}: {fault}. config.json and the weights do not belong together; fetch both again.",
                    where=source,
                ) from None
    return {entry.name: values[name] for name, entry in passthrough.items()}


def in_hub_cache(folder: Path) -> bool:
    """Return whether a folder is a snapshot of the Hub's cache, with links to blobs named by content."""
    return folder.parent.name == "snapshots" and (folder.parent.parent / "blobs").is_dir()


def load_tokenizer(
    folder: Path, config: ModelConfig, *, strict: bool = True, overrides: Mapping[str, Any] | None = None
) -> Tokenizer | None:
    """Return the folder's tokenizer, or None if tokenizer files are missing or, unless strict, incomplete.

    Args:
        folder: with the files.
        config: of the model.
        strict: raise if the files are incomplete.
        overrides: values that override ``tokenizer_config.json``.

    Raises:
        TokenizerError: damaged files, or a token id without a row in the word table.
    """
    if not any(os.path.lexists(folder / name) for name in VOCABULARY_FILES):
        return None
    from flodl_hf.tokenization.tokenizer import Tokenizer

    try:
        tokenizer = Tokenizer.from_folder(folder, model_type=config.model_type)
        if overrides:
            tokenizer = overridden(tokenizer, overrides, folder, config.model_type)
    except FlodlError as fault:
        if strict or "words" not in fault.details:
            raise
        return warnings.warn(f"the model has no tokenizer: {fault.message}", UserWarning, stacklevel=2)
    types = config.token_types if tokenizer.settings.type_ids else 0
    tokenizer.check_fits(config.encoder.vocab_size, types or None)
    return tokenizer


def overridden(tokenizer: Tokenizer, overrides: Mapping[str, Any], folder: Path, model_type: str) -> Tokenizer:
    """Return the tokenizer with other values in its ``tokenizer_config.json``.

    Raises:
        TokenizerError: a value is not understood.
    """
    from flodl_hf.tokenization.settings import with_settings

    files = with_settings(tokenizer.files(), overrides, str(folder))
    return type(tokenizer).from_files(files, folder=folder, model_type=model_type)


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Return the tokenizer files of a folder without a loaded tokenizer, by file name, so that saving keeps them.

    No output depends on them, so an unreadable file is skipped.
    """
    found: dict[str, bytes] = {}
    for name in TOKENIZER_FILES:
        if os.path.lexists(folder / name):
            from flodl_hf.tokenization.settings import read_bytes

            with contextlib.suppress(FlodlError, OSError):
                found[name] = read_bytes(folder / name)
    return found
