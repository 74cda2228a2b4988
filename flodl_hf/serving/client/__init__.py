"""A client of ``flodl-hf serve``, with and without asyncio: texts in, arrays and records out.

It retries a request that the server has no room for, sends many texts in several requests that the server accepts, and
needs `httpx` alone (the extra ``client``), no torch.

clients   `Client` and `AsyncClient`
requests  the fields of each call, how its answer is read, and how it is split
"""

from __future__ import annotations

from flodl_hf.serving.client.clients import AsyncClient, Client
from flodl_hf.serving.client.requests import ServerError

__all__ = ["AsyncClient", "Client", "ServerError"]
