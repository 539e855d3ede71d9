/** Sums of usage and waits, asked anew each minute while a screen shows them. */
import type { Sums } from "../messages";
import { get } from "./api";

const PERIOD_MS = 60_000;

/** Asks at once and then each minute, until the returned function is called. */
export function followSums(receive: (sums: Sums) => void): () => void {
  const ended = new AbortController();
  const ask = async () => {
    if (document.hidden) return;
    try {
      receive(await get<Sums>("sums", ended.signal));
    } catch (error) {
      if (!ended.signal.aborted) {
        receive({ month: [], today: [], currency: "", since: null, waits: null, problem: (error as Error).message });
      }
    }
  };
  const timer = setInterval(ask, PERIOD_MS);
  void ask();
  return () => {
    clearInterval(timer);
    ended.abort();
  };
}
