"""Optimisers and what moves with them: their groups (`optimizers`), rates (`rates`) and averages (`ema`)."""
