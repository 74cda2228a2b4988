"""The compared targets: endpoints over HTTP, folders, and ONNX files. Each gives a row of numbers for each item.

A row is a vector, a score for each label, or the relevance of a document. Over HTTP: text-embeddings-inference,
OpenAI's interface with what vLLM and Cohere add, and Hugging Face's. Only the texts of the comparison are sent.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flodl.errors import FlodlError
from flodl_hf.checkpoints.folders import WEIGHT_FILES
from flodl_hf.parity.endpoint_checks.reference import QUERY, Reference, prompt_tokens, score_function, vector

_MOST = 256 << 20


class TargetError(FlodlError):
    """A target that does not answer.

    Attributes:
        status: of HTTP; 0 where nothing came, or where it is no endpoint.
    """

    status: int


class Target:
    """A target that is compared with a model.

    Args:
        source: the model.

    Attributes:
        name: name in a report.
        scales: whether it scales vectors to length 1 regardless of the folder, unless disabled in the request.
        options: options that its requests have: "normalize", "prompt_name", "truncate".
    """

    name: str
    scales = False
    options: tuple[str, ...] = ()

    def __init__(self, source: Reference) -> None:
        self.source, self.task = source, source.task

    def answers(self, items: Sequence[str], **options: Any) -> np.ndarray:
        """Return a row of numbers for each item, ``(items, numbers)``.

        Args:
            items: texts; documents where they are ranked.
            **options: some of `options`.

        Raises:
            TargetError: the target does not answer.
        """
        raise NotImplementedError

    def token_ids(self, texts: Sequence[str]) -> list[list[int]] | None:
        """Return the ids of texts with special tokens, or None if the target does not provide them.

        Raises:
            TargetError: the target does not respond.
        """
        return None

    def by_label(self, rows: Sequence[Sequence[tuple[str, float]]]) -> np.ndarray:
        """Return scores in the order of the source's labels; NaN where a label has none.

        ``LABEL_3`` is the label with the id 3, as files without names of labels have it.

        Raises:
            TargetError: a label is none of those.
        """
        labels = self.source.labels
        found = np.full((len(rows), len(labels)), np.nan)
        numbered = {f"LABEL_{i}": i for i in range(len(labels))} | {name: i for i, name in enumerate(labels)}
        for place, row in enumerate(rows):
            for label, score in row:
                if label not in numbered:
                    raise TargetError(
                        f"the label {label!r} is none of the model's; expected {', '.join(labels)}", status=0
                    )
                found[place, numbered[label]] = score
        return found


class FolderTarget(Target):
    """A folder, answered by sentence-transformers where it is installed and the folder is its own, else by us.

    Args:
        source: the model.
        folder: the folder.
    """

    def __init__(self, source: Reference, folder: Path) -> None:
        super().__init__(source)
        self._ours, self._theirs = Reference(str(folder), local_files_only=True), None
        if self._ours.task != self.task:
            raise TargetError(
                f"{folder}: the folder has a model for {self._ours.task}; expected {self.task}, as the source has",
                status=0,
            )
        own = self.task == "vectors" and (folder / "modules.json").exists()
        if own and importlib.util.find_spec("sentence_transformers"):
            self._theirs: Any = importlib.import_module("sentence_transformers").SentenceTransformer(
                str(folder), device="cpu", local_files_only=True, trust_remote_code=False
            )
        self.name = f"{folder} (read by {'sentence-transformers' if self._theirs else 'flodl-hf'})"

    def answers(self, items: Sequence[str], **options: Any) -> np.ndarray:
        """Return a row of numbers for each item."""
        if self._theirs is not None:
            return np.asarray(self._theirs.encode(list(items), show_progress_bar=False), np.float32)
        rows = self._ours.predicted(items)
        if self.task != "labels":
            return rows
        return self.by_label([list(zip(self._ours.labels, row, strict=True)) for row in rows.tolist()])

    def token_ids(self, texts: Sequence[str]) -> list[list[int]] | None:
        """Return the ids of texts from the tokenizer of the folder's library."""
        if self._theirs is not None:
            return [list(self._theirs.tokenizer(text)["input_ids"]) for text in texts]
        return self._ours.token_ids(texts)


