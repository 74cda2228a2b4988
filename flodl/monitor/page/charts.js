// The charts, one for each kind of curve of the selected runs.

const FIRST = ["loss", "accuracy", "f1", "exact_match", "perplexity", "mcc", "pearson", "spearman", "precision", "recall", "lr", "grad_norm", "divergence"];
const PALETTE = 8;

const COLORS = Array.from({ length: PALETTE }, (_, i) => `var(--run-${i})`);

// Curves of one metric of all selected runs: [[title, {names of series: label}, options]].
function figuresOf(runs) {
  const names = [...new Set(runs.flatMap((run) => [...run.series.keys()]))];
  const groups = { main: new Map(), more: new Map(), watched: new Map() };
  for (const name of names) {
    const [scope, ...rest] = name.split("/"), key = rest.join("/");
    if (scope !== "train" && scope !== "eval" && scope !== "observed") continue;
    const group = scope === "observed" ? groups.watched : key.includes("/") ? groups.more : groups.main;
    const title = group === groups.more ? rest.slice(0, -1).join(" / ") + " by " + "label" : key;
    if (!group.has(title)) group.set(title, []);
    group.get(title).push({ name, scope, label: group === groups.more ? rest.at(-1) : scope === "observed" ? key : scope });
  }
  const rank = (title) => { const i = FIRST.indexOf(title); return i < 0 ? FIRST.length - 3.5 : i; };
  for (const key of Object.keys(groups)) groups[key] = [...groups[key]].sort(([a], [b]) => rank(a) - rank(b) || a.localeCompare(b));
  return groups;
}

function linesOf(runs, curves, several) {
  const palette = COLORS, out = [];
  const many = curves.length > 2;
  for (const run of runs) {
    curves.forEach(({ name, scope, label }, place) => {
      const series = run.series.get(name);
      if (!series || !series.points.length) return;
      const isEval = scope === "eval";
      const color = several ? palette[run.color % PALETTE] : many ? palette[place % PALETTE] : palette[isEval && curves.length > 1 ? 1 : 0];
      const words = several ? (curves.length > 1 ? `${run.title} · ${label}` : run.title) : label;
      out.push({ label: words, series, color, dots: isEval && series.points.length < 200, smooth: isEval || name === "train/lr" ? false : undefined,
        dash: several && isEval && curves.length > 1, main: isEval === false || curves.length === 1 });
    });
  }
  return out;
}

class Grid {
  constructor(box, view, makeOptions) {
    Object.assign(this, { box, view, makeOptions: makeOptions || (() => ({})), made: new Map() });
  }

  // wanted: [[key, title, lines, options]]
  show(wanted) {
    const keys = new Set(wanted.map(([key]) => key));
    for (const [key, chart] of this.made) if (!keys.has(key)) { chart.remove(); this.made.delete(key); }
    wanted.forEach(([key, title, lines, options], place) => {
      let chart = this.made.get(key);
      if (!chart) this.made.set(key, chart = new Chart(title, this.view, options));
      Object.assign(chart, options, { lines });
      if (this.box.children[place] !== chart.card) this.box.insertBefore(chart.card, this.box.children[place] || null);
      chart.dirty = true;
    });
    this.box.hidden = !wanted.length;
    paintSoon();
  }
}

function optionsOf(title) {
  if (title === "lr") return { format: (v) => v === 0 ? "0" : v === null ? "–" : v.toExponential(1), floor: 0 };
  return {};
}

class Curves {
  constructor(box) {
    this.view = new View("step");
    this.runsBox = h("ul", { class: "legend runs", "aria-label": "Colours of the runs" });
    this.main = h("div", { class: "grid" });
    this.watched = h("div", { class: "grid" });
    this.more = h("div", { class: "grid" });
    this.watchedBox = h("details", { open: true, hidden: true }, h("summary", { text: "Watched in the model" }), this.watched);
    this.moreBox = h("details", { hidden: true }, h("summary", { text: "By label" }), this.more);
    this.grids = { main: new Grid(this.main, this.view), watched: new Grid(this.watched, this.view), more: new Grid(this.more, this.view) };
    fill(box, this.toolbar(), this.runsBox, this.main, this.watchedBox, this.moreBox);
  }

