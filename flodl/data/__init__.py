"""Data: rows into batches, batches onto a device, and a position that can be restored."""

from flodl.data.batch import Batch
from flodl.data.batches import FixedBatches, LengthGroupedBatches, RandomSampler, SequentialSampler, TokenBudgetBatches
from flodl.data.collate import CollateTokens, Where
from flodl.data.datasets import TensorRows
from flodl.data.loader import DataLoader

__all__ = [
    "Batch",
    "CollateTokens",
    "DataLoader",
    "FixedBatches",
    "LengthGroupedBatches",
    "RandomSampler",
    "SequentialSampler",
    "TensorRows",
    "TokenBudgetBatches",
    "Where",
]
