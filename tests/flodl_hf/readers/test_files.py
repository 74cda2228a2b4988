"""Files become rows, and what is wrong with a file is said with its line, all at once."""

import builtins
import csv
import gzip
import json
import os
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flodl.data import DataLoader
from flodl.errors import DataError
from flodl_hf.tokenization.readers import infer_targets, load_rows
from flodl_hf.tokenization.readers.files import open_rows, read_rows


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


# ---------------------------------------------------------------------------------------------- formats

ROWS = [{"text": "a b", "label": "1"}, {"text": "c", "label": "0"}]
SAME = {
    "a.csv": "text,label\na b,1\nc,0\n",
    "b.tsv": "text\tlabel\na b\t1\nc\t0",
    "c.tsv": "a b\t1\nc\t0\n",
    "d.csv": '\ufefftext,label\r\n\r\n"a b",1\r\nc,0\r\n',
    "e.jsonl": '{"text": "a b", "label": "1"}\n\n{"text": "c", "label": "0"}\n',
    "f.json": json.dumps(ROWS),
    "g.json": json.dumps({"version": 1, "data": ROWS}),
    "h.json": "\n".join(map(json.dumps, ROWS)),
    "i.csv.gz": gzip.compress(b"text,label\na b,1\nc,0\n"),
}


@pytest.mark.parametrize("name", SAME)
def test_every_text_format_gives_the_same_rows(write, name):
    assert load_rows(write(name, SAME[name])) == ROWS


def test_rows_in_memory_are_taken_as_they_are():
    class Rows:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return ROWS[index]

    columns = {"text": ["a b", "c"], "label": ["1", "0"]}
    for source in (ROWS, tuple(ROWS), iter(ROWS), columns, Rows()):
        assert load_rows(source) == ROWS


def test_arrow_and_parquet_files_and_tables(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import feather, parquet

    table = pyarrow.Table.from_pylist(ROWS)
    parquet.write_table(table, tmp_path / "a.parquet")
    feather.write_feather(table, tmp_path / "a.feather")
    with pyarrow.OSFile(str(tmp_path / "s.arrow"), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table)

    class Frame:  # what polars and pandas frames are to us: columns by name, rows through Arrow
        def __len__(self):
            return 2

        def __getitem__(self, name):
            raise KeyError(name)

        def get(self, name):
            return None

        def __arrow_c_stream__(self, requested_schema=None):
            return table.__arrow_c_stream__(requested_schema)

    for source in (tmp_path / "a.parquet", tmp_path / "a.feather", tmp_path / "s.arrow", table, Frame()):
        assert load_rows(source) == ROWS
    with pytest.raises(DataError):
        DataLoader(Frame(), 1)
    assert sorted(label for batch in DataLoader(load_rows(Frame()), 1) for label in batch["label"]) == ["0", "1"]
    for name in ("bad.parquet", "bad.arrow"):
        (tmp_path / name).write_bytes(b"ARROW1 no")
        with pytest.raises(DataError, match="pyarrow cannot read"):
            load_rows(tmp_path / name)


def test_without_pyarrow_the_way_out_is_named(write, monkeypatch):
    real = builtins.__import__

    def absent(name, *args, **kw):
        if name.partition(".")[0] == "pyarrow":
            raise ImportError(name)
        return real(name, *args, **kw)

    path = write("a.parquet", "x")
    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(DataError, match=r"flodl-hf\[data\]"):
        load_rows(path)


def test_text_files_give_lines(write):
    assert load_rows(write("a.txt", "one\r\n\n two \n")) == [{"text": "one"}, {"text": " two "}]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=9), st.text("ab,\"\n\t", max_size=6)), min_size=1, max_size=5))  # fmt: skip
