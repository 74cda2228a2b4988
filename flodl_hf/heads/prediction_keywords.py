"""Keywords of prediction in transformers and sentence-transformers, and their equivalents here."""

from __future__ import annotations

from typing import Any

from flodl_hf.checkpoints.config.file import activation_at
from flodl_hf.checkpoints.keywords import KeywordAlias, device_of
from flodl_hf.inference.batch import BUDGETS


def budget_of(size: Any, model: Any) -> int | None:
    """Return how many tokens so many texts have at most, and no more than suits the device: less is only slower."""
    if size is None:
        return None
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError("expected an integer of at least 1")
    return min(BUDGETS[model.device.type], size * (model.max_tokens or 512))


def _devices(value: Any, model: Any) -> Any:
    if value is None or value == "auto":
        return value
    return [device_of(one) for one in (value if isinstance(value, (list, tuple)) else [value])]


def _split(value: Any, _: Any) -> Any:
    # As the pipeline reads it: a string is a list with commas.
    return [label.strip() for label in value.split(",") if label.strip()] if isinstance(value, str) else value


def _function(value: Any, _: Any) -> str | None:
    """Return the name of an activation given as torch's module."""
    from torch import nn

    name = None if value is None else activation_at(f"{type(value).__module__}.{type(value).__name__}")
    if value is not None and (name is None or repr(value) != repr(getattr(nn, name)())):
        raise ValueError('expected a module of torch.nn without settings; or name it: function_to_apply="Tanh"')
    return name


_WINDOWS = (
    "longer texts are read in windows; long_texts='error' refuses texts of more than one window, and flodl_hf.pipeline "
    "truncates as transformers' pipelines do"
)
_RUN = {
    "long_texts": KeywordAlias(harmless=(None,)),  # see `flodl_hf.checkpoints.keywords.replace_long_texts`
    "batch_size": KeywordAlias("token_budget", budget_of),
    "device": KeywordAlias("devices", _devices),
    "show_progress_bar": KeywordAlias("progress"),
    "num_workers": KeywordAlias(harmless=None),
    "padding": KeywordAlias(harmless=None),
    "truncation": KeywordAlias(reason=_WINDOWS, harmless=(None, False, "do_not_truncate")),
    "max_length": KeywordAlias(reason=_WINDOWS),
    "return_tensors": KeywordAlias(reason="call the model itself for tensors: model(**model.tokenizer(text))"),
    "tokenizer_kwargs": KeywordAlias(reason="the tokenizer's settings come from its folder", harmless=(None, {})),
    "convert_to_tensor": KeywordAlias(reason="answers are records; call the model itself for tensors"),
    "convert_to_numpy": KeywordAlias(reason="answers are records; call the model itself for tensors"),
}  # fmt: skip
_TEXTS = {name: KeywordAlias("texts") for name in ("inputs", "sentences", "sequences")}
_ACTIVATION = {name: KeywordAlias("function_to_apply", _function) for name in ("activation_fn", "activation_fct")}
_CUT = ("do_not_truncate", False, None)
CLASSES = {
    **{name: word for name, word in _RUN.items() if name != "max_length"},
    **_TEXTS,
    "truncation": KeywordAlias("truncate", lambda value, _: value not in _CUT),
    "return_all_scores": KeywordAlias("top_k", lambda value, _: None if value else 1),
    "apply_softmax": KeywordAlias("function_to_apply", lambda value, _: "softmax" if value else None),
    **_ACTIVATION,
}
ZERO_SHOT = {
    **_RUN,
    **_TEXTS,
    "candidate_labels": KeywordAlias("labels", _split),
    "hypothesis_template": KeywordAlias("template"),
    "multi_class": KeywordAlias("multi_label"),
}
RERANK = {
    **_RUN,
    "return_documents": KeywordAlias(harmless=None),  # each Ranked has its text
    **_ACTIVATION,
}
ENTITIES = {
    **_RUN,
    **_TEXTS,
    "aggregation_strategy": KeywordAlias("aggregation"),
    "grouped_entities": KeywordAlias("aggregation", lambda value, _: "simple" if value else "none"),
    "is_split_into_words": KeywordAlias("words"),
    "ignore_subwords": KeywordAlias(
        reason='aggregation="first", "average" or "max" labels whole words, "simple" and "none" each token',
        harmless=(None,),
    ),
    "delimiter": KeywordAlias(reason="words are joined by a space; give texts as they are", harmless=(None, " ")),
    "offset_mapping": KeywordAlias(reason="the tokenizer of the folder counts characters itself"),
}
ANSWER = {
    **_RUN,
    "topk": KeywordAlias("top_k"),
    "doc_stride": KeywordAlias("stride"),
    "max_answer_len": KeywordAlias("max_answer_length"),
    "max_seq_len": KeywordAlias("window_tokens"),
    "handle_impossible_answer": KeywordAlias("no_answer"),
    "align_to_words": KeywordAlias("whole_words"),
    "max_question_len": KeywordAlias(harmless=None),  # transformers reads it with tokenizers in Python alone
}
MASKS = {**_RUN, **_TEXTS}
CHOICES = {**_RUN, "inputs": KeywordAlias("items")}
PAIRS = {**_RUN, "inputs": KeywordAlias("pairs"), "sentences": KeywordAlias("pairs")}
_LONGER = (
    "a text is truncated to the max_seq_length of the folder; long_texts='windows' reads all of it, 'error' refuses it"
)
_TRUNCATED = {
    "truncate": KeywordAlias(reason=_LONGER, harmless=(None, True)),
    "truncation": KeywordAlias(reason=_LONGER, harmless=(None, True, "longest_first")),
    "max_length": KeywordAlias(reason=_LONGER, harmless=(None,)),
    "max_seq_length": KeywordAlias(reason=_LONGER, harmless=(None,)),
}
EMBED = {
    **_RUN,
    **_TEXTS,
    "normalize_embeddings": KeywordAlias("normalize"),
    **_TRUNCATED,
    "output_value": KeywordAlias(reason="embed gives a vector a text; call the model for states of tokens",
                         harmless=(None, "sentence_embedding")),
    "convert_to_tensor": KeywordAlias(reason="embed gives a tensor, encode an array", harmless=(None, True)),
    "convert_to_numpy": KeywordAlias(reason="embed gives a tensor, encode an array"),
}  # fmt: skip
_POOL = {
    **{name: word for name, word in _RUN.items() if not name.startswith("convert")},
    "pool": KeywordAlias(reason="devices=[...] shares texts among devices", harmless=(None,)),
    "chunk_size": KeywordAlias(harmless=None),
}
_SENTENCES = {name: KeywordAlias("sentences") for name in ("inputs", "texts", "sequences")}
ENCODE = {**_POOL, **_SENTENCES, **_TRUNCATED}
_SPARSE = {**_POOL, "save_to_cpu": KeywordAlias(harmless=None)}
LEXICAL = {**_SPARSE, **_TEXTS}
SPARSE = {**LEXICAL, "max_active_dims": KeywordAlias("most")}
SPARSE_ENCODE = {**_SPARSE, **_SENTENCES}
