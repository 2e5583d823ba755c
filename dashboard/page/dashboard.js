// The dashboard's page: draws what /api/state and /api/runs tell, and again whenever an event comes.
// Whatever a board or an operator wrote is put in as text, never as markup.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const LETTERS = { trained: "T", late: "L", rejected: "R", declined: "D" };
const MEANINGS = { trained: "trained", late: "late or gone", rejected: "rejected", declined: "declined" };
const PHASES = ["training", "merging", "calibrating", "measuring"];
const SILENCE_SECONDS = 25; // the server says every 10 seconds that it is still there
const MOST_COLUMNS = 120;
const LITTLE_DISK = 100e6; // bytes: what is below it is shown as a warning
const $ = (id) => document.getElementById(id);

const page = {
  state: null, // what /api/state told last
  told: null, // of the run that is shown: { key, rounds, layers, fp32_bytes, models }
  shown: "", // key of the run that is shown
  chosen: location.hash.slice(1), // key of the run that somebody chose; empty: the one at work
  board: "", // whose bit-widths; empty: the average
  token: sessionStorage.getItem("fedmpq-token") || "",
  offset: 0, // seconds that the server's clock is ahead of ours
  seen: "", // what the run was like when it was last asked for
};

// Elements

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}
const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

// Words

const percent = (share) => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(1)} %`);
// As the run's metric is told: a share in per cent, anything else as a number.
function measure(value) {
  const metric = page.told && page.told.metric;
  if (value === null || value === undefined || !metric || metric.is_share) return percent(value);
  return value.toFixed(3);
}
const metricTitle = () => (page.told && page.told.metric ? page.told.metric.title : "accuracy");
const capital = (words) => words[0].toUpperCase() + words.slice(1);
const count = (number, one, many) => `${number.toLocaleString("en")} ${number === 1 ? one : many || `${one}s`}`;

function bytes(number) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (number >= 999.5 && unit < units.length - 1) { number /= 1000; unit += 1; }
  const digits = unit === 0 || number >= 99.95 ? 0 : number >= 9.995 ? 1 : 2;
  return `${number.toFixed(digits)} ${units[unit]}`;
}

function seconds(number) {
  if (number < 10) return `${number.toFixed(1)} s`;
  if (number < 120) return `${Math.round(number)} s`;
  if (number < 7200) return `${Math.round(number / 60)} min`;
  if (number < 172800) return `${Math.round(number / 3600)} h`;
  return `${Math.round(number / 86400)} days`;
}

// Of axes, where a zero needs no digits and a round number none after the point.
const short = (words) => words.replace(/^0(\.0+)? .*$/, "0").replace(/(\.\d*?)0+(?= )/, "$1").replace(/\.(?= )/, "");

const now = () => Date.now() / 1000 + page.offset;
const at = (moment) => Date.parse(moment) / 1000;
const clock = (moment) => new Date(moment).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const day = (moment) => new Date(moment).toISOString().slice(0, 10);
// A time that goes on: it is written anew every second.
const age = (moment, before, after) => h("span", { class: "age", "data-since": at(moment), "data-before": before || "", "data-after": after || "" }, ageText(at(moment), before || "", after || ""));
function ageText(since, before, after) {
  const passed = Math.max(0, Math.round(now() - since));
  return `${before}${passed < 120 ? `${passed} s` : seconds(passed)}${after}`;
}

// Asking

class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

const authorized = () => (page.token ? { Authorization: `Bearer ${page.token}` } : {});

async function ask(path, options) {
  const answer = await fetch(path, { ...options, headers: { ...authorized(), ...(options || {}).headers } });
  if (answer.ok) return answer;
  let why = answer.statusText;
  try { why = (await answer.json()).error || why; } catch { /* no JSON: the status says it */ }
  if (answer.status === 401) lock();
  throw new Refused(answer.status, why);
}

async function listen() {
  let wait = 1;
  for (;;) {
    const stop = new AbortController();
    let watchdog = 0;
    const alive = () => { clearTimeout(watchdog); watchdog = setTimeout(() => stop.abort(), SILENCE_SECONDS * 1000); };
    try {
      alive();
      const answer = await ask("api/events", { signal: stop.signal });
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        alive();
        wait = 1;
        text += value;
        const parts = text.split("\n\n");
        text = parts.pop();
        for (const part of parts) hear(part);
      }
    } catch (error) {
      if (error instanceof Refused && error.status === 401) {
        link("lost", "locked");
        await unlock("This dashboard shows nothing without it.");
        continue;
      }
    } finally {
      clearTimeout(watchdog);
    }
    link("lost", "connection lost");
    const known = page.state ? ` What you see is of ${clock(new Date(1000 * page.state.time))}.` : "";
    banner(`The dashboard does not answer; trying again.${known}`);
    await new Promise((done) => setTimeout(done, 1000 * wait));
    wait = Math.min(10, 2 * wait);
  }
}

function hear(event) {
  link("live", "live");
  const data = event.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
  if (!data) return;
  page.state = JSON.parse(data);
  page.offset = page.state.time - Date.now() / 1000;
  showState();
}

function link(kind, words) {
  const node = $("link");
  if (node.textContent !== words) node.textContent = words;
  node.className = `link ${kind}`;
}

function banner(words) {
  $("banner").textContent = words;
  $("banner").hidden = !words;
}

function say(words, failed) {
  const node = $("said");
  node.textContent = words;
  node.className = failed ? "said failed" : "said";
  node.hidden = false;
  clearTimeout(say.timer);
  say.timer = setTimeout(() => { node.hidden = true; }, failed ? 12000 : 6000);
}

// The operator

function lock() {
  page.token = "";
  sessionStorage.removeItem("fedmpq-token");
  showOperator();
}

function unlock(why) {
  const dialog = $("token-dialog");
  $("token-why").textContent = why || "It proves that you may change what the server does.";
  $("token-text").value = "";
  if (!dialog.open) dialog.showModal();
  return new Promise((done) => {
    dialog.addEventListener("close", () => {
      showOperator();
      if (page.state) showRun();
      done(Boolean(page.token));
    }, { once: true });
  });
}

function sure(title, text, button) {
  const dialog = $("sure-dialog");
  $("sure-title").textContent = title;
  $("sure-text").textContent = text;
  $("sure-ok").textContent = button;
  dialog.returnValue = "cancel";
  dialog.showModal();
  return new Promise((done) => dialog.addEventListener("close", () => done(dialog.returnValue === "ok"), { once: true }));
}

async function operate(deed, request) {
  if (!page.token && !(await unlock())) return false;
  try {
    const answer = await ask(`api/operator/${deed}`, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(request),
    });
    say((await answer.json()).done);
    return true;
  } catch (error) {
    const why = error instanceof Refused && error.status === 401 ? "that is not the operator's token" : error.message;
    say(`Not done: ${why}`, true);
    return false;
  }
}

function showOperator() {
  const operates = Boolean(page.state && page.state.operates);
  $("unlock").hidden = !operates;
  $("unlock").textContent = page.token ? "Lock buttons" : "Unlock buttons";
  $("operate").hidden = !operates;
  $("operate-locked").hidden = Boolean(page.token);
  $("operate-forms").hidden = !page.token;
}

function deedButton(words, kind, act) {
  return h("button", { type: "button", class: kind, onclick: async (event) => {
    const button = event.currentTarget;
    button.disabled = true;
    try { await act(); } finally { button.disabled = false; }
  } }, words);
}

function showDeeds(run) {
  const buttons = [];
  if (page.state.operates && !["finished", "aborted"].includes(run.state)) {
    const request = { run_id: run.run_id };
    if (run.state === "paused") buttons.push(deedButton("Resume", "", () => operate("resume", request)));
    else buttons.push(deedButton("Pause", "quiet", () => operate("pause", request)));
    buttons.push(deedButton("Abort", "danger", async () => {
      const text = "It ends now, for good. The rounds that were merged stay.";
      if (await sure(`Abort ${run.name}?`, text, "Abort the run")) await operate("abort", request);
    }));
  }
  replaceIfChanged($("deeds"), `${run.run_id} ${run.state} ${buttons.length}`, () => buttons);
}

// Keeps the keyboard's focus, and what is selected, where nothing has changed.
function replaceIfChanged(node, key, make) {
  if (node.dataset.key === key) return;
  node.dataset.key = key;
  node.replaceChildren(...[make()].flat());
}

// Which run

const keyOf = (place, run) => `${place.key}/${run.run_id}`;

function allRuns() {
  return page.state.places.flatMap((place) => place.runs.map((run) => ({ place, run, key: keyOf(place, run) })));
}

function current() {
  const runs = allRuns();
  const chosen = runs.find((one) => one.key === page.chosen);
  return chosen || runs.find((one) => one.run.live && !one.run.ended) || runs[0] || null;
}

function showState() {
  const places = page.state.places;
  // Where every run has ended it is in order that no server runs.
  const over = (place) => place.kind === "server" && place.runs.length > 0 && place.runs.every((run) => run.ended);
  const notes = places.filter((place) => place.note && !over(place));
  banner(notes.map((place) => place.note).join(" · "));
  $("about").textContent = `FedMPQ ${page.state.version} · ${places.map((place) => place.path).filter(Boolean).join(" · ")}`;
  showOperator();
  showChooser();
  const one = current();
  $("empty").hidden = Boolean(one);
  $("shown").hidden = !one;
  if (!one) { showEmpty(places); return; }
  if (one.key !== page.shown) {
    page.shown = one.key;
    page.told = null;
    page.seen = "";
    page.board = "";
  }
  showRun();
  const seen = JSON.stringify([one.key, one.run.round, one.run.state, one.run.exports, one.run.live && one.run.live.metrics]);
  if (seen !== page.seen) load(one, seen);
}

function showChooser() {
  const runs = allRuns();
  const select = $("run-select");
  const key = JSON.stringify(runs.map((one) => [one.key, one.run.name, one.run.state, one.run.round]));
  replaceIfChanged(select, key, () => runs.map((one) =>
    h("option", { value: one.key }, `${one.run.name} · ${one.run.state}, round ${one.run.round}${one.run.rounds ? ` of ${one.run.rounds}` : ""}`)));
  const one = current();
  if (one) select.value = one.key;
  select.disabled = runs.length === 0;
}

function showEmpty(places) {
  document.title = "FedMPQ";
  const server = places.find((place) => place.kind === "server");
  const starting = server && server.note.includes("starting");
  $("empty-why").textContent = starting
    ? "The server is starting: it reads its folder and prepares the first model."
    : "Nothing has been trained here. A run needs a run.toml and boards that let the server in on their data:";
  $("empty-how").hidden = Boolean(starting);
  $("empty-how").textContent = "fedmpq server bundle camera-1 camera-2        # what each board needs to be let in\n"
    + "fedmpq server run.toml --dashboard 8480       # deals, merges, evaluates\n"
    + "fedmpq client --server HOST:8470 --bundle camera-1 --budget 4 --data ~/photos     # on each board";
  showPlaceBoards(server);
}

function showPlaceBoards(server) {
  if (server && server.boards.length) {
    const names = server.boards.map((board) => board.name).join(", ");
    $("empty-why").textContent += ` ${count(server.boards.length, "board")} enrolled: ${names}.`;
  }
}

async function load(one, seen) {
  page.seen = seen;
  const have = page.told && page.told.key === one.key ? page.told.rounds : [];
  // The last ones may have gained an accuracy since.
  const after = Math.max(0, have.length ? have[have.length - 1].round - 2 : 0);
  try {
    const path = `api/runs/${encodeURIComponent(one.place.key)}/${encodeURIComponent(one.run.run_id)}?after=${after}`;
    const told = await (await ask(path)).json();
    if (page.shown !== one.key) return;
    told.rounds = [...have.filter((round) => round.round <= after), ...told.rounds];
    page.told = { key: one.key, ...told };
    showRun();
  } catch (error) {
    if (page.seen === seen) page.seen = "";
    if (error instanceof Refused) banner(`This run cannot be read: ${error.message}`);
  }
}

// The run

function showRun() {
  const one = current();
  if (!one) return;
  const { place, run } = one;
  const told = page.told && page.told.key === one.key ? page.told : null;
  const rounds = told ? told.rounds : [];
  document.title = `${run.name}: ${run.state} · FedMPQ`;
  $("run-name").textContent = run.name;
  $("run-state").textContent = run.state;
  $("run-state").className = `badge ${run.state}`;
  const progress = $("progress");
  progress.setAttribute("aria-valuemax", run.rounds || run.round || 1);
  progress.setAttribute("aria-valuenow", run.round);
  progress.firstElementChild.style.width = `${Math.min(100, (100 * run.round) / (run.rounds || run.round || 1))}%`;
  showDeeds(run);
  showDoing(place, run);
  showTiles(place, run, told, rounds);
  showBoards(place, run, rounds);
  if (!told) return;
  const drawn = JSON.stringify([one.key, rounds.length, rounds.slice(-3), Math.round($("accuracy").clientWidth)]);
  if (drawn !== showRun.drawn) {
    showRun.drawn = drawn;
    showAccuracy(rounds);
    showBytes(told, rounds);
    showSeconds(rounds);
    showGrid(place, rounds);
    showWidths(told, rounds);
  }
  showModels(one, told);
}

function showDoing(place, run) {
  const parts = [];
  const live = run.live;
  const of = run.rounds ? ` of ${run.rounds}` : "";
  if (run.state === "finished") parts.push(`All ${count(run.round, "round")} are merged${live && live.waiting_since ? `; waiting for ${live.reason}` : ""}.`);
  else if (run.state === "aborted") parts.push(`Ended after ${count(run.round, "round")}${run.reason ? `: ${run.reason}` : ""}.`);
  else if (run.state === "not finished") parts.push(`${run.round}${of} rounds are logged.`);
  else if (live && live.selected) parts.push(...openRound(place, run, live));
  else parts.push(`${run.round}${of} rounds merged${run.reason ? `; ${run.state === "paused" ? "paused" : "waiting for"}: ${run.reason}` : ""}.`);
  if (run.state === "paused" && live && live.selected) parts.push(" Then it pauses.");
  if (live && live.waiting_since && !live.selected) parts.push(" ", h("small", {}, "Since ", clock(live.waiting_since), age(live.waiting_since, " (", ").")));
  $("doing").replaceChildren(...parts);
}

function openRound(place, run, live) {
  const calibrates = live.phase === "calibration";
  const what = calibrates ? `Round ${run.round} is being calibrated` : `Round ${run.round + 1} of ${run.rounds}`;
  const answers = calibrates ? "statistics" : "updates";
  const working = ["selected", "training", "measuring", "uploading"];
  const awaited = place.boards.filter((board) => board.client !== null && working.includes(board.state));
  const names = awaited.slice(0, 6).map((board) => `${board.name} (${board.connected ? board.state : "away"})`);
  const more = awaited.length > names.length ? ` and ${awaited.length - names.length} more` : "";
  const waiting = names.length ? `; waiting for ${names.join(", ")}${more}` : "";
  const until = live.deadline ? `, until ${clock(live.deadline)} at most` : "";
  return [
    `${what}: ${live.updates} of ${live.wanted || live.selected} ${answers} in${waiting}. `,
    live.opened ? h("small", {}, `Open since ${clock(live.opened)}`, age(live.opened, " (", ")"), until, ".") : "",
  ];
}

function totals(told, rounds) {
  let sent = 0, full = 0;
  const curve = [];
  for (const round of rounds) {
    sent += round.bytes_up + round.bytes_down;
    const up = round.clients.filter((client) => client.outcome === "trained").length;
    full += told.fp32_bytes * (up + round.clients.length);
    curve.push({ sent, full });
  }
  return { sent, full, curve };
}

function lastOf(rounds, pick) {
  for (let i = rounds.length - 1; i >= 0; i -= 1) {
    const value = pick(rounds[i]);
    if (value !== null && value !== undefined) return { value, round: rounds[i].round };
  }
  return null;
}

function showTiles(place, run, told, rounds) {
  const accuracy = lastOf(rounds, (round) => round.mean_deployed);
  const last = rounds[rounds.length - 1];
  const tiles = [];
  const measured = { boards: "measured by the boards", "test data": "on test data" };
  tiles.push([`Mean ${metricTitle()}`, measure(accuracy && accuracy.value),
    accuracy ? `after round ${accuracy.round}, ${measured[rounds.find((round) => round.round === accuracy.round).measured_by] || "measured"}` : "not measured yet"]);
  tiles.push(["Rounds merged", run.rounds ? `${run.round} / ${run.rounds}` : `${run.round}`, last ? `loss ${last.loss.toFixed(3)}` : "none yet"]);
  if (told && rounds.length) {
    const { sent, full } = totals(told, rounds);
    tiles.push(["Bytes sent", bytes(sent), sent && full ? `${(full / sent).toFixed(1)}× less than FP32` : ""]);
    tiles.push(["Last round took", seconds(last.seconds), longest(last)]);
  }
  if (place.kind === "server") {
    const connected = place.boards.filter((board) => board.connected).length;
    tiles.push(["Boards connected", place.running ? `${connected} of ${place.boards.length}` : `– of ${place.boards.length}`, place.running ? "" : "the server does not run"]);
    if (place.disk) tiles.push(["Server's disk", bytes(place.disk.free), `free of ${bytes(place.disk.total)}`]);
  }
  replaceIfChanged($("tiles"), JSON.stringify(tiles), () => tiles.map(([name, value, more]) =>
    h("div", {}, h("dt", {}, name), h("dd", {}, value, more ? h("small", {}, more) : null))));
}

function longest(round) {
  const phases = Object.entries(round.phases);
  if (!phases.length) return "";
  const [name, most] = phases.reduce((a, b) => (b[1] > a[1] ? b : a));
  return `${seconds(most)} of it ${name}`;
}

// Charts

function niceTicks(low, high, wanted) {
  const raw = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((one) => one >= raw);
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step / 1e6; tick += step) ticks.push(tick);
  return ticks;
}

// spec: label, xs, series [{ name, color, values, dashed }], format, bars, low, high, empty, note
function draw(id, spec) {
  const figure = $(id);
  const body = figure.querySelector(".drawn") || figure.appendChild(h("div", { class: "drawn" }));
  const series = spec.series.filter((one) => one.values.some((value) => value !== null));
  if (!spec.xs.length || !series.length) {
    body.replaceChildren(h("p", { class: "nothing" }, spec.empty));
    return;
  }
  const open = body.querySelector("details");
  // It stays where it is: whoever has gone to it with the keyboard is not sent away when a round ends.
  let plot = body.querySelector(".plot");
  if (!plot) {
    plot = h("div", { class: "plot", tabindex: "0", role: "group", "aria-label": `${spec.label}; arrow keys go from round to round` });
    body.replaceChildren(plot);
  }
  const legend = h("ul", { class: "legend" }, series.map((one) => h("li", { class: `c${one.color}` },
    h("span", { class: `swatch${spec.bars ? "" : " line"}${one.dashed ? " dashed" : ""}`, "aria-hidden": "true" }), one.name)));
  const table = h("details", { open: Boolean(open && open.open) }, h("summary", {}, "As a table"), asTable(spec, series));
  while (plot.nextSibling) plot.nextSibling.remove();
  plot.after(...[legend, spec.note ? h("p", { class: "note" }, spec.note) : null, table].filter(Boolean));
  paint(plot, spec, series);
}

function asTable(spec, series) {
  const head = h("tr", {}, h("th", { scope: "col" }, "Round"), series.map((one) => h("th", { scope: "col", class: "number" }, one.name)));
  const rows = spec.xs.map((x, i) => h("tr", {}, h("th", { scope: "row" }, String(x)), series.map((one) =>
    h("td", { class: "number" }, one.values[i] === null ? "–" : spec.format(one.values[i])))));
  return h("div", { class: "scroll", tabindex: "0" }, h("table", { class: "data" }, h("thead", {}, head), h("tbody", {}, rows)));
}

function extent(spec, series) {
  if (spec.bars) {
    const sums = spec.xs.map((_, i) => series.reduce((sum, one) => sum + (one.values[i] || 0), 0));
    return [0, Math.max(...sums) || 1];
  }
  const values = series.flatMap((one) => one.values.filter((value) => value !== null));
  const low = spec.low ?? Math.min(...values);
  const high = spec.high ?? Math.max(...values);
  const room = (high - low) * 0.08 || 0.05 * Math.abs(high) || 1;
  return [Math.max(spec.floor ?? -Infinity, low - (spec.low === undefined ? room : 0)), Math.min(spec.ceiling ?? Infinity, high + room)];
}

function paint(plot, spec, series) {
  const width = Math.max(260, plot.clientWidth || 480), height = 230;
  const ends = !spec.bars;
  const box = { left: 52, right: width - (ends ? 64 : 8), top: 8, bottom: height - 26 };
  const [low, high] = extent(spec, series);
  const n = spec.xs.length;
  const slot = (box.right - box.left) / Math.max(1, n);
  const xAt = (i) => (spec.bars ? box.left + slot * (i + 0.5) : n === 1 ? (box.left + box.right) / 2 : box.left + ((box.right - box.left) * i) / (n - 1));
  const yAt = (value) => box.bottom - ((value - low) / (high - low)) * (box.bottom - box.top);
  const last = series.map((one) => `${one.name} ${spec.format(lastValue(one.values))}`).join(", ");
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${spec.label}, rounds ${spec.xs[0]} to ${spec.xs[n - 1]}; last: ${last}` });
  for (const tick of niceTicks(low, high, 4)) {
    svg.append(s("line", { class: "axis", x1: box.left, x2: box.right, y1: yAt(tick), y2: yAt(tick) }),
      s("text", { x: box.left - 6, y: yAt(tick) + 4, "text-anchor": "end" }, short((spec.tick || spec.format)(tick))));
  }
  const every = Math.max(1, Math.ceil(n / Math.max(2, Math.floor((box.right - box.left) / 44))));
  spec.xs.forEach((x, i) => {
    // From the last round backwards: that is the one that is looked for.
    if ((n - 1 - i) % every === 0) svg.append(s("text", { x: xAt(i), y: height - 6, "text-anchor": "middle" }, String(x)));
  });
  if (spec.bars) paintBars(svg, spec, series, { box, slot, xAt, yAt });
  else paintLines(svg, series, { xAt, yAt, box, n });
  plot.replaceChildren(svg);
  makeCursor(plot, svg, spec, series, { xAt, box, width, n });
}

