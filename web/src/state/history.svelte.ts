/** What was over a span, asked anew from time to time. */
import type { HistoryAnswer } from "../messages";
import { get } from "./api";

export const SPANS = [
  { name: "1 h", words: "1 hour", seconds: 3600 },
  { name: "6 h", words: "6 hours", seconds: 21_600 },
  { name: "24 h", words: "24 hours", seconds: 86_400 },
  { name: "7 d", words: "7 days", seconds: 604_800 },
  { name: "30 d", words: "30 days", seconds: 2_592_000 },
] as const;

/** Asks at once and then each hundredth of the span, until the returned function is called. */
export function follow(
  subject: "program" | "card",
  id: string,
  seconds: number,
  receive: (timeline: HistoryAnswer) => void,
): () => void {
  const ended = new AbortController();
  const ask = async () => {
    if (document.hidden) return;
    try {
      receive(await get<HistoryAnswer>(`history?${subject}=${encodeURIComponent(id)}&span=${seconds}`, ended.signal));
    } catch (error) {
      if (!ended.signal.aborted) receive({ series: [], marks: [], problem: (error as Error).message });
    }
  };
  const timer = setInterval(ask, Math.max(5000, seconds * 10));
  void ask();
  return () => {
    clearInterval(timer);
    ended.abort();
  };
}
