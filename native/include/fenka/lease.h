/* What an agent and the programs that hold a lease say to each other: two files, two directions.
 *
 *   <dir>/lease/control    agent -> program.  Limits. The program cannot write it.
 *   <dir>/account/slots    program -> agent.  One slot per process; the total is the sum of the slots.
 *
 * <dir> is /run/fenka inside an isolated lease; in cooperative mode FENKA_LEASE names it.
 *
 * This header is the only definition of the two layouts: the C library includes it, and
 * fenka.isolation reads the same text through cffi. So it holds plain declarations and integer
 * constants only; fields are little-endian and naturally aligned, with no implicit padding.
 */
#ifndef FENKA_LEASE_H
#define FENKA_LEASE_H
#include <stdint.h>

#define FENKA_CONTROL_MAGIC 0x4c5254434b4e4546 /* "FENKCTRL" */
#define FENKA_ACCOUNT_MAGIC 0x544e4343414b4e46 /* "FNKACCNT" */
#define FENKA_LAYOUT_VERSION 2 /* of the control page */
#define FENKA_ACCOUNT_VERSION 5
#define FENKA_CONTROL_BYTES 4096
#define FENKA_MAX_CARDS 16
#define FENKA_MAX_SLOTS 1024

/* What compute_percent means. Who does not know a mode refuses the page, as one of another version: a program
 * that ignored a limit would take other programs' time. */
#define FENKA_COMPUTE_HARD 0   /* never more than that share of the card's time; 100 = no limit */
#define FENKA_COMPUTE_SOFT 1   /* that share, and what nobody else wants */
#define FENKA_COMPUTE_WEIGHT 2 /* a weight against others that want the card; alone, all of it */

/* The slice of one card. Limits change under the page's `generation`; what follows them is told ten times a
 * second, under a sequence lock of its own, so that nobody reads the whole page again for it. */
struct fenka_card_limit {
    char uuid[48];            /* as NVML prints it, "GPU-…", NUL-padded */
    uint64_t memory_bytes;    /* hard limit over all processes of the lease */
    uint64_t context_bytes;   /* charged once per process that has a context on the card */
    uint32_t compute_percent; /* 1 to 100 */
    uint32_t compute_mode;    /* FENKA_COMPUTE_… */
    uint64_t feedback_seq;            /* sequence lock: odd while the agent writes; 0 = nothing was ever told */
    uint64_t feedback_at;         /* CLOCK_MONOTONIC, ns: when that was so */
    uint64_t busy_ns;         /* the card's time that the lease's processes have had, as the driver measures it */
    uint32_t allowed;         /* of soft and weight: 1/10000 of the card's time that may be had now */
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
    uint32_t reserved[7];
    struct fenka_card_limit cards[16]; /* FENKA_MAX_CARDS; order = the program's device order */
};

/* A process owns the slot whose identity word names it. One word says everything that a judge needs, so
 * that a slot changes hands by one compare-and-swap from the exact value seen: there is no lock that a
 * killed process could hold, and no moment at which a newcomer is half named.
 *
 *   bits 0-21   PID
 *   bit  22     the slot is being emptied by the process named here (its former owner is dead)
 *   bits 23-30  index in pid_namespaces: a PID is judged only by a process of the same namespaces
 *   bit  31     the process named here is dead, and what it exported may still be held by others
 *   bits 32-63  start time in clock ticks after boot (field 22 of /proc/PID/stat), low 32 bits, as a process of
 *               the same time namespace reads it
 *
 * 0 = free. A dead owner's slot is first taken over (the emptier's own identity with bit 22 set), then
 * zeroed, then freed; if the emptier dies, it is itself a dead owner. A slot with something in `exported` is
 * marked by bit 31 instead, its other words are zeroed, and it is emptied when nothing of that can be held any
 * more: see below. */
#define FENKA_IDENTITY_RECLAIMING 22
#define FENKA_IDENTITY_NAMESPACE 23
#define FENKA_IDENTITY_ORPHANED 31
#define FENKA_IDENTITY_START 32
#define FENKA_MAX_NAMESPACES 255 /* the index 255 = no room was left: nobody judges that owner */