const lastValue = (values) => values.filter((value) => value !== null).pop();

function paintBars(svg, spec, series, { slot, xAt, yAt }) {
  const wide = Math.max(1, Math.min(34, slot * 0.72));
  spec.xs.forEach((_, i) => {
    let base = 0;
    for (const one of series) {
      const value = one.values[i] || 0;
      if (value > 0) svg.append(s("rect", { class: `bar c${one.color}`, x: xAt(i) - wide / 2, width: wide, y: yAt(base + value), height: Math.max(0.5, yAt(base) - yAt(base + value)) }));
      base += value;
    }
  });
}

function paintLines(svg, series, { xAt, yAt, box, n }) {
  const labels = [];
  for (const one of series) {
    const points = one.values.map((value, i) => (value === null ? null : [xAt(i), yAt(value)])).filter(Boolean);
    svg.append(s("polyline", { class: `series c${one.color}${one.dashed ? " dashed" : ""}`, points: points.map((point) => point.map((x) => x.toFixed(1)).join(",")).join(" ") }));
    if (n <= 40) for (const [x, y] of points) svg.append(s("circle", { class: `dot c${one.color}`, cx: x.toFixed(1), cy: y.toFixed(1), r: n <= 20 ? 3 : 2 }));
    labels.push({ y: points[points.length - 1][1], text: one.short || one.name, color: one.color });
  }
  labels.sort((a, b) => a.y - b.y);
  // Labels that would stand on one another are moved apart.
  for (let i = 1; i < labels.length; i += 1) labels[i].y = Math.max(labels[i].y, labels[i - 1].y + 13);
  const over = labels.length ? labels[labels.length - 1].y - box.bottom : 0;
  for (const label of labels) svg.append(s("text", { class: `endlabel c${label.color}`, x: box.right + 8, y: label.y + 4 - Math.max(0, over) }, label.text));
}

