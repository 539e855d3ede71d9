/**
 * Whether the server at this address is still the one that the page came from.
 *
 * A port of a loopback address changes hands when its server ends, and a page that stays open does not see it. So before each
 * stream the server proves by the token who it is, and nothing else is asked while no stream is open.
 */
import { hex, hmac } from "./hmac";
import { token } from "./token";

/** TLS has proved who answers. */
export const ENCRYPTED = location.protocol === "https:";

/** Cookies of the address go to the server only where TLS proves who it is: those are a proxy's. */
export const CREDENTIALS: RequestCredentials = ENCRYPTED ? "same-origin" : "omit";

/** As `fenka.dashboard.guard` has it. */
const CONTEXT = "fenka dashboard ";

/** Characters of a proof with what is around it. */
const MAX_ANSWER = 200;

/** For a whole proof. A stranger's answer may come a byte at a time. */
const PROOF_MS = 10_000;

/** For a request, while the stream is opened again. */
const PATIENCE_MS = 3000;

/** Another server answers at this address, or the server has no token like this one. */
export class Unproven extends Error {}

class Trust {
  /** Whether a server has proved itself to this page with this token. */
  #known = false;
  /** Whether the server has a token; undefined before it was asked. */
  #provable: boolean | undefined;
  #open = false;
  #waiting: Array<() => void> = [];

  /** Whether a message of the open stream may make the page load another one of this server. */
  get mayReload(): boolean {
    return ENCRYPTED || this.#known;
  }

  /** Whether the page may connect again by itself after the stream has ended: nothing secret goes to another server. */
  get mayReconnect(): boolean {
    return ENCRYPTED || this.#provable === true || token() === "";
  }

  /** Whether a server has proved itself to this page before. */
  get known(): boolean {
    return this.#known;
  }

  /** Asks nothing of what was known: the token is another one. */
  forget(): void {
    this.#known = false;
    this.#provable = undefined;
  }

  /** Returns when the server has proved that it has the token, or cannot prove it and never could. Throws Unproven, TypeError. */
  async prove(signal: AbortSignal): Promise<void> {
    if (ENCRYPTED || token() === "" || this.#provable === false) return;
    const challenge = hex(crypto.getRandomValues(new Uint8Array(16)));
    const answer = await fetch(`api/proof?challenge=${challenge}`, {
      signal: AbortSignal.any([signal, AbortSignal.timeout(PROOF_MS)]),
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
      referrerPolicy: "no-referrer",
    });
    if (answer.status === 404 && !this.#known) {
      this.#provable = false;
      return;
    }
    const proof = hmac(token(), `${CONTEXT}${challenge}`);
    if ((await beginning(answer)) !== JSON.stringify({ proof })) throw new Unproven();
    this.#known = this.#provable = true;
  }

  /** Loads a part of the page, if the proven server is there to send it. Throws Unproven. */
  async load<T>(part: () => Promise<T>): Promise<T> {
    if (!(await this.isOpen(true))) throw new Unproven();
    return part();
  }

  /** A stream of the proven server is open. */
  opened(): void {
    this.#open = true;
    for (const go of this.#waiting.splice(0)) go();
  }

  closed(): void {
    this.#open = false;
  }

  /** Returns whether a stream of the proven server is open. wait: for a short time, if it is not. */
  async isOpen(wait: boolean): Promise<boolean> {
    if (!this.#open && wait) {
      await new Promise<void>((resolve) => {
        this.#waiting.push(resolve);
        setTimeout(resolve, PATIENCE_MS);
      });
    }
    return this.#open;
  }
}

/** Returns an answer's text without its blanks, if it is short. A stranger's may have no end. */
async function beginning(answer: Response): Promise<string> {
  const reader = answer.body!.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  while (text.length < MAX_ANSWER) {
    const { done, value } = await reader.read();
    if (done) break;
    text += value;
  }
  void reader.cancel();
  return text.slice(0, MAX_ANSWER).replaceAll(" ", "");
}

export const trust = new Trust();
