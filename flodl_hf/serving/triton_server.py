"""Model for Triton Inference Server's Python backend; ``model.py`` of a model repository imports it.

    from flodl_hf.serving.triton_server import TritonPythonModel

``config.pbtxt`` contains the rest (``deploy/triton`` has two examples): the input ``TEXT`` (strings or pairs), one
output, and the parameters ``model`` (a folder), ``precision`` and ``options`` (JSON keywords of the method). The output
is ``VECTOR`` (float32, from ``embed``) or ``ANSWER`` (JSON strings from ``predict``). Requests of one batch run as one
packed call. Long texts are read in windows, or truncated for vectors, as in Python.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from flodl.errors import ConfigError, FlodlError
from flodl_hf.errors import PredictError
from flodl_hf.serving.tasks import predicted_rows

_OUTPUTS = ("VECTOR", "ANSWER")


class TritonPythonModel:
    """Class that Triton instantiates."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model.

        Args:
            args: Triton's arguments: the configuration as JSON, kind and index of the instance's device.

        Raises:
            ConfigError: the configuration is invalid.
        """
        import triton_python_backend_utils as pb_utils  # pyright: ignore[reportMissingImports]

        from flodl_hf.heads.auto import load

        self._pb = pb_utils
        config = json.loads(args["model_config"])
        given = {name: value.get("string_value", "") for name, value in config.get("parameters", {}).items()}
        outputs = [output["name"] for output in config.get("output", [])]
        problems = [] if given.get("model") else ["parameters: 'model' is missing, the folder to load"]
        if len(outputs) != 1 or outputs[0] not in _OUTPUTS:
            problems.append(f"output: found {', '.join(outputs) or 'none'}, expected {' or '.join(_OUTPUTS)}")
        if [one["name"] for one in config.get("input", [])] != ["TEXT"]:
            problems.append("input: expected TEXT only")
        try:
            self._options = json.loads(given.get("options") or "{}")
        except ValueError as fault:
            problems.append(f"parameters: options is not JSON ({fault})")
        if problems:
            raise ConfigError(
                f"{config.get('name', 'config.pbtxt')}: {'; '.join(problems)}; see flodl_hf.serving.triton_server",
                problems=problems,
            )
        (self._output,) = outputs
        on_gpu = args.get("model_instance_kind") == "GPU"
        device = f"cuda:{args.get('model_instance_device_id', '0')}" if on_gpu else "cpu"
        model: Any = load(given["model"], device=device, local_files_only=True)
        self._model = model.runtime(precision=given.get("precision") or None, progress=False)
        # One-time initialization happens before Triton reports the model as ready.
        self._answers(["ready"])

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Return a response for each request; an invalid request fails alone."""
        read = [self._read(request) for request in requests]
        try:
            found = iter(self._answers([text for one in read if isinstance(one, list) for text in one]))
        except FlodlError:
            found = None  # caused by one request, so each runs separately
        return [self._response(one, found) for one in read]

    def _response(self, texts: list[Any] | str, found: Iterator[Any] | None) -> Any:
        """Return the response for texts, with the next results, or for an error message."""
        if isinstance(texts, list):
            try:
                rows = self._answers(texts) if found is None else list(islice(found, len(texts)))
                return self._pb.InferenceResponse([self._pb.Tensor(self._output, self._written(rows))])
            except FlodlError as fault:
                texts = str(fault)
        return self._pb.InferenceResponse(output_tensors=[], error=self._pb.TritonError(texts))

    def finalize(self) -> None:
        """Release the model."""
        del self._model

    def _read(self, request: Any) -> list[Any] | str:
        """Return a request's texts and pairs, or an error message."""
        tensor = self._pb.get_input_tensor_by_name(request, "TEXT")
        if tensor is None:
            return "TEXT is missing"
        given = tensor.as_numpy()
        if given.ndim != 2 or given.shape[1] not in (1, 2):
            return f"TEXT has the shape {given.shape}, expected (batch, 1) for texts, (batch, 2) for pairs"
        try:
            rows = [[part.decode("utf-8") for part in row] for row in given.tolist()]
        except UnicodeDecodeError as fault:
            return f"TEXT is not UTF-8: {fault}"
        return [row[0] if len(row) == 1 else tuple(row) for row in rows]

    def _answers(self, texts: list[Any]) -> list[Any]:
        """Return the result of each text or pair."""
        if self._output == "VECTOR":
            if any(isinstance(text, tuple) for text in texts):
                raise PredictError("VECTOR: found pairs, expected texts. Send TEXT of the shape (batch, 1).")
            return list(self._model.embed(texts, **self._options).numpy()) if texts else []
        return predicted_rows(partial(self._model.predict, **self._options), texts)

    def _written(self, rows: list[Any]) -> np.ndarray:
        if self._output == "VECTOR":
            return np.stack(rows).astype(np.float32)
        lines = [json.dumps(row, ensure_ascii=False).encode() for row in rows]
        return np.array(lines, dtype=np.object_).reshape(-1, 1)
