"""Keywords of transformers and sentence-transformers: taken where they mean what one of ours means, else explained.

A method names its table with `taking`; its own keywords come first. A word of another library is put into ours
(``aggregation_strategy`` into ``aggregation``), passed over where its value changes no answer (``padding``), or refused
with the method, our word and the reason. Nobody's code gets another answer than it asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from flodl.errors import FlodlError, nearest
from flodl_hf.errors import PredictError

if TYPE_CHECKING:
    import torch

__all__ = [
    "ANSWER",
    "CHOICES",
    "CLASSES",
    "CONFIG",
    "EMBED",
    "ENCODE",
    "ENTITIES",
    "LOAD",
    "MASKS",
    "PAIRS",
    "RERANK",
    "SAVE",
    "TOKENIZER",
    "ZERO_SHOT",
    "Word",
    "taking",
]

F = TypeVar("F", bound=Callable[..., Any])


class Word(NamedTuple):
    """A keyword of another library.

    Args:
        ours: our keyword for it; None where it has none.
        value: their value, and the model that is asked, to ours.
        reason: why it is refused where it has no keyword of ours.
        harmless: values that change nothing and are passed over; None for any value.
    """

    ours: str | None = None
    value: Callable[[Any, Any], Any] = lambda value, model: value
    reason: str = ""
    harmless: tuple[Any, ...] | None = (None, False)


def taking(
    words: Mapping[str, Word], fault: type[FlodlError] = PredictError, *, like: Callable[..., Any] | None = None
) -> Callable[[F], F]:
    """Return a decorator for methods that know the words of other libraries.

    Args:
        words: theirs.
        fault: raised for those that are refused.
        like: the method that other keywords are handed on to, whose signature is then shown for this one's.
    """

    def decorate(method: F) -> F:
        signature = inspect.signature(method)
        if like is not None:
            signature = _joined(signature, inspect.signature(like))
        own = _own(signature)

        @wraps(method)
        def call(*args: Any, **given: Any) -> Any:
            if not own.issuperset(given):
                given = _translated(method.__name__, args[0] if args else None, given, own, words, fault)
            return method(*args, **given)

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return decorate


def _own(signature: inspect.Signature) -> frozenset[str]:
    """Return the keywords that a method takes itself."""
    names = {p.name for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD}
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values()):
        # Those of `flodl_hf.runtime.RunKeywords`, which is imported with the first prediction.
        names |= {"precision", "token_budget", "devices", "batch_invariant", "window", "progress"}
    return frozenset(names)


def _joined(own: inspect.Signature, other: inspect.Signature) -> inspect.Signature:
    """Return a signature whose other keywords are those of another."""
    mine = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    more = [p for p in other.parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    there = {p.name for p in mine}
    return own.replace(parameters=[*mine, *(p for p in more if p.name not in there)])


def _translated(
    method: str, owner: Any, given: dict[str, Any], own: frozenset[str], words: Mapping[str, Word],
    fault: type[FlodlError],
) -> dict[str, Any]:  # fmt: skip
    found = {name: value for name, value in given.items() if name in own}
    refused: list[str] = []
    for name, value in given.items():
        if name in own:
            continue
        word = words.get(name)
        if word is None:
            known = sorted(own - {"self", "cls"})
            raise TypeError(
                f"{method}: unexpected keyword argument {name!r}{nearest(name, [*known, *words])}; it takes "
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
            refused.append(f"{name}={value!r} and {word.ours}={found[word.ours]!r} say different things")
            continue
        found[word.ours] = ours
    if refused:
        raise fault(f"{method}: {'; '.join(refused)}", problems=refused)
    return found


# --- values ------------------------------------------------------------------------------------------


def _budget(size: Any, model: Any) -> int | None:
    """Return how many tokens so many texts have at most, and no more than suits the device: less is only slower."""
    from flodl_hf.runtime.plan import usual_budget

    if size is None:
        return None
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError("expected an integer of at least 1")
    return min(usual_budget(model.device.type), size * (model.max_tokens or 512))


def device_of(value: Any) -> torch.device | str | None:
    """Return a device as other libraries name it: a number is a CUDA device, -1 the CPU."""
    import torch

    if isinstance(value, bool) or not isinstance(value, (int, str, torch.device, type(None))):
        raise ValueError("expected a device, such as 'cuda:0', 0 or 'cpu'")
    if isinstance(value, int):
        return torch.device("cpu") if value < 0 else torch.device("cuda", value)
    return value


def _devices(value: Any, model: Any) -> Any:
    if value is None or value == "auto":
        return value
    return [device_of(one) for one in (value if isinstance(value, (list, tuple)) else [value])]


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


def _split(value: Any, _: Any) -> Any:
    # As the pipeline reads it: a string is a list with commas.
    return [label.strip() for label in value.split(",") if label.strip()] if isinstance(value, str) else value


def _grouped(value: Any, _: Any) -> str:
    return "simple" if value else "none"


# --- tables ------------------------------------------------------------------------------------------

_WINDOWS = (
    "longer texts are read in windows, none of their tokens is lost, so nothing is cut; strict=True refuses texts of "
    "more than one window, and flodl_hf.pipeline cuts as transformers' pipelines do"
)
_RUN = {
    "batch_size": Word("token_budget", _budget),
    "device": Word("devices", _devices),
    "show_progress_bar": Word("progress"),
    "num_workers": Word(harmless=None),
    "padding": Word(harmless=None),
    "truncation": Word(reason=_WINDOWS, harmless=(None, False, "do_not_truncate")),
    "max_length": Word(reason=_WINDOWS),
    "return_tensors": Word(reason="call the model itself for tensors: model(**model.tokenizer(text))"),
    "tokenizer_kwargs": Word(reason="the tokenizer's settings are those of its folder", harmless=(None, {})),
    "convert_to_tensor": Word(reason="answers are records; call the model itself for tensors"),
    "convert_to_numpy": Word(reason="answers are records; call the model itself for tensors"),
}  # fmt: skip
_TEXTS = {name: Word("texts") for name in ("inputs", "sentences", "sequences")}
CLASSES = {
    **_RUN,
    **_TEXTS,
    "return_all_scores": Word("top_k", lambda value, _: None if value else 1),
    "apply_softmax": Word("function_to_apply", lambda value, _: "softmax" if value else None),
    "activation_fn": Word(reason='name the function instead: function_to_apply="softmax", "sigmoid" or "none"'),
    "activation_fct": Word(reason='name the function instead: function_to_apply="softmax", "sigmoid" or "none"'),
}
ZERO_SHOT = {
    **_RUN,
    **_TEXTS,
    "candidate_labels": Word("labels", _split),
    "hypothesis_template": Word("template"),
    "multi_class": Word("multi_label"),
}
RERANK = {
    **_RUN,
    "return_documents": Word(harmless=None),  # each Ranked has its text
    "activation_fn": Word(reason="the configuration says how scores are read"),
    "activation_fct": Word(reason="the configuration says how scores are read"),
}
ENTITIES = {
    **_RUN,
    **_TEXTS,
    "aggregation_strategy": Word("aggregation"),
    "grouped_entities": Word("aggregation", _grouped),
    "is_split_into_words": Word("words"),
    "ignore_subwords": Word(
        reason='aggregation="first", "average" or "max" judges whole words, "simple" and "none" each token',
        harmless=(None,),
    ),
    "delimiter": Word(reason="words are joined by a space; give texts as they are", harmless=(None, " ")),
    "offset_mapping": Word(reason="the tokenizer of the folder counts characters itself"),
}
ANSWER = {
    **_RUN,
    "topk": Word("top_k"),
    "doc_stride": Word("stride"),
    "max_answer_len": Word("max_answer_length"),
    "max_seq_len": Word("window_tokens"),
    "handle_impossible_answer": Word("no_answer"),
    "align_to_words": Word("whole_words"),
    "max_question_len": Word(reason="questions are never cut", harmless=(None, 64)),
}
MASKS = {**_RUN, **_TEXTS}
CHOICES = {**_RUN, "inputs": Word("items")}
PAIRS = {**_RUN, "inputs": Word("pairs"), "sentences": Word("pairs")}
EMBED = {
    **_RUN,
    **_TEXTS,
    "normalize_embeddings": Word("normalize"),
    "max_seq_length": Word(reason=_WINDOWS),
    "output_value": Word(reason="embed gives a vector a text; call the model for states of tokens",
                         harmless=(None, "sentence_embedding")),
    "convert_to_tensor": Word(reason="embed gives a tensor, encode an array", harmless=(None, True)),
    "convert_to_numpy": Word(reason="embed gives a tensor, encode an array"),
    "prompt_name": Word("prompt"),
}  # fmt: skip
ENCODE = {
    **{name: word for name, word in _RUN.items() if not name.startswith("convert")},
    **{name: Word("sentences") for name in ("inputs", "texts", "sequences")},
    "output_value": EMBED["output_value"],
    "pool": Word(reason="devices=[...] shares texts among devices"),
    "chunk_size": Word(harmless=None),
}
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
    "model_max_length": Word(reason="say max_length= when calling the tokenizer"),
    "max_length": Word(reason="say it when calling the tokenizer"),
    "padding_side": Word(reason="say it when calling the tokenizer"),
    "truncation_side": Word(reason=_SETTING),
    "do_lower_case": Word(reason=_SETTING, harmless=(None,)),
    "add_prefix_space": Word(reason=_SETTING, harmless=(None,)),
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
