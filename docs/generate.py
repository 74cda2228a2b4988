"""Write the pages of ``docs/reference``, tables of other pages and the index of families: ``python -m docs.generate``.

The sources are the tables that the program uses. A test compares the committed pages with the output.
"""

from __future__ import annotations

import datetime
import inspect
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from flodl import errors
from flodl_hf import errors as hf_errors
from flodl_hf.cli.docs import exported, public_modules
from flodl_hf.families import FAMILIES, index
from flodl_hf.families.schema import Family
from flodl_hf.families.schema.config_rows import REQUIRED, IgnoredKey, Row
from flodl_hf.families.schema.record import IGNORED_TENSORS, KeyRow
from flodl_hf.families.schema.shared_keys import COMMON_IGNORED_KEYS, FOREIGN
from flodl_hf.families.schema.tasks import HEADS, TASKS, Task, task_named
from flodl_hf.parity.matrix import checkpoints_of
from flodl_hf.tokenization.classes import ALIASES, CLASSES

FOLDER = Path(__file__).parent / "reference"
INDEX = Path(__file__).parents[1] / "flodl_hf" / "families" / "index.json"
MODELS = FOLDER.parent / "which-models.md"
TOKENIZERS = FOLDER.parent / "tokenizers.md"
SPEED = FOLDER.parent / "performance-families.md"
LLMS = FOLDER.parent / "llms.txt"
MEASURED = FOLDER.parent / "families_measured.json"
METHODS = (
    "embed",
    "embed_tokens",
    "embed_sparse",
    "predict",
    "zero_shot",
    "rerank",
    "answer",
    "answer_batch",
    "fill_mask",
)
NOTE = "Written by `make docs` from the program's own tables; edit those.\n"


def pages() -> dict[str, str]:
    """Return every generated page by its file name."""
    return {
        "README.md": index_page(),
        "families.md": families_page(),
        "heads.md": heads_page(),
        "cli.md": cli_page(),
        "errors.md": errors_page(),
        "routes.md": routes_page(),
        "names.md": names_page(),
    }


def index_page() -> str:
    """Return the list of the other pages."""
    return joined(
        "# Reference",
        NOTE,
        "- [Families](families.md): settings, tensor names, what is ignored and why\n"
        "- [Heads](heads.md): tasks, classes, results\n"
        "- [Command line](cli.md): every option\n"
        "- [Errors](errors.md): the tree\n"
        "- [Routes](routes.md): the fields of each path of `flodl-hf serve`\n"
        "- [Public names](names.md): every class and function that is stable, and the version that added it\n"
        "- Classes and functions, in the built site: [flodl_hf](../api/flodl_hf.md), [models](../api/models.md), "
        "[predictions](../api/predictions.md), [training](../api/training.md), "
        "[serving and export](../api/serving.md), [other libraries](../api/integrations.md), "
        "[flodl](../api/flodl.md), [its training](../api/flodl-training.md)",
        "```{toctree}\n:hidden:\n\nfamilies\nheads\ncli\nerrors\nroutes\nnames\n../api/flodl_hf\n../api/models\n"
        "../api/predictions\n../api/training\n../api/serving\n../api/integrations\n../api/flodl\n"
        "../api/flodl-training\n```",
    )


def names_page() -> str:
    """Return the public names by module and version; a name keeps the version of the committed page."""
    project = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    path = FOLDER / "names.md"
    page = path.read_text("utf-8") if path.exists() else ""
    rows = re.findall(r"^\| `(\S+)` \| (\S+) \| (.+) \|$", page, re.MULTILINE)
    known = {(module, name): since for module, since, names in rows for name in re.findall(r"`(\w+)`", names)}
    listed = []
    for module in public_modules():
        versions: dict[str, list[str]] = {}
        for name in exported(module):
            versions.setdefault(known.get((module, name), project["version"]), []).append(code(name))
        listed += [(code(module), since, ", ".join(names)) for since, names in versions.items()]
    return joined(
        "# Public names",
        NOTE,
        "These names are stable: a change keeps an alias for one release. Everything else is private and can change. "
        "`flodl-hf docs NAME` prints the entry of a name; pages of the [API reference](../api/flodl_hf.md) contain all "
        "entries. A module can list a name of another module again.",
        table(("module", "since", "names"), listed),
    )


