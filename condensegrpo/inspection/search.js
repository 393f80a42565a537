// What / finds, as on the terminal: letters in order in the figures, a text as it stands in a message, or = and a condition.

const GAP = 2; // letters between two of the query, at most
const MOST_MARKS = 200; // in one text
const TOKEN = /\s*(?:(?<number>\d+\.?\d*(?:e[+-]?\d+)?|\.\d+)|(?<text>'[^']*'|"[^"]*")|(?<word>[a-z_]\w*)|(?<sign>[=!<>]=|[<>()[\],-]))/iy;
const CONSTANTS = { True: 1, False: 0, None: null };

/** A text in small letters, as long as before. */
function folded(text) {
  return text.replaceAll("İ", "i").toLowerCase();
}

/** What a query means: `fit` of a trajectory (less is better, null: it does not match) and the `parts` of a text to mark. */
function searchOf(query) {
  const letters = folded(query.trim());
  if (!letters) return { fit: () => 0, parts: () => [] };
  if (letters.startsWith("=")) {
    const holds = condition(query.trim().slice(1));
    return { fit: (trajectory) => (holds(trajectory.figures) ? 0 : null), parts: () => [] };
  }
  return {
    fit({ figures, stored }) {
      const texts = [figures.id, figures.problem, figures.question, figures.ground_truth, figures.answer].filter(Boolean);
      const lengths = texts.map((text) => inOrder(folded(text), letters)).filter(Boolean).map(([first, end]) => end - first);
      if (lengths.length) return Math.min(...lengths);
      return stored.messages.some((message) => folded(message.content).includes(letters)) ? Infinity : null;
    },
    parts(text, loosely) {
      const small = folded(text), parts = [];
      for (let position = small.indexOf(letters); position >= 0 && parts.length < MOST_MARKS; position = small.indexOf(letters, position + letters.length)) parts.push([position, position + letters.length]);
      return parts.length || !loosely ? parts : [inOrder(small, letters)].filter(Boolean);
    },
  };
}

/** The shortest part [first, end] of a text that has the letters of a query in order, at most GAP others between two. */
function inOrder(text, query) {
  let ends = new Map(); // where the letters so far end: the latest position at which they begin
  for (let position = text.indexOf(query[0]); position >= 0; position = text.indexOf(query[0], position + 1)) ends.set(position + 1, position);
  for (let letter = 1; letter < query.length && ends.size; letter += 1) {
    const longer = new Map();
    for (const [end, first] of ends) {
      for (let position = end; position <= end + GAP; position += 1) {
        if (text[position] === query[letter]) longer.set(position + 1, Math.max(first, longer.get(position + 1) ?? 0));
      }
    }
    ends = longer;
  }
  return [...ends].map(([end, first]) => [first, end]).reduce((best, part) => (best === null || part[1] - part[0] < best[1] - best[0] ? part : best), null);
}

/** The function of a condition, in the language of --where, with truth values as numbers; an Error says what is wrong with it. */
function condition(text) {
  const tokens = tokensOf(text);
  const take = (...texts) => (texts.includes(tokens[0]?.text) && tokens[0].kind !== "text" ? tokens.shift().text : null);
  const whole = either();
  if (tokens.length) throw Error(`condition: did not expect ${tokens[0].text}`);
  return whole;

  function either() {
    return joined(both, "or", (parts, holds) => parts.some(holds));
  }

  function both() {
    return joined(negation, "and", (parts, holds) => parts.every(holds));
  }

  function joined(part, word, hold) {
    const parts = [part()];
    while (take(word)) parts.push(part());
    return parts.length === 1 ? parts[0] : (fields) => Number(hold(parts, (each) => each(fields)));
  }

  function negation() {
    if (!take("not")) return comparison();
    const part = negation();
    return (fields) => Number(!part(fields));
  }

  function comparison() {
    const sides = [value()], signs = [];
    for (let sign = compareSign(); sign; sign = compareSign()) {
      signs.push(sign);
      sides.push(value());
    }
    if (!signs.length) return sides[0];
    return (fields) => {
      const values = sides.map((side) => side(fields));
      return Number(signs.every((sign, position) => compares(sign, values[position], values[position + 1])));
    };
  }

  function compareSign() {
    const sign = take("==", "!=", "<=", ">=", "<", ">", "in", "not");
    if (sign !== "not") return sign;
    if (!take("in")) throw Error("condition: wanted in after not");
    return "not in";
  }

  function value() {
    const { kind, text: word } = tokens.shift() ?? {};
    if (kind === "number") return () => Number(word);
    if (kind === "text") return () => word;
    if (word === "-" && tokens[0]?.kind === "number") return (number => () => number)(-Number(tokens.shift().text));
    if (word === "(" || word === "[") return bracketed(word === "(" ? ")" : "]");
    if (Object.hasOwn(CONSTANTS, word ?? "")) return () => CONSTANTS[word];
    const field = data.fields.includes(word) ? word : data.aliases[word];
    if (data.fields.includes(field)) return (fields) => fields[field] ?? null;
    throw Error(`condition: found ${word ?? "its end"}, wanted a field, a number or a text; ? lists the fields`);
  }

  function bracketed(close) {
    const items = [];
    let list = close === "]";
    while (!take(close)) {
      items.push(either());
      if (take(",")) list = true;
      else if (tokens[0]?.text !== close) throw Error(`condition: wanted ${close}`);
    }
    return list ? (fields) => items.map((each) => each(fields)) : items[0];
  }
}

function tokensOf(text) {
  const tokens = [];
  TOKEN.lastIndex = 0;
  while (TOKEN.lastIndex < text.trimEnd().length) {
    const start = TOKEN.lastIndex, match = TOKEN.exec(text);
    if (match === null) throw Error(`condition: cannot read ${text.slice(start, start + 20)}`);
    const [kind, found] = Object.entries(match.groups).find(([, part]) => part !== undefined);
    tokens.push({ kind, text: kind === "text" ? found.slice(1, -1) : found });
  }
  return tokens;
}

function compares(sign, left, right) {
  if (sign === "==") return left === right;
  if (sign === "!=") return left !== right;
  if (sign.endsWith("in")) return (sign === "in") === (right !== null && (typeof right !== "string" || typeof left === "string") && right.includes(left));
  if (left === null || right === null) return false; // unknown: neither less nor greater
  if (typeof left !== typeof right) throw Error("condition: it compares text with a number");
  return { "<": left < right, "<=": left <= right, ">": left > right, ">=": left >= right }[sign];
}
