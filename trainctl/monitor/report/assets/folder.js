/* The page of a folder of runs. It polls its server for the table (#source). Sorting, filter and selection
 * survive newer data. */
"use strict";
(() => {
  const { $, make } = shared;
  const drawn = (tag, attributes = {}, ...children) => make(tag, { ...attributes, ns: "http://www.w3.org/2000/svg" }, ...children);
  const STATES = { finished: "good", failed: "bad", lost: "bad", stopped: "warn", queued: "warn" };
  const MOST_TICKS = 12;
  const LEAST_GAP = 0.055;
  const state = { document: null, sort: null, down: false, filter: "", chosen: new Set(), rows: new Map(), paths: new Map() };

  const digits = (value, most = 4) => value === null ? "–" : value.toLocaleString("en", { maximumFractionDigits: most, minimumFractionDigits: most });
  const count = (value) => value === null ? "–" : Math.round(value).toLocaleString("en");
  function ago(seconds) {
    if (seconds === null) return "–";
    const past = Math.max(0, Date.now() / 1000 - seconds);
    for (const [unit, name] of [[86400, "d"], [3600, "h"], [60, "min"]]) if (past >= unit) return `${Math.round(past / unit)} ${name} ago`;
    return `${Math.round(past)} s ago`;
  }
  const page = (ids) => `run/${ids.map(encodeURIComponent).join(",")}/`;
  const asNumber = (text) => text !== "" && Number.isFinite(Number(text)) ? Number(text) : null;

  function columns(found) {
    const loss = (run) => run.is_finite ? digits(run.loss) : make("span", { class: "bad-number" }, "NaN");
    return [
      { name: "run", of: (run) => run.name, show: named, head: true },
      ...found.keys.map((key, index) => ({ name: key, of: (run) => asNumber(run.values[index]) ?? run.values[index], show: (run) => run.values[index], kind: "value" })),
      { name: "state", of: (run) => run.state, show: (run) => make("span", { class: `state ${STATES[run.state] ?? ""}`, title: run.message || null }, run.state) },
      { name: "step", of: (run) => run.step, show: (run) => run.step === null ? "–" : `${count(run.step)} / ${count(run.total_steps)}`, kind: "number" },
      { name: "loss", of: (run) => run.loss, show: loss, kind: "number" },
      { name: "held-out loss", of: (run) => run.held_out, show: (run) => digits(run.held_out), kind: "number" },
      { name: "tokens/s", of: (run) => run.tokens_per_second, show: (run) => count(run.tokens_per_second), kind: "number" },
      { name: "updated", of: (run) => run.updated, show: (run) => ago(run.updated), kind: "number" },
    ];
  }

  function named(run) {
    const box = make("input", { type: "checkbox", "aria-label": `Choose ${run.name}`, disabled: !run.is_made, onchange: (event) => choose(run.id, event.target.checked) });
    box.checked = state.chosen.has(run.id);
    const link = run.is_made ? make("a", { href: page([run.id]) }, run.name) : run.name;
    return make("span", {}, box, " ", link, run.id === state.document.best ? make("span", { class: "badge" }, "best") : null);
  }

  function choose(id, is) {
    if (is) state.chosen.add(id); else state.chosen.delete(id);
    $("#open").disabled = state.chosen.size < 2;
    $("#open").textContent = state.chosen.size < 2 ? "Open the chosen side by side" : `Open ${state.chosen.size} side by side`;
  }

  const matches = (run) => {
    const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
    const text = [run.name, run.state, ...run.values.map((value, index) => `${state.document.keys[index]}=${value}`)].join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  };

  /** Return the runs sorted by a column; runs without a value come last, in either direction. */
  function ordered(runs, column) {
    if (!column) return runs;
    const way = state.down ? -1 : 1;
    const compared = (a, b) => typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
    return [...runs].sort((one, other) => {
      const [a, b] = [column.of(one), column.of(other)];
      if (a === null || b === null) return (a === null) - (b === null);
      return way * compared(a, b);
    });
  }

  function table() {
    const found = state.document, every = columns(found);
    const focused = document.activeElement?.dataset?.column;
    const heads = every.map((column) => {
      const is = state.sort === column.name;
      const button = make("button", { type: "button", "data-column": column.name, onclick: () => sort(column.name) }, `${column.name}${is ? (state.down ? " ↓" : " ↑") : ""}`);
      return make("th", { scope: "col", class: column.kind ?? null, "aria-sort": is ? (state.down ? "descending" : "ascending") : null }, button);
    });
    $("thead").replaceChildren(make("tr", {}, ...heads));
    if (focused) document.querySelector(`thead [data-column="${CSS.escape(focused)}"]`)?.focus();
    const shown = ordered(found.runs.filter(matches), every.find((column) => column.name === state.sort));
    state.rows.clear();
    const rows = shown.map((run) => {
      const cells = every.map((column) => make(column.head ? "th" : "td", { class: column.kind ?? null, scope: column.head ? "row" : null }, column.show(run)));
      const row = make("tr", { class: run.id === found.best ? "best" : null, onmouseenter: () => light(run.id), onmouseleave: () => light(null), onfocusin: () => light(run.id), onfocusout: () => light(null) }, ...cells);
      state.rows.set(run.id, row);
      return row;
    });
    $("tbody").replaceChildren(...rows);
    $("#count").textContent = shown.length === found.runs.length ? `${shown.length} runs` : `${shown.length} of ${found.runs.length} runs`;
    for (const [id, path] of state.paths) path.classList.toggle("hidden", !state.rows.has(id));
  }

  function sort(name) {
    state.down = state.sort === name ? !state.down : false;
    state.sort = name;
    table();
  }

  function light(id) {
    for (const [each, path] of state.paths) path.classList.toggle("lit", each === id);
    for (const [each, row] of state.rows) row.classList.toggle("lit", each === id);
    const run = state.document.runs.find((each) => each.id === id);
    $("#lines-said").textContent = run ? `${run.name}: ${state.document.keys.map((key, index) => `${key}=${run.values[index]}`).join(", ")}; ${state.document.measure} ${digits(run.result)}` : "";
    if (run) state.paths.get(id)?.parentNode.append(state.paths.get(id));
  }

  /** Return the scale of a column's axis, from 0 at the foot to 1: numbers by size (logarithmic if they span a factor above 20), words in their order. */
  function scale(values) {
    const numbers = values.map((value) => typeof value === "number" ? value : asNumber(value));
    if (numbers.every((value) => value !== null)) {
      const distinct = [...new Set(numbers)].sort((a, b) => a - b);
      const [low, high] = [distinct[0], distinct.at(-1)];
      const by = low > 0 && high / low > 20 ? Math.log : (value) => value;
      const at = (value) => high === low ? 0.5 : (by(Number(value)) - by(low)) / (by(high) - by(low));
      const ticks = distinct.length <= MOST_TICKS ? distinct : [low, high];
      return { at, ticks: ticks.map((value) => [at(value), String(Number(value.toPrecision(6)))]) };
    }
    const distinct = [...new Set(values.map(String))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    const at = (value) => distinct.length === 1 ? 0.5 : distinct.indexOf(String(value)) / (distinct.length - 1);
    const every = Math.ceil(distinct.length / MOST_TICKS);
    return { at, ticks: distinct.filter((_, index) => index % every === 0).map((value) => [at(value), value]) };
  }

  /** Return ticks whose labels do not overlap, the ends always included. */
  function apart(ticks) {
    const [low, high] = [Math.min(...ticks.map(([at]) => at)), Math.max(...ticks.map(([at]) => at))];
    const kept = [];
    for (const tick of [...ticks].sort(([a], [b]) => (b === low || b === high) - (a === low || a === high) || a - b)) {
      if (kept.every(([at]) => Math.abs(at - tick[0]) > LEAST_GAP)) kept.push(tick);
    }
    return kept;
  }

  function lines() {
    const found = state.document;
    const runs = found.runs.filter((run) => run.result !== null);
    const axes = found.keys.map((key, index) => ({ name: key, of: (run) => run.values[index] })).filter((axis) => new Set(runs.map(axis.of)).size > 1);
    const is = runs.length > 1 && axes.length > 0;
    $("#lines").hidden = !is;
    state.paths.clear();
    if (!is) return $("#plot").replaceChildren();
    axes.push({ name: found.measure, of: (run) => run.result });
    const [width, height, side, top, foot] = [1120, 330, 70, 34, 16];
    const x = (index) => side + (width - 2 * side) * index / (axes.length - 1);
    const y = (part) => height - foot - (height - top - foot) * part;
    const scales = axes.map((axis) => scale(runs.map(axis.of)));
    const results = runs.map((run) => run.result).sort((a, b) => a - b);
    const colour = (run) => `hsl(${Math.round(215 - 195 * results.indexOf(run.result) / Math.max(1, results.length - 1))} 70% 48%)`;
    const order = [...runs].sort((one, other) => (one.id === found.best) - (other.id === found.best));
    const paths = order.map((run) => {
      const points = axes.map((axis, index) => `${x(index).toFixed(1)},${y(scales[index].at(axis.of(run))).toFixed(1)}`);
      const path = drawn("path", { d: `M${points.join("L")}`, stroke: colour(run), class: run.id === found.best ? "best" : null, "data-run": run.id,
        onmouseenter: () => light(run.id), onmouseleave: () => light(null), onclick: () => { location.href = page([run.id]); } },
        drawn("title", {}, `${run.name}: ${found.measure} ${digits(run.result)}`));
      state.paths.set(run.id, path);
      return path;
    });
    const frame = axes.flatMap((axis, index) => [
      drawn("line", { x1: x(index), x2: x(index), y1: y(0), y2: y(1) }),
      drawn("text", { class: "axis", x: x(index), y: 14, "text-anchor": index === 0 ? "start" : index === axes.length - 1 ? "end" : "middle" }, axis.name),
      ...apart(scales[index].ticks).map(([at, text]) => drawn("text", { x: x(index) + (index === axes.length - 1 ? 8 : -8), y: y(at) + 4, "text-anchor": index === axes.length - 1 ? "start" : "end" }, text)),
    ]);
    const label = `Parallel coordinates of ${runs.length} runs over ${axes.map((axis) => axis.name).join(", ")}; the table below has the same numbers`;
    $("#plot").replaceChildren(drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, ...frame, drawn("g", {}, ...paths)));
  }

  function tiles() {
    const found = state.document;
    const states = Map.groupBy ? Map.groupBy(found.runs, (run) => run.state) : found.runs.reduce((map, run) => map.set(run.state, [...(map.get(run.state) ?? []), run]), new Map());
    const best = found.runs.find((run) => run.id === found.best);
    const tile = (name, value, more = "") => make("div", { class: "tile" }, make("div", { class: "name" }, name), make("div", { class: "value" }, value), make("div", { class: "more" }, more));
    $("#tiles").replaceChildren(
      tile("runs", String(found.runs.length), found.is_sweep ? "of a sweep" : ""),
      ...[...states].map(([name, runs]) => tile(name, String(runs.length))),
      best ? tile(`best ${found.measure}`, digits(best.result), best.name) : "",
    );
  }

  function show(found) {
    state.document = found;
    $("#title").textContent = found.name;
    $("#subtitle").textContent = found.path;
    document.title = `${found.name}: ${found.runs.length} runs`;
    for (const id of state.chosen) if (!found.runs.some((run) => run.id === id)) choose(id, false);
    tiles();
    lines();
    table();
    $("#footer").textContent = !found.is_ranked ? "The runs have several objectives or tokenizers, whose losses do not compare: none is the best." : "Blue lines are the best results, red ones the worst. Runs that have no result yet have no line.";
    document.documentElement.dataset.ready = found.version;
  }

  const theme = shared.themes();
  $("#filter").addEventListener("input", (event) => { state.filter = event.target.value; table(); });
  $("#open").addEventListener("click", () => { location.href = page([...state.chosen]); });
  theme.apply();
  shared.follow(shared.contained("#source"), () => state.document?.version, show);
})();
