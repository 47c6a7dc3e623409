/* CUDA's runtime: for which architectures each kernel was compiled.
 *
 * cudaFuncGetAttributes says which of a kernel's binaries the GPU would run, and CUB picks its tuning by that: an L4
 * (8.9) runs what was compiled for 8.6. nvcc's code registers each object file's fat binary when a library is loaded,
 * and then its kernels. A fat binary's entries begin with a header, which names the architecture; its layout is
 * undocumented, and as cuobjdump and gpuocelot read it. */
#include "stand_in.h"

#include <stdlib.h>
#include <string.h>

#define CONTAINER_MAGIC 0xBA55ED50u
#define KIND_PTX 1
#define KIND_BINARY 2

struct wrapper {
    uint32_t magic, version;
    const struct container *data;
};
struct container {
    uint32_t magic;
    uint16_t version, header_bytes;
    uint64_t bytes; /* of all entries */
};
struct entry {
    uint16_t kind, unknown;
    uint32_t header_bytes;
    uint64_t bytes;
    uint32_t compressed_bytes, options;
    uint16_t minor, major;
    uint32_t architecture; /* 86 for sm_86 */
};

/* The one that the GPU would run: the newest binary of its own generation, else the newest PTX; 0: all are for others.
 * Where nothing is recognized, the kernel is taken for the GPU's own. */
static int chosen(const struct container *container) {
    int capability = settings_gpu()->capability, best = 0, best_ptx = 0, is_recognized = 0;
    if (!container || container->magic != CONTAINER_MAGIC) return capability;
    const char *at = (const char *)container + container->header_bytes, *end = at + container->bytes;
    while (at + sizeof(struct entry) <= end) {
        const struct entry *entry = (const struct entry *)at;
        int architecture = (int)entry->architecture;
        if (!entry->header_bytes) break;
        is_recognized |= entry->kind == KIND_BINARY || entry->kind == KIND_PTX;
        if (architecture <= capability) {
            if (entry->kind == KIND_BINARY && architecture / 10 == capability / 10 && architecture > best)
                best = architecture;
            if (entry->kind == KIND_PTX && architecture > best_ptx) best_ptx = architecture;
        }
        at += entry->header_bytes + entry->bytes;
    }
    if (!is_recognized) return capability;
    return best ? best : best_ptx;
}

void **__cudaRegisterFatBinary(void *wrapper) {
    int *architecture = malloc(sizeof *architecture);
    if (!architecture) abort();
    *architecture = chosen(((const struct wrapper *)wrapper)->data);
    return (void **)architecture;
}
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }

/* Kernels by the address of their host function, in an open hash table. Libraries are loaded one after another. */
#define SLOTS (1u << 19)
static struct {
    const void *kernel;
    const char *name; /* mangled */
    int architecture;
} kernels[SLOTS];
static unsigned count;

static unsigned slot_of(const void *kernel) {
    unsigned slot = (unsigned)(((uintptr_t)kernel >> 4) * 2654435761u) & (SLOTS - 1);
    while (kernels[slot].kernel && kernels[slot].kernel != kernel) slot = (slot + 1) & (SLOTS - 1);
    return slot;
}

void __cudaRegisterFunction(void **handle, const void *kernel, const char *name) {
    unsigned slot = slot_of(kernel);
    if (!kernels[slot].kernel && ++count > SLOTS / 2) return; /* more than torch has; these count as the GPU's own */
    kernels[slot].kernel = kernel;
    kernels[slot].name = name;
    kernels[slot].architecture = *(int *)handle;
}

const char *name_of(const void *kernel) { return kernels[slot_of(kernel)].name; }

int architecture_of(const void *kernel) {
    unsigned slot = slot_of(kernel);
    return kernels[slot].kernel ? kernels[slot].architecture : settings_gpu()->capability;
}
