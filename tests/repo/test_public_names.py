"""Public names: complete, sorted, importable, the only ones that flodl_hf uses; and errors that can be pickled."""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest

import flodl
import flodl_hf
from flodl import errors
from flodl_hf import errors as hf_errors
from flodl_hf.cli.docs import exported, public_modules

ROOT = Path(__file__).parents[2]


def packages() -> list[str]:
    found = []
    for package in (flodl, flodl_hf):
        walked = pkgutil.walk_packages(package.__path__, package.__name__ + ".")
        found += [package.__name__, *(info.name for info in walked if info.ispkg)]
    return found


def modules() -> list[str]:
    found = []
    for package in (flodl, flodl_hf):
        found += [
            package.__name__,
            *(info.name for info in pkgutil.walk_packages(package.__path__, package.__name__ + ".")),
        ]
    return found


# Modules that a machine may lack the library for.
NEEDS = {
    "flodl.train.step.adam_kernels": "triton",
    "flodl.train.step.norm_kernels": "triton",
    "flodl_hf.cli": "typer",
    "flodl_hf.compat.transformers": "transformers",
    "flodl_hf.compat.chroma": "chromadb",
    "flodl_hf.compat.haystack": "haystack",
    "flodl_hf.compat.langchain": "langchain_core",
    "flodl_hf.compat.llama_index": "llama_index.core",
    "flodl_hf.compat.mteb": "mteb",
    "flodl_hf.compat.sentence_transformers_classes": "sentence_transformers",
    "flodl_hf.compat.setfit": "setfit",
    "flodl_hf.compat.sklearn": "sklearn",
    "flodl_hf.compat.spacy": "spacy",
    "flodl_hf.serving.client": "httpx",
    "flodl_hf.serving.app": "starlette",
    "flodl_hf.serving.http": "uvicorn",
    "flodl_hf.serving.running": "uvicorn",
    "flodl_hf.serving.http_process": "uvicorn",
    **{
        f"flodl_hf.nn.kernels.{n}": "triton"
        for n in (
            "copies",
            "disentangled",
            "fp16_split",
            "operations",
            "random",
            "rotary",
            "rows",
            "short_texts",
            "split_products",
        )
    },
}


def needed(module: str) -> list[str]:
    return [library for start, library in NEEDS.items() if module.startswith(start)]


def loaded(module: str) -> ModuleType:
    for library in needed(module):
        pytest.importorskip(library)
    return importlib.import_module(module)


@pytest.mark.parametrize(
    ("former", "now"),
    [
        *flodl_hf._MOVED.items(),
        ("auto.pipelines", "compat.pipelines"),
        ("finetuning.options", "training.options"),
        ("vectors.search", "inference.search"),
        *(
            (f"integrations.{name}", f"compat.{name}")
            for name in (
                "chroma",
                "haystack",
                "langchain",
                "llama_index",
                "mteb",
                "setfit",
                "sklearn",
                "spacy",
                "tuning",
            )
        ),
    ],
)
def test_former_names_of_modules_still_import(former: str, now: str) -> None:
    for library in (*needed(f"flodl_hf.{now}"), *(("ray",) if former == "ray" else ())):
        pytest.importorskip(library)
    assert importlib.import_module(f"flodl_hf.{former}") is importlib.import_module(f"flodl_hf.{now}")


def test_a_module_of_a_former_package_is_its_attribute() -> None:
    from flodl_hf.auto import pipelines  # pyright: ignore[reportMissingImports]

    assert pipelines is importlib.import_module("flodl_hf.compat.pipelines")


@pytest.mark.parametrize("module", modules())
def test_all_is_sorted_and_there(module: str) -> None:
    found = loaded(module)
    listed = list(getattr(found, "__all__", []))
    # As ruff sorts: constants, classes, the rest.
    order = sorted(listed, key=lambda n: (0 if n.isupper() else 1 if n[0].isupper() else 2, n))
    assert listed == order
    assert [n for n in listed if not hasattr(found, n)] == []


@pytest.mark.parametrize("module", packages())
def test_a_package_exports_what_it_imports(module: str) -> None:
    """Every name that the file of a package imports from the project and does not use is in ``__all__``."""
    found = loaded(module)
    tree = ast.parse(inspect.getsource(found))
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flodl") and node.names:
            names |= {alias.asname or alias.name for alias in node.names}
    imported = {n for n in names if not n.startswith("_") and not inspect.ismodule(getattr(found, n, None))}
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    assert imported - used - set(getattr(found, "__all__", ())) == set()


