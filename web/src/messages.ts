// Made by `make reference` from src/fenka/views/board.py.
// Times are Unix seconds, sizes MiB, shares 0 to 1. What is not known is null.

export const MESSAGES = 1;

/**
 * A slice on a card, drawn as wide as its share of the card's memory.
 *
 * Attributes:
 *     program: the id of the program that holds it; empty for one that this viewer may not see.
 *     user: on a cluster the namespace.
 *     compute: percent of the card's time; 0 for no limit.
 *     busy: share of the card's time that it had.
 *     profile: of the MIG instance that it is in or takes; empty for a slice of a card.
 */
export interface SliceTile {
  program: string;
  name: string;
  user: string;
  held_mib: number;
  used_mib: number | null;
  compute: number;
  compute_mode: "hard" | "soft" | "weight";
  busy: number | null;
  profile: string;
  start: number;
}

/**
 * A card and its slices.
 *
 * Attributes:
 *     id: `INDEX` on a workstation, `NODE/INDEX` on a cluster.
 *     units, free_units: all of it, and what no program holds or takes.
 *     note: why it takes nothing new; empty if it does.
 *     unleased: who uses memory of it without a lease, in a sentence.
 *     xids: the last errors that its driver reported, the newest first, in sentences.
 *     readable: why the driver's figures are unknown; empty if they are known.
 */
export interface CardTile {
  id: string;
  node: string;
  index: number;
  uuid: string;
  model: string;
  memory_mib: number;
  units: number;
  free_units: number;
  healthy: boolean;
  held_mib: number;
  used_mib: number | null;
  busy: number | null;
  temperature_c: number | null;
  power_w: number | null;
  power_limit_w: number | null;
  unleased_mib: number;
  unleased: string;
  note: string;
  xids: Array<string>;
  readable: string;
  slices: Array<SliceTile>;
}

/**
 * A program: a job of a workstation, a pod of a cluster.
 *
 * Attributes:
 *     id: its identity; a name that is used twice has two.
 *     kind: run, training, notebook or service.
 *     group: the gang, the training or the service that it belongs to; empty for none.
 *     cards: ids of the cards that it holds parts of.
 *     busy: share of one card's time, added over its cards.
 *     idle_s: seconds since it last had card time; None if it is not idle, or that is not known.
 *     starts: ids of the waiting programs that would start if it ended.
 *     violations: sentences about exceeded limits.
 *     own: whether the viewer may stop and resize it.
 *     address: a notebook's or service's URL, without any token.
 *     priority: larger numbers are served first; None on a cluster, where it cannot be changed.
 */
export interface ProgramLine {
  id: string;
  name: string;
  user: string;
  kind: string;
  state: "running" | "starting" | "waiting";
  asks: string;
  requested_at: number;
  started_at: number | null;
  deadline: number | null;
  group: string;
  cards: Array<string>;
  held_mib: number;
  used_mib: number | null;
  busy: number | null;
  compute: number;
  compute_mode: "hard" | "soft" | "weight";
  idle_s: number | null;
  starts: Array<string>;
  violations: Array<string>;
  own: boolean;
  address: string;
  priority: number | null;
}

/**
 * A request that waits.
 *
 * Attributes:
 *     asks: as its user wrote it.
 *     reserved: ids of the cards that are kept for it.
 *     starts_by: when these are free at the latest.
 *     why: why it waits, in a sentence.
 *     helps: what would let it start, in sentences.
 */
export interface WaitingLine {
  id: string;
  position: number;
  name: string;
  user: string;
  asks: string;
  priority: number;
  since: number;
  reserved: Array<string>;
  starts_by: number | null;
  why: string;
  helps: Array<string>;
  own: boolean;
}

/**
 * A training, a notebook or a version of a service.
 *
 * Attributes:
 *     state: as `fenka ps` prints it.
 *     ready, desired: replicas of a service.
 *     requests_per_s, waiting_requests: of a service; None if that is not known.
 *     loss: steps and values of a training's loss, from its TensorBoard files; empty without them.
 */
export interface WorkloadLine {
  name: string;
  user: string;
  kind: string;
  state: string;
  created: number;
  version: string;
  address: string;
  why: string;
  ready: number | null;
  desired: number | null;
  requests_per_s: number | null;
  waiting_requests: number | null;
  loss: Array<[number, number]>;
  programs: Array<string>;
}

/**
 * A user or a namespace: what it holds, uses and waits for now.
 *
 * Attributes:
 *     busy: cards that were busy for it, added over all.
 *     waiting: how many of its requests wait. oldest: since when the first of them does.
 *     idle_mib: held by its programs that are idle.
 */
export interface PersonLine {
  user: string;
  held_mib: number;
  used_mib: number | null;
  busy: number | null;
  waiting: number;
  oldest: number | null;
  idle_mib: number;
}

/**
 * A node of a cluster, without its cards.
 *
 * Attributes:
 *     state: as `fenka top node` prints it.
 *     note: why it takes nothing new, or what is planned for it.
 *     price: of an elastic node, an hour; None if it is not known.
 *     seen_at: the time of its last reading.
 */
