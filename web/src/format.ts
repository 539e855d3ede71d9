/** Figures as words. What is not known is a dash, never 0. */

export const UNKNOWN = "–";

/** Returns a size in MiB as the command line has it for slices. */
export function mib(size: number | null): string {
  return size === null ? UNKNOWN : `${Math.round(size)} MiB`;
}

/** Returns a size in GiB or TiB, for sums of many cards; in MiB below one GiB. */
export function gib(size: number | null): string {
  if (size === null) return UNKNOWN;
  if (size < 1024) return mib(size);
  const value = size / 1024;
  if (value >= 10_240) return `${Math.round(value / 1024)} TiB`;
  return `${value < 100 ? value.toFixed(1) : Math.round(value)} GiB`;
}

/** Returns `USED of HELD MiB`. */
export function usedOf(used: number | null, held: number): string {
  return used === null ? `${UNKNOWN} of ${held} MiB` : `${Math.round(used)} of ${held} MiB`;
}

export function percent(share: number | null): string {
  return share === null ? UNKNOWN : `${Math.round(share * 100)} %`;
}

/** Returns a span of time in its largest unit; in two for hours below ten. */
export function span(seconds: number | null): string {
  if (seconds === null) return UNKNOWN;
  const whole = Math.max(0, Math.floor(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} m`;
  if (whole < 36_000 && whole % 3600 >= 60) {
    return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} m`;
  }
  if (whole < 172_800) return `${Math.floor(whole / 3600)} h`;
  return `${Math.floor(whole / 86_400)} d`;
}

/** Returns hours with three digits after the point, as `fenka usage` does. */
export function amount(hours: number): string {
  return hours > 0 && hours < 0.0005 ? "<0.001" : hours.toFixed(3);
}

export function money(cost: number, currency: string): string {
  return `${cost.toFixed(2)} ${currency}`;
}

const clock = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });
const short = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const full = new Intl.DateTimeFormat("en-GB", { dateStyle: "full", timeStyle: "long" });

/** Returns `14:02:11`. */
export function clockTime(at: number): string {
  return clock.format(at * 1000);
}

/** Returns `14:02`. */
export function shortTime(at: number): string {
  return short.format(at * 1000);
}

export function fullTime(at: number): string {
  return full.format(at * 1000);
}

export function count(number: number, one: string, many = `${one}s`): string {
  return `${number.toLocaleString("en-GB")} ${number === 1 ? one : many}`;
}

export function list(words: string[]): string {
  return words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`;
}

/** Returns a card's name as a heading has it: `Card 0`, or `gpu-17 card 3`. */
export function cardName(id: string): string {
  const slash = id.lastIndexOf("/");
  return slash < 0 ? `Card ${id}` : `${id.slice(0, slash)} card ${id.slice(slash + 1)}`;
}

/** Returns one of eight hues for a user, the same at each visit. */
export function hue(user: string): number {
  let hash = 7;
  for (const letter of user) hash = (hash * 31 + letter.codePointAt(0)!) % 65_521;
  return HUES[hash % HUES.length]!;
}

const HUES = [190, 258, 305, 60, 225, 345, 140, 95];

/** Returns a number that a slice's fill is as wide as, in percent. */
export function width(part: number, whole: number): string {
  return `${whole > 0 ? Math.min(100, Math.max(0, (100 * part) / whole)).toFixed(3) : 0}%`;
}
