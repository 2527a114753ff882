"use strict";
// Computes the page's numbers and curves from the saved runs: the work of each round (bytes and steps of its
// clients) and the metric. Two plots per experiment show one quantity over two axes. A slider prices the same rounds for
// other links and devices, and a codec prices them for messages in fewer bytes.

const EXPERIMENTS = JSON.parse(document.getElementById("experiments").textContent);
const AXES = { round: "round", minutes: "simulated minutes", bytes: "megabytes", wall: "wall clock seconds" };
const PLOTS = [0, 1];  // of an experiment, side by side
const DARK = matchMedia("(prefers-color-scheme: dark)");
const FONT = "13px system-ui, sans-serif", HEIGHT = 380;

const hidden = new Set();
const cost = {};
const codecs = { tracking: "", change: "" };  // by kind of a field; "": as it was run

// Prices

function roundSeconds(works, price, groupPrice) {
  // works: exchanges, one after the other; each a list of [bytes down, bytes up, steps, clients], and perhaps
  // "client" or "group" (groups, not clients, exchange with the server) and a deadline in seconds or null.
  let total = 0;
  for (const groups of works) {
    let sum = 0, count = 0, most = 0;
    for (const [down, up, steps, clients, link, deadline] of groups) {
      let each = link === "group"
        ? 8e-6 * (down / groupPrice.down_mbps + up / groupPrice.up_mbps)
        : price.latency + 8e-6 * down / price.down_mbps + 8e-6 * up / price.up_mbps
          + steps * price.seconds_per_step;
      if (typeof deadline === "number") each = Math.min(each, deadline);
      sum += each * clients;
      count += clients;
      most = Math.max(most, each);
    }
    if (count) total += price.per_round === "slowest" ? most : sum / count;
  }
  return total;
}

// Codecs

function recoded() {
  return Object.values(codecs).some((codec) => codec);
}

function savings(method) {
  // Bytes of the messages as they were sent, and how many more they have with the chosen codecs, by part.
  const sent = { down: 0, up: 0, tracked: 0 }, more = { down: 0, up: 0, tracked: 0 };
  for (const field of method.messages) {
    sent[field.part] += field.bytes;
    const size = field.codecs[codecs[field.kind]];
    if (size !== undefined) more[field.part] += size - field.bytes;
  }
  return { sent, more };
}

function withCodecs(method, exchanges) {
  // The work of a round with the chosen codecs. Its last exchange has the messages; one before it has the gradients
  // at the initial model.
  if (!recoded() || !method.messages) return exchanges;
  const { sent, more } = savings(method);
  return exchanges.map((clients, number) => number < exchanges.length - 1 ? clients
    : clients.map(([down, up, ...rest]) => {
      const buffers = down - sent.down, tracked = up > sent.up + buffers;  // else up is 0: it has not answered
      return [down + more.down, up && up + more.up + (tracked ? more.tracked : 0), ...rest];
    }));
}

function price(experiment, run, method) {
  // Minutes up to each round.
  const seconds = experiment.works.map(
    (works) => roundSeconds(method ? withCodecs(method, works) : works, cost, experiment.groups));
  let sum = 0;
  return run.work.map((index) => (sum += seconds[index]) / 60);
}

function bytesOf(experiment, run, method) {
  // Bytes up to each round, of all clients.
  if (!recoded() || !method.messages) return run.bytes;
  const bytes = experiment.works.map((works) => withCodecs(method, works).flat()
    .reduce((sum, [down, up, , clients]) => sum + clients * (down + up), 0));
  let sum = 0;
  return run.work.map((index) => sum += bytes[index]);
}

function summed(values) {
  let sum = 0;
  return values.map((value) => (sum += value === null ? NaN : value));
}

function priceAsSaved(run) {
  return summed(run.seconds).map((seconds) => seconds / 60);
}

function minutesOf(experiment, run, method) {
  return cost.as_saved ? priceAsSaved(run) : price(experiment, run, method);
}

// Numbers

function mean(values) {
  return values.reduce((a, b) => a + b, 0) / values.length;
}

function deviation(values) {
  if (values.length < 2) return NaN;
  const centre = mean(values);
  return Math.sqrt(values.reduce((a, b) => a + (b - centre) ** 2, 0) / (values.length - 1));
}

