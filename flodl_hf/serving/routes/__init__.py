"""HTTP routes, one file for each API convention.

fields   fields of requests
route    routes, requests and responses
tei      text-embeddings-inference
openai   OpenAI embeddings
ranking  Cohere's and Jina's reranking
vllm     vLLM's pooling models
own      this library's own routes, for heads without a convention
hub      Hugging Face Inference API, at the root
"""

from __future__ import annotations

from flodl_hf.serving.routes import hub, openai, own, ranking, tei, vllm
from flodl_hf.serving.routes.route import Route

ROUTES: tuple[Route, ...] = (
    *tei.ROUTES,
    *openai.ROUTES,
    *ranking.ROUTES,
    *vllm.ROUTES,
    *own.ROUTES,
    *hub.ROUTES,
)
"""All POST routes."""
