"""Keywords of loading and saving in transformers and sentence-transformers, and what each is here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flodl_hf.compat.taking import Word

if TYPE_CHECKING:
    import torch

__all__ = ["CONFIG", "LOAD", "SAVE", "TOKENIZER", "device_of"]


def device_of(value: Any) -> torch.device | str | None:
    """Return a device as other libraries name it: a number is a CUDA device, -1 the CPU."""
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
            raise ValueError("one model stands on one device; devices=[...] of predict shares texts among several")
        (value,) = places
    return "auto" if value in ("balanced", "balanced_low_0", "sequential", "auto") else device_of(value)


def _attention(value: Any, _: Any) -> str:
    if value in (None, "sdpa", "eager"):
        return value or "sdpa"
    raise ValueError(
        "expected 'sdpa' or 'eager'; with 'sdpa' predictions run packed, by the fastest kernels that the device has"
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
        raise ValueError(f"expected the numbers 0 to {len(numbered) - 1}, each once")
    return [numbered[number] for number in sorted(numbered)]


_BITS = 'weights stay as they are; predict(..., precision="int8") computes in eight bits'
_FETCHED = "downloads are checked and kept in the Hub's cache; remove the file there to fetch it anew"
LOAD = {
    "pretrained_model_name_or_path": Word("name_or_path"),
    "model_name_or_path": Word("name_or_path"),
    "torch_dtype": Word("dtype"),
    "device_map": Word("device", _mapped),
    "attn_implementation": Word("attention", _attention),
    "use_auth_token": Word("token"),
    "id2label": Word("labels", _labels),
    "label2id": Word("labels", _labels),
    "trust_remote_code": Word(reason="no code of a repository is ever run; flodl_hf.families.register adds a family"),
    "use_safetensors": Word(
        reason="weights are read from safetensors; flodl-hf convert reads pytorch_model.bin", harmless=(None, True)
    ),
    "low_cpu_mem_usage": Word(harmless=None),
    "use_fast": Word(harmless=None),
    "weights_only": Word(harmless=None),
    "output_loading_info": Word(reason="model.load_report says what became of every tensor"),
    # num_labels= makes a new classifier without it, and any other tensor of another shape is a fault that is told.
    "ignore_mismatched_sizes": Word(harmless=None),
    "output_attentions": Word(reason='ask the call: model(..., output_attentions=True) with attention="eager"'),
    "output_hidden_states": Word(reason="ask the call: model(..., output_hidden_states=True)"),
    "return_dict": Word(reason="ask the call: model(..., return_dict=False)", harmless=(None, True)),
    "add_pooling_layer": Word(
        reason="a pooler is there where the file has one; last_hidden_state does not depend on it",
        harmless=(None, True),
    ),
    "load_in_8bit": Word(reason=_BITS),
    "load_in_4bit": Word(reason=_BITS),
    "quantization_config": Word(reason=_BITS),
    "variant": Word(reason='files are those without a variant; dtype="float16" casts them'),
    "force_download": Word(reason=_FETCHED),
    "resume_download": Word(harmless=None),
    "proxies": Word(reason="set HTTPS_PROXY in the environment"),
    "config": Word(reason="the folder's config.json says how it is read; from_config makes a model of a configuration"),
    "state_dict": Word(reason="load the folder, then model.graph.load_state_dict(...) with our names"),
    "max_memory": Word(reason="one model stands on one device"),
    "offload_folder": Word(reason="one model stands on one device"),
}
_SETTING = "it stands in the folder's tokenizer files, which say how ids are made"
_HUB_WORDS = ("pretrained_model_name_or_path", "use_auth_token", "trust_remote_code", "force_download",
              "resume_download", "proxies")  # fmt: skip
TOKENIZER = {
    **{name: LOAD[name] for name in _HUB_WORDS},
    "use_fast": Word(harmless=None),
    "legacy": Word(harmless=None),
    "tokenizer_type": Word(reason="the folder's files say it"),
    "max_length": Word(reason="say it when calling the tokenizer"),
    "additional_special_tokens": Word(reason=_SETTING),
    "config": Word(reason="the folder's config.json is read"),
}
CONFIG = {
    **{name: LOAD[name] for name in (*_HUB_WORDS, "id2label", "label2id")},
    "return_unused_kwargs": Word(reason="there are none: every keyword is taken or refused"),
    "output_attentions": LOAD["output_attentions"],
    "output_hidden_states": LOAD["output_hidden_states"],
}
SAVE = {
    "save_directory": Word("folder"),
    "safe_serialization": Word(reason="weights are written as safetensors alone", harmless=(None, True)),
    "is_main_process": Word(reason="call it on one rank alone", harmless=(None, True)),
    "push_to_hub": Word(reason='call model.push_to_hub("owner/name")'),
    "state_dict": Word(reason="the model's own tensors are written"),
    "variant": Word(reason="files are written without a variant"),
    "save_function": Word(reason="files are written as safetensors and compared", harmless=(None,)),
}
