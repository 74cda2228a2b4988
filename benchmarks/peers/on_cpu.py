"""Peers on a processor: transformers by pipeline and by hand, sentence-transformers, ONNX Runtime, OpenVINO.

Each maker returns a function from texts to answers, or raises ImportError where its library is not installed.
Answers are arrays: probabilities ``(texts, labels)`` for classification, unit vectors for embeddings. "By hand" is
what a careful user writes: texts sorted by length, filled up to the longest of a small batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

Answer = Callable[[Sequence[Any]], Any]
Forward = Callable[[dict[str, Tensor]], Tensor]

CLASSES = {
    "classification": "AutoModelForSequenceClassification",
    "entities": "AutoModelForTokenClassification",
    "answers": "AutoModelForQuestionAnswering",
    "embeddings": "AutoModel",
}


def quiet() -> Any:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    return transformers


def pipeline(task: str, folder: str, batch: int) -> Answer:
    """Return transformers' pipeline.

    Question answering has none since version 5, and the one for features gives states of filling too.
    """
    transformers = quiet()
    names = {"classification": "text-classification", "entities": "token-classification"}
    more = {"aggregation_strategy": "first"} if task == "entities" else {"top_k": None}
    made = transformers.pipeline(names[task], model=folder, device="cpu", batch_size=batch, **more)
    if task == "entities":
        return lambda texts: made(list(texts))

    def classify(texts: Sequence[str]) -> np.ndarray:
        answers = made(list(texts), truncation=True)
        return np.array([[s["score"] for s in sorted(row, key=lambda s: s["label"])] for row in answers])

    return classify


def sentence_transformers(folder: str, batch: int) -> Answer:
    from sentence_transformers import SentenceTransformer

    made = SentenceTransformer(folder, device="cpu")
    return lambda texts: made.encode(list(texts), batch_size=batch, normalize_embeddings=True)


def by_hand(task: str, folder: str, batch: int, forward: Forward | None = None) -> Answer:
    """Return texts through a forward pass in sorted and filled-up batches.

    Args:
        task: what is made of the result.
        folder: the checkpoint.
        batch: texts at once.
        forward: ids, mask and types to the first result; None takes transformers' model.
    """
    transformers = quiet()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if forward is None:
        model = getattr(transformers, CLASSES[task]).from_pretrained(folder).eval()

        def forward(inputs: dict[str, Tensor]) -> Tensor:
            out = model(**inputs)
            if task == "answers":
                return torch.stack([out.start_logits, out.end_logits], dim=-1)
            return out[0]

    def run(texts: Sequence[Any]) -> Any:
        pairs = task == "answers"
        given = [list(part) for part in zip(*texts, strict=True)] if pairs else [list(texts)]
        encoded = tokenizer(*given, truncation="only_second" if pairs else True, max_length=384 if pairs else 512)
        order = sorted(range(len(texts)), key=lambda i: -len(encoded["input_ids"][i]))
        found: list[Any] = [None] * len(texts)
        with torch.inference_mode():
            for start in range(0, len(order), batch):
                chosen = order[start : start + batch]
                inputs = tokenizer.pad({key: [encoded[key][i] for i in chosen] for key in encoded}, return_tensors="pt")
                found_now = _finished(task, forward(dict(inputs)), inputs["attention_mask"])
                for place, answer in zip(chosen, found_now, strict=True):
                    found[place] = answer
        return np.array(found) if task in ("classification", "embeddings") else found

    return run


def _finished(task: str, out: Tensor, mask: Tensor) -> Sequence[Any]:
    if task == "classification":
        return F.softmax(out, dim=-1).tolist()
    if task == "embeddings":
        keep = mask[:, :, None].to(out.dtype)
        return F.normalize((out * keep).sum(1) / keep.sum(1), dim=-1).tolist()
    if task == "answers":
        return [(int(s), int(e)) for s, e in zip(out[..., 0].argmax(1), out[..., 1].argmax(1), strict=True)]
    return out.argmax(-1).tolist()


def exported(task: str, folder: str, target: Path) -> Path:
    """Return an ONNX file of transformers' model, made once."""
    if target.exists():
        return target
    transformers = quiet()
    model = getattr(transformers, CLASSES[task]).from_pretrained(folder, attn_implementation="eager").eval()
    ids = torch.randint(5, 1000, (2, 9))

    class Only(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
            return self.model(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)[0]

    names = ["input_ids", "attention_mask", "token_type_ids"]
    axes = {name: {0: "batch", 1: "length"} for name in names}
    inputs = (ids, torch.ones_like(ids), torch.zeros_like(ids))
    torch.onnx.export(
        Only(),
        inputs,
        str(target),
        input_names=names,
        output_names=["out"],
        dynamic_axes=axes,
        opset_version=17,
        dynamo=False,
    )
    return target


def onnx_runtime(task: str, folder: str, batch: int, threads: int, room: Path, whole: bool = False) -> Answer:
    """Return ONNX Runtime with its optimiser for BERT; ``whole`` quantises to int8 on the fly."""
    import onnxruntime
    from onnxruntime.transformers.optimizer import optimize_model
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    source = exported(task, folder, room / f"{task}.onnx")
    better = room / f"{task}-optimised.onnx"
    if not better.exists():
        made = optimize_model(
            str(source),
            model_type="bert",
            num_heads=config.num_attention_heads,
            hidden_size=config.hidden_size,
            opt_level=1,
        )
        made.save_model_to_file(str(better))
    if whole:
        from onnxruntime.quantization import QuantType, quantize_dynamic

        small = room / f"{task}-int8.onnx"
        if not small.exists():
            quantize_dynamic(
                str(better), str(small), per_channel=True, reduce_range=True, weight_type=QuantType.QInt8,
                extra_options={"DefaultTensorType": 1},
            )  # fmt: skip
        better = small
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(better), options, providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]

    def forward(inputs: dict[str, Tensor]) -> Tensor:
        return torch.from_numpy(session.run(None, {name: inputs[name].numpy() for name in names})[0])

    return by_hand(task, folder, batch, forward)


def openvino(task: str, folder: str, batch: int, threads: int, room: Path) -> Answer:
    import openvino as ov

    core = ov.Core()
    model = core.read_model(str(exported(task, folder, room / f"{task}.onnx")))
    hints = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    compiled = core.compile_model(model, "CPU", hints)
    request = compiled.create_infer_request()
    names = [port.any_name for port in compiled.inputs]

    def forward(inputs: dict[str, Tensor]) -> Tensor:
        found = request.infer({name: inputs[name].numpy() for name in names})
        return torch.from_numpy(found[compiled.output(0)].copy())

    return by_hand(task, folder, batch, forward)
