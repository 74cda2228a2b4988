"""What devices can do at most, and what a model asks of them: for the share of the peak that a run reaches.

The shares are of the dense figures that makers publish, which no real program reaches; of devices that are not listed
nothing is said.
"""

from __future__ import annotations

__all__ = ["flops_of_encoder", "peak_of"]

# Dense operations per second: (part of the device's name, float32, TF32, half precision); the first that fits holds.
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
    """Return the operations per second that a device of this name can do at most; None where nobody wrote it down."""
    for row in _PEAKS:
        if row[0].lower() in device.lower():
            found = row[_COLUMNS[precision]] if precision in _COLUMNS else None
            return found if isinstance(found, float) else None
    return None


def flops_of_encoder(
    tokens: float, mean_length: float, *, learned: int, frozen: int = 0, layers: int, hidden_size: int
) -> float:
    """Return the floating-point operations of a training step of an encoder.

    A parameter costs two operations a token forwards, and twice that backwards if it learns (Kaplan et al. 2020,
    arXiv:2001.08361); attention costs ``4 x length x hidden_size`` a token and layer forwards, and twice that
    backwards. Embeddings are looked up and cost nothing; padding is no work that counts.

    Args:
        tokens: of the step.
        mean_length: tokens of a row.
        learned: parameters of matrix products that learn, layers that are used again counted again.
        frozen: those that do not.
    """
    return tokens * (6.0 * learned + 2.0 * frozen + 12.0 * mean_length * hidden_size * layers)
