"""Optimiser factories and parameter groups: which parameters move, how fast, with which decay.

The optimisers are torch's own. A factory takes what ``torch.optim`` takes, so any of its classes
serves as well; those here choose the fused kernel where the parameters' device has one, and can be
sent to other processes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from flodl.errors import TrainError

NO_DECAY = ("*bias", "*norm.weight", "*norm*.weight")
FUSED = {torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad}


@dataclass(frozen=True)
class OptimizerFactory:
    """Calls ``kind(parameters, **options)``, fused on CUDA where the optimiser can be."""

    kind: type[torch.optim.Optimizer]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        """Return the optimiser of these parameters or groups."""
        groups = list(parameters)
        options = dict(self.options)
        tensors = [p for g in groups for p in (g["params"] if isinstance(g, Mapping) else [g])]
        if "fused" not in options and self.kind in FUSED and tensors and all(t.is_cuda for t in tensors):
            options["fused"] = True
        return self.kind(groups, **options)


def adamw(
    lr: float,
    *,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    **options: Any,
) -> OptimizerFactory:
    """Return a factory of ``torch.optim.AdamW`` (decoupled weight decay, Loshchilov and Hutter 2019)."""
    return OptimizerFactory(
        torch.optim.AdamW, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps, **options}
    )


def sgd(
    lr: float, *, momentum: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False, **options: Any
) -> OptimizerFactory:
    """Return a factory of ``torch.optim.SGD``."""
    return OptimizerFactory(
        torch.optim.SGD, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov, **options}
    )


def parameter_groups(
    model: nn.Module, rules: Sequence[tuple[str, Mapping[str, Any]]] = (), *, no_decay: Sequence[str] = NO_DECAY
) -> list[dict[str, Any]]:
    """Return groups of the trainable parameters, for ``torch.optim``; each parameter in exactly one.

    Args:
        rules: pairs of a path and its options. A path is a prefix of a parameter's
            name (``"encoder.layers.3"``) or a shell pattern (``"*.attention.*"``); of several that
            match, the last decides.
        no_decay: patterns of the parameters that get ``weight_decay=0``; biases and norms by default.

    Raises:
        TrainError: a path that matches no parameter, trainable or not.
    """
    named = list(model.named_parameters())
    unused = [path for path, _ in rules if not any(_lies_in(name, path) for name, _ in named)]
    if unused:
        names = ", ".join(name for name, _ in named[:4])
        raise TrainError(
            f"parameter_groups: found no parameter at {', '.join(unused)}; expected a path of names such as {names}.",
            paths=unused,
        )
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        options: dict[str, Any] = {}
        for path, given in rules:
            if _lies_in(name, path):
                options.update(given)
        if any(fnmatchcase(name, pattern) for pattern in no_decay):
            options["weight_decay"] = 0.0
        key = tuple(sorted(options.items()))
        groups.setdefault(key, {"params": [], **options})["params"].append(parameter)
    return list(groups.values())


def _lies_in(name: str, path: str) -> bool:
    return name == path or name.startswith(path + ".") or fnmatchcase(name, path)


def layerwise_decay(
    model: nn.Module,
    lr: float,
    decay: float,
    *,
    layers: str = "encoder.layers",
    lowest: Sequence[str] = ("encoder.embeddings",),
    no_decay: Sequence[str] = NO_DECAY,
) -> list[dict[str, Any]]:
    """Return groups in which layer i of n has the rate ``lr * decay ** (n - i)`` and the head ``lr``.

    Embeddings, beneath layer 0, get ``lr * decay ** (n + 1)`` (discriminative fine-tuning, Howard and
    Ruder 2018). A schedule given to the trainer scales all groups alike.

    Args:
        layers: path of the layers, which are its numbered children.
        lowest: paths beneath layer 0.

    Raises:
        TrainError: there are no numbered layers at ``layers``.
    """
    pattern = re.compile(rf"{re.escape(layers)}\.(\d+)\.")
    found = {int(m[1]) for name, _ in model.named_parameters() if (m := pattern.match(name))}
    if not found:
        raise TrainError(
            f"layerwise_decay: found no numbered layers at {layers!r}; give layers= the path.", path=layers
        )
    depth = max(found) + 1
    rules: list[tuple[str, Mapping[str, Any]]] = [("*", {"lr": lr})]
    names = [name for name, _ in model.named_parameters()]
    rules += [(p, {"lr": lr * decay ** (depth + 1)}) for p in lowest if any(_lies_in(n, p) for n in names)]
    rules += [(f"{layers}.{i}", {"lr": lr * decay ** (depth - i)}) for i in sorted(found)]
    return parameter_groups(model, rules, no_decay=no_decay)


OptimizerMaker = OptimizerFactory | Callable[[Any], torch.optim.Optimizer] | torch.optim.Optimizer


def make_optimizer(
    model: nn.Module, maker: OptimizerMaker, groups: Callable[[nn.Module], Any] | None = None
) -> torch.optim.Optimizer:
    """Return the optimiser ``maker``, or the one it creates for the groups or all trainable parameters.

    Raises:
        TrainError: the model has no trainable parameters or has sparse gradients, the optimiser has other parameters
            than the model's, or ``maker`` makes none.
    """
    if not any(p.requires_grad for p in model.parameters()):
        raise TrainError("optimizer: found no trainable parameter of the model (requires_grad). Freeze less of it.")
    sparse = [
        name for name, module in model.named_modules()
        if getattr(module, "sparse", False) is True and any(p.requires_grad for p in module.parameters(recurse=False))
    ]  # fmt: skip
    if sparse:
        raise TrainError(f"model: found sparse gradients of {', '.join(sparse[:5])}; expected none.", modules=sparse)
    if isinstance(maker, torch.optim.Optimizer):
        made = maker
    elif callable(maker):
        given = groups(model) if groups is not None else None
        made = maker(given if given is not None else [p for p in model.parameters() if p.requires_grad])
    else:
        raise TrainError(f"optimizer: found {maker!r}; expected a factory such as adamw(1e-3), or an optimiser.")
    if isinstance(made, torch.optim.LBFGS):
        raise TrainError("optimizer: found LBFGS; expected an optimiser with a step() without a closure.")
    own = {id(p) for p in model.parameters()}
    foreign = sum(id(p) not in own for group in made.param_groups for p in group["params"])
    if foreign:
        raise TrainError(
            f"optimizer: found {foreign} parameters that the model does not have; expected parameters of the model. "
            "Make a loss with parameters part of the model, or pass a factory such as adamw(1e-3).",
            found=foreign,
        )
    return made


def unoptimised(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of parameters that require gradients and are not in the optimiser."""
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in known]


