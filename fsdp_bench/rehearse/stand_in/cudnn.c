/* cuDNN: refused, as the memory that its convolutions take is not known here. STAND_IN_UNSUPPORTED=warn goes on.
 *
 * Then its graph interface, which PyTorch's convolutions use, has one engine, which takes no workspace and does
 * nothing: what a real engine takes for the time of a convolution is missing from the peak. (`rehearse --unsupported
 * warn` turns cuDNN off in PyTorch before that; other packages may still call it.) Everything else of cuDNN, recurrent
 * networks and batch normalization among it, is refused by name (build.py finds the functions).
 */
#include "stand_in.h"

#include <stdlib.h>
#include <string.h>

enum { NOT_SUPPORTED = 3000 }; /* CUDNN_STATUS_NOT_SUPPORTED */

struct cudnn {
    cudaStream_t stream;
    char rest[64];
};

/* Handles and descriptors are zeros that the caller only passes on. */
static int created(void **made, size_t size) { return (*made = calloc(1, size)) ? 0 : NOT_SUPPORTED; }

int cudnnCreate(struct cudnn **handle) {
    int status = unsupported("cudnnCreate", NOT_SUPPORTED, 1);
    return status ? status : created((void **)handle, sizeof **handle);
}
int cudnnDestroy(struct cudnn *handle) { return free(handle), 0; }
int cudnnSetStream(struct cudnn *handle, cudaStream_t stream) { return handle->stream = stream, 0; }
int cudnnGetStream(struct cudnn *handle, cudaStream_t *stream) { return *stream = handle->stream, 0; }

int cudnnBackendCreateDescriptor(int type, void **descriptor) {
    (void)type;
    int status = unsupported("cudnnBackendCreateDescriptor", NOT_SUPPORTED, 1);
    return status ? status : created(descriptor, 64);
}
int cudnnBackendDestroyDescriptor(void *descriptor) { return free(descriptor), 0; }
int cudnnBackendInitialize(void *descriptor) { return (void)descriptor, 0; }
int cudnnBackendFinalize(void *descriptor) { return (void)descriptor, 0; }
int cudnnBackendSetAttribute(void) { return 0; }
int cudnnBackendGetAttribute(const void *descriptor, int attribute, int type, int64_t requested, int64_t *count,
                             void *elements) {
    (void)descriptor;
    int is_descriptor = type == 15 /* CUDNN_TYPE_BACKEND_DESCRIPTOR: the caller made it */;
    int is_number = type == 3 /* CUDNN_TYPE_INT64: the workspace, say */;
    if (is_number && requested > 0 && elements) memset(elements, 0, sizeof(int64_t));
    if (count) *count = is_descriptor || is_number;
    return (void)attribute, 0;
}
int cudnnBackendExecute(struct cudnn *handle, void *plan, void *tensors) {
    (void)plan, (void)tensors;
    stream_launched(stream_of(handle->stream), "cudnnBackendExecute");
    return unsupported("cudnnBackendExecute", NOT_SUPPORTED, 1);
}
