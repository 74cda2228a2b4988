"""From a name to a filled model: resolve, read the configuration, match the headers, then read the bytes.

Nothing is half done: every fault that headers can show is raised before a weight is read, and the
model is returned only when it is complete. The files and settings are kept as the model's
`Source`, from which export writes it back.
"""

from __future__ import annotations

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
from flodl.errors import CheckpointError, ConfigError, DeviceError, printable
from flodl.garbage_collection import gc_paused
from flodl.graph import Graph
from flodl_hf.checkpoints.config.labels import MAX_LABELS
from flodl_hf.checkpoints.config.model_config import ModelConfig, listed_texts, read_config_file
from flodl_hf.checkpoints.config.warnings import warn_of
from flodl_hf.checkpoints.hub.folders import holds_adapter, resolve_folder
from flodl_hf.checkpoints.sentence.recipe import SentenceTransformerConfig, read_recipe
from flodl_hf.checkpoints.sentence.routing import transformer_folder
from flodl_hf.checkpoints.weights.checkpoint.folder import Checkpoint
from flodl_hf.checkpoints.weights.checkpoint.manifest import SourceManifest, StoredTensor
from flodl_hf.checkpoints.weights.file_names import MODEL_FILES, WEIGHTS_KEY, weights_named
from flodl_hf.checkpoints.weights.load_report import warn_of_unexpected
from flodl_hf.checkpoints.weights.loading import Plan, class_of, head_of, plan_load
from flodl_hf.checkpoints.weights.on_disk import OnDisk, Weights, stays_on_disk
from flodl_hf.checkpoints.weights.source import Source
from flodl_hf.families.schema import PassthroughTensor
from flodl_hf.inference.decode.classes import score_function
from flodl_hf.inference.graph_model.model import GraphModel
from flodl_hf.models.adapters.attach import adapters_of
from flodl_hf.models.building import assign, empty_graph, initialise, tie_tensors
from flodl_hf.models.filling import FiniteCheck, check_dtype, check_duplicates, fill, settle_dtype, settle_ties
from flodl_hf.models.folder_tokenizer import load_tokenizer, tokenizer_files
from flodl_hf.models.sentence_folder import (
    colbert_of,
    follow_routes,
    graph_of,
    head_in_files,
    note_setfit,
    with_overrides,
)
from flodl_hf.nn.attention.dot_product import check_implementation
from flodl_hf.nn.layers.parts import as_whole, parts_from

if TYPE_CHECKING:
    from flodl_hf.checkpoints.weights.checksums import Held
    from flodl_hf.inference.cuda_warmup import Warming
    from flodl_hf.models.adapters.folder import AdapterFolder


ModelT = TypeVar("ModelT", bound=GraphModel)


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


def load_model(
    model_class: type[ModelT],
    name_or_path: str | Path,
    *,
    hub: Mapping[str, Any],
    dtype: torch.dtype | str | None,
    device: torch.device | str | None,
    attention: str,
    labels: Sequence[str] | None,
    problem_type: str | None,
    ignore_config_keys: Sequence[str],
    strict_config: bool = False,
    allow_nonfinite: bool = False,
    mapped: bool | None = None,
    weights: Weights | None = None,
    verified: bool | str = False,
    adapter: str | Path | None = None,
) -> ModelT:
    """Return the filled model; see `EncoderModel.from_pretrained` for arguments and errors."""
    given, attention = check_dtype(dtype), check_implementation(attention)
    around = default_device()
    asked = _Wanted(
        dtype=given,
        device=_asked(around) if device is None else find_device(device),
        attention=attention,
        labels=None if labels is None else listed_texts(labels, "labels"),
        problem_type=problem_type,
        ignore_config_keys=ignore_config_keys,
        strict_config=strict_config,
        allow_nonfinite=allow_nonfinite,
        mapped=mapped,
        weights=weights,
    )
    name_or_path, opened = _adapter(name_or_path, adapter, hub)
    # The default device is where the model goes, not where its parts are put together.
    with gc_paused(settled=True), nullcontext() if around is None else torch.device("cpu"):
        model = _load(model_class, name_or_path, asked, hub=hub, verified=verified, adapter=opened)
        if opened is not None:
            held = adapters_of(model)
            held.add("default", opened.adapter(model))
            held.put(model, "default")
    return model.eval()


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """How folders are loaded: the checked arguments of `load_model` that apply to each of them."""

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