function reaches(experiment, value) {
  if (value === null || experiment.target === null) return false;
  return experiment.goal === "max" ? value >= experiment.target : value <= experiment.target;
}

function firstRound(experiment, run) {
  return run.metric.findIndex((value) => reaches(experiment, value));
}

function decimals(column) {
  const largest = Math.max(0, ...column.filter(Number.isFinite));
  if (largest > 0 && largest < 1e-3) return null;
  return largest > 0 ? Math.max(2 - Math.floor(Math.log10(largest)), 0) : 2;
}

function shown(value, places) {
  return places === null ? value.toExponential(2).replace(/e([+-])(\d)$/, "e$10$2") : value.toFixed(places);
}

// The table

function timesToTarget(experiment) {
  return experiment.methods.map((method) => {
    const times = [];
    const bySeed = new Map();  // a run that missed the target counts with all its rounds
    for (const run of method.runs) {
      const at = firstRound(experiment, run), minutes = minutesOf(experiment, run, method);
      if (at >= 0) times.push(minutes[at]);
      const value = at >= 0 ? minutes[at] : minutes[minutes.length - 1];
      if ((at >= 0 || !run.diverged) && Number.isFinite(value)) bySeed.set(run.seed, value);
    }
    const finite = times.filter(Number.isFinite);
    return {
      mean: finite.length ? mean(finite) : NaN,
      std: deviation(finite),
      reached: times.length,
      runs: method.ended,
      diverged: method.diverged,
      all: times.length === experiment.seeds,
      bySeed,
    };
  });
}

function clearlyBest(experiment, times) {
  // The rule of clearly_best in numbers.py; null where the order is not clear.
  const ranked = times.filter((t) => t.bySeed.size)
    .map((t) => [mean([...t.bySeed.values()]), t]).sort((a, b) => a[0] - b[0]).map(([, t]) => t);
  const ran = times.filter((t) => t.runs).length;
  const [best, rival] = ranked;
  if (!best || ran < 2 || !best.all || experiment.seeds < 2) return null;
  if (!rival) return best;
  const ahead = [...best.bySeed].filter(([seed]) => rival.bySeed.has(seed))
    .map(([seed, value]) => rival.bySeed.get(seed) - value);
  if (ahead.length < 2) return null;
  const t = experiment.t95[Math.min(ahead.length - 2, experiment.t95.length - 1)];
  return mean(ahead) > t * deviation(ahead) / Math.sqrt(ahead.length) ? best : null;
}

function drawTable(experiment, place) {
  const times = timesToTarget(experiment);
  const places = decimals(times.map((t) => t.mean));
  const best = clearlyBest(experiment, times);
  times.forEach((time, number) => {
    const cell = place.querySelector(`[data-minutes="${number}"]`);
    if (!cell) return;
    const more = time.diverged ? `, ${time.diverged} diverged` : "";
    let text;
    if (!time.runs || experiment.target === null) {
      text = "\u2013";
    } else if (!time.reached) {
      text = time.diverged === time.runs ? "diverged" : `never (0/${time.runs}${more})`;
    } else {
      const std = Number.isNaN(time.std) ? "" : ` \u00b1 ${shown(time.std, places)}`;
      text = Number.isNaN(time.mean) ? "\u2013" : `${shown(time.mean, places)}${std}`;
      if (time.reached !== time.runs) text += ` (${time.reached}/${time.runs} reached${more})`;
    }
    cell.textContent = text;
    cell.classList.toggle("best", time === best);
  });
}

function drawMegabytes(experiment, place) {
  const perRound = experiment.methods.map((method) => {
    const rounds = method.runs.reduce((sum, run) => sum + run.bytes.length, 0);
    const bytes = method.runs.reduce((sum, run) => sum + (bytesOf(experiment, run, method).at(-1) ?? 0), 0);
    return rounds ? bytes / rounds / 1e6 : NaN;
  });
  const places = decimals(perRound);
  perRound.forEach((megabytes, number) => {
    const cell = place.querySelector(`[data-megabytes="${number}"]`);
    if (!cell) return;
    cell.textContent = Number.isNaN(megabytes) ? "\u2013" : shown(megabytes, places);
  });
}

// The curves

function positions(experiment, run, axis, method) {
  if (axis === "minutes") return minutesOf(experiment, run, method);
  if (axis === "wall") return summed(run.wall);
  return bytesOf(experiment, run, method).map((bytes, i) => axis === "bytes" ? bytes / 1e6 : i + 1);
}

