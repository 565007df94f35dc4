// Memory by part, as one bar and a list.

import { byId, bytes, el, percent, swatch } from "./dom.js";

const PARTS = {
  weights: ["weights", "the model's parameters"],
  kv: ["KV pool", "keys and values of past tokens, in blocks"],
  graphs: ["graphs", "what the recordings keep: the space of their results, and what the driver needs"],
  buffers: ["buffers", "fixed tensors that requests and steps live in: all that a recording reads and writes"],
  libraries: ["libraries", "code of kernels and workspaces, since the first step"],
  before: ["before", "in use before the engine was made: the CUDA context, other processes"],
};

export function showMemory(memory) {
  const known = Object.keys(PARTS).filter((part) => memory[part]);
  const sum = known.reduce((all, part) => all + memory[part], 0);
  const whole = Math.max(memory.total ?? 0, sum) || 1;
  byId("memory-sum").textContent = memory.total ? `${bytes(sum)} of ${bytes(memory.total)}` : bytes(sum);
  byId("memory-bar").setAttribute(
    "aria-label",
    `Memory by part: ${known.map((part) => `${PARTS[part][0]} ${bytes(memory[part])}`).join(", ")}`,
  );
  byId("memory-bar").replaceChildren(
    ...known.map((part) => {
      const piece = el("i", { className: `is-${part}`, title: PARTS[part][0] });
      piece.style.width = `${(100 * memory[part]) / whole}%`;
      return piece;
    }),
  );
  byId("memory").replaceChildren(
    ...known.map((part) => {
      const size = el("b", {}, `${bytes(memory[part])} (${percent(memory[part] / whole)})`);
      return el("div", {}, el("dt", {}, swatch(part), PARTS[part][0], size), el("dd", {}, PARTS[part][1]));
    }),
  );
}
