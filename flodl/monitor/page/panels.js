// Panels: current values, facts, epochs, log, list of runs.

class Hero {
  constructor(box) {
    this.cells = {};
    const names = [["step", "step"], ["epoch", "epoch"], ["left", "time left"], ["elapsed", "elapsed"], ["loss", "loss"], ["best", ""], ["speed", "speed"], ["peak", "of the peak"]];
    fill(box, names.map(([key, words]) => {
      const value = h("dd", { class: "value" }), label = h("dt", { text: words }), note = h("dd", { class: "under" });
      const cell = h("div", { class: "vital", hidden: true }, label, value, note);
      this.cells[key] = { cell, value, label, note };
      return cell;
    }));
  }

  set(key, value, note, label) {
    const cell = this.cells[key];
    cell.cell.hidden = value === null;
    if (value === null) return;
    say(cell.value, value);
    say(cell.note, note || "");
    if (label !== undefined) say(cell.label, label);
  }

  draw(run, now) {
    const state = run.state, total = state.total;
    this.set("step", state.step === undefined ? null : count(state.step), total ? "of " + count(total) : "");
    const epochs = state.epochs || (run.facts.run || {}).epochs;
    this.set("epoch", state.epoch === undefined ? null : run.isGoing ? trimmed(Math.floor(state.epoch * 100) / 100) : trimmed(state.epoch), epochs ? "of " + count(epochs) : "");
    const left = leftOf(run);
    this.set("left", run.isGoing && state.step !== undefined ? (left === null ? "–" : span(left)) : null, left === null ? "" : "until " + untilOf(left));
    this.set("elapsed", span(run.elapsed(now)), run.began ? "since " + since(run.began) : "");
    const loss = run.latest("train/loss");
    this.set("loss", loss === null ? null : number(loss), lowest(run, "train/loss"));
    const [name, value, note] = bestOf(run);
    this.set("best", value === undefined ? null : number(value), note, name);
    const tokens = run.latest("speed/tokens_s"), rows = run.latest("speed/rows_s");
    const speed = tokens === null ? rows : tokens;
    this.set("speed", speed === null ? null : short(speed), tokens === null ? "rows per second" : "tokens per second");
    const peak = run.latest("speed/peak_share");
    this.set("peak", peak === null ? null : percent(peak), "devices’ arithmetic", "of the peak");
  }
}

function leftOf(run) {
  const left = run.state.left_s;
  if (left === null || left === undefined) return null;
  return Math.max(0, left - (page.live ? (Date.now() - run.heard) / 1000 : 0));
}

function untilOf(left) {
  const end = new Date(Date.now() + left * 1000);
  const words = end.toLocaleTimeString(undefined, { hour: "2-digit", minute: "2-digit" });
  return left > 72000 ? end.toLocaleDateString(undefined, { month: "short", day: "numeric" }) + " " + words : words;
}

function lowest(run, name) {
  const points = run.series.has(name) ? run.series.get(name).points.filter((p) => p[4] !== null) : [];
  if (points.length < 2) return "";
  return "lowest " + number(Math.min(...points.map((p) => p[4])));
}

// The main metric of the evaluation, and its best value.
function bestOf(run) {
  const names = [...run.series.keys()].filter((name) => name.startsWith("eval/") && !name.slice(5).includes("/"));
  if (!names.length) return [];
  const rank = (name) => { const i = FIRST.slice(1).indexOf(name.slice(5)); return i < 0 ? 99 : i; };
  const name = names.sort((a, b) => rank(a) - rank(b))[0];
  const points = run.series.get(name).points.filter((p) => p[3] !== null);
  if (!points.length) return [];
  const less = /loss|perplexity|error|mse|mae/.test(name);
  const best = points.reduce((a, b) => (less ? b[3] < a[3] : b[3] > a[3]) ? b : a);
  return [`best ${worded(name.slice(5))}`, best[3], `at step ${count(best[0])}, now ${number(points.at(-1)[3])}`];
}

const SECTION_WORDS = { run: "Run", recipe: "Recipe", data: "Data", model: "Model", hardware: "Machine" };

class Facts {
  constructor(box) { this.box = box; this.key = ""; }

  draw(runs, focus) {
    const key = JSON.stringify([focus.facts, runs.map((run) => run.id)]);
    if (key === this.key) return;
    this.key = key;
    const sections = Object.keys(SECTION_WORDS).filter((name) => Object.keys(focus.facts[name] || {}).length);
    const others = Object.keys(focus.facts).filter((name) => !(name in SECTION_WORDS));
    const card = (section) => {
      const rows = Object.entries(focus.facts[section]).filter(([, value]) => value !== null && value !== undefined && value !== "" && !(Array.isArray(value) && !value.length));
      return h("section", { class: "card facts" + (rows.length > 14 ? " long" : "") }, h("h3", { text: SECTION_WORDS[section] || worded(section) }),
        h("dl", {}, rows.map(([name, value]) => h("div", {}, h("dt", { text: worded(name) }), h("dd", { text: fact(name, value) })))));
    };
    const cards = [...sections, ...others].map(card), isLong = (one) => one.classList.contains("long");
    fill(this.box, runs.length > 1 ? this.differences(runs) : null, h("div", { class: "columns" }, cards.filter((one) => !isLong(one))), cards.filter(isLong));
    if (!cards.length) fill(this.box, h("p", { class: "empty", text: "No information." }));
  }