function makeCursor(plot, svg, spec, series, { xAt, box, width, n }) {
  const line = s("line", { class: "cursor", y1: box.top, y2: box.bottom, visibility: "hidden" });
  const tip = h("div", { class: "tip", hidden: true, "aria-live": "polite" });
  svg.append(line);
  plot.append(tip);
  let index = n - 1;
  const show = (i) => {
    index = Math.max(0, Math.min(n - 1, i));
    const x = xAt(index);
    line.setAttribute("x1", x);
    line.setAttribute("x2", x);
    line.setAttribute("visibility", "visible");
    tip.replaceChildren(h("b", {}, `Round ${spec.xs[index]}`), ...series.filter((one) => one.values[index] !== null).map((one) =>
      h("span", {}, h("span", {}, one.name), h("span", {}, spec.format(one.values[index])))));
    tip.hidden = false;
    const scale = plot.clientWidth / width;
    tip.style.left = `${Math.max(0, Math.min(plot.clientWidth - tip.offsetWidth, x * scale + (x > width / 2 ? -tip.offsetWidth - 10 : 10)))}px`;
  };
  const hide = () => { tip.hidden = true; line.setAttribute("visibility", "hidden"); };
  plot.onpointermove = (event) => {
    const place = svg.getBoundingClientRect();
    const x = ((event.clientX - place.left) * width) / place.width;
    let best = 0;
    for (let i = 1; i < n; i += 1) if (Math.abs(xAt(i) - x) < Math.abs(xAt(best) - x)) best = i;
    show(best);
  };
  plot.onpointerleave = hide;
  plot.onblur = hide;
  plot.onkeydown = (event) => {
    const go = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: n - 1 }[event.key];
    if (event.key === "Escape") hide();
    if (go === undefined) return;
    event.preventDefault();
    show(tip.hidden ? index : go);
  };
}

