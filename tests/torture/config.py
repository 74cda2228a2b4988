"""Suite ``config``: one ``config.json`` of each family with values, keys or bytes changed.

A load is right where the scores are those of the undamaged folder. Where they are others, the file must validly say
so: `tests.torture.reference_fp64` computes what it says, and where that knows no answer, only fields that are known to
change an encoder without changing its tensors may have changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from tests.torture.case import Case, Fault, Kind, Verdict, dealt, right, silent, stated
from tests.torture.checkpoints import LABELS, checkpoint, tensors_in, write_files
from tests.torture.comparing import IDS, Seen, same_as, seen, undamaged
from tests.torture.damage import (
    BYTE_DAMAGE,
    ENTRIES,
    ESCAPES,
    NUMBERS,
    RAW,
    VALUES,
    damaged_bytes,
    edited,
    put_entry,
    spelled,
)
from tests.torture.judging import judge
from tests.torture.reference_fp64 import plain_scores
from tests.torture.watch import CANARY

__all__ = ["NAME", "cases", "prepare", "run"]

NAME = "config"
FILE = "config.json"
HEAD = "sequence_classification"
FILES = (FILE, "model.safetensors")
FAMILIES = ("bert", "roberta", "distilbert", "albert", "deberta-v2", "xlm-roberta", "camembert")

# What a refusal may name instead of the key: the tensors that do not fit it, or where in the text the fault lies.
OTHERWISE = ("weight", "bias", "line 1", "larger than")
# Fields that change what DeBERTa computes from the same tensors; the others have their second opinion.
_COMPUTES_OTHERWISE = (
    "layer_norm_eps", "hidden_act", "num_attention_heads", "max_relative_positions", "position_buckets",
    "relative_attention", "pos_att_type", "share_att_key", "norm_rel_ebd", "pooler_hidden_act", "conv_act",
    "max_position_embeddings", "position_biased_input",
)  # fmt: skip
_WORDS = ("relu", "gelu_new", "silu", "tanh", "gelu", "regression", "multi_label_classification", "absolute", "eager")


@cache
def files(family: str) -> Mapping[str, bytes]:
    """Return the folder of a family; without a tokenizer, which has a suite of its own."""
    made = checkpoint(family, HEAD)
    return {name: made[name] for name in FILES}


@cache
def settings(family: str) -> dict[str, Any]:
    """Return its configuration."""
    return json.loads(files(family)[FILE])


@cache
def _keys(family: str) -> tuple[str, ...]:
    """Return the keys that are changed: the file's, the family's, other families', and those of everyone."""
    from flodl_hf.families import families
    from flodl_hf.families.schema.shared_keys import COMMON_IGNORED_KEYS, FOREIGN

    own = next(known for known in families() if known.model_type == family)
    named = [*settings(family), *(name for row in own.rows for name in (row.key, *row.aliases))]
    others = [row.key for other in families() for row in other.rows]
    common = [entry.key for entry in (*COMMON_IGNORED_KEYS, *FOREIGN, *own.ignored_keys)]
    # What the file has counts three times: it is what somebody changes.
    return (*settings(family), *settings(family), *dict.fromkeys([*named, *others, *common]))


