/* CUDA's runtime: streams and events. */
#include "stand_in.h"

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    (void)flags;
    if (device_error()) return device_error();
    if ((*stream = stream_new(priority))) return cudaSuccess;
    /* More than progress.c has room for: not "out of memory", which would be taken for the GPU's. */
    return failed(unsupported("cudaStreamCreateWithPriority", cudaErrorNotSupported, 0));
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return stream_delete(stream), cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    return *priority = stream_priority(stream_of(stream)), cudaSuccess;
}
cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned *flags) {
    return *flags = (uintptr_t)stream < 16 ? 0 : 1 /* cudaStreamNonBlocking */, cudaSuccess;
}
cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *device) {
    return *device = stream_device(stream_of(stream)), cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (stream_capture(stream_of(stream))) return failed(cudaErrorStreamCaptureUnsupported);
    return host_waits_for_stream(stream_of(stream)), cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    if (stream_capture(stream_of(stream))) return failed(cudaErrorStreamCaptureUnsupported);
    return stream_is_idle(stream_of(stream)) ? cudaSuccess : failed(cudaErrorNotReady);
}

/* A stream that waits for an event of a capture is captured too. */
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    (void)flags;
    struct capture *capture = event_capture(event), *own = stream_capture(stream_of(stream));
    if (!capture_is_active(capture)) return stream_wait(stream_of(stream), event), cudaSuccess;
    if (own && own != capture) return failed(cudaErrorStreamCaptureMerge);
    return stream_set_capture(stream_of(stream), capture), cudaSuccess;
}

/* Functions of the host run at once; those of a captured stream would run when the graph does. */
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*function)(void *), void *data) {
    stream_launched(stream_of(stream), "cudaLaunchHostFunc");
    if (!stream_capture(stream_of(stream))) function(data);
    return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, void (*callback)(cudaStream_t, cudaError_t, void *), void *data,
                                  unsigned flags) {
    (void)flags;
    if (stream_capture(stream_of(stream))) return failed(cudaErrorStreamCaptureUnsupported);
    return callback(stream, cudaSuccess, data), cudaSuccess;
}

/* ---- events */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    (void)flags;
    if (device_error()) return device_error();
    return (*event = event_new()) ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return event_delete(event), cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    (void)flags;
    struct capture *capture = stream_capture(stream_of(stream));
    if (capture) event_set_capture(event, capture);
    else event_record(event, stream_of(stream));
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, 0);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (capture_is_active(event_capture(event))) return failed(cudaErrorCapturedEvent);
    return event_has_happened(event) ? cudaSuccess : failed(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (capture_is_active(event_capture(event))) return failed(cudaErrorCapturedEvent);
    return host_waits_for_event(event), cudaSuccess;
}
/* A millisecond between any two events: there is no time here, and programs divide by it. */
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    if (!event_is_recorded(begin) || !event_is_recorded(end)) return failed(cudaErrorInvalidResourceHandle);
    return *milliseconds = 1, cudaSuccess;
}
cudaError_t cudaEventElapsedTime_v2(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    return cudaEventElapsedTime(milliseconds, begin, end);
}
