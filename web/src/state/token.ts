/** The token of this server: taken from the address once, then kept by the browser for this address. */

const KEY = `fenka token ${location.pathname}`;

/** A token that was typed in. It may be good for more than this server, so that it stays nowhere but in this page. */
let typed = "";

/** Takes `#token=…` out of the address bar, so that it is in no history and in no screenshot. Returns whether there is one. */
export function takeToken(): boolean {
  const found = /^#token=([\w.~+/=-]+)$/.exec(location.hash);
  if (!found) return false;
  typed = "";
  localStorage.setItem(KEY, found[1]!);
  history.replaceState(null, "", location.pathname + location.search);
  return true;
}

export function setToken(token: string): void {
  // Without TLS another server at this address could read what the browser keeps for it.
  if (location.protocol === "https:") localStorage.setItem(KEY, token);
  else typed = token;
}

/** Returns the token; empty for none. */
export function token(): string {
  return typed || (localStorage.getItem(KEY) ?? "");
}

export function authorization(): Record<string, string> {
  return token() ? { Authorization: `Bearer ${token()}` } : {};
}
