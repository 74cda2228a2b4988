"""A folder into a repository of the Hub, by its client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flodl_hf.checkpoints.hub.request import token_for_one_host
from flodl_hf.errors import HubError


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
