"""Folders of adapters as peft has them: ``adapter_config.json``, ``adapter_model.safetensors``, read and written.

Folders written here also contain ``head_config.json`` with the task and the names of the labels, which peft's files
omit. Every fault is found before the model is changed, and all are reported together.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from flodl.errors import CheckpointError, ConfigError, capped, printable
from flodl_hf.checkpoints.config.file import MAX_CONFIG_BYTES, PROBLEM_TYPES, read_json
from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.checkpoints.folders import ADAPTER_CONFIG as CONFIG
from flodl_hf.checkpoints.folders import BASE_OF_ADAPTER, RECIPE_FILES, is_entry, read_member
from flodl_hf.checkpoints.hub.download import resolve_folder
from flodl_hf.checkpoints.sentence.recipe import read_recipe
from flodl_hf.checkpoints.weights.checkpoint import Checkpoint
from flodl_hf.checkpoints.weights.loading import head_of
from flodl_hf.families.schema import Family
from flodl_hf.inference.graph_model import GraphModel
from flodl_hf.models.adapters.fresh import (
    Adapter,
    Part,
    Site,
    check_places,
    check_tables,
    parts_of,
    prefix_parts,
    shapes_of,
    sites_of,
    tables_of_tokens,
    their_names,
)
from flodl_hf.models.adapters.peft_file import of_pattern, read_settings, targeted, task_of
from flodl_hf.models.adapters.settings import IA3, Lora, Prefix, Prompt, Settings
from flodl_hf.nn.adapter_layers import LoraPart, RowsPart, ScalePart, TablePart
from flodl_hf.nn.joined_tensors import part_of, split
from flodl_hf.nn.prompts import WORDS, PromptPart

WEIGHTS, BIN, HEAD = "adapter_model.safetensors", "adapter_model.bin", "head_config.json"
FILES = (CONFIG, WEIGHTS, BIN, HEAD, "checksums.json", *RECIPE_FILES)
PREFIX = "base_model.model."
VIRTUAL = "prompt_embeddings"
"""The tensor of virtual tokens: a vector for each, or the keys and values of all layers."""
LENGTHS = ".lora_magnitude_vector"
ENDS: Mapping[type[nn.Module], Mapping[str, str]] = {
    LoraPart: {"down": ".lora_A.weight", "up": ".lora_B.weight", "up_bias": ".lora_B.bias", "magnitude": LENGTHS},
    TablePart: {"down": ".lora_embedding_A", "up": ".lora_embedding_B", "magnitude": LENGTHS},
    RowsPart: {"rows": ".token_adapter.trainable_tokens_delta"},
    ScalePart: {"scales": ".ia3_l"},
}
"""What names of tensors in the file end with, by kind of part and attribute."""
ATTRIBUTES = {f"{LENGTHS}.weight": "magnitude", **{end: name for ends in ENDS.values() for name, end in ends.items()}}

Parts = dict[str, Part]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter's files, read and understood as far as that goes without a model.

    Attributes:
        path: the folder.
        values: of ``adapter_config.json``.
        settings: the settings in ``values``.
        head: of ``head_config.json``; empty where there is none.
        tensors: tensors by name in the file.
    """

    path: Path
    values: Mapping[str, Any]
    settings: Settings
    head: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def base(self) -> str:
        """The folder or name of the base.

        Raises:
            ConfigError: the file names none.
        """
        found = self.values.get(BASE_OF_ADAPTER)
        if not found:
            raise ConfigError(
                f"{self.path / CONFIG}: {BASE_OF_ADAPTER} names no base; open it, with adapter= this folder",
                where=str(self.path / CONFIG),
                problems=[BASE_OF_ADAPTER],
            )
        return str(found)

    def task(self, family: Family | None = None) -> str | None:
        """Return the task name that the adapter was trained for, or None if the file does not specify it."""
        said = self.head.get("task")
        if family is not None and isinstance(said, str) and said in ("base", *family.heads):
            return said
        named = head_of(family, self.head.get("architectures")) if family is not None else None
        return named or task_of(self.values)

    def labels(self, config: ModelConfig, head: str) -> list[str] | None:
        """Return the labels that the base is to be opened with; None for its own."""
        named = self.head.get("id2label")
        if isinstance(named, dict) and named:
            found = [str(named[key]) for key in sorted(named, key=int)]
            return None if tuple(found) == tuple(config.labels) else found
        spec = None if head == "base" else config.family.heads.get(head)
        if spec is None or spec.classifier is None:
            return None
        name = prefix_of(self.settings) + config.family.key_map(config.encoder, head).theirs(
            f"{spec.classifier}.weight"
        )
        held = self.tensors.get(name)
        if held is None or held.ndim != 2 or held.shape[0] == config.num_labels:
            return None
        return [f"LABEL_{i}" for i in range(held.shape[0])]

    def adapter(self, model: GraphModel) -> Adapter:
        """Return the adapter for a model, which is not changed.

        Raises:
            CheckpointError: tensors are missing, unexpected, mis-shaped or not finite, or the head is missing;
                ``problems`` lists all of it.
        """
        where, settings, task = str(self.path / WEIGHTS), self.settings, self.task(model.config.family)
        if task is not None and task != model.head:
            raise CheckpointError(
                f"{self.path}: an adapter for {task}, and the model is opened for {model.head}; open it with head="
                f"{task!r}, or let flodl_hf.load choose",
                path=str(self.path),
                problems=["task_type"],
            )
        sites, problems = sites_of(model), []
        virtual, prefix = isinstance(settings, (Prompt, Prefix)), prefix_of(settings)
        found: dict[str, dict[str, Tensor]] = {}
        kept: dict[str, Tensor] = {}
        for name, tensor in self.tensors.items():
            inner = name.removeprefix(prefix)
            end = None if virtual else next((end for end in ATTRIBUTES if inner.endswith(end)), None)
            is_virtual = virtual and name == VIRTUAL
            if not (is_virtual or name.startswith(prefix)) or tensor.dtype not in FLOATS:
                problems.append(f"{printable(name)}: {tensor.dtype}, no tensor of an adapter")
            elif not bool(torch.isfinite(tensor).all()):
                problems.append(f"{printable(name)}: contains values that are not finite")
            elif is_virtual or ".original_module." in inner:  # what a whole module stood in for, with its bias
                continue
            elif end is None:
                kept[_bare(inner)] = tensor
            elif (path := _spelling(inner.removesuffix(end), sites, model)) is None:
                problems.append(f"{printable(name)}: the model has no such projection")
            else:
                found.setdefault(path, {})[ATTRIBUTES[end]] = tensor.float()
        if isinstance(settings, (Prompt, Prefix)):
            parts = self._virtual(model, settings, problems)
        else:
            parts = self._parts(model, settings, sites, found, problems)
        held, strange = _kept(model, kept, self.values.get("modules_to_save") or (), prefix)
        problems += strange
        headless = [name for name in model.untrained if name not in held]
        if headless:
            problems.append(
                f"no head: {', '.join(headless[:6])} would have random values, because neither the base nor this file "
                "has them (modules_to_save was not set when the adapter was trained)"
            )
        if problems:
            raise CheckpointError(
                f"{where}: does not fit the model:\n{capped(problems)}\nexpected the tensors that {CONFIG} speaks of, "
                "and the head that they were trained with; fetch the file again, or train the adapter with its head",
                path=where,
                problems=problems,
                headless=headless,
            )
        own = {name: nn.Parameter(tensor.to(model.dtype).contiguous()) for name, tensor in held.items()}
        labelled = model.head in ("sequence_classification", "token_classification")
        return Adapter(
            settings, {path: sites[path] for path in sites if path in found}, parts, own, {},
            tuple(model.config.labels) if labelled else None, self.head.get("problem_type"), dict(self.values),
            read_recipe(self.path), self.head.get("activation_fn"),
        )  # fmt: skip

    def _virtual(self, model: GraphModel, settings: Prompt | Prefix, problems: list[str]) -> Parts:
        """Return the parts with virtual tokens; add problems to ``problems``."""
        encoder, words = cast("Any", model.config.encoder), cast("Any", model.graph.get_submodule(WORDS))
        width = words.embedding_dim if isinstance(settings, Prompt) else 2 * encoder.num_layers * encoder.hidden_size
        whole, shape = self.tensors.get(VIRTUAL), (settings.tokens, width)
        if whole is None or tuple(whole.shape) != shape:
            found = "missing" if whole is None else f"shape {tuple(whole.shape)}"
            problems.append(f"{VIRTUAL}: {found}, expected {shape}")
            return {}
        check_places(model, settings.tokens)
        if isinstance(settings, Prompt):
            return {WORDS: PromptPart(nn.Parameter(whole.float().contiguous()))}
        return prefix_parts(model, whole.float())

    def _parts(
        self, model: GraphModel, settings: Lora | IA3, sites: Mapping[str, Site],
        stored: Mapping[str, Mapping[str, Tensor]], problems: list[str],
    ) -> Parts:  # fmt: skip
        """Return the parts of projections and tables; add problems to ``problems``."""
        tokens = {}
        if isinstance(settings, Lora):
            tokens = tables_of_tokens(model, settings.trainable_token_indices, sites)
        wanted = targeted(self.values, sites, str(self.path / CONFIG))
        if wanted is None:  # all linear ones, of which an adapter may have left some out
            wanted = {path for path, tensors in stored.items() if "rows" not in tensors}
        check_tables(model, [path for path in wanted if sites[path].is_table])
        if not stored:
            problems.append(f"no tensors of {'IA3' if isinstance(settings, IA3) else 'LoRA'}")
        parts: Parts = {}
        for path in (path for path in sites if path in wanted or path in tokens or path in stored):
            site, tensors = sites[path], stored.get(path, {})
            rank, scale = 0, 1.0
            if isinstance(settings, Lora):
                rank = of_pattern(self.values.get("rank_pattern"), path, settings.rank)
                alpha = of_pattern(self.values.get("alpha_pattern"), path, settings.alpha_of())
                scale = alpha / (rank**0.5 if settings.rslora else rank)
            shapes = shapes_of(model.graph, site, settings, rank) if path in wanted else {}
            if path in tokens:
                shapes["rows"] = (
                    len(tokens[path]),
                    cast("Any", model.graph.get_submodule(site.paths[0])).embedding_dim,
                )
            kinds = (ScalePart, RowsPart, TablePart if site.is_table else LoraPart)
            ends = {name: f"{PREFIX}{path}{end}" for kind in kinds for name, end in ENDS[kind].items()}
            expected = ", ".join(ends[name] for name in shapes)
            wrong = (
                [f"{path}: a target, and a table of trainable_token_indices"]
                if path in wanted and path in tokens
                else []
            )
            for name, end in ends.items():
                if name not in tensors and name in shapes:
                    wrong.append(f"{end}: missing, although {CONFIG} names its module")
                elif name in tensors and name not in shapes:
                    by = f"{expected} and no other tensor" if shapes else f"none, although no id or target of {CONFIG}"
                    wrong.append(f"{end}: there, expected {by}")
                elif name in tensors and tuple(tensors[name].shape) != shapes[name]:
                    wrong.append(f"{end}: shape {tuple(tensors[name].shape)}, expected {shapes[name]}")
            if wrong:
                problems += wrong
            elif path in tokens:
                parts[site.paths[0]] = RowsPart(nn.Parameter(tensors["rows"].contiguous()), torch.tensor(tokens[path]))
            else:
                parts |= parts_of(site, tensors, settings, scale)
        return parts