function line(experiment, method, axis, key) {
  // Over the rounds in which all runs of the method have a value.
  const series = method.runs.map((run) => key === "metric" ? run.metric : run.more[key]);
  const along = method.runs.map((run) => positions(experiment, run, axis, method));
  const scale = experiment.quantities[key].scale, logarithmic = scale === "logarithmic";
  const back = scale === "share" ? (v) => 100 * Math.min(v, 1) : logarithmic ? Math.exp : (v) => v;
  const x = [], y = [], low = [], high = [], rounds = [];
  for (let i = 0; i < Math.min(...series.map((values) => values.length)); i++) {
    const values = series.map((of) => of[i]), place = mean(along.map((of) => of[i]));
    if (values.some((value) => value === null || (logarithmic && value <= 0)) || !Number.isFinite(place)) continue;
    const scaled = logarithmic ? values.map(Math.log) : values;
    const centre = mean(scaled), spread = values.length > 1 ? deviation(scaled) : 0;
    rounds.push(i + 1);
    x.push(place);
    y.push(back(centre));
    low.push(back(centre - spread));
    high.push(back(centre + spread));
  }
  return { label: method.label, colour: method.colour, dash: method.dash, x, y, low, high, rounds };
}

function lines(experiment, axis, key) {
  return experiment.methods.filter((method) => method.runs.length && !hidden.has(method.label))
    .map((method) => line(experiment, method, axis, key)).filter(({ x }) => x.length);
}

function range(values, margin) {
  const low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
  const room = margin * (high - low) || 0.5 * Math.abs(high) || 1;
  return [low - room, high + room];
}

function limits(experiment, drawn, target, scale) {
  // The rule of value_limits in plots.py for a linear axis: the curves after their first rounds, and the target.
  const logarithmic = scale === "logarithmic";
  const first = logarithmic ? 0 : experiment.early * Math.max(...drawn.map(({ rounds }) => rounds[rounds.length - 1]));
  const values = drawn.flatMap(({ rounds, low, high }) => {
    const late = (value, i) => rounds[i] > first || i === rounds.length - 1;
    return [...low.filter(late), ...high.filter(late)];
  });
  if (target !== null && (!logarithmic || target > 0)) values.push(target);
  if (logarithmic) return range(values.map(Math.log), experiment.margin).map(Math.exp);
  const [low, high] = range(values, experiment.margin);
  return scale === "share" ? [Math.max(low, 0), Math.min(high, 100)] : [low, high];
}

function plotOf(experiment, axis, key) {
  // What a plot shows: its lines and their bands, its axes, and the target.
  const { text, scale } = experiment.quantities[key];
  const drawn = lines(experiment, axis, key);
  const target = key !== "metric" || experiment.target === null ? null
    : scale === "share" ? 100 * experiment.target : experiment.target;
  return {
    lines: drawn,
    target,
    targetText: `target ${experiment.target_text}`,
    x: { title: AXES[axis], end: Math.max(0, ...drawn.map(({ x }) => x[x.length - 1])) || 1 },
    y: { title: text, scale, range: drawn.length ? limits(experiment, drawn, target, scale) : null },
  };
}

function logSplits(low, high) {
  // Ticks of a logarithmic axis: powers of ten, with 2 and 5 over few decades; equal steps within one decade.
  const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
  const leads = to - from > 3 ? [1] : [1, 2, 5], found = [];
  for (let power = from; power <= to; power += Math.ceil((to - from) / 8)) {
    found.push(...leads.map((lead) => Number(`${lead}e${power}`)).filter((value) => value >= low && value <= high));
  }
  if (found.length > 2) return found;
  const unit = 10 ** Math.floor(Math.log10(high - low)), units = (high - low) / unit;
  const step = units > 5 ? 2 * unit : units > 2 ? unit : unit / 2;
  const first = Math.ceil(low / step), count = Math.floor(high / step) - first + 1;
  return Array.from({ length: count }, (_, i) => (first + i) * step);
}

function tick(value) {
  return String(Number(value.toPrecision(6)));
}

