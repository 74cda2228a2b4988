"""One optimiser step.

`host` accumulates, reduces, decides and applies; `step` is its public form. `device` does the last three without the
host, with `decide` (and `norm_kernels`) for the decision and `fused` (and `adam`) for the update. `capture` decides
when steps are captured as CUDA graphs, `capturer` captures them, and `overlap` starts sums over ranks during the
backward pass. `outcome` contains the figures of a step; `blocks` and `tensor_sums` serve the kernels.
"""

from flodl.train.step.outcome import StepResult
from flodl.train.step.step import Step, TrainStep

__all__ = ["Step", "StepResult", "TrainStep"]
