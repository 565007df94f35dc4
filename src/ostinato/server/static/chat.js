// The chat pane: one conversation, and eight answers at once to make the batch change size.

import { Answer } from "./answer.js";
import { streamChat } from "./api.js";
import { byId, el } from "./dom.js";

// Four requests of two answers each: a browser opens six connections to a server, and the polling needs some of them.
// The limits differ, so that the batch shrinks: 8, then 6 (padded to 8), 4, 2.
const EIGHT = [
  ["Name three rivers.", 0.3],
  ["Explain why the sky is blue.", 0.5],
  ["Write a short poem about rain.", 0.75],
  ["Tell a story about a lighthouse.", 1],
];
const EACH = 2;

export class Chat {
  // `model()` gives the model's name, undefined while it is not known.
  constructor(model) {
    this._model = model;
    this._messages = [];
    this._running = null; // an AbortController while something streams
    this._empty = byId("log-empty");
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this._ask();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this._ask();
      }
    });
    byId("stop").addEventListener("click", () => this._running?.abort());
    byId("eight").addEventListener("click", () => this._askEight());
    byId("clear").addEventListener("click", () => {
      this._running?.abort();
      this._messages = [];
      byId("log").replaceChildren(this._empty);
    });
  }

  async _ask() {
    const input = byId("prompt");
    const text = input.value.trim();
    if (!text || this._running) return;
    input.value = "";
    const messages = this._messages; // Clear puts another list in its place, and what is under way goes on with this one
    messages.push({ role: "user", content: text });
    this._append(el("div", { className: "message user" }, el("div", { className: "who" }, "you"), el("div", { className: "text" }, text)));
    const answer = new Answer();
    this._append(el("div", { className: "message assistant" }, el("div", { className: "who" }, "model"), ...answer.nodes));
    await this._while((signal) => this._stream(messages, maxTokens(), [answer], signal));
    if (answer.text) messages.push({ role: "assistant", content: answer.text });
    else messages.pop(); // nothing was answered: the next question stands alone
  }

  async _askEight() {
    if (this._running) return;
    const list = el("ul", { className: "eight", "aria-label": "Eight answers at once" });
    const jobs = EIGHT.map(([prompt, share]) => {
      const answers = Array.from({ length: EACH }, () => new Answer());
      for (const { nodes } of answers) list.append(el("li", {}, el("div", { className: "asked" }, prompt), ...nodes));
      return { answers, messages: [{ role: "user", content: prompt }], limit: Math.max(1, Math.round(maxTokens() * share)) };
    });
    this._append(el("div", { className: "message" }, el("div", { className: "who" }, "four questions, two answers each"), list));
    await this._while((signal) =>
      Promise.all(jobs.map(({ messages, limit, answers }) => this._stream(messages, limit, answers, signal))),
    );
  }

  // One request with as many answers as there are `answers`. Never throws: what happened is written under each.
  async _stream(messages, limit, answers, signal) {
    const asked = { model: this._model(), messages, max_completion_tokens: limit, temperature: temperature() };
    if (answers.length > 1) asked.n = answers.length;
    let problem = null;
    try {
      for await (const { index, text, finish, usage } of streamChat(asked, signal)) {
        if (usage && answers.length === 1) answers[0].count(usage.completion_tokens);
        if (index === null || !answers[index]) continue;
        if (text) answers[index].add(text);
        if (finish) answers[index].finish(finish);
        this._follow();
      }
    } catch (error) {
      problem = signal.aborted ? "stopped" : `failed: ${error.message}`;
    }
    for (const answer of answers) answer.close(problem, signal.aborted);
    this._follow();
  }

  async _while(work) {
    const mine = new AbortController();
    this._running = mine;
    this._setBusy(true);
    await work(mine.signal);
    this._running = null;
    this._setBusy(false);
  }

  _setBusy(busy) {
    const hadFocus = document.activeElement;
    byId("send").disabled = busy;
    byId("eight").disabled = busy;
    byId("stop").disabled = !busy;
    byId("log").setAttribute("aria-busy", String(busy)); // a screen reader reads the answer once, when it is whole
    // a button that is disabled loses the focus, and the keyboard its place
    if (hadFocus?.disabled) byId(busy ? "stop" : "prompt").focus({ preventScroll: true });
  }

  _append(node) {
    this._empty.remove();
    const log = byId("log");
    log.append(node);
    log.scrollTop = log.scrollHeight;
  }

  // Stays at the end unless the reader has scrolled up.
  _follow() {
    const log = byId("log");
    if (log.scrollHeight - log.scrollTop - log.clientHeight < 80) log.scrollTop = log.scrollHeight;
  }
}

const maxTokens = () => Math.max(1, Math.round(Number(byId("max-tokens").value)) || 128);
const temperature = () => Math.max(0, Number(byId("temperature").value) || 0);