def families_page() -> str:
    """Return settings and names of every family."""
    heads = [head.name for head in HEADS if head.name != "base"]
    overview = table(
        ("family", "`model_type`", *(head.short for head in HEADS)),
        (
            (
                f"[{family.class_prefix}](#{anchor(family.class_prefix)})",
                code(family.model_type),
                "yes",
                *("yes" if head in family.heads else "no" for head in heads),
            )
            for family in FAMILIES
        ),
    )
    ignored = table(("key", "why it changes nothing", "only at"), map(ignored_row, COMMON_IGNORED_KEYS))
    return joined(
        "# Families",
        NOTE,
        overview,
        "A key of `config.json` is *used* (a row below), *ignored* (known to have no effect here), *conflicting* "
        "(it contradicts what the family reads, as in transformers; loading warns), *refused* (another "
        "architecture's, or what code of the repository may read) or *noted*: a name that no family knows, told in the "
        "load report. `strict_config=True` refuses what is noted or conflicting. Keys that begin with an underscore, "
        "and keys that are switched off (null, false, empty), ask for nothing. A default that is *told* is that of "
        "transformers for a size: loading warns where it is taken, and `strict_config=True` refuses the file.",
        *map(family_section, FAMILIES),
        "## Ignored keys in every family",
        ignored,
        "## Tensors ignored in every family",
        "Where a file holds one of them beside the weights, or one of whole numbers that no family names. (Others "
        "that belong to no part of the model are ignored with a warning.)",
        table(("a name that ends in", "why it changes nothing"), ((code(name), why) for name, why in IGNORED_TENSORS)),
        "## Refused in every family",
        table(("key", "because"), ((code(entry.key), entry.what) for entry in FOREIGN)),
    )


def with_overview(page: str) -> str:
    """Return the page of models with the table of families, from their records."""
    speeds = {row["family"]: speed_of(row) for row in measured() if not row["length"] and row["kind"] == "cuda"}
    rows = (
        (
            code(family.model_type),
            ", ".join(code(head.short) for head in HEADS if head.name == "base" or head.name in family.heads),
            ", ".join(map(code, dict.fromkeys(checkpoints_of(family).values()))) or "-",
            "transformers, to the bit" if family.tiny else "the file's other names, or float64 written out",
            speeds.get(family.model_type, "-"),
        )
        for family in FAMILIES
    )
    head = ("`model_type`", "heads", "checkpoints of `verify-matrix --live`", "compared with", "ktok/s")
    return between(page, "families", table(head, rows))


def measured() -> list[dict[str, Any]]:
    """Return what `benchmarks.families` measured, a row for each family and length."""
    return json.loads(MEASURED.read_text("utf-8"))


def speed_of(row: Mapping[str, Any]) -> str:
    """Return thousands of tokens a second, and how many times transformers' that is."""
    other = row["transformers_tokens_per_s"]
    own = f"{row['tokens_per_s'] / 1e3:,.0f}"
    return own if other is None else f"{own} ({row['tokens_per_s'] / other:.1f}x)"


