"""Disentangled attention (He et al. 2020, https://arxiv.org/abs/2006.03654): content and position kept apart.

`parts` has DeBERTa's embeddings, its convolution, and the distance of two tokens with its table row; `scores` turns
queries, keys and projected positions into attention scores (several implementations, one meaning); `attention` is the
module that projects, masks and mixes; `operator` the kernels with their gradients.
"""
