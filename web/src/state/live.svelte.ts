/** The stream of what is there now. */
import { MESSAGES, type CardTile, type Fleet, type WaitingLine, type World } from "../messages";
import { read, Refused } from "./api";

/** After this time without a message the page says how old it is. */
const STALE_MS = 5000;
const BACK_OFF_MS = [500, 1000, 2000, 4000, 8000];
const RELOADED = "fenka reloaded for messages";

class Live {
  world = $state.raw<World>();
  fleet = $state.raw<Fleet>();
  /** The cards of the node that is looked at. */
  node = $state.raw<CardTile[]>([]);
  /** Why nothing comes; empty while the stream is open. */
  problem = $state("");
  /** Whether the server knows no such token. */
  locked = $state(false);
  /** Whether the last message is old. */
  stale = $state(false);
  /** The server's time, so that ages are right where the browser's clock is not. */
  now = $state(Date.now() / 1000);

  #node = "";
  #heard = performance.now();
  #stream: AbortController | undefined;

  start(): void {
    document.addEventListener("visibilitychange", () => this.#follow());
    // A new address with a token was opened in this tab.
    addEventListener("hashchange", () => this.locked && this.restart());
    setInterval(() => this.#tick(), 1000);
    this.#follow();
  }

  /** Opens the stream again, as with a new token or for another node. */
  restart(): void {
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
    } else if (!this.#stream) {
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
        await read(`live${node}`, signal, (text) => messages.add(text));
        this.problem = "the dashboard ended the connection";
      } catch (error) {
        if (signal.aborted) return;
        this.locked = error instanceof Refused && error.status === 401;
        this.problem = error instanceof Refused ? error.message : "the connection broke off";
        if (this.locked) return;
      }
      await pause(BACK_OFF_MS[Math.min(failures, BACK_OFF_MS.length - 1)]!, signal);
    }
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
  } else if (sessionStorage.getItem(RELOADED) !== String(world.messages)) {
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
