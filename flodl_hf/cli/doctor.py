"""``flodl-hf doctor``: capabilities of this machine, and problems."""

from __future__ import annotations

import typer

from flodl_hf.cli.options import JSON, with_parameters
from flodl_hf.cli.shared import emit_json, reporting, tell

_MARKS = {"ok": "     ", "note": " !   ", "problem": " !!! "}
_COLOURS = {"ok": None, "note": "yellow", "problem": "red"}


@reporting
@with_parameters((JSON,))
def command(json_output: bool) -> None:
    """Examine machine, packages, devices, kernels, caches and environment; report fast paths and problems.

    Kernels are compared with torch's on each device. No model is read and no connection is opened. Exit status 1 if
    something does not work. Include the output in bug reports.
    """
    from flodl_hf.inference.doctor import examine

    found = examine()
    if json_output:
        emit_json(found.to_dict())
    else:
        part = ""
        for finding in found.findings:
            if finding.part != part:
                tell(finding.part if not part else f"\n{finding.part}", bold=True)
                part = finding.part
            style = {"fg": _COLOURS[finding.state]} if _COLOURS[finding.state] else {}
            tell(f"{_MARKS[finding.state]}{finding.name:<26}{finding.found}", **style)
            if finding.advice:
                tell(f"{'':31}-> {finding.advice}", **style)
        notes = sum(finding.state == "note" for finding in found.findings)
        problems = sum(finding.state == "problem" for finding in found.findings)
        tell(f"\n{problems or 'no'} problem{'s' * (problems != 1)}, {notes or 'no'} note{'s' * (notes != 1)}")
    raise typer.Exit(0 if found.sound else 1)
