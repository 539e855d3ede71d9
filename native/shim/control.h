/* The lease's limits, read from the control page, which the agent writes and the program cannot. */
#ifndef FENKA_CONTROL_H
#define FENKA_CONTROL_H
#include <stdbool.h>
#include <stdint.h>

/* NULL, or the end of a sentence that says what is wrong with the page. A valid page stays open. */
const char *control_open(const char *path);

unsigned control_cards(void);
const char *control_uuid(unsigned card);

/* The card whose UUID has these 36 characters after its prefix; -1 = none. */
int control_find_card(const char *uuid36);

/* In bytes. The cards never change while a program runs; their limits may. */
uint64_t control_cap(unsigned card);
uint64_t control_context_bytes(unsigned card);

/* Whether any card's compute is limited, or left to others with a share. Called before each launch. */
bool control_limits_compute(void);
uint64_t control_yielding_since(void); /* ns; 0 = not left to others */
uint64_t control_generation(void);     /* changes with the limits; 0 = they never changed */
uint32_t control_percent(unsigned card);
uint32_t control_mode(unsigned card); /* FENKA_COMPUTE_… */

/* The agent's last feedback on a card. */
struct control_feedback {
    uint64_t feedback_seq, at, busy_ns;
    uint32_t allowed; /* 1/10000 */
};

/* False if there is none, or the agent is writing it now. */
bool control_feedback(unsigned card, struct control_feedback *out);
#endif
