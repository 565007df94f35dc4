// The KV pool as a map, and the block table of one request.

import { byId, colour, el, keepDrawn, swatch, whole } from "./dom.js";

const KINDS = { u: "used", c: "cached", f: "free", s: "scratch" };
const MEANING = {
  u: "held by a request",
  c: "free, but its content can still be found by a prompt that begins the same",
  f: "free",
  s: "what padded rows point at",
};
const BUSIEST = "fcsu"; // of several blocks in one square, the last of these letters shows
const SMALLEST = 4;
const LARGEST = 18;
const SHOWN = 96;

export class Pool {
  constructor() {
    this._states = "";
    this._sum = "";
    this._requests = [];
    this._blockSize = 16;
    this._wanted = ""; // the chosen request's id; empty for the newest that runs
    this._select = byId("request");
    this._select.addEventListener("change", () => {
      this._wanted = this._select.value;
      this._showTable();
    });
    this._draw = keepDrawn(byId("pool"), (...args) => this._paint(...args));
  }

  update(pool, requests, blockSize) {
    this._states = pool.states;
    this._requests = requests;
    this._blockSize = blockSize;
    const counts = Object.fromEntries(Object.keys(KINDS).map((letter) => [letter, 0]));
    for (const letter of pool.states) counts[letter] += 1;
    const total = pool.states.length - counts.s;
    this._sum = `${whole(total)} blocks of ${blockSize} tokens`;
    byId("pool").setAttribute(
      "aria-label",
      `Map of the KV blocks: ${counts.u} used, ${counts.c} cached, ${counts.f} free of ${total}`,
    );
    byId("pool-legend").replaceChildren(
      ...Object.entries(KINDS).map(([letter, name]) =>
        el("li", { title: MEANING[letter] }, swatch(letter), `${name} ${whole(counts[letter])}`),
      ),
      el("li", { title: "the blocks of the request below" }, swatch("chosen"), "chosen request"),
    );
    this._fillSelect();
    this._showTable();
  }

  _chosen() {
    const running = this._requests.filter((request) => request.blocks.length > 0);
    return this._requests.find((request) => request.id === this._wanted) ?? running.at(-1) ?? this._requests.at(-1);
  }

  _fillSelect() {
    const options = [["", this._requests.length ? "the newest that runs" : "no request is open"]];
    for (const { id, status } of this._requests) options.push([id, `${id} (${status})`]);
    if (this._wanted && !this._requests.some((request) => request.id === this._wanted)) this._wanted = "";
    const found = JSON.stringify(options);
    if (this._select.dataset.options !== found) {
      this._select.dataset.options = found;
      this._select.replaceChildren(...options.map(([value, text]) => el("option", { value }, text)));
    }
    this._select.value = this._wanted;
  }

  _showTable() {
    const list = byId("table");
    const request = this._chosen();
    this._draw();
    if (!request) {
      list.replaceChildren(el("li", { className: "more" }, "A block table appears here while a request is open."));
      return;
    }
    const size = this._blockSize;
    const entries = request.blocks.slice(0, SHOWN).map((block, place) => {
      const tokens = `${place * size}–${place * size + size - 1}`;
      return el("li", { title: `tokens ${tokens} lie in block ${block}` }, el("small", {}, tokens), `${block}`);
    });
    const more = request.blocks.length - entries.length;
    if (more > 0) entries.push(el("li", { className: "more" }, `and ${whole(more)} more`));
    if (entries.length === 0) entries.push(el("li", { className: "more" }, "It waits, and holds no block."));
    list.replaceChildren(...entries);
    list.setAttribute(
      "aria-label",
      `Block table: ${request.prompt_tokens} tokens in, ${request.output_tokens} out, ${request.blocks.length} blocks`,
    );
  }

  _paint(context, width, height) {
    const count = this._states.length;
    if (count === 0) return;
    const side = Math.min(LARGEST, Math.max(SMALLEST, fit(count, width, height)));
    const columns = Math.floor(width / side);
    const rows = Math.floor(height / side);
    const each = Math.ceil(count / (columns * rows)); // blocks in one square
    const gap = side > 6 ? 2 : 1;
    const colours = Object.fromEntries(Object.entries(KINDS).map(([letter, name]) => [letter, colour(name)]));
    const chosen = new Set(this._chosen()?.blocks.map((block) => Math.floor(block / each)) ?? []);
    for (let square = 0; square * each < count; square += 1) {
      const states = this._states.slice(square * each, (square + 1) * each);
      const x = (square % columns) * side;
      const y = Math.floor(square / columns) * side;
      context.fillStyle = chosen.has(square) ? colour("chosen") : colours[busiest(states)];
      context.fillRect(x, y, side - gap, side - gap);
    }
    byId("pool-sum").textContent = each > 1 ? `${this._sum}, ${each} in each square` : this._sum;
  }
}

function fit(count, width, height) {
  let side = Math.floor(Math.sqrt((width * height) / count));
  while (side > 1 && Math.floor(width / side) * Math.floor(height / side) < count) side -= 1;
  return side;
}

function busiest(states) {
  let best = 0;
  for (const letter of states) best = Math.max(best, BUSIEST.indexOf(letter));
  return BUSIEST[best];
}
