// One chart: curves on axes, with a crosshair, zoom, a logarithmic scale, and its numbers as a table.

const AXES = { step: 0, epoch: 1, time: 2 };
const HIGH = 210, RIGHT = 14, TOP = 10, LOW = 24;
const charts = new Set();

// State shared by the charts of a group: axis, visible range, position of the pointer.
class View {
  constructor(axis) {
    this.axis = axis;
    this.range = null;
    this.hover = null;
    this.smooth = 0.6;
    this.listeners = new Set();
  }

  change(values) {
    Object.assign(this, values);
    for (const listener of this.listeners) listener();
  }
}

class Chart {
  // lines(): [{label, series, color, dash, dots, faint}]; format: a value as text; limit: the largest meaningful value.
  constructor(title, view, options) {
    Object.assign(this, { title, view, log: false, wide: 0, lines: [], shown: false, dirty: true, format: number, floor: null, ceiling: null, limit: null, unit: 1, left: 52 }, options);
    this.latest = h("span", { class: "latest" });
    this.tip = h("div", { class: "tip", hidden: true, "aria-hidden": "true" });
    this.picture = svg("svg", { height: HIGH, role: "img", "aria-label": title });
    this.live = h("p", { class: "unseen", "aria-live": "polite" });
    this.logButton = h("button", { type: "button", class: "quiet", text: "log", "aria-pressed": "false", title: "Logarithmic scale (l)", onclick: () => this.toggleLog() });
    this.tableButton = h("button", { type: "button", class: "quiet", text: "table", "aria-expanded": "false", title: "The numbers (t)", onclick: () => this.toggleTable() });
    this.tableBox = h("div", { class: "scroll numbers", hidden: true, tabindex: "0", role: "region", "aria-label": "Numbers of " + title });
    this.plot = h("div", { class: "plot", tabindex: "0", role: "group", "aria-roledescription": "chart", "aria-label": title, onkeydown: (event) => this.key(event) }, this.picture, this.tip);
    this.legend = h("ul", { class: "legend small", hidden: true });
    this.card = h("section", { class: "card chart" },
      h("div", { class: "card-head" }, h("h3", { text: title }), this.latest, h("span", { class: "card-tools" }, this.logButton, this.tableButton)),
      this.legend, this.plot, this.tableBox, this.live);
    this.point();
    view.listeners.add(() => { this.dirty = true; paintSoon(); });
    charts.add(this);
    seeing.observe(this.card);
    sizing.observe(this.plot);
  }

  remove() {
    charts.delete(this);
    seeing.unobserve(this.card);
    sizing.unobserve(this.plot);
    this.card.remove();
  }

  // ---- drawing ----

