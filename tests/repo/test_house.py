"""The rules of the house that can be read off its files: who imports whom, what is never called, what stands where."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("flodl", "flodl_hf")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MAX_LINES = 500
MEDIAN_OF_FAMILIES = 150
LINES_OF_AN_ALIAS = 15
if not SOURCES:
    pytest.skip("tested from a wheel: the repository is not here", allow_module_level=True)

# Longer files, each with the reason that it is one idea.
LONGER: dict[str, str] = {}

# Who may import what, by path; a folder stands for all in it.
ONLY_IN = {
    # Classes for other libraries subclass the classes of the package that the user has installed.
    "transformers": ("flodl_hf/parity/reference.py", "flodl_hf/compat/transformers.py"),
    **dict.fromkeys(
        ("sentence_transformers", "langchain_core", "llama_index", "haystack", "chromadb", "mteb", "setfit", "spacy"),
        ("flodl_hf/compat/",),
    ),
    **dict.fromkeys(("sklearn", "optuna"), ("flodl_hf/compat/",)),
    "tokenizers": ("flodl_hf/tokenization/",),
    "huggingface_hub": ("flodl_hf/checkpoints/hub/",),
    "typer": ("flodl_hf/cli/",),
    "rich": ("flodl_hf/cli/", "flodl/progress.py"),
    "pyarrow": ("flodl_hf/tokenization/readers/", "flodl_hf/serving/responses.py"),
    "starlette": ("flodl_hf/serving/",),
    "uvicorn": ("flodl_hf/serving/",),
    "httpx": ("flodl_hf/serving/client.py",),
    "onnx": ("flodl_hf/export/engine.py",),
    "onnx_ir": ("flodl_hf/export/engine.py",),
    "onnxruntime": ("flodl_hf/parity/onnx_session.py",),
    # Not every system has them.
    "fcntl": ("flodl/system.py", "flodl_hf/checkpoints/system.py"),
    "msvcrt": ("flodl/system.py",),
    "ctypes": ("flodl/system.py", "flodl/distributed/board.py", "flodl_hf/checkpoints/"),
    "triton": (
        "flodl/train/step/adam_kernels.py",
        "flodl/train/step/norm_kernels.py",
        "flodl_hf/nn/kernels/",
    ),
}
FLODL_NEEDS = {"torch", "numpy", "safetensors", "triton", "psutil", "rich", "flodl"}


Nodes = list[Any]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: str, nodes: Nodes) -> Iterator[str]:
    """Yield the modules that a file imports, at its head or anywhere in it; relative ones in full."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(Path(path).parts[: -node.level]) if node.level else ""
            yield ".".join(part for part in (above, node.module) if part)


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {name(path): ast.parse(path.read_text("utf-8")) for path in SOURCES}


@pytest.fixture(scope="module")
def nodes(trees: dict[str, ast.Module]) -> dict[str, Nodes]:
    """Return what rules look at, by file: imports, classes and calls; a walk over all is made once."""
    looked_at = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.Call)
    return {path: [node for node in ast.walk(tree) if isinstance(node, looked_at)] for path, tree in trees.items()}


def test_libraries_are_imported_in_their_rooms_only(nodes: dict[str, Nodes]) -> None:
    strays = []
    seen = set()
    for path, found in nodes.items():
        for module in imports(path, found):
            library = module.partition(".")[0]
            if library in ONLY_IN:
                seen.add(library)
                if not path.startswith(ONLY_IN[library]):
                    strays.append(f"{path} imports {module}")
    assert not strays
    assert seen >= {"transformers", "tokenizers", "huggingface_hub", "typer"}


def test_every_imported_library_is_declared(nodes: dict[str, Nodes]) -> None:
    import sys
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    stated = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    declared = {re.split(r"[\[<>=!~ ;]", requirement)[0].lower().replace("-", "_") for requirement in stated}
    # huggingface_hub requires the first; torch's builds for CUDA bring the second, and nothing else wants it; the third
    # is what all packages of OpenTelemetry are imported as, and the fourth is in Triton's server alone.
    declared |= {"yaml", "triton", "opentelemetry", "triton_python_backend_utils"}
    # Packages of other names than their modules; LangChain, Chroma and LlamaIndex require pydantic.
    declared |= {"haystack", "llama_index", "sklearn", "pydantic"}
    used = {module.partition(".")[0] for path, found in nodes.items() for module in imports(path, found)}
    assert used - declared - set(sys.stdlib_module_names) - {"__future__", *PACKAGES} == set()


