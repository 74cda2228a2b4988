// The architecture as nested boxes, coloured by time, memory, gradients or parameters.

const HEATS = { time: "time", gradient: "gradient norm", memory: "memory until backward", parameters: "parameters" };

class ModelPanel {
  constructor(box) {
    this.box = box;
    this.kind = "time";
    this.opened = new Set();
    this.key = "";
  }

  draw(run) {
    const tree = run.model;
    if (!tree) { this.key = ""; return fill(this.box, h("p", { class: "empty", text: "No model reported." })); }
    const there = ["time", "gradient", "memory"].filter((kind) => run.heat[kind] && Object.keys(run.heat[kind].of || {}).length);
    const kinds = [...there, "parameters"];
    const kind = kinds.includes(this.kind) ? this.kind : kinds[0];
    const key = run.id + kind + kinds + JSON.stringify([run.heat[kind], tree.parameters, [...this.opened]]);
    if (key === this.key) return undefined;
    this.key = key;
    const heat = this.heat(run, kind, tree);
    const chooser = h("span", { class: "segments", role: "radiogroup", "aria-label": "Colours show" },
      kinds.map((one) => h("label", {}, h("input", { type: "radio", name: "heat", value: one, checked: one === kind, onchange: () => { this.kind = one; this.key = ""; this.draw(run); } }), h("span", { text: HEATS[one] }))));
    const step = (run.heat[kind] || {}).step;
    const words = kind === "parameters" ? `${count(tree.parameters)} parameters` : step === undefined ? "" : `of step ${count(step)}`;
    const ramp = h("span", { class: "ramp", "aria-hidden": "true" }, Array.from({ length: 7 }, (_, i) => { const cell = h("span"); cell.style.background = shade(kind, i / 6); return cell; }));
    fill(this.box, h("div", { class: "toolbar" }, chooser, h("span", { class: "hint" }, "less ", ramp, " more"), h("span", { class: "hint", text: words })),
      h("div", { class: "model scroll", role: "tree", "aria-label": "Architecture" }, this.part(tree, heat, kind, run, 0)));
    return undefined;
  }

  // Values by path, and the largest one.
  heat(run, kind, tree) {
    const values = new Map();
    if (kind === "parameters") {
      const walk = (part) => { values.set(part.path, part.parameters); (part.parts || []).forEach(walk); (part.folded || []).forEach((path) => values.set(path, part.parameters)); };
      walk(tree);
    } else for (const [path, value] of Object.entries(run.heat[kind].of || {})) values.set(path, value);
    let most = 0;
    const leaves = (part) => {
      if (part.parts) part.parts.forEach(leaves);
      else for (const path of part.folded || [part.path]) most = Math.max(most, values.get(path) || 0);
    };
    leaves(tree);
    return { values, most };
  }

  part(part, heat, kind, run, depth) {
    const paths = part.folded || [part.path], inside = part.parts || [];
    const found = paths.map((path) => heat.values.get(path)).filter((v) => v !== undefined && v !== null);
    const sum = kind === "gradient" ? Math.sqrt(found.reduce((s, v) => s + v * v, 0)) : found.reduce((s, v) => s + v, 0);
    const word = !found.length ? "" : kind === "time" ? brief(sum) : kind === "gradient" ? number(sum) : kind === "memory" ? bytes(sum) : short(sum);
    const isOpen = !inside.length || depth < 1 || this.opened.has(part.path) || (!this.opened.has("-" + part.path) && depth < 4 && inside.length <= 12 && !part.folded);
    const name = part.label || part.name;
    const title = h("span", { class: "part-name" }, h("b", { text: part.folded ? rangeOf(paths) : name }), h("span", { class: "part-kind", text: part.kind === name ? "" : part.kind }));
    const row = h(inside.length && depth ? "button" : "div", { class: "part-row", type: inside.length && depth ? "button" : undefined, "aria-expanded": inside.length && depth ? String(isOpen) : undefined,
      onclick: inside.length && depth ? () => { this.toggle(part.path, isOpen); this.key = ""; this.draw(run); } : undefined },
    inside.length && depth ? h("span", { class: "arrow", "aria-hidden": "true", text: isOpen ? "▾" : "▸" }) : null, title,
    part.folded ? h("span", { class: "times", text: "×" + paths.length }) : null, h("span", { class: "part-heat", text: word }),
    h("span", { class: "part-count", text: part.parameters ? short(part.parameters * paths.length) : "" }));
    const box = h("div", { class: "part" + (inside.length ? " group" : " leaf"), role: "treeitem", "aria-level": depth + 1, "aria-label": `${name}, ${part.kind}${part.folded ? ", " + paths.length + " times" : ""}, ${count(part.parameters * paths.length)} parameters${word ? ", " + HEATS[kind] + " " + word : ""}` }, row);
    if (!inside.length && found.length && heat.most) {
      const share = Math.max(...found) / heat.most;
      row.style.background = shade(kind, share);
      if (share > 0.62) row.classList.add("on-dark");
    }
    if (part.folded) box.append(this.strip(paths, heat, kind));
    if (inside.length && isOpen) {
      const children = inside.map((one) => this.part(one, heat, kind, run, depth + 1));
      if (part.left_out) children.push(h("p", { class: "hint", text: `and ${part.left_out} more` }));
      box.append(h("div", { class: "parts", role: "group" }, children));
    }
    return box;
  }

  toggle(path, isOpen) {
    this.opened.delete(path);
    this.opened.delete("-" + path);
    this.opened.add(isOpen ? "-" + path : path);
  }

  // One cell for each of the folded layers.
  strip(paths, heat, kind) {
    const values = paths.map((path) => heat.values.get(path) || 0), most = Math.max(...values);
    return h("div", { class: "strip", "aria-hidden": "true" }, values.map((value, i) => {
      const cell = h("span", { title: `${paths[i]}: ${kind === "time" ? brief(value) : kind === "memory" ? bytes(value) : number(value)}` });
      if (most) cell.style.background = shade(kind, value / most);
      return cell;
    }));
  }
}

function rangeOf(paths) {
  const first = paths[0].split("."), last = paths.at(-1).split(".");
  const a = first.at(-1), b = last.at(-1);
  return a === b ? first.at(-2) || a : `${a} … ${b}`;
}

function shade(kind, share) {
  const part = Math.round(100 * Math.min(1, Math.max(0, share)));
  return `color-mix(in oklab, var(--heat-${kind}-high) ${part}%, var(--heat-${kind}-low))`;
}
