"""Extractive question answering: train on SQuAD rows, answer questions with positions in the text.

    python examples/question_answering.py

Rows have a question, a context and an answer with its start, as in SQuAD files and the Hub's data sets.
"""

from __future__ import annotations

from pathlib import Path

from flodl_hf import finetune
from flodl_hf.training.demo import write_demo

THINGS = ("room", "pizza", "train", "beach", "music", "garden")
QUALITIES = ("cold", "late", "warm", "dirty", "beautiful", "loud")


def rows() -> list[dict[str, object]]:
    """Return questions about made-up sentences, with answers."""
    made = []
    for at, thing in enumerate(THINGS):
        for step in range(1, 4):
            other = THINGS[(at + step) % len(THINGS)]
            quality, second = QUALITIES[(at + step) % 6], QUALITIES[(at + 2 * step + 1) % 6]
            context = f"The {thing} was {quality}. The {other} was {second}."
            answer = {"text": [f"The {thing}"], "answer_start": [0]}
            made.append({"question": f"What was {quality}?", "context": context, "answers": answer})
    return made


def main() -> None:
    """Train and answer a question."""
    if not Path("demo-model").exists():
        write_demo("demo-model")
    data = rows()
    result = finetune("demo-model", train=data * 3, eval=data, epochs=2, lr=1e-3, batch_size=8, progress=False)
    print({name: round(value, 3) for name, value in result.metrics.items()})
    context = "The museum was loud. The hotel was warm."
    best = result.model.answer("What was loud?", context)
    print(f"answer: {best.text!r} at {best.start}:{best.end}, score {best.score:.2f}")
    assert context[best.start : best.end] == best.text


if __name__ == "__main__":
    main()