def test_flodl_stands_on_its_own(nodes: dict[str, Nodes]) -> None:
    import sys

    allowed = FLODL_NEEDS | set(sys.stdlib_module_names)
    strays = [
        f"{path} imports {module}"
        for path, found in nodes.items()
        if path.startswith("flodl/")
        for module in imports(path, found)
        if module.partition(".")[0] not in allowed
    ]
    assert not strays


# Words of what stands on flodl: nobody should have to know it to read the framework.
FOREIGN_WORDS = re.compile(r"hugging ?face|transformers\b|\bhub\b|cu_seqlens|tokenizer|flodl_hf", re.IGNORECASE)


def test_flodl_speaks_its_own_words() -> None:
    found = [
        f"{name(path)}:{number}: {line.strip()}"
        for path in SOURCES
        if name(path).startswith("flodl/")
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1)
        if FOREIGN_WORDS.search(line)
    ]
    assert not found


def test_files_hold_one_idea(trees: dict[str, ast.Module]) -> None:
    lengths = {name(path): len(path.read_text("utf-8").splitlines()) for path in SOURCES}
    assert {path: lines for path, lines in lengths.items() if lines > MAX_LINES and path not in LONGER} == {}
    assert [path for path in LONGER if lengths.get(path, 0) <= MAX_LINES] == [], "no longer an exception"
    assert [path for path in lengths if Path(path).name in ("utils.py", "util.py", "helpers.py", "misc.py")] == []
    assert [path for path, tree in trees.items() if not ast.get_docstring(tree) and tree.body] == []


def test_a_family_is_a_page_and_another_name_for_one_some_lines(trees: dict[str, ast.Module]) -> None:
    files = {
        path: len((ROOT / path).read_text("utf-8").splitlines())
        for path in trees
        if Path(path).parent.as_posix() == "flodl_hf/families" and not path.endswith("__init__.py")
    }
    # An alias states what differs and computes nothing of its own: it defines neither function nor class.
    aliases = {
        path: lines
        for path, lines in files.items()
        if not any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in ast.walk(trees[path]))
    }
    assert len(files) >= 20
    assert len(aliases) >= 3
    assert median(files.values()) <= MEDIAN_OF_FAMILIES
    assert {path: lines for path, lines in aliases.items() if lines > LINES_OF_AN_ALIAS} == {}


def test_nothing_is_named_base_manager_or_mixin(nodes: dict[str, Nodes]) -> None:
    # The outputs and the model of the encoder alone are called so after transformers' "base model".
    known = {"BaseModel", "BaseOutput"}
    classes = [node.name for found in nodes.values() for node in found if isinstance(node, ast.ClassDef)]
    found = {c for c in classes if re.match(r"_?Base[A-Z]", c) or re.search(r"(Manager|Mixin|Helper)$", c)}
    assert found <= known


# Calls that would run what a file says. `compile` and `exec` make the generated forward of a graph, from names that
# the builder checked.
RUNS_CODE = {"eval", "exec", "compile", "__import__"}
RUNS_IF_TOLD = {"shell", "trust_remote_code", "allow_pickle"}
MAKES_FORWARDS = ("flodl/graph/",)


def test_nothing_runs_code_from_files(nodes: dict[str, Nodes]) -> None:
    found = []
    for path, looked_at in nodes.items():
        for node in looked_at:
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called in RUNS_CODE and not path.startswith(MAKES_FORWARDS):
                    found.append(f"{path}:{node.lineno} {called}")
                if re.fullmatch(r"(pickle|marshal|shelve|dill|joblib|cloudpickle)\.(loads?|open|Unpickler)", called):
                    found.append(f"{path}:{node.lineno} {called}")
                if called in ("torch.load", "torch.hub.load") or called.endswith(("os.system", "os.popen")):
                    found.append(f"{path}:{node.lineno} {called}")
                told = [keyword for keyword in node.keywords if keyword.arg in RUNS_IF_TOLD]
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in told}
                if given.get("shell") == "True" or given.get("trust_remote_code") == "True":
                    found.append(f"{path}:{node.lineno} {called} with a shell or foreign code")
                if given.get("allow_pickle") == "True":
                    found.append(f"{path}:{node.lineno} {called} with pickles")
    assert not found