  differences(runs) {
    const all = runs.map((run) => Object.assign({}, ...["run", "recipe", "data", "model"].map((section) =>
      Object.fromEntries(Object.entries(run.facts[section] || {}).map(([name, value]) => [name, fact(name, value)])))));
    const names = [...new Set(all.flatMap(Object.keys))].filter((name) => new Set(all.map((facts) => facts[name])).size > 1 && name !== "resumed_from");
    if (!names.length) return null;
    return h("section", { class: "card" }, h("h3", { text: "What differs" }), h("div", { class: "scroll" }, h("table", { class: "figures left" },
      head(["", ...runs.map((run) => run.title)]), h("tbody", {}, names.map((name) => h("tr", {}, h("th", { scope: "row", text: worded(name) }), all.map((facts) => h("td", { text: facts[name] || "–" }))))))));
  }
}

class Epochs {
  constructor(box) { this.box = box; this.key = ""; }

  draw(run) {
    const rows = run.epochs, key = run.id + rows.length + (rows.at(-1) || {}).step;
    if (key === this.key) return;
    this.key = key;
    this.box.closest("section.block").hidden = !rows.length;
    const names = [...new Set(rows.flatMap((row) => Object.keys(row)))].filter((name) => !name.slice(name.indexOf("/") + 1).includes("/"));
    const word = { epoch: (v) => count(v), step: (v) => count(v), samples: (v) => count(v), seconds: (v) => span(v) };
    fill(this.box, h("table", { class: "figures" }, head(names.map((name) => name.startsWith("eval/") ? worded(name.slice(5)) + " (eval)" : worded(name))),
      h("tbody", {}, rows.slice(-200).reverse().map((row) => h("tr", {}, names.map((name, i) => h(i ? "td" : "th", { scope: i ? undefined : "row", text: row[name] === undefined || row[name] === null ? "" : (word[name] || number)(row[name]) })))))));
  }
}

class Log {
  constructor(box) {
    this.only = false;
    this.key = "";
    this.list = h("ol", { class: "log", role: "log", "aria-label": "Log of the run", tabindex: "0" });
    this.button = h("button", { type: "button", class: "quiet", "aria-pressed": "false", text: "warnings only", onclick: () => { this.only = !this.only; this.button.setAttribute("aria-pressed", String(this.only)); this.key = ""; page.draw(); } });
    fill(box, h("div", { class: "toolbar" }, this.button), this.list);
  }

  draw(run) {
    const key = [run.id, run.log.length, run.leftOut, (run.log.at(-1) || [])[0]].join();
    if (key === this.key) return;
    this.key = key;
    const lines = run.log.filter((line) => !this.only || line[2] === "warning" || line[2] === "error").slice().reverse();
    fill(this.list, lines.length ? lines.map(([t, step, level, text]) => h("li", { class: "line " + (["warning", "error", "decision"].includes(level) ? level : "info") },
      h("span", { class: "when", text: span(t) }), h("span", { class: "at", text: step ? "step " + count(step) : "" }),
      h("span", { class: "said" }, level === "info" ? null : h("b", { text: level + " " }), text))) : [h("li", { class: "empty", text: this.only ? "No warnings." : "No messages yet." })],
    run.leftOut ? h("li", { class: "empty", text: `${count(run.leftOut)} older lines were removed` }) : null);
  }
}

// The runs of a folder, the selected ones, and the one that the other panels show.
class RunList {
  constructor(box) { this.box = box; this.key = ""; }

  draw(runs, chosen, focus, now) {
    const key = JSON.stringify(runs.map((run) => [run.id, run.name, run.status, run.state.step, chosen.has(run.id), run === focus]));
    if (key === this.key) return;
    this.key = key;
    const palette = COLORS;
    const active = document.activeElement && document.activeElement.dataset && document.activeElement.dataset.key;
    fill(this.box, h("table", { class: "figures left runs-table" }, head(["", "run", "state", "step", "loss", "best figure", "time", "began"]), h("tbody", {}, runs.map((run) => {
      const swatch = h("span", { class: "swatch" });
      if (chosen.has(run.id)) swatch.style.background = palette[run.color % PALETTE];
      const [name, value] = bestOf(run), loss = run.latest("train/loss");
      return h("tr", { class: run === focus ? "is-focus" : "" },
        h("td", {}, h("label", {}, h("input", { type: "checkbox", "data-key": "c" + run.id, checked: chosen.has(run.id), "aria-label": "Draw " + run.title, onchange: (event) => page.choose(run, event.target.checked) }), swatch)),
        h("th", { scope: "row" }, h("button", { type: "button", class: "plain", "data-key": "f" + run.id, "aria-pressed": String(run === focus), text: run.title, onclick: () => page.focusOn(run) })),
        h("td", {}, h("span", { class: "status " + run.status, text: STATUS[run.status] || run.status })),
        h("td", { text: run.state.step === undefined ? "" : count(run.state.step) + (run.state.total ? " / " + count(run.state.total) : "") }),
        h("td", { text: loss === null ? "" : number(loss) }), h("td", { text: value === undefined ? "" : `${number(value)} ${name.slice(5)}` }),
        h("td", { text: span(run.elapsed(now)) }), h("td", { text: clock(run.began) }));
    }))));
    if (active) [...this.box.querySelectorAll("[data-key]")].find((one) => one.dataset.key === active)?.focus();
  }
}

const STATUS = { waiting: "waiting", running: "running", finished: "finished", stopped: "stopped", signal: "stopped by a signal", failed: "failed", restarting: "restarting", silent: "silent" };
