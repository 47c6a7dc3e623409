/* Streams and events without time: vector clocks, one counter a stream.
 *
 * An event has happened when the host waited for something ordered after it. With HOLLOW_HOST=pace all streams are
 * equally far, so that it is enough to have waited for something issued later; with HOLLOW_HOST=idle every event has
 * happened by the time that anybody asks, as on a card that is never behind.
 */
#include "card.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define MOST_STREAMS 256

struct clock {
    uint64_t at[MOST_STREAMS];
};
struct stream {
    int index, priority;
    struct clock clock;
};
struct event {
    int stream; /* -1: never recorded */
    struct clock clock;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct stream streams[MOST_STREAMS];
static int num_streams = 1; /* the default stream is the first */
static struct clock done;

static void join(struct clock *clock, const struct clock *other) {
    for (int index = 0; index < num_streams; ++index)
        if (clock->at[index] < other->at[index]) clock->at[index] = other->at[index];
}

static int host_is(const char *how) {
    const char *host = getenv("HOLLOW_HOST");
    return host && !strcmp(host, how);
}

/* Whose clock counts. */
static struct stream *clocked(const struct stream *stream) {
    return &streams[host_is("pace") ? 0 : stream->index];
}

struct stream *order_stream(void *handle) {
    /* NULL, cudaStreamLegacy and cudaStreamPerThread are the default stream */
    return (uintptr_t)handle < 16 ? &streams[0] : handle;
}

struct stream *order_new_stream(int priority) {
    pthread_mutex_lock(&lock);
    if (num_streams == MOST_STREAMS) abort();
    struct stream *stream = &streams[num_streams];
    stream->index = num_streams++;
    stream->priority = priority;
    pthread_mutex_unlock(&lock);
    return stream;
}

int order_priority(const struct stream *stream) { return stream->priority; }

struct event *order_new_event(void) {
    struct event *event = calloc(1, sizeof *event);
    event->stream = -1;
    return event;
}

void order_record(struct event *event, struct stream *stream) {
    pthread_mutex_lock(&lock);
    stream = clocked(stream);
    ++stream->clock.at[stream->index];
    event->stream = stream->index;
    event->clock = stream->clock;
    pthread_mutex_unlock(&lock);
}

void order_wait(struct stream *stream, const struct event *event) {
    pthread_mutex_lock(&lock);
    if (event->stream >= 0) join(&clocked(stream)->clock, &event->clock);
    pthread_mutex_unlock(&lock);
}

int order_happened(const struct event *event) {
    pthread_mutex_lock(&lock);
    int happened = event->stream < 0 || host_is("idle") || event->clock.at[event->stream] <= done.at[event->stream];
    pthread_mutex_unlock(&lock);
    return happened;
}

int order_idle(const struct stream *stream) {
    stream = clocked(stream);
    return host_is("idle") || stream->clock.at[stream->index] <= done.at[stream->index];
}

void order_join_event(const struct event *event) {
    pthread_mutex_lock(&lock);
    if (event->stream >= 0) join(&done, &event->clock);
    pthread_mutex_unlock(&lock);
}

void order_join_stream(const struct stream *stream) {
    pthread_mutex_lock(&lock);
    join(&done, &clocked(stream)->clock);
    pthread_mutex_unlock(&lock);
}

void order_join_all(void) {
    pthread_mutex_lock(&lock);
    for (int index = 0; index < num_streams; ++index) join(&done, &streams[index].clock);
    pthread_mutex_unlock(&lock);
}
