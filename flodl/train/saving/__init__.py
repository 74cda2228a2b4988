"""Checkpoints of runs: what is in them (`state`, `resume`), how they get to disk (`keeper`, `tensor_stream`), when."""
