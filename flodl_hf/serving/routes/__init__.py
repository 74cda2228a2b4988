"""HTTP routes, by API convention.

route   routes, their fields, and requests
tei     text-embeddings-inference, and reranking of Cohere and Jina
openai  embeddings of OpenAI and Cohere, and vLLM's pooling models
hub     Hugging Face Inference API, and this library's own routes
"""

from __future__ import annotations

# Each module adds its routes to the table when it is imported.
from flodl_hf.serving.routes import hub, openai, tei  # noqa: F401