def with_speeds(page: str) -> str:
    """Return the page of figures with the tables of families as they were measured, a table for each kind of device."""
    for kind, unit, scale in (("cuda", "ktok/s", 1e3), ("cpu", "tokens/s", 1.0)):
        rows = [row for row in measured() if row["kind"] == kind]
        lines, grounds = [], dict[str, list[str]]()
        for row in rows:
            name = row["family"] + (f", rows of {row['length']:,} tokens" if row["length"] else "")
            own, other = row["tokens_per_s"], row["transformers_tokens_per_s"]
            share = f"{row['share_of_peak'] * 100:.1f} %" + (", attention not counted" if row["length"] else "")
            theirs = (row["lacking"], "-") if other is None else (f"{other / scale:,.0f}", f"{own / other:.1f}")
            lines.append((name, f"{own / scale:,.0f}", share, *theirs))
            day = datetime.date.fromisoformat(row["date"])
            ground = f"{row['device']}, torch {row['torch']}, {row['precision']}, {day.day} {day:%B %Y}"
            grounds.setdefault(ground, []).append(name)
        told = [f"{ground}: {'; '.join(names) if len(grounds) > 1 else 'all'}." for ground, names in grounds.items()]
        head = ("family", unit, "share of peak", f"transformers, {unit}", "times")
        page = between(page, f"measured families, {kind}", joined(table(head, lines), "\n".join(told)).strip())
    return page


def with_tokenizers(page: str) -> str:
    """Return the page of tokenizers with the table of their classes."""
    own = {
        family.class_prefix: family.tokenizer
        for family in FAMILIES
        if family.tokenizer is not None and family.tokenizer.files and not family.tokenizer.words
    }
    classes = {**own, **CLASSES}
    alike: dict[str, list[str]] = {}
    for name, other in ALIASES.items():
        alike.setdefault(other, []).append(f"{name}Tokenizer")
    rows = (
        (
            code(f"{name}Tokenizer"),
            ", ".join(map(code, alike.get(name.lower(), ()))) or "-",
            ", ".join(map(code, rules.files)),
        )
        for name, rules in sorted(classes.items(), key=lambda entry: entry[0].lower())
    )
    return between(page, "tokenizer classes", table(("class", "read in the same way", "files"), rows))


def between(page: str, name: str, text: str) -> str:
    """Return a page with ``text`` between the marks of a part that is written here."""
    start, end = f"<!-- {name}: written by `make docs` -->", f"<!-- end of {name} -->"
    before, _, rest = page.partition(start)
    _, found, after = rest.partition(end)
    assert found, f"{end} is missing"
    return f"{before}{start}\n\n{text}\n\n{end}{after}"


def family_section(family: Family) -> str:
    """Return the tables of a family; an alias links to the original."""
    module = inspect.getmodule(family.config)
    assert module is not None
    original = next(f for f in FAMILIES if f.config is family.config)
    title = f"## {family.class_prefix}"
    if original is not family and original.keys == family.keys:
        return joined(
            title,
            f"`model_type` {code(family.model_type)}, classes `{family.class_prefix}...`. Settings and tensor names "
            f"are those of [{original.class_prefix}](#{anchor(original.class_prefix)}).",
        )
    meaning = field_notes(family.config)
    typed = any(row.field == "type_vocab_size" for row in family.rows)
    parts = [
        title,
        (inspect.getdoc(module) or "").split("\n\n")[0],
        f"`model_type` {code(family.model_type)}, classes `{family.class_prefix}...`, tensors "
        f"`{family.base_prefix}.*`, {'with' if family.pooler else 'without'} a pooler, "
        f"{'with' if typed else 'without'} token types.",
        "### Settings of " + family.class_prefix,
        table(
            ("key", "our field", "takes", "default", "meaning"),
            (setting_row(row, meaning, family.left_out) for row in family.rows),
        ),
    ]
    if family.ignored_keys:
        parts.append(table(("ignored key", "why it changes nothing", "only at"), map(ignored_row, family.ignored_keys)))
    parts += ["### Tensors of " + family.class_prefix, key_table(family.keys)]
    for head in HEADS:
        spec = family.heads.get(head.name)
        if spec is None:
            continue
        note = f"`{head.short}` (`{family.class_prefix}{head.hf_suffix}`), " + (
            "on the pooler's output:" if spec.pooled else "on token states:"
        )
        ties = [f"{code(tie.also)} is {code(tie.kept)} where words are tied." for tie in spec.ties]
        aliases = [f"{code(alias)} may repeat {code(kept)}." for alias, kept in spec.aliases]
        parts += [note, key_table(spec.keys), *([" ".join([*ties, *aliases])] if ties or aliases else [])]
    if family.pretraining:
        read_as = (f"`{name}` as `{short(head)}`" for name, head in family.pretraining.items())
        parts.append("Further classes in `architectures`: " + ", ".join(read_as) + ".")
    if family.ignored:
        parts.append(table(("tensor not used", "why"), ((code(entry.name), entry.reason) for entry in family.ignored)))
    return joined(*parts)