def prefix_of(settings: Settings) -> str:
    """Return what names of a base's tensors begin with in the file of an adapter."""
    # peft wraps the model once more if modules have parts.
    return "base_model." if isinstance(settings, (Prompt, Prefix)) else PREFIX


def _spelling(path: str, known: Container[str], model: GraphModel) -> str | None:
    """Return a known name that a file's is, with or without the prefix of a task model."""
    prefix = model.config.family.base_prefix + "."
    return next((name for name in (path, path.removeprefix(prefix), prefix + path) if name in known), None)


def _bare(name: str) -> str:
    """Return a tensor's name without the names of peft's wrapper modules."""
    for wrapped in (".modules_to_save.", ".base_layer.", ".default."):
        name = name.replace(wrapped, ".")
    return name


def _kept(
    model: GraphModel, tensors: Mapping[str, Tensor], modules: str | Sequence[str], begin: str
) -> tuple[dict[str, Tensor], list[str]]:
    """Return whole tensors by our name, and the problems found; ``modules`` are required,
    ``begin`` is how names in the file begin."""
    held, problems = {}, []
    taken: set[str] = set()
    spec = None if model.head == "base" else model.config.family.heads[model.head]
    tied = {tie.also for tie in spec.ties} if spec is not None else set()
    for ours, marked in their_names(model).items():
        part = part_of(marked)
        whole = marked if part is None else part.whole
        place = _spelling(whole, tensors, model)
        if place is None:
            if ours not in tied and _means(modules, whole):
                problems.append(f"{printable(begin + whole)}: missing, although modules_to_save names its module")
            continue
        taken.add(place)
        try:
            tensor = tensors[place] if part is None else split(tensors[place], part)
        except (RuntimeError, ValueError):
            tensor = tensors[place]
        shape = tuple(model.graph.get_parameter(ours).shape)
        if spec is not None and spec.classifier is not None and ours.startswith(spec.classifier + "."):
            shape = (model.config.num_labels, *shape[1:])
        if tuple(tensor.shape) != shape:
            problems.append(f"{printable(begin + place)}: shape {tuple(tensor.shape)}, expected {shape}")
        held[ours] = tensor
    problems += [f"{printable(begin + name)}: the model has no such tensor" for name in tensors if name not in taken]
    return held, problems


