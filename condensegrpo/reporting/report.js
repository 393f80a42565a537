// The report of a run: diagrams of every metric, the trajectories behind a point, and the configuration.

const HEIGHT = 204, LEFT = 46, RIGHT = 10, TOP = 8, BOTTOM = 36;
const COLOURS = 6; // of page.css
// Marks of evaluations as a letter and as a path around the origin: one more than colours, so that 42 lines differ.
const MARKS = [["●", "M-3.2 0a3.2 3.2 0 1 0 6.4 0a3.2 3.2 0 1 0-6.4 0"], ["■", "M-3-3h6v6h-6Z"], ["▲", "M0-4L4 3H-4Z"], ["◆", "M0-4L4 0L0 4L-4 0Z"],
  ["▼", "M0 4L4-3H-4Z"], ["✚", "M-1-4h2v3h3v2h-3v3h-2v-3h-3v-2h3Z"], ["◀", "M-4 0L3-4V4Z"]];
const NEAR = 16; // pixels within which a click means a point of an evaluation
const bases = Object.keys(data.metrics);
const diagrams = []; // those on the page, each with draw() and point(step)
let smoothing = "auto";

/** Steps and values of a key, with its interval if it has one; null: not measured. */
function curve(key) {
  if (!(key in data.curves)) return null;
  const [grid, values] = data.curves[key];
  const bound = (name) => {
    const other = data.curves[`${key}_${name}`];
    return other && other[1].length === values.length ? other[1] : null;
  };
  return { steps: data.grids[grid], values, low: bound("low"), high: bound("high") };
}

function meanBefore(values, window) {
  return values.map((value, end) => {
    const known = values.slice(Math.max(0, end + 1 - window), end + 1).filter((each) => each !== null);
    return value === null || !known.length ? null : known.reduce((sum, each) => sum + each, 0) / known.length;
  });
}

/** The index of the step nearest to `step` in ascending steps. */
function nearest(steps, step) {
  let best = 0;
  steps.forEach((each, index) => {
    if (Math.abs(each - step) < Math.abs(steps[best] - step)) best = index;
  });
  return best;
}

function ticks(low, high, most) {
  const raw = (high - low) / most || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const size = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= raw);
  const result = [];
  for (let tick = Math.ceil(low / size - 1e-9) * size; tick <= high + size * 1e-9; tick += size) result.push(Number(tick.toPrecision(10)));
  return result;
}

function rangeOf(numbers) {
  const known = numbers.filter((value) => value !== null);
  return known.length ? [known.reduce((a, b) => Math.min(a, b)), known.reduce((a, b) => Math.max(a, b))] : [0, 1];
}

const firstStep = Math.min(...data.grids.map((steps) => steps[0]));
const lastStep = Math.max(firstStep + 1, ...data.grids.map((steps) => steps.at(-1)));

