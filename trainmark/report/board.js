"use strict";
// The board's script: sorts, filters and groups the table that is there, and draws charts from the
// data beside it. What a run says becomes text nodes and attributes, never markup. What is chosen
// is kept in the address, so that a link or a reload shows the same.

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const head = [...document.querySelectorAll("#runs thead th")];
  const body = document.querySelector("#runs tbody");
  const rows = [...body.rows];
  const words = rows.map((row) => row.textContent.toLowerCase());
  const boxes = rows.map((row) => row.querySelector("input"));
  const CHOICES = ["text", "run", "case", "precision", "group", "series", "published"];
  const COLOURS = 6;
  const DRAWN = 12; // runs laid over each other: more cannot be told apart
  const SEPARATOR = " · ";
  const help = byId("select-help").textContent;
  const state = { sort: "", descending: false };
  const seriesOf = (run) =>
    [run.run, run.case, run.precision, run.data].filter(Boolean).join(SEPARATOR);

  // --- elements

  function element(name, attributes, ...children) {
    return filled(document.createElement(name), attributes, children);
  }

  function shape(name, attributes, ...children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    return filled(made, attributes, children);
  }

  function filled(made, attributes, children) {
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  function grouped(items, keyOf) {
    const groups = new Map();
    for (const item of items) {
      const key = keyOf(item);
      groups.set(key, [...(groups.get(key) || []), item]);
    }
    return groups;
  }

  // --- the table

  function isShown(i) {
    const run = data.runs[i];
    const fits = (name) => !byId(name).value || byId(name).value === run[name];
    const wanted = byId("text").value.toLowerCase().split(/\s+/);
    return fits("run") && fits("case") && fits("precision") &&
      (!byId("flagged").checked || run.worse.length) &&
      wanted.every((word) => words[i].includes(word));
  }

  function sortValue(i, column) {
    const cell = rows[i].cells[column];
    if (!head[column].dataset.numeric) return cell.textContent;
    return cell.dataset.v === undefined ? null : Number(cell.dataset.v);
  }

  function compare(a, b) {
    if (a === null || b === null) return (a === null) - (b === null); // what is missing is last
    const order = typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });
    return state.descending ? -order : order;
  }

  function ordered(shown) {
    const column = head.findIndex((th) => th.textContent === state.sort);
    if (column < 0) return shown;
    const values = new Map(shown.map((i) => [i, sortValue(i, column)]));
    return [...shown].sort((a, b) => compare(values.get(a), values.get(b)) || a - b);
  }

  function groupName(i) {
    const by = byId("group").value;
    return by === "series" ? seriesOf(data.runs[i]) : data.runs[i][by];
  }

  function showTable() {
    const shown = ordered(rows.map((_, i) => i).filter(isShown));
    if (!byId("group").value) {
      body.replaceChildren(...shown.map((i) => rows[i]));
    } else {
      const groups = grouped(shown, groupName);
      body.replaceChildren(...[...groups].flatMap(([name, members]) => [
        groupRow(name, members.length), ...members.map((i) => rows[i]),
      ]));
    }
    for (const th of head) {
      const order = state.descending ? "descending" : "ascending";
      th.setAttribute("aria-sort", th.textContent === state.sort ? order : "none");
    }
    byId("count").textContent =
      `${shown.length} of ${rows.length} runs, ${picked().length} selected`;
  }

  function groupRow(name, count) {
    const text = `${name} (${count})`;
    const th = element("th", { colspan: head.length, scope: "rowgroup" }, text);
    return element("tr", { class: "group" }, th);
  }

  const picked = () => boxes.flatMap((box, i) => (box.checked ? [i] : []));

  // --- charts, as charts.py draws them

  function ticks(low, high, step) {
    const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
    const nth = (_, i) => Number(((first + i) * step).toPrecision(10));
    return Array.from({ length: last - first + 1 }, nth);
  }

  function niceStep(rough) {
    const power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 2.5, 5, 10].find((m) => m * power >= rough * 0.999) * power;
  }

  function tickText(tick, largest) {
    const units = [[1e9, 1e9, "B"], [1e6, 1e6, "M"], [largest >= 1e4 ? 1e3 : Infinity, 1e3, "k"]];
    const plain = largest < 1e-3 ? [0, 1e-6, "µ"] : [0, 1, ""];
    const [, size, unit] = units.find(([at]) => Math.abs(tick) >= at) || plain;
    return (tick / size).toLocaleString("en", { maximumSignificantDigits: 6 }) + unit;
  }

  const DAY = 86400;
  const MINUTE = 60, HOUR = 3600;
  const TIME_STEPS = [
    ...[1, 5, 15].map((n) => n * MINUTE), ...[1, 3, 6, 12].map((n) => n * HOUR),
    ...[1, 2, 7, 14, 30, 60, 90, 180, 365].map((n) => n * DAY),
  ];

  function timeText(seconds, step) {
    const iso = new Date(seconds * 1000).toISOString(); // in UTC, as the table is
    return step < DAY ? iso.slice(5, 16).replace("T", " ") : iso.slice(0, 10);
  }

  function xAxis(low, high, isTime) {
    if (!isTime) {
      const found = ticks(low, high, niceStep((high - low) / 5));
      return found.map((x) => [x, tickText(x, Math.max(...found.map(Math.abs)))]);
    }
    const rough = (high - low) / 4;
    const step = TIME_STEPS.find((s) => s >= rough) || Math.ceil(rough / (365 * DAY)) * 365 * DAY;
    return ticks(low, high, step).map((x) => [x, timeText(x, step)]);
  }

  function padded(low, high, share) {
    const margin = share * (high - low) || Math.abs(high) * 0.01 || 0.5;
    return [low - margin, high + margin];
  }

  // series: [{label, colour, xs, ys, names?, worse?}]; a null among xs and ys breaks the line, names
  // are those of dots, and worse says which of them are flagged.
  function chart({ title, xTitle, series, levels = [], isTime = false }) {
    const all = (key) => series.flatMap((one) => one[key]).filter((v) => v !== null);
    const xs = all("xs"), ys = [...all("ys"), ...levels.map((level) => level.y)];
    if (!xs.length) return null;
    const least = Math.min(...xs), most = Math.max(...xs);
    const [xLow, xHigh] = isTime
      ? padded(least, most === least ? least + 60 : most, 0.04)
      : [0, most * 1.015 || 1];
    const [yLow, yHigh] = padded(Math.min(...ys), Math.max(...ys), 0.06);
    const x = (v) => Number((100 * (v - xLow) / (xHigh - xLow)).toFixed(3));
    const y = (v) => Number((100 - 100 * (v - yLow) / (yHigh - yLow)).toFixed(3));
    const yTicks = ticks(yLow, yHigh, niceStep((yHigh - yLow) / 5));
    const across = (v, kind, text) => shape(
      "line", { x1: 0, x2: 100, y1: y(v), y2: y(v), class: kind }, ...titleOf(text));
    const plot = shape(
      "svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img" },
      shape("title", {}, `${title} over ${xTitle}`),
      ...yTicks.map((v) => across(v, "grid", "")),
      ...levels.map((level) => across(level.y, `level ${level.kind}`, levelText(level))),
      ...series.flatMap((one) => lineAndDots(one, x, y)),
    );
    const largest = Math.max(...yTicks.map(Math.abs));
    const place = (side, at, text) => element("span", { style: `${side}:${at}%` }, text);
    return element(
      "figure", {},
      legend(title, series, levels),
      element(
        "div", { class: "chart" },
        element("div", { class: "y-axis" },
          ...yTicks.map((v) => place("top", y(v), tickText(v, largest)))),
        element("div", { class: "plot" }, plot),
        element("div", { class: "x-axis" },
          ...xAxis(xLow, xHigh, isTime).map(([v, text]) => place("left", x(v), text))),
      ),
      element("p", { class: "axis-title" }, xTitle),
    );
  }

  const titleOf = (text) => (text ? [shape("title", {}, text)] : []);
  const levelText = (level) => `${level.label} ${shortNumber(level.y)}`;
  const shortNumber = (value) => value.toLocaleString("en", { maximumSignificantDigits: 4 });

  function lineAndDots(one, x, y) {
    let path = "", isNew = true;
    one.xs.forEach((v, i) => {
      if (v !== null) path += `${isNew ? "M" : "L"}${x(v)},${y(one.ys[i])} `;
      isNew = v === null;
    });
    const style = `c${one.colour % COLOURS}`;
    const dot = (name, i) => shape(
      "path",
      {
        d: `M${x(one.xs[i])},${y(one.ys[i])} l0.0001,0`,
        class: one.worse?.[i] ? "dot flagged" : `dot ${style}`,
      },
      ...titleOf(name));
    const dots = (one.names || []).map(dot);
    return [shape("path", { d: path.trim(), class: `line ${style}` }), ...dots];
  }

  function legend(title, series, levels) {
    const key = (style, label) =>
      element("span", { class: "key" }, element("i", { class: `swatch ${style}` }), label);
    return element(
      "figcaption", {}, element("strong", {}, title),
      ...series.map((one) => key(`c${one.colour % COLOURS}`, one.label)),
      ...levels.map((level) => key(`level ${level.kind}`, levelText(level))),
    );
  }

  function showCharts(section, charts) {
    document.querySelector(`#${section} .charts`).replaceChildren(...charts.filter(Boolean));
  }

  // --- over time

  function fillSeries() {
    const all = [...grouped(data.runs, seriesOf)];
    const largestFirst = all.sort(([, a], [, b]) => b.length - a.length);
    byId("series").replaceChildren(...largestFirst.map(([name, runs]) =>
      element("option", { value: name }, `${name} (${runs.length})`)));
  }

  function showHistory() {
    const runs = data.runs
      .filter((run) => seriesOf(run) === byId("series").value && run.at !== null)
      .sort((a, b) => a.at - b.at);
    showCharts("history", data.measures.map((measure) => historyChart(measure, runs)));
  }

  function historyChart(measure, runs) {
    const known = runs.filter((run) => run.values[measure.key] !== null);
    if (!known.length) return null;
    const title = measure.key === "quality" ? known.at(-1).metric_name : measure.label;
    const value = (run) => run.values[measure.key];
    return chart({
      title,
      xTitle: "started (UTC)",
      isTime: true,
      series: [{
        label: `${known.length} run${known.length === 1 ? "" : "s"}`,
        colour: 0,
        xs: known.map((run) => run.at),
        ys: known.map(value),
        names: known.map((run) => `${run.label}: ${value(run).toPrecision(5)}`),
        worse: known.map((run) => run.worse.includes(measure.key)),
      }],
      levels: [...targets(measure, known), ...publishedLevels(measure, known.at(-1))],
    });
  }

  function targets(measure, runs) {
    if (measure.key !== "quality") return [];
    const found = new Set(runs.map((run) => run.target).filter((target) => target !== null));
    return [...found].map((y) => ({ label: "target", y, kind: "target" }));
  }

  function publishedLevels(measure, run) {
    const which = byId("published").value;
    return (data.published[run.run] || [])
      .filter((row) => which === "all" || (which === "devices" && row.devices === run.devices))
      .filter((row) => measure.key !== "quality" || row.metric === run.metric)
      .filter((row) => row.values[measure.key] !== null)
      .map((row) => ({ label: row.label, y: row.values[measure.key], kind: "best" }));
  }

  // --- selected runs

  function showOverlay() {
    const chosen = picked().slice(0, DRAWN).map((i) => data.runs[i]);
    const curve = (run, [xs, ys]) => ({ label: run.label, colour: chosen.indexOf(run), xs, ys });
    const evaluated = (run) => ({
      ...curve(run, run.evaluations),
      label: `${run.label}, ${run.evaluated_on}`,
      names: run.evaluations[1].map((v) => `${run.label}, ${run.evaluated_on}: ${v}`),
    });
    const losses = [...grouped(chosen, (run) => run.workload).values()].map((runs) => chart({
      title: "training loss",
      xTitle: "samples",
      series: runs.map((run) => curve(run, run.loss)).filter((one) => one.xs.length),
    }));
    const evaluations = [...grouped(chosen, (run) => run.metric_name).values()].map((runs) => chart({
      title: runs[0].metric_name,
      xTitle: "samples",
      series: runs.map(evaluated),
      levels: targets({ key: "quality" }, runs),
    }));
    showCharts("overlay", [...losses, ...evaluations]);
    if (!chosen.length) byId("select-help").textContent = help;
    else if (picked().length === chosen.length) byId("select-help").textContent = "";
    else byId("select-help").textContent = `The first ${DRAWN} of ${picked().length} are drawn.`;
    rows.forEach((row, i) => row.classList.toggle("picked", boxes[i].checked));
  }

  // --- what is chosen

  let written = "";

  function remember() {
    const kept = new URLSearchParams();
    for (const name of CHOICES) {
      if (byId(name).value !== defaults[name]) kept.set(name, byId(name).value);
    }
    if (state.sort) kept.set("sort", (state.descending ? "-" : "") + state.sort);
    if (byId("flagged").checked) kept.set("flagged", "1");
    for (const i of picked()) kept.append("select", data.runs[i].label);
    written = `#${kept}`;
    if (written !== (location.hash || "#")) location.replace(written);
  }

  function recall() {
    const kept = new URLSearchParams(location.hash.slice(1));
    for (const name of CHOICES) {
      byId(name).value = kept.get(name) ?? defaults[name];
      if (byId(name).selectedIndex === -1) byId(name).value = defaults[name]; // gone since
    }
    const sort = kept.get("sort") || "";
    state.descending = sort.startsWith("-");
    state.sort = sort.replace(/^-/, "");
    byId("flagged").checked = kept.has("flagged");
    const chosen = new Set(kept.getAll("select"));
    boxes.forEach((box, i) => { box.checked = chosen.has(data.runs[i].label); });
    showAll();
  }

  function showAll() {
    showTable();
    showHistory();
    showOverlay();
  }

  function sortBy(column) {
    state.descending = state.sort === column && !state.descending;
    state.sort = column;
    showTable();
    remember();
  }

  // --- newer results, where a server shows them

  async function watch(version) {
    try {
      const answer = await fetch("version");
      if (answer.ok && (await answer.text()) !== version) {
        sessionStorage.setItem("focus", document.activeElement?.id || "");
        location.reload();
        return;
      }
    } catch {
      byId("count").textContent = "The server does not answer.";
    }
    setTimeout(watch, 3000, version);
  }

  function start() {
    for (const th of head) {
      th.querySelector("button")?.addEventListener("click", () => sortBy(th.textContent));
    }
    for (const name of ["text", "run", "case", "precision", "group", "flagged"]) {
      byId(name).addEventListener("input", () => { showTable(); remember(); });
    }
    for (const name of ["series", "published"]) {
      byId(name).addEventListener("input", () => { showHistory(); remember(); });
    }
    body.addEventListener("change", () => { showOverlay(); showTable(); remember(); });
    byId("clear").addEventListener("click", () => {
      boxes.forEach((box) => { box.checked = false; });
      showAll();
      remember();
    });
    addEventListener("hashchange", () => { if (location.hash !== written) recall(); });
    recall();
    const { version } = byId("script").dataset;
    if (version) {
      byId(sessionStorage.getItem("focus"))?.focus();
      setTimeout(watch, 3000, version);
    }
  }

  fillSeries();
  const defaults = Object.fromEntries(CHOICES.map((name) => [name, byId(name).value]));
  start();
})();
