"""Tables of other engines: batches answered as files are, and Ray and Spark run here where they are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from bulk_inputs import texts

from flodl.errors import DataError
from flodl_hf import predict_file
from flodl_hf.errors import PredictError
from flodl_hf.jobs import ray, spark
from flodl_hf.jobs.partitions import Partitions
from flodl_hf.models.encoder_model import EncoderModel

HEADS = ("sequence_classification", "token_classification", "question_answering", "base", "masked_lm")
arrow: Any = pytest.importorskip("pyarrow")
Model = Callable[[str], EncoderModel]


def table(head: str, count: int = 21) -> Any:
    said = [f"{text} [MASK]" if head == "masked_lm" else text for text in texts(count)]
    questions = {"question": ["who sat ?"] * count, "context": said} if head == "question_answering" else {"text": said}
    return arrow.table({"id": list(range(count)), **questions})


@pytest.mark.parametrize("head", HEADS)
def test_batches_are_answered_as_files_are(model: Model, tmp_path: Path, head: str) -> None:
    import pyarrow.parquet as parquet

    rows = table(head)
    parquet.write_table(rows, tmp_path / "in.parquet")
    predict_file(model(head), tmp_path / "in.parquet", tmp_path / "out.parquet", precision="exact")
    expected = parquet.read_table(tmp_path / "out.parquet")
    partitions = Partitions(model(head), rows.schema.names, precision="exact")
    found = partitions.arrow(rows)
    assert found.schema.names == expected.schema.names
    assert found.schema.types == expected.schema.types
    assert found.to_pylist() == expected.to_pylist()
    # A partition of no rows, and one that comes in pieces.
    assert partitions.arrow(rows.slice(0, 0)).num_rows == 0
    (batch,) = rows.slice(3, 5).to_batches()
    assert partitions.arrow(batch).num_rows == 5
    # What Spark would be told of these columns.
    assert all(spark.spark_type(kind) for kind in partitions.kinds.values())


def test_rows_that_cannot_be_answered(model: Model) -> None:
    columns = {"text": ["a cat", None, "", 7]}
    with pytest.raises(DataError, match="2 rows cannot be predicted") as caught:
        Partitions(model("sequence_classification"), ["text"]).answers(columns)
    assert caught.value.rows == [1, 3]
    found = Partitions(model("sequence_classification"), ["text"], on_error="null").answers(columns)
    # An empty text is answered, as by the model.
    assert [label is None for label in found["label"]] == [False, True, False, True]
    assert [reason is None for reason in found["error"]] == [True, False, True, False]
    strict = Partitions(model("sequence_classification"), ["text"], on_error="null", strict=True)
    found = strict.answers({"text": ["a cat", "cat " * 600, "a dog"]})
    assert [label is None for label in found["label"]] == [False, True, False]
    assert "expected at most" in found["error"][1]


def test_what_makes_no_sense_is_refused_before_a_row(model: Model) -> None:
    with pytest.raises(DataError, match="columns score already"):
        Partitions(model("sequence_classification"), ["text", "score"])
    with pytest.raises(PredictError, match=r"^answers: .*no option aggregatoin"):
        Partitions(model("token_classification"), ["text"], aggregatoin="first")
    with pytest.raises(DataError, match=r"no column 'txt'.*text"):
        Partitions(model("base"), ["text"], text_column="txt")
    with pytest.raises(DataError, match="expected stop or null"):
        Partitions(model("base"), ["text"], on_error="skip")  # type: ignore[arg-type]


def test_nested_kinds_in_spark_s_words() -> None:
    kind = [[{"token": "text", "score": "float"}]]
    assert spark.spark_type(kind) == "array<array<struct<`token`: string, `score`: float>>>"
    assert spark.spark_type("vector") == "array<float>"


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PredictError, match=r"pip install 'flodl-hf\[ray\]'"):
        ray.predict_file("m", "in.jsonl", "out.jsonl")


def run(code: str, *args: object) -> str:
    """Run a program that uses an engine: its own processes and sockets are none of pytest's."""
    root = Path(ray.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0",
             "PYSPARK_PYTHON": sys.executable},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


CHECK = """
import sys
from pathlib import Path
from flodl_hf import load, predict_file
folder, place = sys.argv[1], Path(sys.argv[2])
words = "the a cat dog sat on mat ran good bad film".split()
said = [" ".join(words[(i * 3 + k) % 11] for k in range(i % 9 + 1)) for i in range(120)]
expected = [found[0] for found in load(folder).predict(said, top_k=1)]

def check(rows):
    rows = sorted(rows, key=lambda row: row["id"])
    assert [row["id"] for row in rows] == list(range(120))
    assert [row["text"] for row in rows] == said
    assert [row["label"] for row in rows] == [one.label for one in expected]
    assert max(abs(row["score"] - one.score) for row, one in zip(rows, expected)) < 1e-5
"""

ON_RAY = """
import json
import ray as engine
from flodl_hf import ray
from flodl_hf.errors import PredictError
engine.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
data = engine.data.from_items([{"id": i, "text": text} for i, text in enumerate(said)]).repartition(5)
check(ray.answers(data, folder, workers=2, batch_size=16).take_all())
source = place / "in.jsonl"
source.write_text("".join(json.dumps({"id": i, "text": text}) + "\\n" for i, text in enumerate(said)))
result = ray.predict_file(folder, source, place / "cluster.jsonl", workers=2, part_rows=25)
assert (result.is_whole, result.rows, result.parts) == (True, 120, 5)
predict_file(folder, source, place / "alone.jsonl", part_rows=25)
assert (place / "cluster.jsonl").read_bytes() == (place / "alone.jsonl").read_bytes()
try:
    ray.predict_file(folder, source, place / "more.jsonl", workers=99)
except PredictError as error:
    print(*error.problems)
"""

ON_SPARK = """
from pyspark.sql import SparkSession
from flodl_hf import spark
local = "127.0.0.1"
settings = {"spark.ui.enabled": "false", "spark.driver.host": local, "spark.driver.bindAddress": local}
builder = SparkSession.builder.master("local[2]").appName("test")
for name, value in settings.items():
    builder = builder.config(name, value)
session = builder.getOrCreate()
frame = session.createDataFrame(list(enumerate(said)), "id bigint, text string").repartition(4)
spark.answers(frame, folder).write.parquet(str(place / "answers"))
check([row.asDict() for row in session.read.parquet(str(place / "answers")).collect()])
faulty = session.createDataFrame([(1, "a cat"), (2, None)], "id bigint, text string")
rows = spark.answers(faulty, folder, on_error="null", top_k=2).orderBy("id").collect()
assert len(rows[0].labels) == 2
assert rows[1].labels is None
print(rows[1].error)
"""


@pytest.mark.skipif(not all(find_spec(name) for name in ("ray", "pandas")), reason="ray is not installed")
@pytest.mark.slow
def test_ray(folder: Callable[[str], Path], tmp_path: Path) -> None:
    told = run(CHECK + ON_RAY, folder("sequence_classification"), tmp_path)
    assert told.split() == ["CPU"]


@pytest.mark.skipif(not find_spec("pyspark") or not shutil.which("java"), reason="pyspark or Java is not installed")
@pytest.mark.slow
def test_spark(folder: Callable[[str], Path], tmp_path: Path) -> None:
    told = run(CHECK + ON_SPARK, folder("sequence_classification"), tmp_path)
    assert "column 'text': found null, expected a text" in told
