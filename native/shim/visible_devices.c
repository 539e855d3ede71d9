#include "visible_devices.h"

#include <stddef.h>
#include <string.h>
#include <strings.h>

#include "control.h"
#include "fenka/lease.h"

static bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

static int by_number(const char *token, size_t length) {
    size_t sign = length && (*token == '+' || *token == '-'), end = sign;
    unsigned number = 0;
    for (; end < length && token[end] >= '0' && token[end] <= '9'; end++)
        if (number < FENKA_MAX_CARDS)
            number = number * 10 + (unsigned)(token[end] - '0');
    bool negative = sign && *token == '-' && number;
    return end > sign && !negative && number < control_cards() ? (int)number : -1;
}

static int by_uuid(const char *token, size_t length) {
    int found = -1;
    if (length < 4 || (strncasecmp(token, "GPU-", 4) && strncasecmp(token, "MIG-", 4)))
        return -1;
    for (unsigned card = 0; card < control_cards(); card++)
        if (!strncasecmp(control_uuid(card), token, length)) {
            if (found >= 0)
                return -1;
            found = (int)card;
        }
    return found;
}

static int card_named(const char *token, size_t length) {
    for (; length && is_space(*token); length--)
        token++;
    while (length && is_space(token[length - 1]))
        length--;
    int card = by_number(token, length);
    return card >= 0 ? card : by_uuid(token, length);
}

static unsigned all(uint8_t *chosen) {
    for (unsigned card = 0; card < control_cards(); card++)
        chosen[card] = (uint8_t)card;
    return control_cards();
}

unsigned visible_cards(const char *wanted, uint8_t *chosen) {
    unsigned count = 0;
    if (!wanted)
        return all(chosen);
    for (const char *token = wanted;; token++) {
        size_t length = strcspn(token, ",");
        int card = card_named(token, length);
        if (card < 0)
            return count;
        if (memchr(chosen, card, count))
            return 0;
        chosen[count++] = (uint8_t)card;
        token += length;
        if (!*token)
            return count;
    }
}
