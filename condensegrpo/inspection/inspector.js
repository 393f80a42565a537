// The trajectories of a run: groups, siblings and turns on the left, what the policy saw and was trained with on the right.

const TABS = ["shown", "full", "reply", "credit", "raw"];
const MOST_TOKENS = 2000, MOST_GROUPS = 1000, MOST_LETTERS = 200_000, MOST_OF_FIGURE = 1000; // that are drawn
const STATUSES = { k: "kept", d: "dropped", r: "rewritten", "-": "no unit" };
const KEYS = [
  ["[ ]", "step before, step after"], ["e", "training or evaluations"], ["↑ ↓", "group"], ["h l", "sibling"], ["j k", "turn"],
  ["1 … 5", "shown, full, reply, credit, raw"], ["t", "token ids"], ["v", "next ready view"],
  ["/", "search all steps: letters in order (qck finds quick), and texts as they stand"],
  ["d", "compare with the next sibling, from the first difference"], ["p", "this problem in all steps"], ["y", "copy the command that shows this"], ["Esc", "all groups"], ["f", "follow a live run: only on a terminal, condensegrpo inspect RUN"], ["?", "these keys"],
];
let at = { batch: 0, group: 0, sibling: 0, turn: 0 }; // indices in the lists
let tab = "shown", ids = false, query = "", view = "", problem = null;
let search = searchOf(""), fits = new Map(); // of the query; by trajectory, how well it fits

const batch = () => data.batches[at.batch];
const group = () => batch().groups[at.group];
const sibling = () => group().siblings[at.sibling];
const signed = (value) => (value === null ? "–" : `${value > 0 ? "+" : ""}${digits(value, 3)}`);

function matches(trajectory) {
  return (!view || trajectory.views.includes(view)) && fit(trajectory) !== null;
}

/** How well a trajectory fits the query: less is better, null not at all. */
function fit(trajectory) {
  if (!fits.has(trajectory)) fits.set(trajectory, search.fit(trajectory));
  return fits.get(trajectory);
}

/** The index of the sibling that fits best; 0 if none does. */
function bestOf(one) {
  const indices = one.siblings.map((each, index) => [matches(each) ? fit(each) : null, index]).filter(([value]) => value !== null);
  return indices.reduce((best, each) => (each[0] < best[0] ? each : best), indices[0] ?? [0, 0])[1];
}

/** The groups to list: of the batch, or of all batches while one searches or follows a problem. */
function listed() {
  const wide = query || view || problem !== null;
  const found = data.batches.flatMap((each, index) => (wide || index === at.batch ? each.groups.map((one, number) => ({ index, number, one })) : []))
    .filter(({ one }) => (problem === null || one.problem === problem) && one.siblings.some(matches));
  return query ? found.map((each) => [fit(each.one.siblings[bestOf(each.one)]), each]).sort(([a], [b]) => (a === b ? 0 : a - b)).map(([, each]) => each) : found;
}

/** Go to a batch, group, sibling or turn; what is not named starts at its first. */
function go(next, scroll = true) {
  const order = ["batch", "group", "sibling", "turn"];
  const first = order.findIndex((name) => name in next);
  order.forEach((name, index) => {
    const size = [() => data.batches, () => batch().groups, () => group().siblings, () => sibling().turns][index]().length;
    const wanted = name in next ? next[name] : index < first ? at[name] : name === "turn" && "sibling" in next ? at.turn : 0;
    at = { ...at, [name]: Math.max(0, Math.min(size - 1, wanted)) };
  });
  draw(scroll);
}