export interface NodeLine {
  name: string;
  state: string;
  model: string;
  cards: number;
  units: number;
  free_units: number;
  unit_mib: number;
  note: string;
  price: number | null;
  seen_at: number | null;
}

/**
 * All that one look shows. The message `world`.
 *
 * Attributes:
 *     name: of the machine, or of the cluster's context.
 *     cards: all cards; none where there are more than 64: then `fleet` has them.
 *     programs: all that hold something; where `fleet` has the cards, those that are idle and hold most.
 *     programs_total: how many hold something.
 *     largest_mib: the largest slice that starts at once. free_mib: what is free in all.
 *     problems: sentences about what is not known now, such as a daemon that does not answer.
 *     actions: whether this viewer may stop and resize.
 *     currency: of prices; empty where there are none.
 */
export interface World {
  type: "world";
  at: number;
  place: "cluster" | "workstation";
  name: string;
  version: string;
  simulated: boolean;
  unit_mib: number;
  cards: Array<CardTile>;
  programs: Array<ProgramLine>;
  waiting: Array<WaitingLine>;
  waiting_total: number;
  workloads: Array<WorkloadLine>;
  people: Array<PersonLine>;
  nodes: Array<NodeLine>;
  free_mib: number;
  largest_mib: number;
  problems: Array<string>;
  actions: boolean;
  currency: string;
  programs_total: number;
  messages: number;
}

/**
 * The cards of many nodes, three bytes a card. The message `fleet`.
 *
 * Attributes:
 *     nodes: their names in the order of `cards`. counts: how many cards each has.
 *     cards: for each card the share held and the share busy, of 254, or 255 if unknown. Then its flags:
 *         1 lost, 2 takes nothing new, 4 idle, 8 hot, 16 in MIG mode.
 */
export interface Fleet {
  type: "fleet";
  at: number;
  nodes: Array<string>;
  counts: Array<number>;
  cards: string;
}

/**
 * One program in full.
 *
 * Attributes:
 *     explanation: the whole of `fenka why`, line by line.
 *     events: time and sentence: asked, granted, resized, errors, ended; the newest last.
 *     refused: how often memory beyond its slice was refused; None if that is not known.
 *     throttled_s: seconds that its launches waited for their share; None if that is not known.
 *     logs: whether `api/logs/ID` has its output for this viewer.
 */
export interface ProgramDetail {
  program: ProgramLine | null;
  waiting: WaitingLine | null;
  explanation: Array<string>;
  events: Array<[number, string]>;
  refused: number | null;
  throttled_s: number | null;
  logs: boolean;
  mates: Array<string>;
}

/**
 * Figures at a constant step. mean, highest: None where nothing was recorded.
 *
 * unit: MiB, share, celsius or watt. limit: what is drawn dashed beside it; empty for none.
 */
export interface Series {
  name: string;
  unit: string;
  start: number;
  step: number;
  mean: Array<number | null>;
  highest: Array<number | null>;
  limit: Array<number | null>;
}

/**
 * Figures over a span. problem: why there is nothing; empty if there is.
 */
export interface HistoryAnswer {
  series: Array<Series>;
  marks: Array<[number, string]>;
  problem: string;
}

/**
 * The part of the cards' time that a user or a namespace had, or that nobody had.
 *
 * Attributes:
 *     kind: held, idle or unobserved.
 *     name: of the user or namespace; empty unless it was held.
 *     card_hours, held_gib_hours: as `fenka usage` has them.
 *     used_share: the used part of the held memory; None if that is not known.
 *     cost: in the currency; None without a price.
 */
export interface UsageLine {
  kind: "held" | "idle" | "unobserved";
  name: string;
  card_hours: number;
  held_gib_hours: number;
  used_share: number | null;
  cost: number | null;
}

/**
 * How requests waited that were granted in a span.
 *
 * Attributes:
 *     granted: how many were granted. waited: how many of them not at once; None if that is not known.
 *     mean_s, longest_s: seconds until they were granted; None if that is not known.
 *     reasons: why requests waited, and how many at a time on average, the most frequent first.
 */
export interface WaitSums {
  granted: number;
  waited: number | null;
  mean_s: number | null;
  longest_s: number | null;
  reasons: Array<[string, number]>;
}

/**
 * Sums of this month and of today in UTC, and how requests waited in the last 24 hours.
 *
 * Attributes:
 *     currency: of costs.
 *     since: the first recorded day's beginning, in Unix seconds; None if nothing is recorded.
 *     waits: None if that is not recorded.
 *     problem: why there are no sums; empty if there are.
 */
export interface Sums {
  month: Array<UsageLine>;
  today: Array<UsageLine>;
  currency: string;
  since: number | null;
  waits: WaitSums | null;
  problem: string;
}

/**
 * A question: what starts if programs end and cards are added?
 *
 * end: ids of programs. add: number of cards by model.
 */
export interface WhatIf {
  end: Array<string>;
  add: Record<string, number>;
}

/**
 * starts: names of what would start. waits: name and reason of what would not. sentence: both in one.
 */
export interface WhatIfAnswer {
  starts: Array<string>;
  waits: Array<[string, string]>;
  sentence: string;
}
