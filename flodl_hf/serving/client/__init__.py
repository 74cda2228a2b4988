"""Clients of ``flodl-hf serve``, synchronous and for asyncio, that return arrays and records.

They retry requests that the server refuses for lack of capacity and split long lists of texts. They need `httpx` (the
extra ``client``) and no torch.

"""

from __future__ import annotations

from flodl_hf.serving.client.clients import AsyncClient, Client, ServerError

__all__ = ["AsyncClient", "Client", "ServerError"]
