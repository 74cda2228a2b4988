"""Keywords of other libraries: taken where they mean what one of ours means, else passed over or explained.

taking   how a method takes them: by a table of words
loading  the tables of loading and saving; those of prediction are `flodl_hf.heads.prediction_keywords`
"""
