"""`from_pretrained` and its keywords, defined without importing torch.

`flodl_hf.models.pretrained` implements the loading.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypedDict

from flodl.errors import ConfigError
from flodl_hf.checkpoints.keywords import LOAD, accept_keywords
from flodl_hf.errors import PredictError

if TYPE_CHECKING:
    import torch

    from flodl_hf.checkpoints.weights.manifest import Weights

__all__ = ["FromPretrained", "LoadKeywords"]


class LoadKeywords(TypedDict, total=False):
    """Keywords of `FromPretrained.from_pretrained`, for callers that pass them on."""

    revision: str | None
    subfolder: str
    token: str | bool | None
    cache_dir: str | Path | None
    local_files_only: bool
    dtype: torch.dtype | str | None
    device: torch.device | str | None
    devices: Sequence[torch.device | str] | str | None
    attention: str
    labels: Sequence[str] | None
    num_labels: int | None
    problem_type: str | None
    ignore_config_keys: Sequence[str]
    strict_config: bool
    allow_nonfinite: bool
    mapped: bool | None
    weights: Weights | None
    verified: bool | str
    adapter: str | Path | None


class FromPretrained:
    """Base of classes that a folder or repository can be loaded as."""

    @classmethod
    @accept_keywords(LOAD, ConfigError)
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        revision: str | None = None,
        subfolder: str = "",
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        devices: Sequence[torch.device | str] | str | None = None,
        attention: str = "sdpa",
        labels: Sequence[str] | None = None,
        num_labels: int | None = None,
        problem_type: str | None = None,
        ignore_config_keys: Sequence[str] = (),
        strict_config: bool = False,
        allow_nonfinite: bool = False,
        mapped: bool | None = None,
        weights: Weights | None = None,
        verified: bool | str = False,
        adapter: str | Path | None = None,
    ) -> Self:
        """Load a folder or Hub repository and return the model; raise an error that lists all problems.

        Args:
            name_or_path: a local folder, ``"owner/name"`` or ``"owner/name@revision"``.
            revision: branch, tag or commit on the Hub.
            subfolder: folder inside the repository.
            token: Hub token; None takes the environment's.
            cache_dir: where downloads are kept; None takes the Hub's cache.
            local_files_only: open no connection.
            dtype: cast the weights to this; None and "auto" take the dtype in ``config.json``, else the stored one (of
                several dtypes the first tensor's), as transformers does.
            device: where to put the model; None is torch's default device, usually the CPU, "auto" the best there is.
            devices: devices of predictions, as in `predict`, or "auto" for all. The weights are on ``device``, which
                must be one of them, by default the first.
            attention: "sdpa" (fused kernels) or "eager" (plain products).
            labels: names of a new head's labels; a classifier of another size starts fresh.
            num_labels: the same by number alone.
            problem_type: "regression", "single_label_classification" or "multi_label_classification".
            ignore_config_keys: unsupported keys of ``config.json`` to ignore.
            strict_config: raise on unknown keys of ``config.json``; else the load report lists them.
            allow_nonfinite: load weights with NaN or infinite values, or with values that do not fit into ``dtype``.
            mapped: map the weight file instead of copying it: ready immediately, but the file must not be
                changed while the model exists. None maps files of the Hub's cache, which never change, and
                sharded weights that are copied to a device.
            weights: "disk" leaves weights in their files: a prediction reads layer after layer, for all its texts at
                once, with the same answers to the bit; two layers are in memory at a time. The files must not be
                changed meanwhile. None does so, with a log message, if the memory of the device is too small for the
                weights; "memory" never does.
            verified: compare every file first with its entry in ``checksums.json`` or the Hub's cache; a string is
                the fingerprint that the folder must have, as printed by ``flodl-hf verify``.
            adapter: a folder or Hub repository with an adapter for this base, as peft writes it. A local folder that
                contains only an adapter may also be passed in place of the base, which it names.

        Raises:
            HubError: the name leads nowhere.
            ConfigError: the configuration is wrong or not understood.
            CheckpointError: tensors are missing, unexpected, mis-shaped, damaged or not finite.
            DeviceError: the device is not available.
            PredictError: ``devices`` is not a list of devices, or ``device`` is not one of them.
            TokenizerError: the tokenizer is damaged or has more tokens than the model.
        """
        from flodl_hf.models.pretrained import Wanted, load_model, numbered_labels

        if devices is not None:
            from flodl.devices import find_device
            from flodl_hf.inference.options import RunOptions

            chosen = RunOptions().changed({"devices": devices}).devices
            assert chosen is not None
            device = chosen[0] if device is None else find_device(device)
            if (device.type, device.index or 0) not in {(one.type, one.index or 0) for one in chosen}:
                raise PredictError(
                    f"device: found {device}, expected one of devices, {', '.join(map(str, chosen))}. Change either.",
                    device=str(device),
                )
        wanted = Wanted(
            dtype=dtype,
            device=device,
            attention=attention,
            labels=labels if labels is not None else numbered_labels(num_labels),
            problem_type=problem_type,
            ignore_config_keys=ignore_config_keys,
            strict_config=strict_config,
            allow_nonfinite=allow_nonfinite,
            mapped=mapped,
            weights=weights,
        )
        hub = {"revision": revision, "subfolder": subfolder, "token": token, "cache_dir": cache_dir}
        hub["local_files_only"] = local_files_only
        model = load_model(cls, name_or_path, wanted, hub=hub, verified=verified, adapter=adapter)  # type: ignore[type-var]
        return model if devices is None else model.runtime(devices=devices)
