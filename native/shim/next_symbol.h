/* Finds the definition that an exported function of this library hides. */
#ifndef FENKA_BEHIND_H
#define FENKA_BEHIND_H

/* The first definition of `symbol` after this library in load order, so that other preloaded libraries keep their
 * place; else the first one before it. dlsym and dlvsym cannot be used: they are hidden themselves. */
void *next_symbol(const char *symbol);
#endif
