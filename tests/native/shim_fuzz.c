/* Arbitrary contents of the control page and of the account, as a target of libFuzzer.
 *
 * The input's first byte selects the page and the number of cards. For the control page the rest is a list of bytes to
 * change in a valid page; for the account, a list of words to write between calls. Without libFuzzer's runtime,
 * STANDALONE adds a main that generates the same inputs in every run. Arguments: a folder for the pages, and the number
 * of inputs. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* The source itself, because its state is reset for every input. */
#define page control_page
#include "control.c"
#undef page
#include "account.h"
#include "account_page.h"
#include "account_shared.h"

#define REQUIRE(what) \
    do {              \
        if (!(what))  \
            abort();  \
    } while (0)

#define UUID "GPU-00000000-0000-0000-0000-00000000000"

static char control_path[4096], slots_path[4096];
static unsigned char *control_file, *account_file;

static void *made(char *path, const char *name, size_t bytes) {
    const char *folder = getenv("FENKA_FUZZ_FOLDER");
    snprintf(path, sizeof control_path, "%s/%s", folder ? folder : ".", name);
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    REQUIRE(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0);
    void *address = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    REQUIRE(address != MAP_FAILED);
    close(fd);
    return address;
}

static void good_pages(unsigned cards) {
    struct fenka_control *c = (void *)control_file;
    struct fenka_account *a = (void *)account_file;
    memset(control_file, 0, FENKA_CONTROL_BYTES);
    memset(account_file, 0, sizeof *a);
    *c = (struct fenka_control){FENKA_CONTROL_MAGIC, FENKA_LAYOUT_VERSION, FENKA_CONTROL_BYTES, 2, "fuzz", cards, {0}, {{{0}, 0, 0, 0, 0, 0, 0, 0, 0, {0}}}};
    for (unsigned card = 0; card < cards; card++) {
        snprintf(c->cards[card].uuid, sizeof c->cards[card].uuid, UUID "%x", card);
        c->cards[card].memory_bytes = 1 << 30;
        c->cards[card].compute_percent = 100;
    }
    a->magic = FENKA_ACCOUNT_MAGIC;
    a->version = FENKA_ACCOUNT_VERSION;
    a->slot_count = FENKA_MAX_SLOTS;
}

static void begin(unsigned cards) {
    if (!control_file) {
        control_file = made(control_path, "control", FENKA_CONTROL_BYTES);
        account_file = made(slots_path, "slots", sizeof(struct fenka_account));
    }
    if (control_page)
        os_unmap((void *)control_page, FENKA_CONTROL_BYTES);
    if (account_page)
        os_unmap(account_page, sizeof *account_page);
    control_page = NULL;
    account_page = NULL;
    account_reset();
    good_pages(cards);
}

static uint64_t number(const uint8_t **data, size_t *size, size_t bytes) {
    uint64_t value = 0;
    size_t n = *size < bytes ? *size : bytes;
    memcpy(&value, *data, n);
    *data += n;
    *size -= n;
    return value;
}

/* An accepted page has cards with UUIDs and limits, also after later changes. */
static void fuzz_control(const uint8_t *data, size_t size) {
    const char *fault = NULL;
    for (bool open = false; size; open = true) {
        for (unsigned n = (unsigned)number(&data, &size, 1) % 8; n && size; n--) {
            size_t at = number(&data, &size, 2);
            control_file[at % (at & 0x4000 ? 128 : FENKA_CONTROL_BYTES)] = (uint8_t)number(&data, &size, 1);
        }
        /* An odd generation would make every open wait. */
        if (!open)
            ((struct fenka_control *)control_file)->generation &= ~1ull;
        fault = open ? fault : control_open(control_path);
        if (fault)
            return;
        REQUIRE(control_cards() >= 1 && control_cards() <= FENKA_MAX_CARDS);
        for (unsigned card = 0; card < control_cards(); card++) {
            REQUIRE(control_cap(card) > 0);
            REQUIRE(strnlen(control_uuid(card), 48) == 40);
            REQUIRE(control_find_card(control_uuid(card) + 4) <= (int)card);
        }
    }
}

static void nothing(void) {}

static void use_account(unsigned card, uint64_t bytes, bool give) {
    uint32_t pid;
    uint64_t held;
    int seen = -1, slots = 0;
    if (give)
        account_discharge(card, bytes);
    else if (account_charge(card, bytes))
        REQUIRE(account_total(card) <= control_cap(card));
    if (bytes & 1)
        account_export(card, bytes);
    if (bytes & 2 && account_import(card, bytes) && bytes & 4)
        account_unimport(card, bytes);
    if (bytes & 8)
        account_release_exported(card, bytes);
    account_used(card, nothing);
    while ((seen = account_next_process((unsigned)(seen + 1), card, &pid, &held)) >= 0)
        REQUIRE(seen < FENKA_MAX_SLOTS && ++slots <= FENKA_MAX_SLOTS);
}

static void fuzz_account(const uint8_t *data, size_t size) {
    struct fenka_account *a = (void *)account_file;
    uint64_t *words = (uint64_t *)account_file;
    bool late = size % 2;
    REQUIRE(!control_open(control_path));
    if (late && account_open(slots_path))
        return;
    while (size) {
        size_t at = number(&data, &size, 2) % (sizeof *a / 8);
        unsigned kind = (unsigned)number(&data, &size, 1);
        words[kind % 4 ? 8 + 256 + at % 2048 : at] = number(&data, &size, kind & 16 ? 8 : 2);
        if (!account_page && account_open(slots_path))
            return;
        use_account(kind >> 5 & 1, number(&data, &size, 4), kind & 64);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 2)
        return 0;
    begin(data[0] & 2 ? FENKA_MAX_CARDS : 2);
    (data[0] & 1 ? fuzz_control : fuzz_account)(data + 1, size - 1);
    return 0;
}

#ifdef STANDALONE
int main(int argc, char **argv) {
    uint8_t input[512];
    uint64_t state = 88172645463325252;
    REQUIRE(argc == 3);
    setenv("FENKA_FUZZ_FOLDER", argv[1], 1);
    for (long n = atol(argv[2]); n; n--) {
        size_t size = state % sizeof input;
        for (size_t i = 0; i < sizeof input; i++) {
            state ^= state << 13, state ^= state >> 7, state ^= state << 17; /* xorshift64 */
            input[i] = state >> 60 ? (uint8_t)(state >> 24) : (uint8_t)(state >> 32 & 1 ? 0xff : 0);
        }
        LLVMFuzzerTestOneInput(input, size);
    }
    return 0;
}
#endif
