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
from flodl.data.builtin import Cifar10, Mnist, Shakespeare, crop_and_flip
from flodl.data.collate import CollateTokens, Where, collate_rows
from flodl.data.datasets import BatchDataset, Dataset, RowSource, TensorRows, as_batches
from flodl.data.distributed import DistributedPlan, RankBatches
from flodl.data.files import Table, load_rows, read_rows
from flodl.data.loader import DataLoader, EpochIterator
from flodl.data.rng import Rng, permutation
from flodl.data.samplers import RandomSampler, Sampler, SequentialSampler, WeightedSampler
from flodl.data.targets import Targets, as_numbers, infer_targets, is_missing

__all__ = [
    "Batch",
    "BatchDataset",
    "BatchSource",
    "Cifar10",
    "CollateTokens",
    "DataLoader",
    "Dataset",
    "DistributedPlan",
    "EpochIterator",
    "EpochPlan",
    "FixedBatches",
    "LengthGroupedBatches",
    "LoaderBuilder",
    "Mnist",
    "RandomSampler",
    "RankBatches",
    "Rng",
    "RowSource",
    "Sampler",
    "SequentialSampler",
    "Shakespeare",
    "Table",
    "Targets",
    "TensorRows",
    "TokenBudgetBatches",
    "WeightedSampler",
    "Where",
    "as_batches",
    "as_numbers",
    "collate_rows",
    "crop_and_flip",
    "cut_fixed",
    "fill_budget",
    "group_by_length",
    "infer_targets",
    "is_missing",
    "load_rows",
    "permutation",
    "read_rows",
]
