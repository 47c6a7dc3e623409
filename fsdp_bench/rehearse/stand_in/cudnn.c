/* cuDNN: NVIDIA's own, which PyTorch has loaded, chooses engines and workspaces for the GPU; executing does nothing.
 *
 * Since 9.8 cuDNN has a documented way to compile for a GPU that is not there: heuristics, engines and execution plans
 * take the GPU's properties, as JSON, in place of a handle (CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR; NVIDIA/cudnn-frontend,
 * samples/cpp/misc/deviceless_aot_compilation.cpp). PyTorch's calls of the graph interface, which its convolutions and
 * cuDNN's attention use, are passed on with these properties, and without handles: those are of the stand-in.
 *
 * An older cuDNN is refused, as the memory that its convolutions take is not known. STAND_IN_UNSUPPORTED=warn goes on:
 * one engine, which takes no workspace. (`rehearse --unsupported warn` turns cuDNN off in PyTorch before that; other
 * packages may still call it.) Of the older interface, which needs a GPU, there is batch normalization, as far as its
 * memory is known; everything else, recurrent networks among it, is refused by name (build.py finds the functions).
 */
#define _GNU_SOURCE
#include "stand_in.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The numbers of cudnn_graph.h. */
enum { NOT_SUPPORTED = 3000 }; /* CUDNN_STATUS_NOT_SUPPORTED */
enum { HANDLE = 0, INT64 = 3, DESCRIPTOR = 15, CHARACTERS = 24 }; /* cudnnBackendAttributeType_t */
enum { ENGINE = 2, HEURISTIC = 4, PLAN = 5, PROPERTIES = 38 }; /* cudnnBackendDescriptorType_t */
enum { JSON_OF_PROPERTIES = 2702 }; /* CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION */

struct cudnn {
    cudaStream_t stream;
    char rest[64];
};

static int (*create)(int, void **), (*destroy)(void *), (*finalize)(void *); /* NVIDIA's */
static int (*set)(void *, int, int, int64_t, const void *);
static int (*get)(const void *, int, int, int64_t, int64_t *, void *);
static void *properties; /* a descriptor of NVIDIA's; NULL: there is no cuDNN that takes one */
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* Keys as openxla/xla writes them and compares them with GPUs: xla/backends/gpu/target_config/cudnn_device_props.cc. */
static int write_properties(char *json, size_t size) {
    const struct gpu *gpu = settings_gpu();
    struct cudaDeviceProp is;
    fill_properties(&is, device_current());
    return snprintf(
        json, size,
        "{\"deviceVer\":%d,\"multiProcessorCount\":%d,\"warpSize\":%d,\"maxSharedMemoryPerBlock\":%zu,"
        "\"maxSharedMemoryPerBlockOptin\":%zu,\"oversizedSharedMemoryPerBlock\":0,\"reservedSharedMemoryPerBlock\":%zu,"
        "\"maxRegistersPerSM\":%d,\"maxCtasPerSM\":%d,\"maxThreadsPerBlock\":%d,\"maxThreadsPerSM\":%d,"
        "\"regsPerBlock\":%d,\"totalGlobalMem\":%zu,\"smClockRateKHz\":%d,\"l2CacheSize\":%d,"
        "\"maxBlockSize\":[%d,%d,%d],\"memClockRateKHz\":%d,\"maxGridSize\":[%d,%d,%d],\"supportCoopLaunch\":%d,"
        "\"pciDeviceId\":0,\"isTccDriver\":0,\"cudaDeviceId\":0,\"driverVer\":%d,\"deviceName\":\"%s\"}",
        10 * gpu->capability, is.multiProcessorCount, is.warpSize, is.sharedMemPerBlock, is.sharedMemPerBlockOptin,
        is.reservedSharedMemPerBlock, is.regsPerMultiprocessor, is.maxBlocksPerMultiProcessor, is.maxThreadsPerBlock,
        is.maxThreadsPerMultiProcessor, is.regsPerBlock, is.totalGlobalMem, gpu->limits->clock_khz, is.l2CacheSize,
        is.maxThreadsDim[0], is.maxThreadsDim[1], is.maxThreadsDim[2], gpu->limits->memory_clock_khz,
        is.maxGridSize[0], is.maxGridSize[1], is.maxGridSize[2], is.cooperativeLaunch, CUDA_VERSION, is.name);
}

static void describe_gpu(void) {
    char json[2048];
    void *library = dlopen("libcudnn.so.9", RTLD_LAZY | RTLD_NOLOAD), *made = NULL;
    if (!library) return;
    create = dlsym(library, "cudnnBackendCreateDescriptor");
    destroy = dlsym(library, "cudnnBackendDestroyDescriptor");
    finalize = dlsym(library, "cudnnBackendFinalize");
    set = dlsym(library, "cudnnBackendSetAttribute");
    get = dlsym(library, "cudnnBackendGetAttribute");
    if (!create || !destroy || !finalize || !set || !get || create(PROPERTIES, &made)) return;
    int length = write_properties(json, sizeof json);
    if (set(made, JSON_OF_PROPERTIES, CHARACTERS, length, json) || finalize(made)) destroy(made);
    else properties = made;
}

/* Whether NVIDIA's cuDNN answers. The visible one is for the script's process. */
static int answers(void) { return pthread_once(&once, describe_gpu), properties != NULL; }
__attribute__((visibility("default"))) int stand_in_has_cudnn(void) { return answers(); }

/* Handles are zeros that the caller only passes on, as descriptors are where cuDNN does not answer. */
static int created(void **made, size_t size) { return (*made = calloc(1, size)) ? 0 : NOT_SUPPORTED; }

