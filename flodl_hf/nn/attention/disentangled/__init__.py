"""Disentangled attention (He et al. 2020, https://arxiv.org/abs/2006.03654): content and position kept apart.

`positions` computes the distance of two tokens and the table row for it, `scores`
turns queries, keys and projected positions into attention scores (several implementations, one
meaning), `attention` is the module that projects, masks and mixes.
"""
