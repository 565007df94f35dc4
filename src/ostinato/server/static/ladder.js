// The ladder: every recorded bucket, and for those that were used how often, how full, and why.

import { byId, bytes, el, figures, percent, swatch, whole } from "./dom.js";
import { keyWords, MODES, reasonWords } from "./words.js";

export class Ladder {
  constructor() {
    this._rails = byId("rails");
    this._body = byId("buckets").tBodies[0];
    this._drawn = "";
  }

  // `newest` is the newest step, whose bucket is marked.
  update(state, newest) {
    const found = JSON.stringify([state.counters, state.recordings.length, newest?.mode, newest?.key]);
    if (found === this._drawn) return; // leaves a selection or a scroll position alone
    this._drawn = found;
    byId("ladder-sum").textContent = summary(state);
    this._rails.replaceChildren(...rails(state, newest));
    const rows = group(state.counters);
    const all = rows.reduce((total, row) => total + row.count, 0);
    this._body.replaceChildren(...rows.map((row) => tableRow(row, all)));
  }
}

function summary({ recordings, backend }) {
  if (recordings.length === 0) return "no graphs are recorded in this mode";
  const what = backend === "tape" ? "tapes (on the CPU they stand in for CUDA graphs, by the same rules)" : "recordings";
  const sum = (name) => recordings.reduce((total, recording) => total + (recording[name] ?? 0), 0);
  const size = sum("bytes") > 0 ? `, ${bytes(sum("bytes"))}` : "";
  return `${recordings.length} ${what}, ${whole(sum("num_nodes"))} launches, made at start-up in ${figures(sum("seconds"))} s${size}`;
}

const nameOf = (mode, key) => `${mode} ${JSON.stringify(key)}`;

function rails(state, newest) {
  const hits = new Map();
  for (const row of state.counters) {
    const name = nameOf(row.mode, row.key);
    hits.set(name, (hits.get(name) ?? 0) + row.count);
  }
  const most = Math.max(1, ...hits.values());
  const now = newest ? nameOf(newest.mode, newest.key) : null;
  const keyed = state.recordings.map((recording) => ({
    ...recording,
    key: [recording.num_tokens, recording.num_rows, recording.query_len],
  }));
  const kinds = [
    ["every row brings the same number of tokens (decode); sizes in rows", keyed.filter(({ key }) => key[2] !== null)],
    ["mixed, with prompts; sizes in tokens", keyed.filter(({ key }) => key[2] === null)],
  ];
  return kinds
    .filter(([, recordings]) => recordings.length > 0)
    .map(([name, recordings]) => {
      recordings.sort((a, b) => a.num_tokens - b.num_tokens);
      const chips = recordings.map((recording) => {
        const id = nameOf(recording.mode, recording.key);
        return chip(recording, hits.get(id) ?? 0, most, id === now);
      });
      return el("ul", { className: "rail", "aria-label": name }, el("li", { className: "rail-name" }, name), ...chips);
    });
}

function chip(recording, count, most, isNow) {
  const { mode, key } = recording;
  const what = `${mode}, bucket of ${keyWords(key)}: ${whole(count)} steps`;
  const made = `${whole(recording.num_graphs)} graphs, ${whole(recording.num_nodes)} launches, ${bytes(recording.bytes)}`;
  const level = el("i", { className: `is-${mode}` });
  level.style.width = count ? `${Math.max(8, (100 * Math.log1p(count)) / Math.log1p(most))}%` : "0";
  const number = key[2] !== null && key[2] !== 1 ? `${key[1]}×${key[2]}` : `${key[2] === null ? key[0] : key[1]}`;
  const className = `bucket${count ? " hit" : ""}${isNow ? " now" : ""}`;
  return el("li", { className, title: `${what} (${made})`, "aria-label": what }, number, level);
}

// One row for each (mode, bucket), with its reasons; the most steps first.
function group(counters) {
  const rows = new Map();
  for (const { mode, key, reason, count, live_tokens: live, padded_tokens: padded } of counters) {
    const name = nameOf(mode, key);
    if (!rows.has(name)) rows.set(name, { mode, key, count: 0, live: 0, padded: 0, reasons: [] });
    const row = rows.get(name);
    row.count += count;
    row.live += live;
    row.padded += padded;
    row.reasons.push([reason, count]);
  }
  return [...rows.values()].sort((a, b) => b.count - a.count);
}

function tableRow({ mode, key, count, live, padded, reasons }, all) {
  const share = live / padded;
  const level = el("i");
  level.style.width = `${100 * share}%`;
  reasons.sort((a, b) => b[1] - a[1]);
  const why = reasons.map(([reason], place) => el("span", { title: reason }, (place ? "; " : "") + reasonWords(reason)));
  return el(
    "tr",
    {},
    el("td", { title: MODES[mode] ?? "" }, swatch(mode), mode),
    el("td", {}, key === null ? "any size" : keyWords(key)),
    el("td", { className: "num", title: `${percent(count / all)} of all steps` }, whole(count)),
    el(
      "td",
      { title: `${whole(live)} of ${whole(padded)} tokens` },
      el("div", { className: `share is-${mode}` }, el("span", { className: "track", "aria-hidden": "true" }, level), label(share)),
    ),
    el("td", {}, ...why),
  );
}

function label(share) {
  const text = el("span", {}, share === 1 ? "all" : `${figures(100 * share)} %`);
  text.style.color = "var(--text)";
  return text;
}