function draw(scroll = true) {
  const { figures } = sibling();
  setAddress({ step: batch().step, evaluation: batch().evaluation, t: figures.id, turn: at.turn, tab: tab === "shown" ? null : tab });
  chooser.value = String(at.batch);
  const all = listed();
  const ofGroup = all.slice(0, MOST_GROUPS).map(groupItem);
  if (all.length > MOST_GROUPS) ofGroup.push(h("p", { class: "dim" }, `${digits(all.length - MOST_GROUPS)} more groups; search or choose a view`));
  groupPane.replaceChildren(h("h2", {}, `${counted(all.length, "group", "groups")}${view ? `: ${data.ready_views.find(([name]) => name === view)[1]}` : ""}${problem === null ? "" : `: problem ${problem}`}`), ...ofGroup);
  siblingPane.replaceChildren(
    h("div", {}, h("h2", {}, `siblings of ${group().id}${group().exclusion ? `: ${group().exclusion}` : ""}`), group().siblings.map(siblingItem), leftOut()),
    h("div", {}, h("h2", {}, "turns"), sibling().turns.map(turnItem)));
  const tabs = TABS.map((name, index) => h("button", { type: "button", role: "tab", "aria-selected": String(name === tab), onclick: () => pick(name) }, `${index + 1} ${name}`));
  rightPane.replaceChildren(h("div", { class: "tabs", role: "tablist" }, tabs), h("div", { class: "pane", role: "tabpanel" }, head(), sibling().turns.length ? panes[tab]() : h("p", { class: "dim" }, "no turn was sampled")));
  if (scroll) for (const pane of [groupPane, siblingPane]) pane.querySelectorAll('[aria-current="true"]').forEach((item) => item.scrollIntoView({ block: "nearest" }));
}

function pick(name) {
  tab = name;
  draw(false);
}

function groupItem({ index, number, one }) {
  const bar = h("span", { class: "rate", title: `${digits(one.success, 3)} correct` }, h("i"));
  bar.firstChild.style.width = `${100 * one.success}%`;
  const current = index === at.batch && number === at.group;
  const wide = query || view || problem !== null;
  const first = wide ? bestOf(one) : 0;
  return h("button", { type: "button", class: "item", "aria-current": String(current), onclick: () => go({ batch: index, group: number, sibling: first }, false) },
    h("span", { class: "row" }, h("span", {}, wide ? `${data.batches[index].title} · ${one.id}` : one.id), bar),
    h("small", {}, [one.question, one.ground_truth === null ? null : `→ ${one.ground_truth}`].filter(Boolean).join(" ").slice(0, 160)),
    one.exclusion && h("small", { class: "warn" }, `○ ${one.exclusion}`));
}

function siblingItem({ figures }, index) {
  const parts = [`score ${digits(figures.score, 3)}`, figures.advantage === null ? null : `advantage ${signed(figures.advantage)}`, counted(figures.turns, "turn", "turns"), `context ${digits(figures.context)}`, `price ${digits(figures.price)}`, figures.stop.replaceAll("_", " ")];
  return h("button", { type: "button", class: "item", "aria-current": String(index === at.sibling), onclick: () => go({ sibling: index }, false) },
    h("span", { class: "row" }, h("span", {}, `#${figures.sample}`), verdictOf(figures)), h("small", {}, parts.filter(Boolean).join(" · ")));
}

function leftOut() {
  return group().left_out ? h("p", { class: "dim" }, `${counted(group().left_out, "sibling is", "siblings are")} not on this page`) : null;
}

function stripOf(letters) {
  return h("span", { class: "strip" }, [...letters].map((letter, index) => h("i", { class: letter === "-" ? "none" : letter, title: `turn ${index}: ${STATUSES[letter]}` })));
}

function turnItem(turn, index) {
  const stored = sibling().stored.turns[index];
  return h("button", { type: "button", class: "item", "aria-current": String(index === at.turn), onclick: () => go({ turn: index }, false) },
    h("span", { class: "row" }, h("span", {}, `turn ${index}${stored.kind === "condense" ? ", summary" : ""}${stored.frozen ? " by another writer" : ""}`), h("span", { class: "dim" }, turn.advantage === null ? "" : signed(turn.advantage))),
    h("small", {}, `context ${digits(turn.context.tokens)}${turn.context.grown ? ` (+${digits(turn.context.grown)} by condensing)` : ""} of ${digits(turn.context.budget)}, reply ${digits(stored.output_ids.length)}`), budgetBar(turn.context), stripOf(turn.strip));
}

function budgetBar(context) {
  const bar = h("span", { class: "budget" });
  for (const name of ["pinned", "kept", "rewritten", "newest"]) {
    const part = h("i", { class: name, title: `${name}: ${counted(context[name], "token", "tokens")}` });
    part.style.width = `${(100 * context[name]) / Math.max(context.budget, context.tokens, 1)}%`;
    bar.append(part);
  }
  return bar;
}

