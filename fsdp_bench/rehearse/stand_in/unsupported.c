/* Functions that the stand-in lacks: each call is recorded by name and fails.
 *
 * Functions that are known when the stand-in is compiled have a definition of their own: the driver's below, the
 * entry points of other libraries in other_libraries.c, those of libcudart and cuBLAS in what build.py writes. A
 * function of the driver that a program asks for by another name at run time gets one of a pool.
 */
#define _GNU_SOURCE
#include "stand_in.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_NAMES 4096
#define POOL 256

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    const char *name;
    unsigned long long count;
} called[MAX_NAMES];
static size_t num_called;

/* Count a call; return whether it is the first of the name. */
static int record(const char *name) {
    int is_first = 0;
    pthread_mutex_lock(&lock);
    size_t index = 0;
    while (index < num_called && strcmp(called[index].name, name)) ++index;
    if (index == num_called && num_called < MAX_NAMES) {
        called[num_called++].name = name;
        is_first = 1;
    }
    if (index < num_called) ++called[index].count;
    pthread_mutex_unlock(&lock);
    return is_first;
}

int unsupported(const char *name, int status, int is_harmless) {
    int goes_on = is_harmless && settings_warn_only();
    if (record(name))
        fprintf(stderr, "fsdp-bench rehearse: %s was called, which this stand-in for NVIDIA's libraries lacks; %s\n",
                name, goes_on ? "it does nothing" : "it fails");
    return goes_on ? 0 : status;
}

/* Write lines "name count" of all that was called; return the size that they need with the final 0. */
__attribute__((visibility("default"))) size_t stand_in_unsupported(char *text, size_t size) {
    size_t used = 0;
    if (text && size) *text = 0;
    pthread_mutex_lock(&lock);
    for (size_t index = 0; index < num_called; ++index) {
        size_t left = text && used < size ? size - used : 0;
        used += (size_t)snprintf(left ? text + used : NULL, left, "%s %llu\n", called[index].name, called[index].count);
    }
    pthread_mutex_unlock(&lock);
    return used + 1;
}

/* ---- a pool of functions, whose names are known when somebody asks for one */

static const char *pool_names[POOL];
static int pool_statuses[POOL];

static int from_pool(int index) { return unsupported(pool_names[index], pool_statuses[index], 0); }

#define ONE(n) \
    static int pool_##n(void) { return from_pool(0x##n); }
#define SIXTEEN(n) \
    ONE(n##0) ONE(n##1) ONE(n##2) ONE(n##3) ONE(n##4) ONE(n##5) ONE(n##6) ONE(n##7) \
    ONE(n##8) ONE(n##9) ONE(n##a) ONE(n##b) ONE(n##c) ONE(n##d) ONE(n##e) ONE(n##f)
#define ALL_OF(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(a) X(b) X(c) X(d) X(e) X(f)
ALL_OF(SIXTEEN)

#undef SIXTEEN
#define SIXTEEN(n) \
    pool_##n##0, pool_##n##1, pool_##n##2, pool_##n##3, pool_##n##4, pool_##n##5, pool_##n##6, pool_##n##7, \
    pool_##n##8, pool_##n##9, pool_##n##a, pool_##n##b, pool_##n##c, pool_##n##d, pool_##n##e, pool_##n##f,
static int (*const pool[POOL])(void) = {ALL_OF(SIXTEEN)};

void *unsupported_function(const char *name, int status) {
    pthread_mutex_lock(&lock);
    int index = 0;
    while (index < POOL && pool_names[index] && strcmp(pool_names[index], name)) ++index;
    if (index < POOL && !pool_names[index]) {
        pool_names[index] = strdup(name);
        pool_statuses[index] = status;
    }
    pthread_mutex_unlock(&lock);
    return index < POOL ? (void *)pool[index] : NULL;
}

/* ---- the driver's functions by name: newer ones have a version, which callers do not write */

static void *driver_function(const char *symbol) {
    char versioned[256];
    for (int version = 4; version >= 2; --version) {
        snprintf(versioned, sizeof versioned, "%s_v%d", symbol, version);
        void *found = dlsym(RTLD_DEFAULT, versioned);
        if (found && (version == 2 || !dlsym(RTLD_DEFAULT, symbol))) return found;
    }
    void *found = dlsym(RTLD_DEFAULT, symbol);
    return found ? found : unsupported_function(symbol, cudaErrorNotSupported);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                             unsigned long long flags, int *status) {
    (void)version, (void)flags;
    *function = driver_function(symbol);
    if (status) *status = *function ? 0 : 1; /* cudaDriverEntryPointSymbolNotFound */
    return *function ? cudaSuccess : failed(cudaErrorInvalidValue);
}
cudaError_t cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags, int *status) {
    return cudaGetDriverEntryPointByVersion(symbol, function, CUDA_VERSION, flags, status);
}
int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    (void)version, (void)flags;
    *function = driver_function(symbol);
    if (status) *status = *function ? 0 : 1; /* CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND */
    return *function ? 0 : CUDA_ERROR_NOT_FOUND;
}
int cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}