def setting_row(row: Row, meaning: Mapping[str, str], left_out: Mapping[str, int]) -> tuple[str, ...]:
    """Return one setting as cells."""
    if row.default is REQUIRED and row.field in left_out:
        default = f"{code(repr(left_out[row.field]))}, told"
    elif row.default is REQUIRED:
        default = "required"
    elif callable(row.default):
        default = "from other settings"
    else:
        default = code(repr(row.default))
    return code(row.key), code(row.field), row.check.expected, default, meaning.get(row.field, "")


def ignored_row(entry: IgnoredKey) -> tuple[str, ...]:
    """Return one ignored key as cells."""
    only = "" if entry.only is None else ", ".join(code(repr(value)) for value in entry.only)
    return code(entry.key), entry.reason, only


def key_table(rows: Iterable[KeyRow]) -> str:
    """Return key rows as a table."""
    return table(("ours", "in the file"), ((code(row.ours), code(row.theirs)) for row in rows))


def field_notes(config: type[Any]) -> dict[str, str]:
    """Return the description of each field of a configuration dataclass, own ones before inherited ones."""
    notes: dict[str, str] = {}
    for kind in reversed(config.__mro__[:-1]):
        described = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2]
        for name, text in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", described, re.MULTILINE):
            notes[name] = text[0].upper() + " ".join(text.split())[1:]
    assert {f.name for f in fields(config)} <= notes.keys(), config
    return notes


def heads_page() -> str:
    """Return the tasks with their classes, predictions and outputs."""
    rows = []
    sections = []
    for head in HEADS:
        route = door_of(head)
        found = [name for name in METHODS if hasattr(head.model, name)]
        rows.append((code(head.name), code(head.short), code(route), ", ".join(map(code, found))))
        shared = sum(other.hf_suffix == head.hf_suffix for other in HEADS) > 1
        sections.append(f"## {route}" + (f", {head.short}" if shared else ""))
        sections.append((inspect.getdoc(inspect.getmodule(head.model)) or "").split("\n\n")[0])
        for name in found:
            method = getattr(head.model, name)
            sections += [f"`{name}{signature(method)}`", described(inspect.getdoc(method) or "")]
    names = table(
        ("task", "other names", "class", "fine-tuned as", "pipeline", "tag of the Hub", "paths of the server"),
        (
            (
                code(task.name), ", ".join(map(code, further_names(task))),
                code(door_of(task)), code(task.training),
                code(task.pipeline) if task.pipeline else "", code(task.hub_tag) if task.hub_tag else "",
                ", ".join(map(code, task.routes)),
            )
            for task in TASKS
        ),
    )  # fmt: skip
    about = (
        "These names mean the same as `head=` of `load`, `predict_file` and `serve`, `task=` of `finetune`, `evaluate` "
        "and `pipeline`, and on the command line. Upper and lower case, hyphens and underscores make no difference."
    )
    main = table(("head", "short", "class", "predicts with"), rows)
    return joined("# Heads", NOTE, main, "## Names of tasks", about, names, *sections)


def further_names(task: Task) -> list[str]:
    """Return further names of a task."""
    return [word for word in task.words if word not in (task.name, task.hf_suffix.lower())]


def door_of(task: Task) -> str:
    """Return the class of `flodl_hf` that loads a task's models."""
    return "AutoModel" + task_named(task.head).hf_suffix.removeprefix("Model")


