"""Prepare a graph for the CPU, and report the precisions that it supports.

Decides by capability, as torch reports it: where AVX-512 is, oneDNN with reordered weights multiplies fastest;
elsewhere torch's own product does, and nothing is copied. Layers get the processor's table either way
(`flodl_hf.nn.backends.cpu`): sums ride along with products, activations happen in place, buffers are kept, and a
classifier's last layer computes first tokens alone. When a graph is made and
remade is `prepared`'s.
"""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor, nn

from flodl_hf.nn.backends.choose import arrange, layers_of
from flodl_hf.nn.backends.cpu import (
    CpuLinear,
    HalfAttention,
    Int8Linear,
    MakeProduct,
    OneDnnLinear,
    ProcessorTable,
    Product,
    Scratch,
    TorchLinear,
    first_is_later,
    has_half_attention,
    has_int8,
    has_onednn,
    sums_in_32_bits,
)
from flodl_hf.nn.layers import TORCH


def prepare_cpu(graph: nn.Module, precision: str | None) -> dict[str, str]:
    """Rearrange a prepared graph for the processor, in place; it then is for inference only.

    Weights stay shared with the model where torch's own product is used. Where oneDNN reorders them, or int8 is
    requested, each gets a copy at its second use (int8 at the first), with the same bits before and after: one
    more time the weights in fp32, a half in bf16, a quarter in int8.

    Args:
        graph: a shadow with replaceable modules; its tensors are read at the first use.
        precision: "fp32", "bf16", "int8", or None for the weights' own dtype (fp16 is computed in fp32, and
            so is bf16 where the processor lacks it).
    """
    if precision is None:
        _widen(graph)
    scratch = Scratch()
    make: MakeProduct = partial(_product, scratch)
    if precision == "int8":
        make = partial(Int8Linear, bits=8 if sums_in_32_bits() else 7)
    half = next(graph.parameters()).dtype == torch.bfloat16 and _attends_in_half()
    kernel = HalfAttention(scratch) if half else None
    joined = precision in ("bf16", "int8") or _reorders()
    lacking = arrange(graph, ProcessorTable(make, joined=joined, kernel=kernel))
    if precision == "int8" or _reorders():
        # Heads are a small part of the work and the answer itself, so int8 leaves them alone.
        _linears(graph.get_submodule("encoder") if precision == "int8" else graph, make)
    return lacking


def _product(scratch: Scratch, weight: Tensor, bias: Tensor | None) -> Product:
    """Return the fastest product of a floating weight."""
    if weight.dtype == torch.float32 and _reorders():
        return OneDnnLinear(weight, bias, at_once=not first_is_later(torch.float32))
    if weight.dtype == torch.bfloat16 and has_onednn(torch.bfloat16):
        return OneDnnLinear(weight, bias, at_once=not first_is_later(torch.bfloat16))
    return TorchLinear(weight, bias, scratch)


def keeps_kernels(graph: nn.Module, precision: str | None) -> bool:
    """Return whether what multiplies weights here keeps a kernel for each count of rows, as oneDNN does.

    Args:
        graph: made ready by `prepare_cpu`.
        precision: that it was made ready for.
    """
    dtype = next(graph.parameters()).dtype
    return precision == "int8" or (_reorders() if dtype == torch.float32 else has_onednn(dtype))


def _widen(graph: nn.Module) -> None:
    """Give the graph float32 tensors in place of 16-bit ones that the processor cannot multiply."""
    changed: dict[int, nn.Parameter] = {}
    for module in graph.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.dtype not in (torch.float16, torch.bfloat16):
                continue
            if parameter.dtype == torch.bfloat16 and multiplies_bf16():
                continue
            if id(parameter) not in changed:
                changed[id(parameter)] = nn.Parameter(parameter.detach().float(), requires_grad=False)
            module._parameters[name] = changed[id(parameter)]


# --- description of the CPU's kernels -------------------------------------------------------------------


def _linears(graph: nn.Module, make: MakeProduct) -> None:
    better: dict[int, CpuLinear] = {}
    # A table reads its layers' weights by itself.
    theirs = {id(m) for _, layer in layers_of(graph) if layer.table is not TORCH for m in layer.modules()}
    for module in list(graph.modules()):
        if id(module) in theirs:
            continue
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and not child._forward_hooks:
                setattr(module, name, better.setdefault(id(child), CpuLinear(child, make)))


def products_of(precision: str | None) -> str:
    """Return the name of the matrix multiplication used here."""
    if precision == "int8":
        return "int8 by oneDNN" + ("" if sums_in_32_bits() else ", with 7-bit weights")
    if _reorders() or precision == "bf16":
        return "oneDNN with reordered weights"
    return "torch's own, on the model's weights as they are"


# --- features of the CPU --------------------------------------------------------------------------------


def _attends_in_half() -> bool:
    # Measured with AVX512-BF16; for AMX, torch's fused attention has separate products.
    return multiplies_bf16() and not has_tiles() and has_half_attention()


@cache
def _reorders() -> bool:
    # Measured: with AVX-512 reordered weights are a fifth faster than torch's product; with AVX2 MKL is a
    # fifth faster than oneDNN.
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512") and has_onednn(torch.float32)


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