  paint() {
    this.dirty = false;
    const wide = this.wide || this.plot.clientWidth;
    if (!wide) return;
    const axis = AXES[this.view.axis], drawn = this.lines.map((line) => this.prepared(line, axis)).filter((line) => line.points.length);
    this.picture.setAttribute("width", wide);
    this.picture.setAttribute("viewBox", `0 0 ${wide} ${HIGH}`);
    this.drawn = drawn;
    if (!drawn.length) {
      fill(this.picture, svg("text", { x: wide / 2, y: HIGH / 2, class: "tick", "text-anchor": "middle" }, "nothing yet"));
      say(this.latest, "");
      return;
    }
    const [x0, x1] = this.rangeX(), [y0, y1] = this.rangeY(drawn, x0, x1);
    const scale = this.log ? powers(y0, y1) : ticks(y0, y1, 4, this.unit);
    const words = scale.map((value) => this.tick(value, y1 - y0));
    const left = this.left = Math.max(34, ...words.map((word) => 6.4 * word.length + 16));
    const inner = wide - left - RIGHT, tall = HIGH - TOP - LOW;
    const place = this.log ? (v) => Math.log10(v) : (v) => v;
    const low = place(y0), high = place(y1);
    this.x = (v) => left + inner * (v - x0) / (x1 - x0 || 1);
    this.y = (v) => TOP + tall * (1 - (place(v) - low) / (high - low || 1));
    this.unX = (px) => x0 + (px - left) / inner * (x1 - x0);
    this.ends = [x0, x1];
    const parts = [];
    scale.forEach((value, i) => {
      const y = this.y(value).toFixed(1);
      parts.push(svg("line", { x1: left, x2: wide - RIGHT, y1: y, y2: y, class: "grid" }),
        svg("text", { x: left - 8, y: Number(y) + 4, class: "tick", "text-anchor": "end" }, words[i]));
    });
    for (const value of ticks(x0, x1, Math.max(2, Math.floor((wide - 60) / 80)))) {
      const x = this.x(value);
      if (x > wide - RIGHT + 1) continue;
      parts.push(svg("text", { x: x.toFixed(1), y: HIGH - 6, class: "tick", "text-anchor": x > wide - 30 ? "end" : "middle" }, this.wordX(value, x1 - x0)));
    }
    if (this.limit !== null && this.limit >= y0 && this.limit <= y1) {
      const y = this.y(this.limit).toFixed(1);
      parts.push(svg("line", { x1: left, x2: wide - RIGHT, y1: y, y2: y, class: "limit" }));
    }
    const clip = "clip" + (this.id ||= ++Chart.made);
    parts.push(svg("clipPath", { id: clip }, svg("rect", { x: left - 4, y: 0, width: inner + RIGHT + 4, height: HIGH - LOW + 4 })));
    const curves = svg("g", { "clip-path": `url(#${clip})` });
    for (const line of drawn) this.curve(curves, line, inner);
    parts.push(curves);
    this.cross = svg("g", { class: "cross" });
    parts.push(this.cross);
    if (this.pull) parts.push(svg("rect", { x: Math.min(...this.pull), y: TOP, width: Math.abs(this.pull[1] - this.pull[0]), height: tall, class: "pull" }));
    fill(this.picture, parts);
    this.drawLegend(drawn);
    this.tell(drawn);
    this.drawCross();
    if (!this.tableBox.hidden) this.drawTable();
  }

  prepared(line, axis) {
    const points = line.series.points, out = [];
    const weight = line.smooth === false || points.length < 12 ? 0 : this.view.smooth;
    let kept = 0, share = 0;
    for (const point of points) {
      let mean = point[3];
      if (mean !== null && weight) {
        kept = kept * weight + (1 - weight) * mean;
        share = share * weight + (1 - weight);
        mean = kept / share;
      }
      out.push({ x: point[axis], y: mean, raw: point[3], low: point[4], high: point[5], many: point[6] > 1 });
    }
    return { ...line, points: out, weight };
  }

  rangeX() {
    if (this.view.range) return this.view.range;
    // Charts of a group have the same axis.
    let low = Infinity, high = -Infinity;
    const axis = AXES[this.view.axis];
    for (const chart of charts) {
      if (chart.view !== this.view) continue;
      for (const { series: { points } } of chart.lines) {
        if (points.length) { low = Math.min(low, points[0][axis]); high = Math.max(high, points.at(-1)[axis]); }
      }
    }
    if (this.view.axis === "time" || low < high * 0.1) low = Math.min(low, 0);
    return low === high ? [low - 1, high + 1] : [low, high];
  }

  rangeY(drawn, x0, x1) {
    const seen = [];
    for (const { points, weight } of drawn) {
      for (const point of points) {
        if (point.x < x0 || point.x > x1 || point.y === null) continue;
        if (this.log && point.y <= 0) continue;
        seen.push(point.y);
        if (!weight && point.many) seen.push(point.low, point.high);
        if (weight && point.raw !== null) seen.push(point.raw);
      }
    }
    const sure = this.log ? seen.filter((v) => v > 0) : seen;
    if (!sure.length) return this.log ? [0.1, 1] : [0, 1];
    sure.sort((a, b) => a - b);
    // The range excludes a few outliers; the frame clips them.
    let low = sure[Math.floor(sure.length * 0.004)], high = sure[Math.ceil(sure.length * 0.996) - 1];
    if (this.log) return low === high ? [low / 2, high * 2] : [low / 1.15, high * 1.15];
    if (this.ceiling !== null) high = Math.max(high, this.ceiling);
    if (this.limit !== null) high = Math.max(high, this.limit);
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    const bottom = this.floor !== null ? Math.min(this.floor, low) : low >= 0 && low - room < 0 ? 0 : low - room;
    return [bottom, high + room];
  }