const numbers = (rounds) => rounds.map((round) => round.round);
const orNull = (value) => (value === undefined ? null : value);

function showAccuracy(rounds) {
  const budgets = [...new Set(rounds.flatMap((round) => Object.keys(round.deployed)))].sort((a, b) => a - b);
  const series = budgets.map((budget, i) => ({ name: `${budget} bits`, color: String(i % 8), values: rounds.map((round) => orNull(round.deployed[budget])) }));
  if (budgets.length > 1 || !budgets.length) series.push({ name: "mean", color: "main", values: rounds.map((round) => round.mean_deployed) });
  series.push({ name: "full precision", short: "FP32", color: "muted", dashed: true, values: rounds.map((round) => round.accuracy) });
  $("accuracy").querySelector("h2").textContent = `${capital(metricTitle())} by budget`;
  const undone = rounds.filter((round) => round.undone);
  draw("accuracy", {
    label: `${capital(metricTitle())} by budget`, xs: numbers(rounds), series, format: measure, ceiling: 1,
    empty: rounds.length ? "Nobody has measured a model yet." : "The first round is not merged yet.",
    note: undone.length ? `Thrown away: ${undone.map((round) => `round ${round.round} (${round.undone})`).join("; ")}` : "",
  });
}

function showBytes(told, rounds) {
  const { sent, full, curve } = totals(told, rounds);
  draw("bytes", {
    label: "Bytes sent so far", xs: numbers(rounds), format: bytes, low: 0,
    series: [
      { name: "FP32 would be", short: "FP32", color: "muted", dashed: true, values: curve.map((one) => one.full) },
      { name: "sent", color: "0", values: curve.map((one) => one.sent) },
    ],
    empty: "Nothing has been sent yet.",
    note: sent && full ? `${bytes(sent)} instead of ${bytes(full)}: ${(full / sent).toFixed(1)} times less.` : "",
  });
}