/** A diagram of some lines [key, label]; hovering shows values, a click the trajectories of the step. */
function diagram(title, unit, keys, removed) {
  const lines = keys
    .map(([key, label], index) => ({ key, label, index, evaluation: key.startsWith("eval/") ? label : null, shown: true, ...curve(key) }))
    .filter((line) => line.steps !== undefined);
  const steps = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  const drawing = svg("svg", { role: "img", "aria-label": `${title}, ${unit}, over optimiser steps` });
  const tip = h("div", { class: "tip", hidden: true });
  const legend = h("div", { class: "legend" }, lines.map(entry));
  const close = removed && h("button", { type: "button", class: "quiet push", title: `remove ${title}`, onclick: removed }, "×");
  const caption = h("figcaption", {}, h("b", {}, title), h("span", { class: "dim", title: unit }, lines.some((line) => line.low) ? `${unit}, with 95 % intervals` : unit), close);
  const node = h("figure", { tabindex: "0", onkeydown: keyed, onblur: leave }, caption, drawing, legend, tip);
  let x, y, cursor = null, at = null; // the scales; the mark of the step that is pointed at, and that step

  function entry(line) {
    const swatch = h("span", { class: "swatch", "data-mark": line.evaluation === null ? "" : MARKS[line.index % MARKS.length][0] });
    swatch.style.color = `var(--c${line.index % COLOURS})`;
    const toggle = () => {
      line.shown = !line.shown;
      button.setAttribute("aria-pressed", line.shown);
      draw();
    };
    const button = h("button", { type: "button", "aria-pressed": "true", onclick: toggle }, swatch, line.label);
    return button;
  }

  function draw() {
    const width = Math.max(200, drawing.clientWidth || 300);
    const shown = lines.filter((line) => line.shown);
    let [low, high] = rangeOf(shown.flatMap((line) => [...line.values, ...(line.low ?? []), ...(line.high ?? [])]));
    if (unit.startsWith("share")) [low, high] = [Math.min(0, low), Math.max(1, high)];
    else if (low >= 0) low = 0;
    if (high === low) high = low + 1;
    x = (step) => LEFT + ((step - firstStep) / (lastStep - firstStep)) * (width - LEFT - RIGHT);
    y = (value) => HEIGHT - BOTTOM - ((value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    drawing.replaceChildren(...axes(low, high, width), ...shown.flatMap(marks));
    cursor = null;
    if (at !== null) point(at, false);
  }

  function axes(low, high, width) {
    const rows = ticks(low, high, 4).flatMap((tick) => [
      svg("line", { class: "rule", x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick) }),
      svg("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, digits(tick)),
    ]);
    const columns = ticks(firstStep, lastStep, width / 70).filter(Number.isInteger).map((tick) =>
      svg("text", { x: x(tick), y: HEIGHT - 20, "text-anchor": "middle" }, digits(tick)));
    columns.push(svg("text", { x: (LEFT + width - RIGHT) / 2, y: HEIGHT - 5, "text-anchor": "middle" }, "optimiser steps"));
    const changed = data.changes.filter((change) => change.learned && change.first_step > firstStep).map((change) =>
      svg("line", { class: "changed", x1: x(change.first_step - 0.5), x2: x(change.first_step - 0.5), y1: TOP, y2: HEIGHT - BOTTOM },
        svg("title", {}, `from step ${change.first_step} on: ${change.text}`)));
    return [...rows, ...columns, ...changed];
  }

  function marks(line) {
    const colour = `var(--c${line.index % COLOURS})`;
    const path = (values, settings) => {
      const parts = [];
      values.forEach((value, index) => {
        if (value !== null) parts.push(`${index && values[index - 1] !== null ? "L" : "M"}${x(line.steps[index]).toFixed(1)} ${y(value).toFixed(1)}`);
      });
      return svg("path", { d: parts.join(""), fill: "none", stroke: colour, "stroke-width": 1.8, ...settings });
    };
    const known = (index) => (line.values[index] ?? null) !== null;
    const marksWhere = (drawn) => line.values.map((value, index) => known(index) && drawn(index) &&
      svg("path", { class: "mark", d: MARKS[line.index % MARKS.length][1], transform: `translate(${x(line.steps[index])} ${y(value)}) scale(${Math.max(0.7, 1.6 - 0.2 * line.index)})`, fill: colour }));
    if (line.evaluation === null) {
      const window = windowOf(line.values.length);
      const alike = lines.filter((each) => each.evaluation === null);
      const gaps = alike.indexOf(line) * 5; // a line that is equal to the one below shows it
      return [window > 1 && alike.length === 1 && path(line.values, { "stroke-width": 1, opacity: 0.3 }), path(meanBefore(line.values, window), gaps ? { "stroke-dasharray": `8 ${gaps}` } : {}), ...marksWhere((index) => !known(index - 1) && !known(index + 1))].filter(Boolean);
    }
    const band = line.low && line.evaluation === "held-out"
      ? [svg("polygon", { class: "band", opacity: 0.16, fill: colour, points: [...line.steps.map((step, index) => [step, line.low[index]]), ...line.steps.map((step, index) => [step, line.high[index]]).reverse()].map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join(" ") })]
      : line.low ? line.steps.map((step, index) => svg("line", { class: "band", stroke: colour, x1: x(step), x2: x(step), y1: y(line.low[index]), y2: y(line.high[index]) })) : [];
    return [...band, path(line.values, { "stroke-dasharray": "5 3", "stroke-dashoffset": 3 * line.index }), ...marksWhere(() => true).filter(Boolean)];
  }

  /** Mark a step in this diagram; `full`: with the values beside it. */
  function point(step, full) {
    cursor?.remove();
    at = step;
    tip.hidden = !full || step === null;
    if (step === null || !steps.length) return;
    const left = x(steps[nearest(steps, step)]);
    cursor = svg("line", { class: "cursor", x1: left, x2: left, y1: TOP, y2: HEIGHT - BOTTOM });
    drawing.append(cursor);
    if (!full) return;
    tip.replaceChildren(h("b", {}, `step ${digits(step)}`), h("table", {}, lines.filter((line) => line.shown).map((line) => valueRow(line, step))));
    const box = node.getBoundingClientRect(), mark = drawing.getBoundingClientRect();
    const most = root.getBoundingClientRect().right - box.left - tip.offsetWidth; // where it still fits the page
    const narrow = box.width < tip.offsetWidth * 1.6 && most < left + 12; // it would hide what is pointed at
    tip.style.left = `${narrow ? Math.min(0, most) : left + 12 > most ? left - 12 - tip.offsetWidth : left + 12}px`;
    tip.style.top = `${mark.top - box.top + (narrow ? HEIGHT : TOP)}px`;
  }

  function valueRow(line, step) {
    let index = line.steps.length - 1; // an evaluation counts until the next one
    while (index >= 0 && line.steps[index] > step) index -= 1;
    if (index < 0) return h("tr", {}, h("td", {}, line.label), h("td", {}, "–"));
    const interval = line.low ? ` [${digits(line.low[index])}, ${digits(line.high[index])}]` : "";
    const since = line.steps[index] === step ? "" : ` at ${digits(line.steps[index])}`;
    return h("tr", {}, h("td", {}, line.label), h("td", {}, h("b", {}, digits(line.values[index])), interval, h("span", { class: "dim" }, since)));
  }

  function pointed(event) {
    const left = ((event.clientX - drawing.getBoundingClientRect().left) / drawing.clientWidth) * Math.max(200, drawing.clientWidth);
    return steps[nearest(steps.map(x), left)];
  }

  function clicked(event) {
    const box = drawing.getBoundingClientRect();
    const [left, top] = [event.clientX - box.left, event.clientY - box.top];
    let best = { distance: NEAR, step: pointed(event), evaluation: null };
    for (const line of lines.filter((each) => each.shown && each.evaluation !== null)) {
      line.steps.forEach((step, index) => {
        const distance = Math.hypot(x(step) - left, y(line.values[index] ?? Infinity) - top);
        if (distance < best.distance) best = { distance, step, evaluation: line.evaluation };
      });
    }
    show(best.step, best.evaluation, true);
  }

  function keyed(event) {
    if (event.target !== node || !["ArrowLeft", "ArrowRight", "Enter"].includes(event.key)) return;
    event.preventDefault();
    const index = at === null ? -1 : nearest(steps, at);
    if (event.key !== "Enter") hover(steps[Math.max(0, Math.min(steps.length - 1, index + (event.key === "ArrowLeft" ? -1 : 1)))]);
    else if (at !== null) show(at, null, true);
  }

  function hover(step) {
    diagrams.forEach((other) => other.point(step, other.node === node));
  }

  function leave() {
    diagrams.forEach((other) => other.point(null, false));
  }

  drawing.addEventListener("pointermove", (event) => hover(pointed(event)));
  drawing.addEventListener("pointerleave", leave);
  drawing.addEventListener("click", clicked);
  const own = { node, draw, point };
  new ResizeObserver(draw).observe(drawing);
  diagrams.push(own);
  return node;
}

function windowOf(count) {
  return smoothing === "auto" ? Math.max(1, Math.floor(count / 12)) : Number(smoothing);
}

function discard(node) {
  diagrams.splice(diagrams.findIndex((each) => each.node === node), 1);
  node.remove();
}

const grid = h("div", { class: "grid", id: "diagrams" });
const added = new Map(); // metric: its diagram, of those that the reader chose

/** Add the diagram of a metric, or remove it. */
function choose(metric, wanted = !added.has(metric)) {
  if (!wanted && added.has(metric)) {
    discard(added.get(metric));
    added.delete(metric);
  } else if (wanted && !added.has(metric) && bases.includes(metric)) {
    const node = diagram(metric, "", data.metrics[metric], () => choose(metric, false));
    added.set(metric, node);
    grid.prepend(node);
  }
  setAddress({ metrics: [...added.keys()].join(",") });
}

/** The table of every metric; a name adds its diagram. */
function metricTable() {
  const rows = bases.flatMap((metric) => data.metrics[metric].map(([key, label]) => [metric, label, curve(key)])).filter(([, , line]) => line);
  const cell = (line, index) => h("td", {}, digits(line.values.at(index)), line.low && h("span", { class: "dim" }, ` [${digits(line.low.at(index))}, ${digits(line.high.at(index))}]`));
  const body = h("tbody", {}, rows.map(([metric, label, line]) =>
    h("tr", { "data-search": `${metric} ${label}`.toLowerCase() },
      h("td", {}, h("button", { type: "button", onclick: () => { choose(metric, true); added.get(metric).scrollIntoView({ block: "center" }); } }, metric)),
      h("td", {}, label), cell(line, 0), cell(line, -1), h("td", {}, line.steps.length > 1 ? `${line.steps[0]}–${line.steps.at(-1)}` : line.steps[0]))));
  const head = h("thead", {}, h("tr", {}, ["metric", "of", "first", "last", "steps"].map((name) => h("th", {}, name))));
  return filtered("metrics", "search metrics", h("table", {}, head, body), body);
}

/** A table under a search box that hides the rows without the words. */
function filtered(id, label, table, body) {
  const filter = () => {
    const words = box.value.toLowerCase().split(/\s+/);
    for (const row of body.rows) row.hidden = !words.every((word) => row.dataset.search.includes(word));
  };
  const box = h("input", { type: "search", placeholder: label, "aria-label": label, oninput: filter });
  return [h("div", { class: "tools" }, box), h("div", { class: "scroll", id }, table)];
}

function settings(id, label, pairs) {
  const body = h("tbody", {}, pairs.map(([key, value]) => h("tr", { "data-search": `${key} ${value}`.toLowerCase() }, h("td", {}, key), h("td", {}, value))));
  return filtered(id, label, h("table", { class: "settings" }, body), body);
}

const samples = h("section", { id: "trajectories" });

/** The stored trajectories of a step: of its training batch, or of an evaluation. */
function show(step, evaluation, scroll) {
  const ofKind = data.samples.filter((each) => each.evaluation === evaluation);
  const kind = ofKind.length ? ofKind : data.samples;
  if (!kind.length) return;
  const chosen = kind[nearest(kind.map((each) => each.step), step)];
  const index = kind.indexOf(chosen);
  const move = (by) => kind[index + by] && show(kind[index + by].step, chosen.evaluation, false);
  const order = [null, "held-out", ...data.variants];
  const names = [...new Set(data.samples.map((each) => each.evaluation))].sort((a, b) => order.indexOf(a) - order.indexOf(b));
  const tabs = names.map((name) => h("button", { type: "button", "aria-pressed": String(name === chosen.evaluation), onclick: () => show(chosen.step, name, false) }, name ?? "training"));
  const where = chosen.evaluation === null ? `step ${digits(chosen.step)}` : `after ${counted(chosen.step, "step", "steps")}`;
  const other = chosen.step === step ? "" : ` (the page holds no trajectories of step ${digits(step)}; this is the nearest step that it holds)`;
  samples.replaceChildren(
    h("h2", {}, `Trajectories: ${chosen.evaluation ?? "training"}, ${where}`),
    h("div", { class: "tools" }, tabs,
      h("span", {}, h("button", { type: "button", "aria-label": "earlier", disabled: index === 0, onclick: () => move(-1) }, "◀"), " ", where, " ", h("button", { type: "button", "aria-label": "later", disabled: index === kind.length - 1, onclick: () => move(1) }, "▶"))),
    h("p", { class: "dim" }, `${chosen.trajectories.length} of ${counted(chosen.count, "trajectory", "trajectories")}${other}. All of them: `, command(`condensegrpo inspect ${data.folder} --step ${chosen.step}${chosen.evaluation === null ? "" : ` --evaluation '${chosen.evaluation}'`}`)),
    ...chosen.trajectories.map((trajectory, number) => sample(trajectory, number === 0)));
  setAddress({ step: chosen.step, evaluation: chosen.evaluation });
  if (scroll) samples.scrollIntoView({ block: "start" });
}

function sample(trajectory, open) {
  const { figures } = trajectory;
  const parts = [figures.id, `score ${digits(figures.total)}`, counted(figures.replies, "turn", "turns"), `largest context ${counted(figures.context_tokens, "token", "tokens")}, ${digits(figures.prompt_tokens)} read in all, price ${digits(trajectory.price)}`, figures.stop.replaceAll("_", " ")];
  const texts = [["question", trajectory.question], ["ground truth", trajectory.ground_truth], ["answer", trajectory.answer]].filter(([, text]) => text !== null);
  const node = h("details", { class: "sample", open, ontoggle: fillTurns },
    h("summary", {}, verdictOf(trajectory), h("span", { class: "dim" }, trajectory.chosen), parts.map((text) => h("span", {}, text)), h("span", { class: "asked" }, withPictures(texts.map(([name, text]) => `${name}: ${text}`).join(" · "), data.pictures))));
  function fillTurns() { // only when it is opened: long trajectories are many elements
    if (!node.open || node.children.length > 1) return;
    const failure = trajectory.detail && h("div", { class: "turn" }, h("div", { class: "about" }, "failure"), h("pre", { class: "bad" }, trajectory.detail));
    node.append(...[failure, ...trajectory.turns.flatMap(turnAfterGap)].filter(Boolean));
  }
  const turnAfterGap = (each, index) => {
    const missing = each.turn - (index ? trajectory.turns[index - 1].turn + 1 : 0);
    return [missing > 0 && h("div", { class: "turn" }, h("div", {}), h("div", { class: "dim" }, `${counted(missing, "turn", "turns")} left out: the command above shows all`)), turn(each)];
  };
  if (open) fillTurns();
  return node;
}

function turn(each) {
  const letters = { k: ["", "kept"], d: ["dropped", "dropped"], r: ["rewritten", "rewritten"], "-": ["none", "no unit"] };
  const strip = each.strip && h("div", { class: "strip" }, [...each.strip].map((letter, index) => h("i", { class: letters[letter][0], title: `turn ${index}: ${letters[letter][1]}` })));
  return h("div", { class: "turn" },
    h("div", { class: "about" }, h("div", {}, `turn ${each.turn}${each.kind === "act" ? "" : `, ${each.kind}`}`), `context ${digits(each.context_tokens)}, reply ${digits(each.output_tokens)}`, each.advantage !== null && h("div", {}, `advantage ${each.advantage > 0 ? "+" : ""}${digits(each.advantage)}`), each.condensed && h("div", {}, each.condensed), strip),
    h("div", {}, h("pre", {}, each.reply), each.observations.map((text) => h("pre", { class: "observed" }, withPictures(text, data.pictures)))));
}

function figures() {
  const cards = [];
  for (const [key, label] of [...(data.metrics.success ?? []).slice(1), ["eval/context_tokens", "largest context, held-out"], ["eval/prompt_tokens", "tokens read, held-out"], ["eval/prompt_tokens_uncached", "tokens read with a prefix cache, held-out"], ["eval/price", "price of all calls, in tokens read, held-out"], ["success", "training"]]) {
    const line = curve(key);
    if (!line || cards.length >= 8) continue;
    const name = key.endsWith("success") ? `success, ${label}` : label;
    const interval = line.low ? h("span", {}, `[${digits(line.low.at(-1), 3)}, ${digits(line.high.at(-1), 3)}]`) : null;
    cards.push(h("div", {}, h("span", {}, name), h("b", {}, `${digits(line.values[0], 3)} → ${digits(line.values.at(-1), 3)}`), h("span", {}, `step ${line.steps[0]} → ${line.steps.at(-1)} `), interval));
  }
  return h("div", { class: "figures" }, cards);
}

function changes() {
  if (!data.changes.length) return null;
  return [h("p", {}, "Changed when the run was resumed:"), h("ul", {}, data.changes.map((change) => h("li", {}, `from step ${change.first_step} on: ${change.text}${change.learned ? ", which changes what is learned" : ""}`)))];
}

function start() {
  const windows = h("select", { onchange: () => { smoothing = windows.value; diagrams.forEach((each) => each.draw()); } },
    [["auto", "a twelfth of the run"], ["1", "off"], ["5", "5 steps"], ["20", "20 steps"], ["100", "100 steps"]].map(([value, label]) => h("option", { value }, label)));
  const picker = h("input", { list: "names", placeholder: `add one of ${bases.length} metrics`, "aria-label": "add a metric", onchange: () => { if (bases.includes(picker.value)) { choose(picker.value, true); picker.value = ""; } } });
  root.replaceChildren(
    h("header", {}, h("h1", {}, data.name), h("span", { class: "dim" }, data.state), h("span", { class: "push" }, schemeButton())),
    figures(), ...(changes() ?? []),
    h("div", { class: "tools" }, picker, h("datalist", { id: "names" }, bases.map((name) => h("option", { value: name }))), h("label", { class: "dim" }, "running mean in training: ", windows)),
    grid, samples,
    h("h2", {}, "Every metric, first and last"), ...metricTable(),
    h("h2", {}, "Configuration"), ...settings("configuration", "search the configuration", data.configuration),
    h("h2", {}, "Environment"), ...settings("environment", "search the environment", data.environment));
  grid.append(...data.diagrams.map((each) => diagram(each.title, each.unit, each.lines)));
  open();
}

/** What the address names. */
function open() {
  const named = address();
  (named.get("metrics") ?? "").split(",").filter(Boolean).forEach((metric) => choose(metric, true));
  const last = data.samples.at(-1);
  if (named.has("step")) show(Number(named.get("step")), named.get("evaluation"), true);
  else if (last) {
    show(last.step, last.evaluation, false);
    setAddress({ step: null, evaluation: null });
  }
}

start();
