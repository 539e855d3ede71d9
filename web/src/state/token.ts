/** The token of this server: taken from the address once, then kept by the browser for this address. */

const KEY = `fenka token ${location.pathname}`;

/** Takes `#token=…` out of the address bar, so that it is in no history and in no screenshot. */
export function takeToken(): void {
  const found = /^#token=([\w.~+/=-]+)$/.exec(location.hash);
  if (!found) return;
  localStorage.setItem(KEY, found[1]!);
  history.replaceState(null, "", location.pathname + location.search);
}

export function setToken(token: string): void {
  localStorage.setItem(KEY, token);
}

export function authorization(): Record<string, string> {
  const token = localStorage.getItem(KEY);
  return token ? { Authorization: `Bearer ${token}` } : {};
}
