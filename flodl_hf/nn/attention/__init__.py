"""Attention: the computation that mixes tokens.

dot_product   scaled dot products over a layout, and which kernel runs for which layout
rotary        queries and keys turned by their places
distances     what attention adds by the distance of two tokens
disentangled  DeBERTa's, which keeps content and position apart
prefixes      keys and values that adapters put before each row's own
"""