def signature(method: Any) -> str:
    """Return a method's parameters with defaults, without annotations or self."""
    found = inspect.signature(method)
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in list(found.parameters.values())[1:]]
    return str(found.replace(parameters=plain, return_annotation=inspect.Signature.empty))


def described(doc: str) -> str:
    """Return a Google docstring as Markdown: sections as bold words, their entries as items."""
    lines: list[str] = []
    for line in doc.splitlines():
        if line in ("Args:", "Raises:", "Returns:"):
            lines += [f"**{line}**", ""]
        elif line.startswith("        "):
            lines[-1] += " " + line.strip()
        elif line.startswith("    "):
            name, _, text = line.strip().partition(":")
            lines.append(f"- `{name}`:{text}")
        else:
            lines.append(line)
    return "\n".join(lines)


def cli_page() -> str:
    """Return every command with its arguments and options."""
    import typer

    from flodl_hf.cli.app import app

    sections = []
    for name, command in commands_of(typer.main.get_command(app)):
        usage = [f"flodl-hf {name}"]
        rows = []
        for parameter in command.params:
            if parameter.param_type_name == "argument":
                shown = parameter.metavar or parameter.name.upper()
                usage.append(shown)
                rows.append((code(shown), help_of(parameter), ""))
            elif "--help" not in parameter.opts:
                rows.append((", ".join(map(code, parameter.opts)), help_of(parameter), default_of(parameter)))
        sections += [f"## {name}", f"`{' '.join(usage)} [OPTIONS]`", inspect.cleandoc(command.help or "")]
        sections.append(table(("argument or option", "meaning", "default"), rows))
    return joined("# Command line", NOTE, "Guide: [the command line](../guides/cli.md).", *sections)


def commands_of(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every command with its full name, also commands of groups."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands_of(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


def help_of(parameter: Any) -> str:
    """Return the help of an option in one line, with its values if the help lacks them."""
    text = " ".join((parameter.help or "").split())
    words = words_of(parameter)
    said = parameter.metavar is not None or all(word in text for word in words)
    return text if said else f"{text} One of {', '.join(map(code, words))}."


def words_of(parameter: Any) -> list[str]:
    """Return the words that an option takes; none where it takes any."""
    kind = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    # Former versions of typer have click's options.
    return [str(word) for word in getattr(getattr(parameter, "type", None), "choices", ())]


def default_of(parameter: Any) -> str:
    """Return an option's default, or what stands for none."""
    if parameter.required:
        return "required"
    value = parameter.default
    return "" if value is None or value is False else code(str(value))


def errors_page() -> str:
    """Return the trees and descriptions of the errors."""
    parts: list[str] = []
    rows: list[tuple[str, str, str]] = []
    for module in (errors, hf_errors):
        kinds = [kind for name in module.__all__ if inspect.isclass(kind := getattr(module, name))]
        tree = inspect.getdoc(module) or ""
        order = sorted(kinds, key=lambda kind: (tree.find(kind.__name__ + " "), kind.__name__))
        rows += [
            (code(k.__name__), code(k.__mro__[1].__name__), (inspect.getdoc(k) or "").splitlines()[0]) for k in order
        ]
        text = tree.split("\n\n")
        drawing = next(part for part in text if "├──" in part)
        parts += [f"`{module.__name__}`:", "```text\n" + inspect.cleandoc(drawing) + "\n```"]
        parts += [part for part in text[1:] if part is not drawing]
    return joined("# Errors", NOTE, *parts, table(("error", "is a", "raised for"), rows))


def routes_page() -> str:
    """Return the fields of each path of the server."""
    from flodl_hf.serving.routes.route import ROUTES

    parts = []
    for route in ROUTES:
        rows = [
            (
                code(name),
                kind,
                "required" if field.required else "applied" if field.effect else "no effect",
                field.description,
            )
            for name, kind, field in fields_of(route.fields)
        ]
        parts += [f"## `{route.path}` ({route.group})", f"{route.summary[0].upper()}{route.summary[1:]}."]
        parts.append(table(("field", "value", "use", "meaning"), rows))
    return joined(
        "# Routes",
        NOTE,
        "Guide: [serving](../guides/serving.md). Fields marked *no effect* are accepted because clients send them, and "
        "change no number. Any other field is refused with status 422, and the message names it. The parameters of `/` "
        "are those of the model's task: one of another task is refused too.",
        *parts,
    )


def fields_of(fields: Iterable[Any], path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield the name, the kind of value and the record of each field, and of the fields of objects."""
    from flodl_hf.serving.routes.route import KINDS

    for field in fields:
        yield path + field.name, KINDS[field.kind][1].replace("|", "\\|"), field
        yield from fields_of(field.fields, f"{path}{field.name}.")


def short(name: str) -> str:
    """Return a head's short name."""
    return next(head.short for head in HEADS if head.name == name)


def anchor(title: str) -> str:
    """Return the anchor of a heading without punctuation."""
    return title.lower().replace(" ", "-")


def code(text: str) -> str:
    """Return ``text`` as code that is safe in a table cell."""
    return "`" + text.replace("|", "\\|") + "`"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("\n", " ") for cell in line) + " |" for line in lines)


