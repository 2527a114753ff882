"use strict";
// The figure of docs/drift.md: three clients in the plane, and the paths of two methods. The first half computes what
// fadamgc.simulate computes (tests/test_drift_page.py compares them); the second half draws it.

// The clients. Client i has the loss x^T A_i x / 2 + h b_i^T x, where h is the heterogeneity. The b_i add up to 0, so
// that the optimum of the mean loss is 0 and b_i h is the client's gradient at the optimum. At h = 0 the losses are equal.

const CURVATURES = [[1.6, 0.5, 0.5], [0.4, -0.2, 1.1], [0.7, -0.3, 0.5]];  // of the clients at h = 1: xx, xy, yy
const GRADIENTS = [[1.5, 0.2], [-0.6, -0.9], [-0.9, 0.7]];  // b_i
const MEAN_CURVATURE = [0, 1, 2].map((j) => CURVATURES.reduce((sum, A) => sum + A[j], 0) / CURVATURES.length);
const START = [-2.4, 1.7];
const ROUNDS = 60;

function clientsAt(h) {
  return CURVATURES.map((A, i) => ({
    A: A.map((value, j) => (1 - h) * MEAN_CURVATURE[j] + h * value),
    b: GRADIENTS[i].map((value) => h * value),
  }));
}

function gradient({ A: [xx, xy, yy], b }, [x, y]) {
  return [xx * x + xy * y + b[0], xy * x + yy * y + b[1]];
}

function minimum({ A: [xx, xy, yy], b }) {
  const det = xx * yy - xy * xy;
  return [-(yy * b[0] - xy * b[1]) / det, -(xx * b[1] - xy * b[0]) / det];
}

// The methods, as in src/fadamgc/methods/. All clients take part and are tracked in each round; eta_g is 1.

const METHODS = {
  FedAvg: { adam: false, correction: "none" },
  SCAFFOLD: { adam: false, correction: "after" },
  LocalAdam: { adam: true, correction: "none" },
  "FA-NT": { adam: true, correction: "after" },
  FAdamGC: { adam: true, correction: "before" },
};
const BETA1 = 0.9, BETA2 = 0.99, EPS = 1e-8;

function plane(rule) {
  return [rule(0), rule(1)];
}

function meanOf(points) {
  return plane((j) => points.reduce((sum, point) => sum + point[j], 0) / points.length);
}

function trajectory(name, { h, K, eta }) {
  // The model before each round and at the end, and in each round the path of each client: K + 1 points.
  const { adam, correction } = METHODS[name];
  const states = clientsAt(h).map((loss) => ({ loss, yi: [0, 0], v: [0, 0], vHat: [0, 0] }));
  let x = START, y = [0, 0];
  const server = [x], local = [];
  for (let round = 0; round < ROUNDS; round++) {
    const paths = states.map((state) => {
      const z = correction === "none" ? [0, 0] : plane((j) => y[j] - state.yi[j]);
      const path = [x];
      let at = x, m = [0, 0], sum = [0, 0];
      for (let k = 0; k < K; k++) {
        const g = gradient(state.loss, at);
        let d = correction === "before" ? plane((j) => g[j] + z[j]) : g;
        if (adam) {
          m = plane((j) => BETA1 * m[j] + (1 - BETA1) * d[j]);
          state.v = plane((j) => BETA2 * state.v[j] + (1 - BETA2) * d[j] * d[j]);
          state.vHat = plane((j) => Math.max(state.vHat[j], state.v[j]));
          d = plane((j) => m[j] / (Math.sqrt(state.vHat[j]) + EPS));
        }
        if (correction === "after") d = plane((j) => d[j] + z[j]);
        at = plane((j) => at[j] - eta * d[j]);
        sum = plane((j) => sum[j] + g[j]);
        path.push(at);
      }
      if (correction === "before") state.yi = plane((j) => sum[j] / K);
      if (correction === "after") state.yi = plane((j) => state.yi[j] - y[j] + (x[j] - at[j]) / (K * eta));
      return path;
    });
    x = meanOf(paths.map((path) => path[K]));
    y = meanOf(states.map((state) => state.yi));
    server.push(x);
    local.push(paths);
  }
  return { server, local };
}

// Drawing. A tick is one local step, or the mean at the end of a round: tick = round (K + 1) + step.

const WIDE = 5.6, HIGH = 4.2, SCALE = 68;  // the part of the plane around the optimum that is seen, pixels per unit
const LEVELS = [0.4, 0.9, 1.5, 2.2, 3];  // square roots of twice the loss at the contours
const SHAPES = [  // of the clients
  (x, y, r) => `<circle cx="${x}" cy="${y}" r="${r}"/>`,
  (x, y, r) => `<rect x="${x - r}" y="${y - r}" width="${2 * r}" height="${2 * r}"/>`,
  (x, y, r) => `<path d="M${x} ${y - 1.2 * r}l${1.2 * r} ${2.1 * r}h${-2.4 * r}z"/>`,
];
const SMALLEST = 1e-8, LARGEST = 10;  // distances in the plot
const STEPWISE = 5;  // rounds that are played step by step
const STEP_SIZES = [0.01, 0.02, 0.05, 0.1, 0.2, 0.3];

