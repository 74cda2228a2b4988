"""Metadata of a model for the Hub, evaluation results in the Hub's format, and the upload of a folder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flodl_hf.checkpoints.hub.request import token_for_one_host
from flodl_hf.errors import HubError


def hub_name(name: str) -> str | None:
    """Return the repository that a model was named by, without its revision; None for a folder or a model in memory."""
    if name.count("/") != 1 or Path(name).exists() or name.startswith((".", "/", "~")):
        return None
    return name.partition("@")[0]


LONGEST = 1000
MOST_READ = 1 << 20  # larger files are not model cards


def front_matter(folder: Path) -> Mapping[str, Any]:
    """Return the metadata at the top of the card in a folder; empty without a readable card."""
    from huggingface_hub import metadata_load
    from yaml import YAMLError

    path = Path(folder) / "README.md"
    try:
        readable = path.is_file() and path.stat().st_size <= MOST_READ
        stated = metadata_load(path) if readable else None
    except (OSError, ValueError, YAMLError):
        return {}
    clean = {k: v for k, v in stated.items() if isinstance(k, str)} if isinstance(stated, Mapping) else {}
    return {name: value for name, value in clean.items() if len(str(value)) <= LONGEST}


def card_file(card: str | Path | None, metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """Return ``README.md`` with metadata at its top; values that the card contains already are kept.

    Args:
        card: a file or the text of a card; None for a card of metadata only.
        metadata: values by the Hub's names; None and empty values are left out.
    """
    from huggingface_hub import ModelCard

    text = card.read_text("utf-8") if isinstance(card, Path) else card
    found = ModelCard(text or "---\n{}\n---\n", ignore_metadata_errors=True)
    for name, value in metadata.items():
        if value and not found.data.get(name):
            found.data[name] = value
    return {"README.md": str(found).encode()}


def results_file(results: Iterable[Mapping[str, Any]]) -> dict[str, bytes]:
    """Return the file of evaluation results of benchmark data sets, as the Hub reads it; nothing without results.

    Args:
        results: for each result the fields of ``huggingface_hub.EvalResultEntry``: ``dataset_id``, ``task_id`` and
            ``value``, and perhaps ``dataset_revision``, a commit of the data set.

    Raises:
        HubError: a result has another field, lacks one, or its ``dataset_revision`` is not a commit.
    """
    import yaml
    from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

    entries = []
    for result in results:
        revision = result.get("dataset_revision")
        if revision is not None and not re.fullmatch(r"[0-9a-f]{40}", str(revision)):
            raise HubError(
                f"push_to_hub: found dataset_revision={revision!r}, expected the 40 hexadecimal digits of a commit. "
                "Branches and tags may change."
            )
        try:
            entries.append(EvalResultEntry(**result))
        except (TypeError, ValueError) as fault:
            raise HubError(
                f"push_to_hub: found the result {dict(result)} ({fault}), expected dataset_id, task_id and value"
            ) from None
    text = yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False, allow_unicode=True)
    return {".eval_results/flodl-hf.yaml": text.encode()} if entries else {}


def upload_folder(
    folder: Path,
    repo_id: str,
    *,
    message: str,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
) -> str:
    """Make the repository if need be, put the files of a folder into it in one commit, and return its address.

    Args:
        folder: the files.
        repo_id: "owner/name".
        message: of the commit.
        private: whether a new repository is.
        token: Hub token; None takes the environment's.
        revision: branch; None is the main one.
        create_pr: open a pull request instead.

    Raises:
        HubError: the Hub cannot be reached or refuses.
    """
    import os

    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import build_hf_headers

    # The environment now, not as it was when the client was imported.
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token)
    try:
        with token_for_one_host(api.endpoint, build_hf_headers(token=token).get("authorization")):
            api.create_repo(repo_id, private=private, exist_ok=True)
            if revision is not None and not create_pr:
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            done: Any = api.upload_folder(
                repo_id=repo_id, folder_path=str(folder), commit_message=message, revision=revision, create_pr=create_pr
            )
    except (HfHubHTTPError, OSError, ValueError, RuntimeError) as fault:
        why = f": {fault.__cause__}" if isinstance(fault, RuntimeError) and fault.__cause__ else ""  # of one file
        raise HubError(
            f"{repo_id}: nothing was uploaded ({type(fault).__name__}: {fault}{why}); check the name, and that the "
            "token may write there (hf auth login, or HF_TOKEN)",
            repo_id=repo_id,
        ) from fault
    return str(done.pr_url if create_pr and done.pr_url else done.commit_url)
