"""File jobs: a file of texts in, a file of results out, in bounded memory, resumable after any interruption.

file        `predict_file` and `encode_file`, and the rank of a worker process
plan        decisions before the first row: columns, task, writer, identity
run         processing of one part after another; progress and result
columns     columns that the model reads, columns that are kept, and their new names if they collide with results
tasks       method and result columns of each task
write       rows with results as JSON lines, CSV, TSV or Parquet
tables      Parquet and Arrow files
vectors     vectors with few bytes
parts       folder of finished parts, and their join
identity    everything that determines the results of a job
ranks       several processes on one file
partitions  rows of Ray and Spark tables
"""

from flodl_hf.jobs.file import encode_file, predict_file
from flodl_hf.jobs.run import FileResult, Progress

__all__ = ["FileResult", "Progress", "encode_file", "predict_file"]
