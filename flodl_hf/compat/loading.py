"""Keywords of loading and saving in transformers and sentence-transformers, with our keywords."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flodl_hf.compat.kwargs import KeywordAlias

if TYPE_CHECKING:
    import torch


def device_of(value: Any) -> torch.device | str | None:
    """Return the device of another library's value: a number is a CUDA device, -1 the CPU."""
    import torch

    if isinstance(value, bool) or not isinstance(value, (int, str, torch.device, type(None))):
        raise ValueError("expected a device, such as 'cuda:0', 0 or 'cpu'")
    if isinstance(value, int):
        return torch.device("cpu") if value < 0 else torch.device("cuda", value)
    return value


def _mapped(value: Any, _: Any) -> Any:
    if isinstance(value, Mapping):
        places = set(value.values())
        if len(places) != 1:
            raise ValueError("a model is on one device; predict(devices=[...]) distributes texts over several")
        (value,) = places
    return "auto" if value in ("balanced", "balanced_low_0", "sequential", "auto") else device_of(value)


def _attention(value: Any, _: Any) -> str:
    if value in (None, "sdpa", "eager"):
        return value or "sdpa"
    raise ValueError(
        "expected 'sdpa' or 'eager'; with 'sdpa' predictions run packed, by the fastest kernels of the device"
    )


def _labels(value: Any, _: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ValueError("expected a dictionary of labels")
    if all(isinstance(number, int) for number in value.values()):  # label2id
        value = {number: name for name, number in value.items()}
    numbered = {int(number): str(name) for number, name in value.items()}
    if sorted(numbered) != list(range(len(numbered))):
        raise ValueError(f"expected the numbers 0 to {len(numbered) - 1} once each")
    return [numbered[number] for number in sorted(numbered)]


_BITS = 'weights are loaded unchanged; predict(..., precision="int8") computes in eight bits'
_FETCHED = "downloads are verified and cached; remove the file from the Hub's cache to download it again"
LOAD = {
    "pretrained_model_name_or_path": KeywordAlias("name_or_path"),
    "model_name_or_path": KeywordAlias("name_or_path"),
    "torch_dtype": KeywordAlias("dtype"),
    "device_map": KeywordAlias("device", _mapped),
    "attn_implementation": KeywordAlias("attention", _attention),
    "use_auth_token": KeywordAlias("token"),
    "id2label": KeywordAlias("labels", _labels),
    "label2id": KeywordAlias("labels", _labels),
    "trust_remote_code": KeywordAlias(
        reason="code of repositories is never run; flodl_hf.families.register adds a family"
    ),
    "use_safetensors": KeywordAlias(
        reason="weights are read from safetensors; flodl-hf convert reads pytorch_model.bin", harmless=(None, True)
    ),
    "low_cpu_mem_usage": KeywordAlias(harmless=None),
    "use_fast": KeywordAlias(harmless=None),
    "weights_only": KeywordAlias(harmless=None),
    "output_loading_info": KeywordAlias(reason="model.load_report lists every tensor"),
    # num_labels= initialises a new classifier without it; any other tensor of another shape is an error.
    "ignore_mismatched_sizes": KeywordAlias(harmless=None),
    "output_attentions": KeywordAlias(
        reason='pass it to the call: model(..., output_attentions=True) with attention="eager"'
    ),
    "output_hidden_states": KeywordAlias(reason="pass it to the call: model(..., output_hidden_states=True)"),
    "return_dict": KeywordAlias(reason="pass it to the call: model(..., return_dict=False)", harmless=(None, True)),
    "add_pooling_layer": KeywordAlias(
        reason="the model has a pooler if the file has one; last_hidden_state does not depend on it",
        harmless=(None, True),
    ),
    "load_in_8bit": KeywordAlias(reason=_BITS),
    "load_in_4bit": KeywordAlias(reason=_BITS),
    "quantization_config": KeywordAlias(reason=_BITS),
    "variant": KeywordAlias(reason='files without a variant are read; dtype="float16" casts them'),
    "force_download": KeywordAlias(reason=_FETCHED),
    "resume_download": KeywordAlias(harmless=None),
    "proxies": KeywordAlias(reason="set HTTPS_PROXY in the environment"),
    "config": KeywordAlias(
        reason="the config.json of the folder is used; from_config makes a model from a configuration"
    ),
    "state_dict": KeywordAlias(reason="load the folder, then model.graph.load_state_dict(...) with our names"),
    "max_memory": KeywordAlias(reason="a model is on one device"),
    "offload_folder": KeywordAlias(reason="a model is on one device"),
}
_SETTING = "the tokenizer files of the folder define it"
_HUB_WORDS = ("pretrained_model_name_or_path", "use_auth_token", "trust_remote_code", "force_download",
              "resume_download", "proxies")  # fmt: skip
TOKENIZER = {
    **{name: LOAD[name] for name in _HUB_WORDS},
    "use_fast": KeywordAlias(harmless=None),
    "legacy": KeywordAlias(harmless=None),
    "tokenizer_type": KeywordAlias(reason="the files of the folder define it"),
    "max_length": KeywordAlias(reason="pass it to the call of the tokenizer"),
    "additional_special_tokens": KeywordAlias(reason=_SETTING),
    "config": KeywordAlias(reason="the config.json of the folder is read"),
}
CONFIG = {
    **{name: LOAD[name] for name in (*_HUB_WORDS, "id2label", "label2id")},
    "return_unused_kwargs": KeywordAlias(reason="every keyword is used or refused"),
    "output_attentions": LOAD["output_attentions"],
    "output_hidden_states": LOAD["output_hidden_states"],
}
SAVE = {
    "save_directory": KeywordAlias("folder"),
    "safe_serialization": KeywordAlias(reason="weights are always written as safetensors", harmless=(None, True)),
    "is_main_process": KeywordAlias(reason="call it on one rank only", harmless=(None, True)),
    "push_to_hub": KeywordAlias(reason='call model.push_to_hub("owner/name")'),
    "state_dict": KeywordAlias(reason="the model's own tensors are written"),
    "variant": KeywordAlias(reason="files are written without a variant"),
    "save_function": KeywordAlias(reason="files are written as safetensors and verified", harmless=(None,)),
}
