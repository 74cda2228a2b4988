"""Texts with different adapters in one batch: the base runs once, each token gets the sums of its own adapter.

Rows are concatenated. The sums of all adapters are one product, of which each token keeps its own columns, so that
results equal each adapter's alone up to the order of sums; heads run on all states, and each row uses its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flodl.graph import Graph
from flodl_hf.errors import PredictError
from flodl_hf.inference.batch import BUDGETS, Pending, Work, batch_of, plan_batches, without_tokens
from flodl_hf.inference.graph_model import GraphModel
from flodl_hf.inference.prepared_graph import shadow
from flodl_hf.inference.token_table import TokenTable
from flodl_hf.models.adapters.fresh import Adapter
from flodl_hf.models.adapters.settings import IA3, Lora, Prefix, Prompt
from flodl_hf.nn.adapter_layers import LoraPart
from flodl_hf.nn.disentangled.attention import DisentangledAttention
from flodl_hf.nn.layout import Packed

DOES = {IA3: "scales states", Prompt: "puts tokens before texts", Prefix: "puts keys and values before texts"}


class _MixedLinear(nn.Module):
    """A projection with the parts of several adapters; ``(tokens, in)`` to ``(tokens, out)``."""

    def __init__(self, linear: nn.Linear, parts: Sequence[LoraPart | None], owners: list[Tensor]) -> None:
        super().__init__()
        self.weight, self.bias, self.owners = linear.weight, linear.bias, owners
        held = [part for part in parts if part is not None]
        with torch.no_grad():
            self.downs = torch.cat([part.down for part in held]).to(linear.weight)
            self.ups = torch.cat([part.up for part in held], 1).to(linear.weight)
            self.scales = torch.zeros(len(parts), len(self.downs)).to(linear.weight)
            self.lengths = None
            if any(part.magnitude is not None for part in held):
                self.lengths = torch.ones(len(parts), len(linear.weight)).to(linear.weight)
            at = 0
            for row, part in enumerate(parts):
                if part is None:
                    continue
                self.scales[row, at : at + len(part.down)] = part.scale
                at += len(part.down)
                if part.magnitude is not None and self.lengths is not None:
                    total = linear.weight.double() + part.scale * (part.up.double() @ part.down.double())
                    self.lengths[row] = (part.magnitude.double() / torch.linalg.norm(total, dim=1)).to(linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the projection, each token with its own part."""
        index = self.owners[0]
        added = F.linear(F.linear(x, self.downs) * self.scales[index], self.ups)
        if self.lengths is None:
            return F.linear(x, self.weight, self.bias) + added
        scaled = (F.linear(x, self.weight) + added) * self.lengths[index]
        return scaled if self.bias is None else scaled + self.bias


