"""Tensors that files of any family carry and no layer computes with, by what their names end in.

Older releases of transformers, and training scripts, saved them with the weights; transformers passes them over today.
A tensor that a family's own rows name is not looked up here.
"""

from __future__ import annotations

import re

__all__ = ["PASSED_OVER", "WHOLE_NUMBERS", "changes_a_layer", "reason_to_pass_over", "repeated_bias"]

PASSED_OVER: tuple[tuple[str, str], ...] = (
    ("position_ids", "positions are counted, not stored"),
    ("token_type_ids", "zeros are made when needed"),
    ("inv_freq", "rotary frequencies are computed from config.json"),
    ("cos_cached", "rotary tables are computed from config.json"),
    ("sin_cached", "rotary tables are computed from config.json"),
    ("loss.weight", "class weights of a training loss"),
    ("loss_fct.weight", "class weights of a training loss"),
    ("loss_fn.weight", "class weights of a training loss"),
    ("criterion.weight", "class weights of a training loss"),
    ("class_weights", "class weights of a training loss"),
)
"""What a name ends in, whole words between dots and underscores, and why the tensor changes no number."""

WHOLE_NUMBERS = ("I64", "I32", "BOOL")
"""Dtypes of counters and masks: no weight has them."""

# What libraries of adapters and of few bits call the tensors that they put beside a layer's own.
_BESIDE = re.compile(
    r"(?:^|[._])(?:lora|ia3|vera|oft|hada|base_layer|modules_to_save|adapters?|prefix_tuning|prompt_encoder|prefix_encoder|"
    r"weight_scale|weight_format|input_scale|quant_map|quant_state|absmax|SCB|qweight|qzeros|scales|zero_point)(?:[._]|$)"
)
_ENDING = re.compile(rf"(?:^|[._])({'|'.join(re.escape(name) for name, _ in PASSED_OVER)})$")


def reason_to_pass_over(name: str, dtype: str) -> str | None:
    """Return why a tensor that is no model's own changes no number; None where it may.

    Args:
        name: as it is stored.
        dtype: as a header names it.
    """
    if (found := _ENDING.search(name)) is not None:
        return dict(PASSED_OVER)[found[1]]
    return "counts or masks, which no layer computes with" if dtype in WHOLE_NUMBERS else None


def changes_a_layer(name: str) -> bool:
    """Return whether a tensor is an adapter's or a quantiser's: without it the layer beside it computes another thing.

    Args:
        name: as it is stored.
    """
    return _BESIDE.search(name) is not None


def repeated_bias(name: str) -> str | None:
    """Return the name of the bias that a tensor called ``decoder.bias`` repeats; None of any other tensor."""
    module = name.removesuffix(".decoder.bias")
    return None if module == name else f"{module}.bias"
