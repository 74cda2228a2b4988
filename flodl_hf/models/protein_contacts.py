"""Which residues of a protein touch, read off attention weights (Rao et al. 2020, doi:10.1101/2020.12.15.422761).

A logistic regression over all heads of all layers; ESM's files contain its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flodl_hf.errors import PredictError

if TYPE_CHECKING:
    from flodl_hf.inference.graph_model import GraphModel


HEAD = "contact_head.regression."
END = 2  # the id of the last token of a protein, fixed in the reference implementation


def predict_contacts(
    model: GraphModel, tokens: Tensor | str | Sequence[str], attention_mask: Tensor | None = None
) -> Tensor | list[Tensor]:
    """Return the probabilities that residues of proteins are in contact.

    Args:
        model: an ESM model, loaded with ``attention="eager"``.
        tokens: ids ``(batch, seq)``, which give ``(batch, seq - 2, seq - 2)``; or a protein as text, which gives
            ``(residues, residues)``; or several texts, which give a list.
        attention_mask: of ids: 1 for tokens to keep, ``(batch, seq)``; None keeps all.

    Raises:
        PredictError: the model has no contact head, or its attention weights are not available.
    """
    if isinstance(tokens, Tensor):
        return _of_tokens(model, tokens, torch.ones_like(tokens) if attention_mask is None else attention_mask)
    tokenizer, found = model._ready("predict_contacts"), []
    device = next(model.parameters()).device
    for place, text in enumerate([tokens] if isinstance(tokens, str) else tokens):
        windows = tokenizer.encode_rows([text], max_tokens=model.max_tokens)[0]
        if len(windows) > 1:
            raise PredictError(
                f"predict_contacts: text {place} is longer than the {model.max_tokens} tokens that the model takes, "
                "and contacts are of whole proteins; cut it",
                place=place,
            )
        ids = torch.tensor([windows[0].ids], device=device)
        found.append(_of_tokens(model, ids, torch.ones_like(ids))[0])
    return found[0] if isinstance(tokens, str) else found


def _of_tokens(model: GraphModel, tokens: Tensor, mask: Tensor) -> Tensor:
    """Return how probably tokens touch, ``(batch, seq - 2, seq - 2)``: the first and the last place are left out.

    Args:
        model: an ESM, read with its regression, with eager attention.
        tokens: ids, ``(batch, seq)``.
        mask: 1 for tokens to keep, ``(batch, seq)``.

    Raises:
        PredictError: the model has no such regression, or its attention weights are never there.
    """
    held = {} if model.source is None else model.source.kept
    weight, bias = (held.get(f"esm.{HEAD}{leaf}") for leaf in ("weight", "bias"))
    if weight is None or bias is None:
        raise PredictError(
            f"predict_contacts: found no {HEAD}weight and bias for this {model.config.family.model_type} model; "
            "expected a checkpoint of ESM that has them"
        )
    if model.virtual_tokens:
        raise PredictError("predict_contacts: the adapter puts virtual tokens before each text; switch it off")
    with torch.no_grad():
        seen = model._run_graph(tokens, mask, None, None, attentions=True)[2]["attentions"]
        maps = torch.stack(seen, 1)
        maps = maps * mask[:, None, None, None, :] * mask[:, None, None, :, None]
        real = tokens.ne(END).to(maps)
        maps = (maps * (real[:, :, None] * real[:, None, :])[:, None, None])[..., 1:-1, 1:-1].flatten(1, 2)
        both = maps + maps.transpose(-1, -2)
        # The average product correction: a pair is compared with the means of its two residues.
        usual = both.sum(-1, keepdim=True) * both.sum(-2, keepdim=True) / both.sum((-1, -2), keepdim=True)
        features = (both - usual).permute(0, 2, 3, 1)
        # One product of rows plus the bias, as in torch's Linear.
        scores = features.reshape(-1, features.shape[-1]) @ weight.to(maps, copy=True).T + bias.to(maps)
        return scores.view(features.shape[:-1]).sigmoid()
