"""One optimiser step, a file for each of its parts.

In the order in which a step passes them: `accumulate` (gradients of micro-batches), `flodl.distributed.gradients`
(their sum over ranks), `decide` (whether the step counts, with `norm_kernels`), `on_device` (the update, with `adam`);
`shared` puts them together for several ranks, `step` for all ways of carrying out a step. `capture` captures them,
`overlap` lets sums begin early, `pace` takes the time; `tensor_sums` adds up what is watched; `blocks` says which
program of a kernel reads which stretch of many tensors; `outcome` holds what a step came to.
"""

from flodl.train.step.outcome import StepResult, not_finite
from flodl.train.step.step import Step, TrainStep

__all__ = ["Step", "StepResult", "TrainStep", "not_finite"]
