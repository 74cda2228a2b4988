"""The doors: which paths there are and what each answers, a file for each convention.

fields   what requests hold
door     a door, and a call that came through it
tei      text-embeddings-inference
openai   OpenAI's embeddings
ranking  Cohere's and Jina's reranking
vllm     vLLM's pooling models
own      ours, for the heads that have no convention
hub      the Hub's inference interface, at the root
"""

from __future__ import annotations

from flodl_hf.serving.doors import hub, openai, own, ranking, tei, vllm
from flodl_hf.serving.doors.door import Call, Door, House, Reply

__all__ = ["DOORS", "Call", "Door", "House", "Reply"]

DOORS: tuple[Door, ...] = (
    *tei.DOORS,
    *openai.DOORS,
    *ranking.DOORS,
    *vllm.DOORS,
    *own.DOORS,
    *hub.DOORS,
)
"""Every path that takes a request."""
