/** HMAC-SHA-256 (RFC 2104, FIPS 180-4). Browsers have it only on encrypted pages and loopback addresses, so not with `--listen`. */

const BLOCK = 64;
const WORD = 2 ** 32;

/** Returns the first 32 bits of the fractional part. */
function fraction(value: number): number {
  return Math.floor((value - Math.floor(value)) * WORD) | 0;
}

function primes(count: number): number[] {
  const found: number[] = [];
  for (let number = 2; found.length < count; number++) {
    if (found.every((prime) => number % prime !== 0)) found.push(number);
  }
  return found;
}

const ROUNDS = primes(64).map((prime) => fraction(prime ** (1 / 3)));
const START = primes(8).map((prime) => fraction(prime ** 0.5));

function rotate(word: number, by: number): number {
  return (word >>> by) | (word << (32 - by));
}

function sha256(message: Uint8Array): Uint8Array {
  const padded = new DataView(new ArrayBuffer(Math.ceil((message.length + 9) / BLOCK) * BLOCK));
  message.forEach((byte, place) => padded.setUint8(place, byte));
  padded.setUint8(message.length, 0x80);
  padded.setUint32(padded.byteLength - 4, message.length * 8);
  const state = [...START];
  const words = new Int32Array(64);
  for (let block = 0; block < padded.byteLength; block += BLOCK) {
    for (let round = 0; round < 64; round++) words[round] = round < 16 ? padded.getInt32(block + 4 * round) : next(words, round);
    mix(state, words);
  }
  const digest = new DataView(new ArrayBuffer(32));
  state.forEach((word, place) => digest.setInt32(4 * place, word));
  return new Uint8Array(digest.buffer);
}

function next(words: Int32Array, round: number): number {
  const early = words[round - 15]!;
  const late = words[round - 2]!;
  const low = rotate(early, 7) ^ rotate(early, 18) ^ (early >>> 3);
  const high = rotate(late, 17) ^ rotate(late, 19) ^ (late >>> 10);
  return (words[round - 16]! + low + words[round - 7]! + high) | 0;
}

/** Mixes one block into the state. */
function mix(state: number[], words: Int32Array): void {
  let [a, b, c, d, e, f, g, h] = state as [number, number, number, number, number, number, number, number];
  for (let round = 0; round < 64; round++) {
    const high = rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25);
    const first = (h + high + ((e & f) ^ (~e & g)) + ROUNDS[round]! + words[round]!) | 0;
    const low = rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22);
    const second = (low + ((a & b) ^ (a & c) ^ (b & c))) | 0;
    [h, g, f, e, d, c, b, a] = [g, f, e, (d + first) | 0, c, b, a, (first + second) | 0];
  }
  [a, b, c, d, e, f, g, h].forEach((word, place) => (state[place] = (state[place]! + word) | 0));
}

function join(first: Uint8Array, second: Uint8Array): Uint8Array {
  const both = new Uint8Array(first.length + second.length);
  both.set(first);
  both.set(second, first.length);
  return both;
}

export function hex(bytes: Uint8Array): string {
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Returns the HMAC of a text as hexadecimal digits. */
export function hmac(key: string, text: string): string {
  const encode = new TextEncoder();
  const given = encode.encode(key);
  const padded = join(given.length > BLOCK ? sha256(given) : given, new Uint8Array(BLOCK)).slice(0, BLOCK);
  const mask = (by: number) => padded.map((byte) => byte ^ by);
  return hex(sha256(join(mask(0x5c), sha256(join(mask(0x36), encode.encode(text))))));
}
