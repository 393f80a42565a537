// What / finds, as on the terminal: letters in order in the figures, or a text as it stands in a message.

const GAP = 2; // letters between two of the query, at most
const MOST_MARKS = 200; // in one text

/** A text in small letters, as long as before. */
function folded(text) {
  return text.replaceAll("İ", "i").toLowerCase();
}

/** What a query means: `fit` of a trajectory (less is better, null: it does not match) and the `parts` of a text to mark. */
function searchOf(query) {
  const letters = folded(query.trim());
  if (!letters) return { fit: () => 0, parts: () => [] };
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
