/* A stand-in for NVIDIA's libraries: memory is addresses that are counted, kernels do nothing.
 *
 * This header is what the files share. Nothing of it is visible outside of the library.
 */
#pragma once
#include "cuda_abi.h"

#define MAX_DEVICES 64
#define MEMORY_PAGE ((size_t)2 << 20) /* cudaMalloc and cuMemCreate take whole pages of 2 MiB of the device */

#pragma GCC visibility push(hidden)

/* settings.c: what the environment says. */
struct gpu {
    char name[256];
    size_t total_bytes, context_bytes;
    int count, capability, multiprocessors, l2_mib;
    const struct limits *limits;
};
struct limits { /* of a compute capability */
    int capability;
    int shared_per_multiprocessor_kib, shared_per_block_optin_kib;
    int threads_per_multiprocessor, blocks_per_multiprocessor;
    int l2_mib, clock_khz, memory_clock_khz, memory_bus_bits;
};
enum progress { BEHIND, PACE, IDLE };
const struct gpu *settings_gpu(void);
enum progress settings_progress(void);
int settings_warn_only(void); /* STAND_IN_UNSUPPORTED=warn */
void fill_properties(struct cudaDeviceProp *properties, int device);
int device_attribute(int attribute, int device);

/* device.c: the devices of this process. An ordinal counts the visible ones, an index those of the machine. */
int device_count(void);
int device_index(int ordinal); /* -1: no such device */
int device_ordinal(int index); /* -1: not visible */
cudaError_t device_error(void); /* of every call, where there is no device or the process was forked */
int device_current(void);      /* the ordinal of the calling thread's */
void device_set_current(int ordinal);
int device_is_used(int ordinal);
void device_use(int ordinal);  /* its context exists from now on */
cudaError_t failed(cudaError_t error); /* what cudaGetLastError returns next */

/* ranges.c: sets of address ranges. */
struct range {
    char *begin;
    size_t size;
    int device;    /* an ordinal */
    int has_pages; /* 0: addresses alone */
    int is_own;    /* 0: memory of the program that it registered */
    struct pages *pages; /* of a mapping in driver_memory.c */
};
struct ranges {
    struct range *items;
    size_t count, capacity;
};
int ranges_insert(struct ranges *ranges, struct range range); /* 0: no memory */
struct range *ranges_find(struct ranges *ranges, const void *address);
struct range ranges_take(struct ranges *ranges, const void *begin); /* of size 0: there is none */

/* memory.c: device memory, handed out and counted; pinned host memory. */
cudaError_t memory_allocate(void **address, size_t num_bytes, int device);
cudaError_t memory_reserve(void **address, size_t num_bytes); /* addresses alone */
int memory_take_pages(size_t num_bytes, int device); /* 0: the device is full */
void memory_give_pages(size_t num_bytes, int device);
int memory_release(void *address);       /* 0: no such address */
void memory_forget(void *address, size_t num_bytes); /* the host's pages behind addresses of a device */
int memory_holds(const void *address);   /* whether it is an address of a device */
int memory_range(const void *address, struct range *range);
void memory_map(void *address, int device);
size_t memory_used(int device);          /* with the context */
size_t memory_peak(int device);
size_t memory_free(int device);
void *pinned_allocate(size_t num_bytes);
int pinned_register(void *address, size_t num_bytes);
int pinned_release(void *address);
int pinned_range(const void *address, struct range *range);

/* trace.c: what is issued, in order. */
enum traced { LAUNCH, TO_DEVICE, TO_HOST, RECORD, STREAM_WAIT, HOST_WAITS_EVENT, HOST_WAITS_STREAM, HOST_WAITS_DEVICE };
void trace(enum traced kind, const struct stream *stream, uint64_t value, const char *name);

/* progress.c: streams and events. The host knows how far the GPU is only by what it waited for. */
struct stream *stream_of(cudaStream_t handle); /* NULL, legacy and per thread: the current device's default stream */
struct stream *stream_new(int priority);       /* NULL: too many */
void stream_delete(struct stream *stream);
int stream_priority(const struct stream *stream);
int stream_device(const struct stream *stream);
int stream_index(const struct stream *stream);
void stream_issue(struct stream *stream); /* a kernel or copy: from now on the stream is not idle */
int stream_is_idle(struct stream *stream);
void stream_wait(struct stream *stream, const struct event *event); /* later work of the stream waits */
void host_waits_for_stream(const struct stream *stream);
void host_waits_for_device(int device);
struct event *event_new(void);
void event_delete(struct event *event);
void event_record(struct event *event, struct stream *stream);
int event_is_recorded(const struct event *event);
int event_has_happened(struct event *event);
void host_waits_for_event(const struct event *event);

/* graphs.c: capture of streams into CUDA graphs; what of it streams and events remember is in progress.c. */
struct capture;
struct capture *stream_capture(const struct stream *stream); /* NULL: none */
int capturing(void);                                         /* whether any stream of the process is capturing */
int capture_is_active(const struct capture *capture);
void stream_set_capture(struct stream *stream, struct capture *capture);
struct capture *event_capture(const struct event *event);
void event_set_capture(struct event *event, struct capture *capture);
void leave_capture(struct capture *capture); /* all streams of it */
void stream_launched(struct stream *stream, const char *name); /* work; a node where the stream is captured */
void stream_copied(struct stream *stream, enum traced kind, size_t num_bytes); /* the same of a copy */

/* architectures.c: for which architectures kernels were compiled. */
const char *name_of(const void *kernel); /* NULL: not registered */
int architecture_of(const void *kernel); /* 86 for 8.6: of its binaries the one that the GPU would run; 0: none */

/* kernels.c */
int kernel_takes(int attribute, int value); /* 0: more shared memory than a block may have */
int blocks_per_multiprocessor(int threads, size_t shared_bytes);

/* reads.c: what the host reads from a device. */
void host_reads(size_t num_bytes);

/* unsupported.c: functions that the stand-in lacks. */
int unsupported(const char *name, int status, int is_harmless); /* records; returns the status, or success if allowed */
void *unsupported_function(const char *name, int status);       /* a function that does that */

#pragma GCC visibility pop

/* Define a function that records that it was called, and fails. Other definitions of the name go first. */
#define UNSUPPORTED(name, status) \
    __attribute__((weak)) int name(void) { return unsupported(#name, status, 0); }
/* The same for a function that only computes: success where STAND_IN_UNSUPPORTED=warn. */
#define UNSUPPORTED_WORK(name, status) \
    __attribute__((weak)) int name(void) { return unsupported(#name, status, 1); }
