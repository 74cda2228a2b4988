"""Models of sentence-transformers: settings of their folders in addition to the encoder.

recipe       pooling, dense layers, prompts and normalisation, read and written
sparse       sparse vectors (SPLADE)
multivector  a vector for each token (ColBERT)
"""