def bound_names(module: str) -> set[str]:
    """Return the names that the source of a module binds at its top, also for type checkers alone."""
    found: set[str] = set()
    folder = ROOT / module.replace(".", "/")
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    nodes = list(ast.parse(path.read_text("utf-8")).body)
    for node in nodes:
        if isinstance(node, (ast.If, ast.Try)):
            nodes += [*node.body, *node.orelse]
        elif isinstance(node, (ast.ImportFrom, ast.Import)):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        else:
            found |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    submodules = {p.stem for p in folder.glob("*") if p.suffix == ".py" or (p / "__init__.py").exists()}
    return found | submodules


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="tested from a wheel, without the repository")
def test_every_import_of_the_project_is_bound() -> None:
    """Programs that tests do not run, as benchmarks, import names that exist."""
    known: dict[str, set[str]] = {}
    absent = []
    for folder in ("flodl", "flodl_hf", "benchmarks", "examples", "docs"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("flodl", "flodl_hf"):
                    module = node.module or ""
                    names = known.get(module) or known.setdefault(module, bound_names(module))
                    absent += [
                        f"{path.relative_to(ROOT)}: {module}.{a.name}" for a in node.names if a.name not in names
                    ]
    assert absent == []


# What both packages of this distribution share and programs of users do not need: text and file functions, names of
# devices, and parts of training. It may change in any release. Remove an entry with its import; do not add any.
SHARED: dict[str, set[str]] = {
    "flodl.checkpoint.files": {"Checkpoint"},
    "flodl.checkpoint.tensor_bytes": {"TORCH_DTYPES", "bytes_of"},
    "flodl.data.batches": {"EpochPlan", "digest"},
    "flodl.data.rng": {"Rng"},
    "flodl.devices": {
        "all_devices",
        "best_device",
        "cuda_count",
        "default_device",
        "described",
        "parse_device",
        "pick_device",
        "training_devices",
        "why_no_cuda",
    },
    "flodl.distributed.group": {"Summed", "is_first_rank", "under_torchrun"},
    "flodl.fork_server": {"prepare_ranks"},
    "flodl.distributed.sharded": {"is_sharded"},
    "flodl.distributed.shares": {"deal", "ranges", "split"},
    "flodl.errors": {"capped", "nearest", "printable", "shown", "visible"},
    "flodl.files": {
        "POINTER_ADVICE",
        "SEAL",
        "is_pointer",
        "lock",
        "make_folders",
        "open_regular",
        "read_regular",
        "seal",
        "sync_folder",
        "unseal",
        "write_atomically",
    },
    "flodl.garbage_collection": {"gc_frozen", "gc_paused"},
    "flodl.graph.tree": {"parts_at"},
    "flodl.memory": {"available_memory"},
    "flodl.progress": {"Progress", "clock", "count", "in_words", "is_wanted", "worded"},
    "flodl.safetensors_header": {"name_fault", "read_header"},
    "flodl.signals": {"StopSignals"},
    "flodl.system": {"read_at", "read_vectors_at"},
    "flodl.train.builder": {"TrainerBuilder"},
    "flodl.train.evaluate": {"split_figures"},
    "flodl.train.events": {"Event", "Past", "Recorded"},
    "flodl.train.optim.ema": {"averaged_state"},
    "flodl.train.trials": {"Rehearsal"},
    "flodl.train.rules": {"parse_rule"},
    "flodl.train.saving.reading": {"list_checkpoints", "ranked", "read_checkpoint", "read_manifest", "signed"},
    "flodl.train.saving.state": {"check_fits", "copy_in_background", "fixed_names", "load_model"},
    "flodl.train.trackers": {"make_tracker"},
    "flodl.verbosity": {"Verbosity", "parsed", "verbosity"},
}
MAX_PUBLIC_NAMES = 132
"""An upper bound that may only fall."""


def public_names() -> dict[str, set[str]]:
    """Return the public names of flodl by module: the modules in its reference, and the package itself."""
    return {m: set(loaded(m).__all__) for m in public_modules() if m.split(".")[0] == "flodl"}


def imports_from_flodl() -> dict[str, set[str]]:
    """Return the names that flodl_hf imports from flodl, by module."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "flodl_hf").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flodl":
                found.setdefault(node.module or "", set()).update(alias.name for alias in node.names)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] == "flodl":
                        found.setdefault(alias.name, set()).add("*")
    return found


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="tested from a wheel, without the repository")
def test_flodl_hf_imports_only_public_or_shared_names_of_flodl() -> None:
    public = public_names()
    deep = {module: names - public.get(module, set()) for module, names in imports_from_flodl().items()}
    assert {module: names for module, names in deep.items() if names} == SHARED


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="tested from a wheel, without the repository")
def test_public_modules_define_their_names() -> None:
    """`tests/docs/test_reference.py` compares these modules with the pages of the API reference."""
    found = public_modules()
    assert [f"{m}.{name}" for m in found for name in exported(m) if name not in bound_names(m)] == []
    assert sum(len(exported(name)) for name in found if name.startswith("flodl_hf")) <= 180


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="tested from a wheel, without the repository")
def test_the_reference_lists_the_public_packages_of_flodl() -> None:
    public = public_names()
    offered = {name for name in packages() if name.count(".") == 1 and name.startswith("flodl.")}
    assert offered <= public.keys()
    assert len(set().union(*public.values())) <= MAX_PUBLIC_NAMES


def kinds() -> list[type[errors.FlodlError]]:
    for module in modules():
        if not needed(module):
            importlib.import_module(module)
    found: list[type[errors.FlodlError]] = [errors.FlodlError]
    for kind in found:
        found += [k for k in kind.__subclasses__() if k not in found]
    return [kind for kind in found if kind.__module__.startswith("flodl")]


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_errors_survive_pickling(kind: type[errors.FlodlError]) -> None:
    fault = kind("where: found this; expected that; do so", problems=["a", "b"], place=3)
    again = pickle.loads(pickle.dumps(fault))
    assert type(again) is kind
    assert str(again) == str(fault)
    assert (again.problems, again.place) == (["a", "b"], 3)


@pytest.mark.parametrize("module", [errors, hf_errors])
def test_the_tree_in_the_docstring_is_the_tree(module: ModuleType) -> None:
    drawn = module.__doc__ or ""
    own = [k.__name__ for k in kinds() if k.__module__ == module.__name__]
    assert own
    assert [name for name in own if name not in drawn] == []