  toolbar() {
    const axes = h("span", { class: "segments", role: "radiogroup", "aria-label": "Horizontal axis" });
    for (const axis of ["step", "epoch", "time"]) {
      const button = h("label", {}, h("input", { type: "radio", name: "axis", value: axis, checked: axis === "step", onchange: () => this.view.change({ axis, range: null }) }), h("span", { text: axis }));
      axes.append(button);
    }
    const shown = h("output", { text: "0.6" });
    const slider = h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0.6, "aria-label": "Smoothing", oninput: () => { say(shown, Number(slider.value).toFixed(2).replace(/0$/, "")); this.view.change({ smooth: Number(slider.value) }); } });
    this.whole = h("button", { type: "button", class: "quiet", text: "whole range", hidden: true, onclick: () => this.view.change({ range: null }) });
    this.view.listeners.add(() => { this.whole.hidden = !this.view.range; });
    return h("div", { class: "toolbar" }, axes, h("label", { class: "slider" }, "smoothing", slider, shown), this.whole,
      h("span", { class: "hint", text: "drag to zoom · double-click for all · keys ← → + − 0 l t" }));
  }

  show(runs) {
    const several = runs.length > 1, palette = COLORS, groups = figuresOf(runs);
    this.runsBox.hidden = !several;
    fill(this.runsBox, several ? runs.map((run) => {
      const swatch = h("span", { class: "swatch" });
      swatch.style.background = palette[run.color % PALETTE];
      return h("li", {}, swatch, run.title);
    }) : []);
    for (const key of ["main", "watched", "more"]) {
      this.grids[key].show(groups[key].map(([title, curves]) => [title, worded(title), linesOf(runs, curves, several), { ...optionsOf(title), plain: several }]));
    }
    this.watchedBox.hidden = !groups.watched.length;
    this.moreBox.hidden = !groups.more.length;
  }
}

class Speeds {
  constructor(box, view) { this.grid = new Grid(box, view); }

  show(runs) {
    const several = runs.length > 1;
    const kinds = [["tokens_s", { format: short, floor: 0 }], ["rows_s", { format: short, floor: 0 }], ["step_ms", { format: millis, floor: 0 }],
      ["peak_share", { format: percent, floor: 0 }]];
    this.grid.show(kinds.filter(([name]) => runs.some((run) => run.series.has("speed/" + name)))
      .map(([name, options]) => [name, worded(name), linesOf(runs, [{ name: "speed/" + name, scope: "train", label: worded(name) }], several), options]));
  }
}

// The machine of one run, over time.
class Machine {
  constructor(box) {
    this.view = new View("time");
    this.view.smooth = 0;
    this.grid = new Grid(box, this.view);
    this.box = box;
  }

  show(run) {
    const palette = COLORS, names = [...run.series.keys()], gpus = (run.facts.hardware || {}).gpus || [];
    const line = (name, label, place) => run.series.has(name) ? [{ label, series: run.series.get(name), color: palette[place % PALETTE], flat: true }] : [];
    const cards = [...new Set(names.filter((n) => n.startsWith("gpu")).map((n) => n.split("/")[0]))].sort((a, b) => a.slice(3) - b.slice(3));
    const each = (figure, words, from) => cards.flatMap((card, i) => line(card + "/" + figure, card.replace("gpu", "GPU ") + words, from + i));
    const ram = (run.facts.hardware || {}).ram, vram = Math.max(0, ...gpus.map((gpu) => gpu.memory || 0));
    const wanted = [
      ["load", "load", [...line("system/cpu", "processors", 0), ...each("util", "", 1)], { format: (v) => v === null ? "–" : trimmed(v) + " %", floor: 0, ceiling: 100 }],
      ["memory", "memory", [...line("system/process", "this process", 0), ...line("system/ram", "in use", 1)], { format: bytes, floor: 0, unit: 1024, limit: ram || null }],
      ["vram", "GPU memory", [...each("memory", "", 1), ...each("reserved", " reserved", 1 + cards.length)], { format: bytes, floor: 0, unit: 1024, limit: vram || null }],
      ["power", "power", [...line("system/power", "processors", 0), ...each("power", "", 1)], { format: (v) => v === null ? "–" : trimmed(v) + " W", floor: 0 }],
      ["temperature", "temperature", [...line("system/temperature", "processors", 0), ...each("temperature", "", 1)], { format: (v) => v === null ? "–" : trimmed(v) + " °C" }],
    ];
    this.grid.show(wanted.filter(([, , lines]) => lines.length));
  }
}
