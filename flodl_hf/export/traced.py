"""A model as one function of named tensors, as other engines run it.

Decides the names and axes of inputs and outputs, for every head, and that a traced function serves batches of any
shape. `flodl_hf.export.engine` writes it.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flodl.errors import FlodlError
from flodl_hf.checkpoints.folders import refused
from flodl_hf.errors import ExportError

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from flodl_hf.models.encoder_model import EncoderModel


BATCH, CHOICES, TOKENS = "batch", "choices", "tokens"
_TOKEN_OUTPUTS = ("last_hidden_state", "start_logits", "end_logits", "prediction_logits")
_OF_TOKENS = ("token_classification", "masked_lm", "replaced_tokens")


class Traced(nn.Module):
    """A model of a task, from ids to the tensors that users of such files expect.

    Inputs are ``input_ids``, ``attention_mask`` and, if the family reads them, ``token_type_ids``, all int64. Outputs
    are the outputs of a call, and ``sentence_embedding`` if the folder defines how to pool tokens.

    Args:
        model: in float32. One that is on a processor and in evaluation mode is used as it is, others are copied.

    Raises:
        ExportError: the model is in another dtype.

    Attributes:
        inputs: names of inputs with the names of their axes.
        outputs: names of outputs with the names of their first axes.
    """

    def __init__(self, model: EncoderModel) -> None:
        super().__init__()
        kinds = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
        if kinds != ["float32"]:
            expected = "float32, in which engines are compared. Load it with dtype='float32'"
            found = f"the model is in {' and '.join(kinds)}"
            raise refused("export", found, expected, problems=kinds, kind=ExportError)
        self.model = _at_rest(model)
        recipe = model.sentence_recipe if model.head == "base" else None
        if recipe is not None and recipe.routes:
            found = f"the folder has the routes {', '.join(recipe.routes)}"
            own = "model.on_route('query')" if model.routed is not None else "model.sentence_recipe.on('query')"
            raise refused("export", found, f"one route: export {own}", problems=list(recipe.routes), kind=ExportError)
        if recipe is not None and recipe.changes_states:
            kinds = [step.kind for step in recipe.tokens] or ["hidden states of several layers"]
            expected = "a pooling of the last states, or model.sentence_recipe = None"
            raise refused("export", f"vectors from {', '.join(kinds)}", expected, problems=kinds, kind=ExportError)
        pooled = recipe is not None and recipe.splade is None and (recipe.late is None or recipe.late.beside)
        self._recipe = recipe if pooled else None
        names = ["input_ids", "attention_mask", *(["token_type_ids"] if model.config.token_types > 1 else [])]
        axes = (BATCH, CHOICES, TOKENS) if model.head == "multiple_choice" else (BATCH, TOKENS)
        self.inputs = dict.fromkeys(names, axes)
        self.outputs = {name: self._axes_of(name) for name in self(**self.example())}

    def _axes_of(self, name: str) -> tuple[str, ...]:
        if name == "logits":
            second = {**dict.fromkeys(_OF_TOKENS, (TOKENS,)), "multiple_choice": (CHOICES,)}
            return (BATCH, *second.get(self.model.head, ()))
        return (BATCH, TOKENS) if name in _TOKEN_OUTPUTS else (BATCH,)

    @torch.no_grad()
    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the outputs as a dict."""
        found = self.model(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
        outputs = {name: value for name, value in found.items() if isinstance(value, Tensor)}
        if self._recipe is not None:
            outputs["sentence_embedding"] = self._pooled(outputs, attention_mask)
        return outputs

    def _pooled(self, outputs: Mapping[str, Tensor], mask: Tensor) -> Tensor:
        from flodl_hf.inference.pooling import finish_embeddings, pool_padded

        assert self._recipe is not None
        states, pooler = outputs["last_hidden_state"], outputs.get("pooler_output")
        vectors = pool_padded(states, mask, self._recipe.pooling, pooler_output=pooler)
        for layer in self._recipe.dense:
            vectors = layer(vectors)
        return finish_embeddings(vectors, normalize=self._recipe.normalize)

    def example(self) -> dict[str, Tensor]:
        """Return a batch to trace with: no axis has the length 1, which a trace may take for a constant."""
        axes = next(iter(self.inputs.values()))
        shape = [{BATCH: 2, CHOICES: 3, TOKENS: 5}[axis] for axis in axes]
        ids = torch.full(shape, min(5, self.model.config.encoder.vocab_size - 1))
        mask = torch.ones_like(ids)
        mask[-1, ..., -2:] = 0
        given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
        return {name: given[name] for name in self.inputs}

    def program(self) -> ExportedProgram:
        """Return the function as torch traces it, for batches of any shape.

        Raises:
            ExportError: the trace is valid for some shapes only.
        """
        automatic = torch.export.Dim.AUTO
        shapes = {name: dict.fromkeys(range(len(axes)), automatic) for name, axes in self.inputs.items()}
        with with_torch_defaults():
            program = torch.export.export(self, (), self.example(), dynamic_shapes=shapes, strict=False)
        self._check(program)
        return program

    def _check(self, program: ExportedProgram) -> None:
        """Refuse a program with an axis of fixed size, or with a smaller maximum than the model's."""
        longest = self.model.config.max_tokens or 0
        faults = []
        fed = {spec.arg.name for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"}
        for node in program.graph.nodes:
            if node.op != "placeholder" or node.name not in fed:
                continue
            for axis, size in zip(self.inputs[node.name], node.meta["val"].shape, strict=True):
                if isinstance(size, int):
                    faults.append(f"{axis} of {node.name} is always {size}")
                elif (known := program.range_constraints.get(size.node.expr)) is not None:
                    least, most = known.lower, known.upper
                    # A trace cannot know whether size 1 behaves like 2 and more, and reports 2; comparisons include 1.
                    if least > 2 or most < (longest if axis == TOKENS else 1_000_000):
                        faults.append(f"{axis} of {node.name} is from {least} to {most}")
        if faults:
            found = f"torch's trace of {type(self.model).__name__} is valid for some shapes only: {'; '.join(faults)}"
            expected = "axes of any length. Please report this with the configuration"
            raise refused("export", found, expected, problems=faults, kind=ExportError)


def _at_rest(model: EncoderModel) -> EncoderModel:
    """Return a model that computes as the reference does, on a processor, without dropout."""
    fast = [m for m in model.modules() if getattr(m, "implementation", None) == "fast"]
    if model.device.type == "cpu" and not model.training and not fast:
        return model
    found: Any = copy.deepcopy(model).to("cpu").eval()
    return found.set_attention("sdpa") if fast else found


@contextmanager
def with_torch_defaults() -> Iterator[None]:
    """Hide messages of torch's exporters (deprecations, absent packages) from the caller.

    Raises:
        ExportError: they fail, with an error of any kind.
    """
    logs = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    before = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (FlodlError, OSError, MemoryError):
        raise
    except Exception as fault:
        first = next(iter(str(fault).splitlines()), "")
        found = f"torch {torch.__version__} cannot write it ({type(fault).__name__}: {first}). Nothing was written"
        expected = "operations that its exporters know; please report this with the configuration"
        raise refused("export", found, expected, problems=[str(fault)], kind=ExportError) from fault
    finally:
        for log, level in zip(logs, before, strict=True):
            log.setLevel(level)
