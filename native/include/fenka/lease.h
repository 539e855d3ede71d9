/* The two files that an agent and the programs of a lease exchange, one for each direction.
 *
 *   <dir>/lease/control    agent -> program.  Limits. The program cannot write it.
 *   <dir>/account/slots    program -> agent.  One slot per process; the total is the sum of the slots.
 *
 * <dir> is /run/fenka inside an isolated lease; in cooperative mode FENKA_LEASE names it.
 *
 * This header is the only definition of the two layouts: the C library includes it, and fenka.isolation reads the same
 * text through cffi. So it contains only plain declarations and integer constants. Fields are little-endian and
 * naturally aligned, without implicit padding. */
#ifndef FENKA_LEASE_H
#define FENKA_LEASE_H
#include <stdint.h>

#define FENKA_CONTROL_MAGIC 0x4c5254434b4e4546 /* "FENKCTRL" */
#define FENKA_ACCOUNT_MAGIC 0x544e4343414b4e46 /* "FNKACCNT" */
#define FENKA_LAYOUT_VERSION 2                 /* of the control page */
#define FENKA_ACCOUNT_VERSION 6
#define FENKA_CONTROL_BYTES 4096
#define FENKA_MAX_CARDS 16
#define FENKA_MAX_SLOTS 1024

/* The meaning of compute_percent. A reader that does not know the mode refuses the page, because ignoring a limit would
 * take other programs' time. */
#define FENKA_COMPUTE_HARD 0   /* never more than that share of the card's time; 100 = no limit */
#define FENKA_COMPUTE_SOFT 1   /* that share, and what other leases do not use */
#define FENKA_COMPUTE_WEIGHT 2 /* a weight against other leases that want the card */

/* The slice of one card. Limits change under the page's `generation`. The feedback after them is written ten times a
 * second, under its own sequence lock, so that programs need not read the whole page again. */
struct fenka_card_limit {
    char uuid[48];            /* as NVML prints it, "GPU-…", NUL-padded */
    uint64_t memory_bytes;    /* hard limit over all processes of the lease */
    uint64_t context_bytes;   /* charged once per process that has a context on the card */
    uint32_t compute_percent; /* 1 to 100 */
    uint32_t compute_mode;    /* FENKA_COMPUTE_… */
    uint64_t feedback_seq;    /* sequence lock: odd while the agent writes; 0 = no feedback yet */
    uint64_t feedback_at;     /* CLOCK_MONOTONIC, ns: time of the reading */
    uint64_t busy_ns;         /* card time used by the lease's processes, as the driver measures it */
    uint32_t allowed;         /* but for limits below 100 and hard: 1/10000 of the card's time that may be used now */
    uint32_t reserved[5];
};

/* One page. `generation` is a sequence lock: odd while the agent writes, and a reader that saw two
 * different values, or an odd one, reads again. */
struct fenka_control {
    uint64_t magic;
    uint32_t version;
    uint32_t bytes; /* FENKA_CONTROL_BYTES */
    uint64_t generation;
    char lease[64]; /* the lease's id, NUL-padded */
    uint32_t card_count;
    uint32_t reserved;
    /* Feedback, too. A lease that requested no compute has 100 and hard. While other leases have a share or weight on
     * one of its cards, `allowed` holds for it. CLOCK_MONOTONIC, ns: since when; 0 = nobody has. */
    uint64_t yielding_since;
    uint32_t reserved2[4];
    struct fenka_card_limit cards[16]; /* FENKA_MAX_CARDS; order = the program's device order */
};

/* A process owns the slot whose identity word names it. One word contains everything that identifies an owner, so a
 * slot changes hands by one compare-and-swap from the value that was read. There is no lock that a killed process
 * could hold, and no moment at which a new owner is half written.
 *
 *   bits 0-21   PID
 *   bit  22     the process named here is reclaiming the slot (its former owner is dead)
 *   bits 23-30  index in pid_namespaces: only processes of the same namespaces may decide whether the owner is dead
 *   bit  31     orphaned: the process named here is dead, and others may still hold what it exported
 *   bits 32-63  start time in clock ticks after boot (field 22 of /proc/PID/stat), low 32 bits, as a process of
 *               the same time namespace reads it
 *
 * 0 = free. A dead owner's slot is first taken over (the reclaiming process's identity with bit 22 set), then zeroed,
 * then freed. If the reclaiming process dies, it is a dead owner itself. A slot with something in `exported` is marked
 * by bit 31 instead, and its other words are zeroed. It is reclaimed when nothing of its exports can be held any more:
 * see below. */
#define FENKA_IDENTITY_RECLAIMING 22
#define FENKA_IDENTITY_NAMESPACE 23
#define FENKA_IDENTITY_ORPHANED 31
#define FENKA_IDENTITY_START 32
#define FENKA_MAX_NAMESPACES 255 /* the index 255 = no entry was free: that owner is never reclaimed */

/* A process that was forked without exec has copies of its parent's descriptors. The driver frees the memory of an open
 * card with the last copy, whichever process has it. So a process that opens the driver sets a lock on the account
 * before (F_OFD_SETLK, shared), on a descriptor that its children inherit like the driver's, and that exec closes. A
 * dead owner's slot is kept while somebody has that lock. It has one byte, far behind the end of the file:
 *
 *   bits 0-21   PID of the identity
 *   bits 22-29  its index in pid_namespaces
 *   bits 30-61  its start time
 *
 * Owners that never opened the driver have no lock, and hold no memory. */
#define FENKA_OWNER_LOCK_NAMESPACE 22
#define FENKA_OWNER_LOCK_START 30

