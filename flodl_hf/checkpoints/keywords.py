"""Methods that accept keywords of other libraries, by tables, and the tables of loading and saving.

The decorator `accept_keywords` receives the table; keywords of the method have precedence. A keyword of another library
is mapped to ours (``aggregation_strategy`` to ``aggregation``), ignored if its value does not change the answer
(``padding``), or refused with the reason. `flodl_hf.heads.prediction_keywords` contains the tables of predictions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from flodl.errors import FlodlError, nearest
from flodl_hf.errors import PredictError

if TYPE_CHECKING:
    import torch

F = TypeVar("F", bound=Callable[..., Any])
LONG_TEXTS = {"windows": "windows", "truncate": "truncate", "error": "strict"}
"""Values of ``long_texts``, and the keyword of a method that each value sets unless it is the default."""

PRECISION_SPELLINGS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""Further names of precisions."""
DTYPE_SPELLINGS = {**{short: name for name, short in PRECISION_SPELLINGS.items()}, "fp64": "float64"}
"""Further names of floating types of weights."""


class KeywordAlias(NamedTuple):
    """A keyword of another library.

    Args:
        ours: our keyword; None where there is none.
        value: converts its value, given the model.
        reason: why it is refused if ``ours`` is None.
        harmless: values that have no effect and are ignored; None for any value.
    """

    ours: str | None = None
    value: Callable[[Any, Any], Any] = lambda value, model: value
    reason: str = ""
    harmless: tuple[Any, ...] | None = (None, False)


def accept_keywords(
    words: Mapping[str, KeywordAlias], fault: type[FlodlError] = PredictError, *, like: Callable[..., Any] | None = None
) -> Callable[[F], F]:
    """Return a decorator for methods that accept keywords of other libraries.

    Args:
        words: the table.
        fault: the error for refused keywords.
        like: the method that receives other keywords; its signature is added to this one's.
    """

    def decorate(method: F) -> F:
        signature = inspect.signature(method)
        if like is not None:
            parameters = signature.parameters
            mine = [p for p in parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
            kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
            more = [p for p in inspect.signature(like).parameters.values() if p.kind in kinds]
            signature = signature.replace(
                parameters=[*mine, *(p for p in more if p.name not in {m.name for m in mine})]
            )
        own = _own(signature)

        @wraps(method)
        def call(*args: Any, **options: Any) -> Any:
            if not own.issuperset(options):
                options = _translated(method.__name__, args[0] if args else None, options, own, words, fault)
            return method(*args, **options)

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return decorate


def _own(signature: inspect.Signature) -> set[str]:
    """Return the own keywords of a method."""
    own = {p.name for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD}
    if len(own) < len(signature.parameters):
        # The names of `flodl_hf.inference.RunKeywords`, which is imported with the first prediction.
        own |= {"precision", "token_budget", "devices", "batch_invariant", "window", "progress"}
    return own


def _translated(
    method: str, owner: Any, options: dict[str, Any], own: set[str], words: Mapping[str, KeywordAlias],
    fault: type[FlodlError],
) -> dict[str, Any]:  # fmt: skip
    if "long_texts" in words:
        options = replace_long_texts(method, options, own)
    found = {name: value for name, value in options.items() if name in own}
    refused: list[str] = []
    for name, value in options.items():
        if name in own:
            continue
        word = words.get(name)
        if word is None:
            known = sorted(own - {"self", "cls"})
            raise TypeError(
                f"{method}: unexpected keyword argument {name!r}{nearest(name, [*known, *words])}; expected one of "
                f"{', '.join(known)}"
            )
        if word.ours is None:
            if word.harmless is not None and not any(
                type(value) is type(one) and value == one for one in word.harmless
            ):
                refused.append(f"{name}={value!r}: {word.reason}")
            continue
        try:
            ours = word.value(value, owner)
        except ValueError as why:
            refused.append(f"{name}={value!r}: {why}")
            continue
        if word.ours in found and found[word.ours] is not ours and found[word.ours] != ours:
            refused.append(f"{name}={value!r} and {word.ours}={found[word.ours]!r} have different values")
            continue
        found[word.ours] = ours
    if refused:
        raise fault(f"{method}: {'; '.join(refused)}", problems=refused)
    return found


def replace_long_texts(method: str, options: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """Return keywords with ``long_texts`` replaced by the keyword of the method.

    Args:
        method: the method's name, for errors.
        options: the keywords of a call.
        own: the keywords of the method. One with ``windows`` truncates by default; others read windows.

    Raises:
        PredictError: the method does not support the value, or an alias of ``long_texts`` is also given.
    """
    rest = dict(options)
    value = rest.pop("long_texts", None)
    if value is None:
        return rest
    default = "truncate" if "windows" in own else "windows"
    supported = [name for name, word in LONG_TEXTS.items() if name == default or word in own]
    if value not in supported:
        raise PredictError(
            f"{method}: found long_texts={value!r}, expected {' or '.join(map(repr, supported))}", long_texts=value
        )
    others = (*LONG_TEXTS.values(), "truncation", *(["max_length"] if value == "windows" else []))
    if both := [name for name in others if rest.get(name) is not None]:
        raise PredictError(
            f"{method}: found long_texts={value!r} and {', '.join(f'{name}=' for name in both)}, expected one of them. "
            "Pass only long_texts=.",
            problems=["long_texts", *both],
        )
    return rest if value == default else {**rest, LONG_TEXTS[value]: True}


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
    "output_attentions": KeywordAlias(reason='pass it to the call of a model with attention="eager"'),
    "output_hidden_states": KeywordAlias(reason="pass it to the call: model(..., output_hidden_states=True)"),
    "return_dict": KeywordAlias(reason="pass it to the call: model(..., return_dict=False)", harmless=(None, True)),
    "add_pooling_layer": KeywordAlias(reason="the model has a pooler if the file has one", harmless=(None, True)),
    "load_in_8bit": KeywordAlias(reason=_BITS),
    "load_in_4bit": KeywordAlias(reason=_BITS),
    "quantization_config": KeywordAlias(reason=_BITS),
    "variant": KeywordAlias(reason='files without a variant are read; dtype="float16" casts them'),
    "force_download": KeywordAlias(reason=_FETCHED),
    "resume_download": KeywordAlias(harmless=None),
    "proxies": KeywordAlias(reason="set HTTPS_PROXY in the environment"),
    "config": KeywordAlias(reason="the config.json of the folder is used; from_config makes a model without it"),
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
