/* The shared memory of a simulated node: the file `state` in the node's directory.
 *
 * One card server owns who is in a slot; the process in a slot is the only writer of that slot's
 * counters; the time line of a card is written by everyone, under the card's lock. Nothing holds a
 * total: memory in use is the sum of the slots, so that a killed process can leave no remainder.
 *
 * This header is the only definition of the layout: C includes it and fenka.hardware.simulated_node
 * reads the same text through cffi to create the file. So it holds integer constants and plain
 * declarations only. Times are nanoseconds of CLOCK_MONOTONIC.
 */
#ifndef FENKA_SIMULATED_LAYOUT_H
#define FENKA_SIMULATED_LAYOUT_H
#include <stdint.h>

#define FENKA_NODE_MAGIC 0x45444f4e414b4e46 /* "FNKANODE" */
#define FENKA_NODE_VERSION 6
#define FENKA_NODE_CARDS 16
#define FENKA_NODE_SLOTS 1024
/* The idle time of a card: 2.56 s in buckets of 10 ms. */
#define FENKA_NODE_IDLE_BUCKETS 256
#define FENKA_NODE_IDLE_BUCKET_NS 10000000
/* The busy time of one process on one card: 6.4 s in buckets of 100 ms, of which the last second is
 * read; the rest holds work that is queued but lies ahead. */
#define FENKA_NODE_BUSY_BUCKETS 64
#define FENKA_NODE_BUSY_BUCKET_NS 100000000
/* A bucket is one word: its ordinal << 27 | nanoseconds, so that a stale one is seen as empty. */
#define FENKA_NODE_BUCKET_SHIFT 27
/* Commands to a card server, see node_command in node.h. */
#define FENKA_NODE_TEMPERATURE 1 /* value: degrees Celsius */
#define FENKA_NODE_NO_TEMPERATURE 2
#define FENKA_NODE_XID 3           /* value: the XID's number */
#define FENKA_NODE_ECC_CORRECTED 4 /* value: how many errors more, as below */
#define FENKA_NODE_ECC_UNCORRECTED 5
#define FENKA_NODE_LOSE 6
#define FENKA_NODE_RECOVER 7

#define FENKA_NODE_MIG_PENDING 8 /* value: 1 = switching MIG needs a reset from now on, 0 = no longer */
#define FENKA_NODE_MIG_FAIL 9    /* value: so many creations fail */
/* Commands of NVML. Instances are answered by their id. */
#define FENKA_NODE_MIG_MODE 16       /* value: 1 = enable, 0 = disable */
#define FENKA_NODE_MIG_CREATE_GI 17  /* value: profile id | (start + 1) << 8, or without start */
#define FENKA_NODE_MIG_DESTROY_GI 18 /* value: GPU instance */
#define FENKA_NODE_MIG_CREATE_CI 19  /* value: GPU instance | profile << 8 | (start + 1) << 16 */
#define FENKA_NODE_MIG_DESTROY_CI 20 /* value: GPU instance | compute instance << 8 */

/* MIG. The ids of GPU instances are the nodes of a binary tree over the memory slices. */
#define FENKA_NODE_MIG_PROFILES 20
#define FENKA_NODE_MIG_STARTS 7
#define FENKA_NODE_MIG_GPU_INSTANCES 15
#define FENKA_NODE_MIG_COMPUTE_INSTANCES 8
/* The instance of a process on a card: 0 = the whole card, else 1 + GPU instance * 8 + compute instance. */
#define FENKA_NODE_MIG_INSTANCE_SHIFT 3
#define FENKA_NODE_LANES 121

/* How the cards are connected. Earlier versions wrote 0 there. */
#define FENKA_NODE_FLAT 0     /* all below one host bridge */
#define FENKA_NODE_NVSWITCH 1 /* two sockets with PCIe switches, and NVSwitches between all cards */
#define FENKA_NODE_BRIDGES 2  /* two sockets, and NVLink bridges between pairs of cards */
#define FENKA_NODE_SOCKETS 3  /* two sockets with PCIe switches, without NVLink */

/* How many processes that have ended are remembered with the time that they had of a card. */
#define FENKA_NODE_PAST 256

/* How long one process has the card while others want it. */
#define FENKA_NODE_SLICE_NS 2000000
/* How many of a process's last turns are recorded. */
#define FENKA_NODE_TURNS 64
/* The lock of a card: its holder's generation << 10 | slot, so that a dead one's is recognised. */
#define FENKA_NODE_LOCK_SHIFT 10

struct fenka_node_card {
    /* Fixed when the node is created. */
    char uuid[48]; /* as NVML prints it, "GPU-…", NUL-padded, as all strings here */
    char name[64];
    char serial[32];
    char pci_bus_id[32];
    uint64_t memory_bytes;   /* as NVML reports it, with what the driver reserves */
    uint64_t reserved_bytes; /* of these: the driver's own, which no program gets */
    uint64_t context_bytes;  /* charged once per process that has a context on the card */
    uint32_t sm_count;
    uint32_t compute_major;
    uint32_t compute_minor;
    uint32_t idle_power_mw;
    uint32_t power_limit_mw;
    uint32_t max_sm_clock_mhz;
    uint32_t max_memory_clock_mhz;
    uint32_t fan_percent; /* 0 = the card has no fan */
    uint32_t unified;     /* 1 = its memory is the machine's, so NVML reports none */
    uint32_t padding;
};

/* The time line of a card, or of one of its compute instances. */
struct fenka_node_lane {
    uint64_t lock;
    uint64_t clock_ns; /* up to here its use is recorded */
    uint64_t turn;     /* the slot that used it last */
    uint64_t turn_left_ns;
    uint64_t idle[256]; /* FENKA_NODE_IDLE_BUCKETS */
};

