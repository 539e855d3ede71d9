/* Events that were recorded but not reached, and the times of those that were. */
#include "driver.h"
#include "timeline.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* Per card, recorded events that were not reached yet, in the order of recording. */
static CUevent unsettled[FENKA_NODE_CARDS], unsettled_last[FENKA_NODE_CARDS];

void events_after_fork(void) {
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    for (int card = 0; card < FENKA_NODE_CARDS; card++)
        unsettled[card] = unsettled_last[card] = NULL;
}

/* Under the lock. */
static void unlist(CUevent event) {
    uint32_t card = event->moment->place.card;
    if (!event->sooner && unsettled[card] != event)
        return;
    *(event->sooner ? &event->sooner->later : &unsettled[card]) = event->later;
    *(event->later ? &event->later->sooner : &unsettled_last[card]) = event->sooner;
    event->later = event->sooner = NULL;
}

/* Under the lock. */
static bool settle(CUevent event) {
    struct moment *moment = event->moment;
    if (moment->at_ns != 0 || !moment->recorded)
        return true;
    if (!timeline_reached(moment->place))
        return false;
    if (moment->place.generation == node_generation)
        moment->at_ns = timeline_time_of(moment->place.card, moment->place.position);
    return true;
}

void events_settle(uint32_t card) {
    if (!__atomic_load_n(&unsettled[card], __ATOMIC_RELAXED))
        return;
    pthread_mutex_lock(&lock);
    while (unsettled[card] && settle(unsettled[card]))
        unlist(unsettled[card]);
    pthread_mutex_unlock(&lock);
}

bool event_done(CUevent event) {
    pthread_mutex_lock(&lock);
    bool done = settle(event);
    if (done && !event->imported)
        unlist(event);
    pthread_mutex_unlock(&lock);
    return done;
}

/* On an idle stream the event is reached now, not when the last work was done. */
void event_mark(CUevent event, uint32_t card, uint64_t position) {
    struct timeline_place place = timeline_own(card, position);
    pthread_mutex_lock(&lock);
    unlist(event);
    bool idle = timeline_reached(place);
    event->moment->place = place;
    event->moment->at_ns = idle ? node_now() : 0;
    __atomic_store_n(&event->moment->recorded, 1, __ATOMIC_RELEASE);
    if (!idle) {
        event->sooner = unsettled_last[card];
        *(event->sooner ? &event->sooner->later : &unsettled[card]) = event;
        unsettled_last[card] = event;
    }
    pthread_mutex_unlock(&lock);
}

CUresult event_from(CUevent *event, CUcontext context, struct moment *theirs) {
    CUevent made = object_new(EVENT, sizeof *made, context);
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    made->flags = CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
    made->imported = true;
    made->moment = theirs;
    *event = made;
    return CUDA_SUCCESS;
}

CUresult event_offset(CUevent event, off_t *offset) {
    if (!object_get(event, EVENT))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!(event->flags & CU_EVENT_INTERPROCESS) || event->imported)
        return CUDA_ERROR_INVALID_HANDLE;
    *offset = event->offset;
    return CUDA_SUCCESS;
}

void event_unlist(CUevent event) {
    pthread_mutex_lock(&lock);
    unlist(event);
    pthread_mutex_unlock(&lock);
}
