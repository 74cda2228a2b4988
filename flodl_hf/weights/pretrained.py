"""From a name to a filled model: resolve, read the configuration, match the headers, then read the bytes.

Nothing is half done: every fault that headers can show is raised before a weight is read, and the
model is handed out only when all of it is there. What was read is remembered as the model's
`Source`, from which export writes it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flodl.devices import default_device, find_device
from flodl.errors import CheckpointError, ConfigError, DeviceError, printable
from flodl.garbage_collection import gc_paused
from flodl.graph import Graph
from flodl_hf.adapters.attach import adapters_of
from flodl_hf.attention.dot_product import check_implementation
from flodl_hf.config.model_config import MAX_LABELS, ModelConfig, listed_texts, read_config_file
from flodl_hf.encoder.parts import as_whole, parts_from
from flodl_hf.family import Kept
from flodl_hf.hub.folders import MODEL_FILES, VOCABULARY_FILES, holds_adapter, resolve_folder
from flodl_hf.model.building import assign, build_graph, initialise, tie_tensors
from flodl_hf.model.graph_model import GraphModel
from flodl_hf.model.routed import Routed, recipe_behind
from flodl_hf.sentence.multivector import colbert_recipe
from flodl_hf.sentence.recipe import SentenceRecipe, read_recipe
from flodl_hf.sentence.routing import transformer_folder
from flodl_hf.weights.checkpoint import Checkpoint, StoredTensor
from flodl_hf.weights.checkpoint.members import is_entry
from flodl_hf.weights.filling import FiniteCheck, check_dtype, check_duplicates, fill, settle_dtype, settle_ties
from flodl_hf.weights.loading import Plan, class_of, head_of, plan_load
from flodl_hf.weights.on_disk import OnDisk, Weights, stays_on_disk
from flodl_hf.weights.source import Source

if TYPE_CHECKING:
    from flodl_hf.adapters.folder import AdapterFolder
    from flodl_hf.runtime.cuda_warmup import Warming
    from flodl_hf.tokenizer import Tokenizer
    from flodl_hf.weights.checksums import Held

__all__ = ["load_model", "load_tokenizer", "numbered_labels", "plan_folder", "stored_dtype"]

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
    head = model_class.head
    given, attention = check_dtype(dtype), check_implementation(attention)
    around = default_device()
    device = _asked(around) if device is None else find_device(device)
    labels = None if labels is None else listed_texts(labels, "labels")
    name_or_path, opened = _adapter(name_or_path, adapter, hub)
    # The default device is where the model goes, not where its parts are put together.
    with gc_paused(settled=True), nullcontext() if around is None else torch.device("cpu"):
        model = _load(
            model_class, name_or_path, head, hub, given, device, attention, labels, problem_type, ignore_config_keys,
            strict_config, allow_nonfinite, mapped, weights, verified, opened,
        )  # fmt: skip
        if opened is not None:
            held = adapters_of(model)
            held.add("default", opened.adapter(model))
            held.put(model, "default")
    return model.eval()


def _asked(around: torch.device | None) -> torch.device | None:
    """Return where a model goes for which no device is named.

    Raises:
        DeviceError: the program's default device holds no values.
    """
    if around is not None and around.type == "meta":
        raise DeviceError(
            "device: found torch's default device 'meta', which holds no values; expected a device for the weights; "
            "load outside of torch.device('meta'), or say device='cpu'",
            device="meta",
        )
    return None if around is None else find_device(around)


def _adapter(
    name_or_path: str | Path, adapter: str | Path | None, hub: Mapping[str, Any]
) -> tuple[str | Path, AdapterFolder | None]:
    """Return the base's name, and the adapter that goes into it; None where there is none."""
    if adapter is None and not holds_adapter(name_or_path):
        return name_or_path, None
    from flodl_hf.adapters.folder import open_adapter

    opened = open_adapter(name_or_path if adapter is None else adapter, hub)
    return opened.base if adapter is None else name_or_path, opened


