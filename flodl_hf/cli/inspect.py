"""``flodl-hf inspect``: contents of a checkpoint and how it would be read, from headers alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from flodl.errors import printable
from flodl_hf.cli.options import HEAD, JSON, LOCAL, MODEL, PRECISIONS, REVISION, option, with_parameters
from flodl_hf.cli.shared import emit_json, reporting, tell

if TYPE_CHECKING:
    from flodl_hf.checkpoints.config.model_config import ModelConfig
    from flodl_hf.checkpoints.sentence.recipe import SentenceTransformerConfig
    from flodl_hf.inference.explain import Explanation

_SENTENCES = ("notes", "tokenizer_settings", "tokenizer_differences", "vectors")


@reporting
@with_parameters((
    MODEL, HEAD,
    option("tokenizer", bool, "Also compare tokenizer.json with the vocabulary files of the folder.", default=False),
    option("tensors", bool, "List every tensor with our name for it.", default=False),
    option("device", str, "Also show what would run each layer on cpu, cuda, mps, or auto: the best device there is."),
    option("precision", PRECISIONS, "With --device: what products are computed in; else as stored."),
    REVISION, LOCAL, JSON,
))  # fmt: skip
def command(
    model: str,
    head: str,
    tokenizer: bool,
    tensors: bool,
    device: str | None,
    precision: Any,
    revision: str | None,
    local_files_only: bool,
    json_output: bool,
) -> None:
    """Show family, head, dtypes, tensors, tokenizer and labels; no weight is read."""
    facts = describe(model, head, {"revision": revision, "local_files_only": local_files_only})
    if tokenizer:
        from flodl_hf.parity.tokenizers import compare_sources

        facts["tokenizer_differences"] = [str(d) for d in compare_sources(Path(facts["folder"]))]
    explained = None
    if device is not None or precision is not None:
        explained = runs(Path(facts["folder"]), facts["head"], device or "auto", precision)
        facts |= {"runs": explained.to_dict()} if json_output else {}
    if json_output:
        emit_json(facts)
        return
    for key, value in facts.items():
        if key == "matched" and not tensors:
            tell(f"{'matched':<22}{len(value)} tensors")
        elif isinstance(value, dict):
            tell(f"{key:<22}{len(value)}")
            for name, what in value.items():
                tell(f"  {name}: {what}")
        elif isinstance(value, list) and key in _SENTENCES:
            tell(f"{key:<22}{len(value) or 'none'}")
            for sentence in value:
                tell(f"  {sentence}")
        elif isinstance(value, list):
            tell(f"{key:<22}{', '.join(map(str, value)) if value else 'none'}")
        else:
            tell(f"{key:<22}{value:,}" if isinstance(value, int) else f"{key:<22}{'none' if value is None else value}")
    if explained is not None:
        tell(str(explained))


def examined(folder: Path, config: ModelConfig) -> list[str]:
    """Return conflicts of tokenizer settings with ``tokenizer.json``, and the effective value, or the loading error."""
    from flodl_hf.errors import TokenizerError
    from flodl_hf.models.pretrained import load_tokenizer

    try:
        tokenizer = load_tokenizer(folder, config)
    except TokenizerError as fault:
        return [str(fault)]
    return [] if tokenizer is None else list(tokenizer.notes)


def runs(folder: Path, head: str, device: str, precision: Any) -> Explanation:
    """Return the execution plan of a folder's model on a device, as ``model.explain`` does; no weight is read.

    Raises:
        DeviceError: there is no device of that name.
        PredictError: the precision is unknown, or the device lacks it.
    """
    from flodl.devices import parse_device
    from flodl_hf.checkpoints.config.model_config import read_config_file
    from flodl_hf.inference.explain import explain_graph
    from flodl_hf.inference.options import check_name, dtype_of
    from flodl_hf.models.building import open_weights, plan_folder, settle_dtype

    precision = check_name(precision)
    config = read_config_file(folder)
    with open_weights(folder, config) as opened:
        plan, graph = plan_folder(config, head, opened.manifest.tensors, str(folder))
    dtype = dtype_of(precision) or settle_dtype(None, config, plan, opened.manifest)
    return explain_graph(graph, parse_device(device), dtype, precision)


def describe(name: str, head: str, hub: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of headers and configuration, as JSON types.

    Raises:
        FlodlError: the checkpoint cannot be read for this head; the message gives the reason.
    """
    from flodl_hf.checkpoints.config.model_config import read_config_file
    from flodl_hf.checkpoints.folders import MODEL_FILES, VOCABULARY_FILES
    from flodl_hf.checkpoints.hub.download import resolve_folder
    from flodl_hf.checkpoints.sentence.recipe import read_recipe
    from flodl_hf.checkpoints.sentence.settings import transformer_folder
    from flodl_hf.checkpoints.weights.loading import head_of
    from flodl_hf.heads.auto import head_named
    from flodl_hf.models.building import open_weights, plan_folder
    from flodl_hf.models.transformers_methods import size_text

    root, commit = resolve_folder(name, hub, MODEL_FILES)
    folder = transformer_folder(root)
    config = read_config_file(folder)
    written_for = head_of(config.family, config.source.get("architectures"))
    wanted = (written_for or "base") if head == "auto" else head_named(head).name
    with open_weights(folder, config) as opened:
        stored = opened.manifest.tensors
        plan, graph = plan_folder(config, wanted, stored, str(folder))
        layout, size = opened.manifest.layout, sum(t.nbytes for t in stored.values())
        if opened.manifest.passed_over:
            plan.report.notes.append(opened.manifest.passed_over)
    report, recipe = plan.report, read_recipe(root)
    return {
        "folder": str(folder),
        "commit": commit,
        "family": config.model_type,
        "written_for": written_for or "unknown",
        "head": wanted,
        "layers": config.encoder.num_layers,
        "width": config.encoder.hidden_size,
        "heads": config.encoder.num_heads,
        "vocabulary": config.encoder.vocab_size,
        # Tied tensors count as one.
        "parameters": sum(p.numel() for name, p in graph.named_parameters() if name not in report.tied),
        "size": size_text(size),
        "layout": layout,
        "bytes": size,
        "dtypes": report.dtypes,
        "matched": report.matched,
        "renamed": report.renamed,
        "ignored": report.ignored,
        "missing": list(report.new),
        "tied": list(report.tied),
        "notes": report.notes,
        "tokenizer": [f for f in VOCABULARY_FILES if (folder / f).is_file()],
        "tokenizer_settings": examined(folder, config),
        "max_tokens": config.max_tokens,
        "problem_type": config.problem_type,
        "labels": list(config.labels) if wanted.endswith("classification") else [],
        **({} if recipe is None else {"vectors": ways(recipe)}),
    }


