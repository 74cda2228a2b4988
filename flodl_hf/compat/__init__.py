"""Keywords and names of other libraries: mapped to ours, ignored, or refused with the reason.

kwargs       the decorator of methods that accept them, by a table
loading      the tables of loading and saving; `flodl_hf.heads.prediction_keywords` contains the prediction tables
other_names  names that users import from other libraries
"""
