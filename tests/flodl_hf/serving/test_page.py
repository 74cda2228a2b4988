"""The page at the root, in Chromium: every head is asked, and nothing that a model answers becomes HTML."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from serving_models import MASKED

pytestmark = [pytest.mark.browser, pytest.mark.filterwarnings("ignore::ResourceWarning")]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("no Chromium is installed", allow_module_level=True)
playwright = pytest.importorskip("playwright.sync_api")

EVIL = "<img src=x onerror=window.caught=1> Ada 😀 lives in Paris"


@pytest.fixture(scope="module")
def page(served: tuple[str, Any]) -> Iterator[Any]:
    with playwright.sync_playwright() as made:
        browser = made.chromium.launch(executable_path=CHROMIUM, headless=True, args=["--no-sandbox", "--disable-gpu"])
        found = browser.new_page()
        found.faults = []
        found.on("pageerror", lambda fault: found.faults.append(str(fault)))
        found.on("console", lambda said: found.faults.append(said.text) if said.type == "error" else None)
        found.goto(served[0])
        yield found
        browser.close()


def asked(page: Any, model: str, text: str, **more: str) -> str:
    page.select_option("#model", model)
    page.fill("#text", text)
    for name, value in more.items():
        page.fill(f"#{name}", value)
    with page.expect_response(lambda answer: answer.request.method == "POST"):
        page.click("#ask")
    page.wait_for_timeout(200)
    return page.inner_text("#out")


def test_every_head_is_asked(page: Any, local: dict[str, Any]) -> None:
    assert "features" in asked(page, "embed", "the cat")
    best = local["classes"].predict("good film")
    assert f"{best.score:.4f}" in asked(page, "classes", "good film")
    assert "the cat" in asked(page, "ranker", "the cat\nthe dog", query="cat")
    assert "animal" in asked(page, "nli", "a cat", labels="animal, city")
    assert local["mlm"].fill_mask(MASKED[0]).token in asked(page, "mlm", MASKED[0])
    assert "Ada" in asked(page, "qa", "Ada lives in Paris.", question="who")
    shown = asked(page, "ner", EVIL)
    for entity in local["ner"].predict(EVIL):
        assert entity.word in shown
        assert entity.label in shown
    assert page.faults == []
    assert page.locator("#out img").count() == 0
    assert "tokens" in page.inner_text("#told")
    # What was said of the answer before goes with it.
    assert "has no [MASK]" in asked(page, "mlm", "no mask")
    assert page.inner_text("#told") == ""
