"""The sizes of every encoder: their fields, and rows with the keys of most files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flodl_hf.families.schema.config_rows import Check, Row, count, number
from flodl_hf.nn.attention.rotary import RotarySettings


@dataclass(frozen=True, kw_only=True)
class EncoderSizes:
    """The first settings of every family.

    Attributes:
        vocab_size: rows of the word table.
        hidden_size: width of a token's state.
        num_layers: blocks in the stack.
        num_heads: attention heads of a block; divides ``hidden_size``.
        intermediate_size: width inside the feed-forward layer.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int


# fmt: off
SIZES = (
    Row("vocab_size",        "vocab_size",          count(most=10_000_000)),
    Row("hidden_size",       "hidden_size",         count()),
    Row("num_layers",        "num_hidden_layers",   count(most=1024)),
    Row("num_heads",         "num_attention_heads", count(most=4096)),
    Row("intermediate_size", "intermediate_size",   count(most=1_000_000)),
)
# fmt: on

BASE_SIZES = {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "intermediate_size": 3072}
"""The defaults of most families of transformers."""


def _settings(value: Any) -> RotarySettings:
    """Return the settings of one table of ``config.json``."""
    if not isinstance(value, Mapping):
        raise ValueError
    value = {key: entry for key, entry in value.items() if entry is not None}
    kind = value.get("rope_type", value.get("type", "default"))
    known = {"rope_type", "type", "rope_theta", *(("factor",) if kind != "default" else ())}
    theta, factor = value.get("rope_theta"), value.get("factor", 1.0)
    if kind not in ("default", "linear", "ntk") or not set(value) <= known:
        raise ValueError
    if not all(
        x is None or (isinstance(x, (int, float)) and not isinstance(x, bool) and x > 0) for x in (theta, factor)
    ):
        raise ValueError
    return RotarySettings(None if theta is None else float(theta), kind, float(factor))


def rotary_settings(*groups: str) -> Check:
    """Null, or a table of rotary positions; with ``groups``, one for each of these kinds of layers."""
    words = "a table with rope_theta, and rope_type of default, linear or ntk (with its factor)"

    def accepts(value: Any) -> Any:
        if not groups and isinstance(value, Mapping):
            return _settings(value) if value else None  # an empty table says nothing
        if value is None:
            return None
        if not isinstance(value, Mapping) or not set(value) <= set(groups):
            raise ValueError
        return {group: _settings(entry) for group, entry in value.items() if entry is not None}

    return Check(f"null, or {words}" + (f" for each of {', '.join(groups)}" if groups else ""), accepts)


def wavelength() -> Check:
    """The base of wavelengths: a number above 1."""
    return number("a number above 1", lambda value: 1 < value < 1e12)


def rotary_rows(theta: float) -> tuple[Row, ...]:
    """Return the rows of families that turn all layers alike: fields ``theta``, ``rotary`` and ``scaling``.

    The table with the older name, ``rope_scaling``, has precedence, as in transformers.

    Args:
        theta: the family's own base of wavelengths.
    """
    return (
        Row("theta", "rope_theta", wavelength(), theta),
        Row("rotary", "rope_parameters", rotary_settings(), None),
        Row("scaling", "rope_scaling", rotary_settings(), None),
    )
