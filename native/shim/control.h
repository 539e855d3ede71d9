/* The limits, read from the page that the agent writes and the program cannot. */
#ifndef FENKA_CONTROL_H
#define FENKA_CONTROL_H
#include <stdbool.h>
#include <stdint.h>

/* NULL, or a sentence's end that says what is wrong with the page. Once it was right it stays open. */
const char *control_open(const char *path);

unsigned control_cards(void);
const char *control_uuid(unsigned card);

/* The card whose UUID has these 36 characters, whatever prefix stands before them; -1 = none. */
int control_find_card(const char *uuid36);

/* Bytes, as the agent wrote them last. Cards do not change while a program runs; their limits may. */
uint64_t control_cap(unsigned card);
uint64_t control_context_bytes(unsigned card);

/* Whether any card's compute is limited: asked before each launch. */
bool control_limits_compute(void);
uint32_t control_percent(unsigned card);
uint32_t control_mode(unsigned card); /* FENKA_COMPUTE_… */

/* What the agent told last of a card. */
struct control_feedback {
    uint64_t feedback_seq, at, busy_ns;
    uint32_t allowed; /* 1/10000 */
};

/* False where it has told nothing, or is telling right now. */
bool control_feedback(unsigned card, struct control_feedback *out);
#endif
