"""Data: files into rows, rows into batches, batches onto a device, and a position that survives a restart."""

from flodl.data.batch import Batch
from flodl.data.batches import (
    BatchSource,
    EpochPlan,
    FixedBatches,
    LengthGroupedBatches,
    TokenBudgetBatches,
    cut_fixed,
    fill_budget,
    group_by_length,
)
from flodl.data.builder import LoaderBuilder
from flodl.data.collate import CollateTokens, Where, collate_rows
from flodl.data.datasets import BatchDataset, Dataset, RowSource, TensorRows, as_batches
from flodl.data.distributed import DistributedPlan, RankBatches, divide
from flodl.data.loader import DataLoader, EpochIterator
from flodl.data.rng import Rng, permutation
from flodl.data.samplers import RandomSampler, Sampler, SequentialSampler, WeightedSampler

__all__ = [
    "Batch",
    "BatchDataset",
    "BatchSource",
    "CollateTokens",
    "DataLoader",
    "Dataset",
    "DistributedPlan",
    "EpochIterator",
    "EpochPlan",
    "FixedBatches",
    "LengthGroupedBatches",
    "LoaderBuilder",
    "RandomSampler",
    "RankBatches",
    "Rng",
    "RowSource",
    "Sampler",
    "SequentialSampler",
    "TensorRows",
    "TokenBudgetBatches",
    "WeightedSampler",
    "Where",
    "as_batches",
    "collate_rows",
    "cut_fixed",
    "divide",
    "fill_budget",
    "group_by_length",
    "permutation",
]
