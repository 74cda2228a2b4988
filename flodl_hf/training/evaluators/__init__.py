"""How good vectors are: figures by name, those of sentence-transformers' evaluators on the same vectors.

Each function takes vectors and truth; nothing here runs a model.
"""

from flodl_hf.training.evaluators.groups import clustering_figures, v_measure
from flodl_hf.training.evaluators.mined import mining_figures
from flodl_hf.training.evaluators.pairs import binary_figures, similarity_figures, triplet_figures
from flodl_hf.training.evaluators.ranked import ranking_figures, reranking_figures
from flodl_hf.training.evaluators.retrieval import retrieval_figures
from flodl_hf.training.evaluators.sizes import matryoshka_curve

__all__ = [
    "binary_figures",
    "clustering_figures",
    "matryoshka_curve",
    "mining_figures",
    "ranking_figures",
    "reranking_figures",
    "retrieval_figures",
    "similarity_figures",
    "triplet_figures",
    "v_measure",
]
