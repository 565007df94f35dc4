// The engine's terms in plain words. A reason that is not known here is shown as it came.

export const MODES = {
  FULL: "one graph ran the whole step",
  PIECEWISE: "graphs ran the step in pieces, with attention called between them",
  NONE: "no graph: the host launched every kernel",
};

const REASONS = {
  "exact": "the batch has exactly the size of a bucket",
  "padded": "the batch was filled up to the next bucket",
  "graphs are off": "graphs are switched off",
  "mixed batch: piecewise": "a prompt is in the batch, so its rows differ in length",
  "mixed batch: no graph in this mode": "a prompt is in the batch, and this mode records no graphs for that",
  "more rows than the largest recorded batch": "more requests than the largest bucket holds",
  "more tokens than the largest recorded batch": "more tokens than the largest bucket holds",
  "padding would more than double the work": "the next bucket is more than twice as large: without a graph it is less work",
  "query length not recorded": "rows bring a number of tokens that no bucket was recorded for",
  "not recorded": "this size has no recording (yet)",
  "needs host work": "the host has something to do inside the step, which a graph would not wait for",
};

export const reasonWords = (reason) => REASONS[reason] ?? reason;

// [tokens, rows, query length or null] -> "8 rows", "4 rows × 3 tokens", "512 tokens".
export function keyWords(key) {
  if (key === null) return "–";
  const [tokens, rows, queryLen] = key;
  if (queryLen === null) return `${tokens} tokens`;
  const counted = `${rows} row${rows === 1 ? "" : "s"}`;
  return queryLen === 1 ? counted : `${counted} × ${queryLen} tokens`;
}

const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

// One sentence about a step, for eyes and for screen readers.
export function stepWords(step) {
  const padding = step.padded_tokens - step.tokens;
  const size = `${plural(step.rows, "request")}, ${plural(step.tokens, "token")}` + (padding > 0 ? ` and ${padding} of padding` : "");
  const where = step.key === null ? "" : `, bucket of ${keyWords(step.key)}`;
  return `${step.mode}: ${MODES[step.mode] ?? ""}${where}. ${size}. Why: ${reasonWords(step.reason)}.`;
}
