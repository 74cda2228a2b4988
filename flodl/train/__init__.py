"""Training: one trainer for one device or many, exact steps, state that resumes to the bit.

The pieces: `Trainer` (the loop), `Step` (one optimiser step), `Loss` (a sum and a count), `Settings`,
events to subscribe to, optimiser factories and parameter groups. How ranks share work is in
`flodl.distributed`; what batches are in `flodl.data`.

To read it: `settings`, `trainer` (the parts of a run and the loop), `ends` (its start and end); then `step`.
"""

from flodl.train.callback import Callback, Profiler
from flodl.train.events import (
    Decided,
    EpochMetrics,
    EvalDone,
    Event,
    Observed,
    RunDone,
    RunStarted,
    Saved,
    SaveFailed,
    StepDone,
    Synced,
    Warned,
)
from flodl.train.handle import Trained
from flodl.train.loss import Loss
from flodl.train.optim.ema import Ema
from flodl.train.optim.optimizers import adamw, layerwise_decay, parameter_groups, sgd
from flodl.train.replicas import Replicas
from flodl.train.rules import Rule, freeze_when, set_rate, stop_when, thaw_when
from flodl.train.settings import Precision, Settings
from flodl.train.snapshots import ModelSnapshot
from flodl.train.step.device import Step
from flodl.train.trackers import Tracker
from flodl.train.trainer import Trainer
from flodl.train.trials import RateSearch

__all__ = [
    "Callback",
    "Decided",
    "Ema",
    "EpochMetrics",
    "EvalDone",
    "Event",
    "Loss",
    "ModelSnapshot",
    "Observed",
    "Precision",
    "Profiler",
    "RateSearch",
    "Replicas",
    "Rule",
    "RunDone",
    "RunStarted",
    "SaveFailed",
    "Saved",
    "Settings",
    "Step",
    "StepDone",
    "Synced",
    "Tracker",
    "Trained",
    "Trainer",
    "Warned",
    "adamw",
    "freeze_when",
    "layerwise_decay",
    "parameter_groups",
    "set_rate",
    "sgd",
    "stop_when",
    "thaw_when",
]
