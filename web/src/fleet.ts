/** The cards of all nodes as three figures each, from either message that may have them. */
import type { Fleet, NodeLine, World } from "./messages";

export const LOST = 1;
export const CORDONED = 2;
export const IDLE = 4;
export const HOT = 8;
export const MIG = 16;

export const FLAGS = [
  { bit: LOST, word: "lost", sign: "✕" },
  { bit: CORDONED, word: "cordoned", sign: "▒" },
  { bit: IDLE, word: "idle", sign: "○" },
  { bit: HOT, word: "hot", sign: "▲" },
  { bit: MIG, word: "divided", sign: "┆" },
];

const WHOLE = 254;
const HOT_C = 85;

/** held, busy: shares. */
export interface Square {
  index: number;
  held: number;
  busy: number | null;
  flags: number;
}

/** held, busy: means over its cards. */
export interface NodeSquares {
  name: string;
  cards: Square[];
  held: number;
  busy: number | null;
}

export type Order = "name" | "held" | "free" | "busy" | "sick";

/** Returns all nodes with their cards, in the order of the message. */
export function cardsOf(world: World, fleet: Fleet | undefined): NodeSquares[] {
  if (fleet && world.cards.length === 0) return fromFleet(fleet);
  const idle = new Set(world.programs.filter((line) => line.idle_s !== null).flatMap((line) => line.cards));
  const nodes = new Map<string, Square[]>(world.nodes.map((node) => [node.name, []]));
  for (const card of world.cards) {
    const flags =
      (card.healthy ? 0 : LOST) |
      (card.note ? CORDONED : 0) |
      (idle.has(card.id) ? IDLE : 0) |
      ((card.temperature_c ?? 0) > HOT_C ? HOT : 0) |
      (card.slices.some((slice) => slice.profile) ? MIG : 0);
    const square = { index: card.index, held: card.memory_mib ? card.held_mib / card.memory_mib : 0, busy: card.busy, flags };
    nodes.set(card.node, [...(nodes.get(card.node) ?? []), square]);
  }
  return [...nodes].map(([name, cards]) => summed(name, cards));
}

function fromFleet(fleet: Fleet): NodeSquares[] {
  const bytes = atob(fleet.cards);
  let at = 0;
  return fleet.nodes.map((name, node) => {
    const cards: Square[] = [];
    for (let index = 0; index < fleet.counts[node]!; index++, at += 3) {
      const busy = bytes.charCodeAt(at + 1);
      cards.push({
        index,
        held: Math.min(1, bytes.charCodeAt(at) / WHOLE),
        busy: busy > WHOLE ? null : busy / WHOLE,
        flags: bytes.charCodeAt(at + 2),
      });
    }
    return summed(name, cards);
  });
}

function summed(name: string, cards: Square[]): NodeSquares {
  const known = cards.filter((card) => card.busy !== null);
  return {
    name,
    cards,
    held: cards.length ? cards.reduce((sum, card) => sum + card.held, 0) / cards.length : 0,
    busy: known.length ? known.reduce((sum, card) => sum + card.busy!, 0) / known.length : null,
  };
}

/** Returns whether a node has the words of a filter, and a card with a flag if one is asked for. */
export function matches(node: NodeSquares, line: NodeLine | undefined, filter: string, flag: number): boolean {
  if (flag && !node.cards.some((card) => card.flags & flag)) return false;
  const text = `${node.name} ${line?.model ?? ""} ${line?.state ?? ""} ${line?.note ?? ""}`.toLowerCase();
  return filter
    .toLowerCase()
    .split(/\s+/)
    .every((word) => text.includes(word));
}

const ORDERS: Record<Order, (node: NodeSquares) => number> = {
  name: () => 0,
  held: (node) => -node.held,
  free: (node) => node.held,
  busy: (node) => -(node.busy ?? -1),
  sick: (node) => -node.cards.reduce((sum, card) => sum + (card.flags & LOST ? 100 : 0) + (card.flags & HOT ? 1 : 0), 0),
};

const collator = new Intl.Collator("en", { numeric: true });

export function ordered(nodes: NodeSquares[], order: Order): NodeSquares[] {
  const key = ORDERS[order];
  return [...nodes].sort((one, other) => key(one) - key(other) || collator.compare(one.name, other.name));
}

/** Returns a card in words, as the live region says it. */
export function inWords(node: NodeSquares, card: Square): string {
  const flags = FLAGS.filter((flag) => card.flags & flag.bit).map((flag) => flag.word);
  const busy = card.busy === null ? "busy not known" : `${Math.round(card.busy * 100)} % busy`;
  return [`${node.name} card ${card.index}`, `${Math.round(card.held * 100)} % held`, busy, ...flags].join(", ");
}
