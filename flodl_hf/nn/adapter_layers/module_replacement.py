"""Modules that replace another and share its parameters, under their names."""

from __future__ import annotations

from torch import nn


def stand_in_for(module: nn.Module, other: nn.Linear | nn.Embedding) -> None:
    """Begin a module as another: its sizes, its parameters under their names, its mode.

    Args:
        module: not initialised yet; of a subclass of ``other``'s class.
        other: a linear layer or a table, which stays as it is.
    """
    nn.Module.__init__(module)
    for name in other.__constants__:
        setattr(module, name, getattr(other, name))
    for name, parameter in other._parameters.items():
        module.register_parameter(name, parameter)
    module.train(other.training)


def hooked(module: nn.Module) -> bool:
    """Return whether a module has hooks, which run only when the module itself is called."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
