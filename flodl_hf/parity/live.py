"""The matrix on the published checkpoints of `flodl_hf.parity.published`.

Needs a network (or a cache with the checkpoints); otherwise every cell reports "not run" and why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from flodl.errors import FlodlError
from flodl_hf.parity.cell import Bench, Cell
from flodl_hf.parity.checks import CHECKS
from flodl_hf.parity.evidence import Evidence
from flodl_hf.parity.matrix import CellResult, _guarded
from flodl_hf.parity.published import checkpoints_of

# Their files differ from run to run of the hub's conversion only in what these checks do not read.
LIVE_CHECKS = ("config_triage", "strict_load", "forward", "layouts", "gradients", "export_bytes", "half_precision")


def live_cells(cells: Iterable[Cell], checks: Sequence[str] = ()) -> Iterator[CellResult]:
    """Yield the result of each cell on its pinned checkpoint."""
    from flodl_hf.checkpoints.hub.folders import resolve_folder
    from flodl_hf.checkpoints.weights.file_names import BIN_FILES, MODEL_FILES

    chosen = [c for c in CHECKS if c.__name__ in (checks or LIVE_CHECKS)]
    for cell in cells:
        name = checkpoints_of(cell.record).get(cell.head)
        reason = "no published checkpoint is named for this cell"
        result = CellResult(cell)
        if name is not None and cell.variant == "base":
            try:
                folder, _ = resolve_folder(name, {}, (*MODEL_FILES, *BIN_FILES))
                with Bench(cell, source=folder) as bench:
                    result.evidence = [_guarded(check, bench) for check in chosen]
            except FlodlError as fault:
                reason = str(fault)
        if not result.evidence:
            result.evidence = [Evidence(check.__name__, "not run", reason) for check in chosen]
        yield result
