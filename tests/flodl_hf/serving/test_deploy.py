"""The files of `deploy/` name options and paths that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

DEPLOY = Path(__file__).parents[3] / "deploy"
if not DEPLOY.exists():
    pytest.skip("tested from a wheel: the files are not here", allow_module_level=True)


def options() -> set[str]:
    from flodl_hf.cli.app import app

    command: Any = typer.main.get_command(app)
    return {name for parameter in command.commands["serve"].params for name in parameter.opts}


def paths() -> set[str]:
    from flodl_hf.serving.app import create_app
    from flodl_hf.serving.settings import Settings, served

    async def made() -> set[str]:
        return {route.path for route in create_app(Settings(models=served(["m"]))).routes}  # type: ignore[attr-defined]

    import asyncio

    return asyncio.run(made())


def test_the_container_s_command() -> None:
    text = (DEPLOY / "Dockerfile").read_text("utf-8")
    entry = json.loads(re.search(r"^ENTRYPOINT (.+)$", text, re.MULTILINE)[1])  # type: ignore[index]
    assert entry[:2] == ["flodl-hf", "serve"]
    assert {word for word in entry if word.startswith("--")} <= options()
    assert "/health" in text and "/health" in paths()  # noqa: PT018


def test_the_manifest_s_commands_and_probes() -> None:
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text("utf-8"))
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    args = container["args"]
    assert {word for word in args if word.startswith("--")} <= options()
    probes = [container[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert set(probes) <= paths()
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = int(args[args.index("--drain-s") + 1])
    assert pod["terminationGracePeriodSeconds"] > pause + drain
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]


def test_the_compose_file() -> None:
    found = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
    assert set(found["services"]) == {"serve", "prometheus"}
    assert all(address.startswith("127.0.0.1:") for one in found["services"].values() for address in one["ports"])
    scraped = yaml.safe_load(found["configs"]["prometheus"]["content"])
    assert scraped["scrape_configs"][0]["static_configs"][0]["targets"] == ["serve:8080"]
