"""Build hook that writes the README with absolute links into the package metadata.

Package indexes show the README without the files of the repository, so that relative links and pictures would be dead.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")


class LongDescription(MetadataHookInterface):
    """Set ``readme`` of the metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the README with links to the repository of ``[project.urls]`` and the tag of the version."""
        repository, tag = metadata["urls"]["Repository"].rstrip("/"), f"v{metadata['version']}"

        def absolute(match: re.Match[str]) -> str:
            picture, text, target = match.groups()
            return f"{picture}[{text}]({repository}/{'raw' if picture else 'blob'}/{tag}/{target})"

        text = _LINK.sub(absolute, (Path(self.root) / "README.md").read_text("utf-8"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
