"""Readers of tables: files and objects in memory into rows, and the labels in their columns.

arrow    Parquet and Arrow files, data frames, and the class names that they declare
columns  which columns contain the text, the labels, the question
files    formats, and rows of any source, CoNLL and SQuAD included
rows     rows of a file of lines in order, read some at a time or skipped; cells of CSV and TSV files
targets  the kind of the labels of a column, and their numbers
"""

from flodl_hf.tokenization.readers.files import Table, load_rows
from flodl_hf.tokenization.readers.targets import Targets, infer_targets

__all__ = ["Table", "Targets", "infer_targets", "load_rows"]
