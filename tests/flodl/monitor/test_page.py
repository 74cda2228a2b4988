"""The page in a real Chromium: live, late, after the end, side by side, from a file, by keyboard, on a phone, in the dark."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from flodl.monitor import Monitor
from flodl.monitor.architecture import facts_of, tree_of
from flodl.monitor.folder import RunFolder
from flodl.train.events import (
    EvalDone,
    LayersTimed,
    ModelDescribed,
    RankWork,
    RunDone,
    RunFailed,
    RunStarted,
    StepDone,
    Synced,
    Warned,
)  # fmt: skip

pytestmark = [pytest.mark.browser, pytest.mark.filterwarnings("ignore::ResourceWarning")]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("no Chromium is installed", allow_module_level=True)
playwright = pytest.importorskip("playwright.sync_api")

FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync")  # fmt: skip
EVIL = [
    "<script>window.caught=1</script>", "<img src=x onerror=window.caught=1>", "</script><script>window.caught=1</script>",
    "\"><svg onload=window.caught=1>", "javascript:window.caught=1", "${window.caught=1}", "<!--<script>", "]]>", "&lt;b&gt;",
    "\u2028\u2029\u202eevil", "'-window.caught=1-'", "__proto__", "constructor",
]  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as made:
        chromium = made.chromium.launch(executable_path=CHROMIUM, headless=True, args=list(FLAGS))
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    yield from opened(browser)


def opened(browser: Any, **options: Any) -> Iterator[Any]:
    """Yield a page that fails the test for whatever the browser complains of."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "console",
        lambda said: (
            complaints.append(said.text)
            if said.type in ("error", "warning") and "ERR_" not in said.text and "EventSource" not in said.text
            else None
        ),
    )
    page.on("dialog", lambda dialog: complaints.append("a dialog: " + dialog.message))
    page.set_default_timeout(45_000)
    yield page
    context.close()
    assert complaints == []


@pytest.fixture
def monitor() -> Iterator[Monitor]:
    with Monitor(name="watched", quiet=True, interval_s=0.02, resources_s=0) as made:
        yield made


