"""The families this package knows. A new one is a file in this folder and a name in the tuple below."""

from flodl_hf.families import albert, bert, camembert, deberta_v2, distilbert, roberta, xlm_roberta
from flodl_hf.family import Family

__all__ = ["FAMILIES"]

FAMILIES: tuple[Family, ...] = (
    bert.FAMILY,
    roberta.FAMILY,
    xlm_roberta.FAMILY,
    camembert.FAMILY,
    distilbert.FAMILY,
    albert.FAMILY,
    deberta_v2.FAMILY,
)
