/* CUDA_VISIBLE_DEVICES: the cards that a program sees, and their order. */
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "driver.h"

#define TOKEN_BYTES 128

/* Parses like strtoul: `1gpu` is 1. An empty token, or one with a minus sign, is no card. */
static int card_by_ordinal(const char *token, const struct fenka_node *node)
{
    char *end;
    long value = strtol(token, &end, 10);
    return end == token || value < 0 || value >= (long)node->card_count ? -1 : (int)value;
}

static int card_by_uuid(const char *token, const struct fenka_node *node)
{
    int found = -1;
    for (uint32_t card = 0; card < node->card_count; card++) {
        if (strncasecmp(node->cards[card].uuid, token, strlen(token)) != 0)
            continue;
        if (found >= 0)
            return -1; /* ambiguous */
        found = (int)card;
    }
    return found;
}

/* Writes the cards that the variable names and returns their number. An invalid token ends the list; a card that
 * is named twice empties it, as with the real driver. */
int visible_cards(const char *wish, const struct fenka_node *node, uint32_t *cards)
{
    int count = 0;
    if (!wish) {
        for (; count < (int)node->card_count; count++)
            cards[count] = (uint32_t)count;
        return count;
    }
    while (*wish) {
        char token[TOKEN_BYTES];
        wish += strspn(wish, " \t");
        size_t length = strcspn(wish, ",");
        if (length == 0 || length >= sizeof token)
            break;
        memcpy(token, wish, length);
        token[length] = '\0';
        token[strcspn(token, " \t")] = '\0';
        int card = strncasecmp(token, "GPU-", 4) == 0 ? card_by_uuid(token, node)
                                                      : card_by_ordinal(token, node);
        if (card < 0)
            break;
        for (int before = 0; before < count; before++)
            if (cards[before] == (uint32_t)card)
                return 0;
        cards[count++] = (uint32_t)card;
        wish += length + (wish[length] == ',');
    }
    return count;
}
