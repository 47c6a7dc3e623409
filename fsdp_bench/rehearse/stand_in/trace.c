/* A log of what a program issues, in order: work on streams, events, waits of the host. `rehearse --time` reads it.
 *
 * Nothing is noted before a program asks for it (stand_in_trace). Names are those of functions and kernels; they live as
 * long as the process.
 */
#define _GNU_SOURCE
#include "stand_in.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

struct entry {
    int kind, stream; /* kind: enum traced; stream: its index, -1: none */
    uint64_t value;   /* bytes of a copy, the address of an event */
    const char *name; /* of what was launched */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct entry *entries;
static size_t count, capacity;
static int is_on;

#define VISIBLE __attribute__((visibility("default")))

/* Begin anew, or stop; what was noted stays until it begins anew. */
VISIBLE void stand_in_trace(int on) {
    pthread_mutex_lock(&lock);
    if (on) count = 0;
    __atomic_store_n(&is_on, on, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&lock);
}

/* The number of entries. A program asks before and after an operator, to learn what the operator issued. */
VISIBLE size_t stand_in_traced(void) { return __atomic_load_n(&count, __ATOMIC_RELAXED); }

VISIBLE const void *stand_in_trace_entries(void) { return entries; }

VISIBLE int stand_in_stream_index(void *handle) { return stream_index(stream_of(handle)); }

void trace(enum traced kind, const struct stream *stream, uint64_t value, const char *name) {
    if (!__atomic_load_n(&is_on, __ATOMIC_RELAXED)) return;
    pthread_mutex_lock(&lock);
    if (count == capacity) {
        capacity = capacity ? 2 * capacity : 4096;
        entries = realloc(entries, capacity * sizeof *entries);
        if (!entries) abort(); /* the host has no memory */
    }
    entries[count] = (struct entry){kind, stream ? stream_index(stream) : -1, value, name};
    __atomic_store_n(&count, count + 1, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&lock);
}

static int has_own_mode;
static uintptr_t operators_begin, operators_end; /* libtorch_cpu.so */

static int find_operators(struct dl_phdr_info *library, size_t size, void *unused) {
    const char *name = strrchr(library->dlpi_name, '/');
    if (!name || strcmp(name, "/libtorch_cpu.so")) return 0;
    operators_begin = library->dlpi_addr;
    for (int i = 0; i < library->dlpi_phnum; i++) {
        uintptr_t end = library->dlpi_addr + library->dlpi_phdr[i].p_vaddr + library->dlpi_phdr[i].p_memsz;
        if (end > operators_end) operators_end = end;
    }
    return 1;
}

/* Say that `rehearse --time` sees operators by a TorchDispatchMode of its own. */
VISIBLE void stand_in_trace_by_mode(void) {
    dl_iterate_phdr(find_operators, NULL);
    __atomic_store_n(&has_own_mode, 1, __ATOMIC_RELEASE);
}

/* c10::impl::dispatch_mode_enabled(), which torch's libraries ask here: to operators and autograd's engine the one mode
 * of `rehearse --time` does not count.
 *
 * Where a mode is enabled, the engine adds gradients out of place, and so do operators that take all tensors for those
 * of a subclass (ATen/TensorSubclassLikeUtils.h). That would be memory which a run without --time does not need.
 */
VISIBLE bool _ZN3c104impl21dispatch_mode_enabledEv(void) {
    static bool (*is_enabled)(void), (*is_any)(bool skips_infra_modes);
    static int64_t (*num_modes)(void);
    uintptr_t caller = (uintptr_t)__builtin_return_address(0);
    if (!__atomic_load_n(&is_enabled, __ATOMIC_ACQUIRE)) {
        void *torch = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD); /* is loaded: this is its own function */
        is_any = dlsym(torch, "_ZN3c104impl20TorchDispatchModeTLS13any_modes_setEb");
        num_modes = dlsym(torch, "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv");
        __atomic_store_n(&is_enabled, dlsym(torch, "_ZN3c104impl21dispatch_mode_enabledEv"), __ATOMIC_RELEASE);
    }
    if (!is_enabled()) return false;
    bool is_operator = operators_begin <= caller && caller < operators_end;
    bool can_tell = __atomic_load_n(&has_own_mode, __ATOMIC_ACQUIRE) && is_any && num_modes;
    return !(is_operator && can_tell && num_modes() == 1 && is_any(true));
}