def _value(random: Random, family: str, key: str) -> Any:
    now = settings(family).get(key)
    near: list[Any] = []
    if isinstance(now, int) and not isinstance(now, bool):
        near = [now + 1, now - 1, now * 2, now // 2, -now, float(now), str(now), [now], now + 0.5, 10**6, 10**9]
    elif isinstance(now, float):
        near = [now * 2, now / 2, 1e-5, 1e-12, str(now), -now, 1.0, 0.5]
    elif isinstance(now, str):
        near = [now.upper(), now + "x", now[:-1], *_WORDS]
    elif isinstance(now, dict):
        near = [
            dict(list(now.items())[:-1]),
            {**now, "9": "x"},
            list(now.values()),
            {str(v): k for k, v in now.items()},
        ]
    elif isinstance(now, list):
        near = [[], now[0] if now else None, [*now, *now], ["BertModel"], ["EvilForCausalLM"]]
    return random.choice((*near, *near, *VALUES, *(f"{RAW}{number}" for number in NUMBERS), *_WORDS))


def _family(number: int) -> str:
    return FAMILIES[number % len(FAMILIES)]


# --- damage -----------------------------------------------------------------------------------------------------------


def _undamaged(_random: Random, number: int) -> Fault:
    return Fault({"family": _family(number), "set": []})


def _set(random: Random, number: int) -> Fault:
    family = _family(number)
    key = random.choice(_keys(family))
    return Fault({"family": family, "set": [[key, _value(random, family, key)]]}, FILES, (key, *OTHERWISE))


def _set_two(random: Random, number: int) -> Fault:
    family = _family(number)
    keys = random.sample(sorted(set(_keys(family))), 2)
    return Fault(
        {"family": family, "set": [[key, _value(random, family, key)] for key in keys]},
        FILES,
        (*keys, *OTHERWISE),
    )


def _without(random: Random, number: int) -> Fault:
    family = _family(number)
    key = random.choice(sorted(settings(family)))
    return Fault({"family": family, "drop": key}, FILES, (key, "architecture", *OTHERWISE))


def _misspelt(random: Random, number: int) -> Fault:
    family = _family(number)
    key = random.choice(sorted(settings(family)))
    at = random.randrange(len(key))
    wrong = random.choice(
        (key[:at] + key[at + 1 :], key[:at] + "x" + key[at:], key.upper(), key.replace("_", "-"), key + " ")
    )
    return Fault({"family": family, "drop": key, "set": [[random.choice(wrong), settings(family)[key]]]}, FILES)


def _strange_key(random: Random, number: int) -> Fault:
    family = _family(number)
    key = random.choice(
        (*ESCAPES, "", "x" * 10_000, "__class__", "from_pretrained", "to_dict", "self", "forward", "config")
    )
    value = random.choice((1, "x", {"a": 1}, None, [key], {key: {key: key}}))
    return Fault({"family": family, "set": [[key, value]]}, FILES)


def _code(random: Random, number: int) -> Fault:
    """Keys that name code, kernels, files or addresses."""
    family = _family(number)
    sets = (
        [["auto_map", {"AutoModelForSequenceClassification": "evil.Evil", "AutoConfig": "evil.Evil"}]],
        [["auto_map", {"AutoConfig": "evil.Evil"}], ["trust_remote_code", True]],
        [["auto_map", {"AutoModel": "other/repo--evil.Evil"}]],
        [["_attn_implementation", "evil/kernel"]],
        [["attn_implementation", "evil/kernel:attention"]],
        [["_attn_implementation_internal", "kernels-community/evil"]],
        [["kernel_config", {"attention": "evil/kernel"}]],
        [["trust_remote_code", True], ["auto_map", {"AutoTokenizer": ["evil.Evil", None]}]],
        [["quantization_config", {"quant_method": "bitsandbytes", "load_in_8bit": True}]],
        [["quantization_config", {"quant_method": "evil"}]],
        [["custom_pipelines", {"evil": {"impl": "evil.Evil", "pt": ["AutoModel"]}}]],
        [["_name_or_path", "../outside"]],
        [["adapter_path", "http://127.0.0.1:9/x"]],
        [["model_type", "evil"], ["auto_map", {"AutoConfig": "evil.Evil"}]],
        [["architectures", ["evil.Evil"]]],
        [["torch_dtype", "os.system"]],
        [["dtype", "__import__('os')"]],
        [["hidden_act", "evil.Evil"]],
        [["hidden_act", "__class__"]],
    )
    return Fault({"family": family, "set": sets[number // len(FAMILIES) % len(sets)], "evil": True}, FILES)


def _labels(random: Random, number: int) -> Fault:
    family = _family(number)
    names: Any = random.choice((
        {"0": "a", "2": "b", "7": "c"}, {"0": "a", "1": "a", "2": "a"}, {"0": None, "1": "b", "2": "c"},
        {"0": {"x": 1}, "1": "b", "2": "c"}, {"a": 0, "b": 1, "c": 2}, {"-1": "a", "0": "b", "1": "c"}, {"0": "a"},
        {str(i): str(i) for i in range(100_000)}, {"0": "</script>", "1": "\x1b[31m", "2": "\u202e"}, {}, ["a", "b"],
        {"00": "a", "01": "b", "02": "c"}, {"0": "a", "1": "b", "2": "\ud800"}, {"0": 1, "1": 2.5, "2": True},
        {"1e3": "a", "1": "b", "2": "c"}, {"9" * 500: "a", "1": "b"}, {"0": "a", "1": "b", "2": "c", " 2": "d"},
        {"0": "x" * 100_000, "1": "b", "2": "c"}, "abc", 3, {"\u0660": "a", "1": "b", "2": "c"},
    ))  # fmt: skip
    sets: list[list[Any]] = [["id2label", names]]
    if random.random() < 0.3:
        sets.append(["num_labels", random.choice((2, 3, 4, 0, -1, "3", 10**9))])
    if random.random() < 0.3:
        sets.append(["label2id", random.choice(({"a": 7}, {}, None, [], {"no": "x"}))])
    return Fault({"family": family, "set": sets}, FILES, ("id2label", "num_labels", "label2id", *OTHERWISE))


def _bytes(random: Random, number: int) -> Fault:
    family = _family(number)
    ways = ("flip", "flip", "put", "put", "cut")
    return Fault(
        {"family": family, **BYTE_DAMAGE[ways[number % len(ways)]](random, number, len(files(family)[FILE]))}, FILES
    )


TEXTS = (
    "", "{", "[]", "null", "1", '"x"', "{}", "[" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000, "\ufeff@", "@\0",
    "@ @", "@,", "// c\n@", "nul", "NaN", '{"model_type": "bert"}', "\x00\x00", '{"model_type": ["bert"]}',
    '{"model_type": "bert", "vocab_size": 1' + "0" * 5000 + "}", '{"model_type": null}',
    '{"model_type": "bert", "model_type": "roberta"}', '{"x": "' + "y" * 2_000_000 + '"}', " " * 3_000_000 + "{}",
    '{"a": [' + "1," * 400_000 + "1]}", "version https://git-lfs.github.com/spec/v1\noid x\n",
)  # fmt: skip


def _text(_random: Random, number: int) -> Fault:
    return Fault({"family": _family(number // len(TEXTS)), "text": number % len(TEXTS)}, FILES)


def _coded(random: Random, number: int) -> Fault:
    coding = ("utf-16", "utf-32", "latin-1", "utf-8-sig", "cp037", "utf-16-le")[number % 6]
    return Fault({"family": _family(number), "coding": coding}, FILES)


def _twice(random: Random, number: int) -> Fault:
    family = _family(number)
    key = random.choice(sorted(settings(family)))
    return Fault({"family": family, "twice": key, "value": _value(random, family, key)}, FILES)


def _entry(_random: Random, number: int) -> Fault:
    return Fault({"family": "bert", "entry": ENTRIES[number % len(ENTRIES)]}, FILES)


def _other_type(random: Random, number: int) -> Fault:
    """Weights of one family under the configuration of another."""
    family = _family(number)
    other = random.choice(
        [name for name in (*FAMILIES, "gpt2", "modernbert", "evil", "BERT", "bert ") if name != family]
    )
    return Fault({"family": family, "set": [["model_type", other]]}, FILES, ("model_type", other, *OTHERWISE))


KINDS = (
    Kind("undamaged", 1, _undamaged),
    Kind("value", 120, _set),
    Kind("two-values", 20, _set_two),
    Kind("absent", 8, _without),
    Kind("misspelt", 8, _misspelt),
    Kind("strange-key", 8, _strange_key),
    Kind("code", 10, _code),
    Kind("labels", 12, _labels),
    Kind("bytes", 40, _bytes),
    Kind("text", 4, _text),
    Kind("coding", 2, _coded),
    Kind("key-twice", 6, _twice),
    Kind("entry", 2, _entry, {"wall_s": 20.0}),
    Kind("other-type", 4, _other_type),
)

cases = partial(dealt, NAME, KINDS)


def prepare() -> None:
    """Make the checkpoints before workers are forked."""
    for family in FAMILIES:
        files(family)


# --- what is written, and what is right -------------------------------------------------------------------------------


def changed(what: Mapping[str, Any]) -> bytes:
    """Return the ``config.json`` of a case."""
    family = what["family"]
    data, value = files(family)[FILE], settings(family)
    if "how" in what:
        return damaged_bytes(data, what)
    if "text" in what:
        return TEXTS[what["text"]].replace("@", data.decode()).encode()
    if "coding" in what:
        return data.decode().encode(what["coding"])
    if "twice" in what:
        end = spelled({what["twice"]: what["value"]})
        return data.rstrip()[:-1] + b", " + end.encode("utf-8", "surrogatepass")[1:]
    if "drop" in what:
        value = edited(value, (what["drop"],), None, remove=True)
    for key, new in what.get("set", ()):
        value = edited(value, (key,), new)
    return spelled(value).encode("utf-8", "surrogatepass")


EVIL = f"""
import os, pathlib
pathlib.Path({CANARY!r}).touch()
pathlib.Path(__file__).resolve().parents[1].joinpath({CANARY!r}).touch()
class Evil:
    def __init__(self, *a, **k): pass
""".encode()


def run(case: Case, folder: Path) -> Verdict:
    """Load what the case damaged, and compare with what is right."""
    what = case.what
    family = what["family"]
    clean = undamaged(folder.parent, f"config-{family}", files(family), HEAD)
    data = files(family)[FILE] if "entry" in what else changed(what)
    write_files(folder, {**files(family), FILE: data, **({"evil.py": EVIL} if "evil" in what else {})})
    if "entry" in what:
        put_entry(folder, FILE, what["entry"])
    return judge(case, lambda: seen(folder, HEAD), lambda found: _right(case, data, found, clean))


def _right(case: Case, data: bytes, found: Seen, clean: Seen) -> Verdict:
    what = case.what
    try:
        source = json.loads(data)
    except (ValueError, RecursionError):
        source = None
    labels = _labels_of(found.model)
    if not isinstance(source, dict) or source.get("id2label") == settings(what["family"]).get("id2label"):
        expected: Mapping[int, str] | None = dict(enumerate(LABELS))
    else:
        expected = _plain_labels(source)
    if expected is not None and any(labels.get(number) != name for number, name in expected.items()):
        return silent(f"labels are {list(labels.items())[:5]}")
    if same_as(found, clean) is not None:
        return right()
    if not isinstance(source, dict):
        return silent("scores are others, and the file is no configuration")
    plain = plain_scores(source, tensors_in(files(what["family"])["model.safetensors"]), IDS)
    scores = found.scores.double()
    if plain is not None and scores.shape == plain.shape and torch.allclose(scores, plain, atol=1e-4):
        return stated("as a second computation of the file's words")
    if plain is None and what["family"] == source.get("model_type") == "deberta-v2":
        now = settings("deberta-v2")
        differing = {key for key in {**source, **now} if source.get(key) != now.get(key)}
        if differing & set(_COMPUTES_OTHERWISE) and bool(torch.isfinite(scores).all()):
            return stated("a setting of the arithmetic that holds for the same tensors")
    return silent("scores are others")


def _labels_of(model: Any) -> dict[int, str]:
    config = getattr(model, "model", model).config
    return {int(number): str(name) for number, name in config.id2label.items()}


def _plain_labels(source: Mapping[str, Any]) -> dict[int, str] | None:
    """Return what ``id2label`` says where it is plain texts by plain numbers that agree with everything else."""
    names = source.get("id2label")
    if not isinstance(names, dict) or "num_labels" in source:
        return None
    if not all(isinstance(name, str) and number.isascii() and number.isdigit() for number, name in names.items()):
        return None
    # transformers counts the names; those of larger numbers are no label's, which a warning says
    return {int(number): name for number, name in names.items() if int(number) < len(names)}
