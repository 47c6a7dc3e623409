/* Streams and events without time: vector clocks, one counter a stream.
 *
 * An event has happened when the host waited for something that is ordered after it. STAND_IN_PROGRESS says what that
 * is. `pace` (the default): the streams of a device share one clock; if the host waited for any work of the device, all
 * that was issued before it, on any of its streams, has happened. `behind`: streams have clocks of their own, and are as
 * far behind as they may be. `idle`: every event has happened when the host asks, as on a GPU that is never behind. In
 * all of them a program that does nothing but ask (`while not event.query(): pass`) is told yes after POLLS questions.
 *
 * The host is never more than QUEUED kernels and copies ahead on one stream: the next launch waits until the oldest has
 * begun. Without this, memory that a script frees with Tensor.record_stream would be kept for as long as it waits for
 * nothing: over all steps of a loop that prints nothing.
 */
#include "stand_in.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define MAX_STREAMS 4096 /* PyTorch makes up to 128 a device: c10/cuda/CUDAStream.cpp, kStreamsPerPool */
#define QUEUED 1024 /* about 1,000 for each stream: measured, forums.developer.nvidia.com/t/68937; not documented */
#define POLLS 1000       /* so often a program asks in vain, and launches nothing meanwhile, before the answer is yes */

struct clock {
    uint64_t at[MAX_STREAMS];
};
struct polls {
    uint64_t num_launches; /* of the process, when it asked first */
    unsigned count;
};
struct stream {
    int index, priority, device, is_in_use;
    struct capture *capture;
    uint64_t last; /* time of this stream's last work, by the clock of clocked() */
    struct polls polls;
    uint64_t num_queued;     /* kernels and copies so far */
    uint64_t queued[QUEUED]; /* times of the latest, by the clock of clocked() */
    struct clock clock;
};
struct event {
    struct stream *stream; /* NULL: never recorded */
    struct capture *capture;
    uint64_t time; /* of that stream */
    struct polls polls;
    struct clock *clock; /* with `behind` alone: what the stream's clock said of all streams */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct stream *streams[MAX_STREAMS]; /* the first ones are the default streams of the devices */
static int num_streams = MAX_DEVICES;
static struct clock done;
static uint64_t num_launches; /* of the process: kernels, copies, recorded events, waits for events */

static void join(struct clock *clock, const struct clock *other) {
    for (int index = 0; index < num_streams; ++index)
        if (clock->at[index] < other->at[index]) clock->at[index] = other->at[index];
}

/* The stream at an index; under the lock. */
static struct stream *at(int index, int device) {
    if (!streams[index] && (streams[index] = calloc(1, sizeof **streams))) {
        streams[index]->index = index;
        streams[index]->device = device;
    }
    if (!streams[index]) abort(); /* the host has no memory */
    return streams[index];
}

static struct stream *default_stream(int device) {
    pthread_mutex_lock(&lock);
    struct stream *stream = at(device, device);
    pthread_mutex_unlock(&lock);
    return stream;
}

/* Whose clock counts; under the lock. */
static struct stream *clocked(const struct stream *stream) {
    return at(settings_progress() == PACE ? stream->device : stream->index, stream->device);
}

struct stream *stream_of(cudaStream_t handle) {
    return (uintptr_t)handle < 16 ? default_stream(device_current()) : handle;
}

struct stream *stream_new(int priority) {
    device_use(device_current());
    pthread_mutex_lock(&lock);
    int index = MAX_DEVICES;
    while (index < num_streams && streams[index]->is_in_use) ++index;
    struct stream *stream = index < MAX_STREAMS ? at(index, 0) : NULL;
    if (stream && index == num_streams) ++num_streams;
    if (stream) stream->priority = priority, stream->device = device_current(), stream->is_in_use = 1;
    pthread_mutex_unlock(&lock);
    return stream;
}

void stream_delete(struct stream *stream) {
    pthread_mutex_lock(&lock);
    stream->is_in_use = 0;
    pthread_mutex_unlock(&lock);
}
int stream_priority(const struct stream *stream) { return stream->priority; }
int stream_device(const struct stream *stream) { return stream->device; }
int stream_index(const struct stream *stream) { return stream->index; }
struct capture *stream_capture(const struct stream *stream) {
    return __atomic_load_n(&stream->capture, __ATOMIC_ACQUIRE);
}
void stream_set_capture(struct stream *stream, struct capture *capture) {
    __atomic_store_n(&stream->capture, capture, __ATOMIC_RELEASE);
}

/* Add work to a stream; under the lock. Returns its time, by the clock of clocked(). */
static uint64_t issue(struct stream *stream) {
    struct stream *clock = clocked(stream);
    ++num_launches;
    return stream->last = ++clock->clock.at[clock->index];
}

/* Whether a program has asked so often without a launch that the answer must become yes; under the lock. */
static int polled(struct polls *polls) {
    if (polls->num_launches != num_launches) *polls = (struct polls){num_launches, 0};
    return ++polls->count >= POLLS;
}

/* Add a kernel or a copy. Where the stream's queue is full, the host waits for the oldest. */
void stream_issue(struct stream *stream) {
    pthread_mutex_lock(&lock);
    uint64_t *oldest = &stream->queued[stream->num_queued++ % QUEUED], *known = &done.at[clocked(stream)->index];
    if (*known < *oldest) *known = *oldest;
    *oldest = issue(stream);
    pthread_mutex_unlock(&lock);
}

int stream_is_idle(struct stream *stream) {
    pthread_mutex_lock(&lock);
    struct stream *clock = clocked(stream);
    int is_idle = settings_progress() == IDLE || stream->last <= done.at[clock->index];
    if (!is_idle && polled(&stream->polls)) join(&done, &clock->clock), is_idle = 1;
    pthread_mutex_unlock(&lock);
    return is_idle;
}

void stream_wait(struct stream *stream, const struct event *event) {
    trace(STREAM_WAIT, stream, (uintptr_t)event, NULL);
    pthread_mutex_lock(&lock);
    if (event->stream && event->clock) join(&clocked(stream)->clock, event->clock);
    issue(stream);
    pthread_mutex_unlock(&lock);
}

void host_waits_for_stream(const struct stream *stream) {
    trace(HOST_WAITS_STREAM, stream, 0, NULL);
    pthread_mutex_lock(&lock);
    join(&done, &clocked(stream)->clock);
    pthread_mutex_unlock(&lock);
}

void host_waits_for_device(int device) {
    trace(HOST_WAITS_DEVICE, NULL, 0, NULL);
    pthread_mutex_lock(&lock);
    for (int index = 0; index < num_streams; ++index)
        if (streams[index] && streams[index]->device == device) join(&done, &streams[index]->clock);
    pthread_mutex_unlock(&lock);
}

void leave_capture(struct capture *capture) {
    pthread_mutex_lock(&lock);
    for (int index = 0; index < num_streams; ++index)
        if (streams[index] && stream_capture(streams[index]) == capture)
            stream_set_capture(streams[index], NULL);
    pthread_mutex_unlock(&lock);
}

/* ---- events */

struct event *event_new(void) { return calloc(1, sizeof(struct event)); }

void event_delete(struct event *event) {
    if (event) free(event->clock);
    free(event);
}

struct capture *event_capture(const struct event *event) { return event->capture; }
void event_set_capture(struct event *event, struct capture *capture) { event->capture = capture; }

void event_record(struct event *event, struct stream *stream) {
    trace(RECORD, stream, (uintptr_t)event, NULL);
    pthread_mutex_lock(&lock);
    event->time = issue(stream);
    event->capture = NULL;
    event->stream = stream = clocked(stream);
    if (settings_progress() == BEHIND) {
        if (!event->clock) event->clock = calloc(1, sizeof *event->clock);
        if (!event->clock) abort(); /* the host has no memory */
        memcpy(event->clock->at, stream->clock.at, (size_t)num_streams * sizeof *stream->clock.at);
    }
    pthread_mutex_unlock(&lock);
}

int event_is_recorded(const struct event *event) { return event->stream || event->capture; }

/* The host knows that an event has happened; under the lock. */
static void reach(const struct event *event) {
    if (event->clock) {
        join(&done, event->clock);
    } else if (event->stream && done.at[event->stream->index] < event->time) {
        done.at[event->stream->index] = event->time;
    }
}

int event_has_happened(struct event *event) {
    pthread_mutex_lock(&lock);
    int happened = !event->stream || settings_progress() == IDLE || event->time <= done.at[event->stream->index];
    if (!happened && polled(&event->polls)) reach(event), happened = 1;
    pthread_mutex_unlock(&lock);
    return happened;
}

void host_waits_for_event(const struct event *event) {
    trace(HOST_WAITS_EVENT, NULL, (uintptr_t)event, NULL);
    pthread_mutex_lock(&lock);
    reach(event);
    pthread_mutex_unlock(&lock);
}
