"""Tensors in files of any family that no layer uses, identified by the end of their names.

Older releases of transformers and training scripts saved them with the weights; transformers ignores them today. The
rows of a family have precedence.
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
"""The last words of a name, between dots and underscores, and why the tensor has no effect on numbers."""

WHOLE_NUMBERS = ("I64", "I32", "BOOL")
"""Dtypes of counters and masks; no weight has them."""

# Names of tensors that libraries of adapters and quantisation add to a layer.
_BESIDE = re.compile(
    r"(?:^|[._])(?:lora|ia3|vera|oft|hada|base_layer|modules_to_save|adapters?|prefix_tuning|prompt_encoder|prefix_encoder|"
    r"weight_scale|weight_format|input_scale|quant_map|quant_state|absmax|SCB|qweight|qzeros|scales|zero_point)(?:[._]|$)"
)
_ENDING = re.compile(rf"(?:^|[._])({'|'.join(re.escape(name) for name, _ in PASSED_OVER)})$")


def reason_to_pass_over(name: str, dtype: str) -> str | None:
    """Return why an unknown tensor has no effect on numbers; None if it may have one.

    Args:
        name: the name in the file.
        dtype: the dtype in the header.
    """
    if (found := _ENDING.search(name)) is not None:
        return dict(PASSED_OVER)[found[1]]
    return "counts or masks, which no layer computes with" if dtype in WHOLE_NUMBERS else None


def changes_a_layer(name: str) -> bool:
    """Return whether a tensor belongs to an adapter or a quantised layer, which gives other numbers without it.

    Args:
        name: the name in the file.
    """
    return _BESIDE.search(name) is not None


def repeated_bias(name: str) -> str | None:
    """Return the name of the bias that a tensor ``decoder.bias`` repeats; None for other tensors."""
    module = name.removesuffix(".decoder.bias")
    return None if module == name else f"{module}.bias"
