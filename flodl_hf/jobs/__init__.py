"""A file of texts in, a file of answers out: any number of rows in bounded memory, resumed where it was ended.

tables     Parquet and Arrow files of answers
columns    which columns the model reads, and which are kept
tasks      what each task gives for a row
write      rows with answers as JSON lines, CSV, TSV or Parquet
identity   what a run is of
parts      the folder of finished parts, and the step that makes a file of them
ranks      several processes on one file
plan       all that is decided before the first row
run        one part after the other
results    what a run tells of itself
counting   tokens, for rates
vectors    what parts hold of vectors in few bytes, and what becomes of them
file       `predict_file` and `encode_file`: what a call means
partitions rows of tables that other engines hold
worker     the process of a further rank
"""

from flodl_hf.jobs.file import encode_file, predict_file
from flodl_hf.jobs.results import FileResult, Progress

__all__ = ["FileResult", "Progress", "encode_file", "predict_file"]
