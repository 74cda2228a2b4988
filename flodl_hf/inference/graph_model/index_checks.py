"""Describe invalid indices of a call: those outside of the model's tables.

Called only after torch has failed on the CPU; checking first would slow down every call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.errors import PredictError

__all__ = ["beyond_tables", "check_rows"]


def check_rows(input_ids: Tensor) -> None:
    """Raise unless the input is rows of at least one token.

    Raises:
        PredictError: it is no tensor, or the shape is another.
    """
    if not isinstance(input_ids, Tensor):
        if isinstance(input_ids, Mapping):
            raise PredictError(
                f"input_ids: found {type(input_ids).__name__}, which contains more than ids; expected a tensor; "
                "pass its items as keywords: model(**encoding)"
            )
        raise PredictError(
            f"input_ids: found {type(input_ids).__name__}; expected a tensor of token ids, as model.tokenizer(texts, "
            'padding=True, return_tensors="pt") gives. Texts go to the methods of the task: predict, embed, answer.'
        )
    shape = tuple(input_ids.shape)
    if input_ids.dim() != 2:
        raise PredictError(f"input_ids has shape {shape}; expected (batch, seq)", shape=shape)
    if shape[1] == 0:
        raise PredictError(
            f"input_ids has shape {shape}; expected at least one token in a row. A tokenizer.json that puts no "
            "special tokens around texts (post_processor) gives none for an empty one; leave such texts out.",
            shape=shape,
        )


def beyond_tables(
    config: ModelConfig,
    input_ids: Tensor,
    token_type_ids: Tensor | None,
    position_ids: Tensor | None,
    taken: int = 0,
) -> PredictError | None:
    """Return the error for indices without a row in a table, or None if all have one.

    Args:
        config: the model's configuration.
        input_ids: of the call.
        token_type_ids: of the call, or None.
        position_ids: of the call, or None.
        taken: places that an adapter takes before each text.
    """
    encoder: Any = config.encoder
    tables = [
        ("input_ids", input_ids, encoder.vocab_size, "words"),
        ("token_type_ids", token_type_ids, config.token_types, "token types"),
        ("position_ids", position_ids, getattr(encoder, "max_positions", None), "positions"),
    ]
    faults = []
    for name, given, rows, table in tables:
        if given is None or not rows:
            continue
        low, high = int(given.min()), int(given.max())
        if low < 0 or high >= rows:
            faults.append(f"{name} contains {low if low < 0 else high}, expected 0 to {rows - 1} ({table})")
    longest = config.max_tokens and config.max_tokens - taken
    if position_ids is None and longest is not None and input_ids.shape[1] > longest:
        faults.append(f"a row has {input_ids.shape[1]} tokens, and the table of positions is for {longest}")
    if not faults:
        return None
    return PredictError(
        f"{'; '.join(faults)}. Expected indices of the model's tables: take the tokenizer that belongs to the model, "
        f"and cut rows (truncation=True, max_length={longest}) or let `predict` read long texts in windows.",
        problems=faults,
    )
