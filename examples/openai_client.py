"""Serve embeddings and read them with the openai client.

    python examples/openai_client.py

Without the package openai the same request is sent with httpx. A running server is started with
`flodl-hf serve MODEL --port 8080`; here it runs in a thread of this program.
"""

from __future__ import annotations

from pathlib import Path

from flodl_hf import AutoModel
from flodl_hf.serving import serving
from flodl_hf.training.demo import write_demo

TEXTS = ["The room was cold.", "It was a cold room.", "I love the music."]


def embeddings(url: str) -> list[list[float]]:
    """Return the vectors of the texts from the server."""
    try:
        from openai import OpenAI
    except ImportError:
        import httpx

        answer = httpx.post(f"{url}/v1/embeddings", json={"model": "demo", "input": TEXTS})
        return [one["embedding"] for one in answer.raise_for_status().json()["data"]]
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    return [one.embedding for one in client.embeddings.create(model="demo", input=TEXTS).data]


def main() -> None:
    """Start a server, request vectors and compare the texts."""
    if not Path("demo-model").exists():
        write_demo("demo-model")
    # The demo is a classifier; its encoder alone serves embeddings.
    AutoModel.from_pretrained("demo-model").save_pretrained("demo-encoder", overwrite=True)
    with serving("demo=demo-encoder", devices=("cpu",)) as url:
        first, second, third = embeddings(url)
    print(f"{len(first)} features")
    near, far = (sum(a * b for a, b in zip(first, other, strict=True)) for other in (second, third))
    print(f"{TEXTS[0]!r} and {TEXTS[1]!r}: {near:.3f}")
    print(f"{TEXTS[0]!r} and {TEXTS[2]!r}: {far:.3f}")
    assert near > far


if __name__ == "__main__":
    main()
