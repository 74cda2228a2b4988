"""Proof that our side and transformers' side are equal: batches, the reference, and the matrix of cells.

`reference` is the only file of the project that imports transformers, and only when a comparison is
asked for.
"""
