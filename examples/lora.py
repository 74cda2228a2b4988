"""LoRA: train an adapter of a few percent of the weights, save it, load it, merge it.

    python examples/lora.py

The adapter folder is in peft's format, so peft and transformers load it as well.
"""

from __future__ import annotations

from pathlib import Path

from flodl_hf import finetune, load
from flodl_hf.models.adapters import Lora
from flodl_hf.training.demo import LABELS, sentences, write_demo


def main() -> None:
    """Train, reload and merge an adapter."""
    if not Path("demo-model").exists():
        write_demo("demo-model")
    rows = [{"text": text, "label": LABELS[label]} for text, label in sentences()[:120]]
    result = finetune(
        "demo-model", train=rows, eval=0.2, adapter=Lora(rank=4), lr=1e-3, epochs=1, out="adapter", overwrite=True,
        progress=False,
    )  # fmt: skip
    print(f"accuracy {result.metrics['accuracy']:.3f}")
    print("files:", sorted(path.name for path in Path("adapter").iterdir() if path.suffix in (".json", ".safetensors")))
    model = load("demo-model", adapter="adapter")
    text = "The staff were friendly."
    merged = model.merge_and_unload()
    merged.save_pretrained("merged", overwrite=True)
    again = load("merged").predict(text)
    print(again)
    assert again.label == result.model.predict(text).label


if __name__ == "__main__":
    main()