function optionsOf(box, plot) {
  // The plot as uPlot takes it: three series per line, for its means and for the limits of its band.
  const share = plot.y.scale === "share", logarithmic = plot.y.scale === "logarithmic";
  const ink = DARK.matches ? "#e6e9ee" : "#1c2430", grid = { stroke: DARK.matches ? "#323b47" : "#e6e9ee", width: 1 };
  const axis = { stroke: ink, grid, ticks: grid, font: FONT, labelFont: FONT, labelSize: 26 };
  const series = plot.lines.flatMap((line) => {
    const rounds = new Map(line.x.map((x, i) => [x, line.rounds[i]]));
    const value = (chart, y, number, i) => y == null ? "\u2013"
      : `${share ? `${y.toFixed(1)} %` : number3(y)}${plot.x.title === "round" ? "" : `, round ${rounds.get(chart.data[0][i])}`}`;
    const edge = { label: "", class: "edge", stroke: "transparent", points: { show: false } };
    const { label, colour: stroke, dash } = line;
    const points = { show: line.x.length === 1 };
    return [{ label, stroke, width: 2, dash: dash.map((length) => 2 * length), value, points }, edge, edge];
  });
  if (plot.target !== null) {
    series.push({
      label: plot.targetText, class: "target", stroke: ink, width: 1, dash: [2, 3], value: () => "", points: { show: false },
    });
  }
  const isLine = (number) => number % 3 === 1 && number <= 3 * plot.lines.length;
  return {
    width: box.clientWidth, height: HEIGHT,
    series: [{ label: plot.x.title, value: (chart, x) => x == null ? "\u2013" : number3(x) }, ...series],
    bands: plot.lines.map(({ colour }, i) => ({ series: [3 * i + 2, 3 * i + 3], fill: `${colour}1f` })),
    scales: {
      x: { time: false, range: (chart, low, high) => [low <= chart.data[0][0] ? 0 : low, high] },  // whole, or zoomed
      y: { distr: logarithmic ? 3 : 1, range: () => plot.y.range },
    },
    axes: [
      { ...axis, label: plot.x.title, size: 34, values: (chart, ticks) => ticks.map(tick) },
      {
        ...axis, label: plot.y.title, size: 58, values: (chart, ticks) => ticks.map((value) => tick(value) + (share ? " %" : "")),
        ...(logarithmic ? { splits: (chart, number, low, high) => logSplits(low, high), filter: (chart, ticks) => ticks } : {}),
      },
    ],
    cursor: {
      drag: { x: true, y: true, uni: 20 }, hover: { prox: 30 }, points: { size: (chart, number) => isLine(number) ? 8 : 0 },
    },
    legend: { markers: { width: 2, dash: (chart, number) => chart.series[number].dash?.length ? "dashed" : "solid" } },
  };
}

function dataOf(plot) {
  const tables = plot.lines.map(({ x, y, low, high }) => [x, y, high, low]);
  const ends = [Math.min(...plot.lines.map(({ x }) => x[0])), plot.x.end];
  if (plot.target !== null) tables.push([ends, [plot.target, plot.target]]);
  return uPlot.join(tables);
}

function drawPlot(box, plot) {
  box.plot = plot;
  box.chart?.destroy();
  box.chart = plot.lines.length ? new uPlot(optionsOf(box, plot), dataOf(plot), box) : null;
  box.setAttribute("aria-label", `Plot of ${plot.y.title} over ${plot.x.title}. Arrow keys read values, Escape zooms out.`);
}

function readWithKeys(event) {
  // Arrow keys move the read-out of a plot by a hundredth of its width.
  const { chart } = event.currentTarget;
  if (!chart) return;
  const width = chart.over.clientWidth, left = chart.cursor.left ?? -1;
  const to = { ArrowLeft: left - width / 100, ArrowRight: left + width / 100, Home: 0, End: width }[event.key];
  if (to !== undefined) chart.setCursor({ left: Math.min(Math.max(to, 0), width), top: chart.over.clientHeight / 2 });
  else if (event.key === "Escape") chart.setData(chart.data);
  else return;
  event.preventDefault();
}

function drawCurves(experiment, place) {
  const key = place.querySelector("[data-y]").value;
  for (const plot of PLOTS) {
    const axis = place.querySelector(`[data-x="${plot}"]`).value;
    drawPlot(place.querySelector(`[data-plot="${plot}"]`), plotOf(experiment, axis, key));
  }
}

// The controls

function number3(value) {
  return String(Number(value.toPrecision(3)));
}

