"""Peak speed of devices, and operations of a training step, for the share of the peak that a run reaches.

The peaks are the dense values that vendors publish, which no real program reaches.
"""

from __future__ import annotations

__all__ = ["flops_of_encoder", "peak_of"]

# Part of a device's name, then dense operations per second: float32, TF32, half precision. The first match counts.
_PEAKS: tuple[tuple[str, float | None, float | None, float | None], ...] = (
    ("H100 PCIe", None, 378.2e12, 756.4e12),
    ("H200", 66.9e12, 494.7e12, 989.4e12),
    ("H100", 66.9e12, 494.7e12, 989.4e12),
    ("A100", 19.5e12, 156e12, 312e12),
    ("RTX 4090", 82.6e12, 82.6e12, 165.2e12),
    ("V100", 15.7e12, None, 125e12),
)
_COLUMNS = {"fp32": 1, "tf32": 2, "bf16": 3, "fp16": 3}


def peak_of(device: str, precision: str) -> float | None:
    """Return the peak operations per second of a device by its name; None if unknown."""
    for row in _PEAKS:
        if row[0].lower() in device.lower():
            found = row[_COLUMNS[precision]] if precision in _COLUMNS else None
            return found if isinstance(found, float) else None
    return None


def flops_of_encoder(
    tokens: float, mean_length: float, *, learned: int, frozen: int = 0, layers: int, hidden_size: int
) -> float:
    """Return the floating-point operations of a training step of an encoder.

    A parameter costs 2 operations per token in the forward pass, and twice that in the backward pass if it is trained
    (Kaplan et al. 2020, arXiv:2001.08361); attention costs ``4 x length x hidden_size`` per token and layer, and twice
    that in the backward pass. Embeddings and padding cost nothing.

    Args:
        tokens: number of tokens of the step.
        mean_length: mean number of tokens of a row.
        learned: number of trained parameters of matrix products; layers that are used twice count twice.
        frozen: number of the others.
    """
    return tokens * (6.0 * learned + 2.0 * frozen + 12.0 * mean_length * hidden_size * layers)