function showSeconds(rounds) {
  const series = PHASES.map((phase, i) => ({ name: phase, color: String(i), values: rounds.map((round) => orNull(round.phases[phase])) }));
  series.push({ name: "not split up", color: "muted", values: rounds.map((round) => (Object.keys(round.phases).length ? null : round.seconds)) });
  draw("seconds", { label: "Seconds by phase", xs: numbers(rounds), series, format: seconds, bars: true, empty: "The first round is not merged yet." });
}

// Tables of cells

function showGrid(place, rounds) {
  const body = $("grid").querySelector(".body");
  const shown = rounds.slice(-MOST_COLUMNS);
  const names = new Map();
  for (const round of shown) for (const client of round.clients) names.set(client.client, client.name);
  if (!names.size) { body.replaceChildren(h("p", { class: "nothing" }, "No board has been in a merged round yet.")); return; }
  const head = h("tr", {}, h("th", { scope: "col" }, h("span", { class: "vh" }, "Board")), shown.map((round) =>
    h("th", { scope: "col", class: round.undone ? "undone" : null, title: round.undone ? `thrown away: ${round.undone}` : null }, String(round.round))));
  const rows = [...names].sort((a, b) => a[0] - b[0]).map(([number, name]) => h("tr", {}, h("th", { scope: "row", title: name }, name), shown.map((round) => {
    const client = round.clients.find((one) => one.client === number);
    if (!client) return h("td", { class: "o-none", title: `${name}, round ${round.round}: not selected` }, "·");
    const behind = client.staleness ? `, ${count(client.staleness, "merge")} behind` : "";
    const words = `${MEANINGS[client.outcome]}${behind}${client.reason ? `: ${client.reason}` : ""}`;
    return h("td", { class: `o-${client.outcome}`, title: `${name}, round ${round.round}: ${words}` }, h("span", { "aria-hidden": "true" }, LETTERS[client.outcome]), h("span", { class: "vh" }, words));
  })));
  const key = h("ul", { class: "legend" }, Object.entries(LETTERS).map(([outcome, letter]) => h("li", {}, h("span", { class: `key o-${outcome}` }, letter), MEANINGS[outcome])), h("li", {}, h("span", { class: "key o-none" }, "·"), "not selected"));
  const scroll = h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Boards by rounds" }, h("table", { class: "cells" }, h("thead", {}, head), h("tbody", {}, rows)));
  body.replaceChildren(...[scroll, key, troubles(shown)].filter(Boolean));
  scroll.scrollLeft = scroll.scrollWidth;
}