int cudnnCreate(struct cudnn **handle) {
    int status = answers() ? 0 : unsupported("cudnnCreate", NOT_SUPPORTED, 1);
    return status ? status : created((void **)handle, sizeof **handle);
}
int cudnnDestroy(struct cudnn *handle) { return free(handle), 0; }
int cudnnSetStream(struct cudnn *handle, cudaStream_t stream) { return handle->stream = stream, 0; }
int cudnnGetStream(struct cudnn *handle, cudaStream_t *stream) { return *stream = handle->stream, 0; }

int cudnnBackendCreateDescriptor(int type, void **descriptor) {
    if (!answers()) {
        int status = unsupported("cudnnBackendCreateDescriptor", NOT_SUPPORTED, 1);
        return status ? status : created(descriptor, 64);
    }
    /* CUDNN_ATTR_ENGINE_DEVICEPROP, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP */
    int attribute = type == ENGINE ? 1307 : type == HEURISTIC ? 204 : type == PLAN ? 407 : 0;
    int status = create(type, descriptor);
    return status || !attribute ? status : set(*descriptor, attribute, DESCRIPTOR, 1, &properties);
}
int cudnnBackendDestroyDescriptor(void *descriptor) { return answers() ? destroy(descriptor) : (free(descriptor), 0); }
int cudnnBackendInitialize(void *descriptor) { return (void)descriptor, 0; }
int cudnnBackendFinalize(void *descriptor) { return answers() ? finalize(descriptor) : 0; }
/* Convolutions of 1x1, whose engine may be another on a GPU: cuDNN has some made of cuBLASLt, which cannot start here. */
static int num_pointwise;
__attribute__((visibility("default"))) int stand_in_pointwise_convolutions(void) { return num_pointwise; }
static void note_pointwise(const void *weight) {
    int64_t dims[8], count = 0, positions = 1;
    if (get(weight, 902 /* CUDNN_ATTR_TENSOR_DIMENSIONS */, INT64, 8, &count, dims)) return;
    for (int64_t i = 2; i < count; ++i) positions *= dims[i];
    __atomic_fetch_add(&num_pointwise, positions == 1, __ATOMIC_RELAXED);
}

int cudnnBackendSetAttribute(void *descriptor, int attribute, int type, int64_t count, const void *elements) {
    /* CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W, _BWD_DATA_W, _BWD_FILTER_DW */
    if (answers() && (attribute == 703 || attribute == 709 || attribute == 715)) note_pointwise(*(void **)elements);
    return answers() && type != HANDLE ? set(descriptor, attribute, type, count, elements) : 0;
}
int cudnnBackendGetAttribute(const void *descriptor, int attribute, int type, int64_t requested, int64_t *count,
                             void *elements) {
    if (answers()) return get(descriptor, attribute, type, requested, count, elements);
    int is_descriptor = type == DESCRIPTOR; /* the caller made it */
    int is_number = type == INT64;          /* the workspace, say */
    if (count) *count = is_descriptor || is_number;
    if (is_number && elements && requested > 0) memset(elements, 0, sizeof(int64_t));
    return 0;
}
int cudnnBackendExecute(struct cudnn *handle, void *plan, void *tensors) {
    (void)plan, (void)tensors;
    stream_launched(stream_of(handle->stream), "cudnnBackendExecute");
    return answers() ? 0 : unsupported("cudnnBackendExecute", NOT_SUPPORTED, 1);
}

/* ---- batch normalization
 *
 * Its kernels take no workspace, but for those of 16 bits in channels last, in training: with what these take, which is
 * not known here, they are refused (NVIDIA cuDNN's API reference, cudnnBatchNormalizationForwardTrainingEx: without a
 * workspace it does what the function does that has none). PyTorch has kernels of its own for bf16.
 */
enum { HALF = 2, SPATIAL_PERSISTENT = 2 }; /* cudnnDataType_t, cudnnBatchNormMode_t: PyTorch's for channels last */

struct tensor {
    int type;
    char rest[60];
};

int cudnnCreateTensorDescriptor(struct tensor **made) { return created((void **)made, sizeof **made); }
int cudnnDestroyTensorDescriptor(struct tensor *tensor) { return free(tensor), 0; }
int cudnnSetTensorNdDescriptor(struct tensor *tensor, int type, int count, const int *dims, const int *strides) {
    return (void)count, (void)dims, (void)strides, tensor->type = type, 0;
}
int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(struct cudnn *handle, int mode, int operations,
                                                             struct tensor *x, void *z, void *y, void *statistics,
                                                             void *activation, size_t *num_bytes) {
    (void)handle, (void)operations, (void)z, (void)y, (void)statistics, (void)activation;
    if (mode == SPATIAL_PERSISTENT && x->type == HALF) return unsupported(__func__, NOT_SUPPORTED, 0);
    return *num_bytes = 0, 0;
}
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(struct cudnn *handle, int mode, int operations,
                                                         void *activation, struct tensor *x, size_t *num_bytes) {
    (void)handle, (void)mode, (void)operations, (void)activation, (void)x;
    return *num_bytes = 0, 0;
}
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(struct cudnn *handle, int mode, int operations, struct tensor *x,
                                                      void *y, void *dy, void *dz, void *dx, void *parameters,
                                                      void *activation, size_t *num_bytes) {
    (void)y, (void)dy, (void)dz, (void)dx, (void)parameters;
    return cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(handle, mode, operations, x, NULL, NULL, NULL,
                                                                    activation, num_bytes);
}
#define NORMALIZATION(name) \
    int name(struct cudnn *handle) { return stream_launched(stream_of(handle->stream), #name), 0; }
NORMALIZATION(cudnnBatchNormalizationForwardTrainingEx)
NORMALIZATION(cudnnBatchNormalizationForwardInference)
NORMALIZATION(cudnnBatchNormalizationBackwardEx)
