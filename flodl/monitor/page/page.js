// The page: receives messages, draws the panels, sends commands.

const page = {
  runs: new Map(), chosen: new Set(), focus: null, live: false, kind: "live", control: false, skew: 0, stale: true, picked: false,

  begin() {
    this.token = new URLSearchParams(location.hash.slice(1)).get("token") || read("flodl-token-" + location.host, sessionStorage);
    if (location.hash.includes("token=")) {
      write("flodl-token-" + location.host, this.token, sessionStorage);
      history.replaceState(null, "", location.pathname);
    }
    this.build();
    this.theme(read("flodl-theme", localStorage) || "auto");
    const island = document.getElementById("data");
    if (island) this.all(JSON.parse(island.textContent));
    else this.connect();
    setInterval(() => this.tick(), 1000);
  },

  // ---- input ----

  connect() {
    const source = new EventSource("/events");
    source.addEventListener("all", (event) => { this.all(JSON.parse(event.data)); });
    source.addEventListener("delta", (event) => { this.delta(JSON.parse(event.data)); });
    source.onopen = () => { this.live = true; this.tell(); };
    source.onerror = () => {
      this.live = false;
      this.tell();
      if (source.readyState === EventSource.CLOSED) setTimeout(() => this.connect(), 3000);
    };
  },

  all(said) {
    this.kind = said.kind;
    this.control = said.control && this.live;
    this.skew = said.now - Date.now() / 1000;
    this.savedAt = said.now;
    const before = this.runs;
    this.runs = new Map();
    for (const snapshot of said.runs) {
      const run = new Run(snapshot.id);
      run.fold(snapshot);
      if (before.has(run.id)) run.color = before.get(run.id).color;
      this.take(run);
    }
    if (this.focus) this.focus = this.runs.get(this.focus.id) || null;
    this.arrange();
  },

  delta(delta) {
    let run = this.runs.get(delta.run);
    const isNew = !run;
    if (isNew) this.take(run = new Run(delta.run));
    run.fold(delta);
    if (isNew || "name" in delta) this.arrange();
    this.draw();
  },

  take(run) {
    this.runs.set(run.id, run);
    if (run.color === undefined) {
      const used = [...this.runs.values()].filter((one) => this.chosen.has(one.id)).map((one) => one.color);
      run.color = Array.from({ length: PALETTE }, (_, i) => i).find((i) => !used.includes(i)) ?? this.runs.size % PALETTE;
    }
    if (!this.picked && this.chosen.size < 6) this.chosen.add(run.id);
  },

  arrange() {
    const runs = [...this.runs.values()].sort((a, b) => b.began - a.began), times = new Map();
    for (const run of runs) times.set(run.name, (times.get(run.name) || 0) + 1);
    for (const run of runs) run.title = times.get(run.name) > 1 ? `${run.name} · ${clock(run.began)}` : run.name || run.id;
    this.ordered = runs;
    if (!this.focus || (this.kind === "live" && !this.picked)) this.focus = runs[0] || null;
    this.draw();
  },

  choose(run, on) {
    this.picked = true;
    if (on) this.chosen.add(run.id); else this.chosen.delete(run.id);
    this.draw();
  },

  focusOn(run) {
    this.picked = true;
    this.focus = run;
    this.chosen.add(run.id);
    this.draw();
  },

  // ---- drawing ----

  build() {
    const main = document.getElementById("main");
    const block = (id, title, ...inside) => h("section", { class: "block", id, "aria-labelledby": id + "-title" }, h("h2", { id: id + "-title", text: title }), inside);
    const box = (name, kind) => this[name + "Box"] = h(kind || "div", { class: name });
    this.notice = h("div", { class: "notice", role: "alert", hidden: true });
    const saving = h("p", { class: "row saving" },
      location.protocol.startsWith("http") && !document.getElementById("data") ? h("a", { class: "button", href: "/archive.html", download: "run.html", text: "Save this page" }) : null,
      h("button", { type: "button", text: "Curves as CSV", onclick: () => this.csv() }), h("button", { type: "button", text: "All as JSON", onclick: () => this.json() }));
    fill(main, this.notice, box("vitals", "dl"),
      block("runs", "Runs", h("div", { class: "card scroll" }, box("list"))),
      block("curves", "Curves", box("curves")),
      block("speed", "Speed", box("speed")), block("ranks", "Ranks", h("div", { class: "card" }, box("ranks"))),
      block("machine", "Machine", box("machine")), block("model", "Model", h("div", { class: "card" }, box("tree"))),
      block("epochs", "Epochs", h("div", { class: "card scroll" }, box("table"))),
      block("facts", "Configuration", box("about")), block("log", "Log", h("div", { class: "card" }, box("lines"))), saving);
    this.speedBox.classList.add("grid");
    this.machineBox.classList.add("grid");
    this.hero = new Hero(this.vitalsBox);
    this.list = new RunList(this.listBox);
    this.curves = new Curves(this.curvesBox);
    this.speeds = new Speeds(this.speedBox, this.curves.view);
    this.lanes = new LanesPanel(this.ranksBox);
    this.machine = new Machine(this.machineBox);
    this.model = new ModelPanel(this.treeBox);
    this.epochs = new Epochs(this.tableBox);
    this.facts = new Facts(this.aboutBox);
    this.log = new Log(this.linesBox);
    document.getElementById("theme").addEventListener("click", () => this.theme({ auto: "light", light: "dark", dark: "auto" }[this.mode]));
  },

  draw() {
    this.stale = true;
    if (this.drawing) return;
    this.drawing = true;
    requestAnimationFrame(() => { this.drawing = false; if (this.stale) this.drawNow(); });
  },

  drawNow() {
    this.stale = false;
    const run = this.focus, now = this.now();
    if (!run) return this.tell();
    const drawn = this.ordered.filter((one) => this.chosen.has(one.id));
    this.hero.draw(run, now);
    this.list.draw(this.ordered, this.chosen, run, now);
    this.curves.show(drawn.length ? drawn : [run]);
    this.speeds.show(drawn.length ? drawn : [run]);
    this.machine.show(run);
    this.lanes.draw(run, now);
    this.model.draw(run);
    this.epochs.draw(run);
    this.facts.draw(drawn.length > 1 ? drawn : [run], run);
    this.log.draw(run);
    const hide = (id, on) => { document.getElementById(id).hidden = on; };
    hide("runs", this.runs.size < 2);
    hide("speed", !this.speedBox.children.length);
    hide("machine", !this.machineBox.children.length);
    hide("ranks", !run.lanes || !Object.keys(run.lanes.ranks).length);
    hide("model", !run.model);
    this.tell();
    return undefined;
  },

  now() { return this.live ? Date.now() / 1000 + this.skew : this.savedAt || 0; },

  tick() {
    if (!this.focus) return;
    this.hero.draw(this.focus, this.now());
    this.tell();
  },

  tell() {
    const run = this.focus, pill = document.getElementById("status"), link = document.getElementById("link");
    const status = run ? run.status : "waiting";
    pill.className = "status " + status;
    say(pill, STATUS[status] || status);
    const name = run ? run.title : "waiting for a run";
    say(document.getElementById("name"), name);
    const island = document.getElementById("data") !== null;
    const usual = island ? "saved " + clock(this.savedAt) : this.live ? "" : run ? "no connection" : "connecting…";
    say(link, Date.now() < (this.answerUntil || 0) ? this.answer : usual);
    link.hidden = !link.textContent;
    const share = run && run.state.total ? Math.min(1, (run.state.step || 0) / run.state.total) : run && status === "finished" ? 1 : 0;
    const bar = document.getElementById("progress");
    bar.setAttribute("aria-valuenow", String(Math.floor(100 * share + 1e-9)));
    bar.firstElementChild.style.width = (100 * share).toFixed(2) + "%";
    bar.className = "progress " + status;
    const left = run && run.isGoing ? leftOf(run) : null;
    document.title = (run && run.isGoing && share ? Math.floor(100 * share + 1e-9) + " % " : "") + name + (left === null ? "" : " · " + span(left));
    this.notice.hidden = !(run && run.state.reason);
    if (run && run.state.reason) say(this.notice, run.state.reason);
    this.sections();
    this.orders();
  },

  sections() {
    const shown = [...document.querySelectorAll("section.block")].filter((one) => !one.hidden);
    const key = shown.map((one) => one.id).join();
    if (key === this.shownSections) return;
    this.shownSections = key;
    fill(document.getElementById("sections"), shown.map((one) => h("a", { href: "#" + one.id, text: one.querySelector("h2").textContent,
      onclick: (event) => { event.preventDefault(); one.scrollIntoView(); one.querySelector("h2").setAttribute("tabindex", "-1"); one.querySelector("h2").focus({ preventScroll: true }); } })));
  },

  // auto follows the system; the choice is stored in the browser.
  theme(mode) {
    this.mode = mode;
    if (mode === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = mode;
    write("flodl-theme", mode, localStorage);
    const button = document.getElementById("theme");
    say(button, { auto: "◐", light: "☀", dark: "☾" }[mode]);
    button.setAttribute("aria-label", `Colours: ${{ auto: "as the system", light: "light", dark: "dark" }[mode]}. Change`);
    button.title = { auto: "Colours as the system", light: "Light", dark: "Dark" }[mode];
  },

  // ---- commands ----

  orders() {
    const box = document.getElementById("orders"), on = this.control && this.live && this.token && this.focus && this.focus.isGoing;
    if (!on === !box.children.length) return;
    if (!on) return fill(box);
    const words = (this.focus.state.orders || []).map((word) => [word, word[0].toUpperCase() + word.slice(1)]);
    fill(box, on ? words.map(([word, text]) => h("button", { type: "button", class: word === "stop" ? "danger" : "", text, onclick: () => word === "stop" ? this.sure() : this.order(word) })) : []);
    return undefined;
  },

  sure() {
    const dialog = document.getElementById("sure");
    say(document.getElementById("sure-text"), "Stop this run? Its state is saved if it has a folder, so that it can be resumed.");
    document.getElementById("sure-no").onclick = () => dialog.close();
    document.getElementById("sure-yes").onclick = () => { dialog.close(); this.order("stop"); };
    dialog.showModal();
  },

  async order(word) {
    try {
      const answer = await fetch("/control", { method: "POST", headers: { "Content-Type": "application/json", "X-Monitor-Token": this.token }, body: JSON.stringify({ do: word }) });
      const said = answer.headers.get("Content-Type") === "application/json" ? (await answer.json()).said : await answer.text();
      this.answer = said;
    } catch {
      this.answer = "the run did not answer";
    }
    this.answerUntil = Date.now() + 8000;
    this.tell();
  },

  csv() {
    const rows = [["run", "curve", "step", "epoch", "seconds", "value", "low", "high", "values"]];
    for (const run of this.ordered || []) for (const [name, series] of run.series) {
      for (const [step, epoch, t, mean, low, high, many] of series.points) rows.push([run.title, name, step, epoch, t, mean ?? "", low ?? "", high ?? "", many]);
    }
    // A spreadsheet must not evaluate a cell as a formula.
    const cell = (value) => typeof value === "number" ? String(value) : `"${(/^[=+\-@\t\r]/.test(value) ? "'" : "") + String(value).replaceAll('"', '""')}"`;
    download("run.csv", "text/csv", rows.map((row) => row.map(cell).join(",")).join("\n") + "\n");
  },

  json() {
    const plain = [...this.runs.values()].map((run) => ({ id: run.id, name: run.name, began: run.began, facts: run.facts, state: run.state, epochs: run.epochs, log: run.log,
      curves: Object.fromEntries([...run.series].map(([name, series]) => [name, series.points])) }));
    download("run.json", "application/json", JSON.stringify(plain, null, 1));
  },
};

// The browser may forbid storage.
function read(key, store) {
  try { return store.getItem(key); } catch { return null; }
}

function write(key, value, store) {
  try { store.setItem(key, value); } catch { /* not kept */ }
}

page.begin();
