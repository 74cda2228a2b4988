"""Options of a fine-tuning run: types, defaults, descriptions and valid values in one table.

``finetune``, the command line, recipe files and the model card use this table.
It checks single values; checks that need the data or the model are made where they are used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, Unpack, get_args, get_type_hints

from flodl.errors import ConfigError, capped, nearest
from flodl_hf.models.adapters.settings import Prompt, Settings, adapter_mapping, plain_rank, read_adapter
from flodl_hf.training.training_arguments import TAKEN, TrainerWords, translated

BATCH_SIZE = 32
"""Default number of rows in a batch."""
SCHEDULES: dict[str, dict[str, type]] = {
    "linear": {},
    "cosine": {"cycles": float, "floor": float, "end": float},
    "cosine_with_restarts": {"cycles": float},
    "polynomial": {"power": float, "end": float},
    "inverse_sqrt": {"timescale": int},
    "warmup_stable_decay": {
        "decay": float,
        "stable": int,
        "rise": str,
        "fall": str,
        "floor": float,
        "cycles": float,
    },
    "constant": {},
    "one_cycle": {"divisor": float},
    "plateau": {"patience": int, "factor": float, "floor": float},
}
"""Schedules with their ``schedule_options``; `flodl_hf.training.job.make_schedule` creates them."""
TRACKERS = ("csv", "jsonl", "mlflow", "tensorboard", "wandb")
"""Names of `flodl.train.trackers`, which is imported when a run starts."""


class Option:
    """Default, description and valid values of an option.

    Args:
        default: the default value.
        text: one sentence for the help.
        cli: whether the command line has a flag; ``--set name=value`` sets all options.
        **checks: valid values, see `checked`.
    """

    def __init__(self, default: Any, text: str, cli: bool = True, **checks: Any) -> None:
        self.default, self.metadata = default, {"help": text, "cli": cli, **checks}


# fmt: off
class DataOptions(TypedDict, total=False):
    """Options that concern data and evaluation, of `flodl_hf.finetune` and `flodl_hf.evaluate`."""

    task: Annotated[str | None, Option(None, "seqcls, tokcls (ner), qa, mlm, choice, nsp, pretrain, replaced, "
        "embedding, sparse, multivector or rank; by default inferred from the columns.")]
    columns: Annotated[Mapping[str, str] | None, Option(None, "Columns by role: text=headline.")]
    problem_type: Annotated[str | None, Option(None, "regression, single_label_classification or "
        "multi_label_classification; by default inferred from the labels.",
        among=("regression", "single_label_classification", "multi_label_classification"))]
    max_length: Annotated[int | None, Option(None, "Maximum number of tokens per row; by default the limit of the "
        "model.", least=4)]
    stride: Annotated[int | None, Option(None, "Tokens shared by neighbouring windows of a long text (seqcls 0, tokcls "
        "64, qa 128).", least=0)]
    long_texts: Annotated[str, Option("truncate", "seqcls: truncate texts that are longer than a row, read them in "
        "windows, each trained with the label and evaluated by their mean, or raise an error.",
        among=("windows", "truncate", "error"))]
    batch_size: Annotated[int | None, Option(None, "Rows in a batch, over all devices together; by default 32, or 16, "
        "8 or 4 if a run for classification or question answering would have too few steps.", least=1)]
    layout: Annotated[str, Option("auto", "padded, or packed (concatenated rows without padding); auto packs on CUDA "
        "in bf16 and fp16.", among=("auto", "padded", "packed"))]
    precision: Annotated[str, Option("fp32", "fp32, tf32, bf16 or fp16.", among=("fp32", "tf32", "bf16", "fp16"))]
    attention: Annotated[str, Option("sdpa", "sdpa or eager.", among=("sdpa", "eager"), cli=False)]
    seed: Annotated[int, Option(42, "Seed of new weights, data order, dropout and masking.")]
    concatenate: Annotated[bool, Option(False, "mlm: concatenate lines with separators into full rows.")]
    whole_words: Annotated[bool, Option(False, "mlm, pretrain, generator: mask whole words.")]
    mask_probability: Annotated[float, Option(0.15, "mlm, pretrain: share of the tokens that are masked; replaced: "
        "that are replaced.", least=0.0, most=1.0)]
    vector_loss: Annotated[Any, Option(None, "embedding, sparse, multivector, rank: the loss, by "
        "sentence-transformers' name (MultipleNegativesRankingLoss, CoSENTLoss, LambdaLoss, ...), or a mapping of "
        "tables to losses; the default depends on the columns.")]
    loss_options: Annotated[Mapping[str, Any] | None, Option(None, "embedding, sparse, multivector, rank: settings of "
        "the loss: scale=50, margin=0.2, directions=query_to_doc.")]
    matryoshka: Annotated[Sequence[str], Option((), "embedding: sizes of truncated vectors; the loss is the sum over "
        "all sizes.")]
    pooling: Annotated[str | None, Option(None, "embedding: mean, cls, max, ... or several (mean+max); by default that "
        "of the folder, else mean.")]
    normalize: Annotated[bool | None, Option(None, "embedding: scale vectors to length 1; by default as in the folder, "
        "else yes.")]
    revision: Annotated[str | None, Option(None, "Branch, tag or commit of the model on the Hub.")]
    local_files_only: Annotated[bool, Option(False, "Do not connect to the Hub.")]


class FinetuneOptions(DataOptions, total=False):
    """Options of `flodl_hf.finetune`, of recipes and of the command line."""

    labels: Annotated[Sequence[str] | None, Option(None, "Label names in order; by default the labels of the data.")]
    new_head: Annotated[bool | None, Option(None, "Initialise a new head; by default if the label names or their order "
        "differ from those of the model; no keeps the old head with the new names.", cli=False)]

    epochs: Annotated[int, Option(3, "Number of epochs.", least=1)]
    max_steps: Annotated[int | None, Option(None, "Maximum number of optimiser steps.", least=1)]
    accumulate: Annotated[int, Option(1, "Gradient accumulation: batches per optimiser step.", least=1)]
    micro_batch_size: Annotated[int | str | None, Option(None, "Maximum rows per forward pass, or auto for as many as "
        "fit; changes only the memory.", least=1, words=("auto",))]
    tokens_per_batch: Annotated[int | None, Option(None, "Maximum number of tokens per batch, instead of a number of "
        "rows.", least=1)]
    group_by_length: Annotated[bool | None, Option(None, "Group rows of similar length, which saves padding; by "
        "default if rows are padded and an epoch has at least 256 batches.", cli=False)]

    lr: Annotated[float, Option(5e-5, "Highest learning rate.", least=0.0)]
    schedule: Annotated[Any, Option("linear", "linear, cosine, cosine_with_restarts, polynomial, inverse_sqrt, "
        "warmup_stable_decay, constant, one_cycle or plateau.")]
    schedule_options: Annotated[Mapping[str, Any] | None, Option(None, "Options of the schedule, such as power=2 "
        "(polynomial) or decay=0.2 (warmup_stable_decay).")]
    warmup: Annotated[float, Option(0.0, "Warmup steps; below 1, a share of all steps.", least=0.0)]
    optimizer: Annotated[str, Option("adamw", "adamw or sgd.", among=("adamw", "sgd"))]
    weight_decay: Annotated[float, Option(0.0, "Weight decay, not applied to biases and norms.", least=0.0)]
    beta1: Annotated[float, Option(0.9, "AdamW's decay of the mean; SGD's momentum.", least=0.0, most=1.0, cli=False)]
    beta2: Annotated[float, Option(0.999, "AdamW's decay of the variance.", least=0.0, most=1.0, cli=False)]
    eps: Annotated[float, Option(1e-8, "AdamW's epsilon.", least=0.0, cli=False)]
    max_grad_norm: Annotated[float | None, Option(1.0, "Clip the gradient to this 2-norm; 0 does not clip.", least=0.0)]
    layerwise_decay: Annotated[float | None, Option(None, "Factor of the learning rate from each layer to the layer "
        "below.", least=0.0, most=1.0)]
    freeze: Annotated[Sequence[str], Option((), "Parts of the base model that are not trained: embeddings, layers.0-5, "
        "encoder.")]
    class_weights: Annotated[Any, Option(None, "Weights of the labels in the loss, as a mapping or in order, or "
        "'balanced'.")]
    label_smoothing: Annotated[float, Option(0.0, "Share of the target that is spread over all labels.",
        least=0.0, most=1.0)]
    dropout: Annotated[float | None, Option(None, "Dropout probability of all layers; by default that in the config.",
        least=0.0, most=0.99, cli=False)]

    lora: Annotated[int | None, Option(None, "Train a LoRA adapter of this rank and the head; all other weights are "
        "frozen.", least=1)]
    adapter: Annotated[Settings | Mapping[str, Any] | None, Option(None, "The adapter to train: Lora, IA3, Prompt or "
        "Prefix, or a mapping {type: lora, rank: 8, alpha: 16}.", cli=False)]

    neftune: Annotated[float | None, Option(None, "Noise on word embeddings in training, alpha of arXiv:2310.05914 (5 "
        "is usual).", least=0.0)]
    ema: Annotated[float | None, Option(None, "Evaluate and keep a moving average of the weights with this decay "
        "(0.999).", least=0.0, most=1.0)]

    gradient_checkpointing: Annotated[bool, Option(False, "Recompute layers in the backward pass to save memory.")]
    deterministic: Annotated[bool, Option(False, "Use deterministic kernels only.", cli=False)]
    compile: Annotated[bool, Option(False, "Compile the model with torch.compile before training.")]
    on_nan: Annotated[str, Option("stop", "stop or skip if the loss or gradient is not finite.",
        among=("stop", "skip"), cli=False)]
    compat: Annotated[str | None, Option(None, "transformers: compute the losses of its Trainer: gradients of "
        "accumulated batches are added without division, and the loss of answers includes padding.",
        among=("transformers",), cli=False)]

    eval_every: Annotated[int | None, Option(None, "Steps between evaluations; default: after each epoch. The last "
        "model is always evaluated.", least=1)]
    eval_batch_size: Annotated[int | None, Option(None, "Rows per evaluation batch; by default batch_size if given, "
        "else 32.", least=1, cli=False)]
    metric: Annotated[str | None, Option(None, "Metric that selects the best model; '-name' if lower is better.")]
    keep_best: Annotated[bool, Option(True, "Keep the best model instead of the last.")]
    tune_thresholds: Annotated[bool, Option(False, "Choose decision thresholds (of each label, or of the second label "
        "of two) on the evaluation data; the model stores them for predict(threshold='tuned').")]
    early_stopping: Annotated[int | None, Option(None, "Stop after this number of evaluations without improvement.",
        least=1)]

    generator: Annotated[str | Path | None, Option(None, "replaced: folder or name of a masked language model that is "
        "trained jointly and samples the replacements (as ELECTRA); by default they are drawn from the vocabulary.")]

    guide: Annotated[str | Path | None, Option(None, "embedding: folder or name of a second model: the guide of "
        "GISTEmbedLoss, the teacher of MSELoss.")]
    prompts: Annotated[Any, Option(None, "embedding, sparse: a text before each text of the loss, or a mapping of "
        "columns to such texts. Metrics use the prompts of the folder, as sentence-transformers does.")]
    projection: Annotated[Mapping[str, Any] | None, Option(None, "multivector: settings of a new projection: size=128, "
        "query_length=32, document_length=180, query_marker, document_marker, expanded=yes, attended=no, "
        "punctuation=no (documents have no vectors of them).", cli=False)]
    no_duplicates: Annotated[bool, Option(True, "embedding: exclude repeated texts from a batch with in-batch "
        "negatives.", cli=False)]
    mixing: Annotated[str, Option("proportional", "embedding: sample batches of several tables in proportion to their "
        "rows, or alternate until one table ends.", among=("proportional", "round_robin"), cli=False)]
    cache_tokens: Annotated[int | None, Option(None, "embedding: maximum tokens per forward pass; a batch is processed "
        "in parts, twice, with the same step, so that memory limits only the vectors (gradient caching).",
        least=16, cli=False)]

    trackers: Annotated[Sequence[str], Option((), "Trackers of metrics: csv, jsonl, tensorboard, wandb, mlflow.",
        each=TRACKERS)]
    log_dir: Annotated[str | Path | None, Option(None, "Folder of trackers; by default next to the result.", cli=False)]
    profile: Annotated[str | Path | None, Option(None, "Folder for traces of torch.profiler over some steps.",
        cli=False)]
    report: Annotated[bool, Option(True, "Write report.html into the result: curves, and predictions for the "
        "evaluation data.")]

    save_every: Annotated[int | None, Option(None, "Steps between checkpoints, in addition to one per epoch.",
        least=1, cli=False)]
    checkpoints: Annotated[str | Path | None, Option(None, "Folder of checkpoints; by default next to the result.")]
    keep_last: Annotated[int, Option(1, "Number of newest checkpoints to keep, in addition to the best one.", least=1)]
    keep_checkpoints: Annotated[bool, Option(False, "Keep the checkpoints at the end of the run.", cli=False)]
    resume: Annotated[bool | Sequence[str], Option(False, "Resume an interrupted run from its checkpoints; True, or "
        "names of settings that may differ from the checkpoint.")]

    devices: Annotated[Any, Option(None, "Number or names of devices (cpu,cpu), or auto for all; not needed under "
        "torchrun.")]
    policy: Annotated[str | None, Option(None, "sync, cadence or async; default: sync, or cadence where device names "
        "differ.", among=("sync", "cadence", "async"))]
    shard: Annotated[str | None, Option(None, "fsdp: shard weights, gradients and optimiser state over the devices.",
        among=("fsdp",))]
# fmt: on


class FinetuneWords(FinetuneOptions, TrainerWords, total=False):
    """Options of `flodl_hf.finetune` with the names of transformers that it accepts."""


class FinetuneArguments(FinetuneWords, total=False):
    """All keywords of `flodl_hf.finetune`, which `dry_run` and `find_lr` accept too."""

    train: Any
    eval: Any
    out: str | Path | None
    overwrite: bool
    on_event: Callable[[Any], Any] | None
    progress: bool | None
    monitor: Any
    loss: Callable[..., Any] | str | None
    metrics: Any
    callbacks: Sequence[Any]


class EvaluateOptions(DataOptions, total=False):
    """Options of `flodl_hf.evaluate`."""

    loss: str | None


class _Values:
    """Values that follow from several options."""

    devices: Any
    batch_size: int | None
    compat: str | None

    @cached_property
    def places(self) -> int | str | list[str] | None:
        """The training devices of this machine; None leaves the choice to the launcher.

        Raises:
            DeviceError: a device is missing.
        """
        # With torch, which naming options does without.
        from flodl.devices import training_devices

        return training_devices(self.devices)

    @property
    def masks_padding(self) -> bool:
        """Whether the loss of answers excludes padding."""
        return self.compat is None

    @property
    def rows_in_batch(self) -> int:
        """The batch size; 32 if it is not set yet."""
        return self.batch_size or BATCH_SIZE

    @property
    def ranks(self) -> int:
        """Number of processes that share a batch."""
        places = self.places
        if places is None or isinstance(places, str):  # one device of each process that a launcher started
            return max(1, int(os.environ.get("WORLD_SIZE", "1")))
        return places if isinstance(places, int) else len(places)

    def to_dict(self) -> dict[str, Any]:
        """Return the options as a mapping, as JSON values where possible."""
        values = {f.name: _plain(getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]
        return values | {"adapter": None if values["lora"] else _plain(adapter_mapping(values["adapter"]))}


HINTS: dict[str, Any] = {
    name: get_args(hint) for name, hint in get_type_hints(FinetuneOptions, include_extras=True).items()
}
"""Type and `Option` of each option."""

if TYPE_CHECKING:

    @dataclass(frozen=True)
    class Options(_Values):
        """Options of one run; the fields are those of `FinetuneOptions`."""

        def __init__(self, **options: Unpack[FinetuneOptions]) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

else:
    Options = make_dataclass(
        "Options",
        [(name, hint, field(default=row.default, metadata=row.metadata)) for name, (hint, row) in HINTS.items()],
        bases=(_Values,),
        frozen=True,
        kw_only=True,
    )
    Options.__module__ = __name__
    Options.__doc__ = "Options of one run; the fields are those of `FinetuneOptions`."


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def make_options(values: Mapping[str, Any], source: str = "finetune") -> Options:
    """Return the options that ``values`` contains, with defaults for the rest.

    Names of transformers with an equal meaning are accepted (`flodl_hf.training.training_arguments`).

    Raises:
        ConfigError: names that are no options, or invalid values; ``problems`` lists all of them.
    """
    options, problems = read_options(values)
    if problems:
        raise ConfigError(f"{source}: invalid options:\n{capped(problems)}", problems=problems, where=source)
    return options


def read_options(arguments: Mapping[str, Any]) -> tuple[Options, list[str]]:
    """Return the valid options of ``arguments``, with defaults for the rest, and all problems, each with its option."""
    values: dict[str, Any] = {}
    arguments, problems = translated(arguments, HINTS)
    for name, value in arguments.items():
        if name not in HINTS:
            problems.append(f"{name}: no such option{nearest(name, [*HINTS, *TAKEN])}")
        elif name != "adapter":
            try:
                values[name] = checked(value, HINTS[name][0], HINTS[name][1].metadata)
            except ValueError as fault:
                problems.append(f"{name}: {fault}")
    values["adapter"], faults = read_adapter({**arguments, "lora": values.get("lora")})
    values["lora"] = plain_rank(values["adapter"])
    options, invalid = Options(**values), [name for name in arguments if name in HINTS and name not in values]
    curve, wrong = schedule_values(options)
    if curve and not wrong:
        options = replace(options, schedule_options=curve)
    # What depends on an invalid value is not known.
    faults += wrong + combination_faults(options)
    return options, problems + [p for p in faults if not any(re.search(rf"\b{name}\b", p) for name in invalid)]


def checked(value: Any, hint: Any, checks: Mapping[str, Any]) -> Any:
    """Return a value in the type of its option.

    Args:
        value: the value that was given.
        hint: the type annotation of the option.
        checks: the metadata of the option's field.

    Raises:
        ValueError: the value is of another type, or out of range.
    """
    kinds = get_args(hint) or (hint,)
    if value in checks.get("words", ()) or (value is None and (type(None) in kinds or hint is Any)):
        return value
    value = os.fspath(value) if Path in kinds and isinstance(value, os.PathLike) else value
    expected = ""
    if value is None:
        expected = "a value"
    elif hint in (Sequence[str], Sequence[str] | None, bool | Sequence[str]) and not isinstance(value, bool):
        texts = (value,) if isinstance(value, str) else value
        if isinstance(texts, Sequence) and all(isinstance(text, (str, int)) for text in texts):
            value = tuple(map(str, texts))
        else:
            expected = "a list of texts"
    elif hint in (Mapping[str, str] | None, Mapping[str, Any] | None):
        expected = "" if isinstance(value, Mapping) else "a map of names to values"
    elif bool in kinds:
        expected = "" if isinstance(value, bool) else "true or false"
    elif float in kinds or int in kinds:
        value = _number(value, float in kinds)
        low, high = checks.get("least", float("-inf")), checks.get("most", float("inf"))
        if not low <= value <= high:
            expected = f"{low} {f'to {high}' if high < float('inf') else 'or more'}"
    elif str in kinds and not isinstance(value, str):
        expected = "a text"
    if expected:
        raise ValueError(f"found {'nothing' if value is None else repr(value)}; expected {expected}")
    parts: Any = value if "each" in checks else ()
    strange = [part for part in parts if part not in checks["each"]]
    if strange:
        raise ValueError(f"found {', '.join(map(repr, strange))}; expected some of {', '.join(checks['each'])}")
    among = checks.get("among")
    if among and value not in among:
        raise ValueError(f"found {value!r}{nearest(str(value), among)}; expected one of {', '.join(among)}")
    return value


def _number(value: Any, fraction: bool) -> int | float:
    if isinstance(value, str):
        # YAML 1.1 reads 5e-5 as a text.
        with suppress(ValueError):
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise ValueError(f"found {value!r}; expected a number")
    if not fraction and int(value) != value:
        raise ValueError(f"found {value!r}; expected an integer")
    return float(value) if fraction else int(value)


def schedule_values(options: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the options of the schedule of a run as numbers and texts, and the problems of the schedule."""
    schedule, given = options.schedule, options.schedule_options or {}
    if not isinstance(schedule, str):
        if not hasattr(schedule, "lr"):
            return {}, [f"schedule: found {type(schedule).__name__}; expected a name, or an object with lr(step)"]
        wrong = ["schedule_options: found a schedule object; expected none, or the name of a schedule"]
        return {}, wrong if given else []
    known, values, problems = SCHEDULES.get(schedule), {}, []
    if known is None:
        expected = f"{nearest(schedule, SCHEDULES)}; expected {', '.join(SCHEDULES)}"
        return {}, [f"schedule: found {schedule!r}{expected}"]
    for name, value in given.items():
        if name not in known:
            takes = f"expected {', '.join(known)}" if known else "it takes none"
            problems.append(f"schedule_options: {schedule} has no {name!r}{nearest(name, known)}; {takes}")
            continue
        try:
            values[name] = checked(value, str, {}) if known[name] is str else _number(value, known[name] is float)
        except ValueError as fault:
            problems.append(f"schedule_options: {name}: {fault}")
    if schedule == "cosine" and {"floor", "end"} <= given.keys():
        problems.append("schedule_options: found floor and end; expected one, a share of lr or a rate")
    if schedule == "plateau" and options.warmup:
        problems.append("warmup: a plateau schedule takes none; expected 0")
    return values, problems