  curve(into, line, inner) {
    const color = line.color, faint = line.weight > 0;
    const every = line.points.length / (inner * 1.5) > 1;
    const shown = every ? thinned(line.points, this.unX(this.left), this.unX(this.left + inner), inner) : line.points;
    if (line.points.some((p) => p.many) && !line.flat) {
      const band = shown.filter((p) => p.low !== null && (!this.log || p.low > 0));
      if (band.length > 1) {
        const there = band.map((p) => `${this.x(p.x).toFixed(1)} ${this.y(p.high).toFixed(1)}`);
        const back = band.reverse().map((p) => `${this.x(p.x).toFixed(1)} ${this.y(p.low).toFixed(1)}`);
        into.append(svg("path", { d: "M" + there.join("L") + "L" + back.join("L") + "Z", class: "band", fill: color }));
      }
    }
    if (faint) into.append(svg("path", { d: this.path(shown, "raw"), class: "curve raw", stroke: color }));
    into.append(svg("path", { d: this.path(shown, "y"), class: "curve" + (line.dash ? " dash" : ""), stroke: color }));
    if (line.dots || line.points.length === 1) {
      for (const p of shown) if (p.y !== null && !(this.log && p.y <= 0)) into.append(svg("circle", { cx: this.x(p.x).toFixed(1), cy: this.y(p.y).toFixed(1), r: shown.length > 80 ? 1.6 : 2.8, fill: color }));
    }
    for (const p of shown) { // steps without a finite value
      if (p.raw === null) into.append(svg("path", { d: `M${this.x(p.x).toFixed(1)} ${HIGH - LOW}l-4 -7h8z`, class: "gap" }));
    }
  }

  path(points, key) {
    let d = "", down = false;
    for (const p of points) {
      const v = p[key];
      if (v === null || (this.log && v <= 0)) { down = false; continue; }
      d += (down ? "L" : "M") + this.x(p.x).toFixed(1) + " " + this.y(v).toFixed(1);
      down = true;
    }
    return d;
  }

  tick(value, spread) {
    if (this.format !== number) return this.format(value);
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (size >= 1e4 || size < 1e-3) return size >= 1e4 ? short(value) : value.toExponential(0).replace("e-", "e−");
    const digits = Math.max(0, Math.min(5, 1 - Math.floor(Math.log10(spread || 1))));
    return value.toFixed(digits);
  }

  wordX(value, spread) {
    if (this.view.axis === "time") return value === 0 ? "0" : span(value);
    if (this.view.axis === "epoch") return spread < 5 ? trimmed(value) : count(value);
    return Number.isInteger(value) ? (value >= 1e5 ? short(value) : count(value)) : "";
  }

  // ---- texts ----

  tell(drawn) {
    const words = drawn.map((line) => {
      const values = line.points.filter((p) => p.raw !== null);
      if (!values.length) return `${line.label}: no finite value`;
      const ends = [values[0], values.at(-1)].map((p) => this.format(p.raw));
      return `${line.label} from ${ends[0]} to ${ends[1]}`;
    });
    this.picture.setAttribute("aria-label", `${this.title}: ${words.slice(0, 8).join("; ")}`);
    if (this.view.hover === null || !charts.has(this)) this.tellLatest();
  }

  tellLatest() {
    const line = this.drawn && this.drawn.find((one) => one.main) || this.drawn && this.drawn[0];
    if (!line) return;
    const last = line.points.findLast((p) => p.raw !== null);
    say(this.latest, last ? this.format(last.raw) : "–");
  }

  drawLegend(drawn) {
    const shown = drawn.length > 1 && !this.plain;
    const key = shown ? drawn.map((line) => line.label + line.color).join() : "";
    if (key === this.legendKey) return;
    this.legendKey = key;
    this.legend.hidden = !shown;
    fill(this.legend, drawn.slice(0, 8).map((line) => {
      const swatch = h("span", { class: "swatch" });
      swatch.style.background = line.color;
      return h("li", {}, swatch, line.label);
    }));
  }

  toggleLog() {
    this.log = !this.log;
    this.logButton.setAttribute("aria-pressed", String(this.log));
    this.dirty = true;
    paintSoon();
  }

  toggleTable() {
    this.tableBox.hidden = !this.tableBox.hidden;
    this.tableButton.setAttribute("aria-expanded", String(!this.tableBox.hidden));
    if (!this.tableBox.hidden) this.drawTable();
  }