def test_csv_written_by_the_standard_library_comes_back(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    with open(path, "w", encoding="utf-8", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)
    # a bare line of blanks inside a quoted cell is part of the cell; only lines of one blank cell are left out
    assert list(read_rows(path, columns=["x", "y"])) == [{"x": a, "y": b} for a, b in rows]


def test_quotes_in_tsv_are_characters(write):
    assert load_rows(write("a.tsv", 'say "hi\t1\n"x\t0\n'))[1] == {"text": '"x', "label": "0"}


def test_headers_are_told_by_their_looks_or_said(write):
    path = write("a.csv", "good,bad\nx,y\n")
    assert load_rows(path) == [{"good": "x", "bad": "y"}]
    assert load_rows(path, header=False)[0] == {"text": "good", "label": "bad"}
    assert load_rows(path, columns=["a", "b"])[0] == {"a": "good", "b": "bad"}
    assert load_rows(path, columns=["a", "b"], header=True) == [{"a": "x", "b": "y"}]
    assert load_rows(write("b.csv", "1,2,3,4\n"))[0]["column_3"] == "4"
    assert load_rows(write("c.csv", "a;b\n1;2\n"), delimiter=";") == [{"a": "1", "b": "2"}]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("text;label\nking, queen;good\n", [{"text": "king, queen", "label": "good"}]),
        ('\n"text";"label"\n"a;b";c\n', [{"text": "a;b", "label": "c"}]),
        ("text\tlabel\nking, queen\tgood\n", [{"text": "king, queen", "label": "good"}]),
        ("text,label;no\nking,a;b\n", [{"text": "king", "label;no": "a;b"}]),
        ('"text; raw"\nking\n', [{"text; raw": "king"}]),
        ("text\na;b\n", [{"text": "a;b"}]),
        ("text;\nking\n", [{"text;": "king"}]),
        ("", []),
    ],
)
def test_a_header_says_what_stands_between_cells(text, rows, write):
    path = write("c.csv", text)
    assert list(read_rows(path)) == rows


# Rows are those of pandas 3.1.1: read_csv(path, keep_default_na=False, dtype=str), with sep=";" for the last one.
ROWS_OF_PANDAS = {
    "index": (",text,label\n0,a b,x\n1,c,y\n", "Unnamed: 0,text,label", "0,a b,x|1,c,y"),
    "index of R": ('"","text","label"\n"1","a b","x"\n', "Unnamed: 0,text,label", "1,a b,x"),
    "names of rows alone": ('"text","label"\n"1","a b","x"\n"2","c","y"\n', "text,label", "a b,x|c,y"),
    "two indices": (",,text\n0,0,a\n", "Unnamed: 0,Unnamed: 1,text", "0,0,a"),
    "index read twice": (",Unnamed: 0,text\n0,1,a\n", "Unnamed: 0.1,Unnamed: 0,text", "0,1,a"),
    "numeric names": ("text,0,1\na b,1,0\nc,0,1\n", "text,0,1", "a b,1,0|c,0,1"),
    "numbered columns": ("0,1\na b,x\nc,y\n", "0,1", "a b,x|c,y"),
    "index and numbered columns": (",0,1\n0,a b,x\n1,c,y\n", "Unnamed: 0,0,1", "0,a b,x|1,c,y"),
    "names above numbers": ("topic,2024,2025\n1,2,3\n4,5,6\n", "topic,2024,2025", "1,2,3|4,5,6"),
    "repeated name": ("text,text,label\na,b,x\n", "text,text.1,label", "a,b,x"),
    "repeated name that is taken": ("text,text,text.1\na,b,x\n", "text,text.2,text.1", "a,b,x"),
    "empty last column": ("text,label,\na b,x,\nc,y,\n", "text,label,Unnamed: 2", "a b,x,|c,y,"),
    "empty last name": ("text,label,\na b,x\nc,y\n", "text,label,Unnamed: 2", "a b,x,|c,y,"),
    "empty name in the middle": ("text,,label\na,1,x\n", "text,Unnamed: 1,label", "a,1,x"),
    "long name": (f"text,{'q' * 80}\na,x\n", f"text,{'q' * 80}", "a,x"),
    "line ends of old Macs": ("text,label\ra b,x\rc,y\r", "text,label", "a b,x|c,y"),
    "line end in a cell": ('text,label\r"a\rb",x\r', "text,label", "a\rb,x"),
    "byte order mark": ('\ufeff"text","label"\n"a b",x\n', "text,label", "a b,x"),
    "quoted names": ('"text; raw","la ""b"""\na,x\n', 'text; raw,la "b"', "a,x"),
    "line break in a name": ('"text\nraw",label\na,x\n', "text\nraw,label", "a,x"),
    "semicolons": (";text;label\n0;a;x\n", "Unnamed: 0,text,label", "0,a,x"),
}


@pytest.mark.parametrize("case", ROWS_OF_PANDAS)
def test_columns_and_rows_of_csv_files_are_those_of_pandas(case, write):
    text, names, cells = ROWS_OF_PANDAS[case]
    path = write("c.csv", text)
    expected = [dict(zip(names.split(","), row.split(","), strict=True)) for row in cells.split("|")]
    assert load_rows(path) == expected
    with closing(open_rows(path)) as rows:
        assert rows.names == names.split(",")
        assert [row.values for row in rows.take(9)] == expected


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("good film,1\n1984,0\n10,1\n", [("good film", "1"), ("1984", "0"), ("10", "1")]),
        ("1984,pos\nfine,neg\n", [("1984", "pos"), ("fine", "neg")]),
        ("bad,1,\nfine,0,\n", [("bad", "1", ""), ("fine", "0", "")]),
        ("text,label\na b,x,\nc,y,\n", [("a b", "x"), ("c", "y")]),
    ],
)
def test_first_rows_of_data_are_no_header_and_a_comma_at_the_end_of_rows_is_no_column(text, rows, write):
    assert [tuple(row.values()) for row in load_rows(write("c.csv", text))] == rows


