"""Few-shot classification: eight examples per label, compared with the nearest example by embeddings.

    python examples/few_shot.py

With a handful of labelled texts, a short training with a small batch and a higher learning rate is usually enough.
"""

from __future__ import annotations

from pathlib import Path

from flodl_hf import AutoModel, evaluate, finetune
from flodl_hf.training.demo import sentences, write_demo

NAMES = ("bad", "good")


def main() -> None:
    """Train on sixteen examples and print the accuracy of both methods."""
    if not Path("demo-model").exists():
        write_demo("demo-model")
    rows = [{"text": text, "label": NAMES[label]} for text, label in sentences()]
    few = [row for name in NAMES for row in [r for r in rows if r["label"] == name][:8]]
    test = [row for row in rows if row not in few][:100]
    result = finetune("demo-model", train=few, epochs=8, batch_size=4, lr=2e-4, progress=False)
    accuracy = evaluate(result.model, test).metrics["accuracy"]
    print(f"fine-tuned on {len(few)} examples: accuracy {accuracy:.3f}")

    encoder = AutoModel.from_pretrained("demo-model")
    known = encoder.embed([row["text"] for row in few], pooling="mean")
    nearest = (encoder.embed([row["text"] for row in test], pooling="mean") @ known.T).argmax(1)
    hits = sum(few[at]["label"] == row["label"] for at, row in zip(nearest.tolist(), test, strict=True))
    print(f"label of the nearest example:  accuracy {hits / len(test):.3f}")


if __name__ == "__main__":
    main()