def tracked() -> list[Path]:
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
        ).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        # From an unpacked archive: everything that lies there, but for what tools leave behind.
        folders = [ROOT / part for part in (*PACKAGES, "tests", "docs", "examples")]
        listed = [
            name(p) for folder in folders for p in folder.rglob("*") if p.is_file() and "__pycache__" not in str(p)
        ]
    return [ROOT / path for path in listed if path and (ROOT / path).is_file()]


# A home or work folder, a private address, a package registry, a key: in pieces, so that this file holds none.
FOREIGN = re.compile(
    "|".join(
        (
            r"(?<![\w.:/])/(home|Users|root|work|workspace|mnt)/\w",
            r"(?<![\w.])(?:10|192\.168|172\.(?:1[6-9]|2\d|3[01]))(?:\.\d{1,3}){2,3}(?![\w.])",
            r"\b(?:pypi\.(?:org|python)|files\.pythonhosted|download\.pytorch|registry\.npm|artifactory|nexus)",
            r"\b(?:index-url|extra-index|trusted-host)\b",
            r"\bhf_[A-Za-z0-9]{30,}\b",
            r"BEGIN [A-Z ]*PRIVATE KEY",
        )
    )
)


def test_no_tracked_file_knows_the_machine_it_was_written_on() -> None:
    found = []
    for path in tracked():
        if path == Path(__file__):
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{name(path)}: {match[0]!r}" for match in FOREIGN.finditer(text)]
    assert not found


def test_no_tracked_file_is_large_or_a_leftover() -> None:
    for path in tracked():
        assert path.stat().st_size < 2_000_000, name(path)
        assert path.suffix not in (".pyc", ".orig", ".rej", ".log", ".so"), name(path)


def test_the_version_stands_in_one_place() -> None:
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("from a wheel: no project file")
    import tomllib

    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    word = re.compile(r"(?<![\w.])" + re.escape(version) + r"(?![\w.])")
    holders = [name(path) for path in SOURCES if word.search(path.read_text("utf-8"))]
    assert holders == []
    assert not any(re.search(r"^__version__\s*=", path.read_text("utf-8"), re.MULTILINE) for path in SOURCES)


def test_every_room_stands_in_the_architecture() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    for package in PACKAGES:
        section = text[text.index(f"\n{package}/ ") :].split("\n\n")[0]
        listed = set(re.findall(r"^  ([\w.]+/?) ", section, re.MULTILINE))
        folder = ROOT / package
        rooms = {p.name for p in folder.glob("*.py")} | {f"{p.parent.name}/" for p in folder.glob("*/__init__.py")}
        rooms -= {"__init__.py"}
        known = {path.relative_to(folder).parts for path in tracked() if path.is_relative_to(folder)}
        committed = {room for room in rooms if any(parts[0] == room.rstrip("/") for parts in known)}
        assert committed - listed == set(), "rooms that the architecture does not show"
        assert listed - rooms == set(), "rooms that are not there"


def test_what_a_room_says_it_holds_is_there() -> None:
    """Names at the beginning of lines, two spaces before what they are, are modules of the room."""
    listed = {}
    for path in SOURCES:
        if path.name == "__init__.py":
            text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
            names = re.findall(r"^(\w+) {2,}\S", text, re.MULTILINE)
            here = {entry.stem for entry in path.parent.iterdir()}
            listed[str(path)] = (names, [name for name in names if name not in here])
    assert sum(len(names) for names, _ in listed.values()) > 50
    assert {path: gone for path, (_, gone) in listed.items() if gone} == {}