  drawTable() {
    const lines = this.drawn || [], axis = this.view.axis;
    const xs = [...new Set(lines.flatMap((line) => line.points.map((p) => p.x)))].sort((a, b) => a - b);
    const step = Math.max(1, Math.ceil(xs.length / 60));
    const chosen = xs.filter((_, i) => i % step === 0 || i === xs.length - 1).reverse();
    const finders = lines.map((line) => new Map(line.points.map((p) => [p.x, p.raw])));
    fill(this.tableBox, h("table", { class: "figures" }, h("caption", { class: "unseen", text: this.title }), head([axis, ...lines.map((line) => line.label)]),
      h("tbody", {}, chosen.map((x) => h("tr", {}, h("th", { scope: "row", text: this.wordX(x, 1e9) || trimmed(x) }),
        finders.map((found) => h("td", { text: found.has(x) ? this.format(found.get(x)) : "" })))))));
  }

  // ---- pointer and keys ----

  point() {
    const at = (event) => event.clientX - this.plot.getBoundingClientRect().left;
    this.plot.addEventListener("pointermove", (event) => {
      if (!this.x) return;
      const px = Math.min(Math.max(at(event), this.left), this.plot.clientWidth - RIGHT);
      if (this.start !== undefined && Math.abs(px - this.start) > 4) this.pull = [this.start, px];
      this.own = true;
      this.view.hover = this.unX(px);
      this.spread();
    });
    this.plot.addEventListener("pointerleave", () => { this.own = false; this.pull = this.start = undefined; this.view.hover = null; this.spread(); });
    this.plot.addEventListener("pointerdown", (event) => { if (event.button === 0 && event.pointerType !== "touch") this.start = Math.max(this.left, at(event)); });
    this.plot.addEventListener("pointerup", () => {
      const pull = this.pull;
      this.pull = this.start = undefined;
      if (pull && this.x) this.zoom(...pull.map(this.unX).sort((a, b) => a - b));
    });
    this.plot.addEventListener("dblclick", () => this.view.change({ range: null }));
    this.plot.addEventListener("blur", () => { this.own = false; this.view.hover = null; this.spread(); });
  }

  // All charts of the group show the crosshair.
  spread() {
    for (const chart of charts) if (chart.view === this.view && chart.shown) { if (chart.pull || chart === this) chart.paint(); else chart.drawCross(); }
  }

  zoom(low, high) {
    if (high > low) this.view.change({ range: [low, high] });
  }

  key(event) {
    if (!this.x || event.ctrlKey || event.metaKey || event.altKey) return;
    const [low, high] = this.ends, wide = high - low;
    const middle = this.view.hover === null ? (low + high) / 2 : this.view.hover;
    const actions = {
      ArrowLeft: () => this.step(-1), ArrowRight: () => this.step(1),
      "+": () => this.zoom(middle - wide / 4, middle + wide / 4), "=": () => this.zoom(middle - wide / 4, middle + wide / 4),
      "-": () => this.zoom(middle - wide, middle + wide), 0: () => this.view.change({ range: null }),
      Escape: () => this.view.change({ range: null }), l: () => this.toggleLog(), t: () => this.toggleTable(),
      Home: () => this.step(-Infinity), End: () => this.step(Infinity),
    };
    if (actions[event.key]) { event.preventDefault(); actions[event.key](); }
  }

  step(by) {
    const line = this.drawn.find((one) => one.main) || this.drawn[0];
    if (!line) return;
    const last = line.points.length - 1;
    let place = this.view.hover === null ? (by > 0 ? -1 : last + 1) : nearest(line.points, this.view.hover);
    if (!Number.isFinite(by)) place = by < 0 ? 0 : last;
    else place += by * Math.max(1, Math.round(line.points.length / 200));
    const point = line.points[Math.min(last, Math.max(0, place))];
    this.own = true;
    this.view.hover = point.x;
    this.spread();
    const words = this.drawn.map((one) => one.label + " " + this.format(one.points[nearest(one.points, point.x)].raw));
    say(this.live, `${this.view.axis} ${this.wordX(point.x, 1e9) || trimmed(point.x)}: ${words.join(", ")}`);
  }

