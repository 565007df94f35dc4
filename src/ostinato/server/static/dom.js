// Small things that every panel needs: elements, numbers, and a canvas that is sharp on any screen.

export const byId = (id) => document.getElementById(id);

// `el("li", {className: "x", title: "y"}, "text", node)`: properties, then children. Text is never parsed as HTML.
export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role" || name === "scope") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export const swatch = (kind) => el("span", { className: `swatch is-${kind}`, "aria-hidden": "true" });

// A list of [term, description] pairs, each in a div of its own, as the grids want it.
export function fillTerms(list, pairs) {
  list.replaceChildren(...pairs.map(([term, ...description]) => el("div", {}, el("dt", {}, term), el("dd", {}, ...description))));
}

export const whole = (value) => Math.round(value).toLocaleString("en");

// Three figures: 12.3, 1.23, 0.123.
export function figures(value) {
  if (value === null || !Number.isFinite(value)) return "–";
  if (Math.abs(value) >= 100) return whole(value);
  return value.toFixed(Math.abs(value) >= 10 ? 1 : 2);
}

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return unit === 0 ? `${count} B` : `${figures(count)} ${units[unit]}`;
}

export const percent = (share) => (Number.isFinite(share) ? `${Math.round(100 * share)} %` : "–");

export function median(values) {
  if (values.length === 0) return null;
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

// The value of a custom property: a canvas cannot use var().
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// Calls `draw(context, width, height)`, in CSS pixels, now and whenever the size or the colour scheme changes; returns
// a function that asks for another drawing.
export function keepDrawn(canvas, draw) {
  let asked = false;
  const paint = () => {
    asked = false;
    const { clientWidth: width, clientHeight: height } = canvas;
    const scale = window.devicePixelRatio || 1;
    if (width === 0) return;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    draw(context, width, height);
  };
  const ask = () => {
    if (!asked) requestAnimationFrame(paint);
    asked = true;
  };
  new ResizeObserver(ask).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", ask);
  return ask;
}