function head() {
  const { figures, stored } = sibling();
  const line = (name, text) => text !== null && text !== "" && h("span", {}, h("span", { class: "dim" }, `${name}: `), marked(text, true));
  const figure = [batch().title, sibling().turns.length ? `turn ${at.turn} of ${sibling().turns.length}` : null, `score ${digits(figures.score)}`, figures.stop.replaceAll("_", " ")];
  return h("div", { class: "about" }, h("p", {}, h("b", {}, figures.id), " ", verdictOf(figures), h("span", { class: "dim" }, ` ${figure.filter(Boolean).join(" · ")}`)),
    h("p", {}, line("question", figures.question)), h("p", {}, line("ground truth", figures.ground_truth), line("answer", figures.answer)), stored.detail && h("p", {}, line("detail", stored.detail)));
}

/** A text with what is searched for marked; of figures, which are searched by letters in order, `loosely`. */
function marked(whole, loosely = false) {
  const text = shortened(whole, loosely ? MOST_OF_FIGURE : MOST_LETTERS), parts = [];
  let end = 0;
  for (const [first, last] of search.parts(text, loosely)) {
    parts.push(text.slice(end, first), h("mark", {}, text.slice(first, last)));
    end = last;
  }
  return [...parts, text.slice(end)];
}

/** A message's text, marked, with its pictures in their places. */
function contentOf(text) {
  return withPictures(text, data.pictures, marked);
}

function shortened(text, most) {
  return text.length > most ? `${text.slice(0, most)}… (${digits(text.length - most)} more characters)` : text;
}

function message(label, kind, ...content) {
  return h("div", { class: `message ${kind}` }, h("b", {}, label), h("pre", {}, ...content));
}

const messagesOf = (stored, indices) => indices.map((index) => stored.messages[index]);
const prompted = (stored, turn) => messagesOf(stored, turn.context);

/** What the pages say of the rows of the strip. */
function condensed() {
  const { condensation } = sibling().stored.turns[at.turn];
  const { context } = sibling().turns[at.turn];
  if (!condensation) return h("p", { class: "dim" }, at.turn ? `The prompt continues the last one: ${counted(context.tokens, "token", "tokens")}.` : `The first prompt: ${counted(context.tokens, "token", "tokens")}.`);
  return h("p", { class: "dim" }, `${condensation.condenser} (${condensation.reason}): ${digits(condensation.tokens_before)} → ${counted(condensation.tokens_after, "token", "tokens")}`);
}

