// The strip: a bar for each of the newest steps. Height is the number of computed tokens on a logarithmic scale, the
// strong part of it the share of live ones. FULL is a whole bar, PIECEWISE a cut one, NONE a thin one.

import { byId, colour, el, figures, keepDrawn, swatch } from "./dom.js";
import { keyWords, MODES, reasonWords, stepWords } from "./words.js";

const PITCH = 5;
const BAR = 4;
const FLOOR = 14; // no bar is lower, so that padding can be told in a bucket of two
const PALE = 0.4;
const IDLE_MS = 500;
const LINES = [1, 4, 16, 64, 256, 1024, 4096, 16384];

export class Strip {
  constructor(steps) {
    this._steps = steps;
    this._canvas = byId("strip");
    this._detail = byId("step-detail");
    this._chosen = null; // a step's id
    this._held = null; // the list that is shown while paused
    this._draw = keepDrawn(this._canvas, (...args) => this._paint(...args));
    byId("strip-legend").replaceChildren(
      ...Object.keys(MODES).map((mode) => el("li", { title: MODES[mode] }, swatch(mode), mode)),
    );
    this._canvas.addEventListener("pointermove", (event) => this._choose(this._indexAt(event.offsetX)));
    this._canvas.addEventListener("pointerleave", () => document.activeElement !== this._canvas && this._choose(null));
    this._canvas.addEventListener("blur", () => this._choose(null));
    this._canvas.addEventListener("keydown", (event) => this._key(event));
    const pause = byId("pause");
    pause.addEventListener("click", () => {
      this._held = this._held === null ? [...steps.list] : null;
      pause.setAttribute("aria-pressed", String(this._held !== null));
      this.update();
    });
    this.update();
  }

  update() {
    const list = this._list();
    this._canvas.setAttribute("aria-valuemin", String(list[0]?.id ?? 0));
    this._canvas.setAttribute("aria-valuemax", String(list.at(-1)?.id ?? 0));
    this._tell();
    this._draw();
  }

  _list() {
    return this._held ?? this._steps.list;
  }

  // The step under x, or the nearest; the newest bar ends at the right edge.
  _indexAt(x) {
    const list = this._list();
    const fromRight = Math.floor((this._canvas.clientWidth - x) / PITCH);
    return Math.min(list.length - 1, Math.max(0, list.length - 1 - fromRight));
  }

  _key(event) {
    const list = this._list();
    const visible = Math.max(0, list.length - Math.floor(this._canvas.clientWidth / PITCH));
    const found = list.findIndex((step) => step.id === this._chosen);
    const current = found < 0 ? list.length - 1 : found;
    const next = {
      ArrowLeft: found < 0 ? current : current - 1,
      ArrowDown: current - 1,
      ArrowRight: current + 1,
      ArrowUp: current + 1,
      PageUp: current + 10,
      PageDown: current - 10,
      Home: visible,
      End: list.length - 1,
    }[event.key];
    if (event.key === "Escape") this._choose(null);
    if (next === undefined) return;
    event.preventDefault();
    this._choose(Math.min(list.length - 1, Math.max(visible, next)));
  }

  _choose(index) {
    this._chosen = index === null ? null : this._list()[index]?.id ?? null;
    this._tell();
    this._draw();
  }

  _tell() {
    const list = this._list();
    const step = list.find((one) => one.id === this._chosen) ?? list.at(-1);
    if (!step) {
      this._detail.textContent = "No step yet: send a message.";
      this._canvas.setAttribute("aria-valuenow", "0");
      this._canvas.setAttribute("aria-valuetext", "no step yet");
      return;
    }
    const padding = step.padded_tokens - step.tokens;
    this._canvas.setAttribute("aria-valuenow", String(step.id));
    this._canvas.setAttribute("aria-valuetext", `step ${step.id}. ${stepWords(step)}`);
    const time = step.ms === null ? "" : `, ${figures(step.ms)} ms`;
    const size = `${step.rows} request${step.rows === 1 ? "" : "s"}, ${step.tokens} token${step.tokens === 1 ? "" : "s"}`;
    this._detail.replaceChildren(
      el("span", {}, this._chosen === step.id ? "" : "newest: "),
      swatch(step.mode),
      ` step ${step.id}, `,
      el("b", {}, step.mode),
      step.key === null ? "" : `, bucket of ${keyWords(step.key)}`,
      `: ${size}${padding > 0 ? ` + ${padding} padding` : ""}${time}. `,
      el("span", { title: step.reason }, `Why: ${reasonWords(step.reason)}.`),
    );
    this._detail.querySelector(".swatch").style.display = "inline-block";
  }

  _paint(context, width, height) {
    const list = this._list();
    const shown = list.slice(-Math.floor(width / PITCH));
    const most = Math.max(16, ...shown.map((step) => step.padded_tokens));
    const room = height - 10;
    const tall = (tokens) => FLOOR + (room - FLOOR) * (Math.log2(Math.max(1, tokens)) / Math.log2(most));
    context.font = `10px ${getComputedStyle(document.body).fontFamily}`;
    context.textBaseline = "bottom";
    for (const tokens of LINES.filter((each) => each <= most)) {
      const y = Math.round(height - tall(tokens)) + 0.5;
      context.fillStyle = colour("line");
      context.fillRect(0, y, width, 1);
      context.fillStyle = colour("muted");
      context.fillText(`${tokens}`, 3, y - 1);
    }
    const colours = Object.fromEntries(Object.keys(MODES).map((mode) => [mode, colour(mode.toLowerCase())]));
    shown.forEach((step, place) => {
      const x = width - (shown.length - place) * PITCH;
      const full = tall(step.padded_tokens);
      const live = full * (step.tokens / step.padded_tokens);
      context.fillStyle = colours[step.mode] ?? colour("muted");
      bar(context, step.mode, x, height, full, PALE);
      bar(context, step.mode, x, height, live, 1);
      if (step.idle_ms > IDLE_MS) {
        context.fillStyle = colour("muted");
        for (let y = 2; y < height; y += 6) context.fillRect(x - 1, y, 1, 3);
      }
      if (step.id === this._chosen) {
        context.fillStyle = colour("chosen");
        context.fillRect(x - 0.5, 0, BAR + 1, 4);
        context.fillRect(x - 0.5, height - 1, BAR + 1, 1);
      }
    });
  }
}

function bar(context, mode, x, bottom, tall, alpha) {
  context.globalAlpha = alpha;
  if (mode === "NONE") context.fillRect(x + 1, bottom - tall, 2, tall);
  else context.fillRect(x, bottom - tall, BAR, tall);
  context.globalAlpha = 1;
  if (mode === "PIECEWISE") for (let y = 7; y < tall; y += 8) context.clearRect(x, bottom - y, BAR, 1.5);
}