def _asked(around: torch.device | None) -> torch.device | None:
    """Return where a model goes for which no device is named.

    Raises:
        DeviceError: torch's default device stores no values.
    """
    if around is not None and around.type == "meta":
        raise DeviceError(
            "device: found torch's default device 'meta', which stores no values; expected a device for the weights; "
            "load outside of torch.device('meta'), or pass device='cpu'",
            device="meta",
        )
    return None if around is None else find_device(around)


def _adapter(
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
    asked: _Wanted,
    *,
    hub: Mapping[str, Any],
    verified: bool | str = False,
    adapter: AdapterFolder | None = None,
) -> ModelT:
    """Load the model of one folder and return it."""
    head = model_class.head
    warming = _warming(asked.device)
    root, commit = resolve_folder(name_or_path, hub, MODEL_FILES)
    held = _held_to(root, verified)
    folder = transformer_folder(root)
    recipe = read_recipe(root)
    note_setfit(root, head)
    config, relabelled = _configured(folder, head, asked, adapter, recipe)
    head = head_in_files(head, recipe)
    own = head == model_class.head
    read = _read_folder(folder, config, head, asked, warming, relabelled=relabelled, pooler=own)
    report, kept = read.plan.report, _kept(read.plan.report.ignored, config, head)
    stored = read.manifest.index_name or read.manifest.files[0].name
    with read.finite:
        overrides = recipe.transformer_settings.tokenizer if recipe is not None else {}
        tokenizer = load_tokenizer(folder, config, strict=False, overrides=overrides)
        read.finite.wait(str(folder / stored), report, allowed=asked.allow_nonfinite)
    if tokenizer is not None:
        few = tokenizer.few_tokens(config.encoder.vocab_size)
        report.notes += (*tokenizer.notes, *([few] if few else ()))

    beside = _filled(read, config, kept, str(folder))
    if recipe is not None and recipe.changes_states:
        recipe.shares(config.encoder.num_layers, str(root))  # raises an error for a hidden state that is not there
    model = model_class(config, graph_of(read.graph, head, model_class.head, recipe))
    model._mark_untrained(report.new)
    model.load_report = report
    model.tokenizer = tokenizer
    model.sentence_recipe = recipe or colbert_of(folder, config)
    model.source = Source(
        name=str(name_or_path),
        folder=folder,
        commit=commit,
        manifest=read.manifest,
        placed=read.plan.placed,
        duplicates=read.plan.duplicates,
        carried={name: read.values[name] for name in read.carried},
        kept=beside,
        same_head=read.same_head,
        config_text=config.text or "",
        tokenizer_files=tokenizer_files(folder) if tokenizer is None else {},
    )
    if model.sentence_recipe is not None and model.sentence_recipe.routes:
        mapped = in_hub_cache(folder) if asked.mapped is None else asked.mapped
        others = replace(asked, labels=None, problem_type=None, mapped=mapped)
        follow_routes(model, root, lambda inside: _load(model_class, inside, others, hub={}))
    model.set_attention(asked.attention)
    model.eval()
    if read.on_disk is not None:
        model._on_disk = read.on_disk
    elif asked.device is not None:
        model.to(asked.device)
    if warming is not None:
        warming.wait()
    if held is not None:
        held.check()
    return model


def _configured(
    folder: Path, head: str, asked: _Wanted, adapter: AdapterFolder | None, recipe: SentenceTransformerConfig | None
) -> tuple[ModelConfig, bool]:
    """Return a folder's configuration, and whether its labels are set by the caller or an adapter."""
    config = read_config_file(folder, asked.ignore_config_keys, strict_config=asked.strict_config)
    config = with_overrides(config, recipe, asked.ignore_config_keys, strict_config=asked.strict_config)
    warn_of(config, stacklevel=2)
    labels = asked.labels
    if adapter is not None and labels is None:
        labels = adapter.labels(config, head)
    if labels is not None or asked.problem_type is not None:
        config = config.changed(labels=labels, problem_type=asked.problem_type)
    if head == "sequence_classification":
        score_function(config)  # raises an error if the stored activation is not known
    return config, labels is not None