def test_a_file_without_a_header_has_commas(write):
    path = write("c.csv", "king;queen\n")
    assert load_rows(path, columns=["text"]) == [{"text": "king;queen"}]
    assert load_rows(path, header=False) == [{"text": "king;queen"}]


def test_a_field_longer_than_the_librarys_limit_is_read(write):
    assert len(load_rows(write("a.csv", "text,label\n" + "x" * 300_000 + ",1\n"))[0]["text"]) == 300_000


CONLL = """-DOCSTART- -X- O O

# id = 1
EU NNP B-ORG
rejects VBZ O

Peter NNP B-PER
"""


def test_conll_sentences(write):
    path = write("a.conll", CONLL)
    assert load_rows(path) == [
        {"words": ["EU", "rejects"], "tags": ["B-ORG", "O"]},
        {"words": ["Peter"], "tags": ["B-PER"]},
    ]
    named = load_rows(path, columns=["words", "_", "tags"])
    assert named == load_rows(path)
    assert load_rows(write("c.conll", "# O\na O\n# c d\n# O\n"))[0]["words"] == ["#", "a", "#"]
    assert load_rows(write("b.bio", "New York\tB-LOC\n#\tO\n")) == [
        {"words": ["New York", "#"], "tags": ["B-LOC", "O"]}
    ]


def squad(**changes):
    question = {"id": "q", "question": "Who?", "answers": [{"text": "Ada", "answer_start": 2}], **changes}
    return {"version": "1.1", "data": [{"title": "T", "paragraphs": [{"context": "O Ada!", "qas": [question]}]}]}


def test_squad_questions(write):
    path = write("a.json", json.dumps(squad()))
    assert load_rows(path) == [
        {
            "id": "q",
            "title": "T",
            "question": "Who?",
            "context": "O Ada!",
            "answers": {"text": ["Ada"], "answer_start": [2]},
            "is_impossible": False,
        }
    ]
    no = load_rows(write("b.json", json.dumps(squad(is_impossible=True, plausible_answers=[], answers=[]))))
    assert no[0]["is_impossible"]
    assert no[0]["answers"] == {"text": [], "answer_start": []}


# ----------------------------------------------------------------------------------------------- faults

FAULTY = [
    ("a.csv", "x,y\n1,2\n1\n1,2,3\n", [3, 4], 3),
    ("b.csv", 'x,y\n"a"b,2\n', [2], 2),
    ("d.csv", b"x,y\n1,2\n\xff,2\n", [3], 3),
    ("c.csv", b'x,y\n"1\xff\n2",3\n4,5\n6\n', [2, 5], 2),
    ("e.jsonl", '{"a": 1}\n[1]\n{"a"\n', [2, 3], 2),
    ("f.json", '{"a": 1', [1], 1),
    ("g.json", "[1, {}]", [], None),
    ("h.json", "3", [], None),
    ("i.conll", "a O\nb\nc O O\n", [2, 3], 2),
    ("j.conll", "a\nb\n", [1, 2], 1),
    ("q.conll", "a O\n#love\n", [2], 2),
    ("k.conll", "a\tO\n\tO\n", [2], 2),
    ("l.csv.gz", gzip.compress(b"x,y\n" + b"1,2\n" * 999)[:-9], [], ...),
    ("m.json", json.dumps(squad(answers=[{"text": "Ada", "answer_start": 3}])), [], None),
    ("n.json", json.dumps(squad(answers=[{"text": "Ada", "answer_start": "2"}, {"answer_start": 2}])), [], None),
    ("o.json", json.dumps(squad(question=None)), [], None),
    ("p.jsonl", "[" * 200_000, [1], 1),
]


@pytest.mark.parametrize(("name", "content", "lines", "first"), FAULTY, ids=[f[0] for f in FAULTY])
def test_faults_are_collected_with_their_lines(write, name, content, lines, first):
    path = write(name, content)
    with pytest.raises(DataError) as caught:
        load_rows(path)
    error = caught.value
    assert error.path == str(path)
    assert all(any(f"line {n}" in p for p in error.problems) for n in lines)
    assert len(error.problems) >= max(1, len(lines))
    assert all("found" in p and "expected" in p for p in error.problems)
    if first is not ...:
        assert error.line in (first, 1)


