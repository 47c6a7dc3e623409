/* Entry points of NVIDIA's other libraries: whoever asks for a handle or a communicator is refused by name.
 *
 * So no function behind them is reached. The numbers are each library's own for what is not supported.
 */
#include "stand_in.h"

/* cuSPARSE and cuSPARSELt: CUSPARSE_STATUS_NOT_SUPPORTED */
UNSUPPORTED(cusparseCreate, 10)
UNSUPPORTED(cusparseLtInit, 10)

/* cuSOLVER: CUSOLVER_STATUS_NOT_SUPPORTED */
UNSUPPORTED(cusolverDnCreate, 9)
UNSUPPORTED(cusolverSpCreate, 9)
UNSUPPORTED(cusolverMgCreate, 9)
UNSUPPORTED(cusolverRfCreate, 9)

/* cuFFT: CUFFT_NOT_SUPPORTED */
UNSUPPORTED(cufftCreate, 16)
UNSUPPORTED(cufftPlan1d, 16)
UNSUPPORTED(cufftPlan2d, 16)
UNSUPPORTED(cufftPlan3d, 16)
UNSUPPORTED(cufftPlanMany, 16)

/* cuRAND's generators of the host: CURAND_STATUS_INITIALIZATION_FAILED */
UNSUPPORTED(curandCreateGenerator, 203)
UNSUPPORTED(curandCreateGeneratorHost, 203)

/* nvJPEG: NVJPEG_STATUS_IMPLEMENTATION_NOT_SUPPORTED */
UNSUPPORTED(nvjpegCreate, 9)
UNSUPPORTED(nvjpegCreateEx, 9)
UNSUPPORTED(nvjpegCreateExV2, 9)
UNSUPPORTED(nvjpegCreateSimple, 9)

/* NCCL: ncclInvalidUsage. Process groups are fake ones here. */
UNSUPPORTED(ncclGetUniqueId, 5)
UNSUPPORTED(ncclCommInitAll, 5)
UNSUPPORTED(ncclCommInitRank, 5)
UNSUPPORTED(ncclCommInitRankConfig, 5)
UNSUPPORTED(ncclCommInitRankScalable, 5)
UNSUPPORTED(ncclMemAlloc, 5)

/* NVSHMEM: NVSHMEMX_ERROR_INTERNAL */
UNSUPPORTED(nvshmem_init, 6)
UNSUPPORTED(nvshmemx_init_attr, 6)
UNSUPPORTED(nvshmemx_hostlib_init_attr, 6)
UNSUPPORTED(nvshmemid_hostlib_init_attr, 6)
UNSUPPORTED(nvshmemx_get_uniqueid, 6)
UNSUPPORTED(nvshmemx_cumodule_init, 6)

/* cuFile (GPUDirect Storage): CU_FILE_DRIVER_NOT_INITIALIZED */
UNSUPPORTED(cuFileDriverOpen, 5001)
UNSUPPORTED(cuFileHandleRegister, 5001)
UNSUPPORTED(cuFileBufRegister, 5001)
