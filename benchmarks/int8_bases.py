"""LoRA on a base whose frozen weights are int8, beside float32 and bfloat16: what it saves, and what a step costs.

    python -m benchmarks.int8_bases [--sizes base large] [--batch 16] [--tokens 128] [--rounds 3] [--json FILE]
    python -m benchmarks.int8_bases --tiny         # does the script work? small

BERT at random, LoRA of rank 8 on query and value, a step of forward and backward without an optimiser. Projections of
all layers hold their frozen weights as float32, as bfloat16, or as int8 with a scale for each row; each is turned into
what the products take when its layer runs, forward and again backward, so that no whole copy stays. Ways run in turn;
the best round of each is told.

* weights: bytes of all parameters and of what is held in their place.
* kept: bytes of what a step keeps for its backward pass besides, each piece of memory once; on CUDA the step's peak
  less what stood there before.
* error: the largest difference of logits from the float32 base's, beside the largest logit.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.heads.auto import AutoModelForSequenceClassification
from flodl_hf.models.adapters import Lora
from flodl_hf.nn.adapter_layers import AdaptedLinear

SIZES = {
    "tiny": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}
WAYS = ("float32", "bfloat16", "int8")
WORDS = 30_522


class _Frozen(Function):
    """A product with a weight that is held in another form and has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(held, scale)
        return F.linear(x, _full(held, scale, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        held, scale = ctx.saved_tensors
        return grad_outputs[0] @ _full(held, scale, grad_outputs[0].dtype), None, None, None


def _full(held: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    full = held.to(dtype)
    return full if scale is None else full * scale


class Held(nn.Module):
    """A frozen projection whose weight is held in another form, with its adapter's part where it has one.

    Args:
        linear: the projection.
        way: how the weight is held.
    """

    def __init__(self, linear: nn.Linear, way: str) -> None:
        super().__init__()
        weight = linear.weight.detach()
        scale = None
        if way == "int8":
            scale = weight.abs().amax(1, keepdim=True) / 127
            weight = (weight / scale).round().to(torch.int8)
        self.register_buffer("held", weight.to(torch.bfloat16) if way == "bfloat16" else weight)
        self.register_buffer("scale", scale)
        self.bias = linear.bias
        self.lora = linear.lora if isinstance(linear, AdaptedLinear) else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the projection."""
        out: Any = _Frozen.apply(x, self.held, self.scale, self.bias)
        if self.lora is None:
            return out
        return out + F.linear(F.linear(x, self.lora.down), self.lora.up) * self.lora.scale


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", choices=tuple(SIZES), default=["base", "large"])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() and not args.tiny else "cpu")
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"a processor, {torch.get_num_threads()} threads"
    print(f"{where}, torch {torch.__version__}, {args.batch} rows of {args.tokens} tokens", flush=True)
    rows = []
    for size in ["tiny"] if args.tiny else args.sizes:
        for row in measured(size, args.batch, args.tokens, 1 if args.tiny else args.rounds, device):
            rows.append(row)
            print(
                f"{size:>5}  {row['way']:<9} weights {row['weights_mb']:7,.0f} MB  kept {row['kept_mb']:7,.0f} MB  "
                f"{row['seconds']:7.3f} s a step  error {row['error']:.2g} of {row['logit']:.2g}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps({"device": where, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")


def measured(size: str, batch: int, tokens: int, rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """Return a row for each way to hold the base of one size."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(5, WORDS, (batch, tokens), generator=draw).to(device)
    labels = torch.randint(0, 2, (batch,), generator=draw).to(device)
    rows: dict[str, dict[str, Any]] = {}
    exact: Tensor | None = None
    models = {way: made(size, way, device).train() for way in WAYS}
    for way, model in models.items():
        with torch.no_grad():
            logits = model.eval()(ids).logits
        exact = right = logits if exact is None else exact
        error = float((logits - right).abs().max())
        held = sum(
            {t.data_ptr(): t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())}.values()
        )
        kept = _kept(model.train(), ids, labels)  # which warms up, too
        logit = float(right.abs().max())
        rows[way] = {"size": size, "way": way, "weights_mb": held / 2**20, "kept_mb": kept / 2**20, "error": error,
                     "logit": logit, "seconds": float("inf")}  # fmt: skip
    for _ in range(rounds):
        for way, model in models.items():
            began = time.perf_counter()
            model(ids, labels=labels).loss.backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            rows[way]["seconds"] = min(rows[way]["seconds"], time.perf_counter() - began)
            model.zero_grad()
    return list(rows.values())


def made(size: str, way: str, device: torch.device) -> Any:
    """Return a classifier with an adapter, whose base is held in a way."""
    torch.manual_seed(0)
    config = ModelConfig.for_model(
        "bert", vocab_size=WORDS, max_position_embeddings=512, type_vocab_size=2, labels=["a", "b"],
        problem_type="single_label_classification", **SIZES[size],
    )  # fmt: skip
    model: Any = AutoModelForSequenceClassification.from_config(config).to(device)
    model.add_adapter(Lora(rank=8))
    if way != "float32":
        for module in list(model.graph.get_submodule("encoder.layers").modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, Held(child, way))
    return model


def _kept(model: Any, ids: Tensor, labels: Tensor) -> int:
    """Return the bytes that a step keeps besides what the model holds."""
    if ids.is_cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(ids, labels=labels).loss.backward()
        model.zero_grad()
        return torch.cuda.max_memory_allocated() - before
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), ids, labels)}
    pieces: dict[int, int] = {}
    alive: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            pieces[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # so that no other piece comes to lie there
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(ids, labels=labels).loss
    loss.backward()
    model.zero_grad()
    return sum(pieces.values())


if __name__ == "__main__":
    main()