@dataclass(frozen=True, kw_only=True)
class _ReadFolder:
    """The plan of a folder's weights, and the graph to fill.

    Attributes:
        plan: which tensor goes where.
        graph: the parameters' places, still without values.
        dtype: of the model.
        values: the stored tensors.
        on_disk: knows of the layers that stay in their files; None where none do.
        manifest: of the files.
        finite: looks for values that are no numbers meanwhile.
        same_head: the file was written for this task.
        carried: names of tensors that the task's own export writes back.
    """

    plan: Plan
    graph: Graph
    dtype: torch.dtype
    values: dict[str, Tensor]
    on_disk: OnDisk | None
    manifest: SourceManifest
    finite: FiniteCheck
    same_head: bool
    carried: list[str]


def _read_folder(
    folder: Path,
    config: ModelConfig,
    head: str,
    asked: _Wanted,
    warming: Warming | None,
    *,
    relabelled: bool,
    pooler: bool,
) -> _ReadFolder:
    """Match the folder's tensors with the graph, and read them.

    Raises:
        CheckpointError: tensors are missing, unexpected or mis-shaped; nothing is read then.
    """
    with open_weights(folder, config) as checkpoint:
        stored = checkpoint.manifest.tensors
        plan, graph = plan_folder(
            config, head, stored, str(folder), relabelled=relabelled, strict=asked.strict_config, pooler=pooler
        )
        warn_of_unexpected(plan.report, stored, stacklevel=2)
        if checkpoint.manifest.passed_over:
            warnings.warn(f"{folder}: {checkpoint.manifest.passed_over}", stacklevel=2)
            plan.report.notes.append(checkpoint.manifest.passed_over)
        dtype = settle_dtype(asked.dtype, config, plan, checkpoint.manifest)
        if warming is not None:
            warming.layers(graph, dtype)
        same_head = plan.report.source_head == head and not plan.report.new
        carried = list(plan.report.ignored) if same_head else []
        repeated = (name for pair in plan.duplicates for name in pair)
        names = list(
            dict.fromkeys([*plan.placed.values(), *repeated, *carried, *_kept(plan.report.ignored, config, head)])
        )
        values, on_disk = _read(
            checkpoint, plan, names, folder, dtype, asked.device, mapped=asked.mapped, weights=asked.weights
        )
        manifest = checkpoint.manifest
    finite = FiniteCheck(values, plan.placed.values(), dtype, done=on_disk.release if on_disk else None)
    return _ReadFolder(
        plan=plan, graph=graph, dtype=dtype, values=values, on_disk=on_disk, manifest=manifest, finite=finite,
        same_head=same_head, carried=carried,
    )  # fmt: skip


def _filled(
    read: _ReadFolder, config: ModelConfig, kept: Mapping[str, PassthroughTensor], where: str
) -> dict[str, Tensor]:
    """Fill the graph, with fresh values for missing tensors; return the tensors kept outside the model."""
    plan, graph, values, report = read.plan, read.graph, read.values, read.plan.report
    ties = [*plan.ties, *settle_ties(plan, values, report)]
    check_duplicates(plan, values, read.carried)
    beside = _taken(graph, kept, values, where)
    fill(graph, plan, values, read.dtype)
    if report.new:
        assign(graph, {name: torch.empty(graph.get_parameter(name).shape, dtype=read.dtype) for name in report.new})
        initialise(graph, report.new, float(config.source.get("initializer_range", 0.02)))
    tie_tensors(graph, ties)
    return beside


