"""Data: rows into batches, batches onto a device, and a position that can be restored."""

from flodl.data.batch import Batch
from flodl.data.batches import BatchSource, EpochPlan, FixedBatches, LengthGroupedBatches, TokenBudgetBatches
from flodl.data.collate import CollateTokens, Where, collate_rows
from flodl.data.datasets import BatchDataset, TensorRows
from flodl.data.loader import DataLoader
from flodl.data.rng import Rng
from flodl.data.samplers import RandomSampler, Sampler, SequentialSampler, digest

__all__ = [
    "Batch",
    "BatchDataset",
    "BatchSource",
    "CollateTokens",
    "DataLoader",
    "EpochPlan",
    "FixedBatches",
    "LengthGroupedBatches",
    "RandomSampler",
    "Rng",
    "Sampler",
    "SequentialSampler",
    "TensorRows",
    "TokenBudgetBatches",
    "Where",
    "collate_rows",
    "digest",
]
