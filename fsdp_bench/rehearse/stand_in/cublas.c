/* cuBLAS: handles, and products that do nothing.
 *
 * The functions listed here write to the memory of the device alone and take no memory but the workspace that PyTorch
 * gives them. (Memory for a handle of NVIDIA's is part of the memory that is kept free for the context.) Every other
 * function of cuBLAS is refused by name (build.py finds them, unsupported.c records them).
 */
#include "stand_in.h"

#include <stdlib.h>
#include <string.h>

#define OUT_OF_MEMORY 3 /* CUBLAS_STATUS_ALLOC_FAILED */

struct cublas {
    int math_mode, pointer_mode;
    cudaStream_t stream;
    char rest[64];
};

int cublasCreate_v2(struct cublas **handle) { return (*handle = calloc(1, sizeof **handle)) ? 0 : OUT_OF_MEMORY; }
int cublasDestroy_v2(struct cublas *handle) { return free(handle), 0; }
int cublasGetMathMode(struct cublas *handle, int *mode) { return *mode = handle->math_mode, 0; }
int cublasSetMathMode(struct cublas *handle, int mode) { return handle->math_mode = mode, 0; }
int cublasGetPointerMode_v2(struct cublas *handle, int *mode) { return *mode = handle->pointer_mode, 0; }
int cublasSetPointerMode_v2(struct cublas *handle, int mode) { return handle->pointer_mode = mode, 0; }
int cublasGetStream_v2(struct cublas *handle, cudaStream_t *stream) { return *stream = handle->stream, 0; }
int cublasSetStream_v2(struct cublas *handle, cudaStream_t stream) { return handle->stream = stream, 0; }
int cublasSetWorkspace_v2(struct cublas *handle, void *workspace, size_t num_bytes) {
    return (void)handle, (void)workspace, (void)num_bytes, 0;
}
/* The number of multiprocessors to use, and whether results may differ from run to run: nothing is computed. */
int cublasSetSmCountTarget(struct cublas *handle, int count) { return (void)handle, (void)count, 0; }
int cublasGetSmCountTarget(struct cublas *handle, int *count) { return (void)handle, *count = 0, 0; }
int cublasSetAtomicsMode(struct cublas *handle, int mode) { return (void)handle, (void)mode, 0; }
int cublasGetAtomicsMode(struct cublas *handle, int *mode) { return (void)handle, *mode = 0, 0; }