function pixel([x, y]) {
  return [(x + WIDE / 2) * SCALE, (HIGH / 2 - y) * SCALE].map((value) => Number(value.toFixed(1)));
}

function polyline(points, attributes = "") {
  return `<polyline fill="none" points="${points.join(" ")}" ${attributes}/>`;
}

function contour([xx, xy, yy], centre, level) {
  // The ellipse on which (x - centre)^T A (x - centre) is level^2.
  const points = Array.from({ length: 73 }, (_, i) => {
    const [c, s] = [Math.cos(Math.PI * i / 36), Math.sin(Math.PI * i / 36)];
    const r = level / Math.sqrt(xx * c * c + 2 * xy * c * s + yy * s * s);
    return pixel([centre[0] + r * c, centre[1] + r * s]);
  });
  return polyline(points);
}

function cross([x, y], r = 9) {
  return `<path class="optimum" d="M${x - r} ${y - r}l${2 * r} ${2 * r}m0 ${-2 * r}l${-2 * r} ${2 * r}"/>`;
}

function panel({ server, local }, { h, round, step }) {
  const clients = clientsAt(h);
  const around = clients.map((loss, i) => {
    const at = minimum(loss);
    return `<g class="client-${i}">${contour(loss.A, at, 0.35)}${SHAPES[i](...pixel(at), 5)}</g>`;
  });
  const paths = (of, upTo, style) => (local[of] ?? []).map((path, i) => {
    const points = path.slice(0, upTo + 1).map(pixel);
    return `<g class="client-${i} ${style}">${polyline(points)}${SHAPES[i](...points.at(-1), 3)}</g>`;
  });
  const walked = server.slice(0, round + 1).map(pixel);
  return [
    `<g class="mean">${LEVELS.map((level) => contour(MEAN_CURVATURE, [0, 0], level)).join("")}</g>`,
    ...around, ...paths(round - 1, Infinity, step ? "past" : ""), ...(step ? paths(round, step, "") : []),
    `<g class="server">${polyline(walked)}${walked.map(([x, y]) => `<circle cx="${x}" cy="${y}" r="2"/>`).join("")}`
      + `<circle cx="${walked.at(-1)[0]}" cy="${walked.at(-1)[1]}" r="4.5"/></g>`,
    cross(pixel([0, 0])),
  ].join("");
}

function distances({ server }) {
  return server.map(([x, y]) => Math.hypot(x, y));
}

function shown(distance) {
  if (distance < SMALLEST) return "below 1e-8";
  return distance < 0.01 ? distance.toExponential(1) : distance.toFixed(2);
}

function chart(curves, round) {
  // Distances over rounds: the curves by name; up to the round they are drawn strongly.
  const [left, right, top, bottom] = [58, 614, 12, 168];
  const across = (r) => left + (right - left) * r / ROUNDS;
  const decades = Math.log10(LARGEST / SMALLEST);
  const down = (d) => top + (bottom - top) * Math.log10(LARGEST / Math.min(Math.max(d, SMALLEST), LARGEST)) / decades;
  const grid = [];
  for (const power of [0, -2, -4, -6, -8]) {
    const y = down(10 ** power);
    grid.push(`<path class="grid" d="M${left} ${y}H${right}"/><text x="${left - 6}" y="${y + 4}" text-anchor="end">`
      + `${power ? `1e${power}` : "1"}</text>`);
  }
  for (let r = 0; r <= ROUNDS; r += 10) {
    grid.push(`<text x="${across(r)}" y="${bottom + 20}" text-anchor="middle">${r}</text>`);
  }
  const drawn = Object.values(curves).map((values, number) => {
    const points = values.map((value, r) => [across(r).toFixed(1), down(value).toFixed(1)]);
    return `<g class="curve-${number}">${polyline(points, 'opacity=".3"')}${polyline(points.slice(0, round + 1))}`
      + `<circle cx="${points[round][0]}" cy="${points[round][1]}" r="4"/></g>`;
  });
  return `${grid.join("")}${drawn.join("")}<text x="${(left + right) / 2}" y="${bottom + 40}" text-anchor="middle">round</text>`;
}