def test_the_root_holds_what_people_import_by_name() -> None:
    """Every module of the root of ``flodl_hf`` is in a document; other modules are in packages."""
    shown = {ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")}
    text = "\n".join(path.read_text("utf-8") for path in shown - {ROOT / "docs" / "architecture.md"})
    modules = {path.stem for path in (ROOT / "flodl_hf").glob("*.py")} - {"__init__", "__main__"}
    named = {m for m in modules if re.search(rf"flodl_hf\.{m}\b|from flodl_hf import .*\b{m}\b", text)}
    assert modules - named == set()


def imported(nodes: dict[str, Nodes]) -> dict[str, set[str]]:
    """Return which modules of ours each of them imports: at its head, in a function, or for types alone."""
    names = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in nodes}

    def found(path: str) -> Iterator[str]:
        for node in nodes[path]:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = ".".join(Path(path).parts[: -node.level]) if node.level else ""
                module = ".".join(part for part in (above, node.module) if part)
                parts = [f"{module}.{alias.name}" for alias in node.names]
                yield from (part if part in names else module for part in parts)

    return {name: {n for n in found(path) if n in names and n != name} for name, path in names.items()}


def test_no_circle_of_imports_is_left(nodes: dict[str, Nodes]) -> None:
    left = imported(nodes)
    assert sum(map(len, left.values())) > len(left)
    while ready := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in ready:
            del left[name]
    # what is left needs what is left: a circle, or what stands on one
    assert {name: sorted(needs & left.keys()) for name, needs in left.items()} == {}


# Rooms that import each other although no two of their files do: a graph has an observer, which is of a graph.
ENTANGLED = [{"flodl.graph", "flodl.monitor"}]


def test_rooms_stand_one_above_another(nodes: dict[str, Nodes]) -> None:
    """Imports between rooms run one way: a folder of a package, or a file beside them, counts as one."""

    def room(module: str) -> str:
        return ".".join(module.split(".")[:2])

    below: dict[str, set[str]] = {}
    for module, needs in imported(nodes).items():
        # A package's own file hands names on from all of its rooms.
        found = {room(n) for n in needs if n not in PACKAGES}
        below.setdefault(room(module), set()).update(set() if module in PACKAGES else found - {room(module)})
    reached = {name: set(needs) for name, needs in below.items()}
    for through in below:
        for name, needs in reached.items():
            if through in needs:
                reached[name] = needs | reached[through]
    circles = [frozenset(n for n in needs if name in reached[n]) for name, needs in reached.items() if name in needs]
    assert sorted(map(sorted, set(circles))) == sorted(map(sorted, ENTANGLED))


def test_setting_up_shows_what_it_does() -> None:
    """The first `make demo` installs for minutes; nobody should look at an empty screen meanwhile."""
    recipe = (ROOT / "Makefile").read_text("utf-8").split("/.ready:", 1)[1].split("\n\n", 1)[0]
    assert "pip install" in recipe
    assert not re.search(r"--quiet|-q\b|> */dev/null", recipe)
    assert "echo" in recipe


def test_files_that_are_named_are_there() -> None:
    """A list of tests that names a file by an old name runs nothing, and pytest -n says so without a word."""
    if not (ROOT / "Makefile").exists():
        pytest.skip("from a wheel: no checkout")
    absent = []
    for path in tracked():
        if path.suffix not in (".py", ".md", ".toml", ".yml", "") or path.name == "CHANGELOG.md":
            continue
        named = re.findall(r"(?<![\w/.])(?:tests|benchmarks|examples)/[\w/]+\.py\b", path.read_text("utf-8"))
        absent += [f"{name(path)}: {found}" for found in named if not (ROOT / found).exists()]
    assert not absent


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="tested from a wheel, without the repository")
def test_every_folder_of_tests_has_a_fast_set() -> None:
    """`pytest -m fast FOLDER` runs files that exist, in each folder of tests of a package."""
    tree = ast.parse((ROOT / "tests" / "conftest.py").read_text("utf-8"))
    (fast,) = [node.value for node in tree.body if isinstance(node, ast.Assign) and name_of(node) == "FAST"]
    sets = ast.literal_eval(fast)
    tested = {path.parent.relative_to(ROOT / "tests").as_posix() for path in ROOT.glob("tests/flodl*/*/test_*.py")}
    assert set(sets) == tested
    files = [ROOT / "tests" / folder / f"test_{stem}.py" for folder, stems in sets.items() for stem in stems]
    assert [str(path) for path in files if "assert" not in path.read_text("utf-8")] == []
    assert all(sets.values())


def name_of(node: ast.Assign) -> str:
    return node.targets[0].id if isinstance(node.targets[0], ast.Name) else ""