def _load(
    model_class: type[ModelT],
    name_or_path: str | Path,
    head: str,
    hub: Mapping[str, Any],
    given: torch.dtype | str | None,
    device: torch.device | str | None,
    attention: str,
    labels: Sequence[str] | None,
    problem_type: str | None,
    ignore_config_keys: Sequence[str],
    strict_config: bool,
    allow_nonfinite: bool,
    mapped: bool | None,
    weights: Weights | None,
    verified: bool | str,
    adapter: AdapterFolder | None,
) -> ModelT:
    warming = _warming(device)
    root, commit = resolve_folder(name_or_path, hub, MODEL_FILES)
    held = _held_to(root, verified)
    folder = transformer_folder(root)
    config = read_config_file(folder, ignore_config_keys, strict_config=strict_config)
    if adapter is not None and labels is None:
        labels = adapter.labels(config, head)
    if labels is not None or problem_type is not None:
        config = config.changed(labels=labels, problem_type=problem_type)

    with Checkpoint.open(folder) as checkpoint:
        stored = checkpoint.manifest.tensors
        plan, graph = plan_folder(config, head, stored, str(folder), relabelled=labels is not None)
        dtype = settle_dtype(given, config, plan)
        if warming is not None:
            warming.layers(graph, dtype)
        same_head = plan.report.source_head == head and not plan.report.new
        carried_names = list(plan.report.ignored) if same_head else []
        kept = _kept(plan.report.ignored, config)
        repeated = (name for pair in plan.duplicates for name in pair)
        names = list(dict.fromkeys([*plan.placed.values(), *repeated, *carried_names, *kept]))
        values, on_disk = _read(checkpoint, plan, names, folder, dtype, device, mapped=mapped, weights=weights)
        manifest = checkpoint.manifest
    report = plan.report
    finite = FiniteCheck(values, plan.placed.values(), dtype, done=on_disk.release if on_disk else None)
    tokenizer = load_tokenizer(folder, config)
    finite.wait(str(folder / (manifest.index_name or manifest.files[0].name)), report, allowed=allow_nonfinite)
    if tokenizer is not None:
        few = tokenizer.few_tokens(config.encoder.vocab_size)
        report.notes += (*tokenizer.notes, *([few] if few else ()))

    ties = [*plan.ties, *settle_ties(plan, values, report)]
    check_duplicates(plan, values, carried_names)
    carried = {name: values[name] for name in carried_names}
    beside = _taken(graph, kept, values, str(folder))
    fill(graph, plan, values, dtype)
    if report.new:
        assign(graph, {name: torch.empty(graph.get_parameter(name).shape, dtype=dtype) for name in report.new})
        initialise(graph, report.new, float(config.source.get("initializer_range", 0.02)))
    tie_tensors(graph, ties)
    model = model_class(config, graph)
    model.mark_untrained(report.new)
    model.load_report = report
    model.tokenizer = tokenizer
    model.sentence_recipe = read_recipe(root) or _colbert(folder, config)
    model.source = Source(
        name=str(name_or_path),
        folder=folder,
        commit=commit,
        manifest=manifest,
        placed=plan.placed,
        duplicates=plan.duplicates,
        carried=carried,
        kept=beside,
        same_head=same_head,
        config_text=config.text or "",
    )
    if model.sentence_recipe is not None and model.sentence_recipe.routes:
        _follow_routes(model, root, lambda inside: _load(
            model_class, inside, head, {}, given, device, attention, None, None, ignore_config_keys, strict_config,
            allow_nonfinite, in_hub_cache(folder) if mapped is None else mapped, weights, False, None,
        ))  # fmt: skip
    model.set_attention(attention)
    model.eval()
    if on_disk is not None:
        model._on_disk = on_disk
    elif device is not None:
        model.to(device)
    if warming is not None:
        warming.wait()
    if held is not None:
        held.check()
    return model


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
    is copied, so that no later change reaches the model.
    """
    place = torch.device("cpu") if device is None else torch.device(device)
    used = map(as_whole, plan.placed.values())
    stays = stays_on_disk(
        weights, checkpoint.manifest, used, dtype, place, mapped=mapped, notes=plan.report.notes
    )  # fmt: skip
    wholes = list(dict.fromkeys(map(as_whole, names)))
    if not stays:
        values = checkpoint.read_all(wholes, mapped=in_hub_cache(folder) if mapped is None else mapped)
        return parts_from(values, names), None
    layers = {as_whole(name) for ours, name in plan.placed.items() if ours.startswith("encoder.layers.")}
    values = checkpoint.read_all([name for name in wholes if name in layers], mapped=True)
    values |= checkpoint.read_all([name for name in wholes if name not in layers])
    values = parts_from(values, names)
    return values, OnDisk((values[name] for name in names if as_whole(name) in layers), place)


def _kept(unused: Iterable[str], config: ModelConfig) -> dict[str, Kept]:
    """Return the stored tensors that are kept beside the model, by stored name."""
    prefix = config.family.base_prefix + "."
    stored = {name if name.startswith(prefix) else prefix + name: name for name in unused}
    found = {}
    for kept in config.family.kept:
        name = next((stored[name] for name in (kept.name, *kept.also) if name in stored), None)
        if name is not None:
            found[name] = kept
    return found


def _taken(graph: Graph, kept: Mapping[str, Kept], values: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Give modules what they read of kept tensors; return these by their names in new files."""
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


def _colbert(folder: Path, config: ModelConfig) -> SentenceRecipe | None:
    """Return how a folder of ColBERT's class makes vectors; None of any other."""
    if class_of(config.source.get("architectures")) != "HF_ColBERT" or "HF_ColBERT" not in config.family.pretraining:
        return None
    late, files = colbert_recipe(folder)
    return SentenceRecipe(normalize=True, late=late, files=files)