class OnnxTarget(Target):
    """An ONNX file with its tokenizer and configuration in its folder, as on the Hub, run by ONNX Runtime.

    The folder provides pooling, scaling, prompts and the activation for scores; complete vectors from the file are
    used unchanged.

    Args:
        source: the model.
        path: the file, or its folder.

    Raises:
        TargetError: it cannot be read, or has no output for the task.
    """

    def __init__(self, source: Reference, path: Path) -> None:
        from flodl_hf.checkpoints.config.model_config import read_config_file
        from flodl_hf.parity.onnx_session import OnnxModel

        super().__init__(source)
        try:
            self._model = OnnxModel(path)
            self._config = read_config_file(self._model.folder)
            self._tokenizer: Any = self._model.tokenizer
            self._recipe = self._model.recipe if self.task == "vectors" else None
        except FlodlError as fault:
            raise TargetError(fault.message, status=0) from fault
        of_texts = ("sentence_embedding", "text_embeds", "last_hidden_state", "token_embeddings")
        wanted = of_texts if self.task == "vectors" else ("logits",)
        found = next((name for name in wanted if name in self._model.outputs), None)
        if found is None:
            raise TargetError(
                f"{self._model.path}: the file gives {', '.join(self._model.outputs)}; expected "
                f"{' or '.join(wanted)}, as a model of {self.task} has",
                status=0,
            )
        self._output = found
        self.options = ("prompt_name",) if self._recipe else ()
        self.name = f"{self._model.path} (run by ONNX Runtime, output {self._output})"

    def answers(self, items: Sequence[str], **options: Any) -> np.ndarray:
        """Return a row of numbers for each item; ``prompt_name`` is put before texts by us."""
        if self.task == "vectors":
            return self._vectors(items, options.get("prompt_name"))
        from flodl_hf.inference.classes import class_scores

        pairs = None if self.task == "labels" else list(items)
        logits = self._model.answer(list(items) if pairs is None else [QUERY] * len(items), pairs)["logits"]
        function = score_function(self._config, self.task)
        scores = class_scores(torch.from_numpy(np.stack(logits)).float(), function).double().numpy()
        if self.task == "ranking":
            return scores.reshape(len(items), -1)[:, :1]
        return self.by_label([list(zip(self._config.labels, row, strict=True)) for row in scores.tolist()])

    def _vectors(self, items: Sequence[str], prompt_name: str | None) -> np.ndarray:
        recipe = self._recipe
        prompt = recipe.resolve_prompt("prompt_name", None, prompt_name) if recipe else ""
        rows = self._model.answer([prompt + item for item in items])[self._output]
        if rows[0].ndim == 1:
            return np.stack(rows).astype(np.float32)
        skipped = prompt_tokens(recipe, prompt, self._tokenizer)
        found = []
        for states in rows:
            counted = torch.ones(1, len(states))
            counted[:, :skipped] = 0
            scaled = recipe.normalize if recipe else True
            found.append(vector(torch.from_numpy(states)[None].float(), counted, recipe, scaled=scaled))
        return torch.stack(found).numpy()

    def token_ids(self, texts: Sequence[str]) -> list[list[int]] | None:
        """Return the ids of texts, from the tokenizer in the folder of the file."""
        return [list(row.ids) for (row,) in self._tokenizer.encode_rows(list(texts), offsets=False)]


