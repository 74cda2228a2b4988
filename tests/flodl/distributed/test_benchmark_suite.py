"""The networks, data and baseline of the benchmarks are what they say."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from urllib.error import URLError

import pytest
import torch

pytest.importorskip("benchmarks.ddp")

from benchmarks.ddp import baseline, fetch, models
from benchmarks.ddp.builtin import parse_mnist
from benchmarks.ddp.cases import CASES
from benchmarks.ddp.data import photographs, text
from benchmarks.ddp.fetch import CIFAR, FILES, Source
from flodl.errors import DataError

ROOT = Path(__file__).parents[3]


class Text:
    vocabulary = "x" * 65


# As published: He et al. 2015 (with projections), a perceptron, LeNet-5 with norms, four blocks of 128.
COUNTS = {
    "logistic": 7850, "mlp": 203_530, "lenet": 44_470, "conv-ae": 9569, "char-rnn": 946_625,
    "gpt-nano": 826_433, "resnet": 272_474, "resnet-graph": 272_474,
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_counted(name):
    model = CASES[name].make(Text())
    assert sum(p.numel() for p in model.parameters()) == COUNTS[name]


def test_the_graph_of_resnet_is_the_one_by_hand():
    hand, graph = models.resnet(None), models.resnet_graph(None)
    by_shape = {}
    state = hand.state_dict()
    # Blocks are stored module by module by hand and in the order of the chain in the graph.
    order = [name for name in state if name.startswith("stem")]
    for number in range(9):
        order += [n for part in ("across", "inside") for n in state if n.startswith(f"{part}.{number}.")]
    order += [name for name in state if name.startswith("last")]
    for (name, value), source in zip(graph.state_dict().items(), order, strict=True):
        assert value.shape == state[source].shape, (name, source)
        by_shape[name] = state[source]
    graph.load_state_dict(by_shape)
    image = torch.randn(4, 3, 32, 32)
    for mode in (True, False):
        assert torch.equal(hand.train(mode)(image), graph.train(mode)(image))


def mirror(image, flip):
    return image.flip(-1) if flip else image


def test_images_move_each_on_its_own():
    image = torch.arange(1, 6 * 3 * 8 * 8 + 1.0).view(6, 3, 8, 8)
    torch.manual_seed(3)
    found = models.changed(image, pad=2)
    padded = torch.nn.functional.pad(image, (2, 2, 2, 2))
    places = []
    for one, given in zip(found, padded, strict=True):
        parts = {(top, left): given[:, top : top + 8, left : left + 8] for top in range(5) for left in range(5)}
        fits = [(*at, flip) for at, part in parts.items() for flip in (0, 1) if torch.equal(one, mirror(part, flip))]
        assert len(fits) == 1
        places += fits
    assert len(set(places)) > 3


def test_rates_fall_when_they_should():
    down = CASES["resnet"].rates(200)
    assert [round(down.lr(step), 6) for step in (0, 99, 100, 149, 150, 199)] == [0.1, 0.1, 0.01, 0.01, 0.001, 0.001]
    rise = CASES["gpt-nano"].rates(100)
    assert rise.lr(19) == pytest.approx(3e-4)
    assert rise.lr(0) < rise.lr(10) > rise.lr(99)
    assert rise.lr(100) == pytest.approx(1e-5)


# ---- data ----------------------------------------------------------------------------------------------------


def archive(parts: dict[str, bytes]) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as file:
        for name, data in parts.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            file.addfile(entry, io.BytesIO(data))
    return held.getvalue()


def source(data: bytes, place: str, members: tuple[str, ...] = ()) -> Source:
    return Source(f"https://example.org/{place}", place, len(data), hashlib.sha256(data).hexdigest(), members)


def test_files_are_fetched_and_held_to_their_checksums(tmp_path):
    plain = b"to be or not to be"
    packed = archive({"a/one.bin": b"1" * 9, "../../two.bin": b"2" * 9, "a/notes.html": b"<p>"})
    wanted = [source(plain, "text/input.txt"), source(packed, "cifar", ("one.bin", "two.bin"))]
    asked = []

    def web(url, timeout):
        asked.append(url)
        return io.BytesIO(plain if url.endswith("txt") else packed)

    assert "input.txt" in fetch.missing(tmp_path, wanted)
    assert fetch.fetch(tmp_path, wanted, open_url=web) == []
    assert (tmp_path / "text" / "input.txt").read_bytes() == plain
    assert sorted(p.name for p in (tmp_path / "cifar").iterdir()) == ["one.bin", "two.bin"], "and nothing elsewhere"
    assert fetch.missing(tmp_path, wanted) == ""
    assert fetch.fetch(tmp_path, wanted[:1], open_url=web) == []
    assert len(asked) == 2, "what is there is not fetched again"
    (tmp_path / "text" / "input.txt").write_bytes(b"to be")
    (fault,) = fetch.fetch(tmp_path, wanted[:1], open_url=web)
    assert "expected " + wanted[0].sha256 in fault


@pytest.mark.parametrize(
    ("data", "word"), [(b"other", "5 bytes"), (b"to be or not to bx", "SHA-256"), (None, "no route")]
)
def test_what_is_not_the_file_is_not_kept(tmp_path, data, word):
    def web(url, timeout):
        if data is None:
            raise URLError("no route")
        return io.BytesIO(data)

    one = source(b"to be or not to be", "text/input.txt")
    (fault,) = fetch.fetch(tmp_path, [one], open_url=web)
    assert word in fault
    assert not list(tmp_path.rglob("*.txt"))
    assert one.sha256 in fetch.missing(tmp_path, [one]), "what to put where"


def test_without_a_network_the_command_says_what_to_put_where(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fetch, "_read", lambda source, open_url: (_ for _ in ()).throw(URLError("unreachable")))
    assert fetch.main(["--data", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    for one in FILES:
        assert one.url in said
        assert one.sha256 in said
    assert "made-up data" in said


def test_real_photographs_where_the_files_are_and_made_up_ones_where_not(tmp_path, capsys):
    train, held = photographs(tmp_path)
    assert (len(train), len(held)) == (512, 128)
    assert str(tmp_path / CIFAR.place) in capsys.readouterr().out
    record = bytes([3]) + bytes(range(256)) * 12
    for path in CIFAR.wanted(tmp_path):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(record * 2)
    train, held = photographs(tmp_path)
    assert (len(train), len(held)) == (10, 2)
    assert train.get_batch(range(2))["label"].tolist() == [3, 3]
    assert capsys.readouterr().out == ""
    assert len(text(tmp_path)[0].vocabulary) == 28


def test_mnist_files_become_images_and_labels(tmp_path):
    pixels = bytes(k % 256 for k in range(3 * 784))
    images = (2051).to_bytes(4, "big") + b"".join(n.to_bytes(4, "big") for n in (3, 28, 28)) + pixels
    labels = (2049).to_bytes(4, "big") + (3).to_bytes(4, "big") + bytes([7, 0, 9])
    image, label = parse_mnist(gzip.compress(images), labels)
    assert image.shape == (3, 1, 28, 28)
    assert image.flatten().tolist() == list(pixels)
    assert label.tolist() == [7, 0, 9]
    with pytest.raises(DataError):
        parse_mnist(labels, images)


# ---- the baseline ------------------------------------------------------------------------------------------------


def row(model: str, loss: float) -> dict:
    return {"model": model, "mode": "solo", "rows": 512, "epochs": 1, "batch": 64, "loss": (loss, 0.0)}


def test_losses_are_held_to_a_baseline(tmp_path):
    file = tmp_path / "baseline.json"
    baseline.save(file, [row("a", 1.0), row("b", 2.0)])
    baseline.save(file, [row("b", 2.5)])
    known = baseline.read(file)
    assert list(known.values()) == [1.0, 2.5]
    assert baseline.compare([row("a", 1.14), row("b", 2.2)], known, 0.15) == ([], [])
    far, strange = baseline.compare([row("a", float("nan")), row("b", 3.0), row("c", 1.0)], known, 0.15)
    assert [line.split(",")[0] for line in far] == ["a", "b"]
    assert [line.split(",")[0] for line in strange] == ["c"]
    assert baseline.read(tmp_path / "none.json") == {}
    assert {name.split(",")[0] for name in baseline.read(baseline.BASELINE)} == set(CASES)


def test_the_command_holds_its_runs_to_the_baseline(tmp_path):
    known = baseline.read(baseline.BASELINE)
    (tmp_path / "other.json").write_text(json.dumps({name: 2 * loss for name, loss in known.items()}))
    command = [sys.executable, "-m", "benchmarks.ddp", "--quick", "--device", "cpu", "--models", "logistic"]
    command += ["--baseline", str(tmp_path / "other.json"), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 1, done.stderr
    assert "FAR FROM THE BASELINE  logistic" in done.stdout
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["modes"]
    assert [row["mode"] for row in rows] == ["solo"]
    assert baseline.compare(rows, known, 0.01) == ([], []), "the one that is kept is of this code"


def test_a_row_of_the_ten_models_says_how_it_was_measured(tmp_path, capsys):
    from benchmarks import ten_models

    given = ["--models", "feedback_fixed", "--rounds", "3", "--batches", "1", "--device", "cpu"]
    assert ten_models.main([*given, "--json", str(tmp_path / "x.json")]) == 0
    record = json.loads((tmp_path / "x.json").read_text())
    (row,) = record["models"]
    about = {"name": "feedback_fixed", "device": "cpu", "param_count": 790_016, "batch_size": 128}
    about |= {"batches_per_epoch": 1, "warmup_epochs": 3, "measured_epochs": 3}
    assert {key: row[key] for key in about} == about
    assert row["rss_mb"] > 50
    for who in ("users", "recorded", "ours"):
        times = row[who]["all"]
        assert len(times) == 3
        assert (row[who]["min_ms"], row[who]["ms"], row[who]["max_ms"]) == tuple(sorted(times))
        assert row[who]["mean_ms"] == pytest.approx(sum(times) / 3)
        apart = sorted(abs(time - row[who]["ms"]) for time in times)
        assert row[who]["sigma"] == pytest.approx(1.4826 * apart[1])
        assert row[who]["loss"] == pytest.approx(row["users"]["loss"], rel=1e-3)
    assert row["ours"]["peak_mb"] == row["ours"]["reserved_mb"] == 0
    assert "feedback_fixed" in capsys.readouterr().out
