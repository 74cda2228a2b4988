"""DeBERTa-v3-base beside transformers: forward, training step and peak memory, contenders taking turns.

Random weights at the published size; every sequence is full, so all tokens are real. On a CUDA device, bf16:
forward of the encoder at several shapes (also recorded as one CUDA graph), and a training step of the sequence
classifier (bf16 autocast over float32 weights, fused AdamW, gradients clipped, dropout on), with BERT-base
through transformers' SDPA beside it. On a CPU, fp32: forward, as ratios within pairs of runs, because shared
machines drift.

    python -m benchmarks.deberta [--device cuda|cpu] [--rounds N] [--shapes 64x128 ...] [--no-train] [--profile]
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from flodl_hf.checkpoints.config.model_config import ModelConfig
from flodl_hf.heads.auto import AutoModel, AutoModelForSequenceClassification
from flodl_hf.inference.prepared_graph import prepared
from flodl_hf.nn.backends.choose import arrange_training
from flodl_hf.nn.layout import Padded

SIZES: dict[str, Any] = {
    "vocab_size": 128_100, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "max_position_embeddings": 512, "relative_attention": True, "position_buckets": 256,
    "max_relative_positions": -1, "norm_rel_ebd": "layer_norm", "share_att_key": True, "pos_att_type": "p2c|c2p",
    "position_biased_input": False, "type_vocab_size": 0, "layer_norm_eps": 1e-7, "hidden_act": "gelu",
}  # fmt: skip

Call = Callable[[], Any]


def spread(values: list[float]) -> str:
    middle = statistics.median(values)
    mad = 1.4826 * statistics.median([abs(value - middle) for value in values])
    return f"{middle:9.3f} ±{mad:.3f}"


def once(call: Call, device: torch.device, repeats: int) -> float:
    """Return milliseconds a call, from events on a CUDA device, from the clock elsewhere."""
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - begin) * 1e3 / repeats
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def interleaved(calls: dict[str, Call], device: torch.device, rounds: int, repeats: int) -> dict[str, list[float]]:
    for call in calls.values():
        for _ in range(2 if device.type == "cuda" else 1):
            call()
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            found[name].append(once(call, device, repeats))
    return found


def peak(call: Call) -> float:
    """Return the megabytes that a call needs on the device above what is there before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def recorded(call: Call) -> Call:
    """Return a call that replays one recording of ``call``."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def reference_model(kind: str, head: str, device: torch.device) -> torch.nn.Module:
    import transformers

    made: Any

    if kind == "bert":
        config = transformers.BertConfig()
        made = transformers.BertModel if head == "base" else transformers.BertForSequenceClassification
        config._attn_implementation = "sdpa"
    else:
        config = transformers.DebertaV2Config(**SIZES)
        made = transformers.DebertaV2Model if head == "base" else transformers.DebertaV2ForSequenceClassification
    with torch.device(device):
        return made(config)


def our_model(head: str, device: torch.device) -> Any:
    made = AutoModel if head == "base" else AutoModelForSequenceClassification
    config = ModelConfig.from_dict({"model_type": "deberta-v2", **SIZES, "num_labels": 2})
    with torch.device(device):
        return made.from_config(config)


def forwards(device: torch.device, shapes: list[tuple[int, int]], rounds: int, *, profiled: bool) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    ours = our_model("base", device).to(dtype).eval()
    graph = prepared(ours, "bf16" if device.type == "cuda" else "fp32")
    theirs = reference_model("deberta", "base", device).to(dtype).eval()
    bert = reference_model("bert", "base", device).to(dtype).eval()
    for batch, length in shapes:
        forward(device, batch, length, rounds, graph, theirs, bert)
        if profiled and device.type == "cuda":
            ids = torch.randint(5, 30_000, (batch, length), device=device)
            with torch.inference_mode():
                print(watched(lambda ids=ids: graph(ids, layout=Padded(None))))


@torch.inference_mode()
def forward(device: torch.device, batch: int, length: int, rounds: int, graph: Any, theirs: Any, bert: Any) -> None:
    ids = torch.randint(5, 30_000, (batch, length), device=device)
    whole = torch.ones_like(ids)
    calls: dict[str, Call] = {
        "transformers": lambda ids=ids, whole=whole: theirs(ids, attention_mask=whole),
        "ours": lambda ids=ids: graph(ids, layout=Padded(None)),
        "transformers BERT-base SDPA": lambda ids=ids: bert(ids),
    }
    memory = {}
    if device.type == "cuda":
        memory = {name: peak(call) for name, call in calls.items() if call() is not None}
        calls["ours, recorded"] = recorded(calls["ours"])
    repeats = 1 if device.type == "cpu" else 5
    found = interleaved(calls, device, rounds, repeats)
    print(f"\nforward {batch}x{length}, {'bf16' if device.type == 'cuda' else 'fp32'}, ms")
    for name, values in found.items():
        pairs = statistics.median([a / b for a, b in zip(found["transformers"], values, strict=True)])
        note = f"   peak {memory[name]:8.0f} MB above weights" if name in memory else ""
        print(f"  {name:30s} {spread(values)}   {pairs:5.2f}x{note}", flush=True)


def step(model: torch.nn.Module, loss: Callable[[], Tensor]) -> Call:
    """Return one training step of a model whose loss is ``loss()``, written as users write it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    parameters = list(model.parameters())

    def call() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            value = loss()
        value.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return call


