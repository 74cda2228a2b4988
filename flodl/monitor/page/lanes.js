// Activity of each rank over time: the same data as in flodl/monitor/lanes.py, one lane for each rank.

const KINDS = ["compute", "sync", "wait", "evaluation"];
const KIND_WORDS = { compute: "computing", sync: "averaging", wait: "waiting for others", evaluation: "evaluating", idle: "idle" };
const MOST_BINS = 400;

class Lanes {
  constructor() { this.bin = 0.5; this.ranks = {}; this.meetings = []; }

  fold(delta) {
    if ("bin_s" in delta) {
      this.bin = delta.bin_s;
      this.ranks = delta.ranks;
      this.meetings = delta.meetings.slice();
      return;
    }
    for (const [rank, given] of Object.entries(delta)) {
      if (rank === "all") {
        this.meetings.push(...(given.meetings || []));
        while (this.meetings.length > 400) this.meetings = this.meetings.filter((_, i) => i % 2 === 0);
        continue;
      }
      if (!this.ranks[rank]) this.ranks[rank] = { bins: [], share: null, end: null, about: "" };
      const lane = this.ranks[rank];
      for (const [kind, begin, end] of given.spans || []) this.put(lane, KINDS.indexOf(kind), begin, end);
      for (const key of ["share", "end", "about"]) if (key in given) lane[key] = given[key];
    }
  }

  put(lane, place, begin, end) {
    if (place < 0 || !(begin >= 0 && end >= begin)) return;
    while (end >= MOST_BINS * this.bin) this.double();
    const first = Math.floor(begin / this.bin), final = Math.floor(end / this.bin);
    while (lane.bins.length <= final) lane.bins.push([0, 0, 0, 0]);
    for (let i = first; i <= final; i++) {
      lane.bins[i][place] += Math.max(0, Math.min(end, (i + 1) * this.bin) - Math.max(begin, i * this.bin));
    }
  }

  double() {
    this.bin *= 2;
    for (const lane of Object.values(this.ranks)) {
      const kept = [];
      for (let i = 0; i < lane.bins.length; i += 2) {
        const next = lane.bins[i + 1] || [0, 0, 0, 0];
        kept.push(lane.bins[i].map((value, k) => value + next[k]));
      }
      lane.bins = kept;
    }
  }

  // Part of the time since the first activity of a rank, by kind.
  shares(lane, until) {
    const sums = KINDS.map((_, k) => lane.bins.reduce((sum, bin) => sum + bin[k], 0));
    const first = lane.bins.findIndex((bin) => bin.some((v) => v > 0));
    const whole = Math.max((lane.end === null ? until : lane.end) - Math.max(0, first) * this.bin, sums.reduce((a, b) => a + b, 0), 1e-9);
    const shares = sums.map((value) => value / whole);
    return [...shares, Math.max(0, 1 - shares.reduce((a, b) => a + b, 0))];
  }
}

class LanesPanel {
  constructor(box) {
    this.box = box;
    this.drawn = null;
  }

  draw(run, now) {
    const lanes = run.lanes;
    if (!lanes || !Object.keys(lanes.ranks).length) return fill(this.box, h("p", { class: "empty", text: "No activity reported yet." }));
    const until = Math.max(lanes.bin, run.t);
    const ranks = Object.entries(lanes.ranks).sort(([a], [b]) => Number(a) - Number(b));
    const firsts = ranks.map(([, lane]) => lane.bins.findIndex((bin) => bin.some((v) => v > 0))).filter((i) => i >= 0);
    this.from = Math.min(until - lanes.bin, lanes.bin * Math.min(...firsts, Infinity));
    if (!Number.isFinite(this.from)) this.from = 0;
    const legend = h("ul", { class: "legend", "aria-label": "Colours of the lanes" },
      [...KINDS, "idle"].map((kind) => h("li", {}, h("span", { class: "swatch fill-" + kind }), KIND_WORDS[kind])));
    const rows = ranks.map(([rank, lane]) => this.lane(rank, lane, lanes, until));
    const table = this.table(ranks, lanes, until);
    fill(this.box, legend, h("div", { class: "lanes" }, rows, this.axis(until)), table);
  }

  lane(rank, lane, lanes, until) {
    const picture = svg("svg", { viewBox: "0 0 1000 24", preserveAspectRatio: "none", class: "lane", "aria-hidden": "true" });
    const paths = KINDS.map(() => "");
    const length = until - this.from, wide = 1000 * lanes.bin / length, shift = this.from / lanes.bin;
    lane.bins.forEach((bin, i) => {
      let low = 24;
      bin.forEach((value, k) => {
        const high = 24 * Math.min(1, value / lanes.bin);
        if (high < 0.2) return;
        paths[k] += `M${((i - shift) * wide).toFixed(2)} ${low.toFixed(2)}h${(wide * 1.02).toFixed(2)}v${(-high).toFixed(2)}h${(-wide * 1.02).toFixed(2)}z`;
        low -= high;
      });
    });
    paths.forEach((d, k) => d && picture.append(svg("path", { d, class: "fill-" + KINDS[k] })));
    for (const t of lanes.meetings) {
      const x = (1000 * (t - this.from) / length).toFixed(2);
      picture.append(svg("line", { x1: x, x2: x, y1: 0, y2: 24, class: "meeting", "vector-effect": "non-scaling-stroke" }));
    }
    if (lane.end !== null) {
      const x = (1000 * Math.min(1, (lane.end - this.from) / length)).toFixed(2);
      picture.append(svg("rect", { x, y: 0, width: Math.max(4, 1000 - x), height: 24, class: "lost" }));
    }
    const share = lane.share === null ? "" : (100 * lane.share).toFixed(0) + " % of the work";
    const words = lane.end === null ? share : "lost after " + span(lane.end);
    return h("div", { class: "lane-row" + (lane.end === null ? "" : " is-lost") },
      h("div", { class: "lane-name" }, h("strong", { text: "rank " + rank }), h("span", { text: lane.about || "" })),
      picture, h("div", { class: "lane-share", text: words }));
  }

  axis(until) {
    return h("div", { class: "lane-row axis", "aria-hidden": "true" }, h("div"),
      h("div", { class: "ends" }, h("span", { text: span(this.from) }), h("span", { text: span((this.from + until) / 2) }), h("span", { text: span(until) })), h("div"));
  }

  table(ranks, lanes, until) {
    const rows = ranks.map(([rank, lane]) => h("tr", {}, h("th", { scope: "row", text: "rank " + rank }),
      lanes.shares(lane, until).map((share) => h("td", { text: percent(share) }))));
    return h("div", { class: "scroll" }, h("table", { class: "figures" },
      head(["", ...[...KINDS, "idle"].map((kind) => KIND_WORDS[kind])]), h("tbody", {}, rows)));
  }
}

function head(names) {
  return h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col", text: name }))));
}
