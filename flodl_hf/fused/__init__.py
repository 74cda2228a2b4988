"""Encoder layers in training on CUDA: few kernels instead of many, the same arithmetic."""

from flodl_hf.fused.install import fuse_layers

__all__ = ["fuse_layers"]
