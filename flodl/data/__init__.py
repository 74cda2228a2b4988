"""Data: rows into batches, batches onto a device, and a position that can be restored."""

from flodl.data.batch import Batch
from flodl.data.batches import FixedBatches, LengthGroupedBatches, RandomSampler, SequentialSampler, TokenBudgetBatches
from flodl.data.collate import CollateTokens, TensorRows, Where
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
