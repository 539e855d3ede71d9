/** Which screen is shown: the part of the address after `#`, such as `#/program/ID`. */
import { takeToken } from "./token";

class Route {
  /** The words of the path, decoded. */
  parts = $state<string[]>(read());

  constructor() {
    addEventListener("hashchange", () => {
      this.parts = read();
      scrollTo(0, 0);
    });
  }

  get screen(): string {
    return this.parts[0] ?? "";
  }

  /** All behind the first word, for ids with slashes in them. */
  get id(): string {
    return this.parts.slice(1).join("/");
  }
}

function read(): string[] {
  takeToken();
  const path = location.hash.replace(/^#\/?/, "");
  try {
    return path.split("/").filter(Boolean).map(decodeURIComponent);
  } catch {
    return [path];
  }
}

/** Returns the address of a screen. */
export function link(screen: string, id = ""): string {
  return id ? `#/${screen}/${id.split("/").map(encodeURIComponent).join("/")}` : `#/${screen}`;
}

export const route = new Route();