function pricing(experiment) {
  const latency = cost.latency ? `, ${number3(cost.latency)} s latency` : "";
  const client = cost.per_round === "mean" ? "the mean of its clients" : "its slowest client";
  return `links of ${number3(cost.down_mbps)} Mbps down and ${number3(cost.up_mbps)} Mbps up${experiment.groups.text}, `
    + `${number3(cost.seconds_per_step)} s per local step${latency}; a round takes as long as ${client}`;
}

function drawPricing(experiment, place) {
  const text = place.querySelector("[data-pricing]");
  if (!text.dataset.saved) text.dataset.saved = text.textContent;
  text.textContent = cost.as_saved ? text.dataset.saved : pricing(experiment);
}

function draw(number) {
  const place = document.getElementById(`experiment-${number}`);
  if (place.tagName === "DETAILS" && !place.open) return;
  drawPricing(EXPERIMENTS[number], place);
  drawTable(EXPERIMENTS[number], place);
  drawMegabytes(EXPERIMENTS[number], place);
  drawCurves(EXPERIMENTS[number], place);
}

function drawNote() {
  // Names the methods that a codec does not price.
  const without = new Set(EXPERIMENTS.flatMap(({ methods }) => methods)
    .filter((method) => method.runs.length && !method.messages).map((method) => method.label));
  const note = document.getElementById("codec-note");
  note.hidden = !recoded() || !without.size;
  note.textContent = `${[...without].join(", ")}: priced as it was run, because the records do not have the sizes of the `
    + "messages' fields";
}

function drawAll() {
  drawNote();
  EXPERIMENTS.forEach((_, number) => draw(number));
}

function slider(name) {
  return document.getElementById(`cost-${name}`);
}

function show(name) {
  document.getElementById(`shown-${name}`).textContent = number3(cost[name]);
  slider(name).setAttribute("aria-valuetext", number3(cost[name]));
}

function fromSpec() {
  Object.assign(cost, EXPERIMENTS[0].cost, { as_saved: true });
  for (const name of ["down_mbps", "up_mbps"]) {
    slider(name).value = Math.log10(cost[name]);
    show(name);
  }
  for (const name of ["seconds_per_step", "latency"]) {
    slider(name).value = cost[name] > 0 ? Math.log10(cost[name]) : slider(name).min;
    show(name);
  }
  document.getElementById("cost-per_round").value = cost.per_round;
  for (const kind of Object.keys(codecs)) {
    codecs[kind] = "";
    document.getElementById(`codec-${kind}`).value = "";
  }
}

function changed() {
  cost.as_saved = false;
  drawAll();
}

function start() {
  fromSpec();
  for (const name of ["down_mbps", "up_mbps", "seconds_per_step", "latency"]) {
    slider(name).addEventListener("input", () => {
      const least = name.endsWith("mbps") ? -Infinity : Number(slider(name).min);
      const power = Number(slider(name).value);
      cost[name] = power <= least ? 0 : 10 ** power;
      show(name);
      changed();
    });
  }
  document.getElementById("cost-per_round").addEventListener("change", (event) => {
    cost.per_round = event.target.value;
    changed();
  });
  for (const kind of Object.keys(codecs)) {
    document.getElementById(`codec-${kind}`).addEventListener("change", (event) => {
      codecs[kind] = event.target.value;
      changed();
    });
  }
  document.getElementById("cost-reset").addEventListener("click", () => {
    fromSpec();
    drawAll();
  });
  for (const box of document.querySelectorAll("input[data-method]")) {
    box.addEventListener("change", () => {
      if (box.checked) hidden.delete(box.dataset.method);
      else hidden.add(box.dataset.method);
      drawAll();
    });
  }
  EXPERIMENTS.forEach((_, number) => {
    const place = document.getElementById(`experiment-${number}`);
    if (place.tagName === "DETAILS") place.addEventListener("toggle", () => draw(number));
    for (const select of place.querySelectorAll("[data-x], [data-y]")) {
      select.addEventListener("change", () => draw(number));
    }
  });
  const resized = new ResizeObserver((entries) => {
    for (const { target } of entries) target.chart?.setSize({ width: target.clientWidth, height: HEIGHT });
  });
  for (const box of document.querySelectorAll(".plot")) {
    box.addEventListener("keydown", readWithKeys);
    resized.observe(box);
  }
  DARK.addEventListener("change", drawAll);
  drawAll();
}

start();
