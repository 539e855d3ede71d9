/** The stream of what is there now. */
import { MESSAGES, type CardTile, type Fleet, type WaitingLine, type World } from "../messages";
import { readLive, Refused } from "./api";
import { token } from "./token";
import { ENCRYPTED, trust, Unproven } from "./trust";

/** After this time without a message the page says how old it is. */
const STALE_MS = 5000;
const BACK_OFF_MS = [500, 1000, 2000, 4000, 8000];
const RELOADED = "fenka reloaded for messages";

const ENDED = "the dashboard has ended: run `fenka dashboard` again, and open the address that it prints";
const STRANGER = "another server answers at this address now: run `fenka dashboard` again, and open the address that it prints";
const WRONG_TOKEN = "the token is missing or of an earlier start: open the address that `fenka dashboard` prints";

class Live {
  world = $state.raw<World>();
  fleet = $state.raw<Fleet>();
  /** The cards of the node that is looked at. */
  node = $state.raw<CardTile[]>([]);
  /** Why nothing comes; empty while the stream is open. */
  problem = $state("");
  /** Whether the server knows no such token. */
  locked = $state(false);
  /** Whether nothing is asked any more: the server has ended, or it cannot prove that it is the same. */
  ended = $state(false);
  /** Whether its user may have the page connect again. */
  retriable = $state(false);
  /** Whether the last message is old. */
  stale = $state(false);
  /** The server's time, so that ages are right where the browser's clock is not. */
  now = $state(Date.now() / 1000);

  #node = "";
  #token = "";
  #heard = performance.now();
  #stream: AbortController | undefined;

  start(): void {
    this.#token = token();
    document.addEventListener("visibilitychange", () => this.#follow());
    // A new address with a token was opened in this tab.
    addEventListener("hashchange", () => (this.locked || this.ended) && token() !== this.#token && this.begin());
    setInterval(() => this.#tick(), 1000);
    this.#follow();
  }

  /** Begins anew, as with another token. */
  begin(): void {
    trust.forget();
    this.#token = token();
    this.locked = this.ended = this.retriable = false;
    this.restart();
  }

  /** Opens the stream again, as for another node. */
  restart(): void {
    if (this.ended) return;
    this.#stream?.abort();
    this.#stream = undefined;
    this.#follow();
  }

  /** Asks for the cards of a node, as long as somebody looks at it. */
  watchNode(name: string): void {
    if (name === this.#node) return;
    this.#node = name;
    this.node = [];
    this.restart();
  }

  /** A browser opens six connections to a server, and those of hidden tabs would use them up. */
  #follow(): void {
    if (document.hidden) {
      this.#stream?.abort();
      this.#stream = undefined;
    } else if (!this.#stream && !this.ended) {
      this.#stream = new AbortController();
      void this.#read(this.#stream.signal);
    }
  }

  async #read(signal: AbortSignal): Promise<void> {
    for (let failures = 0; !signal.aborted; failures++) {
      const messages = new Messages((event, data) => {
        failures = 0;
        this.#receive(event, data);
      });
      try {
        const node = this.#node && `?node=${encodeURIComponent(this.#node)}`;
        await readLive(`live${node}`, signal, (text) => messages.add(text));
        this.problem = this.ended ? ENDED : "the dashboard ended the connection";
      } catch (error) {
        if (signal.aborted) return;
        this.#failed(error);
      }
      if (this.locked || this.ended) return;
      if (!trust.mayReconnect) {
        this.ended = this.retriable = true;
        return;
      }
      await pause(BACK_OFF_MS[Math.min(failures, BACK_OFF_MS.length - 1)]!, signal);
    }
  }

  #failed(error: unknown): void {
    if (error instanceof Unproven) {
      // To a page that has just come from the server, the server is right, and the token is not.
      this.ended = trust.known;
      this.locked = !trust.known;
      this.problem = trust.known ? STRANGER : WRONG_TOKEN;
      return;
    }
    this.locked = error instanceof Refused && error.status === 401;
    this.problem = error instanceof Refused ? error.message : "the connection broke off";
  }

  #receive(event: string, data: string): void {
    this.problem = "";
    this.locked = this.stale = false;
    this.#heard = performance.now();
    switch (event) {
      case "world":
        this.world = JSON.parse(data) as World;
        this.now = this.world.at;
        checkVersion(this.world);
        break;
      case "end":
        this.#end();
        break;
      case "fleet":
        this.fleet = JSON.parse(data) as Fleet;
        break;
      case "node":
        this.node = JSON.parse(data) as CardTile[];
        break;
      case "queue":
        if (this.world) {
          const queue = JSON.parse(data) as { waiting: WaitingLine[]; waiting_total: number };
          this.world = { ...this.world, ...queue };
        }
        break;
    }
  }

  /** The server has said that it ends. Where TLS proves who answers, the next one is awaited. */
  #end(): void {
    this.ended = !ENCRYPTED;
  }

  #tick(): void {
    const age = performance.now() - this.#heard;
    this.stale = age > STALE_MS;
    if (this.world) this.now = this.world.at + age / 1000;
  }
}

/** Cuts a stream of server-sent events into messages. */
class Messages {
  #rest = "";

  constructor(readonly receive: (event: string, data: string) => void) {}

  add(text: string): void {
    const frames = (this.#rest + text).split("\n\n");
    this.#rest = frames.pop()!;
    for (const frame of frames) {
      let event = "";
      let data = "";
      for (const line of frame.split("\n")) {
        if (line.startsWith("event: ")) event = line.slice(7);
        else if (line.startsWith("data: ")) data += line.slice(6);
      }
      if (event) this.receive(event, data);
    }
  }
}

/** A page of an earlier release is still open after an upgrade: it loads the new one, once. */
function checkVersion(world: World): void {
  if (world.messages === MESSAGES) {
    sessionStorage.removeItem(RELOADED);
  } else if (trust.mayReload && sessionStorage.getItem(RELOADED) !== String(world.messages)) {
    sessionStorage.setItem(RELOADED, String(world.messages));
    location.reload();
  }
}

function pause(time: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, time);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      resolve();
    });
  });
}

export const live = new Live();
