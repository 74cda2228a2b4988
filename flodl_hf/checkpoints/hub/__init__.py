"""Resolve a name to a local folder, and upload folders: the Hub.

folders   resolve a name to a folder
download  a repository's files through the Hub's cache
choosing  the files of a repository that a model needs
request   requests to the Hub: their errors, time limits, and tokens that only one server gets
card      model cards and evaluation results, and the upload of a folder
"""
