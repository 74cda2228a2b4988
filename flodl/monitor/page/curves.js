
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);

function shown(value) {
  if (value === null || value === undefined) return "";
  if (value !== 0 && Math.abs(value) < 0.001) return value.toExponential(2);
  return Math.abs(value) < 100 ? value.toFixed(4) : value.toFixed(2);
}

function element(kind, text, parent) {
  const made = document.createElement(kind);
  made.textContent = text;
  parent.appendChild(made);
  return made;
}

// Places each finite value; room is left for the labels of the axes.
function places(values, width, height) {
  const finite = values.filter((v) => v !== null);
  const low = Math.min(...finite), high = Math.max(...finite);
  const span = high - low || 1, steps = Math.max(values.length - 1, 1);
  const points = values.map((v, i) => v === null ? null :
    [46 + (width - 56) * i / steps, 8 + (height - 30) * (1 - (v - low) / span)]);
  return { low, high, points };
}

function draw(canvas, values, marked) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const { low, high, points } = places(values, width, height);
  const line = getComputedStyle(canvas).color;
  pen.font = "11px system-ui, sans-serif";
  pen.fillStyle = "#85929e";
  pen.fillText(shown(high), 0, 14);
  pen.fillText(shown(low), 0, height - 20);
  pen.fillText("1", 44, height - 4);
  pen.textAlign = "right";
  pen.fillText(String(values.length), width - 6, height - 4);
  pen.strokeStyle = pen.fillStyle = line;
  pen.lineWidth = 1.8;
  pen.beginPath();
  let down = false;
  for (const point of points) {
    if (point && down) pen.lineTo(...point);
    else if (point) pen.moveTo(...point);
    down = point !== null;
  }
  pen.stroke();
  points.forEach((point, i) => {
    if (point && (i === marked || values.length === 1)) {
      pen.beginPath();
      pen.arc(point[0], point[1], 4, 0, 7);
      pen.fill();
    }
  });
  return points;
}

for (const { name, values } of data) {
  const card = element("section", "", document.getElementById("curves"));
  element("h2", name, card);
  const rest = "latest " + shown(values.filter((v) => v !== null).at(-1));
  const reading = element("p", rest, card);
  const canvas = element("canvas", "", card);
  let points = draw(canvas, values, -1);
  canvas.addEventListener("mousemove", (event) => {
    let best = -1;
    points.forEach((p, i) => {
      if (p && (best < 0 || Math.abs(p[0] - event.offsetX) < Math.abs(points[best][0] - event.offsetX))) best = i;
    });
    points = draw(canvas, values, best);
    if (best >= 0) reading.textContent = "epoch " + (best + 1) + ": " + shown(values[best]);
  });
  canvas.addEventListener("mouseleave", () => {
    points = draw(canvas, values, -1);
    reading.textContent = rest;
  });
  window.addEventListener("resize", () => { points = draw(canvas, values, -1); });
}

const table = element("table", "", document.getElementById("table"));
const head = element("tr", "", table);
element("th", "epoch", head);
data.forEach((one) => element("th", one.name, head));
const epochs = Math.max(0, ...data.map((one) => one.values.length));
for (let epoch = epochs; epoch > 0; epoch--) {
  const row = element("tr", "", table);
  element("td", String(epoch), row);
  data.forEach((one) => element("td", shown(one.values[epoch - 1]), row));
}