class HttpTarget(Target):
    """The server at a URL.

    Args:
        source: the model.
        url: its address; ``/v1`` at the end, as OpenAI's clients want it, may be there.
        style: "tei", "openai" or "hf"; "auto" finds it by ``/info`` and ``/v1/models``.
        model: which of its models.
        api_key: where it needs one.
        timeout_s: after so long an answer is given up.

    Raises:
        TargetError: nothing answers there.
    """

    def __init__(
        self, source: Reference, url: str, *, style: str = "auto", model: str | None = None, api_key: str | None = None,
        timeout_s: float = 60.0,
    ) -> None:  # fmt: skip
        super().__init__(source)
        self.url = url.rstrip("/").removesuffix("/v1")
        self._model, self._timeout_s = model, timeout_s
        self._headers = {"content-type": "application/json", "accept": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        if style == "auto":
            style = "openai" if url.rstrip("/").endswith("/v1") else self._detected()
        if style == "openai" and model is None:
            found = self._request("/v1/models")
            models = found.get("data") if isinstance(found, dict) else None
            self._model = models[0]["id"] if isinstance(models, list) and models else None
        self._style = style
        self.scales = style == "tei"
        if style == "tei" and self.task == "vectors":
            self.options = ("normalize", "prompt_name", "truncate")
        self.name = f"{self.url} ({_STYLES[style]}{f', model {self._model}' if self._model else ''})"

    def _request(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the answer to a request: GET without a body, POST with one."""
        where = self.url + path
        if body is not None and self._model is not None:
            body = {**body, "model": self._model}
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(where, data, self._headers)
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                return json.loads(answer.read(_MOST))
        except urllib.error.HTTPError as fault:
            found = fault.read(400).decode("utf-8", "replace").strip()
            raise TargetError(f"{where}: answered with status {fault.code}: {found}", status=fault.code) from None
        except (OSError, ValueError) as fault:
            why = getattr(fault, "reason", fault)
            raise TargetError(f"{where}: no answer that can be read ({why}); is the address right?", status=0) from None

    def _detected(self) -> str:
        """Return the style of the server; all that has neither path is Hugging Face's."""
        faults = []
        for path, name, style in (("/info", "model_type", "tei"), ("/v1/models", "data", "openai")):
            try:
                found = self._request(path)
                if isinstance(found, dict) and found.get(name) is not None:
                    return style
            except TargetError as fault:
                faults.append(fault.status)
                if fault.status in (401, 403) or faults == [0, 0]:
                    raise
        return "hf"

    def answers(self, items: Sequence[str], **options: Any) -> np.ndarray:
        """Return a row of numbers for each item."""
        texts = list(items)
        calls: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
            ("tei", "vectors"): ("/embed", {"inputs": texts, "normalize": True}),
            ("tei", "labels"): ("/predict", {"inputs": [[text] for text in texts]}),
            ("tei", "ranking"): ("/rerank", {"query": QUERY, "texts": texts}),
            ("openai", "vectors"): ("/v1/embeddings", {"input": texts, "encoding_format": "float"}),
            ("openai", "labels"): ("/classify", {"input": texts}),
            ("openai", "ranking"): ("/v1/rerank", {"query": QUERY, "documents": texts}),
            ("hf", "vectors"): ("", {"inputs": texts}),
            ("hf", "labels"): ("", {"inputs": texts, "parameters": {"top_k": 1000}}),
        }
        if (self._style, self.task) not in calls:
            raise TargetError(f"{_STYLES[self._style]} has no {self.task}", status=0)
        path, body = calls[self._style, self.task]
        found = self._request(path, {**body, **options})
        return self._checked(path, found, len(texts), lambda: np.asarray(self._rows(found), np.float64))

    def _rows(self, response: Any) -> Any:
        """Return the row of each text of an answer."""
        if self._style == "openai":
            list_of, entry = {
                "vectors": ("data", "embedding"), "labels": ("data", "probs"), "ranking": ("results", "relevance_score")
            }[self.task]  # fmt: skip
            return self._ordered(response[list_of], entry)
        if self.task == "ranking":
            return self._ordered(response, "score")
        if self.task == "labels":  # [[{label, score}]], or the inner list of one text
            rows = [response] if isinstance(response[0], dict) else response
            return self.by_label([[(one["label"], float(one["score"])) for one in row] for row in rows])
        if not isinstance(response[0][0], list):
            return response
        # States of tokens ``(tokens, features)``, or a list of one such array, are pooled.
        from flodl_hf.inference.pooling import pool_padded

        rows = []
        for states in response:
            values = torch.tensor(states, dtype=torch.float32).flatten(0, -2)[None]
            rows.append(pool_padded(values, torch.ones(values.shape[:2]), self.source.pooling)[0].tolist())
        return rows

    def _ordered(self, results: Any, name: str) -> list[Any]:
        """Return an entry of each result in the order of the texts; each result contains the index of its text."""
        entries = {one["index"]: one[name] for one in results}
        if sorted(entries) != list(range(len(results))):
            raise ValueError("indices are not 0, 1, 2 ...")
        rows = [entries[index] for index in range(len(results))]
        if self.task != "ranking":
            return rows
        if np.isnan(scores := [[float(score)] for score in rows]).any():
            raise ValueError("a score is NaN")
        return scores

    def _checked(self, path: str, response: Any, count: int, read: Callable[[], Any]) -> Any:
        """Return what was read of an answer, with a row for each item."""
        try:
            rows = read()
            if len(rows) == count and getattr(rows, "ndim", 2) == 2:
                return rows
        except (TypeError, KeyError, ValueError, IndexError):
            pass
        raise TargetError(
            f"{self.url}{path}: answered {count} texts with {str(response)[:80]!r}; expected numbers for each",
            status=200,
        )

    def token_ids(self, texts: Sequence[str]) -> list[list[int]] | None:
        """Return the ids of ``/tokenize``, or None where it has none."""
        if self._style != "tei":
            return None
        try:
            found = self._request("/tokenize", {"inputs": list(texts)})
        except TargetError as fault:
            if fault.status in (404, 405):
                return None
            raise
        return self._checked(
            "/tokenize", found, len(texts), lambda: [[int(token["id"]) for token in row] for row in found]
        )


_STYLES = {"tei": "text-embeddings-inference", "openai": "OpenAI", "hf": "Hugging Face"}


def open_target(address: str, source: Reference, **options: Any) -> Target:
    """Return the target at an address: a URL, a folder of sentence-transformers or transformers, or an ONNX file.

    A folder with an ONNX file and no other weights is that file.

    Args:
        address: ``http://...``, ``https://...``, a folder, or a file that ends in ``.onnx``.
        source: the model.
        **options: options of `HttpTarget`.

    Raises:
        TargetError: the address has no usable target.
    """
    if address.startswith(("http://", "https://")):
        return HttpTarget(source, address, **options)
    place = Path(address).expanduser()
    has_onnx = any((place / name).is_file() for name in ("onnx/model.onnx", "model.onnx"))
    has_weights = any((place / name).is_file() for name in WEIGHT_FILES)
    if (place.suffix == ".onnx" and place.is_file()) or (has_onnx and not has_weights):
        return OnnxTarget(source, place)
    if place.is_dir():
        return FolderTarget(source, place)
    raise TargetError(
        f"{address}: there is no such folder; expected a folder, an ONNX file, or an address that begins with http:// "
        "or https://",
        status=0,
    )
