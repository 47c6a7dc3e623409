/* What PyTorch asks cuBLAS, the driver and NVML. Products do nothing; handles are addresses. */
#define _GNU_SOURCE
#include "card.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- cuBLAS */

#define INVALID 1
#define OUT_OF_MEMORY 2

static char handle[64];

int cublasCreate_v2(void **created) { return (*created = calloc(1, 64)) ? 0 : OUT_OF_MEMORY; } /* each its own */
int cublasGetMathMode(void *h, int *mode) { return (void)h, *mode = 0, 0; }
int cublasGetPointerMode_v2(void *h, int *mode) { return (void)h, *mode = 0, 0; }

/* ---- cuBLASLt: one algorithm, which takes no workspace */

struct heuristic_result { /* cublasLtMatmulHeuristicResult_t */
    uint64_t algorithm[8];
    size_t workspace_size;
    int state;
    float waves;
    int reserved[4];
};

static int described(void **created) { return (*created = calloc(1, 256)) ? 0 : 3; }
static int forgotten(void *description) { return free(description), 0; }
int cublasLtMatmulDescCreate(void **created, int compute, int scale) {
    return (void)compute, (void)scale, described(created);
}
int cublasLtMatmulDescDestroy(void *description) { return forgotten(description); }
int cublasLtMatrixLayoutCreate(void **created, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    return (void)type, (void)rows, (void)columns, (void)stride, described(created);
}
int cublasLtMatrixLayoutDestroy(void *layout) { return forgotten(layout); }
int cublasLtMatmulPreferenceCreate(void **created) { return described(created); }
int cublasLtMatmulPreferenceDestroy(void *preference) { return forgotten(preference); }
int cublasLtMatmulAlgoGetHeuristic(void *h, void *product, void *a, void *b, void *c, void *d, void *preference,
                                   int requested, struct heuristic_result results[], int *count) {
    (void)h, (void)product, (void)a, (void)b, (void)c, (void)d, (void)preference, (void)requested;
    results[0] = (struct heuristic_result){0};
    return *count = 1, 0;
}

/* ---- the driver */

int cuInit(unsigned flags) { return (void)flags, 0; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    return (void)device, *flags = 0, *active = 1, 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    return (void)attribute, (void)device, *value = 0, 0;
}
int cuCtxGetCurrent(void **context) { return *context = handle, 0; }
int cuGetErrorString(int error, const char **text) { return (void)error, *text = "an error of the hollow card", 0; }

/* ---- the driver's virtual memory, for expandable segments: addresses and pages apart */

int cuMemGetAllocationGranularity(size_t *granularity, const void *properties, int option) {
    return (void)properties, (void)option, *granularity = MEMORY_PAGE, 0;
}
int cuMemAddressReserve(void **address, size_t num_bytes, size_t alignment, void *wish, unsigned long long flags) {
    (void)alignment, (void)wish, (void)flags;
    return (*address = memory_reserve(num_bytes)) ? 0 : OUT_OF_MEMORY;
}
int cuMemAddressFree(void *address, size_t num_bytes) { return (void)num_bytes, memory_release(address) ? 0 : INVALID; }
int cuMemCreate(size_t *pages, size_t num_bytes, const void *properties, unsigned long long flags) {
    (void)properties, (void)flags;
    return *pages = num_bytes, memory_take_pages(num_bytes) ? 0 : OUT_OF_MEMORY;
}
int cuMemRelease(size_t pages) { return memory_give_pages(pages), 0; }
int cuMemMap(void *address, size_t num_bytes, size_t offset, size_t pages, unsigned long long flags) {
    return (void)address, (void)num_bytes, (void)offset, (void)pages, (void)flags, 0;
}
int cuMemUnmap(void *address, size_t num_bytes) { return (void)address, (void)num_bytes, 0; }
int cuMemSetAccess(void *address, size_t num_bytes, const void *access, size_t count) {
    return (void)address, (void)num_bytes, (void)access, (void)count, 0;
}

static int not_supported(void) { return 801; }

int cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version, unsigned long long flags,
                                     int *status) {
    (void)version, (void)flags;
    *function = dlsym(RTLD_DEFAULT, symbol);
    if (!*function) *function = (void *)not_supported;
    if (status) *status = 0;
    return 0;
}

/* ---- NVML */

#define NOT_SUPPORTED 3

struct nvml_memory {
    unsigned long long total, free, used;
};
struct nvml_process {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
};
struct nvml_utilization {
    unsigned gpu, memory;
};
int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return (void)flags, 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { return *count = 1, 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { return (void)index, *device = handle, 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) { return (void)uuid, *device = handle, 0; }
int nvmlDeviceGetName(void *device, char *name, unsigned length) {
    return (void)device, strncpy(name, card_name(), length), 0;
}
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
    return (void)device, strncpy(uuid, "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f", length), 0;
}
int nvmlDeviceGetMemoryInfo(void *device, struct nvml_memory *memory) {
    (void)device;
    *memory = (struct nvml_memory){memory_total(), memory_total() - memory_used(), memory_used()};
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, struct nvml_process *processes) {
    (void)device;
    if (!memory_is_used()) return *count = 0, 0;
    if (*count < 1) return *count = 1, 7; /* NVML_ERROR_INSUFFICIENT_SIZE */
    *count = 1;
    *processes = (struct nvml_process){(unsigned)getpid(), memory_used(), 0, 0};
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, struct nvml_process *processes) {
    return nvmlDeviceGetComputeRunningProcesses_v3(device, count, processes);
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) { return (void)id, *device = handle, 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = 13000, 0; }
int nvmlDeviceGetGpuFabricInfoV(void) { return 0; } /* in no fabric: the answer is left as it is, zeros */
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NOT_SUPPORTED; }
int nvmlSystemGetDriverVersion(char *version, unsigned length) { return strncpy(version, "none", length), 0; }
int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) { return (void)device, *milliwatts = 0, 0; }
int nvmlDeviceGetUtilizationRates(void *device, struct nvml_utilization *rates) {
    return (void)device, memset(rates, 0, sizeof *rates), 0;
}
