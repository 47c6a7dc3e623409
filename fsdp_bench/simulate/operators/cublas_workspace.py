"""The size of cuBLAS's workspace, which stays in memory from a thread's first matrix product on."""


def cublas_workspace(gpu: str | None) -> int:
    """Return cuBLAS's workspace of one thread and stream (aten/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize).

    32 MiB on Hopper, else 8.125 MiB; 32 MiB with ROCm, 128 MiB on gfx94x and gfx95x (MI300, MI355).
    """
    if gpu is not None and gpu.startswith(("H100", "H20", "H800", "GH200")):
        return 4096 * 8 * 1024
    if gpu is not None and gpu.startswith(("MI300", "MI355")):
        return 1024 * 128 * 1024
    if gpu is not None and gpu.startswith("MI"):
        return 1024 * 32 * 1024
    return 4096 * 1024 * 2 + 16 * 1024 * 8