def _follow_routes(model: GraphModel, root: Path, load: Callable[[Path], GraphModel]) -> None:
    """Say which routes a model has, and put beside it the encoders of those that have their own."""
    recipe, source = model.sentence_recipe, model.source
    assert recipe is not None
    assert source is not None
    assert model.load_report is not None
    notes = model.load_report.notes
    usual = f"texts take {recipe.usual_route!r} where no route is said" if recipe.usual_route else "one has to be said"
    folders = dict.fromkeys(way.transformer for way in recipe.routes.values())
    own = folders.keys() - {recipe.transformer}
    if own and model.head != "base":
        model.sentence_recipe = recipe_behind(recipe, recipe.transformer)
        notes.append(f"routes: {recipe.transformer} alone is read; the transformers of other routes are not")
        return
    notes.append(f"routes: {', '.join(recipe.routes)}; {usual}")
    if not own:
        return
    others = {}
    for folder in folders:
        if folder in own:
            others[folder] = beside = load(root / folder)
            assert beside.source is not None
            assert beside.load_report is not None
            beside.source.name, beside.source.commit = f"{source.name}/{folder}", source.commit
            beside.sentence_recipe = recipe_behind(recipe, folder)
            notes.extend(f"{folder}: {note}" for note in beside.load_report.notes if note not in notes)
    model.routed = Routed(others)
    notes.append(f"routes have transformers of their own; calls with ids go through {recipe.transformer}")


def _held_to(folder: Path, verified: bool | str) -> Held | None:
    """Return the folder's files as they were compared with what is said of them; None where that was not asked."""
    if not verified:
        return None
    from flodl_hf.weights.checksums import hold

    return hold(folder, verified)


def _warming(device: torch.device | str | None) -> Warming | None:
    """Return what makes a CUDA device ready meanwhile; None for other devices."""
    if device is None or torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return None
    from flodl_hf.runtime.cuda_warmup import Warming

    return Warming(torch.device(device))


def stored_dtype(stored: Mapping[str, StoredTensor]) -> torch.dtype:
    """Return half precision where all numbers are stored so, else float32."""
    kinds = {tensor.dtype for tensor in stored.values()}
    return {frozenset({"F16"}): torch.float16, frozenset({"BF16"}): torch.bfloat16}.get(frozenset(kinds), torch.float32)


def plan_folder(
    config: ModelConfig,
    head: str,
    stored: Mapping[str, StoredTensor],
    where: str,
    *,
    relabelled: bool = False,
) -> tuple[Plan, Graph]:
    """Return which stored tensor fills which of ours, and the graph that is to be filled, without any memory.

    Args:
        config: the folder's configuration.
        head: the task.
        stored: the files' tensors, from their headers.
        where: the folder, for messages.
        relabelled: the labels were given by the caller, so a classifier of another size may start fresh.

    Raises:
        CheckpointError: tensors are missing, unexpected or mis-shaped.
        ConfigError: the family has no such head.
    """
    pooler = any("pooler" in name for name in stored)
    try:
        with torch.device("meta"), _WithoutInitialisation():
            graph = build_graph(config, head, pooler=pooler)
    except RuntimeError as fault:
        # A Ctrl-C while torch had its modes in its hands: it finds none to put back, and says that instead.
        before = fault.__context__
        while before is not None and not isinstance(before, KeyboardInterrupt):
            before = before.__context__
        if before is not None and "mode stack" in str(fault):
            raise KeyboardInterrupt from None
        raise
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
    )
    plan.report.notes += config.notes
    if custom is not None and head == "base":
        plan.report.notes.append(
            f"architectures: {printable(custom, 60)} is none of our classes; this is the encoder alone"
        )
    if head == "base" and architectures is None:
        others = sorted({why.split()[-2] for why in plan.report.ignored.values() if why.endswith(" head")})
        if others:
            also = f"; the file also holds the head of {' and '.join(others)}, which head= loads"
            plan.report.notes.append(f"architectures: absent, so this is the encoder alone{also}")
    return plan, graph


class _WithoutInitialisation(TorchFunctionMode):
    """Leaves new tensors unfilled: on ``meta`` there is nothing to fill, and random kernels take seconds to load."""

    # What is filled by name of torch.nn.init arrives as that function, the rest as the tensor's method.
    FILLING = frozenset(
        [
            getattr(torch.nn.init, name)
            for name in ("normal_", "uniform_", "kaiming_uniform_", "constant_", "ones_", "zeros_")
        ]
        + [torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.fill_, torch.Tensor.zero_]
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func in self.FILLING:
            return given["tensor"] if "tensor" in given else args[0]
        return func(*args, **given)


def in_hub_cache(folder: Path) -> bool:
    """Return whether a folder is a snapshot of the Hub's cache, whose files are links to blobs named by content."""
    return folder.parent.name == "snapshots" and (folder.parent.parent / "blobs").is_dir()


def load_tokenizer(folder: Path, config: ModelConfig) -> Tokenizer | None:
    """Return the folder's tokenizer, or None where there are no tokenizer files.

    Raises:
        TokenizerError: damaged files, or a token whose id has no row in the word table.
    """
    if not any(is_entry(folder, name) for name in VOCABULARY_FILES):
        return None
    from flodl_hf.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(folder, model_type=config.model_type)
    types = getattr(config.encoder, "type_vocab_size", None) if config.family.uses_token_types else None
    tokenizer.check_fits(config.encoder.vocab_size, types or None)
    return tokenizer
