"""``model.py`` of Triton's Python backend, run by a double of what the backend gives it; no Triton server is needed."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from serving_models import TEXTS

from flodl.errors import ConfigError

REPOSITORY = Path(__file__).parents[3] / "deploy" / "triton"


class Tensor:
    def __init__(self, name: str, values: np.ndarray) -> None:
        assert isinstance(values, np.ndarray)
        self._name, self._values = name, values

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._values


class TritonError:
    def __init__(self, message: str) -> None:
        self._message = message

    def message(self) -> str:
        return self._message


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor], error: TritonError | None = None) -> None:
        self._tensors, self._error = output_tensors, error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


class Request:
    def __init__(self, rows: list[list[Any]], name: str = "TEXT") -> None:
        """Take rows of texts; Triton hands strings over as bytes in arrays of objects."""
        given = [[part if isinstance(part, bytes) else part.encode() for part in row] for row in rows]
        self._inputs = [Tensor(name, np.array(given, dtype=np.object_).reshape(len(rows), -1))]

    def inputs(self) -> list[Tensor]:
        return self._inputs


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("triton_python_backend_utils")
    module.Tensor, module.InferenceResponse, module.TritonError = Tensor, InferenceResponse, TritonError
    module.get_input_tensor_by_name = lambda request, name: next(
        (tensor for tensor in request.inputs() if tensor.name() == name), None
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", module)


def configuration(name: str, **changes: Any) -> dict[str, Any]:
    """Return a config.pbtxt of the repository as Triton hands it over, in JSON."""
    text = re.sub(r"^#.*$", "", (REPOSITORY / name / "config.pbtxt").read_text("utf-8"), flags=re.MULTILINE)
    fields = re.findall(r'name: "(\w+)", data_type: (\w+), dims: \[ (-?\d+) \]', text)
    keys = re.findall(r'key: "(\w+)" value: \{ string_value: "((?:[^"\\]|\\.)*)" \}', text)
    given, found = ({"name": n, "data_type": t, "dims": [int(d)]} for n, t, d in fields)
    return {
        "name": re.search(r'^name: "(\w+)"', text, re.MULTILINE)[1],  # type: ignore[index]
        "backend": re.search(r'^backend: "(\w+)"', text, re.MULTILINE)[1],  # type: ignore[index]
        "input": [given],
        "output": [found],
        "parameters": {key: {"string_value": json.loads(f'"{value}"')} for key, value in keys},
        **changes,
    }


def started(name: str, folder: Path, **parameters: str) -> Any:
    kind = runpy.run_path(str(REPOSITORY / name / "1" / "model.py"))["TritonPythonModel"]
    config = configuration(name)
    assert config["name"] == name
    assert config["backend"] == "python"
    config["parameters"] |= {
        "model": {"string_value": str(folder)},
        **{k: {"string_value": v} for k, v in parameters.items()},
    }
    model = kind()
    model.initialize(
        {"model_config": json.dumps(config), "model_instance_kind": "CPU", "model_instance_device_id": "0"}
    )
    return model


if not REPOSITORY.exists():
    pytest.skip("tested from a wheel: the files are not here", allow_module_level=True)


@pytest.mark.filterwarnings("ignore:.*truncated")
@pytest.mark.usefixtures("backend")
def test_vectors(folders: dict[str, Path], local: dict[str, Any]) -> None:
    model = started("encoder", folders["embed"], precision="")
    asked = [Request([[text] for text in TEXTS[:2]]), Request([[TEXTS[2]]]), Request([[text] for text in TEXTS[3:]])]
    found = model.execute(asked)
    assert [response.has_error() for response in found] == [False] * 3
    tensors = [response.output_tensors()[0] for response in found]
    assert {tensor.name() for tensor in tensors} == {"VECTOR"}
    assert [tensor.as_numpy().shape for tensor in tensors] == [(2, 32), (1, 32), (len(TEXTS) - 3, 32)]
    # Requests that come together are one call.
    assert np.array_equal(
        np.concatenate([tensor.as_numpy() for tensor in tensors]), local["embed"].embed(TEXTS).numpy()
    )
    assert tensors[0].as_numpy().dtype == np.float32
    model.finalize()


@pytest.mark.usefixtures("backend")
def test_answers_of_texts_and_pairs(folders: dict[str, Path], local: dict[str, Any]) -> None:
    model = started("classifier", folders["classes"])
    pair = ("a cat", "the dog")
    found = model.execute([Request([[text] for text in TEXTS]), Request([pair])])
    rows = [json.loads(row[0]) for response in found for row in response.output_tensors()[0].as_numpy()]
    expected = [one.to_rows() for one in local["classes"].predict(TEXTS, top_k=3)]
    assert rows == [*expected, local["classes"].predict([pair], top_k=3)[0].to_rows()]
    assert all(len(row) == 3 for row in rows)
    entities = started("classifier", folders["ner"], options="{}")
    (answer,) = entities.execute([Request([[TEXTS[0]]])])
    assert json.loads(answer.output_tensors()[0].as_numpy()[0, 0]) == local["ner"].predict([TEXTS[0]])[0].to_rows()


@pytest.mark.usefixtures("backend")
def test_what_cannot_be_answered_fails_alone(folders: dict[str, Path]) -> None:
    model = started("classifier", folders["classes"], options='{"strict": true}')
    asked = [
        Request([["a cat"]]),
        Request([["long " * 200]]),
        Request([[b"\xff"]]),
        Request([["a"] * 3]),
        Request([["a"]], "X"),
    ]
    found = model.execute([*asked, Request([["a dog"]])])
    assert [response.has_error() for response in found] == [False, True, True, True, True, False]
    said = [response.error().message() for response in found if response.has_error()]
    for words, message in zip(("tokens", "UTF-8", "(1, 3)", "TEXT is missing"), said, strict=True):
        assert words in message
    vectors = started("encoder", folders["embed"], precision="")
    (refused,) = vectors.execute([Request([["a", "b"]])])
    assert "pairs" in refused.error().message()


@pytest.mark.usefixtures("backend")
def test_configurations_that_lack_something() -> None:
    from flodl_hf.serving.triton_server import TritonPythonModel

    config = {"name": "m", "input": [], "output": [{"name": "OTHER"}], "parameters": {"options": {"string_value": "{"}}}
    with pytest.raises(ConfigError) as caught:
        TritonPythonModel().initialize({"model_config": json.dumps(config)})
    assert len(caught.value.details["problems"]) == 4