const panes = {
  shown() {
    const { stored } = sibling();
    return h("div", {}, condensed(), prompted(stored, stored.turns[at.turn]).map((each) => message(each.name ? `${each.role} ${each.name}` : each.role, each.role, contentOf(each.content))), observed());
  },

  full() {
    const { stored, turns, differences } = sibling();
    return h("div", {}, condensed(), turns[at.turn].pieces.map(([status, turn, index, rewriting]) => {
      const each = stored.messages[index];
      const label = `${each.role}${turn === null ? "" : `, turn ${turn}`}: ${status}`;
      const content = rewriting === null ? contentOf(each.content) : differences[rewriting].map(([change, text]) => (change === "same" ? shortened(text, MOST_LETTERS) : h(change === "removed" ? "del" : "ins", {}, contentOf(text))));
      return message(label, `${each.role} ${status}`, content);
    }));
  },

  reply() {
    const { stored, turns } = sibling();
    const turn = stored.turns[at.turn], credit = turns[at.turn].advantage;
    const side = credit > 0 ? "up" : credit < 0 ? "down" : "";
    const measured = turn.logprobs.length === turn.output_ids.length; // a sampler of texts has no log-probabilities
    const known = turn.output_ids.length === 0 || turn.output_ids.some((id) => data.tokens[id] !== null);
    const tokens = turn.output_ids.slice(0, MOST_TOKENS).map((id, index) => {
      const title = measured ? `id ${id}, log-probability ${digits(turn.logprobs[index], 3)}` : `id ${id}`;
      const token = h("span", { class: side, title: `${title}${credit === null ? "" : `, advantage ${signed(credit)}`}` }, data.tokens[id] ?? `⟨${id}⟩`);
      if (measured) token.style.background = `color-mix(in srgb, var(--c1) ${Math.round(70 * Math.min(1, -turn.logprobs[index] / 3))}%, transparent)`;
      return ids ? [token, h("sub", {}, String(id))] : [token];
    });
    const legend = [
      measured ? "background: surprise, from none to 3 nats" : "the sampler returned no log-probabilities",
      credit && (side === "up" ? "one line below: the advantage is positive" : "two lines below: the advantage is negative"),
      !known && "no tokenizer was found: ids only",
    ].filter(Boolean).join("; ");
    return h("div", {}, h("div", { class: "tokens" }, tokens), turn.output_ids.length > MOST_TOKENS && h("p", { class: "warn" }, `${digits(turn.output_ids.length - MOST_TOKENS)} more tokens`), h("p", { class: "dim" }, legend), message("as text", "assistant", marked(stored.messages[turn.reply].content)), observed());
  },

  credit() {
    const { figures, turns } = sibling();
    const turn = turns[at.turn];
    const rows = turn.credit.map(([name, formula, value]) => h("tr", {}, h("td", {}, name), h("td", {}, formula), h("td", {}, value)));
    return h("table", {}, rows, turn.version === null ? null : h("tr", {}, h("td", {}, "policy"), h("td", {}, "sampled after"), h("td", {}, counted(turn.version, "step", "steps"))), figures.handling && h("tr", {}, h("td", {}, "handling"), h("td", {}, ""), h("td", {}, figures.handling)));
  },

  raw() {
    const { turns, messages, ...rest } = sibling().stored;
    return h("div", {}, message(`turn ${at.turn}`, "", shortened(JSON.stringify(turns[at.turn], null, 1), MOST_LETTERS)), message("trajectory", "", shortened(JSON.stringify(rest, null, 1), MOST_LETTERS)));
  },
};

function observed() {
  const { stored } = sibling();
  const turn = stored.turns[at.turn];
  const after = messagesOf(stored, turn.observations);
  if (tab === "shown") after.unshift(stored.messages[turn.reply]);
  return after.length ? [h("p", { class: "dim" }, tab === "shown" ? "reply and what answered it" : "what answered it"), ...after.map((each) => message(each.name ? `${each.role} ${each.name}` : each.role, each.role, contentOf(each.content)))] : [];
}

let compared = { other: 0, turn: 0 }; // the sibling and the turn that are compared

/** Compare with another sibling, from the first turn that differs or from a turn. */
function compare(other, turn = sibling().first_differences[other]?.[0] ?? 0) {
  if (group().siblings.length < 2) return say("it has no sibling");
  compared = { other, turn };
  drawComparison();
  if (!comparing.open) comparing.showModal();
}

function drawComparison() {
  const sides = [sibling(), group().siblings[compared.other]];
  const [first, second] = sides.map(({ figures }) => figures.id);
  const [where, part] = sibling().first_differences[compared.other] ?? [];
  const turns = Math.max(...sides.map((side) => side.turns.length));
  compared.turn = Math.max(0, Math.min(turns - 1, compared.turn));
  const replies = sides.map((side) => side.stored.turns[compared.turn] && side.stored.messages[side.stored.turns[compared.turn].reply].content);
  setAddress({ with: second, turn: compared.turn });
  comparing.replaceChildren(
    h("h2", {}, `${first} and ${second}: ${part === undefined ? "equal" : `first difference: the ${part} of turn ${where}`}`),
    h("p", { class: "dim" }, `turn ${compared.turn} of ${turns} · h l sibling, j k turn, Esc closes`),
    h("div", { class: "sides" }, sides.map((side, index) => h("section", {}, comparedSide(side, commonLength(...replies))))));
}