def joined(*parts: str) -> str:
    """Return paragraphs as a page."""
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def llms() -> str:
    """Return ``llms.txt``: the pages of the site for language models, by chapter, with links to their Markdown."""
    parts = [
        "# flodl-hf",
        "> Load, run, fine-tune, evaluate, serve and export Hugging Face encoders (BERT, RoBERTa, DeBERTa, ModernBERT "
        "and more) with Python and the command line, without transformers.",
        "`flodl-hf docs NAME --json` prints the entry of a public name of the installed version.",
    ]
    for caption, pages_of in chapters():
        lines = [f"- [{title_of(page)}](_sources/{page}.md.txt): {summary_of(page)}" for page in pages_of]
        parts += [f"## {caption}", "\n".join(lines)]
    return joined(*parts)


def chapters() -> Iterator[tuple[str, list[str]]]:
    """Yield the chapters of the site with their pages, in order."""
    book = (FOLDER.parent / "index.md").read_text("utf-8")
    for body in re.findall(r"^```\{toctree\}\n(.*?)^```", book, re.MULTILINE | re.DOTALL):
        caption = re.search(r":caption: (.+)", body)
        yield caption[1] if caption else "Pages", re.findall(r"^([\w/-]+)$", body, re.MULTILINE)


def title_of(page: str) -> str:
    """Return the heading of a page."""
    return (FOLDER.parent / f"{page}.md").read_text("utf-8").split("\n", 1)[0].removeprefix("# ")


def summary_of(page: str) -> str:
    """Return the first sentence of a page, without links."""
    text = (FOLDER.parent / f"{page}.md").read_text("utf-8").split("\n\n", 2)[1]
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(text.split()))
    return re.split(r"(?<=[a-z)`])[.:](?: |$)", plain)[0] + "."


def families_index() -> str:
    """Return the file in which a family is looked up, a line a family."""
    return "[\n" + ",\n".join(map(json.dumps, index())) + "\n]\n"


def main() -> None:
    """Write the pages and the index, and print the changed files."""
    if INDEX.read_text("utf-8") != families_index():
        INDEX.write_text(families_index(), "utf-8")
        print("flodl_hf/families/index.json")
    if not LLMS.exists() or LLMS.read_text("utf-8") != llms():
        LLMS.write_text(llms(), "utf-8")
        print("docs/llms.txt")
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        path = FOLDER / name
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
            print(f"docs/reference/{name}")
    for path, written in ((MODELS, with_overview), (TOKENIZERS, with_tokenizers), (SPEED, with_speeds)):
        page = path.read_text("utf-8")
        if page != written(page):
            path.write_text(written(page), "utf-8")
            print(f"docs/{path.name}")


if __name__ == "__main__":
    main()