function start(place) {
  const options = (chosen) => Object.keys(METHODS)
    .map((name) => `<option${name === chosen ? " selected" : ""}>${name}</option>`).join("");
  const line = (number) => `<svg class="key" viewBox="0 0 28 10" aria-hidden="true"><g class="curve-${number}">`
    + '<path fill="none" d="M0 5h28"/></g></svg>';
  const view = `viewBox="0 0 ${WIDE * SCALE} ${HIGH * SCALE}" role="img"`;
  const range = (id, text, most, value, least = 0, step = 1) => `<label for="drift-${id}">${text} <output id="drift-${id}-shown">`
    + `</output></label><input type="range" id="drift-${id}" min="${least}" max="${most}" step="${step}" value="${value}">`;
  place.innerHTML = `
    <div class="panels">${["LocalAdam", "FAdamGC"].map((name, i) => `<div>
      <label>${line(i)} <select id="drift-method-${i}" aria-label="Method of ${i ? "the second" : "the first"} plot">${options(name)}</select></label>
      <svg class="plane" id="drift-plane-${i}" ${view}></svg></div>`).join("")}
    </div>
    <p class="keys">${SHAPES.map((shape, i) => `<span><svg class="key" viewBox="0 0 28 10" aria-hidden="true"><g class="client-${i}">`
      + `<path fill="none" d="M0 5h14"/>${shape(20, 5, 4)}</g></svg> client ${i + 1}, its minimum and path</span>`).join(" ")}
      <span><svg class="key" viewBox="0 0 28 10" aria-hidden="true"><g class="server"><path fill="none" d="M0 5h20"/><circle cx="20" cy="5" r="4"/></g></svg> server</span>
      <span><svg class="key" viewBox="0 0 28 10" aria-hidden="true">${cross([14, 5], 4)}</svg> optimum of the mean loss</span></p>
    <div class="buttons"><button type="button" id="drift-play">Play</button>
      <button type="button" id="drift-step">Next step</button><button type="button" id="drift-next">Next round</button>
      <button type="button" id="drift-again">Back to the start</button></div>
    <div class="sliders"><div>${range("round", "Round", ROUNDS, ROUNDS)}</div>
      <div>${range("h", "Heterogeneity", 1, 0.8, 0, 0.05)}</div>
      <div>${range("K", "Local steps K", 40, 10, 1)}</div>
      <div>${range("eta", "Local step size", STEP_SIZES.length - 1, 3)}</div></div>
    <p class="said" id="drift-said" role="status"></p>
    <p class="caption">Distance of the server's model to the optimum:
      ${[0, 1].map((i) => `<span>${line(i)} <span id="drift-curve-${i}"></span></span>`).join(" ")}</p>
    <svg class="chart" id="drift-chart" viewBox="0 0 630 214" role="img"></svg>`;
  const find = (id) => document.getElementById(`drift-${id}`);
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  let round = ROUNDS, step = 0, timer = null, paths = [];

  function settings() {
    return { h: Number(find("h").value), K: Number(find("K").value), eta: STEP_SIZES[find("eta").value] };
  }

  function draw() {
    const { h, K } = settings();
    const names = [0, 1].map((i) => find(`method-${i}`).value);
    const curves = paths.map(distances);
    names.forEach((name, i) => {
      find(`curve-${i}`).textContent = name;
      find(`plane-${i}`).innerHTML = panel(paths[i], { h, round, step });
      find(`plane-${i}`).setAttribute("aria-label",
        `Paths of ${name} up to round ${round}; the distance to the optimum is ${shown(curves[i][round])}.`);
    });
    find("chart").innerHTML = chart(curves, round);
    find("chart").setAttribute("aria-label", `Distance to the optimum after ${ROUNDS} rounds: `
      + names.map((name, i) => `${name} ${shown(curves[i][ROUNDS])}`).join(", "));
    find("round").value = round;
    find("round-shown").textContent = step ? `${round}, step ${step} of ${K}` : round;
    find("said").textContent = `After ${round} rounds the distance to the optimum is `
      + `${names.map((name, i) => `${shown(curves[i][round])} with ${name}`).join(", ")}.`;
  }

  function compute() {
    const { h, K, eta } = settings();
    find("h-shown").textContent = h.toFixed(2);
    find("K-shown").textContent = K;
    find("eta-shown").textContent = eta;
    find("eta").setAttribute("aria-valuetext", eta);
    step = Math.min(step, K);
    paths = [0, 1].map((i) => trajectory(find(`method-${i}`).value, { h, K, eta }));
    draw();
  }

  function advance(wholeRound) {
    if (round < ROUNDS) {
      if (wholeRound || step === settings().K) [round, step] = [round + 1, 0];
      else step += 1;
    }
    draw();
  }

  function stop() {
    clearTimeout(timer);
    timer = null;
    find("play").textContent = "Play";
    find("said").setAttribute("aria-live", "polite");
  }

  function play() {
    const stepwise = round < STEPWISE && !still.matches;
    timer = setTimeout(() => {
      advance(!stepwise);
      if (round < ROUNDS) play();
      else stop();
    }, stepwise ? Math.max(900 / (settings().K + 1), 30) : still.matches ? 700 : 200);
  }

  function jump(to) {
    stop();
    [round, step] = [to, 0];
    draw();
  }

  for (const id of ["h", "K", "eta", "method-0", "method-1"]) find(id).addEventListener("input", compute);
  find("round").addEventListener("input", () => jump(Number(find("round").value)));
  find("step").addEventListener("click", () => { stop(); advance(false); });
  find("next").addEventListener("click", () => { stop(); advance(true); });
  find("again").addEventListener("click", () => jump(0));
  find("play").addEventListener("click", () => {
    if (timer !== null) return stop();
    if (round === ROUNDS) jump(0);
    find("play").textContent = "Pause";
    find("said").setAttribute("aria-live", "off");
    play();
  });
  compute();
}

if (typeof document !== "undefined") start(document.getElementById("drift"));
