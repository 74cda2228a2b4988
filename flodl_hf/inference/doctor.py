"""Diagnose the machine and installation: for `flodl-hf doctor` and bug reports.

Each finding reports a fact, its state, and what to do about a problem. Devices are not only listed: each
computes a small layer, and our kernels are compared with torch's on it, as before a model uses them. No
model is read and no connection is opened.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

from flodl.devices import all_devices, best_device, described, probe_device, why_no_cuda
from flodl.errors import ConfigError, DeviceError, FlodlError
from flodl.verbosity import parsed
from flodl_hf.errors import PredictError

State = Literal["ok", "note", "problem"]

REQUIRED = ("torch", "numpy", "safetensors", "tokenizers", "huggingface_hub")
OPTIONAL = {
    "typer": "the command line: flodl-hf[cli]",
    "pyarrow": "Parquet and Arrow files: flodl-hf[data]",
    "triton": "our kernels on CUDA; comes with torch's builds for it",
    "transformers": "comparing with it: flodl-hf[parity]",
}
LEAST_TORCH = (2, 11)
GIB = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        part: category: "machine", "packages", "devices", "kernels", "files" or "environment".
        name: name of the checked item.
        found: the observed value.
        state: "ok"; "note" for what costs speed or may surprise; "problem" for what does not work.
        advice: what to do; empty where nothing is to be done.
    """

    part: str
    name: str
    found: str
    state: State = "ok"
    advice: str = ""


@dataclass(frozen=True)
class Examination:
    """All findings.

    Attributes:
        findings: in the order in which they were made.
    """

    findings: tuple[Finding, ...] = field(default=())

    @property
    def sound(self) -> bool:
        """Return whether there is no problem; notes do not count."""
        return all(finding.state != "problem" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        return {"sound": self.sound, "findings": [vars(finding) for finding in self.findings]}


def examine(environment: Mapping[str, str] | None = None) -> Examination:
    """Return what there is on this machine.

    Args:
        environment: variables to check; None for this process's.
    """
    around = os.environ if environment is None else environment
    parts = (_machine(), _packages(), _devices(), _kernels(), _files(around), _environment(around))
    return Examination(tuple(finding for part in parts for finding in part))


def _machine() -> Iterator[Finding]:
    yield Finding("machine", "system", f"{platform.system()} {platform.release()}, {platform.machine()}")
    yield Finding("machine", "Python", f"{platform.python_version()} at {sys.executable}")
    usable, there = _cores(), os.cpu_count() or 1
    count = f"{usable} cores" + (f" of {there}" if usable < there else "")
    yield Finding("machine", "processor", f"{_processor_name()}, {count}, {torch.backends.cpu.get_cpu_capability()}")
    free, whole = memory()
    if whole:
        short = free < 2 * GIB
        yield Finding(
            "machine", "memory", f"{free / GIB:.1f} GiB free of {whole / GIB:.1f}", "note" if short else "ok",
            "BERT-large in float32 takes 1.3 GiB to predict and 7 to train" if short else "",
        )  # fmt: skip


def _cores() -> int:
    # Not of `flodl_hf.tokenization`, which needs the tokenizers library: this file also runs where it is broken.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.lower().startswith(("model name", "hardware")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown processor"


def memory() -> tuple[int, int]:
    """Return free and total main memory in bytes; zeros if the system does not report them."""
    try:
        text = Path("/proc/meminfo").read_text("ascii", "replace")
    except OSError:
        return 0, 0
    found = {name: int(size) * 1024 for name, size in re.findall(r"(?m)^(\w+):\s*(\d+)\s", text)}
    return found.get("MemAvailable", found.get("MemFree", 0)), found.get("MemTotal", 0)


def _packages() -> Iterator[Finding]:
    yield Finding("packages", "flodl-hf", _version("flodl-hf") or "from a checkout")
    for name in REQUIRED:
        found = _version(name)
        if found is None:
            yield Finding("packages", name, "not installed", "problem", f"pip install {name}")
        elif name == "torch" and _numbers(found) < LEAST_TORCH:
            least = ".".join(map(str, LEAST_TORCH))
            yield Finding("packages", name, found, "problem", f"torch {least} or newer is needed")
        else:
            yield Finding("packages", name, found)
    for name, purpose in OPTIONAL.items():
        yield Finding("packages", name, _version(name) or f"not installed (for {purpose})")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in text.split("+")[0].split(".")[:2])


def _devices() -> Iterator[Finding]:
    best = best_device()
    for device in all_devices() if best.type != "cpu" else []:
        try:
            free = ""
            if device.type == "cuda":
                left, whole = torch.cuda.mem_get_info(device)
                capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
                free = f", capability {capability}, {left / GIB:.1f} GiB free of {whole / GIB:.1f}"
            fault = probe_device(device)
            if fault is not None:
                raise DeviceError(f"{device}: {fault}; do not use this device", device=str(device))
            yield Finding("devices", str(device), described(device) + free + ", computes")
        except (RuntimeError, FlodlError) as fault:
            message = (str(fault).splitlines() or [type(fault).__name__])[0][:200]
            yield Finding(
                "devices", str(device), message, "problem", "free the device, or choose another with --device"
            )
    if torch.version.cuda:
        yield Finding("devices", "CUDA of torch", torch.version.cuda)
    if best.type == "cpu":
        fault = probe_device(best)
        why = why_no_cuda()
        result = "computes; it is the best device here" if fault is None else fault
        yield Finding("devices", "cpu", result, "ok" if fault is None else "problem")
        yield Finding("devices", "cuda", why, "note" if _nvidia_driver() else "ok", _cuda_advice())
    yield Finding("devices", "taken by commands", described(best))