struct fenka_node_process {
    uint64_t generation;    /* of the slot's process; 0 = free. Written by the server only */
    int32_t pid;            /* as the server sees it */
    uint32_t ended;         /* 1 = the process has ended, and children hold its connection. Written by the server */
    uint64_t contexts[16];  /* FENKA_NODE_CARDS: contexts on each card */
    uint64_t busy_ns[16];   /* device time used on each card since the slot was taken */
    uint32_t instances[16]; /* of each card, see FENKA_NODE_MIG_INSTANCE_SHIFT. Written by the process */
};

/* The work of one process on one card, as positions: nanoseconds of work since the slot was taken. */
struct fenka_node_line {
    uint64_t given;  /* the end of what was launched */
    uint64_t served; /* the end of what is done */
    uint64_t turns;  /* that were ever written into the ring */
    /* [FENKA_NODE_TURNS]: at the end of each turn, the position and the time */
    uint64_t turn_position[64];
    uint64_t turn_ns[64];
};

/* What a process that has ended had of a card. Written by the server. */
struct fenka_node_past {
    uint64_t generation; /* of its slot; 0 = none */
    uint64_t ended_ns;
    uint64_t busy_ns;        /* since the slot was taken */
    uint64_t last_second_ns; /* of these, in the second before its end */
    int32_t pid;
    uint32_t card, slot, reserved;
};

/* Provoked faults of a card. Written by the card server alone, on command. */
struct fenka_node_faults {
    uint32_t ecc;  /* 1 = the model has ECC memory. Fixed when the node is created */
    uint32_t lost; /* 1 = the card has fallen off the bus */
    uint32_t hot;  /* 1 = temperature_c holds instead of what the load would give */
    int32_t temperature_c;
    uint64_t ecc_volatile[2]; /* corrected, uncorrected errors since the node was started */
    uint64_t ecc_aggregate[2];
};

/* A kind of GPU instance. Fixed when the node is created. */
struct fenka_node_mig_profile {
    char name[24]; /* "1g.5gb+me" */
    uint32_t kind; /* NVML's number of the profile; the next is nvidia-smi's */
    uint32_t id;
    uint32_t slices; /* compute slices */
    uint32_t size;   /* memory slices */
    uint32_t limit;
    uint32_t sm_count;
    uint32_t exclusive;  /* 1 = takes the media engines that a card has once */
    uint32_t engines[5]; /* copy, decoder, encoder, JPEG, OFA */
    uint32_t start_count;
    uint32_t starts[7]; /* FENKA_NODE_MIG_STARTS: ascending */
    uint32_t choice[7]; /* the same in the order in which the driver chooses */
    uint32_t memory_mib;
};

struct fenka_node_mig_compute {
    uint32_t present;
    uint32_t generation; /* how many instances had this id */
    uint32_t kind;       /* NVML's number of the compute profile */
    uint32_t start, slices, sm_count;
};

struct fenka_node_mig_gpu {
    uint32_t present;
    uint32_t generation;
    uint32_t profile; /* index */
    uint32_t start;
    struct fenka_node_mig_compute compute[8]; /* FENKA_NODE_MIG_COMPUTE_INSTANCES */
};

/* MIG of a card. Written by the card server alone. */
struct fenka_node_mig {
    /* Fixed when the node is created. */
    uint32_t pci_device;                        /* as the upper half of NVML's pciDeviceId */
    uint32_t profile_count;                     /* 0 = the card has no MIG */
    uint32_t slices;                            /* compute slices of the card */
    uint32_t axis;                              /* memory slices */
    uint32_t mirrored;                          /* 1 = the halves of the tree are exchanged in GPU instance ids */
    uint32_t keeps_mode;                        /* 1 = the mode survives a reboot */
    struct fenka_node_mig_profile profiles[20]; /* FENKA_NODE_MIG_PROFILES */
    uint32_t enabled, pending;
    uint32_t needs_reset;               /* provoked: a switch stays pending */
    uint32_t failures;                  /* provoked: so many creations fail */
    struct fenka_node_mig_gpu gpus[15]; /* FENKA_NODE_MIG_GPU_INSTANCES */
};

struct fenka_node {
    uint64_t magic;
    uint32_t version;
    uint32_t card_count;
    uint32_t cuda_version; /* 12040 = 12.4 */
    uint32_t slots_used;   /* slots from this one on were never taken; written by the server */
    char driver_version[80];
    uint64_t generations; /* the last one given out */
    uint32_t topology;    /* FENKA_NODE_FLAT, …; with cpus fixed when the node is created */
    uint32_t cpus;        /* of the machine */
    uint64_t reserved[3];
    struct fenka_node_card cards[16];          /* FENKA_NODE_CARDS */
    struct fenka_node_process processes[1024]; /* FENKA_NODE_SLOTS */
    uint64_t memory[16][1024];                 /* bytes of device memory held: [card][slot] */
    struct fenka_node_line lines[16][1024];    /* [card][slot] */
    uint64_t busy[16][1024][64];               /* [card][slot][FENKA_NODE_BUSY_BUCKETS] */
    struct fenka_node_faults faults[16];       /* FENKA_NODE_CARDS */
    struct fenka_node_mig mig[16];             /* FENKA_NODE_CARDS */
    struct fenka_node_lane lanes[16][121];     /* [card][instance of a process], FENKA_NODE_LANES */
    uint64_t event_count;                      /* the number of the last event; written by the server */
    uint64_t past_count;                       /* entries that were ever written into the ring */
    struct fenka_node_past past[256];          /* FENKA_NODE_PAST */
};

#endif