function troubles(rounds) {
  const found = rounds.flatMap((round) => round.clients.filter((client) => client.reason).map((client) => ({ round: round.round, ...client })));
  if (!found.length) return null;
  const last = found.slice(-5).reverse();
  return h("ul", { class: "troubles" }, last.map((one) => h("li", {}, h("b", {}, `Round ${one.round}, ${one.name}`), ` ${MEANINGS[one.outcome]}: ${one.reason}`)),
    found.length > last.length ? h("li", { class: "mute" }, `and ${found.length - last.length} before`) : null);
}

function showWidths(told, rounds) {
  const names = new Map();
  for (const round of rounds) for (const client of round.clients) if (client.bit_widths) names.set(client.name, client.client);
  const select = $("board-select");
  replaceIfChanged(select, JSON.stringify([...names.keys()]), () => [h("option", { value: "" }, "all boards, on average"), [...names.keys()].sort().map((name) => h("option", { value: name }, name))].flat());
  if (!names.has(page.board)) page.board = "";
  select.value = page.board;
  const of = (round) => (page.board ? (round.clients.find((client) => client.name === page.board) || {}).bit_widths : round.bit_widths) || "";
  const step = Math.max(1, Math.ceil(rounds.length / MOST_COLUMNS));
  const shown = rounds.filter((_, i) => (rounds.length - 1 - i) % step === 0);
  const body = $("widths").querySelector(".body");
  if (!shown.some((round) => of(round))) { body.replaceChildren(h("p", { class: "nothing" }, rounds.length ? "This run has no bit-widths: it trains in full precision." : "The first round is not merged yet.")); return; }
  const head = h("tr", {}, h("th", { scope: "col" }, h("span", { class: "vh" }, "Layer")), shown.map((round) => h("th", { scope: "col" }, String(round.round))));
  const rows = told.layers.map((layer, i) => h("tr", {}, h("th", { scope: "row", title: `${layer.name}: ${count(layer.weights, "weight")}` }, layer.name, " ", h("small", {}, layer.weights.toLocaleString("en"))), shown.map((round) => {
    const bits = of(round)[i];
    return bits ? h("td", { class: `w${bits}`, title: `${layer.name}, round ${round.round}: ${bits} bits` }, bits) : h("td", { class: "o-none", title: "not in this round" }, "·");
  })));
  const scale = h("ul", { class: "legend" }, [1, 2, 3, 4, 5, 6, 7, 8].map((bits) => h("li", {}, h("span", { class: `key w${bits}` }, String(bits)))), h("li", { class: "mute" }, `bits; the small number is a layer's weights${step > 1 ? `; every ${step}. round` : ""}`));
  const scroll = h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Bit-widths of layers by rounds" }, h("table", { class: "cells" }, h("thead", {}, head), h("tbody", {}, rows)));
  body.replaceChildren(scroll, scale);
  scroll.scrollLeft = scroll.scrollWidth;
}

