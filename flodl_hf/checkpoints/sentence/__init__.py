"""Models of sentence-transformers: what their folders say beside the encoder.

recipe       pooling, dense layers, prompts and normalisation, read and written
dense        the dense layers
sparse       sparse vectors (SPLADE)
multivector  a vector for each token (ColBERT)
"""
