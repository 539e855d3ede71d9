/** What the page asks the server beside the stream. Addresses are relative, so it works below a path. */
import { authorization } from "./token";
import { CREDENTIALS, trust, Unproven } from "./trust";

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

/** Asks once the server has proved who it is, and while its stream is open. */
async function ask(path: string, init: RequestInit): Promise<Response> {
  if (!(await trust.isOpen(init.method !== "POST"))) throw new Refused(0, AWAY);
  return askAtOnce(path, init);
}

async function askAtOnce(path: string, init: RequestInit): Promise<Response> {
  let answer: Response;
  try {
    answer = await fetch(`api/${path}`, {
      ...init,
      headers: { ...authorization(), ...(init.body ? { "Content-Type": "application/json" } : {}) },
      cache: "no-store",
      credentials: CREDENTIALS,
      // A stranger's answer cannot send the page elsewhere.
      redirect: "error",
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
  await readParts(await ask(path, { signal }), receive);
}

/** Reads the stream of what is there now. Other requests are sent only while it is open. Throws Refused, Unproven. */
export async function readLive(path: string, signal: AbortSignal, receive: (text: string) => void): Promise<void> {
  try {
    await trust.prove(signal);
  } catch (error) {
    if (signal.aborted || error instanceof Unproven) throw error;
    throw new Refused(0, AWAY);
  }
  const answer = await askAtOnce(path, { signal });
  trust.opened();
  try {
    await readParts(answer, receive);
  } finally {
    trust.closed();
  }
}

async function readParts(answer: Response, receive: (text: string) => void): Promise<void> {
  const reader = answer.body!.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    receive(value);
  }
}