def start(monitor: Monitor, world: int = 1, steps: int = 100) -> None:
    monitor(RunStarted(world=world, policy="sync" if world == 1 else "cadence", epochs=2, steps_per_epoch=steps // 2))


def step(monitor: Monitor, number: int, loss: float | None = None, **metrics: float) -> None:
    value = 1 / number if loss is None else loss
    monitor(
        StepDone(
            step=number, epoch=0 if number <= 50 else 1, loss=value, count=8, samples=8, lr=1e-3, grad_norm=1.0,
            compute_ms=4, wall_ms=5, metrics=metrics,
        )
    )  # fmt: skip


def judge(monitor: Monitor, number: int, **metrics: float) -> None:
    monitor(EvalDone(step=number, epoch=0, metrics=metrics, wall_ms=10))


def until(page: Any, condition: str, seconds: float = 45.0) -> None:
    """Wait until an expression holds; the page's policy forbids what playwright does for that."""
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(30)


def text(page: Any, selector: str) -> str:
    return page.locator(selector).first.inner_text()


def chart(page: Any, title: str) -> Any:
    return page.locator(".chart").filter(has=page.locator("h3", has_text=title)).first


def test_the_page_is_alive_and_late_readers_see_all(monitor: Monitor, page: Any, browser: Any) -> None:
    url = monitor.serve(0)
    page.goto(url)
    until(page, "document.getElementById('name').textContent === 'watched'")
    start(monitor)
    for number in range(1, 21):
        step(monitor, number, accuracy=0.5)
    until(page, "document.querySelector('.vital .value').textContent === '20'")
    assert text(page, "#status") == "running"
    assert text(page, ".vital .under") == "of 100"
    before = chart(page, "loss").locator("path.curve:not(.raw)").get_attribute("d")
    for number in range(21, 51):
        step(monitor, number, accuracy=0.5)
    judge(monitor, 50, accuracy=0.75)
    until(page, "document.querySelector('.vital .value').textContent === '50'")
    until(page, f"document.querySelector('.chart path.curve:not(.raw)').getAttribute('d') !== '{before}'")
    assert "0.7500" in page.locator(".vital", has_text="best accuracy").inner_text()
    # somebody who comes late
    for late in opened(browser):
        late.goto(url)
        until(late, "document.querySelector('.vital .value').textContent === '50'")
        assert "train from 1.0000 to 0.02" in chart(late, "loss").locator("svg").get_attribute("aria-label")
        monitor(RunDone(step=50, epoch=1, reason="finished"))
        for one in (page, late):
            until(one, "document.getElementById('status').textContent === 'finished'")
    # somebody who comes after the end
    for last in opened(browser):
        last.goto(url)
        until(last, "document.getElementById('status').textContent === 'finished'")
        assert text(last, ".vital .value") == "50"
    # and when nobody answers any more, what was known stays
    monitor.close()
    until(page, "document.getElementById('link').textContent === 'no connection'")
    assert text(page, ".vital .value") == "50"


def test_the_architecture_is_coloured_by_what_is_known(monitor: Monitor, page: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 2))
    page.goto(monitor.serve(0))
    start(monitor)
    monitor(ModelDescribed(tree=tree_of(model), facts=facts_of(model)))
    paths = {"0": 1.0, "1": 6.0, "1.0": 2.0, "1.1": 4.0, "2": 0.5}
    told = {path: value * 1e-3 for path, value in paths.items()}
    monitor(LayersTimed(step=3, seconds=told, gradients=paths))
    until(page, "document.querySelectorAll('.model .part-heat').length > 3")
    choices = page.locator("input[name=heat]")
    assert [choices.nth(i).get_attribute("value") for i in range(choices.count())] == ["time", "gradient", "parameters"]
    monitor(LayersTimed(step=4, seconds={}, gradients=paths, memory={p: v * 1024 * 1024 for p, v in paths.items()}))
    until(page, "document.querySelector('input[name=heat][value=memory]') !== null")
    # The two linears inside are one box: sums, and for norms the root of the squares.
    for seconds, word in ((2e-6, "2 µs"), (0.25, "250.00 ms"), (1.534, "1.53 s")):
        assert page.evaluate(f"brief({seconds})") == word
    words = {"time": "6.00 ms", "gradient": "4.47", "memory": "6", "parameters": "144"}
    for kind, word in words.items():
        page.locator(f"input[name=heat][value={kind}]").check(force=True)
        folded = page.locator(".model .leaf", has=page.locator(".times")).first
        until(page, f"document.querySelector('input[name=heat][value={kind}]').checked")
        assert folded.locator(".part-heat").inner_text().startswith(word), folded.inner_text()
        assert page.locator(f".model .leaf .part-row[style*='--heat-{kind}-high']").count() == 3
        if kind == "memory":
            assert folded.locator(".part-heat").inner_text().endswith("B")


def test_a_reader_comes_back_by_itself(monitor: Monitor, page: Any) -> None:
    url = monitor.serve(0)
    start(monitor)
    step(monitor, 1)
    page.goto(url)
    until(page, "document.querySelector('.vital .value').textContent === '1'")
    monitor.store.close()  # ends the stream
    while monitor.store.num_readers:
        time.sleep(0.01)
    monitor.store.is_closed = False
    step(monitor, 1)
    step(monitor, 2)
    until(page, "document.querySelector('.vital .value').textContent === '2'")
    until(page, "document.getElementById('link').textContent === ''")


def test_two_runs_stand_side_by_side(tmp_path: Path, page: Any) -> None:
    for name, scale in (("slow", 1.0), ("fast", 0.5)):
        with Monitor(name=name, quiet=True, resources_s=0, folder=tmp_path / name) as monitor:
            monitor.describe(recipe={"lr": scale, "seed": 1})
            start(monitor)
            for number in range(1, 101):
                step(monitor, number, scale / number)
            monitor(RunDone(step=100, epoch=2, reason="finished"))
    with RunFolder(tmp_path) as runs:
        page.goto(runs.serve(0))
        page.wait_for_selector(".runs-table tbody tr:nth-child(2)")
        assert sorted(page.locator(".legend.runs li").all_inner_texts()) == ["fast", "slow"]
        assert chart(page, "loss").locator("path.curve:not(.raw)").count() == 2
        differs = page.locator(".card", has=page.locator("h3", has_text="What differs"))
        assert "learning rate" in differs.inner_text()
        assert "seed" not in differs.inner_text()
        page.get_by_label("Draw slow").uncheck()
        until(page, "document.querySelectorAll('.legend.runs li').length === 0")
        page.get_by_role("button", name="slow").click()
        until(page, "document.getElementById('name').textContent === 'slow'")


def test_a_rank_that_dies_is_seen(monitor: Monitor, page: Any) -> None:
    page.goto(monitor.serve(0))
    start(monitor, world=2)
    now = time.time()
    for of in (0, 1):
        spans = (("compute", now + 0.1, now + 1.0), ("wait", now + 1.0, now + 1.2))
        monitor(RankWork(of=of, spans=spans, device="cuda:0, a GPU"))
    monitor(
        Synced(step=4, epoch=0, round=1, batches=(3, 1), work_ms=(5.0, 5.0), sync_ms=1.0, wait_ms=0.5, divergence=0.1,
               anchor=2, counts=(3, 1))
    )  # fmt: skip
    page.wait_for_selector(".lane-row:nth-child(2)")
    assert page.locator(".lane-share").first.inner_text() == "75 % of the work"
    assert page.locator("line.meeting").count() == 2
    monitor(RunFailed(step=4, epoch=0, reason="rank 1 of 2 failed: killed by SIGKILL", failed_rank=1, phase="backward"))
    page.wait_for_selector(".lane-row.is-lost")
    assert "lost after" in text(page, ".is-lost .lane-share")
    assert "SIGKILL" in text(page, ".notice")
    assert text(page, "#status") == "failed"
    assert "SIGKILL" in text(page, ".log .line.error")
    table = page.locator(".ranks table").first
    assert "waiting for others" in table.inner_text()


def test_the_archive_opens_from_a_file_and_asks_for_nothing(monitor: Monitor, page: Any, tmp_path: Path) -> None:
    start(monitor)
    for number in range(1, 101):
        step(monitor, number)
    monitor(Warned(step=3, message="look out"))
    monitor(RunDone(step=100, epoch=2, reason="finished"))
    monitor.save_html(tmp_path / "run.html")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((tmp_path / "run.html").as_uri())
    until(page, "document.getElementById('status').textContent === 'finished'")
    assert text(page, ".vital .value") == "100"
    assert "look out" in text(page, ".log .line.warning")
    assert chart(page, "loss").locator("path.curve").count() >= 1
    page.evaluate("dispatchEvent(new Event('beforeprint'))")  # what is printed has the charts further down too
    assert page.evaluate("[...document.querySelectorAll('.chart')].every(one => one.querySelector('.tick'))")
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    with page.expect_download() as waited:
        page.get_by_role("button", name="Curves as CSV").click()
    rows = Path(waited.value.path()).read_text().splitlines()
    assert rows[0].startswith('"run","curve"')
    assert len([row for row in rows if '"train/loss"' in row]) == 100


@pytest.mark.parametrize("archived", [False, True])
@pytest.mark.parametrize("guarded", [True, False])
def test_any_text_stays_text(browser: Any, tmp_path: Path, archived: bool, guarded: bool) -> None:
    """Nothing of what a run says is run, neither with the page's policy nor without it."""
    for page in opened(browser, bypass_csp=not guarded):
        any_text_stays_text(page, tmp_path, archived)


def any_text_stays_text(page: Any, tmp_path: Path, archived: bool) -> None:
    evil = "".join(EVIL[:3])
    with Monitor(name=evil, quiet=True, interval_s=0.02, resources_s=0) as monitor:
        monitor.describe(recipe={name: name for name in EVIL}, **{evil: {"a": evil}})
        start(monitor)
        for number in range(1, 5):
            step(monitor, number, **dict.fromkeys(EVIL, 1.0))
            judge(monitor, number, **{f"f1/{name}": 1.0 for name in EVIL})
        monitor(Warned(step=3, message=evil))
        monitor(RankWork(of=0, spans=(("compute", 1.0, 2.0),), device=evil))
        part = {"name": evil, "path": evil, "kind": evil, "parameters": 1, "learns": 1}
        monitor._run().update(model={**part, "parts": [part]})
        monitor(RunFailed(step=4, epoch=0, reason=evil))
        if archived:
            monitor.save_html(tmp_path / "run.html")
            page.goto((tmp_path / "run.html").as_uri())
        else:
            page.goto(monitor.serve(0))
        until(page, "document.getElementById('status').textContent === 'failed'")
        page.wait_for_timeout(300)
        for selector in ("#name", ".notice", ".said", ".about", ".part"):
            assert "<script>" in text(page, selector), selector
        assert page.evaluate("window.caught") is None
        assert page.locator("main script, main img, svg[onload]").count() == 0
        assert page.evaluate("({}).polluted") is None


@pytest.mark.parametrize("width", [360, 390, 768])
def test_a_phone_shows_it_without_scrolling_sideways(monitor: Monitor, browser: Any, width: int) -> None:
    start(monitor, world=2)
    for number in range(1, 60):
        step(monitor, number, accuracy=0.5)
    judge(monitor, 50, accuracy=0.75, loss=0.5)
    monitor.describe(recipe={"a rather long name of an option": "x" * 200})
    url = monitor.serve(0)
    for page in opened(browser, has_touch=True):
        page.set_viewport_size({"width": width, "height": 800})
        page.goto(url)
        until(page, "document.querySelector('.vital .value').textContent === '59'")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        plot = chart(page, "loss").locator(".plot").bounding_box()
        assert plot["width"] > width * 0.4
        assert page.evaluate(
            "[...document.querySelectorAll('button')].filter(b => b.offsetParent).every(b => b.offsetHeight > 15)"
        )


def test_light_and_dark(monitor: Monitor, browser: Any) -> None:
    start(monitor)
    step(monitor, 1)
    url = monitor.serve(0)

    def brightness(page: Any, selector: str, what: str) -> float:
        color = page.evaluate(f"getComputedStyle(document.querySelector('{selector}')).{what}")
        numbers = [float(n) for n in color[color.index("(") + 1 : -1].replace(",", " ").split()[:3]]
        return sum(numbers) / 3

    for scheme, dark in (("light", False), ("dark", True)):
        for page in opened(browser, color_scheme=scheme):
            page.goto(url)
            page.wait_for_selector(".vital")
            assert (brightness(page, "body", "backgroundColor") < 60) == dark
            assert (brightness(page, "body", "color") > 180) == dark
            for choice in ("light", "dark", "auto"):
                page.locator("#theme").click()
                assert (brightness(page, "body", "backgroundColor") < 60) == {
                    "light": False,
                    "dark": True,
                    "auto": dark,
                }[choice]
            page.locator("#theme").click()
            page.reload()
            assert brightness(page, "body", "backgroundColor") > 200  # the choice is kept


def test_charts_are_used_by_keyboard(monitor: Monitor, page: Any) -> None:
    start(monitor)
    for number in range(1, 101):
        step(monitor, number, 100.0 / number)
    page.goto(monitor.serve(0))
    until(page, "document.querySelector('.vital .value').textContent === '100'")
    loss = chart(page, "loss")
    plot = loss.locator(".plot")
    plot.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert loss.locator("[aria-live]").inner_text() == "step 2: train 50.0000"
    page.keyboard.press("End")
    assert loss.locator("[aria-live]").inner_text() == "step 100: train 1.0000"
    before = loss.locator("path.curve:not(.raw)").get_attribute("d")
    page.keyboard.press("l")
    until(page, "document.querySelector('.chart .card-tools button').getAttribute('aria-pressed') === 'true'")
    page.wait_for_timeout(200)
    assert loss.locator("path.curve:not(.raw)").get_attribute("d") != before
    page.keyboard.press("+")
    page.wait_for_selector("text=whole range")
    page.keyboard.press("0")
    page.wait_for_selector("text=whole range", state="hidden")
    page.keyboard.press("t")
    assert loss.locator("table tbody tr").count() > 20
    assert "1.0000" in loss.locator("table tbody tr").first.inner_text()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 150, box["y"] + 80)
    page.mouse.down()
    page.mouse.move(box["x"] + 250, box["y"] + 80, steps=4)
    page.mouse.up()
    page.wait_for_selector("text=whole range")
    page.mouse.dblclick(box["x"] + 150, box["y"] + 80)
    page.wait_for_selector("text=whole range", state="hidden")


