// The newest steps, and what follows from them: tokens and times by second, and the figures of the last few seconds.

import { median } from "./dom.js";

const KEPT_STEPS = 600;
const KEPT_SECONDS = 120;

export class Steps {
  constructor() {
    this.clear();
  }

  clear() {
    this.list = []; // oldest first
    this.lastId = 0;
    this.seconds = new Map(); // second -> {rows, times}
    this._lastCollected = null;
    this._skew = null; // how far this clock is ahead of the server's, at most
  }

  // Takes the answer of /graphs/steps, and returns how many steps were new. A last id below ours is that of another
  // server process, which answered for ids it does not have: what it has is asked for next.
  take(answer) {
    if (answer.last < this.lastId) {
      this.clear();
      return 0;
    }
    const fresh = answer.steps.filter((step) => step.id > this.lastId);
    this.lastId = Math.max(answer.last, fresh.at(-1)?.id ?? 0);
    for (const step of fresh) this._count(step);
    this.list.push(...fresh);
    if (this.list.length > KEPT_STEPS) this.list.splice(0, this.list.length - KEPT_STEPS);
    const oldest = this.now() / 1000 - KEPT_SECONDS - 1;
    for (const second of this.seconds.keys()) if (second < oldest) this.seconds.delete(second);
    return fresh.length;
  }

  // A step begins when it is launched, or when the one before it ends: launched ahead, it waits for that.
  _count(step) {
    step.ms = null;
    if (step.collected_ms === null) return;
    step.ms = Math.max(0, step.collected_ms - Math.max(step.launched_ms, this._lastCollected ?? 0));
    step.idle_ms = this._lastCollected === null ? 0 : Math.max(0, step.launched_ms - this._lastCollected);
    this._lastCollected = step.collected_ms;
    const skew = Date.now() - step.collected_ms;
    this._skew = this._skew === null ? skew : Math.min(this._skew, skew);
    const second = Math.floor(step.collected_ms / 1000);
    if (!this.seconds.has(second)) this.seconds.set(second, { rows: 0, times: [] });
    const bin = this.seconds.get(second);
    bin.rows += step.rows;
    bin.times.push(step.ms);
  }

  // ms on the server's clock.
  now() {
    return Date.now() - (this._skew ?? 0);
  }

  // Whole seconds that are over, oldest first: [seconds before now], [tokens/s], [median ms or null].
  series() {
    const last = Math.floor(this.now() / 1000) - 1;
    const ages = [];
    const rates = [];
    const times = [];
    for (let second = last - KEPT_SECONDS + 1; second <= last; second += 1) {
      const bin = this.seconds.get(second);
      ages.push(second - last);
      rates.push(bin?.rows ?? 0);
      times.push(bin ? median(bin.times) : null);
    }
    return [ages, rates, times];
  }

  // Of the newest `count` steps.
  recent(count = 100) {
    const steps = this.list.slice(-count);
    const sum = (name) => steps.reduce((total, step) => total + step[name], 0);
    return {
      ms: median(steps.filter((step) => step.ms !== null).map((step) => step.ms)),
      inGraph: steps.filter((step) => step.mode !== "NONE").length / steps.length,
      padding: 1 - sum("tokens") / sum("padded_tokens"),
    };
  }
}
