/** What the page asks the server beside the stream. Addresses are relative, so it works below a path. */
import { authorization } from "./token";

/** The server's answer is a sentence that says why not. */
export class Refused extends Error {
  constructor(
    readonly status: number,
    sentence: string,
  ) {
    super(sentence);
  }
}

const AWAY = "the dashboard does not answer: see whether `fenka dashboard` still runs";

async function ask(path: string, init: RequestInit): Promise<Response> {
  let answer: Response;
  try {
    answer = await fetch(`api/${path}`, {
      ...init,
      headers: { ...authorization(), ...(init.body ? { "Content-Type": "application/json" } : {}) },
      cache: "no-store",
    });
  } catch (error) {
    if (init.signal?.aborted) throw error;
    throw new Refused(0, AWAY);
  }
  if (!answer.ok) throw new Refused(answer.status, await sentence(answer));
  return answer;
}

async function sentence(answer: Response): Promise<string> {
  try {
    const { problem } = (await answer.json()) as { problem?: string };
    if (problem) return problem;
  } catch {
    // A proxy in between answers in its own words.
  }
  return `the dashboard answered ${answer.status} ${answer.statusText}`;
}

/** Returns an answer's JSON. Throws Refused. */
export async function get<T>(path: string, signal?: AbortSignal): Promise<T> {
  return (await ask(path, signal ? { signal } : {})).json() as Promise<T>;
}

/** Changes something, and returns the answer's JSON. Throws Refused. */
export async function post<T>(path: string, body: unknown): Promise<T> {
  return (await ask(path, { method: "POST", body: JSON.stringify(body) })).json() as Promise<T>;
}

/** Calls `receive` with each part of a stream's text until it ends. Throws Refused. */
export async function read(path: string, signal: AbortSignal, receive: (text: string) => void): Promise<void> {
  const answer = await ask(path, { signal });
  const reader = answer.body!.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    receive(value);
  }
}
