"""One optimiser step.

`host` accumulates, reduces, decides and applies. `device` does the last three without the host, and defines `Step`;
`decide` (and `norm_kernels`) decides, `update` (and `adam_kernels`) applies. `capture` decides when steps are captured
as CUDA graphs; `cuda_graphs` captures them, and starts sums over ranks during the backward pass. `outcome` contains the
figures of a step.
"""