function comparedSide(trajectory, common) {
  const { figures, stored } = trajectory;
  const turn = stored.turns[compared.turn];
  const about = h("p", {}, h("b", {}, figures.id), " ", verdictOf(figures), h("span", { class: "dim" }, ` score ${digits(figures.score)} · ${figures.stop.replaceAll("_", " ")} · ${counted(figures.turns, "turn", "turns")}`));
  if (!turn) return [about, h("p", { class: "warn" }, "it had ended before this turn")];
  const more = trajectory.turns[compared.turn];
  const shown = (each) => message(each.name ? `${each.role} ${each.name}` : each.role, each.role, shortened(each.content, MOST_LETTERS));
  const reply = shortened(stored.messages[turn.reply].content, MOST_LETTERS);
  return [about, h("p", { class: "dim" }, `context ${counted(more.context.tokens, "token", "tokens")}${more.advantage === null ? "" : `, advantage ${signed(more.advantage)}`}`),
    prompted(stored, turn).slice(-2).map(shown), message("reply", "assistant", reply.slice(0, common), h("mark", {}, reply.slice(common))),
    messagesOf(stored, turn.observations).map(shown)];
}

function commonLength(first = "", second = "") {
  let index = 0;
  while (index < Math.min(first.length, second.length) && first[index] === second[index]) index += 1;
  return first === second ? index : index && /[\ud800-\udbff]/.test(first[index - 1]) ? index - 1 : index; // never half a character
}

const otherSibling = (by) => {
  const many = group().siblings.length;
  compare((compared.other + by + many) % many);
};
const otherTurn = (by) => {
  compared.turn += by;
  drawComparison();
};
const comparedKeys = {
  h: () => otherSibling(-1), l: () => otherSibling(1), ArrowLeft: () => otherSibling(-1), ArrowRight: () => otherSibling(1),
  j: () => otherTurn(1), k: () => otherTurn(-1), d: () => comparing.close(), q: () => comparing.close(),
};

/** Copy the shell command that shows what the page shows. */
async function copyCommand() {
  const line = `${batch().command} --trajectory ${sibling().figures.id} --turn ${at.turn}`;
  try {
    await navigator.clipboard.writeText(line);
    say("copied");
  } catch {
    say(line);
  }
}

function say(text) {
  note.textContent = text;
  setTimeout(() => (note.textContent = ""), 4000);
}

/** Search for a text. */
function find(text) {
  [search, query, fits] = [searchOf(text), text.trim(), new Map()];
  restrict();
}

/** Restrict the list of groups, and go to its first if the current one is not in it. */
function restrict() {
  const all = listed();
  if (!all.length) {
    groupPane.replaceChildren(h("h2", {}, "0 groups"), h("p", { class: "dim" }, " nothing matches; Esc shows all groups"));
    return;
  }
  const kept = all.find(({ index, number }) => index === at.batch && number === at.group) ?? all[0];
  go({ batch: kept.index, group: kept.number, sibling: matches(sibling()) && kept.one === group() ? at.sibling : bestOf(kept.one) });
}

function clear() {
  [view, problem] = ["", null];
  box.value = chosenView.value = "";
  find("");
}

function moveGroup(by) {
  const all = listed();
  const next = all[all.findIndex(({ index, number }) => index === at.batch && number === at.group) + by];
  if (next) go({ batch: next.index, group: next.number, sibling: bestOf(next.one) });
}

/** Training or evaluations: the batch of the other kind that is nearest in steps. */
function otherKind() {
  const training = batch().evaluation === null;
  const others = data.batches.map((each, index) => ({ each, index })).filter(({ each }) => (each.evaluation === null) !== training);
  if (!others.length) return say(training ? "the page holds no evaluation" : "the page holds no training step");
  const distance = ({ each }) => Math.abs((each.step ?? 0) - (batch().step ?? 0));
  go({ batch: others.reduce((best, each) => (distance(each) < distance(best) ? each : best)).index });
}

function nextView() {
  const names = ["", ...data.ready_views.map(([name]) => name)];
  view = names[(names.indexOf(view) + 1) % names.length];
  chosenView.value = view;
  restrict();
}

function follow() {
  const followed = problem === null ? group().problem : null;
  clear(); // also groups without a match of the view or the search show what became of the problem
  problem = followed;
  restrict();
}

