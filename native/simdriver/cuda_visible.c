/* CUDA_VISIBLE_DEVICES: the cards and instances that a program sees, and their order. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "driver.h"

#define TOKEN_BYTES 128
#define SEVERAL_INSTANCES 570 /* the driver from which a program can use more than one device beside an instance */

/* A card, or an instance of one. */
struct device {
    int card; /* -1 = none */
    uint32_t mark;
};

static const struct device none = {-1, 0};

/* A divided card is its first instance. */
static struct device of_card(const struct fenka_node *node, int card) {
    struct mig_instance instance;
    if (card < 0 || !__atomic_load_n(&node->mig[card].enabled, __ATOMIC_ACQUIRE))
        return (struct device){card, 0};
    return mig_instance_at(&node->mig[card], 0, &instance) ? (struct device){card, mig_mark(instance)} : none;
}

/* Parses like strtoul: `1gpu` is 1. An empty token, or one with a minus sign, is no card. */
static int card_by_ordinal(const char *token, const struct fenka_node *node) {
    char *end;
    long value = strtol(token, &end, 10);
    return end == token || value < 0 || value >= (long)node->card_count ? -1 : (int)value;
}

static int card_by_uuid(const char *token, size_t length, const struct fenka_node *node) {
    int found = -1;
    for (uint32_t card = 0; card < node->card_count; card++) {
        if (strncasecmp(node->cards[card].uuid, token, length) != 0)
            continue;
        if (found >= 0)
            return -1; /* ambiguous */
        found = (int)card;
    }
    return found;
}

/* "MIG-GPU-<uuid>/<GPU instance>/<compute instance>", as older drivers name instances. */
static struct device by_old_name(const char *token, const struct fenka_node *node) {
    const char *slash = strchr(token, '/');
    struct mig_instance instance;
    if (!slash || sscanf(slash, "/%u/%u", &instance.gpu, &instance.compute) != 2)
        return none;
    int card = card_by_uuid(token + 4, (size_t)(slash - token - 4), node);
    bool known = card >= 0 && instance.gpu < FENKA_NODE_MIG_GPU_INSTANCES &&
                 instance.compute < FENKA_NODE_MIG_COMPUTE_INSTANCES && mig_present(&node->mig[card], instance);
    return known ? (struct device){card, mig_mark(instance)} : none;
}

static struct device instance_by_uuid(const char *token, const struct fenka_node *node) {
    struct device found = none;
    struct mig_instance instance;
    char uuid[48];
    for (uint32_t card = 0; card < node->card_count; card++)
        for (unsigned n = 0; mig_instance_at(&node->mig[card], n, &instance); n++) {
            mig_uuid(uuid, &node->cards[card], &node->mig[card], instance);
            if (strncasecmp(uuid, token, strlen(token)) != 0)
                continue;
            if (found.card >= 0)
                return none; /* ambiguous */
            found = (struct device){(int)card, mig_mark(instance)};
        }
    return found;
}

static struct device by_name(const char *token, const struct fenka_node *node) {
    if (strncasecmp(token, "MIG-GPU-", 8) == 0)
        return by_old_name(token, node);
    if (strncasecmp(token, "MIG-", 4) == 0)
        return instance_by_uuid(token, node);
    return of_card(node, strncasecmp(token, "GPU-", 4) == 0 ? card_by_uuid(token, strlen(token), node)
                                                            : card_by_ordinal(token, node));
}

/* Before driver 570 a program that sees an instance sees nothing else: returns whether the list is complete. */
static bool alone(const struct fenka_node *node, struct device device, uint32_t *cards, uint32_t *marks) {
    if (device.mark == 0 || atoi(node->driver_version) >= SEVERAL_INSTANCES)
        return false;
    cards[0] = (uint32_t)device.card;
    marks[0] = device.mark;
    return true;
}

static int all_cards(const struct fenka_node *node, uint32_t *cards, uint32_t *marks) {
    int count = 0;
    for (uint32_t card = 0; card < node->card_count; card++) {
        struct device device = of_card(node, (int)card);
        if (device.card < 0)
            continue;
        if (alone(node, device, cards, marks))
            return 1;
        cards[count] = card;
        marks[count++] = device.mark;
    }
    return count;
}

/* Writes the devices that the variable names and returns their number. An invalid token ends the list; a card that
 * is named twice empties it, as with the real driver. */
int visible_cards(const char *wish, const struct fenka_node *node, uint32_t *cards, uint32_t *marks) {
    int count = 0;
    if (!wish)
        return all_cards(node, cards, marks);
    while (*wish) {
        char token[TOKEN_BYTES];
        wish += strspn(wish, " \t");
        size_t length = strcspn(wish, ",");
        if (length == 0 || length >= sizeof token)
            break;
        memcpy(token, wish, length);
        token[length] = '\0';
        token[strcspn(token, " \t")] = '\0';
        struct device device = by_name(token, node);
        if (device.card < 0)
            break;
        for (int before = 0; before < count; before++)
            if (cards[before] == (uint32_t)device.card)
                return 0;
        if (alone(node, device, cards, marks))
            return 1;
        cards[count] = (uint32_t)device.card;
        marks[count++] = device.mark;
        wish += length + (wish[length] == ',');
    }
    return count;
}