/* When the last process of a namespace has ended, no process is left that may reclaim its slots. Only the agent sees
 * that. It writes what it sees into namespace_states, one plain word at a time; reclaiming remains with the processes
 * and their compare-and-swap:
 *
 *   0          in use, or free while its pid_namespaces word is 0
 *   RETIRING   no process takes this index any more. The agent then looks at all processes of the machine. Processes
 *              that took the index earlier are seen, because they took it before this word was written. If the
 *              namespace has a process after all, the word becomes 0 again.
 *   ENDED      owners with this index are dead. Any process reclaims their slots, unless they are locked.
 *
 * When no identity has the index any more, the agent writes 0 to the pid_namespaces word and then to this one.
 *
 * An agent that is itself in a nested PID namespace cannot see whether a namespace has ended or is a sibling's, unless it
 * has seen a process in it before. Then `nested_agent` is 1, and a process that enters its namespace requests a look and
 * waits for it, so that it is seen however briefly it lives.
 *
 * A process whose request does not fit because owners of other namespaces hold memory adds 1 to reap_requested. It
 * waits a moment for the agent, which writes the value that it has read and served to reap_completed. */
#define FENKA_NAMESPACE_RETIRING 1
#define FENKA_NAMESPACE_ENDED 2

/* The budget of a card's time that the processes of a lease share: see native/shim/compute_budget.c. Times are
 * nanoseconds, moments are of CLOCK_MONOTONIC. */
struct fenka_compute_budget {
    uint64_t next_launch_at; /* no launch before this moment; in the future = debt */
    uint64_t charged;        /* sum of all costs as they were estimated */
    /* The agent's last feedback that was compared with `charged`: */
    uint64_t feedback_seq;
    uint64_t feedback_at;
    uint64_t last_busy_ns;
    uint64_t last_charged;
    int64_t excess;          /* charged beyond what was measured, and not refunded yet */
    uint64_t recent_busy;    /* decaying sum of measured time */
    uint64_t recent_charged; /* and of charged time */
    uint64_t scale;          /* factor on estimates, from the ratio of the two: 1/65536, 0 = never compared */
    uint64_t precharge_ns;   /* what a launch of unknown cost is charged in advance */
    uint64_t unclaimed_ns;   /* charged because it was measured, before a process has charged it itself */
    uint64_t generation;     /* of the control page at the last comparison: with others, other limits held meanwhile */
    /* Neither is of the budget. They are counted by card for the agent alone, and never decrease: */
    uint64_t throttled_ns;  /* that threads have waited in launches, all added up */
    uint64_t out_of_memory; /* requests for memory of this card that did not fit in the slice */
    uint64_t reserved[1];
};

/* Memory that processes export to each other (cuMemExportToShareableHandle, cuIpcGetMemHandle) is charged to its
 * exporter until that has released it and no descriptor of it is open. What importers hold of it then moves to
 * `released`. When the exporter dies, `exported` stays in its slot, which bit 31 of its identity marks as orphaned:
 *
 *   held on a card = sum of memory + released + sum of orphaned exports + imports beyond all that
 *
 * The last term is, for each process, what it has imported beyond all that the lease's processes, including dead ones,
 * have exported: that memory was made in another lease.
 *
 * A process whose request does not fit lowers both to what can be held at most: `released` to what the lease's
 * processes have imported, orphans to that plus what is in descriptors. The kernel counts the latter: each exported
 * descriptor has a lock (F_OFD_SETLK, shared) that lasts until its last copy is closed, in any process, and also while
 * it is in transit in a socket. /proc/locks lists the lock with its first byte and its length:
 *
 *   first byte, bits 43-62  from `export_lock_id` in the account
 *               bits 23-42  from the exporter's identity
 *               bits 19-22  card
 *               bits 0-18   number of the block
 *   length                  of the block, in units of 64 KiB, rounded up
 *
 * A lock that another tenant forges can only keep orphans from being lowered. */
#define FENKA_EXPORT_LOCK_LEASE 43
#define FENKA_EXPORT_LOCK_OWNER 23
#define FENKA_EXPORT_LOCK_CARD 19
#define FENKA_EXPORT_LOCK_UNIT 65536 /* bytes */

struct fenka_account {
    uint64_t magic;
    uint32_t version;
    uint32_t slot_count;            /* FENKA_MAX_SLOTS */
    uint64_t slots_used;            /* slots from here on were never owned; never decreases */
    uint64_t shared_cards;          /* bit = card: something was exported or imported there */
    uint64_t reap_requested;        /* by processes */
    uint64_t reap_completed;        /* by the agent */
    uint64_t export_lock_id;        /* 20 random bits; 0 = nothing was exported to a descriptor yet */
    uint64_t nested_agent;          /* by the agent */
    uint64_t pid_namespaces[256];   /* bits 0-31: inode of /proc/self/ns/pid, bits 32-63: of /proc/self/ns/time, which
                                   * shifts start times; 0 = the kernel has none */
    uint64_t namespace_states[256]; /* FENKA_NAMESPACE_…, written by the agent alone */
    uint64_t released[16];          /* by card: released by living exporters, but held by importers */
    uint64_t peak[16];              /* by card: the largest total after a charge; never decreases */
    uint64_t refused;               /* requests that did not fit in the slices; never decreases */
    uint64_t reserved[15];
    uint64_t identity[1024];     /* FENKA_MAX_SLOTS */
    uint64_t memory[16][1024];   /* bytes of device memory held: [card of control][slot] */
    uint64_t exported[16][1024]; /* of these, or of a dead process's: bytes that others may hold as well */
    uint64_t imported[16][1024]; /* bytes held of blocks that another process exported, not in `memory` */
    struct fenka_compute_budget compute_budgets[16];
};

#endif
