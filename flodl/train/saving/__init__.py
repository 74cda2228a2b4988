"""Checkpoints of runs: contents (`state`, `resume`), files (`keeper`, `reading`), times (`saves`)."""
