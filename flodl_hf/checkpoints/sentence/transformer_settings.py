"""``sentence_bert_config.json``: how a transformer is loaded, how texts become tokens, and which output is read.

A setting that changes numbers is applied, or loading fails with the file, the key and the value. `_KEYS` and the tables
below list the settings that are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flodl.errors import ConfigError, shown
from flodl_hf.checkpoints.sentence.module_files import refuse_setting, warn_of_unknown, wrong

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
        raise ConfigError(
            f"{folder}: found hidden state {layer}, expected a number from {-layers - 1} to {layers}. Correct it.",
            where=folder,
            problems=["modality_config"],
        )
    return layer % (layers + 1)