def check_learners(model: nn.Module, optimizer: torch.optim.Optimizer, known: set[str], epoch: int) -> None:
    """Check that the optimiser has all parameters that were unfrozen since the run began.

    Args:
        known: names of parameters that the optimiser lacked from the start.

    Raises:
        TrainError: it lacks some; ``names`` lists them.
    """
    names = [name for name in unoptimised(model, optimizer) if name not in known]
    if names:
        raise TrainError(
            f"epoch {epoch}: {', '.join(names[:5])} require gradients but are not in the optimiser. "
            "Unfreeze them before the run, use the rule thaw_when, or call trainer.optimizer.add_param_group.",
            names=names,
        )


# ---- without torch._dynamo ---------------------------------------------------------------------------------
#
# Methods of torch's optimisers import torch._dynamo, which takes seconds, so that torch.compile leaves them out. Here
# they do so only in a process that has imported it.


def _defer_dynamo(method: Callable[..., Any]) -> None:
    """Make a method of torch's optimisers import `torch._dynamo` only if it was imported before."""
    inner: Any = method.__wrapped__  # type: ignore[attr-defined]

    def call(*args: Any, **options: Any) -> Any:
        if "torch._dynamo" in sys.modules:
            inner.__dynamo_disable = torch._dynamo.disable(inner, wrapping=False)
            return inner.__dynamo_disable(*args, **options)
        return inner(*args, **options)

    inner.__dynamo_disable = call  # torch's cache of the method that torch.compile leaves out


for _name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
    _defer_dynamo(getattr(torch.optim.Optimizer, _name))