def test_a_file_wrong_on_every_line_gives_a_short_message(write):
    with pytest.raises(DataError) as caught:
        load_rows(write("a.csv", "x,y\n" + "1\n" * 5000))
    assert caught.value.count == 5000
    assert len(caught.value.problems) == 1000
    assert len(str(caught.value)) < 3000


def test_good_rows_before_a_fault_are_streamed(write):
    rows = read_rows(write("a.csv", "x,y\n1,2\n3\n4,5\n"))
    assert next(rows) == {"x": "1", "y": "2"}
    with pytest.raises(DataError):
        next(rows)


@pytest.mark.parametrize(
    ("source", "kw", "word"),
    [
        ("nowhere/a.csv", {}, "folder"),
        ("a.cvs", {}, "a.csv"),
        (".", {}, "folder"),
        ("a.docx", {}, "suffix"),
        ("a.csv", {"format": "cvs"}, "did you mean 'csv'"),
        ({"a": [1], "b": [1, 2]}, {}, "lengths"),
        ([1, 2], {}, "row 0"),
        (3, {}, "found int"),
        ([], {}, "no rows"),
    ],
)
def test_sources_that_cannot_be_read_say_what_to_do(write, monkeypatch, source, kw, word):
    path = write("a.csv", "x,y\n")
    write("a.docx", "")
    monkeypatch.chdir(path.parent)
    with pytest.raises(DataError, match=word):
        load_rows(source, **kw)


# ---------------------------------------------------------------------------------------------- labels


@pytest.mark.parametrize(
    ("values", "kind", "names", "first"),
    [
        (["neg", "pos", "neg"], "single_label", ("neg", "pos"), 0),
        (["10", "9", "10"], "single_label", ("9", "10"), 1),
        ([2, 0, 1], "single_label", ("0", "1", "2"), 2),
        ([1.0, 0.0], "single_label", ("0", "1"), 1),
        ([True, False], "single_label", ("False", "True"), 1),
        ([["b"], [], ["a", "b"]], "multi_label", ("a", "b"), [0, 1]),
        ([[1, 0, 1], [0, 0, 0]], "multi_label", ("0", "1", "2"), [1, 0, 1]),
        (["0.5", "3"], "regression", (), 0.5),
    ],
)
def test_labels_are_told_by_their_values(values, kind, names, first):
    targets = infer_targets(values)
    assert (targets.kind, targets.names) == (kind, names)
    assert targets.encode(values[0]) == first


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([], None),
        (["a", None], None),
        (["a", ""], None),
        (["a", ["b"]], None),
        (["a", float("nan")], None),
        ([0.5, float("nan")], None),
        (["1", "nan"], None),
        ([0.5, float("inf")], "regression"),
        ([[], []], None),
        (['["a"]', "[]"], None),
        (list(range(50)), None),
        (["a", "1.5"], "regression"),
        ([["a"]], "single_label"),
        (["a"], "multi_label"),
    ],
)
def test_labels_in_doubt_are_refused(values, kind):
    with pytest.raises(DataError):
        infer_targets(values, kind)


def test_a_label_unknown_to_the_training_data_is_refused():
    with pytest.raises(DataError) as caught:
        infer_targets(["a", "b"]).encode("c")
    assert caught.value.expected == ("a", "b")
    assert infer_targets(list(range(50)), "regression").encode(3) == 3.0
    with pytest.raises(DataError, match="expected a finite number"):
        infer_targets(list(range(50)), "regression").encode("nan")


def test_names_in_brackets_are_names_where_that_is_said():
    assert infer_targets(["[a]", "[b]"], "single_label").names == ("[a]", "[b]")
    assert infer_targets(["nan", "inf", "a"]).names == ("a", "inf", "nan")


def test_values_of_numpy_are_values_of_python():
    rows = [{"text": np.str_("a"), "label": np.int64(1), "score": np.float32(0.5), "tags": np.array(["O", "B"]), "hot": [np.bool_(True)]}]  # fmt: skip
    expected = [{"text": "a", "label": 1, "score": 0.5, "tags": ["O", "B"], "hot": [True]}]
    columns = {name: np.array([value]) for name, value in expected[0].items() if not isinstance(value, list)}
    for found, wanted in ((load_rows(rows), expected), (load_rows(columns), [{k: expected[0][k] for k in columns}])):
        assert found == wanted
        assert [type(v) for row in found for v in row.values()] == [type(v) for row in wanted for v in row.values()]
    assert type(load_rows(rows)[0]["hot"][0]) is bool


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes by name")
def test_a_pipe_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="a pipe or a device"):
        load_rows(tmp_path / "pipe")
