/* Finds what an exported function of ours hides. */
#ifndef FENKA_BEHIND_H
#define FENKA_BEHIND_H

/* The first definition of `symbol` in load order after this library (so that other preloaded libraries keep
 * their turn), else the first one before it. dlsym cannot be asked: it is one of the hidden ones, and dlvsym,
 * which could, is another and does not exist in musl. */
void *next_symbol(const char *symbol);
#endif