/* All take the handle first; what follows is not looked at. */
#define PRODUCT(name) \
    int name(struct cublas *handle) { return stream_launched(stream_of(handle->stream), #name), 0; }
#define PRODUCTS(name) PRODUCT(cublasS##name) PRODUCT(cublasD##name) PRODUCT(cublasC##name) PRODUCT(cublasZ##name)
PRODUCTS(gemm_v2)
PRODUCTS(gemmBatched)
PRODUCTS(gemmStridedBatched)
PRODUCTS(gemv_v2)
PRODUCTS(gemvBatched)
PRODUCTS(gemvStridedBatched)
PRODUCTS(symm_v2)
PRODUCTS(syrk_v2)
PRODUCTS(syr2k_v2)
PRODUCTS(trmm_v2)
PRODUCTS(trsm_v2)
PRODUCTS(trsmBatched)
PRODUCTS(axpy_v2)
PRODUCTS(scal_v2)
PRODUCTS(copy_v2)
PRODUCTS(swap_v2)
PRODUCT(cublasSger_v2)
PRODUCT(cublasDger_v2)
PRODUCT(cublasCgeru_v2)
PRODUCT(cublasCgerc_v2)
PRODUCT(cublasZgeru_v2)
PRODUCT(cublasZgerc_v2)
PRODUCT(cublasHgemm)
PRODUCT(cublasHgemmBatched)
PRODUCT(cublasHgemmStridedBatched)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasGemmEx)
PRODUCT(cublasGemmBatchedEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasGemmGroupedBatchedEx)
PRODUCT(cublasSgemmGroupedBatched)
PRODUCT(cublasDgemmGroupedBatched)

/* Dot products write one number, which PyTorch has in the device's memory. On the host it would be read: refused. */
#define DOT(name) \
    int name(struct cublas *handle) { \
        if (handle->pointer_mode == 0 /* CUBLAS_POINTER_MODE_HOST */) return unsupported(#name, 15, 0); \
        return stream_launched(stream_of(handle->stream), #name), 0; \
    }
DOT(cublasSdot_v2)
DOT(cublasDdot_v2)
DOT(cublasCdotu_v2)
DOT(cublasCdotc_v2)
DOT(cublasZdotu_v2)
DOT(cublasZdotc_v2)
DOT(cublasDotEx)

/* ---- cuBLASLt: one algorithm, which takes no workspace; PyTorch allocates its own before it asks */

static int created(void **description) { return (*description = calloc(1, 256)) ? 0 : OUT_OF_MEMORY; }
static int destroyed(void *description) { return free(description), 0; }
int cublasLtCreate(void **handle) { return created(handle); }
int cublasLtDestroy(void *handle) { return destroyed(handle); }
int cublasLtMatmulDescCreate(void **description, int compute, int scale) {
    return (void)compute, (void)scale, created(description);
}
int cublasLtMatmulDescDestroy(void *description) { return destroyed(description); }
int cublasLtMatrixLayoutCreate(void **layout, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    return (void)type, (void)rows, (void)columns, (void)stride, created(layout);
}
int cublasLtMatrixLayoutDestroy(void *layout) { return destroyed(layout); }
int cublasLtMatmulPreferenceCreate(void **preference) { return created(preference); }
int cublasLtMatmulPreferenceDestroy(void *preference) { return destroyed(preference); }
int cublasLtMatmulDescSetAttribute(void) { return 0; } /* transposition, epilogue, fp8 scales: they allocate nothing */
int cublasLtMatrixLayoutSetAttribute(void) { return 0; }
int cublasLtMatmulPreferenceSetAttribute(void) { return 0; }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d, void *preference,
                                   int requested, cublasLtMatmulHeuristicResult_t results[], int *count) {
    (void)handle, (void)product, (void)a, (void)b, (void)c, (void)d, (void)preference;
    for (int index = 0; index < requested && index < 1; ++index) results[index] = (cublasLtMatmulHeuristicResult_t){0};
    return *count = requested < 1 ? requested : 1, 0;
}
/* The same algorithm by number, which torch 2.15's TunableOp asks for. */
int cublasLtMatmulAlgoInit(void *handle, int compute, int scale, int a, int b, int c, int d, int number, void *made) {
    (void)handle, (void)compute, (void)scale, (void)a, (void)b, (void)c, (void)d, (void)number;
    return memset(made, 0, sizeof(((cublasLtMatmulHeuristicResult_t *)0)->algo)), 0;
}
int cublasLtMatmulAlgoCheck(void *handle, void *product, void *a, void *b, void *c, void *d, const void *algorithm,
                            cublasLtMatmulHeuristicResult_t *result) {
    (void)handle, (void)product, (void)a, (void)b, (void)c, (void)d, (void)algorithm;
    return *result = (cublasLtMatmulHeuristicResult_t){0}, 0;
}
int cublasLtMatmulAlgoConfigSetAttribute(void) { return 0; }
int cublasLtMatmulAlgoConfigGetAttribute(const void *algorithm, int attribute, void *value, size_t size,
                                         size_t *written) {
    (void)algorithm, (void)attribute;
    if (value) memset(value, 0, size);
    if (written) *written = size;
    return 0;
}
int cublasLtMatmul(void *handle, void *product, const void *alpha, const void *a, void *layout_a, const void *b,
                   void *layout_b, const void *beta, const void *c, void *layout_c, void *d, void *layout_d,
                   const void *algorithm, void *workspace, size_t workspace_bytes, cudaStream_t stream) {
    (void)handle, (void)product, (void)alpha, (void)a, (void)layout_a, (void)b, (void)layout_b, (void)beta, (void)c;
    (void)layout_c, (void)d, (void)layout_d, (void)algorithm, (void)workspace, (void)workspace_bytes;
    return stream_launched(stream_of(stream), "cublasLtMatmul"), 0;
}
