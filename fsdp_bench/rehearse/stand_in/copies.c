/* CUDA's runtime: copies and fills.
 *
 * They are real where they are small: counts, flags and batches that a program moves through the GPU. The host
 * reads zeros from larger ones, whose pages are taken away, so that host memory is not filled by values that nobody
 * computed.
 */
#define _GNU_SOURCE
#include "stand_in.h"

#include <string.h>
#include <sys/mman.h>

#define SMALL ((size_t)1 << 20)
#define HOST_PAGE ((size_t)4096)

/* Fill memory of the host with zeros: pages of its own that a process drops read as zeros, and cost nothing. Dropped
 * pages of files and of shared memory keep what they had, which is as good. */
static void clear(char *to, size_t num_bytes) {
    char *begin = (char *)(((uintptr_t)to + HOST_PAGE - 1) / HOST_PAGE * HOST_PAGE);
    char *end = (char *)((uintptr_t)(to + num_bytes) / HOST_PAGE * HOST_PAGE);
    if (begin >= end || madvise(begin, (size_t)(end - begin), MADV_DONTNEED)) {
        memset(to, 0, num_bytes); /* locked in memory, say */
        return;
    }
    memset(to, 0, (size_t)(begin - to));
    memset(end, 0, (size_t)(to + num_bytes - end));
}

/* Copy what is small or concerns no device; of what is larger, only the host's side is cleared. */
static void copy(void *to, const void *from, size_t num_bytes) {
    int to_device = memory_holds(to), from_device = memory_holds(from);
    if (num_bytes <= SMALL || !(to_device || from_device)) memmove(to, from, num_bytes);
    else if (!to_device) clear(to, num_bytes);
}

static int is_pageable(const void *address) {
    struct range range;
    return !memory_holds(address) && !pinned_range(address, &range);
}

/* Copy in the order of a stream. With pageable memory the host has waited when the call returns. CUDA's manual, "API
 * synchronization behavior", says so for copies to the host; for copies to the device it allows both. */
static cudaError_t copy_on(struct stream *stream, void *to, size_t to_pitch, const void *from, size_t from_pitch,
                           size_t width, size_t height) {
    int is_read = memory_holds(from) && !memory_holds(to), is_sent = memory_holds(to) && !memory_holds(from);
    if (is_read || is_sent) stream_copied(stream, is_read ? TO_HOST : TO_DEVICE, width * height);
    else stream_launched(stream, "cudaMemcpyAsync");
    for (size_t row = 0; row < height; ++row)
        copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    if (!stream_capture(stream) && (is_pageable(to) || is_pageable(from))) host_waits_for_stream(stream);
    if (is_read) host_reads(width * height);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t num_bytes, int kind, cudaStream_t stream) {
    (void)kind;
    return num_bytes ? copy_on(stream_of(stream), to, 0, from, 0, num_bytes, 1) : cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t num_bytes, int kind) {
    if (capturing()) return failed(cudaErrorStreamCaptureUnsupported);
    host_waits_for_device(device_current());
    return cudaMemcpyAsync(to, from, num_bytes, kind, NULL);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, int kind, cudaStream_t stream) {
    (void)kind;
    return width && height ? copy_on(stream_of(stream), to, to_pitch, from, from_pitch, width, height) : cudaSuccess;
}
cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                         int kind) {
    if (capturing()) return failed(cudaErrorStreamCaptureUnsupported);
    host_waits_for_device(device_current());
    return cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind, NULL);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t num_bytes,
                                cudaStream_t stream) {
    (void)to_device, (void)from_device;
    return cudaMemcpyAsync(to, from, num_bytes, 0, stream);
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t num_bytes, cudaStream_t stream) {
    stream_launched(stream_of(stream), "cudaMemsetAsync");
    if (num_bytes <= SMALL || !memory_holds(to)) memset(to, value, num_bytes);
    return cudaSuccess;
}
cudaError_t cudaMemset(void *to, int value, size_t num_bytes) { return cudaMemsetAsync(to, value, num_bytes, NULL); }

/* Variables of kernels, which no kernel reads: the host's shadow of one, of the same size, stands for it. To copy one
 * back (cudaMemcpyFromSymbol) is refused by name. */
cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
    return *address = (void *)symbol, cudaSuccess;
}
cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t num_bytes, size_t offset, int kind) {
    (void)symbol, (void)from, (void)num_bytes, (void)offset, (void)kind;
    return cudaSuccess;
}
cudaError_t cudaMemcpyToSymbolAsync(const void *symbol, const void *from, size_t num_bytes, size_t offset, int kind,
                                    cudaStream_t stream) {
    (void)symbol, (void)from, (void)num_bytes, (void)offset, (void)kind;
    return stream_launched(stream_of(stream), "cudaMemcpyToSymbolAsync"), cudaSuccess;
}
