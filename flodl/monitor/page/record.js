// Records of runs, built from the same deltas as in flodl/monitor/record.py.

const MOST_POINTS = 2000, MOST_LINES = 400, MOST_EPOCHS = 1000;

class Series {
  constructor(stride) {
    this.points = []; // [step, epoch, t, mean, low, high, count]
    this.stride = stride || 1;
  }

  add(point) {
    const whole = point.length === 7 ? point.slice() : [...point.slice(0, 4), point[3], point[3], 1];
    const last = this.points.at(-1);
    if (last && whole[0] < last[0]) whole[0] = last[0];
    if (last && last[6] + whole[6] <= this.stride) this.points[this.points.length - 1] = merged(last, whole);
    else this.points.push(whole);
    while (this.points.length > MOST_POINTS) {
      this.stride *= 2;
      const kept = [];
      for (let i = 0; i + 1 < this.points.length; i += 2) kept.push(merged(this.points[i], this.points[i + 1]));
      if (this.points.length % 2) kept.push(this.points.at(-1));
      this.points = kept;
    }
  }

  cut(step) { this.points = this.points.filter((point) => point[0] <= step); }

  get latest() {
    for (let i = this.points.length - 1; i >= 0; i--) if (this.points[i][3] !== null) return this.points[i][3];
    return null;
  }
}

function merged(a, b) {
  const total = a[6] + b[6];
  if (a[3] === null || b[3] === null) {
    const sure = a[3] === null ? b : a;
    return [b[0], b[1], b[2], sure[3], sure[4], sure[5], total];
  }
  const mean = (a[3] * a[6] + b[3] * b[6]) / total;
  return [b[0], b[1], b[2], mean, Math.min(a[4], b[4]), Math.max(a[5], b[5]), total];
}

class Run {
  constructor(id) {
    Object.assign(this, { id, name: "", began: 0, t: 0, facts: {}, series: new Map(), state: {}, log: [], leftOut: 0,
      epochs: [], lanes: null, model: null, heat: {}, heard: Date.now() });
  }

  fold(delta) {
    this.heard = Date.now();
    if (delta.name) this.name = delta.name;
    if (delta.began) this.began = delta.began;
    if (delta.t) this.t = Math.max(this.t, delta.t);
    if (delta.session) {
      const step = delta.session.step || 0;
      for (const series of this.series.values()) series.cut(step);
      this.epochs = this.epochs.filter((row) => (row.step || 0) <= step);
    }
    for (const [section, values] of Object.entries(delta.facts || {})) {
      this.facts[section] = Object.assign(this.facts[section] || {}, values);
    }
    for (const [name, points] of Object.entries(delta.p || {})) {
      if (!this.series.has(name)) this.series.set(name, new Series((delta.stride || {})[name]));
      const series = this.series.get(name);
      for (const point of points) series.add(point);
    }
    Object.assign(this.state, delta.state || {});
    if (delta.log) {
      this.log.push(...delta.log);
      while (this.log.length > MOST_LINES) { this.log.splice(50, 1); this.leftOut++; }
    }
    this.leftOut += delta.left_out || 0;
    if (delta.epochs) this.epochs = [...this.epochs, ...delta.epochs].slice(-MOST_EPOCHS);
    if (delta.lanes && Object.keys(delta.lanes).length) {
      if (!this.lanes || "bin_s" in delta.lanes) this.lanes = new Lanes();
      this.lanes.fold(delta.lanes);
    }
    if (delta.model) this.model = delta.model;
    Object.assign(this.heat, delta.heat || {});
    return delta;
  }

  latest(name) {
    const series = this.series.get(name);
    return series ? series.latest : null;
  }

  get status() { return this.state.status || "waiting"; }
  get isGoing() { return ["running", "restarting", "waiting"].includes(this.status); }

  // Duration by the clock of the machine that runs it.
  elapsed(now) { return this.isGoing && now && this.began ? Math.max(this.t, now - this.began) : this.t; }
}
