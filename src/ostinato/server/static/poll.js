// Asks again and again while the page is visible, and knows whether the server answers.

const SLOWEST_RETRY_MS = 5000;

// `ask(signal)` is called every `periodMs` after the last answer; after a failure, with growing pauses.
// `onState(error or null)` is told how each call went.
export function poll(ask, periodMs, onState) {
  let timer = null;
  let running = null;
  let failures = 0;

  async function turn() {
    timer = null;
    const mine = new AbortController();
    running = mine;
    try {
      await ask(AbortSignal.any([mine.signal, AbortSignal.timeout(10_000)]));
      failures = 0;
      if (!mine.signal.aborted) onState(null);
    } catch (error) {
      if (mine.signal.aborted) return;
      failures += 1;
      onState(error);
    }
    if (running === mine) running = null;
    if (!mine.signal.aborted) schedule(failures ? Math.min(SLOWEST_RETRY_MS, 1000 * 1.5 ** (failures - 1)) : periodMs);
  }

  function schedule(delay) {
    clearTimeout(timer);
    timer = document.hidden ? null : setTimeout(turn, delay);
  }

  function restart() {
    clearTimeout(timer);
    running?.abort();
    running = null;
    schedule(0);
  }

  document.addEventListener("visibilitychange", restart);
  restart();
  return restart;
}