  drawCross() {
    if (!this.cross || !this.x || !this.drawn) return;
    const hover = this.view.hover;
    if (hover === null || hover < this.ends[0] || hover > this.ends[1]) {
      fill(this.cross);
      this.tip.hidden = true;
      this.tellLatest();
      return;
    }
    const found = this.drawn.map((line) => [line, line.points[nearest(line.points, hover)]]).filter(([, p]) => p.raw !== null);
    if (!found.length) return;
    const lead = found.find(([line]) => line.main) || found[0];
    const x = this.x(Math.min(this.ends[1], Math.max(this.ends[0], this.own ? lead[1].x : hover)));
    fill(this.cross, svg("line", { x1: x, x2: x, y1: TOP, y2: HIGH - LOW }),
      found.filter(([, p]) => !(this.log && p.y <= 0) && Math.abs(this.x(p.x) - x) < 60).map(([line, p]) => svg("circle", { cx: this.x(p.x), cy: this.y(p.y), r: 3.5, fill: line.color })));
    say(this.latest, this.format(lead[1].raw));
    this.tip.hidden = !this.own;
    if (!this.own) return;
    const near = lead[1];
    fill(this.tip, h("div", { class: "tip-head", text: `${this.view.axis} ${this.wordX(near.x, 1e9) || trimmed(near.x)}` }),
      found.slice(0, 10).map(([line, p]) => {
        const swatch = h("span", { class: "swatch" });
        swatch.style.background = line.color;
        return h("div", { class: "tip-row" }, swatch, h("span", { text: line.label }), h("b", { text: this.format(p.raw) }));
      }));
    const wide = this.tip.offsetWidth, room = this.plot.clientWidth;
    this.tip.style.left = Math.round(x + 14 + wide > room ? Math.max(0, x - wide - 14) : x + 14) + "px";
  }
}
Chart.made = 0;

function nearest(points, x) {
  let low = 0, high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle].x < x) low = middle + 1; else high = middle;
  }
  return low > 0 && x - points[low - 1].x < points[low].x - x ? low - 1 : low;
}

// Points of one pixel are merged, with their range.
function thinned(points, x0, x1, pixels) {
  const out = [], wide = (x1 - x0) / pixels;
  let place = NaN, kept = null;
  for (const p of points) {
    if (p.x < x0 - wide || p.x > x1 + wide) continue;
    const here = Math.floor((p.x - x0) / wide);
    if (here === place && kept && p.y !== null && kept.y !== null) {
      kept = { ...p, low: Math.min(kept.low, p.low), high: Math.max(kept.high, p.high), many: true };
      out[out.length - 1] = kept;
    } else out.push(kept = p);
    place = here;
  }
  return out;
}

// Round values in a range; unit: base of round values, such as a power of 2 for bytes.
function ticks(low, high, most, unit) {
  if (unit === 1024) {
    const whole = 1024 ** Math.floor(Math.log(Math.max(high, 1)) / Math.log(1024));
    return ticks(low / whole, high / whole, most).map((value) => value * whole);
  }
  const spread = high - low;
  if (!(spread > 0)) return [low];
  const rough = spread / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((f) => f * power).find((s) => spread / s <= most + 0.5) || power * 10;
  const out = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) out.push(Number(value.toPrecision(12)));
  return out;
}

function powers(low, high) {
  const out = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.log10(high); p++) {
    for (const f of Math.log10(high / low) > 2 ? [1] : [1, 2, 5]) {
      const value = f * 10 ** p;
      if (value >= low && value <= high) out.push(Number(value.toPrecision(3)));
    }
  }
  return out.length > 1 ? out : ticks(low, high, 4).filter((v) => v > 0);
}

const seeing = new IntersectionObserver((entries) => {
  for (const entry of entries) for (const chart of charts) if (chart.card === entry.target) chart.shown = entry.isIntersecting;
  paintSoon();
}, { rootMargin: "200px" });

const sizing = new ResizeObserver((entries) => {
  for (const entry of entries) for (const chart of charts) if (chart.plot === entry.target) { chart.wide = Math.floor(entry.contentRect.width); chart.dirty = true; }
  paintSoon();
});

let waiting = false;
addEventListener("beforeprint", () => { for (const chart of charts) if (chart.dirty) chart.paint(); });  // also charts outside the window
function paintSoon() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    for (const chart of charts) if (chart.dirty && chart.shown) chart.paint();
  });
}