def _means(modules: str | Sequence[str], tensor: str) -> bool:
    """Return whether a tensor belongs to one of these modules, which peft finds by the ends of their paths."""
    pieces = tensor.split(".")[:-1]
    paths = [".".join(pieces[:count]) for count in range(1, len(pieces) + 1)]
    return any(path.endswith(name) for name in ((modules,) if isinstance(modules, str) else modules) for path in paths)


def open_adapter(name_or_path: str | Path, hub: Mapping[str, Any] = {}) -> AdapterFolder:
    """Return the files of an adapter, read and checked.

    Args:
        name_or_path: a local folder or a Hub repository.
        hub: how files are downloaded from the Hub.

    Raises:
        HubError: the name leads nowhere.
        ConfigError: no settings, or such that are not understood.
        CheckpointError: no weights, or damaged ones.
    """
    asked = {name: value for name, value in hub.items() if name not in ("revision", "subfolder")}
    path, _ = resolve_folder(name_or_path, asked, FILES)
    if not is_entry(path, CONFIG):
        present = sorted(p.name for p in path.iterdir())[:12]
        raise ConfigError(
            f"{path / CONFIG} does not exist; expected an adapter as peft writes it. The folder contains: "
            f"{', '.join(present) or 'nothing'}. Pass the folder that contains {CONFIG} and {WEIGHTS}.",
            where=str(path / CONFIG),
            problems=[CONFIG],
        )
    values = read_json(read_member(path, CONFIG, MAX_CONFIG_BYTES, ConfigError), str(path / CONFIG))
    settings = read_settings(values, str(path / CONFIG))
    head: dict[str, Any] = {}
    if is_entry(path, HEAD):
        head = read_json(read_member(path, HEAD, MAX_CONFIG_BYTES, ConfigError), str(path / HEAD))
        named, kind = head.get("id2label") or {}, head.get("problem_type")
        labelled = (
            isinstance(named, dict)
            and sorted(named, key=str) == sorted(map(str, range(len(named))))
            and all(isinstance(label, str) for label in named.values())
        )
        problems = [] if labelled else ["id2label"]
        problems += [] if kind is None or kind in PROBLEM_TYPES else ["problem_type"]
        problems += [] if isinstance(head.get("activation_fn"), str | None) else ["activation_fn"]
        if problems:
            raise ConfigError(
                f"{path / HEAD}: {' and '.join(problems)} cannot be read; expected labels by their numbers from 0, one "
                f"of {', '.join(PROBLEM_TYPES)}, and the path of an activation. Fetch the file again, or remove it and "
                "pass labels=.",
                where=str(path / HEAD),
                problems=problems,
            )
    name = next((name for name in (WEIGHTS, BIN) if is_entry(path, name)), None)
    if name is None:
        raise CheckpointError(
            f"{path}: {WEIGHTS} is missing; expected it next to {CONFIG}. Fetch the folder again.",
            path=str(path),
            problems=[WEIGHTS],
        )
    with Checkpoint.open(path, named=name) as opened:
        return AdapterFolder(path, values, settings, head, opened.read_all())