// Boards and models

function showBoards(place, run, rounds) {
  const body = $("boards").querySelector(".body");
  if (!place.boards.length) {
    replaceIfChanged(body, "none", () => h("p", { class: "nothing" }, "No board has enrolled. Make a bundle, copy it to the board, and start fedmpq client there."));
    return;
  }
  const trouble = new Map();
  for (const round of rounds) for (const client of round.clients) if (client.reason) trouble.set(client.name, `round ${round.round}, ${MEANINGS[client.outcome]}: ${client.reason}`);
  const live = place.kind === "server";
  const part = new Map();
  for (const round of rounds) for (const client of round.clients) {
    const sum = part.get(client.name) || { up: 0, down: 0, rounds: 0 };
    part.set(client.name, { up: sum.up + client.bytes_up, down: sum.down + client.bytes_down, rounds: sum.rounds + (client.outcome === "trained") });
  }
  const key = JSON.stringify([run.run_id, place.running, place.boards, [...trouble], [...part], page.state.operates, Boolean(page.token)]);
  replaceIfChanged(body, key, () => {
    const columns = live
      ? ["Board", "Now", "Bits", "Samples", "Accuracy", "Rounds", "Sent", "Last seen", "Last trouble"]
      : ["Board", "Bits", "Rounds", "Sent", "Received"];
    if (live && page.state.operates) columns.push("");
    const numeric = ["Bits", "Samples", "Accuracy", "Rounds", "Sent", "Received"];
    const head = h("tr", {}, columns.map((name) => h("th", { scope: "col", class: numeric.includes(name) ? "number" : null }, name || h("span", { class: "vh" }, "Actions"))));
    const cell = (label, value, kind) => h("td", { "data-label": label, class: kind || null }, value === null || value === undefined || value === "" ? h("span", { class: "mute" }, "–") : h("span", {}, value));
    const rows = place.boards.map((board) => {
      const sum = part.get(board.name);
      const cells = [h("th", { scope: "row" }, h("span", {}, board.name, live ? h("small", { class: "details" }, details(board)) : null))];
      if (live) cells.push(cell("Now", boardNow(place, board)));
      cells.push(cell("Bits", budgetOf(board), "number"));
      if (live) cells.push(cell("Samples", (board.samples || 0).toLocaleString("en"), "number"), cell("Accuracy", measure(board.accuracy), "number"));
      cells.push(cell("Rounds", sum ? String(sum.rounds) : "0", "number"), cell("Sent", bytes(sum ? sum.up : 0), "number"));
      if (!live) cells.push(cell("Received", bytes(sum ? sum.down : 0), "number"));
      if (live) cells.push(cell("Last seen", lastSeen(place, board)), cell("Last trouble", board.reason || trouble.get(board.name), board.reason || trouble.has(board.name) ? "words" : ""));
      if (live && page.state.operates) cells.push(cell("", deedButton("Drop", "danger small", () => drop(board))));
      return h("tr", {}, cells);
    });
    return h("div", { class: "scroll" }, h("table", { class: "data stack" }, h("thead", {}, head), h("tbody", {}, rows)));
  });
}

function budgetOf(board) {
  const granted = board.max_budget === null || board.max_budget === undefined ? board.budget : Math.min(board.budget, board.max_budget);
  return granted === board.budget ? String(board.budget) : `${granted} of ${board.budget}`;
}

function boardNow(place, board) {
  if (!place.running) return "";
  const mark = h("span", { class: board.connected ? "mark-on" : "mark-off", "aria-hidden": "true" });
  const doing = board.state === "updated" ? "answered" : board.state;
  const words = board.connected ? doing || "connected" : `away${["training", "measuring", "uploading", "selected"].includes(board.state) ? ", awaited" : ""}`;
  return h("span", { class: board.connected ? "whole" : "whole warn" }, mark, words);
}

