"""The families this package knows. A new one is a file in this folder and a name in the tuple below."""

from flodl_hf.families import bert
from flodl_hf.family import Family

__all__ = ["FAMILIES"]

FAMILIES: tuple[Family, ...] = (bert.FAMILY,)