def lean_step(model: torch.nn.Module, loss: Callable[[], Tensor]) -> Call:
    """Return the same step in a form that can be recorded; the clipping factor is applied inside the optimizer."""
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True, capturable=True)
    parameters = list(model.parameters())
    optimizer.found_inf = torch.zeros((), device=parameters[0].device)

    def call() -> None:
        # A recording owns its gradients and writes them anew, so there is nothing to set to zero.
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            value = loss()
        value.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        optimizer.grad_scale = (norm + 1e-6).clamp(min=1.0)
        optimizer.step()

    return call


def training(device: torch.device, batch: int, length: int, rounds: int, *, profiled: bool) -> None:
    ids = torch.randint(5, 30_000, (batch, length), device=device)
    labels = torch.randint(0, 2, (batch,), device=device)
    calls: dict[str, Call] = {}
    for name, kind in (("transformers", "deberta"), ("transformers BERT-base SDPA", "bert")):
        model = reference_model(kind, "classifier", device).train()
        calls[name] = step(model, lambda model=model: model(ids, labels=labels).loss)
    ours = our_model("classifier", device).train()
    # As `finetune` does in half precision.
    arrange_training(ours.graph, torch.bfloat16)
    loss = torch.nn.CrossEntropyLoss()

    def our_loss() -> Tensor:
        return loss(ours.graph(ids, layout=Padded(None)).float(), labels)

    calls["ours"] = step(ours, our_loss)
    for call in calls.values():
        call()
    memory = {name: peak(call) for name, call in calls.items()}
    lean = lean_step(ours, our_loss)
    calls["ours, recorded"] = recorded(lean)
    found = interleaved(calls, device, rounds, 5)
    print(f"\ntraining step {batch}x{length}, bf16 autocast, fused AdamW, clipped, ms")
    for name, values in found.items():
        note = f"   peak {memory[name]:8.0f} MB above weights" if name in memory else ""
        print(f"  {name:30s} {spread(values)}   {1e3 / statistics.median(values):6.1f} steps/s{note}", flush=True)
    if profiled:
        print(watched(lean))


def agreement(device: torch.device) -> None:
    """Print how far the kernels are from the reference arithmetic in float32, on real sizes and ragged texts."""
    model = our_model("base", device).eval()
    ids = torch.randint(5, 30_000, (4, 300), device=device)
    mask = torch.arange(300, device=device) < torch.tensor([300, 211, 64, 5], device=device)[:, None]
    with torch.inference_mode():
        exact = model.set_attention("eager").graph(ids, layout=Padded(mask))[mask]
        print("\n||kernel - reference|| / ||reference|| of the last states, 12 layers")
        for precision in ("fp32", "bf16", "fp16"):
            states = prepared(model.set_attention("sdpa"), precision)(ids, layout=Padded(mask))[mask].float()
            print(f"  {precision}: {((states - exact).norm() / exact.norm()).item():.1e}", flush=True)


def watched(call: Call) -> str:
    """Return a table of the kernels that take the most time in a call."""
    from torch.profiler import ProfilerActivity, profile

    call()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in rows)
    lines = [f"  {r.self_device_time_total:8.0f} us {r.count:4d} x  {r.key[:90]}" for r in rows[:18]]
    return "\n".join([f"  {total:8.0f} us on the device in one call, of which", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--shapes", nargs="*", default=None)
    parser.add_argument("--no-train", action="store_true")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    device = torch.device(options.device)
    named = options.shapes or (["64x128", "16x512", "1x32"] if device.type == "cuda" else ["1x512", "8x128"])
    shapes = [(int(a), int(b)) for a, b in (name.split("x") for name in named)]
    warnings.simplefilter("ignore")
    where = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    kernel = "our kernel" if device.type == "cuda" and find_spec("triton") is not None else "no kernel"
    print(f"{where}, torch {torch.__version__}, {torch.get_num_threads()} threads, {kernel}, medians ± scaled MAD")
    torch.manual_seed(0)
    forwards(device, shapes, options.rounds, profiled=options.profile)
    if device.type == "cuda":
        agreement(device)
        if not options.no_train:
            training(device, 32, 128, options.rounds, profiled=options.profile)


if __name__ == "__main__":
    main()
