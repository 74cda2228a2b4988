"""An ONNX file as an endpoint: ONNX Runtime computes, and the folder provides the remaining steps.

These are pooling, scaling, prompts and the activation for scores; complete vectors from the file are used
unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flodl.errors import FlodlError
from flodl_hf.parity.endpoint_checks.targets import QUERY, TargetError, by_label


class OnnxTarget:
    """An ONNX file with its tokenizer and configuration in its folder, as on the Hub.

    Args:
        place: the file, or its folder.
        task: "vectors", "labels" or "ranking".
        labels: labels of the source.

    Raises:
        TargetError: it cannot be read, or has no output for the task.
    """

    scales = False

    def __init__(self, place: Path, task: str, labels: Sequence[str]) -> None:
        from flodl_hf.checkpoints.config.model_config import read_config_file
        from flodl_hf.parity.onnx_session import OnnxModel

        self._task, self._labels = task, list(labels)
        try:
            self._model = OnnxModel(place)
            self._config = read_config_file(self._model.folder)
            self._tokenizer: Any = self._model.tokenizer
            self._recipe = self._model.recipe if task == "vectors" else None
        except FlodlError as fault:
            raise TargetError(fault.message, status=0) from fault
        self._output = self._named()
        self.name = f"{self._model.path} (run by ONNX Runtime, output {self._output})"

    def _named(self) -> str:
        """Return the output that answers."""
        of_texts = ("sentence_embedding", "text_embeds", "last_hidden_state", "token_embeddings")
        wanted = of_texts if self._task == "vectors" else ("logits",)
        found = next((name for name in wanted if name in self._model.outputs), None)
        if found is None:
            raise TargetError(
                f"{self._model.path}: the file gives {', '.join(self._model.outputs)}; expected "
                f"{' or '.join(wanted)}, as a model of {self._task} has",
                status=0,
            )
        return found

    def answers(self, items: Sequence[str], **options: Any) -> np.ndarray:
        """Return a row of numbers for each item; ``prompt_name`` is put before texts by us."""
        prompt = options.pop("prompt_name", None)
        if options:
            raise TargetError(f"an ONNX file has no {', '.join(options)}", status=0)
        if self._task == "vectors":
            before = self._recipe.resolve_prompt("prompt_name", None, prompt) if self._recipe else ""
            return self._vectors([before + item for item in items], before)
        pairs = [QUERY] * len(items) if self._task == "ranking" else None
        given = (pairs, list(items)) if pairs is not None else (list(items), None)
        logits = torch.from_numpy(np.stack(self._model.answer(*given)["logits"])).float()
        scores = self._scores(logits).double().numpy()
        if self._task == "ranking":
            return scores.reshape(len(items), -1)[:, :1]
        names = self._config.labels
        return by_label([list(zip(names, row.tolist(), strict=True)) for row in scores], self._labels)

    def _scores(self, logits: torch.Tensor) -> torch.Tensor:
        from flodl_hf.heads.sequence_classification import ranking_activation
        from flodl_hf.inference.decode.classes import activation_for, class_scores
        from flodl_hf.models.score_function import score_function

        config = self._config
        if self._task == "ranking":
            return class_scores(logits, ranking_activation(config))
        function = score_function(config) or activation_for(config.problem_type, config.num_labels)
        return class_scores(logits, function)

    def _vectors(self, texts: list[str], prompt: str) -> np.ndarray:
        from flodl_hf.inference.decode.pooling import finish_embeddings, pool_padded

        recipe = self._recipe
        rows = self._model.answer(texts)[self._output]
        if rows[0].ndim == 1:
            return np.stack(rows).astype(np.float32)
        found = []
        skipped = 0
        if prompt and recipe is not None and not recipe.include_prompt:
            ((row,),) = self._tokenizer.encode_rows([prompt], offsets=False)
            skipped = len(row.ids) - int(bool(row.special[-1]))
        for states in rows:
            counted = torch.ones(1, len(states))
            counted[:, :skipped] = 0
            vector = pool_padded(torch.from_numpy(states)[None].float(), counted, recipe.pooling if recipe else "mean")
            for layer in recipe.dense if recipe else ():
                vector = layer(vector)
            found.append(finish_embeddings(vector, normalize=recipe.normalize if recipe else True)[0])
        return torch.stack(found).numpy()

    def token_ids(self, texts: Sequence[str]) -> list[list[int]] | None:
        """Return the ids of texts, from the tokenizer in the folder of the file."""
        return [list(row.ids) for (row,) in self._tokenizer.encode_rows(list(texts), offsets=False)]
