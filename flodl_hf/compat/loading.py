"""Keywords of loading and saving in transformers and sentence-transformers, with our keywords."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flodl_hf.compat.kwargs import Word

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
    "pretrained_model_name_or_path": Word("name_or_path"),
    "model_name_or_path": Word("name_or_path"),
    "torch_dtype": Word("dtype"),
    "device_map": Word("device", _mapped),
    "attn_implementation": Word("attention", _attention),
    "use_auth_token": Word("token"),
    "id2label": Word("labels", _labels),
    "label2id": Word("labels", _labels),
    "trust_remote_code": Word(reason="code of repositories is never run; flodl_hf.families.register adds a family"),
    "use_safetensors": Word(
        reason="weights are read from safetensors; flodl-hf convert reads pytorch_model.bin", harmless=(None, True)
    ),
    "low_cpu_mem_usage": Word(harmless=None),
    "use_fast": Word(harmless=None),
    "weights_only": Word(harmless=None),
    "output_loading_info": Word(reason="model.load_report lists every tensor"),
    # num_labels= initialises a new classifier without it; any other tensor of another shape is an error.
    "ignore_mismatched_sizes": Word(harmless=None),
    "output_attentions": Word(reason='pass it to the call: model(..., output_attentions=True) with attention="eager"'),
    "output_hidden_states": Word(reason="pass it to the call: model(..., output_hidden_states=True)"),
    "return_dict": Word(reason="pass it to the call: model(..., return_dict=False)", harmless=(None, True)),
    "add_pooling_layer": Word(
        reason="the model has a pooler if the file has one; last_hidden_state does not depend on it",
        harmless=(None, True),
    ),
    "load_in_8bit": Word(reason=_BITS),
    "load_in_4bit": Word(reason=_BITS),
    "quantization_config": Word(reason=_BITS),
    "variant": Word(reason='files without a variant are read; dtype="float16" casts them'),
    "force_download": Word(reason=_FETCHED),
    "resume_download": Word(harmless=None),
    "proxies": Word(reason="set HTTPS_PROXY in the environment"),
    "config": Word(reason="the config.json of the folder is used; from_config makes a model from a configuration"),
    "state_dict": Word(reason="load the folder, then model.graph.load_state_dict(...) with our names"),
    "max_memory": Word(reason="a model is on one device"),
    "offload_folder": Word(reason="a model is on one device"),
}
_SETTING = "the tokenizer files of the folder define it"
_HUB_WORDS = ("pretrained_model_name_or_path", "use_auth_token", "trust_remote_code", "force_download",
              "resume_download", "proxies")  # fmt: skip
TOKENIZER = {
    **{name: LOAD[name] for name in _HUB_WORDS},
    "use_fast": Word(harmless=None),
    "legacy": Word(harmless=None),
    "tokenizer_type": Word(reason="the files of the folder define it"),
    "max_length": Word(reason="pass it to the call of the tokenizer"),
    "additional_special_tokens": Word(reason=_SETTING),
    "config": Word(reason="the config.json of the folder is read"),
}
CONFIG = {
    **{name: LOAD[name] for name in (*_HUB_WORDS, "id2label", "label2id")},
    "return_unused_kwargs": Word(reason="every keyword is used or refused"),
    "output_attentions": LOAD["output_attentions"],
    "output_hidden_states": LOAD["output_hidden_states"],
}
SAVE = {
    "save_directory": Word("folder"),
    "safe_serialization": Word(reason="weights are always written as safetensors", harmless=(None, True)),
    "is_main_process": Word(reason="call it on one rank only", harmless=(None, True)),
    "push_to_hub": Word(reason='call model.push_to_hub("owner/name")'),
    "state_dict": Word(reason="the model's own tensors are written"),
    "variant": Word(reason="files are written without a variant"),
    "save_function": Word(reason="files are written as safetensors and verified", harmless=(None,)),
}