class Mixed:
    """Runs rows of several adapters; made for one call.

    Args:
        model: the base, without an adapter in it.
        adapters: the adapters by name, in the order of their numbers.

    Raises:
        PredictError: they cannot share a batch, and why.
    """

    def __init__(self, model: GraphModel, adapters: Mapping[str, Adapter]) -> None:
        chosen = list(adapters.values())
        _check(model, chosen, list(adapters))
        self._model = model
        self._owners = [torch.zeros(0)]  # the adapter of each token of the batch that runs
        self.graph = shadow(model.graph)
        linears: Mapping[str, Any] = dict(self.graph.named_modules())
        inside = (path for adapter in chosen for path in adapter.parts if path.startswith("encoder."))
        for path in dict.fromkeys(inside):
            owner, _, leaf = path.rpartition(".")
            parts: Any = [adapter.parts.get(path) for adapter in chosen]
            setattr(self.graph.get_submodule(owner), leaf, _MixedLinear(linears[path], parts, self._owners))
        self._bodies = [self._body(adapter) for adapter in chosen]

    def _body(self, adapter: Adapter) -> Graph:
        body = shadow(self._model.graph)
        home = next(body.parameters())
        for name, parameter in adapter.kept.items():
            owner, _, leaf = name.rpartition(".")
            body.get_submodule(owner)._parameters[leaf] = nn.Parameter(parameter.detach().to(home), requires_grad=False)
        for path, part in adapter.parts.items():
            if not path.startswith("encoder."):
                linear: Any = body.get_submodule(path)
                assert isinstance(part, LoraPart)
                linear.weight = nn.Parameter(part.to(home.device).merged(linear.weight), requires_grad=False)
        return body

    def start(
        self, numbers: np.ndarray, model: Any, options: Any, table: TokenTable, work: Work, places: Any
    ) -> Pending:
        """Return the results of rows.

        Args:
            numbers: of each text's adapter.
            model: the model of the call; see `flodl_hf.inference.pipeline.SENDING`.
            options: of the call, which select nothing here.
            table: the rows, and which text each belongs to.
            work: the requested output: the head's scores.
            places: None, because all scores are computed.
        """
        device = self._model.device
        if not table.lengths.all():
            raise without_tokens(table)
        pending = Pending(len(table))
        owners = np.asarray(table.owners)
        with torch.inference_mode():
            for rows in plan_batches(table.lengths, BUDGETS[device.type]):
                batch = batch_of(table, rows, work, None, types=self._model._reads_types)
                of_rows = torch.from_numpy(np.ascontiguousarray(numbers[owners[rows]], np.int64)).to(device)
                of_tokens = of_rows.repeat_interleave(torch.from_numpy(batch.lengths.astype(np.int64)).to(device))
                ids = torch.from_numpy(batch.ids.astype(np.int64)).to(device)
                kinds = torch.zeros_like(ids) if self._model._reads_types else None
                if batch.types is not None:
                    kinds = torch.from_numpy(batch.types).to(ids)
                found = self._scores(ids, kinds, Packed.of(batch.lengths.tolist(), device), of_tokens,
                                     of_rows if work.per_text else of_tokens)  # fmt: skip
                pending.add(rows, batch.sizes, found.float().cpu(), None)
        return pending

    def _scores(self, ids: Tensor, kinds: Tensor | None, layout: Packed, of_tokens: Tensor, of_each: Tensor) -> Tensor:
        self._owners[0] = of_tokens
        states = self.graph.get_submodule("encoder")(ids, token_type_ids=kinds, layout=layout)
        result: Tensor | None = None
        for number, body in enumerate(self._bodies):
            parts = dict(body.named_children())
            read = parts["pooler"](states, layout=layout) if "pooler" in parts else states
            scores = parts["head"](read, layout=layout)
            mine = (of_each == number).view(-1, *[1] * (scores.ndim - 1))
            result = scores if result is None else torch.where(mine, scores, result)
        assert result is not None
        return result


def _check(model: GraphModel, chosen: Sequence[Adapter], names: Sequence[str]) -> None:
    problems = []
    kinds = {type(adapter.settings) for adapter in chosen} - {Lora}
    if kinds:
        does = " and ".join(sorted(f"{DOES[kind]} ({kind.__name__})" for kind in kinds))
        problems.append(f"an adapter {does}, and only sums of LoRA are mixed")
    elif any(not isinstance(part, LoraPart) or part.up_bias is not None for a in chosen for part in a.parts.values()):
        problems.append("an adapter has a part of an embedding table or a bias (lora_bias)")
    if model.head not in ("sequence_classification", "token_classification"):
        problems.append(f"the task is {model.head}, and only labels of texts and tokens are mixed")
    if any(isinstance(module, DisentangledAttention) for module in model.graph.modules()):
        problems.append("attention computes positions by adapted projections")
    if any(name.startswith("encoder.") for adapter in chosen for name in adapter.kept):
        problems.append("an adapter contains whole tensors of the encoder")
    own = model.config
    labels = {(tuple(a.labels or own.labels), a.problem_type or own.problem_type) for a in chosen}
    if len(labels) > 1:
        problems.append("their labels differ")
    if problems:
        raise PredictError(
            f"predict_mixed: {', '.join(names)} cannot share a batch: {'; '.join(problems)}. Use set_adapter and "
            "predict for one after the other.",
            problems=problems,
        )