def test_everything_has_a_name_for_those_who_hear_it(monitor: Monitor, page: Any) -> None:
    start(monitor, world=2)
    for number in range(1, 30):
        step(monitor, number, accuracy=0.5)
    judge(monitor, 20, accuracy=0.75)
    page.goto(monitor.serve(0))
    until(page, "document.querySelector('.vital .value').textContent === '29'")
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll('button, a, input, svg[role=img], [role=group], section.block')]
          .filter(e => e.offsetParent !== null || e.tagName === 'svg')
          .filter(e => !(e.getAttribute('aria-label') || e.getAttribute('aria-labelledby') || e.textContent.trim()
                         || (e.closest('label') && e.closest('label').textContent.trim())))
          .map(e => e.outerHTML.slice(0, 100))"""
    )
    assert unnamed == []
    assert page.locator("h1").count() == 1
    assert page.get_by_role("progressbar").get_attribute("aria-valuenow") == "29"
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(h => Number(h.tagName[1]))")
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))


def test_the_page_asks_the_run_where_control_is_on(monitor: Monitor, page: Any) -> None:
    got: list[str] = []
    url = monitor.serve(0, control=True)
    monitor.enable_control(["save", "stop"], got.append)
    start(monitor)
    step(monitor, 1)
    page.goto(url.partition("#")[0])
    page.wait_for_selector(".vital")
    assert page.locator("#orders button").count() == 0  # no token
    page.goto(url)
    page.reload()  # the token stays with the tab, and leaves the address
    page.get_by_role("button", name="Save").click()
    until(page, "document.getElementById('link').textContent.includes('requested: save')")
    assert "token" not in page.url
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("button", name="Continue training").click()
    assert got == ["save"]
    page.get_by_role("button", name="Stop").click()
    page.locator("#sure-yes").click()
    until(page, "document.getElementById('link').textContent.includes('requested: stop')")
    assert got == ["save", "stop"]
    monitor(RunDone(step=1, epoch=0, reason="stopped"))
    until(page, "document.querySelectorAll('#orders button').length === 0")


def test_the_script_folds_as_the_record_does(monitor: Monitor, page: Any) -> None:
    """The page and the record have the same rules: a long run reads the same in both."""
    start(monitor, steps=6000)
    page.goto(monitor.serve(0))
    page.wait_for_selector(".vital", state="attached")
    for number in range(1, 5001):
        step(monitor, number, float(number % 7) if number % 11 else float("nan"))
        if number % 500 == 0:
            monitor.record  # noqa: B018
    until(page, "[...page.runs.values()][0].state.step === 5000")
    theirs = page.evaluate(
        "(() => { const s = [...page.runs.values()][0].series.get('train/loss'); return [s.stride, s.points]; })()"
    )
    ours = monitor.record.series["train/loss"]
    assert theirs[0] == ours.stride
    assert len(theirs[1]) == len(ours.points)
    assert json.dumps([p[0] for p in theirs[1]]) == json.dumps([p[0] for p in ours.points])
    pairs = [(a[3], b[3]) for a, b in zip(theirs[1], ours.points, strict=True)]
    assert [a is None for a, _ in pairs] == [b is None for _, b in pairs]
    assert [a for a, _ in pairs if a is not None] == pytest.approx([b for _, b in pairs if b is not None], rel=1e-4)


def test_a_run_is_driven_from_the_page(page: Any, tmp_path: Path) -> None:
    """A real run, looked at and stopped in a browser."""
    import threading

    import torch
    from torch import nn
    from torch.nn.functional import mse_loss

    from flodl.data import TensorRows
    from flodl.train import Trainer, adamw

    x = torch.randn(4000, 8, generator=torch.Generator().manual_seed(0))
    data = TensorRows({"x": x, "y": x.sum(1, keepdim=True)})

    def train_step(model: nn.Module, batch: Any) -> Any:
        time.sleep(0.01)
        return mse_loss(model(batch["x"]), batch["y"])

    with Monitor(name="steered", quiet=True, interval_s=0.02, resources_s=0) as monitor:
        url = monitor.serve(0, control=True)
        ends: list[RunDone] = []
        made = Trainer.builder(nn.Linear(8, 1), adamw(1e-2), train_step).dataset(data).batch_size(4).num_epochs(50)
        made.checkpoints(str(tmp_path)).set(monitor=monitor, progress=False).subscribe(ends.append, RunDone)
        thread = threading.Thread(target=lambda: made.run())
        thread.start()
        page.goto(url)
        until(page, "document.getElementById('status').textContent === 'running'")
        until(page, "document.querySelectorAll('.chart').length > 2")
        page.get_by_role("button", name="Save").click()
        until(page, "[...document.querySelectorAll('.log .line')].some(l => l.textContent.includes('saved'))")
        page.get_by_role("button", name="Stop").click()
        page.locator("#sure-yes").click()
        until(page, "document.getElementById('status').textContent === 'stopped'")
        thread.join(timeout=300)
        assert ends[0].reason == "stopped"
        assert ends[0].step < 50_000
