// Numbers and times as short texts, and elements whose text is set by textContent only.

const SVG = "http://www.w3.org/2000/svg";

function h(kind, props, ...children) {
  const made = document.createElement(kind);
  for (const [key, value] of Object.entries(props || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "text") made.textContent = value;
    else if (key === "class") made.className = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) made.append(child);
  return made;
}

function svg(kind, attributes, ...children) {
  const made = document.createElementNS(SVG, kind);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value !== undefined && value !== null) made.setAttribute(key, String(value));
  }
  made.append(...children);
  return made;
}

function fill(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
}

function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

function count(value) {
  return value === null || value === undefined ? "–" : WHOLE.format(value);
}

function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= unit) return trimmed(value / unit) + letter;
  }
  return trimmed(value);
}

function trimmed(value) {
  const size = Math.abs(value);
  const text = size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : value.toFixed(2);
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 0.001 || size >= 1e6) {
    const [mantissa, power] = value.toExponential(2).split("e");
    return mantissa + "e" + Number(power);
  }
  return size < 100 ? value.toFixed(4) : size < 10000 ? value.toFixed(1) : count(value);
}

function bytes(value) {
  if (value === null || value === undefined) return "–";
  for (const [unit, word] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (Math.abs(value) >= unit) return trimmed(value / unit) + " " + word;
  }
  return trimmed(value) + " B";
}

function millis(value) {
  if (value === null || value === undefined) return "–";
  return Math.abs(value) >= 1000 ? trimmed(value / 1000) + " s" : trimmed(value) + " ms";
}

function brief(seconds) {
  if (seconds < 1e-3) return (seconds * 1e6).toFixed(0) + " µs";
  return seconds < 1 ? (seconds * 1e3).toFixed(2) + " ms" : seconds.toFixed(2) + " s";
}

function percent(value) {
  return value === null || value === undefined ? "–" : (100 * value).toFixed(1) + " %";
}

function span(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds) || seconds < 0) return "–";
  const whole = Math.floor(seconds);
  if (seconds < 1) return Math.round(seconds * 1000) + " ms";
  if (whole < 60) return whole + " s";
  if (whole < 3600) return Math.floor(whole / 60) + " m " + String(whole % 60).padStart(2, "0") + " s";
  const hours = Math.floor(whole / 3600);
  const rest = String(Math.floor(whole % 3600 / 60)).padStart(2, "0") + " m";
  return hours < 48 ? hours + " h " + rest : Math.floor(hours / 24) + " d " + String(hours % 24).padStart(2, "0") + " h";
}

function clock(unix) {
  const date = new Date(unix * 1000);
  return Number.isFinite(unix) && unix > 0
    ? date.toLocaleString(undefined, { year: "numeric", month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" })
    : "–";
}

// Times of today without the date.
function since(unix) {
  const date = new Date(unix * 1000);
  return date.toDateString() === new Date().toDateString()
    ? date.toLocaleTimeString(undefined, { hour: "2-digit", minute: "2-digit" })
    : date.toLocaleDateString(undefined, { month: "short", day: "numeric" }) + ", " + date.toLocaleTimeString(undefined, { hour: "2-digit", minute: "2-digit" });
}

const NAMES = {
  lr: "learning rate", grad_norm: "gradient norm", steps_s: "steps per second", rows_s: "rows per second",
  mcc: "MCC", f1: "F1", tokens_s: "tokens per second", step_ms: "time of a step", peak_share: "share of the devices’ peak",
};

function worded(name) {
  return NAMES[name] || name.replaceAll("_", " ");
}

// A fact as text.
function fact(key, value) {
  if (value === null || value === undefined || value === "") return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "number") {
    if (/(^|_)(bytes|memory|ram)$/.test(key)) return bytes(value);
    return Number.isInteger(value) ? count(value) : String(Number(value.toPrecision(6)));
  }
  if (Array.isArray(value)) return value.map((one) => fact(key, one)).join(", ");
  if (typeof value === "object") {
    return Object.entries(value).map(([name, one]) => name + ": " + fact(name, one)).join(", ");
  }
  return String(value);
}

function download(name, kind, text) {
  const link = h("a", { href: URL.createObjectURL(new Blob([text], { type: kind })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
