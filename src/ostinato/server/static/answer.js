// One answer as it streams: its text, and a line that says how it went.

import { el, figures } from "./dom.js";

const ENDS = { length: "cut at the limit", stop: "" };

export class Answer {
  constructor() {
    this._text = document.createTextNode("");
    this._body = el("div", { className: "text" }, this._text);
    this._note = el("div", { className: "figures" });
    this.nodes = [this._body, this._note];
    this._began = performance.now();
    this._first = null;
    this._last = null;
    this._pieces = 0;
    this._tokens = null; // the server's own count, where it is told
    this._finish = null;
  }

  get text() {
    return this._text.data;
  }

  add(text) {
    this._last = performance.now();
    this._first ??= this._last;
    this._pieces += 1;
    this._text.appendData(text);
    this._body.scrollTop = this._body.scrollHeight;
  }

  count(tokens) {
    this._tokens = tokens;
  }

  finish(reason) {
    this._finish = reason;
    this._write([ENDS[reason] ?? reason]);
  }

  // `problem` is what ended the stream early, null if nothing did. An answer that has ended is not touched by it.
  close(problem, stopped) {
    if (problem === null || this._finish !== null) return this._write([ENDS[this._finish] ?? this._finish ?? "no end"]);
    if (!stopped) this._note.classList.add("failed");
    this._write([problem]);
  }

  _write(more) {
    const said = [];
    if (this._first !== null) {
      const count = this._tokens ?? this._pieces;
      const seconds = (this._last - this._first) / 1000;
      said.push(`${count} token${count === 1 ? "" : "s"}`);
      if (count > 1 && seconds > 0) said.push(`${figures((count - 1) / seconds)} a second`);
      said.push(`first after ${figures(this._first - this._began)} ms`);
    }
    this._note.textContent = [...said, ...more.filter(Boolean)].join(", ");
  }
}