def combination_faults(options: Any) -> list[str]:
    """Return the problems of options that are valid by themselves and exclude each other."""
    prompts, ema, warmup = options.prompts, options.ema, options.warmup
    texts = [*prompts, *prompts.values()] if isinstance(prompts, Mapping) else [prompts or ""]
    faults = {
        f"prompts: found {prompts!r}; expected a text, or a mapping of columns to texts": not all(
            isinstance(text, str) for text in texts
        ),
        "neftune: a prompt has separate trained embeddings; expected no noise": isinstance(options.adapter, Prompt)
        and options.neftune,
        "neftune: torch.compile would translate the model without it; expected compile=False": options.neftune
        and options.compile,
        f"ema: ranks of policy={options.policy!r} step by themselves, without a common average; expected "
        "policy='sync', or no ema": ema and options.policy in ("cadence", "async"),
        f"ema: found {ema}; expected a number above 0 and below 1, such as 0.999": ema in (0.0, 1.0),
        "label_smoothing: found 1.0; expected less, or nothing of the target is left": options.label_smoothing == 1.0,
        "mask_probability: found 0.0; expected more, or nothing is learned": options.mask_probability == 0.0,
        f"warmup: found {warmup!r}; expected an integer of steps, or a share below 1": warmup > 1
        and warmup != int(warmup),
    }
    return [fault for fault, found in faults.items() if found]