function lastSeen(place, board) {
  if (board.connected) return "now";
  if (board.last_seen) return age(board.last_seen, "", " ago");
  return place.running ? "not yet" : "";
}

// What seldom changes, under the name: engine, room on its disk, the end of its certificate.
function details(board) {
  const parts = [];
  if (board.engine) parts.push(h("span", { title: `fedmpq ${board.version}` }, board.engine));
  if (board.free_bytes) parts.push(h("span", { class: board.free_bytes < LITTLE_DISK ? "bad" : "", title: "when it last connected" }, `${bytes(board.free_bytes)} free`));
  if (board.certificate_ends) {
    const left = (at(board.certificate_ends) - now()) / 86400;
    const kind = left < 0 ? "bad" : left < 30 ? "warn" : "";
    const more = left < 0 ? ", ended" : left < 30 ? `, ${Math.floor(left)} days left` : "";
    parts.push(h("span", { class: kind, title: board.certificate_ends }, `certificate until ${day(board.certificate_ends)}${more}`));
  }
  return parts.flatMap((part, i) => (i ? [" · ", part] : [part]));
}

async function drop(board) {
  const text = "Its identity ends: the server refuses its calls, and it needs a new bundle to come back.";
  if (await sure(`Drop ${board.name}?`, text, "Drop the board")) await operate("drop", { name: board.name });
}

function showModels(one, told) {
  const body = $("models").querySelector(".body");
  replaceIfChanged(body, JSON.stringify([one.key, told.models]), () => {
    if (!told.models.length) {
      const how = one.place.kind === "server"
        ? ["No model files here yet. They are made when a run ends with ", h("code", {}, 'export = ["onnx"]'), " in its run.toml, or when a board fetches one: ", h("code", {}, "fedmpq client --fetch-model onnx"), "."]
        : ["No model files here yet: ", h("code", {}, `fedmpq export --run ${one.place.path} --all -o ${one.place.path}/models`)];
      return h("p", { class: "nothing" }, how);
    }
    const columns = ["File", "Boards", "Bits per weight", "Size", "Accuracy", "SHA-256", ""];
    const head = h("tr", {}, columns.map((name) => h("th", { scope: "col" }, name || h("span", { class: "vh" }, "Download"))));
    const cell = (label, ...value) => h("td", { "data-label": label }, h("span", {}, value));
    const rows = told.models.map((model) => {
      const path = ["api/runs", ...[one.place.key, one.run.run_id, "models", model.folder, model.file].map(encodeURIComponent)].join("/");
      const got = () => download(path, model.file);
      return h("tr", {}, h("th", { scope: "row" }, model.file), cell("Boards", model.boards.join(", ")), cell("Bits per weight", model.average_bits === null ? "–" : model.average_bits.toFixed(2)),
        cell("Size", bytes(model.bytes)), cell("Accuracy", measure(model.accuracy)), cell("SHA-256", h("code", { title: model.sha256 }, `${model.sha256.slice(0, 12)}…`)),
        cell("", deedButton("Download", "quiet small", got)));
    });
    return h("div", { class: "scroll" }, h("table", { class: "data stack" }, h("thead", {}, head), h("tbody", {}, rows)));
  });
}

// By hand, because a plain link could not show the token that is needed beyond loopback.
async function download(path, name) {
  try {
    const url = URL.createObjectURL(await (await ask(path)).blob());
    const anchor = h("a", { href: url, download: name });
    document.body.append(anchor);
    anchor.click();
    anchor.remove();
    setTimeout(() => URL.revokeObjectURL(url), 60000);
  } catch (error) {
    say(`Not downloaded: ${error.message}`, true);
  }
}

// The beginning

function begin() {
  $("run-select").onchange = (event) => {
    page.chosen = event.target.value;
    history.replaceState(null, "", `#${page.chosen}`);
    showState();
  };
  $("board-select").onchange = (event) => {
    page.board = event.target.value;
    if (page.told) showWidths(page.told, page.told.rounds);
  };
  const toggle = () => (page.token ? (lock(), page.state && showRun()) : unlock());
  $("unlock").onclick = toggle;
  $("unlock-too").onclick = toggle;
  // At once, and not when the dialog has closed: the next button may be pressed before.
  $("token-form").onsubmit = (event) => {
    if (event.submitter.value !== "ok") return;
    page.token = $("token-text").value.trim();
    sessionStorage.setItem("fedmpq-token", page.token);
  };
  $("bundle-form").onsubmit = async (event) => {
    event.preventDefault();
    if (await operate("bundle", { name: $("bundle-name").value })) event.target.reset();
  };
  $("start-form").onsubmit = async (event) => {
    event.preventDefault();
    if (await operate("start", { config: $("start-config").value })) event.target.reset();
  };
  let width = document.documentElement.clientWidth;
  new ResizeObserver(() => {
    if (document.documentElement.clientWidth === width) return;
    width = document.documentElement.clientWidth;
    if (page.told) showRun();
  }).observe(document.documentElement);
  setInterval(() => {
    for (const node of document.querySelectorAll(".age")) node.textContent = ageText(Number(node.dataset.since), node.dataset.before, node.dataset.after);
  }, 1000);
  listen();
}

begin();