def _read(
    checkpoint: Checkpoint,
    plan: Plan,
    names: Sequence[str],
    folder: Path,
    dtype: torch.dtype,
    device: torch.device | str | None,
    *,
    mapped: bool | None,
    weights: Weights | None,
) -> tuple[dict[str, Tensor], OnDisk | None]:
    """Return the stored tensors of these names, and where weights stay on disk what knows of those.

    Blobs of a Hub cache are never rewritten, so they may be shown instead of copied; a folder that someone may write to
    is copied, so that no later change reaches the model. What goes to another device is copied there, so weights in
    several files, which are large, need not be in memory as well.
    """
    place = torch.device("cpu") if device is None else torch.device(device)
    used = map(as_whole, plan.placed.values())
    stays = stays_on_disk(
        weights, checkpoint.manifest, used, dtype, place, mapped=mapped, notes=plan.report.notes
    )  # fmt: skip
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
    graph: Graph, kept: Mapping[str, PassthroughTensor], values: Mapping[str, Tensor], where: str
) -> dict[str, Tensor]:
    """Give modules their values from kept tensors; return these by their names in new files."""
    modules: dict[str | None, Any] = dict(graph.named_modules())
    for name, entry in kept.items():
        if entry.module in modules:
            try:
                modules[entry.module].take(values[name])
            except ValueError as fault:
                raise CheckpointError(
                    f"{where}: {name}: {fault}. config.json and the weights do not belong together; fetch both again.",
                    where=where,
                ) from None
    return {entry.name: values[name] for name, entry in kept.items()}


def _held_to(folder: Path, verified: bool | str) -> Held | None:
    """Return the result of the comparison of the folder's files with their checksums; None if not requested."""
    if not verified:
        return None
    from flodl_hf.checkpoints.weights.checksums import hold

    return hold(folder, verified)


def _warming(device: torch.device | str | None) -> Warming | None:
    """Return what makes a CUDA device ready meanwhile; None for other devices."""
    if device is None or torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return None
    from flodl_hf.inference.cuda_warmup import Warming

    return Warming(torch.device(device))


def open_weights(folder: Path, config: ModelConfig) -> Checkpoint:
    """Open a folder's weights: the files that its configuration names, else files with the default names.

    Raises:
        ConfigError: the configuration names a file that is absent or is not a weight file.
    """
    return Checkpoint.open(folder, named=weights_named(config.source.get(WEIGHTS_KEY), config.where))


def plan_folder(
    config: ModelConfig,
    head: str,
    stored: Mapping[str, StoredTensor],
    where: str,
    *,
    relabelled: bool = False,
    strict: bool = False,
    pooler: bool = True,
) -> tuple[Plan, Graph]:
    """Return which stored tensor fills which parameter, and the graph to fill, without any memory.

    Args:
        config: the folder's configuration.
        head: the task.
        stored: the files' tensors, from their headers.
        where: the folder, for messages.
        relabelled: the labels were given by the caller, so a classifier of another size may start fresh.
        strict: raise on unknown tensors under any prefix.
        pooler: have the encoder alone compute the pooler's output, if the file has its tensors.

    Raises:
        CheckpointError: tensors are missing, unexpected or mis-shaped.
        ConfigError: the family has no such head.
    """
    graph = empty_graph(config, head, pooler=pooler and any("pooler" in name for name in stored))
    spec = None if head == "base" else config.family.heads[head]
    architectures = config.source.get("architectures")
    written = head_of(config.family, architectures, head)
    custom = None if written else class_of(architectures)
    plan = plan_load(
        config.family,
        config.family.key_map(config.encoder, head),
        {name: tuple(tensor.shape) for name, tensor in graph.named_parameters(remove_duplicate=False)},
        stored,
        head=head,
        source_head=written,
        tie_words=config.tie_words,
        where=where,
        renew=(spec.classifier,) if spec and spec.classifier and relabelled else (),
        config=config.encoder,
        custom=custom,
        # Code of a repository may compute with any tensor of its files.
        settled=bool(config.family.tiny) and not strict and not config.source.get("auto_map"),
    )
    plan.report.notes += config.notes
    if custom is not None and head == "base":
        plan.report.notes.append(
            f"architectures: {printable(custom, 60)} is none of our classes; this is the encoder alone"
        )
    if head == "base" and architectures is None:
        others = sorted({why.split()[-2] for why in plan.report.ignored.values() if why.endswith(" head")})
        if others:
            also = f"; the file also contains the head of {' and '.join(others)}, which head= loads"
            plan.report.notes.append(f"architectures: absent, so this is the encoder alone{also}")
    return plan, graph


def in_hub_cache(folder: Path) -> bool:
    """Return whether a folder is a snapshot of the Hub's cache, with links to blobs named by content."""
    return folder.parent.name == "snapshots" and (folder.parent.parent / "blobs").is_dir()