/* When the last process of a namespace has ended, nobody is left who may judge its slots. Only the agent sees that,
 * and it writes what it sees into namespace_states, one plain word at a time, so that all emptying remains with the
 * processes and their compare-and-swap:
 *
 *   0          in use, or free while its pid_namespaces word is 0
 *   RETIRING   no process takes this index any more. The agent then looks at all processes of the machine: those that
 *              took the index earlier are seen, for they took it before this word was written. If the namespace has a
 *              process after all, the word becomes 0 again.
 *   ENDED      owners with this index are dead, whoever asks. Any process empties their slots.
 *
 * When no identity has the index any more, the agent writes 0 to the pid_namespaces word and then to this one.
 *
 * A process that is short of memory held by owners of other namespaces adds 1 to reap_requested, and waits a moment for
 * the agent to write the value that it has seen there, and has acted upon, to reap_completed. */
#define FENKA_NAMESPACE_RETIRING 1
#define FENKA_NAMESPACE_ENDED 2

/* The card's time that the processes of a lease have spent together: see native/shim/compute.c. Times are
 * nanoseconds, moments those of CLOCK_MONOTONIC. */
struct fenka_compute_budget {
    uint64_t next_launch_at; /* before this moment nobody launches; the debt, if it lies ahead */
    uint64_t charged;  /* sum of all costs as they were estimated */
    /* The agent's last reading that was compared with it, by whom told it is named: */
    uint64_t feedback_seq;
    uint64_t feedback_at;
    uint64_t last_busy_ns;
    uint64_t last_charged;
    int64_t excess;           /* charged beyond what was measured, and not given back yet */
    uint64_t recent_busy;     /* measured and charged of late, */
    uint64_t recent_charged;
    uint64_t scale;           /* and what their ratio has made of the estimates: 1/65536, 0 = never compared */
    uint64_t precharge_ns; /* what a launch is charged beforehand that was never measured */
    uint64_t reserved[5];
};

/* Memory that processes hand to each other (cuMemExportToShareableHandle, cuIpcGetMemHandle) is charged to its
 * maker until it is given up and surely in nobody else's descriptor. What importers hold of it then goes into
 * `released`; and when the maker dies, `exported` stays behind in its slot, which bit 31 of its identity marks as
 * an orphans' slot:
 *
 *   held on a card = sum of memory + released + sum of the orphans' exported + imports beyond all that
 *
 * The last term is, for each process, what it has imported beyond all that the lease's processes, dead ones
 * included, have exported: it was made in another lease.
 *
 * Whoever finds too little counts both down to what can be held at most: `released` to what the lease's processes
 * have imported, orphans to that and what is in descriptors. The kernel keeps account of the latter: each exported
 * descriptor bears a lock (F_OFD_SETLK, shared) that lasts until the last copy of it is closed, in whatever process
 * and also while it is on its way in a socket. /proc/locks lists it with its first byte and its length:
 *
 *   first byte, bits 43-62  from `mark` in the account
 *               bits 23-42  from the maker's identity
 *               bits 19-22  card
 *               bits 0-18   of the block, by chance
 *   length                  of the block, in units of 64 KiB, rounded up
 *
 * A mark that another tenant forges can only keep orphans from being counted down. */
#define FENKA_EXPORT_LOCK_LEASE 43
#define FENKA_EXPORT_LOCK_OWNER 23
#define FENKA_EXPORT_LOCK_CARD 19
#define FENKA_EXPORT_LOCK_UNIT 65536 /* bytes */

struct fenka_account {
    uint64_t magic;
    uint32_t version;
    uint32_t slot_count;          /* FENKA_MAX_SLOTS */
    uint64_t slots_used;          /* slots from here on were never owned; only grows */
    uint64_t shared_cards;        /* bit = card: something there was exported or imported once */
    uint64_t reap_requested;         /* by processes */
    uint64_t reap_completed;      /* by the agent */
    uint64_t export_lock_id;                /* 20 bits by chance; 0 = nothing was exported to a descriptor yet */
    uint64_t reserved;
    uint64_t pid_namespaces[256]; /* bits 0-31: inode of /proc/self/ns/pid, bits 32-63: of /proc/self/ns/time, which
                                   * shifts start times; 0 = the kernel has none */
    uint64_t namespace_states[256]; /* FENKA_NAMESPACE_…, written by the agent alone */
    uint64_t released[16];        /* by card: given up by living makers, but held by importers */
    uint64_t identity[1024];      /* FENKA_MAX_SLOTS */
    uint64_t memory[16][1024];    /* bytes of device memory held: [card of control][slot] */
    uint64_t exported[16][1024];  /* of these, or of a dead process's, bytes that others may hold as well */
    uint64_t imported[16][1024];  /* bytes held of blocks that another process made, not in `memory` */
    struct fenka_compute_budget compute_budgets[16];
};

#endif
