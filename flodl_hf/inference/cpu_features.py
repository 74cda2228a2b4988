"""What this processor, and this build of torch, can multiply."""

from __future__ import annotations

from functools import cache

import torch

from flodl_hf.nn.backends.cpu import has_int8, has_onednn


def missing(precision: str) -> str | None:
    """Return why this processor does not run a precision, or None if it does."""
    if precision == "bf16" and not multiplies_bf16():
        return "the processor has no bf16 instructions (AVX512-BF16 or AMX), so bf16 would be slower than fp32"
    if precision == "int8" and not has_int8():
        return "this build of torch has no int8 products for it (onednn.qlinear_pointwise)"
    return None


@cache
def multiplies_bf16() -> bool:
    """Return whether the processor has instructions for bf16, and torch's products for it are right."""
    return any(map(_has, ("avx512_bf16", "amx_tile", "amx_bf16"))) and has_onednn(torch.bfloat16)


def has_tiles() -> bool:
    """Return whether the CPU multiplies matrices by tiles (AMX), for which torch has special kernels."""
    return _has("amx_tile")


def _has(name: str) -> bool:
    """Return whether torch's description of the CPU, by its old or new API, contains a feature."""
    listed = getattr(torch.cpu, "get_capabilities", None)
    if listed is not None and name in (found := listed()):
        return bool(found[name])
    ask = getattr(torch.cpu, f"_is_{name}_supported", None)
    return bool(ask()) if ask is not None else False
