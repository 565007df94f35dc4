// Puts the page together: polls the server and hands what it says to the panels.

import { getJson, onKeyWanted, ServerError, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { byId, el, figures, fillTerms, percent, whole } from "./dom.js";
import { Ladder } from "./ladder.js";
import { showMemory } from "./memory.js";
import { Plots } from "./plots.js";
import { poll } from "./poll.js";
import { Pool } from "./pool.js";
import { Steps } from "./steps.js";
import { Strip } from "./strip.js";

const STEPS_MS = 250;
const OTHERS_MS = 1000;

const steps = new Steps();
const strip = new Strip(steps);
const ladder = new Ladder();
const pool = new Pool();
const plots = new Plots();
let state = null;
new Chat(() => state?.model);

// -- what the server says ---------------------------------------------------------------------------------------------

async function askSteps(signal) {
  const before = steps.lastId;
  const answer = await getJson(`/graphs/steps?after=${before}`, signal);
  if (steps.lastId !== before) return; // forgotten meanwhile
  if (steps.take(answer) > 0 || steps.lastId < before) strip.update();
}

// What comes back may be another process that counts anew: everything that it has kept is asked for. Either of the two
// that poll may be the only one to notice that the server was gone.
function lose(error) {
  steps.clear();
  showState(error);
}

async function askOthers(signal) {
  const paths = ["/graphs/state", "/graphs/pool", "/graphs/requests"];
  const [found, blocks, requests] = await Promise.all(paths.map((path) => getJson(path, signal)));
  state = found;
  showFacts();
  ladder.update(state, steps.list.at(-1));
  pool.update(blocks, requests, state.block_size);
  showMemory(state.memory);
  const series = steps.series();
  plots.update(series);
  showTiles(series, blocks, requests);
}

function showFacts() {
  fillTerms(byId("facts"), [
    ["model", state.model],
    ["mode", el("span", { title: `runs on the ${state.backend} backend` }, state.mode)],
    ["on", `${state.device}, ${state.dtype}`],
    ["context", `${whole(state.max_model_len)} tokens`],
  ]);
}

function showTiles([, rates], blocks, requests) {
  const recent = steps.recent();
  const rate = rates.slice(-3).reduce((sum, each) => sum + each, 0) / 3;
  const running = requests.filter((request) => request.status === "running").length;
  const held = [...blocks.states].filter((letter) => letter === "u").length;
  fillTerms(byId("tiles"), [
    ["tokens per second", figures(rate)],
    ["per step", figures(recent.ms), el("small", {}, recent.ms === null ? "" : " ms")],
    ["of steps in graphs", percent(recent.inGraph)],
    ["of tokens are padding", percent(recent.padding)],
    ["running, waiting", `${running}, ${requests.length - running}`],
    ["of KV blocks used", percent(held / Math.max(1, blocks.num_blocks - 1))],
  ]);
  byId("rate-now").textContent = `${figures(rate)} now`;
  byId("time-now").textContent = recent.ms === null ? "" : `${figures(recent.ms)} ms, median of the last 100 steps`;
}

// -- whether it answers -----------------------------------------------------------------------------------------------

function showState(error) {
  const status = byId("status");
  const banner = byId("banner");
  const keyWanted = error instanceof ServerError && error.status === 401;
  document.body.classList.toggle("stale", error !== null);
  if (error === null) {
    status.dataset.state = "live";
    status.textContent = "live";
    banner.hidden = true;
    byId("key-form").hidden = true;
    return;
  }
  status.dataset.state = "gone";
  status.textContent = keyWanted ? "key wanted" : "no answer";
  banner.hidden = keyWanted;
  const text =
    error instanceof ServerError
      ? `The server answers ${error.message}. Trying again.`
      : "The server does not answer. What you see is its last word; the page goes on when it is back.";
  if (banner.textContent !== text) banner.textContent = text; // the same alert is not read out twice
}

const restartSteps = poll(askSteps, STEPS_MS, (error) => error !== null && lose(error));
const restartOthers = poll(askOthers, OTHERS_MS, (error) => (error === null ? showState(null) : lose(error)));

onKeyWanted(() => {
  byId("key-form").hidden = false;
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value);
  byId("key").value = "";
  byId("key-form").hidden = true;
  restartSteps();
  restartOthers();
});
