/* The page of `trainctl report` and `trainctl watch`.
 *
 * It draws the document of trainctl/monitor/report/document.py: contained in the page (#data), or fetched
 * again and again (#source). The viewer's settings survive a newer document.
 */
"use strict";
(() => {
  // ---------------------------------------------------------------- state

  const state = {
    document: null,
    runs: [], // decoded
    axis: "step", // or tokens, hours
    range: null, // [low, high] on the axis; null: everything
    hidden: new Set(), // ids of runs
    silent: new Set(["checkpoint", "weights", "launch", "logger"]), // kinds of marks that are not drawn
    selected: null, // id of the run whose details and marks are shown
    charts: [],
  };

  const AXES = { step: "Steps", tokens: "Tokens", hours: "Hours" };
  const POINTS = 2.2; // pixels per point of a curve
  const GIB = 2 ** 30;

  const MARKS = {
    failure: { glyph: "✕", colour: "--bad", name: "failures", line: true },
    restart: { glyph: "↻", colour: "--accent", name: "restarts", line: true },
    start: { glyph: "▸", colour: "--accent", name: "starts", line: true },
    intervention: { glyph: "↶", colour: "--warn", name: "interventions", line: true },
    divergence: { glyph: "↗", colour: "--bad", name: "divergence", line: true },
    straggler: { glyph: "◆", colour: "--note", name: "stragglers", line: true },
    recompilation: { glyph: "⟳", colour: "--note", name: "recompilations", line: false },
    plateau: { glyph: "⤓", colour: "--note", name: "plateaus", line: true },
    preempted: { glyph: "!", colour: "--warn", name: "preemptions", line: true },
    stopping: { glyph: "■", colour: "--warn", name: "stops", line: true },
    end: { glyph: "●", colour: "--good", name: "ends", line: false },
    checkpoint: { glyph: "▾", colour: "--good", name: "checkpoints", line: false },
    weights: { glyph: "▿", colour: "--good", name: "weights", line: false },
    reward_failed: { glyph: "∅", colour: "--bad", name: "failed rewards", line: false },
    launch: { glyph: "▹", colour: "--ink-2", name: "launches", line: false },
    logger: { glyph: "≈", colour: "--ink-2", name: "loggers", line: false },
  };

  const CHARTS = [
    { id: "loss", title: "Loss", unit: "nats a token", series: ["loss"], held: true, wide: true },
    { id: "grad_norm", title: "Gradient norm", series: ["grad_norm"], clip: true },
    { id: "learning_rate", title: "Learning rate", series: ["learning_rate"], others: "learning_rate/", zero: true, full: true },
    { id: "tokens_per_second", title: "Throughput", unit: "tokens/s", series: ["tokens_per_second"], zero: true },
    { id: "mfu", title: "Model FLOPs utilisation", unit: "%", series: ["mfu"], scale: 100, zero: true },
    { id: "memory", title: "Memory of a device", unit: "GiB", series: ["peak/allocated", "peak/host"], either: true, scale: 1 / GIB, band: true, full: true },
    { id: "parts", title: "Where the time of a step goes", unit: "seconds", stacked: true },
  ];
  /** The first chart of a run that learns from rewards, whose loss is near 0 by itself. */
  const REWARD = { id: "objective/reward", title: "Reward", series: ["objective/reward"], wide: true };
  const DRAWN = /^(loss|grad_norm|clip_at|learning_rate|tokens_per_second|mfu|peak\/|seconds\/)/;

  // ---------------------------------------------------------------- small things

  const { $, make, notice, contained } = shared;

  /** Return the colour of a CSS variable, which a canvas cannot use itself. */
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function faded(hex, share) {
    const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    return `rgba(${r},${g},${b},${share})`;
  }

  /** Format a number with four digits: 0.0003, 2.318, 5,470. */
  function short(value, digits = 4) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    const size = Math.abs(value);
    if (size >= 1e15 || (size > 0 && size < 1e-3)) return value.toExponential(2).replace("e+", "e");
    if (size >= 1000) return Math.round(value).toLocaleString("en");
    return String(Number(value.toPrecision(digits)));
  }

  /** Format a number with a suffix for thousands: 1.23M. */
  function big(value) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    for (const [size, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "k"]]) {
      if (Math.abs(value) >= size) return `${Number((value / (unit === "k" ? 1e3 : size)).toPrecision(3))}${unit}`;
    }
    return short(value, 3);
  }

  function duration(seconds) {
    if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
    if (seconds < 0.9995) return `${Number((seconds * 1000).toPrecision(3))} ms`;
    if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
    const minutes = Math.round(seconds / 60);
    if (seconds < 600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
    if (minutes < 60) return `${minutes} min`;
    const hours = Math.floor(minutes / 60);
    if (hours < 48) return `${hours} h ${minutes % 60} min`;
    return `${Math.floor(hours / 24)} d ${hours % 24} h`;
  }

  const bytes = (size) =>
    !Number.isFinite(size) ? "–" : size >= 0.1 * GIB ? `${(size / GIB).toFixed(2)} GiB` : `${short(size / 2 ** 20, 3)} MiB`;
  const clock = (time) => (Number.isFinite(time) ? new Date(time * 1000).toLocaleString(undefined, { dateStyle: "short", timeStyle: "medium" }) : "–");
  /** Parts of a step: their order, and the colour of each in all charts. */
  const PARTS = ["forward", "backward", "optimizer", "data", "evaluation", "checkpoint", "rollout", "reward", "callbacks"];
  const partRank = (name) => (PARTS.includes(name) ? PARTS.indexOf(name) : name === "other" ? 99 : 50);
  const partColour = (name) => `--part-${PARTS.includes(name) ? PARTS.indexOf(name) + (PARTS.indexOf(name) > 7) : name === "other" ? 8 : 10}`;
  const share = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(part / whole < 0.0995 ? 1 : 0)} %` : "–");
  const say = (text) => { $("#spoken").textContent = text; };

  /** Return the first index of ascending values whose value is above `wanted`. */
  function above(values, wanted) {
    let low = 0, high = values.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] <= wanted) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /** Return the quantile of the values for a share. */
  function quantile(values, part) {
    if (!values.length) return NaN;
    if (part === 0 || part === 1) return values.reduce((one, other) => (other < one === (part === 0) ? other : one));
    const sorted = Float64Array.from(values).sort();
    return sorted[Math.min(sorted.length - 1, Math.max(0, Math.round(part * (sorted.length - 1))))];
  }

  // ---------------------------------------------------------------- the document

  /** Decode a column: a list, or byte planes of 32-bit floats, deflated, in base64. */
  async function decode(column) {
    if (column === null || column === undefined) return null;
    if (Array.isArray(column)) return Float64Array.from(column, (value) => (value === null ? NaN : value));
    const text = Uint8Array.from(atob(column.data), (letter) => letter.charCodeAt(0));
    const stream = new Blob([text]).stream().pipeThrough(new DecompressionStream("deflate"));
    const planes = new Uint8Array(await new Response(stream).arrayBuffer());
    const whole = new Uint8Array(4 * column.n);
    for (let plane = 0; plane < 4; plane++) {
      for (let row = 0; row < column.n; row++) whole[4 * row + plane] = planes[plane * column.n + row];
    }
    return new Float32Array(whole.buffer);
  }

  async function decodeAll(columns) {
    const names = Object.keys(columns);
    const found = await Promise.all(names.map((name) => decode(columns[name])));
    return Object.fromEntries(names.map((name, at) => [name, found[at]]));
  }

  async function decodeSeries(series) {
    const made = {};
    for (const [name, parts] of Object.entries(series)) {
      const found = await decodeAll(parts);
      made[name] = { mean: found.mean, min: found.min || found.mean, max: found.max || found.mean };
    }
    return made;
  }

  async function decodeRun(run, number) {
    const axes = await decodeAll(run.axes);
    const evaluations = { ...run.evaluations, step: await decode(run.evaluations.step), series: await decodeSeries(run.evaluations.series) };
    const callbacks = [];
    for (const each of run.callbacks) callbacks.push({ step: await decode(each.step), series: await decodeSeries(each.series) });
    const branches = [];
    for (const branch of run.branches) {
      branches.push({ ...branch, step: await decode(branch.step), series: await decodeAll(branch.series) });
    }
    return { ...run, axes, evaluations, callbacks, branches, series: await decodeSeries(run.series), colour: `--run-${number % 8}` };
  }

  /** Return the position of a step on the current axis. */
  function place(run, step) {
    if (state.axis === "step") return step;
    const steps = run.axes.step, values = run.axes[state.axis];
    if (!steps.length) return 0;
    const at = above(steps, step - 1e-9);
    if (at >= steps.length) return values[steps.length - 1];
    const [x0, y0] = at ? [steps[at - 1], values[at - 1]] : [0, 0];
    return y0 + ((values[at] - y0) * (step - x0)) / Math.max(1e-9, steps[at] - x0);
  }

  const isShown = (run) => !state.hidden.has(run.id);
  const shownRuns = () => state.runs.filter(isShown);
  const selectedRun = () => state.runs.find((run) => run.id === state.selected) || state.runs[0];

  /** Return the range of the axis over all visible runs. */
  function everything() {
    let low = Infinity, high = -Infinity;
    for (const run of shownRuns()) {
      const values = run.axes[state.axis];
      if (!values || !values.length) continue;
      low = Math.min(low, state.axis === "step" ? run.axes.first_step[0] : 0);
      high = Math.max(high, values[values.length - 1]);
    }
    return low < high ? [low, high] : Number.isFinite(low) ? [low - 1, low + 1] : [0, 1];
  }

  const shownRange = () => state.range || everything();

  /**
   * Reduce a series between two positions to a number of points: mean, minimum and maximum
   * of the buckets in each. `count` gives the number of steps in a bucket, its weight.
   */
  function reduced(xs, series, count, [low, high], most) {
    const first = Math.max(0, above(xs, low - 1e-12) - 1);
    const end = Math.min(xs.length, above(xs, high) + 1);
    const made = { x: [], mean: [], min: [], max: [], count: 0 };
    const push = (x, mean, min, max) => {
      made.x.push(x);
      made.mean.push(Number.isFinite(mean) ? mean : null);
      made.min.push(Number.isFinite(min) ? min : null);
      made.max.push(Number.isFinite(max) ? max : null);
    };
    for (let at = first; at < end; at++) made.count += count(at);
    if (end - first <= most) {
      for (let at = first; at < end; at++) push(xs[at], series.mean[at], series.min[at], series.max[at]);
      return made;
    }
    const width = (high - low) / most;
    let at = first;
    while (at < end) {
      // Cells begin at multiples of their width, so that a curve does not flicker while it is panned.
      const until = (Math.floor(xs[at] / width) + 1) * width;
      let total = 0, weight = 0, min = Infinity, max = -Infinity, last = at;
      for (; at < end && (xs[at] < until || at === last); at++) {
        last = at;
        if (!Number.isFinite(series.mean[at])) continue;
        const steps = count(at);
        total += steps * series.mean[at];
        weight += steps;
        if (series.min[at] < min) min = series.min[at];
        if (series.max[at] > max) max = series.max[at];
      }
      push(xs[last], weight ? total / weight : NaN, min, max);
    }
    return made;
  }

  /** Return centred moving averages, of fewer values at the ends. */
  function smoothed(values, radius) {
    const sums = [0], counts = [0];
    values.forEach((value, at) => {
      sums.push(sums[at] + (value ?? 0));
      counts.push(counts[at] + (value === null ? 0 : 1));
    });
    return values.map((value, at) => {
      const reach = Math.min(radius, at, values.length - 1 - at);
      const [first, end] = [at - reach, at + reach + 1], count = counts[end] - counts[first];
      return count ? (sums[end] - sums[first]) / count : null;
    });
  }

  const counter = (run) => (at) => run.axes.step[at] - run.axes.first_step[at] + 1;

  // ---------------------------------------------------------------- a chart

  class Chart {
    constructor(spec) {
      this.spec = spec;
      this.isLog = false;
      this.isFull = Boolean(spec.full);
      this.isSmooth = !spec.full && !spec.stacked;
      this.plot = null;
      this.row = this.x = null; // cursor set by the keyboard
      this.signature = "";
      this.height = spec.wide ? 330 : 220;
      const name = `chart-${spec.id.replace(/\W/g, "-")}`;
      this.reading = make("div", { class: "read" });
      this.logButton = make("button", { type: "button", "aria-pressed": "false", title: "Logarithm (L)", text: "log", onclick: () => this.toggle("isLog") });
      this.fullButton = make("button", { type: "button", "aria-pressed": String(this.isFull), title: "Full range (F)", text: "full", onclick: () => this.toggle("isFull") });
      this.smoothButton = make("button", { type: "button", "aria-pressed": String(this.isSmooth), title: "Mean of neighbouring steps, where single ones are drawn (S)", text: "smooth", onclick: () => this.toggle("isSmooth") });
      this.box = make("div", { class: "plot", tabindex: "0", role: "group", "aria-roledescription": "chart", "data-chart": spec.id, id: name });
      this.image = make("div", { role: "img" });
      this.box.append(this.image);
      this.said = make("div", { class: "said", "aria-hidden": "true" });
      this.key = make("ul", { class: "keyline" });
      this.table = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${spec.title}: numbers` });
      this.numbers = make("details", { ontoggle: () => this.tabulate() }, make("summary", { text: "Numbers" }), this.table);
      const unit = spec.unit ? make("span", { class: "unit", text: ` ${spec.unit}` }) : null;
      const buttons = spec.stacked ? [] : spec.full ? [this.logButton, this.fullButton] : [this.logButton, this.fullButton, this.smoothButton];
      this.card = make("section", { class: `card${spec.wide ? " wide" : ""}`, "aria-label": spec.title },
        make("header", {}, make("h2", {}, spec.title, unit), ...buttons, this.reading), this.box, make("div", { class: "below" }, this.said, this.key), this.numbers);
      this.box.addEventListener("keydown", (event) => this.pressed(event));
      this.box.addEventListener("blur", () => this.point(null));
      this.box.addEventListener("wheel", (event) => this.wheeled(event), { passive: false });
      new ResizeObserver(() => this.resize()).observe(this.box);
    }

    toggle(what) {
      this[what] = !this[what];
      this.logButton.setAttribute("aria-pressed", this.isLog);
      this.fullButton.setAttribute("aria-pressed", this.isFull);
      this.smoothButton.setAttribute("aria-pressed", this.isSmooth);
      this.draw();
      this.tell();
    }

    /** Return the lines to draw: for each a run, a series, and its style. */
    lines() {
      const { spec } = this, lines = [];
      if (spec.stacked) return this.layers();
      if (spec.callback) return this.callbackLines();
      for (const run of shownRuns()) {
        const names = spec.either ? spec.series.filter((name) => run.series[name]).slice(0, 1) : spec.series;
        for (const name of names) {
          if (run.series[name]) lines.push({ run, name, series: run.series[name], kind: "band", colour: run.colour, label: run.name });
        }
        if (spec.others) {
          const others = Object.keys(run.series).filter((name) => name.startsWith(spec.others)).slice(0, 4);
          others.forEach((name, at) => lines.push({ run, name, series: run.series[name], kind: "line", colour: `--part-${(at + 1) % 8}`, dash: [4, 3], label: name.slice(spec.others.length) }));
        }
        if (spec.clip && run.series.clip_at) {
          lines.push({ run, name: "clip_at", series: run.series.clip_at, kind: "line", colour: "--bad", dash: [5, 4], label: "clipped at", limit: true });
        } else if (spec.clip && run.clip_at) {
          lines.push({ run, name: "clip_at", constant: run.clip_at, kind: "constant", colour: "--bad", dash: [5, 4], label: `clipped at ${short(run.clip_at)}`, limit: true });
        }
        if (spec.held) {
          const found = run.evaluations.series;
          if (found.loss) lines.push({ run, name: "held-out", evaluation: found.loss, kind: "points", colour: run.colour, label: "held-out" });
          if (found.ema_loss) lines.push({ run, name: "held-out, average", evaluation: found.ema_loss, kind: "points", colour: run.colour, dash: [3, 3], label: "held-out, average of the weights" });
        }
      }
      return lines;
    }

    /** Return the curves of a callback's value, for the selected run: at most eight of its layers. */
    callbackLines() {
      const run = selectedRun(), prefix = this.spec.callback;
      for (const { step, series } of run.callbacks) {
        const names = Object.keys(series).filter((name) => name === prefix || name.startsWith(`${prefix}/`));
        if (!names.length) continue;
        const every = Math.max(1, Math.ceil(names.length / 8));
        const kept = names.filter((_, at) => at % every === 0 || at === names.length - 1);
        return kept.map((name, at) => ({ run, name, step, evaluation: series[name], kind: "points", colour: `--part-${at % 8}`, label: name.slice(prefix.length + 1) || run.name }));
      }
      return [];
    }

    /** Return the stacked parts of a step, for the selected run. */
    layers() {
      const run = selectedRun();
      const names = Object.keys(run.series).filter((name) => name.startsWith("seconds/") && name !== "seconds/total");
      if (!names.length) return [];
      names.sort((one, other) => partRank(one.slice(8)) - partRank(other.slice(8)));
      const lines = names.map((name) => ({ run, name, series: run.series[name], kind: "layer", colour: partColour(name.slice(8)), label: name.slice(8) }));
      if (run.series["seconds/total"]) lines.push({ run, name: "seconds/other", rest: run.series["seconds/total"], kind: "layer", colour: "--part-8", label: "other" });
      return lines;
    }

    points() {
      this.width ||= this.box.clientWidth; // read once: it forces a layout
      return Math.max(120, Math.round((this.width || 800) / POINTS));
    }

    /** Return the lines as one table for uPlot, and the style of each column. */
    assemble(lines, range) {
      const most = this.points(), scale = this.spec.scale || 1;
      if (this.spec.stacked) return this.assembleStack(lines, range, most);
      const tables = [], columns = [], bands = [];
      const scaled = (values) => (scale === 1 ? values : values.map((value) => (value === null ? null : value * scale)));
      for (const line of lines) {
        if (line.kind === "band" || line.kind === "line") {
          const found = reduced(line.run.axes[state.axis], line.series, counter(line.run), range, most);
          if (line.kind === "band") {
            const mean = scaled(found.mean), radius = this.radius(line, found);
            tables.push([found.x, scaled(found.max), scaled(found.min), mean]);
            bands.push([columns.length + 1, columns.length + 2, line]);
            columns.push({ line, part: "max" }, { line, part: "min" }, { line, part: "mean", pale: radius > 0 });
            if (radius) {
              tables[tables.length - 1].push(smoothed(mean, radius));
              columns.push({ line, part: "smooth" });
            }
          } else {
            tables.push([found.x, scaled(found.mean)]);
            columns.push({ line, part: "mean" });
          }
        } else if (line.kind === "points") {
          const xs = Float64Array.from(line.step || line.run.evaluations.step, (step) => place(line.run, step));
          const found = reduced(xs, line.evaluation, () => 1, range, most);
          tables.push([found.x, scaled(found.mean)]);
          columns.push({ line, part: "mean", points: found.x.length });
        } else {
          tables.push([[range[0], range[1]], [line.constant * scale, line.constant * scale]]);
          columns.push({ line, part: "mean" });
        }
      }
      const data = tables.length > 1 ? uPlot.join(tables) : tables[0] || [[0, 1]];
      return { data, columns, bands };
    }

    /** Return the half-width of the bold line's moving average, in steps; 0 if a point is many steps. */
    radius(line, found) {
      if (!this.isSmooth || found.x.length < 60) return 0;
      const steps = found.count / found.x.length;
      return steps > 4 ? 0 : Math.round(found.x.length / 70);
    }

    assembleStack(lines, range, most) {
      const columns = lines.map((line) => ({ line, part: "mean" }));
      if (!lines.length) return { data: [[0, 1]], columns: [], bands: [] };
      const run = lines[0].run, xs = run.axes[state.axis];
      let sums = null, x = null;
      const ys = [];
      for (const line of lines) {
        if (line.rest) {
          const total = reduced(xs, line.rest, counter(run), range, most).mean;
          ys.push(total.map((value, at) => Math.max(value || 0, sums ? sums[at] : 0)));
          continue;
        }
        const found = reduced(xs, line.series, counter(run), range, most);
        const own = (at) => (found.mean[at] === null ? 0 : found.mean[at]);
        x = found.x;
        sums = x.map((_, at) => (sums ? sums[at] : 0) + own(at));
        ys.push(sums);
      }
      // The highest layer is drawn first, and each lower layer covers it.
      columns.reverse();
      return { data: [x, ...ys.reverse()], columns, bands: [] };
    }

    /** Redraw after a change of the document, the range, the visible lines, or the theme. */
    draw() {
      const lines = this.lines();
      this.card.hidden = !lines.some((line) => line.kind !== "constant");
      if (this.card.hidden) return;
      const range = shownRange();
      const made = this.assemble(lines, range);
      this.lineList = lines;
      this.columns = made.columns;
      this.y = this.vertical(made, range);
      const signature = [lines.map((line) => [line.run.id, line.name, line.colour]), made.columns.map((each) => [each.part, each.pale, (each.points || 0) <= 60]), this.isLog, document.documentElement.dataset.theme].join("|");
      if (signature === this.signature && this.plot) {
        this.plot.batch(() => {
          this.plot.setData(made.data, false);
          this.plot.setScale("x", { min: range[0], max: range[1] });
          this.plot.setScale("y", { min: this.y[0], max: this.y[1] });
        });
      } else {
        this.signature = signature;
        this.build(made, range);
      }
      this.data = made.data;
      this.isStale = false;
      if (this.x !== null) this.point(this.rowAt(this.x));
    }

    /** Update the text around the chart, and the text in place of it. */
    tell() {
      if (this.card.hidden) return;
      this.describe(this.lineList, this);
      this.legend(this.lineList);
      if (this.x === null) this.point(null);
      if (this.numbers.open) this.tabulate();
    }

    /** Return the limits of the vertical axis, without far outliers unless the viewer wants them. */
    vertical({ data, columns }, [low, high]) {
      const lows = [], highs = [], limits = [];
      columns.forEach(({ line, part, points }, at) => {
        data[at + 1].forEach((value, row) => {
          if (value === null || value === undefined || data[0][row] < low || data[0][row] > high) return;
          if (this.isLog && value <= 0) return;
          if (line.limit) limits.push(value);
          else {
            if (part === "smooth") return;
            if (part !== "max" || points !== undefined) lows.push(value);
            if (part !== "min") highs.push(value);
          }
        });
      });
      if (!highs.length) return [0, 1];
      // With many steps per point, many points have spikes; with one, the first steps are the highest.
      const isThinned = columns.some(({ part }, at) => part === "max" && data[at + 1].filter((value, row) => value > data[at + 2][row]).length > 100);
      const robust = !this.isFull && !this.spec.stacked && highs.length > 40;
      let bottom = quantile(lows, robust ? 0.002 : 0), top = quantile(highs, robust ? (isThinned ? 0.93 : 0.985) : 1);
      const most = quantile(highs, 1);
      if (robust && most - top < 0.6 * (top - bottom)) top = most; // no outliers
      if (this.spec.stacked) { bottom = 0; top = quantile(highs, 0.99) * 1.05; }
      for (const limit of limits) if (limit > top && limit < 2.5 * top) top = limit;
      if (this.spec.band) [bottom, top] = this.withBudget(bottom, top);
      if (this.isLog) return top > bottom ? [bottom / 1.03, top * 1.03] : [bottom / 2, top * 2];
      if (this.spec.zero || this.spec.stacked) bottom = Math.min(0, bottom);
      const room = (top - bottom || Math.abs(top) || 1) * 0.06;
      return [this.spec.zero || this.spec.stacked ? bottom : bottom - room, top + room];
    }

    withBudget(bottom, top) {
      for (const run of [selectedRun()]) {
        const memory = run.memory;
        if (!memory || !isShown(run)) continue;
        const [low, high] = [memory.planned_low_bytes / GIB, memory.planned_high_bytes / GIB];
        if (Number.isFinite(low) && low > 0) bottom = Math.min(bottom, low);
        if (Number.isFinite(high)) top = Math.max(top, high);
        const capacity = memory.capacity_bytes / GIB;
        if (Number.isFinite(capacity) && capacity < 1.7 * top) top = Math.max(top, capacity);
      }
      return [bottom, top];
    }

    build({ data, columns, bands }, range) {
      const focused = document.activeElement === this.box;
      this.plot?.destroy();
      const ink = colour("--ink-2"), grid = colour("--grid"), surface = colour("--surface");
      const series = columns.map(({ line, part, points, pale }) => {
        const stroke = colour(line.colour);
        if (line.kind === "layer") return { stroke: surface, width: 0.6, fill: stroke, points: { show: false }, spanGaps: true };
        if (part === "smooth") return { stroke, width: 2, points: { show: false }, spanGaps: true };
        if (pale) return { stroke: faded(stroke, 0.32), width: 1.1, points: { show: false }, spanGaps: true };
        if (part !== "mean") return { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
        const held = line.kind === "points";
        return {
          stroke: (line.kind === "line" && line.limit) || (held && points > 60) ? faded(stroke, 0.7) : stroke,
          width: held ? 1.4 : line.kind === "constant" || line.limit ? 1.2 : 1.7,
          dash: line.dash || (held && points <= 60 ? [6, 4] : undefined),
          spanGaps: true,
          points: held && points <= 60 ? { show: true, size: 7, stroke, fill: surface, width: 1.6 } : { show: false },
        };
      });
      const values = (_, ticks) => ticks.map((tick) => this.tick(tick));
      const axis = { stroke: ink, font: "12px system-ui, sans-serif", grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1, size: 4 } };
      const options = {
        width: Math.max(120, this.box.clientWidth),
        height: this.height,
        padding: [18, 12, 0, 0],
        legend: { show: false },
        cursor: {
          sync: { key: "trainctl", scales: ["x", null] },
          drag: { x: true, y: false, setScale: false },
          focus: { prox: -1 },
          points: { show: (plot, at) => (columns[at - 1]?.part === "mean" && columns[at - 1].line.kind !== "layer" ? undefined : false), size: 7, width: 2, stroke: (plot, at) => colour(columns[at - 1].line.colour), fill: () => surface },
          bind: { dblclick: () => () => { zoomTo(null); return null; } },
        },
        scales: {
          x: { time: false, range: () => shownRange() },
          y: { distr: this.isLog ? 3 : 1, range: () => this.y },
        },
        axes: [
          { ...axis, values: (_, ticks) => ticks.map((tick) => (state.axis === "hours" ? short(tick, 3) : big(tick))), size: 30, space: 70 },
          { ...axis, values, size: 58 },
        ],
        series: [{}, ...series],
        bands: bands.map(([top, bottom, line]) => ({ series: [top, bottom], fill: faded(colour(line.colour), 0.2) })),
        hooks: {
          drawAxes: [(plot) => this.underneath(plot)],
          draw: [(plot) => this.ontop(plot)],
          setSelect: [(plot) => this.selected(plot)],
          setCursor: [(plot) => this.read(plot)],
        },
      };
      this.plot = new uPlot(options, data, this.image);
      this.plot.root.querySelector("canvas").setAttribute("aria-hidden", "true");
      if (focused) this.box.focus();
    }

    tick(value) {
      if (value === null) return "";
      const size = Math.abs(value);
      if (size && size < 1e-3) return value.toExponential(1).replace(".0e", "e");
      return size >= 1e4 ? big(value) : short(value, 4);
    }

    /** Draw what lies below the curves: the budget, abandoned branches, and lines of marks. */
    underneath(plot) {
      const context = plot.ctx, ratio = devicePixelRatio, box = plot.bbox;
      context.save();
      context.beginPath();
      context.rect(box.left, box.top, box.width, box.height);
      context.clip();
      if (this.spec.band) this.budget(plot);
      for (const run of shownRuns()) {
        if (this.spec.stacked) break;
        for (const branch of run.branches) {
          const name = this.spec.series?.find((each) => branch.series[each]);
          if (!name) continue;
          context.beginPath();
          branch.series[name].forEach((value, at) => {
            if (!Number.isFinite(value)) return;
            context.lineTo(plot.valToPos(place(run, branch.step[at]), "x", true), plot.valToPos(value * (this.spec.scale || 1), "y", true));
          });
          context.strokeStyle = faded(colour(run.colour), 0.42);
          context.lineWidth = 1.3 * ratio;
          context.setLineDash([2 * ratio, 2.5 * ratio]);
          context.stroke();
          context.setLineDash([]);
        }
      }
      context.restore();
      for (const mark of this.marks()) {
        const kind = MARKS[mark.kind], x = Math.round(plot.valToPos(mark.x, "x", true));
        if (x < box.left - 1 || x > box.left + box.width + 1 || !kind.line) continue;
        context.strokeStyle = faded(colour(kind.colour), 0.55);
        context.lineWidth = ratio;
        context.setLineDash([3 * ratio, 3 * ratio]);
        context.beginPath();
        context.moveTo(x, box.top);
        context.lineTo(x, box.top + box.height);
        context.stroke();
        context.setLineDash([]);
      }
    }

    budget(plot) {
      const run = selectedRun(), memory = run.memory, context = plot.ctx, box = plot.bbox, ratio = devicePixelRatio;
      if (!memory || !isShown(run)) return;
      const y = (size) => plot.valToPos(size / GIB, "y", true);
      const line = (size, hue) => {
        if (!Number.isFinite(size) || size <= 0) return;
        const at = y(size);
        context.strokeStyle = hue;
        context.lineWidth = 1.2 * ratio;
        context.setLineDash([6 * ratio, 4 * ratio]);
        context.beginPath();
        context.moveTo(box.left, at);
        context.lineTo(box.left + box.width, at);
        context.stroke();
        context.setLineDash([]);
      };
      if (Number.isFinite(memory.planned_low_bytes) && Number.isFinite(memory.planned_high_bytes)) {
        context.fillStyle = faded(colour("--part-8"), 0.16);
        const [top, bottom] = [y(memory.planned_high_bytes), y(memory.planned_low_bytes)];
        context.fillRect(box.left, top, box.width, bottom - top);
      }
      line(memory.planned_bytes, colour("--ink-2"));
      line(memory.capacity_bytes, colour("--bad"));
    }

    /** Return the legend of the budget's lines, for below the chart, where it covers no line. */
    budgetKey() {
      const run = selectedRun(), memory = run.memory;
      if (!memory || !isShown(run)) return [];
      const words = [];
      if (memory.planned_bytes > 0) words.push("dashed: planned");
      if (Number.isFinite(memory.planned_low_bytes)) words.push("shaded: between its bounds");
      if (memory.capacity_bytes > 0) words.push(`dashed red: capacity, ${bytes(memory.capacity_bytes)}`);
      return words.map((text) => make("li", { text }));
    }

    /** Return the visible marks of the selected run, with their positions. */
    marks() {
      const run = selectedRun();
      if (!run || !isShown(run)) return [];
      return run.marks.filter((mark) => MARKS[mark.kind] && !state.silent.has(mark.kind)).map((mark) => ({ ...mark, x: place(run, mark.step) }));
    }

    /** Draw the signs of the marks above the curves, side by side where they coincide. */
    ontop(plot) {
      const context = plot.ctx, box = plot.bbox, ratio = devicePixelRatio;
      const taken = new Map();
      context.save();
      context.font = `600 ${13 * ratio}px system-ui, sans-serif`;
      context.textAlign = "center";
      context.textBaseline = "middle";
      for (const mark of this.marks()) {
        const kind = MARKS[mark.kind], x = plot.valToPos(mark.x, "x", true);
        if (x < box.left - 2 || x > box.left + box.width + 2) continue;
        if (!kind.line && !this.spec.wide) continue;
        const cell = Math.round(x / (9 * ratio));
        if (taken.get(cell) === mark.kind) continue;
        const shift = taken.has(cell) ? 11 * ratio : 0;
        taken.set(cell, mark.kind);
        context.fillStyle = colour(kind.colour);
        context.fillText(kind.glyph, x + shift, box.top - 9 * ratio);
      }
      context.restore();
    }

    selected(plot) {
      const { left, width } = plot.select;
      if (width < 4) return;
      const range = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
      plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
      zoomTo(range);
    }

    /** Show the values at the cursor, or the newest values without a cursor. */
    read(plot) {
      const row = plot.cursor.idx;
      const at = row === null || row === undefined || plot.cursor.left < 0 ? null : row;
      this.show(at);
      const x = at === null ? null : plot.posToVal(plot.cursor.left, "x");
      const near = x === null ? null : this.nearest(plot, x);
      this.said.textContent = near ? `${MARKS[near.kind].glyph} step ${near.step.toLocaleString("en")}: ${near.text}${near.cause ? ` (${near.cause})` : ""}` : "";
    }

    nearest(plot, x) {
      const reach = Math.abs(plot.posToVal(7, "x") - plot.posToVal(0, "x"));
      let best = null;
      for (const mark of this.marks()) {
        const far = Math.abs(mark.x - x);
        if (far <= reach && (!best || far < best.far)) best = { ...mark, far };
      }
      return best;
    }

    show(row) {
      if (!this.plot) return;
      const parts = [], [xs] = this.plot.data;
      const many = this.lineList.length > 1;
      if (row !== null) parts.push(make("span", { text: `${AXES[state.axis].slice(0, -1).toLowerCase()} ${state.axis === "hours" ? short(xs[row], 3) : big(Math.round(xs[row]))}` }));
      for (const line of this.lineList) {
        if (line.kind === "constant") continue;
        const value = this.valueOf(line, row);
        if (value.mean === null) continue;
        const spread = value.max !== null && short(value.max) !== short(value.min) ? ` (${short(value.min)}–${short(value.max)})` : "";
        const dot = make("span", { class: "dot" });
        dot.style.color = colour(line.colour);
        parts.push(make("span", {}, many ? dot : null, many && line.kind !== "band" ? `${line.label} ` : "", make("b", { text: short(value.mean) }), spread));
      }
      this.reading.replaceChildren(...parts);
    }

    /** Return the values of a line at a row, or a few rows before it; the newest without a row. */
    valueOf(line, row) {
      const data = this.plot.data, own = { mean: null, min: null, max: null };
      const [low, high] = shownRange();
      this.columns.forEach((column, at) => {
        if (column.line !== line) return;
        const values = data[at + 1];
        let found = row ?? values.length - 1;
        const stop = row === null ? 0 : Math.max(0, row - 400);
        while (found >= stop && (values[found] === null || values[found] === undefined || data[0][found] > high)) found--;
        if (found < stop) return;
        let value = values[found];
        if (line.kind === "layer" && at + 1 < this.columns.length) value -= data[at + 2][found]; // the layer alone, without the sum below it
        own[column.part] = value;
      });
      return own;
    }

    /** Return the text alternative of the chart. */
    describe(lines, { data }) {
      if (!data) return;
      const [low, high] = shownRange();
      const where = `from ${AXES[state.axis].toLowerCase()} ${big(low)} to ${big(high)}`;
      const told = lines.filter((line) => line.kind !== "constant").map((line) => {
        const value = this.valueOf(line, null);
        const name = line.kind === "band" ? line.run.name : `${line.label} of ${line.run.name}`;
        const values = [];
        this.columns.forEach((column, at) => { if (column.line === line && line.kind !== "layer") values.push(...data[at + 1].filter(Number.isFinite)); });
        const extent = values.length ? `, lowest ${short(Math.min(...values))}, highest ${short(Math.max(...values))}` : "";
        return `${name}: newest ${short(value.mean)}${extent}`;
      });
      this.image.setAttribute("aria-label", `${this.spec.title} ${where}. ${told.join(". ")}.`);
      this.box.setAttribute("aria-label", `${this.spec.title}, chart. Arrow keys move, plus and minus zoom, Escape shows everything.`);
    }

    legend(lines) {
      const named = lines.filter((line) => line.kind === "layer" || line.kind === "points" || line.dash);
      const seen = new Set();
      const items = [];
      for (const line of named) {
        if (seen.has(line.label)) continue;
        seen.add(line.label);
        const swatch = make("span", { class: "swatch" });
        swatch.style.background = colour(line.colour);
        items.push(make("li", {}, swatch, line.label));
      }
      if (this.columns.some((column) => column.part === "smooth")) items.unshift(make("li", { text: "bold: mean of neighbouring steps" }));
      if (shownRuns().some((run) => run.branches.length) && ["loss", "grad_norm", "tokens_per_second"].includes(this.spec.id)) {
        items.push(make("li", { text: "dotted: steps that were done again" }));
      }
      if (this.spec.band) items.push(...this.budgetKey());
      this.key.replaceChildren(...items);
    }

    /** Fill the table of numbers: about thirty rows of what is visible. */
    tabulate() {
      if (!this.numbers.open || !this.plot) return;
      const data = this.plot.data, rows = [];
      const [low, high] = shownRange();
      const inside = data[0].map((x, at) => [x, at]).filter(([x]) => x >= low && x <= high);
      const every = Math.max(1, Math.ceil(inside.length / 30));
      const lines = this.lineList.filter((line) => line.kind !== "constant");
      inside.filter((_, at) => at % every === 0 || at === inside.length - 1).forEach(([x, at]) => {
        const cells = lines.map((line) => {
          const value = this.valueOf(line, at);
          const spread = value.max !== null && value.max !== value.min ? ` (${short(value.min)} to ${short(value.max)})` : "";
          return make("td", { class: "number", text: `${short(value.mean)}${spread}` });
        });
        rows.push(make("tr", {}, make("th", { scope: "row", text: state.axis === "hours" ? short(x) : Math.round(x).toLocaleString("en") }), ...cells));
      });
      const heads = lines.map((line) => make("th", { scope: "col", class: "number", text: line.kind === "band" ? line.run.name : lines.length > 4 ? line.label : `${line.label}, ${line.run.name}` }));
      this.table.replaceChildren(make("table", { class: "numbers" }, make("thead", {}, make("tr", {}, make("th", { scope: "col", text: AXES[state.axis] }), ...heads)), make("tbody", {}, ...rows)));
    }

    resize() {
      const width = (this.width = this.box.clientWidth);
      if (this.plot && width && Math.abs(width - this.plot.width) > 1) this.plot.setSize({ width, height: this.height });
    }

    // -------- keys and wheel

    /** Return the row nearest to a visible position; null if there is none. */
    rowAt(x) {
      const xs = this.plot.data[0], [low, high] = shownRange();
      if (x === null || x < low || x > high || !xs.length) return null;
      const after = Math.min(xs.length - 1, above(xs, x - 1e-9));
      return after && x - xs[after - 1] < xs[after] - x ? after - 1 : after;
    }

    point(row) {
      if (!this.plot) return;
      if (row === null) {
        this.plot.setCursor({ left: -10, top: -10 });
        this.row = this.x = null;
        this.show(null);
        this.said.textContent = "";
        return;
      }
      this.row = row;
      this.x = this.plot.data[0][row];
      this.plot.setCursor({ left: this.plot.valToPos(this.plot.data[0][row], "x"), top: this.plot.bbox.height / devicePixelRatio / 2 });
      const text = [...this.reading.children].map((part) => part.textContent).join(", ");
      say(`${text}. ${this.said.textContent}`);
    }

    move(by) {
      const xs = this.plot.data[0], [low, high] = shownRange();
      const first = above(xs, low - 1e-9), last = above(xs, high) - 1;
      if (last < first) return;
      const from = this.row ?? (by > 0 ? first - 1 : last + 1);
      this.point(Math.max(first, Math.min(last, from + by)));
    }

    pressed(event) {
      if (event.altKey || event.ctrlKey || event.metaKey || !this.plot) return;
      const centre = this.x;
      const keys = {
        ArrowLeft: () => (event.shiftKey ? pan(-0.2) : this.move(-1)),
        ArrowRight: () => (event.shiftKey ? pan(0.2) : this.move(1)),
        PageUp: () => this.move(-20),
        PageDown: () => this.move(20),
        Home: () => this.move(-1e9),
        End: () => this.move(1e9),
        "+": () => zoomBy(0.5, centre),
        "=": () => zoomBy(0.5, centre),
        "-": () => zoomBy(2, centre),
        "−": () => zoomBy(2, centre),
        Escape: () => zoomTo(null),
        0: () => zoomTo(null),
        l: () => !this.spec.stacked && this.toggle("isLog"),
        f: () => !this.spec.stacked && this.toggle("isFull"),
        s: () => !this.spec.stacked && !this.spec.full && this.toggle("isSmooth"),
      };
      const action = keys[event.key] || keys[event.key.toLowerCase()];
      if (!action) return;
      event.preventDefault();
      event.stopPropagation();
      action();
    }

    wheeled(event) {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const left = event.clientX - this.plot.over.getBoundingClientRect().left;
      zoomBy(event.deltaY < 0 ? 0.8 : 1.25, this.plot.posToVal(left, "x"));
    }
  }

  // ---------------------------------------------------------------- zoom

  function zoomTo(range) {
    const [first, last] = everything();
    if (range) {
      const least = Math.max((last - first) / 1e6, state.axis === "step" ? Math.min(4, last - first) : 0);
      let [low, high] = [Math.max(first, range[0]), Math.min(last, range[1])];
      if (high - low < least) {
        const middle = Math.min(last - least / 2, Math.max(first + least / 2, (low + high) / 2));
        [low, high] = [middle - least / 2, middle + least / 2];
      }
      range = low <= first && high >= last ? null : [low, high];
    }
    state.range = range;
    drawCharts();
    $("#all").disabled = !range;
    say(range ? `shown: ${big(range[0])} to ${big(range[1])}` : "everything is shown");
  }

  function zoomBy(factor, around) {
    const [low, high] = shownRange();
    const centre = around ?? (low + high) / 2;
    zoomTo([centre - (centre - low) * factor, centre + (high - centre) * factor]);
  }

  function pan(by) {
    const [low, high] = shownRange(), [first, last] = everything();
    const shift = Math.max(first - low, Math.min(last - high, by * (high - low)));
    zoomTo([low + shift, high + shift]);
  }

  // ---------------------------------------------------------------- parts of the page

  function tile(name, value, more = "", options = {}) {
    const shown = make("div", { class: "value" }, ...[].concat(value));
    const box = make("div", { class: `tile${options.bad ? " bad" : ""}` }, make("div", { class: "name", text: name }), shown, make("div", { class: "more", text: more }));
    if (options.done !== undefined) {
      const filled = make("div");
      filled.style.width = `${Math.min(100, 100 * options.done)}%`;
      box.append(make("div", { class: "progress", role: "img", "aria-label": `${Math.round(100 * options.done)} % done` }, filled));
    }
    return box;
  }

  const unit = (text) => make("small", { text: ` ${text}` });
  const lastOf = (run, name) => {
    const values = run.series[name]?.mean;
    if (!values) return NaN;
    for (let at = values.length - 1; at >= 0; at--) if (Number.isFinite(values[at])) return values[at];
    return NaN;
  };

  /** Return a table with a row for each of several runs. */
  function comparison() {
    const money = (value) => value.toLocaleString("en", { maximumFractionDigits: 2 });
    const priced = state.runs.some((run) => run.account.price);
    const heads = ["Run", "State", "#Step", "#Loss", "#Held-out loss", "#Lowest", "#Tokens/s", "#Tokens", "#Time", "#To come", "#Device hours", ...(priced ? ["#Price"] : []), "#Lost to faults", "#Peak memory"];
    const bests = state.runs.map((run) => run.evaluations.best?.loss ?? Infinity), alike = new Set(state.runs.map((run) => run.compared)).size === 1;
    const best = alike ? Math.min(...bests) : NaN; // losses of other objectives or tokenizers do not compare
    const rows = state.runs.map((run, at) => {
      const { account } = run, held = run.evaluations.best;
      const dot = make("span", { class: "dot" });
      dot.style.color = `var(${run.colour})`;
      const cells = [
        `${run.step.toLocaleString("en")}${run.total_steps || run.stop_step ? ` of ${(run.total_steps || run.stop_step).toLocaleString("en")}` : ""}`, short(lastOf(run, "loss")), held ? short(held.last) : "–",
        held ? `${short(held.loss)}${bests[at] === best && state.runs.length > 1 ? " ★" : ""}` : "–", big(lastOf(run, "tokens_per_second")), big(account.tokens), duration(account.wall_seconds),
        account.steps_to_come ? duration(account.seconds_to_come) : "–", short(account.device_hours, 3), ...(priced ? [account.price ? money(account.price.so_far) : "–"] : []),
        account.repeated_steps ? `${duration(account.repeated_seconds + account.between_attempts_seconds)}, ${account.repeated_steps.toLocaleString("en")} steps` : "–", bytes(run.memory?.measured?.device_peak_bytes ?? NaN),
      ];
      return make("tr", {}, make("th", { scope: "row" }, make("span", { class: "run-name" }, dot, run.name)), make("td", { text: run.state }), ...cells.map((text) => make("td", { class: "number", text })));
    });
    $("#tiles").className = "card compared";
    $("#tiles").replaceChildren(table(heads, rows, "The runs beside each other"));
  }

  function tiles() {
    if (state.runs.length > 1) return comparison();
    $("#tiles").className = "tiles";
    const run = selectedRun(), account = run.account, found = [];
    const end = run.stop_step;
    found.push(tile("Step", [run.step.toLocaleString("en"), ...(end ? [unit(`of ${end >= 1e5 ? big(end) : end.toLocaleString("en")}`)] : [])], account.tokens ? `${big(account.tokens)} tokens${account.tokens_to_come ? `, ${big(account.tokens_to_come)} to come` : ""}` : "", end ? { done: run.step / end } : {}));
    if (run.series[REWARD.id]) found.push(tile("Reward", short(lastOf(run, REWARD.id)), "mean of the newest step's answers"));
    if (run.series.loss) found.push(tile("Loss", short(lastOf(run, "loss")), "of the newest step"));
    const best = run.evaluations.best;
    if (best) found.push(tile("Held-out loss", short(best.last), `lowest ${short(best.loss)} at step ${best.step.toLocaleString("en")}`));
    const mfu = lastOf(run, "mfu");
    if (run.series.tokens_per_second) found.push(tile("Throughput", big(lastOf(run, "tokens_per_second")), `tokens/s${Number.isFinite(mfu) ? `, ${(100 * mfu).toFixed(1)} % MFU` : ""}`));
    found.push(tile("Time", duration(account.wall_seconds), account.seconds_to_come && run.step < (end || 0) ? `about ${duration(account.seconds_to_come)} to come` : ""));
    if (account.price) {
      const cost = account.price;
      found.push(tile("Price", cost.so_far.toLocaleString("en", { maximumFractionDigits: 2 }), cost.to_come ? `about ${cost.to_come.toLocaleString("en", { maximumFractionDigits: 2 })} to come` : `${short(account.device_hours, 3)} device hours`));
    } else if (account.device_hours) found.push(tile("Device hours", short(account.device_hours, 3), account.device_hours_to_come ? `about ${short(account.device_hours_to_come, 3)} to come` : ""));
    const lost = account.repeated_seconds + account.between_attempts_seconds;
    if (account.repeated_steps || lost > 1) found.push(tile("Lost to faults", duration(lost), `${account.repeated_steps.toLocaleString("en")} steps done again`, { bad: account.repeated_steps > 0 }));
    if (run.memory && Number.isFinite(run.memory.measured?.device_peak_bytes)) {
      const planned = run.memory.planned_bytes;
      found.push(tile("Peak memory", bytes(run.memory.measured.device_peak_bytes), planned ? `planned ${bytes(planned)}` : ""));
    }
    $("#tiles").replaceChildren(...found);
  }

  function heading() {
    const { runs } = state, run = selectedRun();
    const title = runs.length === 1 ? run.name : `${runs.length} runs`;
    $("#title").textContent = title;
    document.title = `${title} · trainctl`;
    const words = [];
    if (runs.length > 1) words.push(runs.map((each) => each.name).join(", "));
    else {
      if (run.recipe || run.model) words.push([run.recipe, run.model].filter(Boolean).join(", "));
      if (run.num_parameters) words.push(`${big(run.num_parameters)} parameters${run.num_trained && run.num_trained !== run.num_parameters ? `, ${big(run.num_trained)} train` : ""}`);
      if (run.layout) words.push(`${run.layout.hardware}, ${run.layout.world_size} ranks, ZeRO ${run.layout.zero_stage}`);
      if (run.attempt) words.push(`attempt ${run.attempt}`);
      words.push(`made ${clock(run.created)}`);
      if (run.message) words.push(run.message);
      if (run.missing_records) words.push(`records are missing in events.jsonl: ${run.missing_records}`);
      if (run.mirror) words.push(`mirror: ${run.mirror}`);
    }
    $("#subtitle").textContent = words.join(" · ");
    const badge = $("#state");
    badge.hidden = runs.length > 1;
    badge.textContent = run.state;
    badge.className = `state ${{ finished: "good", running: "good", failed: "bad", lost: "bad", stopped: "warn" }[run.state] || ""}`;
    $("#footer").textContent = `trainctl ${state.document.trainctl}, ${clock(state.document.made)}. ${runs.map((each) => each.path).join(", ")}`;
  }

  /** Build the controls; again only when runs or kinds of marks have changed. */
  function bar() {
    const box = $("#bar"), run = selectedRun();
    const kinds = [...new Set(run.marks.map((mark) => mark.kind))].filter((kind) => MARKS[kind]);
    const has = (axis) => state.runs.some((each) => each.axes[axis]?.some?.((value) => value > 0));
    const axes = Object.keys(AXES).filter((axis) => axis === "step" || has(axis));
    const signature = JSON.stringify([state.runs.map((each) => [each.id, each.name]), kinds, axes, state.selected]);
    if (box.dataset.signature === signature) return;
    box.dataset.signature = signature;
    const groups = [];
    if (state.runs.length > 1) {
      const buttons = state.runs.map((each, at) => {
        const dot = make("span", { class: "dot" });
        dot.style.color = `var(${each.colour})`;
        return make("button", { type: "button", class: "run", "aria-pressed": String(isShown(each)), "data-run": each.id, title: at < 9 ? `${each.name} (${at + 1})` : each.name, onclick: () => toggleRun(each.id) }, dot, make("span", { text: each.name }));
      });
      groups.push(make("div", { class: "group", role: "group", "aria-label": "Runs" }, ...buttons));
      const options = state.runs.map((each) => make("option", { value: each.id, text: each.name, selected: each.id === selectedRun().id }));
      const select = make("select", { id: "of", onchange: (event) => { state.selected = event.target.value; render(); } }, ...options);
      groups.push(make("div", { class: "group" }, make("label", { class: "label", for: "of", text: "Details of" }), select));
    }
    const choices = axes.map((axis) => make("button", { type: "button", role: "radio", "aria-checked": String(axis === state.axis), "data-axis": axis, text: AXES[axis], onclick: () => setAxis(axis) }));
    groups.push(make("div", { class: "choice", role: "radiogroup", "aria-label": "Over" }, ...choices));
    groups.push(make("button", { type: "button", id: "all", text: "Show all", disabled: !state.range, onclick: () => zoomTo(null) }));
    if (kinds.length) {
      const chips = kinds.map((kind) => {
        const glyph = make("span", { class: "glyph", "aria-hidden": "true", text: MARKS[kind].glyph });
        glyph.style.color = `var(${MARKS[kind].colour})`;
        return make("button", { type: "button", class: "chip", "aria-pressed": String(!state.silent.has(kind)), "data-kind": kind, onclick: () => toggleKind(kind) }, glyph, MARKS[kind].name);
      });
      groups.push(make("div", { class: "group", role: "group", "aria-label": "Marks" }, make("span", { class: "label", text: "Marks" }), ...chips));
    }
    const focused = document.activeElement?.dataset;
    box.replaceChildren(...groups);
    box.hidden = false;
    if (focused?.run) $(`[data-run="${CSS.escape(focused.run)}"]`, box)?.focus();
  }

  function toggleRun(id) {
    if (state.hidden.has(id)) state.hidden.delete(id);
    else state.hidden.add(id);
    $(`[data-run="${CSS.escape(id)}"]`).setAttribute("aria-pressed", String(!state.hidden.has(id)));
    drawCharts();
  }

  function toggleKind(kind) {
    if (state.silent.has(kind)) state.silent.delete(kind);
    else state.silent.add(kind);
    $(`[data-kind="${kind}"]`).setAttribute("aria-pressed", String(!state.silent.has(kind)));
    drawCharts();
  }

  function setAxis(axis) {
    state.axis = axis;
    state.range = null;
    for (const button of document.querySelectorAll("[data-axis]")) button.setAttribute("aria-checked", String(button.dataset.axis === axis));
    $("#all").disabled = true;
    drawCharts();
  }

  function charts() {
    const names = new Set(state.runs.flatMap((run) => Object.keys(run.series)));
    const more = [...names].filter((name) => !DRAWN.test(name)).sort();
    const reward = more.includes(REWARD.id) ? [REWARD] : [];
    const specs = [...reward, ...CHARTS, ...more.map((name) => ({ id: name, title: name.replaceAll("_", " ").replace("/", ": "), series: [name] }))];
    const values = new Set(state.runs.flatMap((run) => run.callbacks.flatMap((each) => Object.keys(each.series).map((name) => name.split("/").slice(0, 3).join("/")))));
    for (const name of values) specs.push({ id: name, title: name.split("/").filter((part, at, all) => part !== all[at - 1]).join(": ").replaceAll("_", " "), callback: name, full: true });
    for (const spec of specs) {
      if (state.charts.some((chart) => chart.spec.id === spec.id)) continue;
      const chart = new Chart(spec);
      state.charts.push(chart);
      $("#charts").append(chart.card); // all cards, before the first one measures its width
    }
  }

  /**
   * Redraw the curves. Visible charts are drawn in the next frame, however often this is called
   * before it; other charts and all texts follow when nothing has changed for a while.
   */
  let frame = 0, rest = 0;
  function drawCharts() {
    document.documentElement.dataset.busy = "";
    frame ||= requestAnimationFrame(() => { frame = 0; drawSeen(); });
    clearTimeout(rest);
    rest = setTimeout(drawAll, 150);
  }

  function drawSeen() {
    if (!state.runs.length) return;
    for (const chart of state.charts) {
      const { top, bottom } = chart.card.getBoundingClientRect();
      chart.isStale = true;
      if (bottom > 0 && top < innerHeight) chart.draw();
    }
  }

  function drawAll() {
    clearTimeout(rest);
    cancelAnimationFrame(frame);
    frame = 0;
    for (const chart of state.charts) chart.card.hidden = !chart.lines().some((line) => line.kind !== "constant");
    widen();
    for (const chart of state.charts) {
      if (chart.isStale !== false) chart.draw();
      chart.tell();
    }
    delete document.documentElement.dataset.busy;
  }

  /** Give the last card the whole row if their number is odd. */
  function widen() {
    const shown = state.charts.filter((chart) => !chart.card.hidden && !chart.spec.wide);
    shown.forEach((chart, at) => chart.card.classList.toggle("wide", shown.length % 2 === 1 && at === shown.length - 1));
  }

  // ---------------------------------------------------------------- below the curves

  const card = (id, title, wide, ...children) => make("section", { class: `card${wide ? " wide" : ""}`, id, "aria-labelledby": `${id}-title` }, make("header", {}, make("h2", { id: `${id}-title`, text: title })), ...children);

  function table(heads, rows, label, className = "") {
    const head = make("thead", {}, make("tr", {}, ...heads.map((text) => make("th", { scope: "col", text: text.replace(/^#/, ""), class: text.startsWith("#") ? "number" : null }))));
    return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, make("table", { class: className }, head, make("tbody", {}, ...rows)));
  }

  function happened(run) {
    if (!run.marks.length) return null;
    const rows = [...run.marks].reverse().map((mark) => {
      const kind = MARKS[mark.kind] || { glyph: "·", colour: "--ink-2" };
      const name = make("td", { class: "kind" }, `${kind.glyph} ${mark.kind}`);
      name.style.color = `var(${kind.colour})`;
      const step = make("button", { type: "button", title: "Show this step", text: mark.step.toLocaleString("en"), onclick: () => showStep(run, mark.step) });
      return make("tr", {}, make("td", { class: "nowrap", text: clock(mark.time) }), make("td", { class: "number" }, step), make("td", { class: "number", text: mark.attempt }), name, make("td", { text: mark.text }), make("td", { text: mark.cause }));
    });
    const left = Object.entries(run.marks_left_out).map(([kind, number]) => `${number.toLocaleString("en")} older ${kind} records`);
    const note = left.length ? make("p", { class: "quiet", text: `Not listed: ${left.join(", ")}.` }) : null;
    return card("happened", "What happened", true, table(["Time", "#Step", "#Attempt", "What", "", "Cause"], rows, "What happened"), note);
  }

  function showStep(run, step) {
    const reach = Math.max(25, (run.step || 0) / 40), [low, high] = [place(run, Math.max(0, step - reach)), place(run, step + reach)];
    zoomTo([low, high]);
    $("#charts").scrollIntoView();
    state.charts[0].box.focus();
  }

  /** Return a stacked bar with its legend. */
  function stack(parts, total, format) {
    const bar = make("div", { class: "stack", "aria-hidden": "true" });
    const key = make("ul", { class: "keyline" });
    for (const [name, value, hue] of parts) {
      if (!(value > 0)) continue;
      const part = make("div");
      part.style.width = `${(100 * value) / total}%`;
      part.style.background = `var(${hue})`;
      part.title = `${name}: ${format(value)}`;
      bar.append(part);
      const swatch = make("span", { class: "swatch" });
      swatch.style.background = `var(${hue})`;
      key.append(make("li", {}, swatch, `${name} ${format(value)} (${share(value, total)})`));
    }
    return [bar, key];
  }

  function times(run) {
    const account = run.account;
    if (!(account.wall_seconds > 0)) return null;
    const whole = stack([
      ["steps that count", account.kept_seconds, "--good"],
      ["steps done again", account.repeated_seconds, "--bad"],
      ["starting", account.starting_seconds, "--part-0"],
      ["between attempts", account.between_attempts_seconds, "--warn"],
      ["other", account.other_seconds, "--part-8"],
    ], account.wall_seconds, duration);
    const parts = Object.entries(account.parts).sort(([one], [other]) => partRank(one) - partRank(other)), total = parts.reduce((sum, [, value]) => sum + value, 0);
    const hues = parts.map(([name, value]) => [name, value, partColour(name)]);
    const facts = [`${account.attempts} ${account.attempts === 1 ? "attempt" : "attempts"}, ${short(account.device_hours, 4)} device hours`];
    if (account.repeated_steps) facts.push(`${account.repeated_steps.toLocaleString("en")} steps were done again: ${duration(account.repeated_seconds)}`);
    if (account.seconds_to_come) facts.push(`to come: ${account.steps_to_come.toLocaleString("en")} steps, about ${duration(account.seconds_to_come)}${account.device_hours_to_come ? ` and ${short(account.device_hours_to_come, 3)} device hours` : ""}`);
    if (account.price) {
      const cost = account.price, money = (value) => value.toLocaleString("en", { maximumFractionDigits: 2 });
      facts.push(`at ${money(cost.of_a_device_hour)} a device hour: ${money(cost.so_far)} so far${cost.to_come ? `, about ${money(cost.to_come)} to come` : ""}; steps done again cost ${money(cost.repeated)}`);
    }
    const list = make("ul", { class: "facts" }, ...facts.map((text) => make("li", { text })));
    return card("times", "Time", false, make("h3", { text: `Since the first launch: ${duration(account.wall_seconds)}` }), ...whole,
      ...(total ? [make("h3", { text: "Of the steps that count" }), ...stack(hues, total, duration)] : []), list);
  }

  function memory(run) {
    const found = run.memory;
    if (!found) return null;
    const measured = found.measured || {}, onDevice = Number.isFinite(measured.allocated_peak_bytes);
    const words = [];
    if (Number.isFinite(measured.device_peak_bytes)) words.push(`measured peak ${bytes(measured.device_peak_bytes)}`);
    if (found.planned_bytes) words.push(`planned ${bytes(found.planned_bytes)}, between ${bytes(found.planned_low_bytes)} and ${bytes(found.planned_high_bytes)}`);
    if (found.capacity_bytes) words.push(`capacity ${bytes(found.capacity_bytes)}`);
    const parts = [make("p", { class: "quiet", text: `${words.join("; ")}.` })];
    const phases = found.phases || [];
    if (phases.length) {
      const names = [...new Set(phases.flatMap((phase) => Object.keys(phase.components)))];
      const hue = (name) => (name === "runtime" ? "--part-8" : `--part-${names.indexOf(name) % 8}`);
      const tops = phases.map((phase) => Math.max(phase.planned_bytes, measuredOf(phase, onDevice) || 0));
      const most = Math.max(...tops) * 1.04;
      const withLimit = found.capacity_bytes && found.capacity_bytes < 1.5 * most ? Math.max(most, found.capacity_bytes * 1.02) : most;
      const rows = phases.map((phase) => {
        const bar = make("div", { class: "stack", "aria-hidden": "true" });
        for (const name of names) {
          const size = phase.components[name];
          if (!size) continue;
          const part = make("div");
          part.style.width = `${(100 * size) / withLimit}%`;
          part.style.background = `var(${hue(name)})`;
          part.title = `${name.replaceAll("_", " ")}: ${bytes(size)}`;
          bar.append(part);
        }
        const at = measuredOf(phase, onDevice);
        if (at) {
          const tick = make("div", { class: "tick", title: `measured ${bytes(at)}` });
          tick.style.left = `${(100 * at) / withLimit}%`;
          bar.append(tick);
        }
        if (found.capacity_bytes && found.capacity_bytes <= withLimit) {
          const limit = make("div", { class: "limit", title: "capacity" });
          limit.style.left = `${(100 * found.capacity_bytes) / withLimit}%`;
          bar.append(limit);
        }
        const name = phase.name.replaceAll("_", " ") + (phase.name === found.peak_phase ? " (peak)" : "");
        return make("tr", {}, make("th", { scope: "row", text: name }), make("td", { class: "number", text: bytes(phase.planned_bytes) }), make("td", { class: "number", text: at ? bytes(at) : "–" }), make("td", {}, bar));
      });
      const key = make("ul", { class: "keyline" }, ...names.map((name) => {
        const swatch = make("span", { class: "swatch" });
        swatch.style.background = `var(${hue(name)})`;
        return make("li", {}, swatch, name.replaceAll("_", " "));
      }));
      parts.push(table(["Phase of a step", "#Planned", "#Measured", "What it holds; the stroke is what was measured"], rows, "Memory by phase", "phases"), key);
    }
    return card("memory", "Memory of a device, phase by phase", false, ...parts);
  }

  /** On an accelerator only bytes of tensors are measured; the rest is taken from the plan. */
  const measuredOf = (phase, onDevice) =>
    Number.isFinite(phase.measured_bytes) && phase.measured_bytes > 0 ? phase.measured_bytes + (onDevice ? phase.components.runtime || 0 : 0) : null;

  function layout(run) {
    const found = run.layout;
    if (!found) return null;
    const { mesh } = found, dense = found.world_size > 64;
    const axes = Object.entries(mesh).filter(([, size]) => size > 1).map(([name, size]) => `${name} ${size}`);
    const nodes = new Map();
    found.ranks.forEach(([node, data, tensor, sequence, context, pipeline], rank) => {
      if (!nodes.has(node)) nodes.set(node, []);
      const where = [];
      const blocks = found.blocks?.[pipeline];
      const mirrored = blocks?.length > 1 ? `s ${pipeline}, ${2 * mesh.pipeline - 1 - pipeline}` : ` ${pipeline}`;
      if (mesh.pipeline > 1) where.push(`stage${mirrored}`);
      if (mesh.data > 1) where.push(`data ${data}`);
      if (mesh.tensor > 1) where.push(`tensor ${tensor}`);
      if (mesh.sequence > 1) where.push(`sequence ${sequence}`);
      if (mesh.context > 1) where.push(`context ${context}`);
      const ranges = blocks?.map(([first, end]) => `${first}–${end - 1}`).join(", ");
      const held = mesh.pipeline > 1 && blocks ? `blocks ${ranges}` : "";
      const item = make("li", { title: `rank ${rank}: ${where.join(", ") || "everything"}${held ? `, ${held}` : ""}` }, make("b", { text: dense ? String(rank) : `rank ${rank}` }), ...where.map((text) => make("span", { text })), held ? make("span", { text: held }) : null);
      item.style.borderLeftColor = `var(--part-${(mesh.pipeline > 1 ? pipeline : mesh.tensor > 1 ? tensor : data) % 8})`;
      nodes.get(node).push(item);
    });
    const boxes = [...nodes].map(([node, ranks]) => make("div", { class: "node" }, make("h3", { text: `node ${node}${found.hosts[node] ? `: ${found.hosts[node]}` : ""}` }), make("ul", { class: "ranks" }, ...ranks)));
    const facts = [];
    const sharded = Object.entries(found.shards).filter(([, parts]) => parts > 1).map(([name]) => name);
    const whole = Object.entries(found.shards).filter(([, parts]) => parts === 1).map(([name]) => name);
    if (found.shards.parameters > 1 || sharded.length) facts.push(`ZeRO ${found.zero_stage}: each data rank holds 1/${Object.values(found.shards).find((parts) => parts > 1)} of the ${sharded.join(", ")}${whole.length ? `; ${whole.join(", ")} whole` : ""}`);
    else facts.push(`ZeRO ${found.zero_stage}: ${whole.join(", ")} whole on each rank${mesh.tensor > 1 ? " of a tensor group's part" : ""}`);
    if (mesh.tensor > 1) facts.push(`matrices are cut into ${mesh.tensor} over the tensor ranks`);
    if (mesh.sequence > 1) facts.push(`sequences are cut into ${mesh.sequence} over the sequence ranks`);
    if (mesh.context > 1) facts.push(`sequences are cut into ${2 * mesh.context} chunks, two for each context rank`);
    if (mesh.expert > 1) facts.push(`experts are shared out among ${mesh.expert} ranks of the data axis`);
    const { batch } = found;
    facts.push(`a step: ${batch.global.toLocaleString("en")} sequences of ${batch.sequence_length.toLocaleString("en")} tokens = ${mesh.data} data ${mesh.data > 1 ? "ranks" : "rank"} × ${batch.accumulation} × ${batch.micro}`);
    if (found.ranks_left_out) facts.push(`${found.ranks_left_out.toLocaleString("en")} more ranks are not drawn`);
    return card("layout", `Layout: ${found.world_size.toLocaleString("en")} ${found.world_size === 1 ? "rank" : "ranks"}${axes.length ? `, ${axes.join(" × ")}` : ""}`, false,
      make("p", { class: "quiet", text: `${found.hardware}, ${found.nodes} ${found.nodes === 1 ? "node" : "nodes"}, engine ${found.engine}` }),
      make("ul", { class: "facts" }, ...facts.map((text) => make("li", { text }))), make("div", { class: `nodes${dense ? " dense" : ""}`, tabindex: "0", role: "region", "aria-label": "Ranks by node" }, ...boxes));
  }

  function differing(heads, found, id, title) {
    if (!found.length) return null;
    const rows = found.map((each) => make("tr", {}, make("th", { scope: "row" }, make("code", { text: each.key })), ...each.values.map((value) => make("td", {}, make("code", { text: value })))));
    return card(id, title, true, table(["Key", ...heads], rows, title));
  }

  function proofs(run) {
    if (!run.proofs.length) return null;
    const rows = run.proofs.map((each) => make("tr", {}, make("th", { scope: "row", text: each.step.toLocaleString("en") }), make("td", {}, make("code", { text: each.changes || "none" })), make("td", { text: `${each.is_good ? "" : "✗ "}${each.sentence}` })));
    return card("proofs", "Proofs: replays with a change", true, table(["Checkpoint", "Change", "Verdict"], rows, "Proofs"));
  }

  function rollouts(run) {
    if (!run.rollouts.length) return null;
    const names = [...new Set(run.rollouts.flatMap((each) => Object.keys(each.rewards)))];
    const number = (value) => make("td", { class: "number", text: value === null || value === undefined ? "" : Number(value.toPrecision(4)).toLocaleString("en") });
    const rows = run.rollouts.map((each) => make("tr", {}, make("th", { scope: "row", text: each.step.toLocaleString("en") }), make("td", { class: "text", text: each.prompt }), make("td", { class: "text", text: `${each.answer}${each.is_finished ? "" : "…"}` }), ...names.map((name) => each.failed.includes(name) ? make("td", { class: "number", text: "failed" }) : number(each.rewards[name])), number(each.reward), number(each.advantage)));
    return card("rollouts", "Newest sampled answers", true, make("details", {}, make("summary", { text: `${rows.length} answers` }), table(["Step", "Prompt", "Answer", ...names, "Reward", "Advantage"], rows, "Sampled answers")));
  }

  function profiles(run) {
    if (!run.profiles.length) return null;
    const each = run.profiles.map(({ attempt, rank, text }) => make("details", {}, make("summary", { text: `Rank ${rank}, attempt ${attempt}` }), make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Profile of rank ${rank}` }, make("pre", { text }))));
    return card("profiles", "Profiled steps: where their time goes", true, ...each);
  }

  function reasons(run) {
    if (!run.derived.length) return null;
    const rows = run.derived.map((each) => make("tr", {}, make("th", { scope: "row" }, make("code", { text: each.key })), make("td", {}, make("code", { text: each.value })), make("td", { text: each.reason })));
    return card("reasons", "Values that nobody typed, and why", true, make("details", {}, make("summary", { text: `${rows.length} values` }), table(["Key", "Value", "Why"], rows, "Derived values")));
  }

  function origin(run) {
    const { argv, git, packages } = run.provenance, rows = [];
    const row = (name, value) => value && rows.push(make("tr", {}, make("th", { scope: "row", text: name }), make("td", {}, make("code", { text: value }))));
    row("Command", argv.join(" "));
    row("Folder", run.path);
    row("Launcher", [run.launcher, run.host && `from ${run.host}`].filter(Boolean).join(" "));
    row("Git", git.revision ? `${git.revision}${git.changed ? ", with changes" : ""}` : "");
    row("Packages", Object.entries(packages).map(([name, version]) => `${name} ${version}`).join(", "));
    return rows.length ? card("origin", "Where it comes from", true, make("table", {}, make("tbody", {}, ...rows))) : null;
  }

  function details() {
    const run = selectedRun(), root = $("#details"), open = new Set([...root.querySelectorAll("section:has(details[open])")].map((each) => each.id));
    const made = JSON.stringify([run.id, run.marks.length, run.step, run.account, run.proofs.length, run.rollouts.length, run.profiles.length, state.document.differences.length]);
    if (root.dataset.made === made) return;
    root.dataset.made = made;
    const several = differing(state.runs.map((each) => each.name), state.document.differences, "differences", "What is different between the runs");
    const attempts = state.runs.length === 1 ? differing(run.attempts.numbers.map((number) => `attempt ${number}`), run.attempts.differences, "differences", "What is different between the attempts") : null;
    root.replaceChildren(...[happened(run), several, attempts, times(run), memory(run), layout(run), profiles(run), rollouts(run), proofs(run), reasons(run), origin(run)].filter(Boolean));
    const half = [...root.querySelectorAll(".card:not(.wide)")];
    if (half.length % 2) half[half.length - 1].classList.add("wide");
    for (const id of open) $(`#${id} details`)?.setAttribute("open", "");
  }

  // ---------------------------------------------------------------- theme, keys, print

  const theme = shared.themes(drawCharts, (name) => say(`theme: ${name}`));

  function pressed(event) {
    const inField = event.target.closest?.("input, select, textarea, dialog");
    if (inField || event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "t" || event.key === "T") theme.next();
    else if (event.key === "?") $("#help").showModal();
    else if (event.key === "Escape" && state.range) zoomTo(null);
    else if (/^[1-9]$/.test(event.key) && state.runs.length > 1 && state.runs[event.key - 1]) toggleRun(state.runs[event.key - 1].id);
  }

  const PAPER = 700; // width of a printed page, in pixels
  function print(begins) {
    document.body.style.width = begins ? `${PAPER}px` : "";
    for (const each of document.querySelectorAll("#details details")) if (begins) each.open = true;
    theme.apply(begins ? "light" : undefined);
    for (const chart of state.charts) chart.isStale = true;
    drawAll();
    for (const chart of state.charts) chart.resize();
  }

  // ---------------------------------------------------------------- beginning

  function render() {
    for (const chart of state.charts) chart.isStale = true;
    heading();
    tiles();
    bar();
    charts();
    drawAll();
    details();
  }

  /** Show a document, or a newer one in its place. */
  async function show(found) {
    const runs = await Promise.all(found.runs.map(decodeRun));
    state.document = found;
    state.runs = runs;
    if (!runs.some((run) => run.id === state.selected)) state.selected = runs[0]?.id ?? null;
    if (runs.length) render();
    document.documentElement.dataset.ready = found.version;
  }

  theme.apply();
  $("#keys").addEventListener("click", () => $("#help").showModal());
  document.addEventListener("keydown", pressed);
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
  const [data, source] = [contained("#data"), contained("#source")];
  if (data) show(data).catch((error) => { notice(`This page cannot be shown: ${error.message}`); throw error; });
  if (source) shared.follow(source, () => state.document?.version, show);
  window.trainctl = { show };
})();