def _step(step: Any) -> str:
    """Return a description of a vector module."""
    if step.kind == "Dense":
        return f"a dense layer to {step.size} features, {step.activation}"
    return step.kind if step.size is None else f"{step.kind} to {step.size} features"


def ways(recipe: SentenceTransformerConfig) -> list[str]:
    """Return a sentence for each setting of text vectors in the folder."""
    sentences = []
    for route, own in (recipe.routes or {"": recipe}).items():
        lines = []
        if own.late is not None:
            lines.append("each token has a vector (embed_tokens)")
        elif own.splade is not None:
            lines.append("words of the vocabulary have weights (embed_sparse)")
        else:
            lines.append(f"pooling: {', '.join(map(str, own.pooling))}" + (", scaled to length 1" * own.normalize))
        lines += [_step(step) for step in (*own.tokens, *own.dense)]
        if own.truncate_dim is not None:
            lines.append(f"the first {own.truncate_dim} features are kept")
        if own.max_tokens is not None:
            lines.append(f"at most {own.max_tokens} tokens: longer texts are truncated")
        if own.lower_case:
            lines.append("texts are lower-cased first")
        if own.prompts:
            usual = f", by default {own.default_prompt}" if own.default_prompt else ""
            lines.append(f"prompts: {', '.join(map(printable, own.prompts))}{usual}")
        sentences += [f"{printable(route)}: {line}" if route else line for line in lines]
    return sentences
