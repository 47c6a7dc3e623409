/* CUDA graphs: capture of streams, and graphs that count their nodes. Kernels of a launched graph do nothing either.
 *
 * Capture begins on one stream and spreads to those that wait for events recorded in a captured stream
 * (cudaStreamWaitEvent in streams.c). While it lasts, the host may not wait for what is captured.
 */
#include "stand_in.h"

#include <stdio.h>
#include <stdlib.h>

struct graph {
    size_t num_nodes;
};
struct capture {
    unsigned long long id;
    struct stream *origin;
    struct graph *graph;
    int is_active;
};
/* Captures are never freed: events keep pointing to them. */

static unsigned long long num_captures;
static int num_active;

int capturing(void) { return __atomic_load_n(&num_active, __ATOMIC_RELAXED) > 0; }
int capture_is_active(const struct capture *capture) {
    return capture && __atomic_load_n(&capture->is_active, __ATOMIC_RELAXED);
}

static void issued(struct stream *stream, enum traced kind, size_t num_bytes, const char *name) {
    struct capture *capture = stream_capture(stream);
    if (capture) __atomic_fetch_add(&capture->graph->num_nodes, 1, __ATOMIC_RELAXED);
    else trace(kind, stream, num_bytes, name), stream_issue(stream);
}
void stream_launched(struct stream *stream, const char *name) { issued(stream, LAUNCH, 0, name); }
void stream_copied(struct stream *stream, enum traced kind, size_t num_bytes) { issued(stream, kind, num_bytes, NULL); }

static cudaError_t begin(cudaStream_t handle, struct graph *graph) {
    struct stream *stream = stream_of(handle);
    if (handle != stream) return failed(cudaErrorStreamCaptureUnsupported); /* default streams cannot be captured */
    if (stream_capture(stream)) return failed(cudaErrorInvalidValue);
    struct capture *capture = calloc(1, sizeof *capture);
    if (!graph) graph = calloc(1, sizeof *graph);
    if (!capture || !graph) return failed(cudaErrorMemoryAllocation);
    *capture = (struct capture){__atomic_add_fetch(&num_captures, 1, __ATOMIC_RELAXED), stream, graph, 1};
    __atomic_fetch_add(&num_active, 1, __ATOMIC_RELAXED);
    return stream_set_capture(stream, capture), cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, int mode) { return (void)mode, begin(stream, NULL); }
cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph, const cudaGraphNode_t *dependencies,
                                          const void *edges, size_t count, int mode) {
    (void)dependencies, (void)edges, (void)count, (void)mode;
    return begin(stream, graph);
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
    struct stream *stream = stream_of(handle);
    struct capture *capture = stream_capture(stream);
    if (!capture) return failed(cudaErrorInvalidValue);
    if (capture->origin != stream) return failed(cudaErrorStreamCaptureUnmatched);
    __atomic_store_n(&capture->is_active, 0, __ATOMIC_RELAXED);
    __atomic_fetch_sub(&num_active, 1, __ATOMIC_RELAXED);
    leave_capture(capture);
    return *graph = capture->graph, cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = stream_capture(stream_of(stream)) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(int *mode) {
    static __thread int current; /* cudaStreamCaptureModeGlobal */
    int previous = current;
    current = *mode;
    return *mode = previous, cudaSuccess;
}

/* The capture of a stream: its id and graph. Nodes have no order here, so there are no dependencies. */
static cudaError_t info(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                        cudaGraph_t *graph, const cudaGraphNode_t **nodes, size_t *count) {
    struct capture *capture = stream_capture(stream_of(stream));
    *status = capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    if (id) *id = capture ? capture->id : 0;
    if (graph) *graph = capture ? capture->graph : NULL;
    if (nodes) *nodes = NULL;
    if (count) *count = 0;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo_v3(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                        unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                        const void **edges, size_t *count) {
    if (edges) *edges = NULL;
    return info(stream, status, id, graph, nodes, count);
}
#if CUDA_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const void **edges,
                                     size_t *count) {
    return cudaStreamGetCaptureInfo_v3(stream, status, id, graph, nodes, edges, count);
}
#else
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id) {
    return info(stream, status, id, NULL, NULL, NULL);
}
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                        unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                        size_t *count) {
    return info(stream, status, id, graph, nodes, count);
}
#endif
cudaError_t cudaStreamUpdateCaptureDependencies(void) { return cudaSuccess; } /* dependencies are not kept */

/* ---- graphs */

cudaError_t cudaGraphCreate(cudaGraph_t *graph, unsigned flags) {
    (void)flags;
    return (*graph = calloc(1, sizeof **graph)) ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return free(graph), cudaSuccess; }

/* The number of nodes; as nodes, addresses that differ. */
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    if (!nodes) return *count = graph->num_nodes, cudaSuccess;
    for (size_t index = 0; index < *count; ++index)
        nodes[index] = index < graph->num_nodes ? (cudaGraphNode_t)(index + 1) : NULL;
    if (*count > graph->num_nodes) *count = graph->num_nodes;
    return cudaSuccess;
}
cudaError_t cudaGraphDebugDotPrint(cudaGraph_t graph, const char *path, unsigned flags) {
    (void)flags;
    FILE *file = fopen(path, "w");
    if (!file) return failed(cudaErrorInvalidValue);
    fprintf(file, "digraph stand_in {\n  graph_of_%zu_nodes\n}\n", graph->num_nodes);
    return fclose(file), cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
    (void)graph, (void)flags;
    return (*executable = calloc(1, 64)) ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiate(executable, graph, flags);
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) { return free(executable), cudaSuccess; }
cudaError_t cudaGraphUpload(cudaGraphExec_t executable, cudaStream_t stream) {
    return (void)executable, (void)stream, cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    (void)executable;
    return stream_launched(stream_of(stream), "cudaGraphLaunch"), cudaSuccess;
}
