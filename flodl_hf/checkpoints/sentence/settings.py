"""Which modules a folder of sentence-transformers has, and how its transformer is loaded.

``modules.json`` and the configuration of a router list the modules of each route. ``sentence_bert_config.json`` states
how texts become tokens and which output is read. A setting that changes numbers is applied, or loading fails with the
file, the key and the value.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from flodl.errors import ConfigError, FlodlError, printable, shown
from flodl_hf.checkpoints.folders import WEIGHT_FILES, is_entry, read_member, refused
from flodl_hf.checkpoints.weights.checkpoint import Checkpoint

_MOST = 1 << 30
_SETTINGS = "config.json"


def read_module(
    root: Path, part: str, known: Collection[str], name: str, *, weights: bool
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, bytes]]:
    """Return the settings and tensors of a module in a folder below ``root``, and its files by relative names.

    Args:
        root: the folder of the model.
        part: the folder of the module, from there.
        known: names of settings; others are ignored with one warning.
        name: the file of settings.
        weights: the module has tensors; settings of others are optional.

    Raises:
        ConfigError: the settings are damaged.
        CheckpointError: the weights are damaged.
    """
    file = f"{part}/{name}"
    settings, names, tensors = settings_in(root, file, known, optional=not weights), {file}, {}
    if weights:
        with Checkpoint.open(root / part) as checkpoint:
            names |= {f"{part}/{file.name}" for file in checkpoint.manifest.files}
            tensors = checkpoint.read_all()
    files = {file: read_member(root, file, _MOST) for file in sorted(names) if is_entry(root, file)}
    return settings, tensors, files


def module_files(
    part: str, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str = _SETTINGS
) -> dict[str, bytes]:
    """Return the files of a module as sentence-transformers reads them."""
    from safetensors.torch import save

    found = {f"{part}/{name}": json_bytes(dict(settings))}
    if tensors:
        stored = {key: tensor.contiguous() for key, tensor in tensors.items()}
        found[f"{part}/model.safetensors"] = save(stored, {"format": "pt"})
    return found


def json_bytes(value: Any) -> bytes:
    """Return a value as the text of a JSON file."""
    return (json.dumps(value, indent=2) + "\n").encode()


def refuse_setting(path: Path, key: str, value: Any, expected: str) -> FlodlError:
    """Return the error of a setting that changes numbers and is not supported."""
    advice = f"{expected}; others are not supported. Correct it, or load the transformer's own folder"
    found = f"found {key}: {shown(value, 80)}"
    return refused(path, found, advice, problems=[key], kind=ConfigError, key=key, value=value)


_LIMIT = 1_000_000


def wrong(path: Path, problem: str, expected: str) -> FlodlError:
    """Return the error for a file with unexpected contents."""
    advice = f"{expected}. Fetch the file again or correct it"
    return refused(path, problem, advice, problems=[path.name], kind=ConfigError)


def read_json(root: Path, name: str) -> Any:
    """Return the contents of a JSON file."""
    path = root / name
    try:
        return json.loads(bytes_of(root, name).decode("utf-8"))
    except (ValueError, RecursionError) as fault:
        reason = "nested too deeply" if isinstance(fault, RecursionError) else str(fault)
        raise wrong(path, f"cannot be read as JSON ({reason})", "JSON in UTF-8") from None


def settings_in(root: Path, name: str, known: Collection[str] = (), *, optional: bool = False) -> dict[str, Any]:
    """Return the contents of a JSON file with an object of settings; nothing if it is optional and absent.

    Warns of settings that are not ``known``, if names are given.
    """
    if optional and not is_entry(root, name):
        return {}
    value = read_json(root, name)
    if not isinstance(value, dict):
        raise wrong(root / name, f"contains a JSON {type(value).__name__}", "an object with settings")
    if known:
        warn_of_unknown(root / name, value, known)
    return value


def warn_of_unknown(path: Path, settings: Mapping[str, Any], known: Collection[str]) -> None:
    """Warn once of the settings of a file that are not known and therefore ignored."""
    unknown = sorted(str(key) for key in settings if key not in known)
    if unknown:
        names = ", ".join(printable(key, 60) for key in unknown[:10])
        warnings.warn(f"{path}: found unknown settings, which are ignored: {names}", UserWarning, stacklevel=2)


def bytes_of(root: Path, name: str) -> bytes:
    """Return the bytes of a small file."""
    return read_member(root, name, _LIMIT, ConfigError)


def folder_of(root: Path, module: Mapping[str, Any]) -> str:
    """Return the folder of a module from the root, "." for the root; it must be inside ``root``."""
    path = module.get("path")
    folder = root / str(path or "")
    try:
        inner = folder.resolve().relative_to(root.resolve())
    except (OSError, RuntimeError, ValueError):  # outside, a name that cannot be, or a link that leads to itself
        found = f"the path {printable(str(path), 80)} leads out of the folder, or nowhere"
        raise wrong(root / "modules.json", found, "the name of a folder inside") from None
    return (folder.relative_to(root) if folder.is_relative_to(root) else inner).as_posix()


# ---- modules and routes ----------------------------------------------------------------------------------

_KNOWN = (
    "Transformer", "Pooling", "Dense", "LayerNorm", "Dropout", "Normalize", "CNN", "WeightedLayerPooling",
    "MLMTransformer", "SpladePooling", "MultiVectorMask",
)  # fmt: skip
_ROUTERS = ("Router", "Asym")
Modules = list[dict[str, Any]]


class Routing(NamedTuple):
    """The modules that texts go through.

    Attributes:
        ways: modules by route; a single entry without a name if there is no router.
        usual: the route of calls without a route; None if calls must name one.
        kinds: further names of routes.
        files: router files in addition to ``modules.json``.
    """

    ways: dict[str, Modules]
    usual: str | None = None
    kinds: Mapping[str, str] = {}
    files: tuple[str, ...] = ()

    @property
    def first(self) -> str:
        """The usual route, or the first where none is."""
        return next(iter(self.ways)) if self.usual is None else self.usual

    def transformers(self, root: Path) -> dict[str, str]:
        """Return by route the folder of its transformer, from the root."""
        return {route: folder_of(root, way[0]) for route, way in self.ways.items()}


def routing_of(root: Path) -> Routing:
    """Return the modules of a folder.

    Raises:
        ConfigError: ``modules.json`` or a router's file is damaged, or names unsupported modules.
    """
    value = read_json(root, "modules.json")
    if not isinstance(value, list) or not all(isinstance(m, dict) and isinstance(m.get("type"), str) for m in value):
        raise wrong(root / "modules.json", f"found {shown(value, 60)}", "a list of modules with their types")
    at = next((place for place, module in enumerate(value) if kind_of(module) in _ROUTERS), None)
    if at is None:
        return Routing({"": _checked(root, value)})
    inside = Path(folder_of(root, value[at]))
    file = (inside / "router_config.json").as_posix()
    if not is_entry(root, file):  # as older releases wrote it
        file = (inside / "config.json").as_posix()
    said = settings_in(root, file)
    types, structure, settings = (said.get(key) or {} for key in ("types", "structure", "parameters"))
    try:
        modules = {
            route: [{"type": str(types[part]), "path": (inside / part).as_posix()} for part in way]
            for route, way in structure.items()
        }
        usual = settings.get("default_route")
        if not modules:
            raise ValueError
    except (AttributeError, LookupError, TypeError, ValueError):
        expected = "types, and the structure of one route or more"
        raise wrong(root / file, f"found {shown(said, 80)}", expected) from None
    ways = {route: _checked(root, [*value[:at], *own, *value[at + 1 :]]) for route, own in modules.items()}
    if usual is None and settings.get("allow_empty_key", True):
        usual = next(iter(ways))
    kinds, anything = _kinds_of_texts(settings.get("route_mappings") or {}, ways, root / file)
    usual = anything or ("text" if "text" in ways else usual)
    if usual is not None and usual not in ways:
        raise wrong(root / file, f"default_route is {shown(usual, 60)}", f"one of {', '.join(map(printable, ways))}")
    return Routing(ways, usual, kinds, (file,))


def _kinds_of_texts(mappings: Any, ways: Mapping[str, Any], path: Path) -> tuple[dict[str, str], str | None]:
    """Return the route of each kind of text, and the route of all others; None without a mapping."""
    found: dict[tuple[Any, Any], str] = {}
    for key, route in mappings.items() if isinstance(mappings, dict) else [(mappings, None)]:
        try:
            task, modality = ast.literal_eval(key)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            task, modality = (), ()
        if not isinstance(task, str | None) or not isinstance(route, str) or route not in ways:
            expected = f"pairs such as \"('query', 'text')\", each with one of {', '.join(map(printable, ways))}"
            raise wrong(path, f"route_mappings has {shown({str(key): route}, 80)}", expected)
        if modality in ("text", None):
            found.setdefault((task, modality), route)
    # As the library looks them up: what names both, what names the task, then what names any task, then routes.
    exact = {task: found.get((task, "text"), found.get((task, None), "")) for task, _ in found if task is not None}
    anything = found.get((None, "text"), found.get((None, None)))
    return ({} if anything is None else dict.fromkeys(ways, anything)) | exact, anything


def _checked(root: Path, value: Modules) -> Modules:
    """Return the modules of one route, of kinds and in an order that is understood."""
    kinds = [kind_of(module) for module in value]
    unknown = [kind for kind in kinds if kind not in _KNOWN]
    if unknown:
        found = f"found the module {printable(unknown[0], 80)}, which is not supported"
        advice = "Give the transformer's own folder, or use sentence-transformers"
        expected = f"{', '.join(_KNOWN)}, or a Router of these. {advice}"
        raise refused(root / "modules.json", found, expected, problems=unknown, kind=ConfigError)
    first, behind = kinds[:1], kinds[1:]
    if "MultiVectorMask" in kinds:
        sound = behind[:-2] == ["Dense"] * (len(kinds) - 3) != [] and behind[-2:] == ["MultiVectorMask", "Normalize"]
        expected = "for vectors of tokens Transformer, Dense, MultiVectorMask and Normalize"
    elif "SpladePooling" in kinds or first == ["MLMTransformer"]:
        sound, expected = behind == ["SpladePooling"], "for sparse vectors Transformer and SpladePooling"
    else:
        at = behind.index("Pooling") if "Pooling" in behind else 0
        sound = behind.count("Pooling") < 2 and "WeightedLayerPooling" not in behind[1:]
        sound = sound and not {"LayerNorm", "Dropout"} & set(behind[:at]) and "CNN" not in behind[at:]
        sound = sound and not {"Transformer", "MLMTransformer"} & set(behind)
        expected = "one Transformer, layers of token vectors, one Pooling, layers of text vectors; or SpladePooling"
    if first not in (["Transformer"], ["MLMTransformer"]) or not sound:
        raise wrong(root / "modules.json", f"found the modules {', '.join(kinds[:8]) or 'none'}", expected)
    return value


def kind_of(module: Mapping[str, Any]) -> str:
    """Return the kind of a module: the last component of its type."""
    return module["type"].rsplit(".", 1)[-1]


def transformer_folder(root: Path) -> Path:
    """Return the folder of the weights: ``root``, or the one that its ``modules.json`` names.

    Raises:
        ConfigError: ``modules.json`` is damaged, or names a folder although the root has weights.
    """
    if not is_entry(root, "modules.json"):
        return root
    routing = routing_of(root)
    place = root / folder_of(root, routing.ways[routing.first][0])
    if place == root or place.resolve() == root.resolve():
        return root
    twice = any(is_entry(root, name) for name in WEIGHT_FILES)
    if twice or not is_entry(place, "config.json"):
        fault = "and the folder above contains weights too" if twice else "which contains no config.json"
        found = f"names {printable(place.name, 80)} for the transformer, {fault}"
        raise wrong(root / "modules.json", found, "the folder of one transformer")
    return place


def transformer_folders(root: Path) -> list[str]:
    """Return the weight folders from the root, "" for the root itself: one for each transformer.

    Raises:
        ConfigError: as of `routing_of`.
    """
    if not is_entry(root, "modules.json"):
        return [""]
    found = dict.fromkeys(routing_of(root).transformers(root).values())
    return ["" if folder == "." else folder for folder in found]


def module_folders(root: Path) -> dict[str, bool]:
    """Return the module folders below ``root``, and whether each has a transformer; none without modules.json.

    Only ``modules.json`` and routers' files must be present.
    """
    if not is_entry(root, "modules.json"):
        return {}
    routing = routing_of(root)
    modules = [module for way in routing.ways.values() for module in way]
    found = {folder_of(root, module): "Transformer" in kind_of(module) for module in modules}
    return {folder: holds for folder, holds in found.items() if folder != "."}


# ---- how the transformer is loaded -----------------------------------------------------------------------

LEAST_TOKENS = 3  # two special ones and one of the text
_KEYS = (
    "transformer_task", "modality_config", "module_output_name", "processing_kwargs", "unpad_inputs", "query_length",
    "document_length", "query_expansion", "max_seq_length", "do_lower_case", "tokenizer_name_or_path", "backend",
    "model_kwargs", "model_args", "processor_kwargs", "tokenizer_args", "config_kwargs", "config_args",
)  # fmt: skip
_TASKS = ("feature-extraction", "sequence-classification", "fill-mask")
# Settings of a call of the tokenizer by the values that change no numbers here; None for any value.
_TEXT: dict[str, tuple[Any, ...] | None] = {
    "max_length": None, "padding": None, "pad_to_multiple_of": None, "return_tensors": None, "verbose": None,
    "return_length": None, "return_offsets_mapping": None, "return_special_tokens_mask": None, "stride": None,
    "logits_to_keep": None, "return_token_type_ids": None, "return_attention_mask": (None, True),
    "truncation": (None, True, "longest_first"), "add_special_tokens": (True,), "padding_side": (None, "right"),
    "truncation_side": (None, "right"), "is_split_into_words": (False,), "return_overflowing_tokens": (False,),
}  # fmt: skip
# The same of `AutoModel.from_pretrained`; a dtype is applied.
_MODEL: dict[str, tuple[Any, ...] | None] = {
    "dtype": None, "torch_dtype": None, "attn_implementation": None, "device_map": None, "low_cpu_mem_usage": None,
    "use_safetensors": None, "cache_dir": None, "token": None, "revision": None, "local_files_only": None,
    "force_download": None, "trust_remote_code": None, "add_pooling_layer": None, "provider": None, "export": None,
    "file_name": None, "reference_compile": None, "offload_folder": None, "use_flash_attention_2": None,
    "load_in_8bit": (False,), "load_in_4bit": (False,), "quantization_config": (None,), "subfolder": ("", None),
    "variant": (None,), "ignore_mismatched_sizes": (False,), "unpad_inputs": None,
    "use_memory_efficient_attention": None,
}  # fmt: skip
_OF_THE_HUB = ("trust_remote_code", "cache_dir", "token", "revision", "local_files_only", "force_download", "subfolder")


@dataclass(frozen=True)
class TransformerSettings:
    """What ``sentence_bert_config.json`` specifies.

    Attributes:
        task: the task that the transformer is loaded for.
        max_tokens: most tokens of a text, or None.
        lower_case: whether texts are lower-cased first.
        pooler: the vector of a text is the output of the model's pooler.
        layer: number of the hidden state to read, as in transformers' ``hidden_states``; None for the last state.
        config: values that override those of ``config.json``.
        tokenizer: values that override those of ``tokenizer_config.json``.
        dtype: dtype that the weights are cast to; None for the one in ``config.json``.
        stated: the contents of the file.
    """

    task: str = _TASKS[0]
    max_tokens: int | None = None
    lower_case: bool = False
    pooler: bool = False
    layer: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    stated: Mapping[str, Any] = field(default_factory=dict)


def transformer_settings(stated: Mapping[str, Any], file: Path, *, several: bool, late: bool) -> TransformerSettings:
    """Return the checked settings of a transformer.

    Args:
        stated: the file's contents; empty if there is no file.
        file: the file.
        several: routes have separate transformers, for which overrides are not supported.
        late: the folder gives a vector for each token, with lengths of queries and documents.

    Raises:
        ConfigError: a value is wrong, or changes numbers and is not supported.
    """
    warn_of_unknown(file, stated, _KEYS)
    length, lower = stated.get("max_seq_length"), stated.get("do_lower_case")
    if length is not None and (type(length) is not int or length < LEAST_TOKENS):
        raise wrong(file, f"max_seq_length is {shown(length, 60)}", f"an integer from {LEAST_TOKENS}, or null")
    if lower is not None and not isinstance(lower, bool):
        raise wrong(file, f"do_lower_case is {shown(lower, 60)}", "true or false")
    for key in ("tokenizer_name_or_path", *(() if late else ("query_length", "document_length", "query_expansion"))):
        if stated.get(key) is not None:
            raise refuse_setting(file, key, stated[key], "null")
    task = stated.get("transformer_task", _TASKS[0])
    if task not in _TASKS:
        raise refuse_setting(file, "transformer_task", task, f"one of {', '.join(_TASKS)}")
    pooler, layer = _output(stated, task, file)
    config, tokenizer, model = (
        _overrides(stated, file, *names)
        for names in (("config_kwargs", "config_args"), ("processor_kwargs", "tokenizer_args"),
                      ("model_kwargs", "model_args"))
    )  # fmt: skip
    for key in _OF_THE_HUB:
        config.pop(key, None)
        tokenizer.pop(key, None)
    if several and (config or tokenizer or model):
        found = "config_kwargs" if config else "processor_kwargs" if tokenizer else "model_kwargs"
        raise refuse_setting(file, found, stated.get(found), "none, if routes have separate transformers")
    _only(model, _MODEL, file, "model_kwargs")
    asked = tokenizer.get("model_max_length")
    length = _text_length(stated.get("processing_kwargs"), file) or (length if asked is None else None)
    dtype = model.get("dtype", model.get("torch_dtype"))
    return TransformerSettings(task, length, lower is True, pooler, layer, config, tokenizer, dtype, stated)


def _overrides(stated: Mapping[str, Any], file: Path, name: str, old: str) -> dict[str, Any]:
    found = stated.get(old, stated.get(name)) or {}
    if not isinstance(found, dict):
        raise wrong(file, f"{name} is {shown(found, 60)}", "an object with settings")
    return dict(found)


def _only(settings: Mapping[str, Any], table: Mapping[str, tuple[Any, ...] | None], file: Path, inside: str) -> None:
    """Raise on a setting that is not in the table, or that has a value which changes numbers."""
    for key, value in settings.items():
        harmless = table.get(key, ())
        if harmless is not None and not any(type(value) is type(one) and value == one for one in harmless):
            expected = " or ".join(map(repr, harmless)) or "no such setting"
            raise refuse_setting(file, f"{inside}.{key}", value, expected)


def _text_length(settings: Any, file: Path) -> int | None:
    """Return the most tokens of a text by ``processing_kwargs``; None if it states none.

    Raises:
        ConfigError: a setting of the tokenizer's call changes numbers and is not supported.
    """
    if settings is None:
        return None
    if not isinstance(settings, dict) or not all(isinstance(part, dict) for part in settings.values()):
        raise wrong(file, f"processing_kwargs is {shown(settings, 60)}", "settings by modality")
    warn_of_unknown(file, settings, ("common", "text", "audio", "image", "video", "chat_template"))
    for part in ("text", "common"):
        _only(settings.get(part, {}), _TEXT, file, f"processing_kwargs.{part}")
    # The settings for all modalities are applied after the settings for texts.
    length = {**settings.get("text", {}), **settings.get("common", {})}.get("max_length")
    if length is not None and (type(length) is not int or length < LEAST_TOKENS):
        raise refuse_setting(file, "processing_kwargs.text.max_length", length, f"an integer from {LEAST_TOKENS}")
    return length


def _output(stated: Mapping[str, Any], task: str, file: Path) -> tuple[bool, int | None]:
    """Return whether the pooler's output is read, and else which hidden state; None for the last state."""
    modalities = stated.get("modality_config")
    usual = "last_hidden_state" if task == _TASKS[0] else "logits"
    text = {"method": "forward", "method_output_name": usual}
    if modalities is not None:
        if not isinstance(modalities, dict) or "message" in modalities or not isinstance(modalities.get("text"), dict):
            raise refuse_setting(file, "modality_config", modalities, "an entry for text, and none for message")
        text = modalities["text"]
    if text.get("method") != "forward":
        raise refuse_setting(file, "modality_config.text.method", text.get("method"), "forward")
    output: Any = text.get("method_output_name")
    path: list[Any] = output if isinstance(output, list) else [output]
    name = stated.get("module_output_name")
    states = task == _TASKS[0]
    pooler = states and path in (["pooler_output"], [1])
    hidden = states and len(path) == 2 and path[0] == "hidden_states" and type(path[1]) is int
    if not pooler and not hidden and path != [usual] and not (states and path == [0]):
        expected = f"{usual}, pooler_output, or hidden_states and a number" if states else usual
        raise refuse_setting(file, "modality_config.text.method_output_name", output, expected)
    names = {_TASKS[0]: "sentence_embedding" if pooler else "token_embeddings", _TASKS[1]: "scores"}
    expected = names.get(task, "token_embeddings")
    if name not in (None, expected):
        raise refuse_setting(file, "module_output_name", name, expected)
    return pooler, path[1] if hidden else None


def layer_number(layer: int, layers: int, folder: str) -> int:
    """Return the place of a hidden state from the first, of which there is one more than there are layers.

    Raises:
        ConfigError: there is no such hidden state.
    """
    if not -layers - 1 <= layer <= layers:
        found, expected = f"found hidden state {layer}", f"a number from {-layers - 1} to {layers}. Correct it."
        raise refused(folder, found, expected, problems=["modality_config"], kind=ConfigError)
    return layer % (layers + 1)
