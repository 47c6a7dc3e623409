/* A log of what a program issues, in order: work on streams, events, waits of the host. `rehearse --time` reads it.
 *
 * Nothing is noted before a program asks for it (stand_in_trace). Names are those of functions and kernels; they live as
 * long as the process.
 */
#include "stand_in.h"

#include <pthread.h>
#include <stdlib.h>

struct entry {
    int kind, stream; /* kind: enum traced; stream: its index, -1: none */
    uint64_t value;   /* bytes of a copy, the address of an event */
    const char *name; /* of what was launched */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct entry *entries;
static size_t count, capacity;
static int is_on;

#define VISIBLE __attribute__((visibility("default")))

/* Begin anew, or stop; what was noted stays until it begins anew. */
VISIBLE void stand_in_trace(int on) {
    pthread_mutex_lock(&lock);
    if (on) count = 0;
    __atomic_store_n(&is_on, on, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&lock);
}

/* The number of entries. A program asks before and after an operator, to learn what the operator issued. */
VISIBLE size_t stand_in_traced(void) { return __atomic_load_n(&count, __ATOMIC_RELAXED); }

VISIBLE const void *stand_in_trace_entries(void) { return entries; }

VISIBLE int stand_in_stream_index(void *handle) { return stream_index(stream_of(handle)); }

void trace(enum traced kind, const struct stream *stream, uint64_t value, const char *name) {
    if (!__atomic_load_n(&is_on, __ATOMIC_RELAXED)) return;
    pthread_mutex_lock(&lock);
    if (count == capacity) {
        capacity = capacity ? 2 * capacity : 4096;
        entries = realloc(entries, capacity * sizeof *entries);
        if (!entries) abort(); /* the host has no memory */
    }
    entries[count] = (struct entry){kind, stream ? stream_index(stream) : -1, value, name};
    __atomic_store_n(&count, count + 1, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&lock);
}
