/* NVML (libnvidia-ml): the machine's devices, all of them, whatever CUDA_VISIBLE_DEVICES says.
 *
 * Other functions are not defined: callers look them up by name, and pynvml's traceback says which one is not found.
 * None is counted as lacking, as no memory depends on it.
 */
#include "stand_in.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };

static char devices[MAX_DEVICES]; /* handles are addresses of these */

static int index_of(const void *device) { return (int)((const char *)device - devices); }

/* The memory that this process uses of a device: of one that it cannot see, none. */
static size_t used(const void *device) {
    int ordinal = device_ordinal(index_of(device));
    return ordinal < 0 ? 0 : memory_used(ordinal);
}
static size_t left(const void *device) {
    int ordinal = device_ordinal(index_of(device));
    return ordinal < 0 ? settings_gpu()->total_bytes : memory_free(ordinal);
}

int nvmlInit(void) { return SUCCESS; }
int nvmlInit_v2(void) { return SUCCESS; }
int nvmlInitWithFlags(unsigned flags) { return (void)flags, SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int error) {
    switch (error) {
    case SUCCESS: return "The operation was successful";
    case INVALID_ARGUMENT: return "An argument was invalid";
    case NOT_SUPPORTED: return "The requested operation is not available on target device";
    case NOT_FOUND: return "A query to find an object was unsuccessful";
    case INSUFFICIENT_SIZE: return "An input argument is not large enough";
    default: return "An internal driver error occurred";
    }
}

/* ---- the system. There is no driver; the newest branch is named, so that nobody finds it too old. */

int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    return snprintf(version, length, "%s", "580.00"), SUCCESS;
}
int nvmlSystemGetNVMLVersion(char *version, unsigned length) {
    return snprintf(version, length, "%s", "13.580.00"), SUCCESS;
}
int nvmlSystemGetCudaDriverVersion(int *version) { return *version = CUDA_VERSION, SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = CUDA_VERSION, SUCCESS; }

/* ---- devices */

int nvmlDeviceGetCount(unsigned *count) { return *count = (unsigned)settings_gpu()->count, SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) { return nvmlDeviceGetCount(count); }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if (index >= (unsigned)settings_gpu()->count) return INVALID_ARGUMENT;
    return *device = &devices[index], SUCCESS;
}
int nvmlDeviceGetHandleByIndex(unsigned index, void **device) { return nvmlDeviceGetHandleByIndex_v2(index, device); }
int nvmlDeviceGetIndex(void *device, unsigned *index) { return *index = (unsigned)index_of(device), SUCCESS; }

/* As fill_properties in settings.c. */
int nvmlDeviceGetPciInfo_v3(void *device, nvmlPciInfo_t *info) {
    *info = (nvmlPciInfo_t){.bus = (unsigned)index_of(device) + 1};
    snprintf(info->busId, sizeof info->busId, "00000000:%02X:00.0", info->bus);
    return snprintf(info->busIdLegacy, sizeof info->busIdLegacy, "%s", info->busId + 4), SUCCESS;
}
int nvmlDeviceGetMinorNumber(void *device, unsigned *number) { return *number = (unsigned)index_of(device), SUCCESS; }
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
    snprintf(uuid, length, "GPU-%02x010203-0405-0607-0809-0a0b0c0d0e0f", (unsigned)index_of(device));
    return SUCCESS;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    unsigned index;
    if (sscanf(uuid, "GPU-%2x010203-", &index) != 1) return NOT_FOUND;
    return nvmlDeviceGetHandleByIndex_v2(index, device) ? NOT_FOUND : SUCCESS;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) {
    const char *colon = strchr(id, ':');
    unsigned bus = colon ? (unsigned)strtoul(colon + 1, NULL, 16) : 0;
    return nvmlDeviceGetHandleByIndex_v2(bus - 1, device) ? NOT_FOUND : SUCCESS;
}
int nvmlDeviceGetName(void *device, char *name, unsigned length) {
    return (void)device, snprintf(name, length, "%s", settings_gpu()->name), SUCCESS;
}
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    (void)device;
    *major = settings_gpu()->capability / 10;
    *minor = settings_gpu()->capability % 10;
    return SUCCESS;
}

/* ---- memory */

int nvmlDeviceGetMemoryInfo(void *device, nvmlMemory_t *memory) {
    *memory = (nvmlMemory_t){settings_gpu()->total_bytes, left(device), used(device)};
    return SUCCESS;
}
int nvmlDeviceGetMemoryInfo_v2(void *device, nvmlMemory_v2_t *memory) {
    *memory = (nvmlMemory_v2_t){memory->version, settings_gpu()->total_bytes, 0, left(device), used(device)};
    return SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, nvmlProcessInfo_t *processes) {
    if (!used(device)) return *count = 0, SUCCESS;
    if (*count < 1) return *count = 1, INSUFFICIENT_SIZE;
    *count = 1;
    *processes = (nvmlProcessInfo_t){(unsigned)getpid(), used(device), 0, 0};
    return SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v2(void *device, unsigned *count, nvmlProcessInfo_t *processes) {
    return nvmlDeviceGetComputeRunningProcesses_v3(device, count, processes);
}
/* The first version's entries have only the first two members, so a caller's array is smaller. */
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *processes) {
    nvmlProcessInfo_t process;
    int error = nvmlDeviceGetComputeRunningProcesses_v3(device, count, &process);
    if (!error && *count) memcpy(processes, &process, offsetof(nvmlProcessInfo_t, gpuInstanceId));
    return error;
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void *device, unsigned *count, nvmlProcessInfo_t *processes) {
    return (void)device, (void)processes, *count = 0, SUCCESS;
}

/* ---- load and links: a GPU that does nothing and is linked to nobody */

int nvmlDeviceGetUtilizationRates(void *device, nvmlUtilization_t *rates) {
    return (void)device, memset(rates, 0, sizeof *rates), SUCCESS;
}
int nvmlDeviceGetClockInfo(void *device, int clock, unsigned *megahertz) {
    const struct limits *limits = settings_gpu()->limits; /* typical ones */
    int is_memory = clock == 2 /* NVML_CLOCK_MEM */;
    (void)device;
    return *megahertz = (unsigned)(is_memory ? limits->memory_clock_khz : limits->clock_khz) / 1000, SUCCESS;
}
int nvmlDeviceGetMaxClockInfo(void *device, int clock, unsigned *megahertz) {
    return nvmlDeviceGetClockInfo(device, clock, megahertz);
}
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules) {
    return (void)device, *millijoules = 0, SUCCESS;
}
int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) { return (void)device, *milliwatts = 0, SUCCESS; }
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *celsius) {
    return (void)device, (void)sensor, *celsius = 0, SUCCESS;
}
int nvmlDeviceGetGpuFabricInfoV(void) { return SUCCESS; } /* in no fabric: the answer is left as it is, zeros */
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetP2PStatus(void *device, void *other, int capability, int *status) {
    (void)device, (void)other, (void)capability;
    return *status = 1 /* NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED */, SUCCESS;
}
