// Two plots over the last two minutes. uPlot is a classic script, loaded before the modules.

import { byId, colour } from "./dom.js";

const HEIGHT = 150;

export class Plots {
  constructor() {
    this._data = null;
    this._make();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this._make());
    const resized = new ResizeObserver(() => {
      for (const [plot, where] of this._plots) plot.setSize({ width: where.clientWidth, height: HEIGHT });
    });
    resized.observe(byId("rate-plot"));
    resized.observe(byId("time-plot"));
  }

  update([ages, rates, times]) {
    this._data = [ages, rates, times];
    this._plots[0][0].setData([ages, rates]);
    this._plots[1][0].setData([ages, times]);
  }

  // Colours go into a canvas, so another scheme means another plot.
  _make() {
    for (const [plot] of this._plots ?? []) plot.destroy();
    this._plots = [
      draw(byId("rate-plot"), "tokens/s", colour("full"), this._data && [this._data[0], this._data[1]]),
      draw(byId("time-plot"), "ms", colour("used"), this._data && [this._data[0], this._data[2]]),
    ];
  }
}

function draw(where, label, stroke, data) {
  const axis = {
    stroke: colour("muted"),
    grid: { stroke: colour("line"), width: 1 },
    ticks: { show: false },
    font: "11px system-ui, sans-serif",
  };
  const options = {
    width: Math.max(100, where.clientWidth),
    height: HEIGHT,
    legend: { show: false },
    cursor: { y: false, points: { show: false } },
    scales: { x: { time: false, range: [-119, 0] }, y: { range: (plot, low, high) => [0, Math.max(1, (high ?? 1) * 1.1)] } },
    axes: [
      { ...axis, size: 24, values: (plot, ages) => ages.map((age) => (age === 0 ? "now" : `${-age} s`)), space: 60 },
      { ...axis, size: 46 },
    ],
    series: [{}, { label, stroke, width: 1.5, fill: `${stroke}22`, points: { show: false } }],
  };
  return [new window.uPlot(options, data ?? [[], []], where), where];
}