def _nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def _cuda_advice() -> str:
    if not _nvidia_driver():
        return ""
    if torch.version.cuda is None:
        return "there is an NVIDIA driver, but this torch was built without CUDA: install a build with it"
    return "there is an NVIDIA driver: see whether nvidia-smi works and CUDA_VISIBLE_DEVICES names a device"


def _kernels() -> Iterator[Finding]:
    from flodl_hf.inference.cpu import missing, products_of

    best = best_device()
    if best.type == "cuda":
        yield from _cuda_kernels(best)
    for precision in ("fp32", "bf16", "int8"):
        lacking = missing(precision) if precision != "fp32" else None
        found = f"not run: {lacking}" if lacking else products_of(precision)
        yield Finding("kernels", f"cpu, {precision}", found)


def _cuda_kernels(device: torch.device) -> Iterator[Finding]:
    from flodl_hf.inference.options import check_precision
    from flodl_hf.nn.backends.self_tests import LayerSizes, prediction, training
    from flodl_hf.nn.kernels.self_test import trusted

    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        try:
            check_precision(precision, device)
        except PredictError as fault:
            yield Finding("kernels", f"{device}, {precision}", str(fault), "note")
            continue
        for kind, trial in (("prediction", prediction), ("training", training)):
            import warnings

            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                held = trusted(kind, device, dtype, LayerSizes(768, 12, 3072), trial)
            why = "; ".join(str(entry.message) for entry in caught)
            yield Finding(
                "kernels", f"{device}, {kind} in {precision}",
                "ours, equal to torch's within the bounds" if held else why or "torch's own: ours failed the test",
                "ok" if held else "note",
                "" if held else "results are right and slower; an update of torch and Triton may fix it",
            )  # fmt: skip


def _files(around: Mapping[str, str]) -> Iterator[Finding]:
    home = Path(around.get("HF_HOME") or Path(around.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface")
    hub = Path(around.get("HF_HUB_CACHE") or home / "hub")
    models = sum(path.name.startswith("models--") for path in hub.iterdir()) if hub.is_dir() else 0
    yield _folder("Hub cache", hub, f"{models} models at {hub}" if hub.is_dir() else f"none yet; would be at {hub}")
    own = around.get("FLODL_HF_CACHE") or str(Path(around.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flodl-hf")
    if own in ("0", "off"):
        advice = "unset FLODL_HF_CACHE, else every process tests kernels again"
        yield Finding("files", "our cache", "off", "note", advice)
    else:
        yield _folder("our cache", Path(own), own)
    if best_device().type == "cuda":
        compiled = Path(around.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
        empty = not compiled.is_dir() or not any(compiled.iterdir())
        note = "the first call compiles kernels for some seconds; keep this folder between runs" if empty else ""
        yield _folder("Triton's cache", compiled, f"{'empty' if empty else 'filled'}, at {compiled}", note)


def _folder(name: str, path: Path, status: str, advice: str = "") -> Finding:
    """Return a finding on an output folder: whether it is writable, and its free space."""
    nearest = next(p for p in (path, *path.parents) if p.exists())
    if not os.access(nearest, os.W_OK):
        return Finding("files", name, f"{status}; cannot be written", "problem", f"allow writing to {nearest}")
    free = shutil.disk_usage(nearest).free
    if free < 2 * GIB:
        return Finding(
            "files", name, f"{status}; {free / GIB:.1f} GiB left on its disk", "note", "free some disk space"
        )
    return Finding(
        "files", name, f"{status}; {free / GIB:.0f} GiB left on its disk", "note" if advice else "ok", advice
    )


_THREADS = "the machine has {cores} cores; products on the CPU use {value}"
# For each variable: which values need advice, with the number of cores, and the advice.
_VARIABLES: dict[str, tuple[Callable[[str, int], bool], str]] = {
    "OMP_NUM_THREADS": (lambda value, cores: value.isdigit() and 0 < int(value) < cores, _THREADS),
    "RAYON_NUM_THREADS": (lambda value, cores: value.isdigit() and 0 < int(value) < cores, _THREADS),
    "TOKENIZERS_PARALLELISM": (
        lambda value, _: value.lower() in ("0", "false", "off", "no"), "tokenising takes the cores all the same",
    ),
    "HF_HUB_OFFLINE": (
        lambda value, _: value.lower() in ("1", "true", "on", "yes"),
        "names of the Hub are looked up in the cache alone",
    ),
    "HF_ENDPOINT": (lambda *_: False, ""),
    "CUDA_VISIBLE_DEVICES": (lambda value, _: value in ("", "-1", "NoDevFiles"), "all CUDA devices are hidden"),
    "CUDA_LAUNCH_BLOCKING": (
        lambda value, _: value == "1", "every launch waits for the device: for debugging alone",
    ),
    "ONEDNN_MAX_CPU_ISA": (lambda *_: False, ""),
}  # fmt: skip


def _environment(around: Mapping[str, str]) -> Iterator[Finding]:
    usable = _cores()
    if (level := around.get("FLODL_VERBOSITY")) is not None:
        advice = ""
        try:
            parsed(level)
        except ConfigError as fault:
            advice = f"{fault.message}; it is taken as normal"
        yield Finding("environment", "FLODL_VERBOSITY", level, "note" if advice else "ok", advice)
    for name, (needs_advice, advice) in _VARIABLES.items():
        if (value := around.get(name)) is not None:
            advice = advice.format(cores=usable, value=value) if needs_advice(value, usable) else ""
            noted = advice and name != "TOKENIZERS_PARALLELISM"
            yield Finding("environment", name, value, "note" if noted else "ok", advice)
    threads = torch.get_num_threads()
    if threads < usable // 2 and "OMP_NUM_THREADS" not in around:
        yield Finding(
            "environment", "threads of torch", f"{threads} of {usable} cores", "note", "torch.set_num_threads(...)"
        )