const ACTIONS = {
  "[": () => go({ batch: at.batch - 1 }), "]": () => go({ batch: at.batch + 1 }), e: otherKind,
  ArrowUp: () => moveGroup(-1), ArrowDown: () => moveGroup(1),
  h: () => go({ sibling: at.sibling - 1 }), l: () => go({ sibling: at.sibling + 1 }),
  j: () => go({ turn: at.turn + 1 }), k: () => go({ turn: at.turn - 1 }),
  t: () => { ids = !ids; pick("reply"); }, v: nextView, p: follow, y: copyCommand,
  d: () => compare((at.sibling + 1) % group().siblings.length), f: () => say("a page cannot follow a run: condensegrpo inspect RUN does, on a terminal"),
  "/": () => box.select(), "?": () => keys.showModal(), Escape: clear,
  ...Object.fromEntries(TABS.map((name, index) => [String(index + 1), () => pick(name)])),
};

function pressed(event) {
  if (event.target === box && event.key === "Enter") box.blur();
  if (event.target === box && event.key === "Escape") { box.blur(); clear(); }
  if (comparing.open && comparedKeys[event.key]) {
    event.preventDefault();
    comparedKeys[event.key]();
  }
  if (["INPUT", "SELECT"].includes(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey || keys.open || comparing.open) return;
  const action = ACTIONS[event.key];
  if (action) {
    event.preventDefault();
    action();
  }
}

const chooser = h("select", { "aria-label": "step or evaluation", onchange: () => go({ batch: Number(chooser.value) }) },
  data.batches.map((each, index) => h("option", { value: String(index) }, each.title)));
const box = h("input", { type: "search", placeholder: "search all texts (/)", "aria-label": "search all texts", oninput: () => find(box.value) });
const chosenView = h("select", { "aria-label": "ready view", onchange: () => { view = chosenView.value; restrict(); } },
  h("option", { value: "" }, "all trajectories"), data.ready_views.map(([name, title]) => h("option", { value: name }, title)));
const note = h("span", { class: "dim", role: "status" });
const keys = h("dialog", {}, h("table", {}, KEYS.map(([key, meaning]) => h("tr", {}, h("td", {}, h("code", {}, key)), h("td", {}, meaning)))), h("form", { method: "dialog" }, h("button", {}, "close")));
const comparing = h("dialog", { class: "wide", "aria-label": "two siblings", onclose: () => setAddress({ with: null }) });
const groupPane = h("section", { "aria-label": "groups" });
const siblingPane = h("section", { class: "halves", "aria-label": "siblings and turns" });
const rightPane = h("section", { "aria-label": "turn" });

function start() {
  root.replaceChildren(
    h("header", {}, h("h1", {}, data.name), chooser, chosenView, box, note,
      h("span", { class: "push" }, h("button", { type: "button", class: "quiet", onclick: () => keys.showModal() }, "? keys"), " ", schemeButton())),
    h("p", { class: "extent dim" }, data.extent),
    h("div", { class: "panes" }, groupPane, siblingPane, rightPane), keys, comparing);
  document.addEventListener("keydown", pressed);
  addEventListener("hashchange", open);
  open();
}

/** What the address names: #step=6&t=6/14/3&turn=4&tab=full. */
function open() {
  const named = address();
  if (TABS.includes(named.get("tab"))) tab = named.get("tab");
  const name = named.get("t");
  for (const [index, each] of data.batches.entries()) {
    if (named.has("step") && String(each.step) !== named.get("step")) continue;
    if (named.has("evaluation") ? each.evaluation !== named.get("evaluation") : name === null && named.has("step") && each.evaluation !== null) continue;
    for (const [number, one] of each.groups.entries()) {
      const member = name === null ? 0 : one.siblings.findIndex(({ figures }) => figures.id === name);
      if (member < 0) continue;
      go({ batch: index, group: number, sibling: member, turn: Number(named.get("turn") ?? 0) });
      const other = named.has("with") ? one.siblings.findIndex(({ figures }) => figures.id === named.get("with")) : -1;
      if (other >= 0) compare(other, at.turn);
      return;
    }
  }
  go({ batch: 0 });
  if (name !== null || named.has("step") || named.has("evaluation")) say(`the page does not hold ${name ?? "that step or evaluation"}`);
}

start();
