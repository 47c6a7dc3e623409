"""The structs of stand_in/cuda_abi.h against NVIDIA's headers, where pip has installed them beside torch."""

import re
import subprocess
from pathlib import Path

import pytest

from fsdp_bench.rehearse.build import SOURCES
from tests.on_stand_in.interpreters import nvidia_headers

STRUCTS = {
    "struct cudaDeviceProp": "cuda_runtime_api.h",
    "struct cudaPointerAttributes": "cuda_runtime_api.h",
    "struct cudaFuncAttributes": "cuda_runtime_api.h",
    "cudaLaunchConfig_t": "cuda_runtime_api.h",
    "dim3": "cuda_runtime_api.h",
    "CUlaunchConfig": "cuda.h",
    "CUmemLocation": "cuda.h",
    "CUmemAllocationProp": "cuda.h",
    "cublasLtMatmulHeuristicResult_t": "cublasLt.h",
}

HOST_DEFINES = """
#pragma once
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __no_return__
#define __CUDA_DEPRECATED
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDA_STRINGIFY(a) #a
"""
LACKING_HEADERS = {"crt/host_defines.h": HOST_DEFINES, "nv/target": ""}
"""Declarations from nvcc's package and from CCCL that NVIDIA's headers need."""


def members(struct: str, cuda_version: int) -> list[str]:
    """Return the names of a struct's members in our header, without those that are reserved."""
    preprocessed = ["cc", "-E", "-P", f"-DCUDA_VERSION={cuda_version}", str(SOURCES / "cuda_abi.h")]
    text = subprocess.run(preprocessed, capture_output=True, text=True, check=True).stdout
    tag = struct.removeprefix("struct ")
    body = re.search(rf"struct (?:{tag}|{tag}_st|{tag.removesuffix('_t')}_st) \{{(.*?)\n\}}", text, re.DOTALL)
    assert body, struct
    inner = re.sub(r"struct \{.*?\}", "struct", body[1], flags=re.DOTALL)
    names = [re.sub(r"\[.*|^.*[\s*]", "", name.strip()) for part in inner.split(";") for name in part.split(",")]
    return [name for name in names if name and not name.startswith("reserved")]


def layout(folder: Path, header: str, struct: str, names: list[str], *flags: str) -> str:
    """Return the size of a struct and the offsets of members, as the compiler sees them with a header."""
    lines = "".join(f'printf("{name} %zu\\n", offsetof({struct}, {name}));\n' for name in names)
    for name, text in LACKING_HEADERS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    source = folder / "layout.c"
    main = f'int main(void) {{ printf("%zu\\n", sizeof({struct}));\n{lines}return 0; }}'
    source.write_text(f'#include <stddef.h>\n#include <stdio.h>\n#include "{header}"\n{main}\n')
    command = ["cc", "-w", *flags, f"-idirafter{folder}", str(source), "-o", str(folder / "layout")]
    ran = subprocess.run(command, capture_output=True, text=True)
    missing = re.search("fatal error: (.*): No such file", ran.stderr)
    if missing:
        pytest.skip(f"no {missing[1]}")  # the headers are parts of several packages
    assert ran.returncode == 0, ran.stderr
    return subprocess.run([str(folder / "layout")], capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(not nvidia_headers(), reason="no headers of CUDA")
@pytest.mark.parametrize("headers", nvidia_headers(), ids=str)
@pytest.mark.parametrize("struct", STRUCTS)
def test_structs_are_laid_out_as_nvidias(tmp_path: Path, headers: Path, struct: str) -> None:
    found = re.search(r"#define CUDA_VERSION (\d+)", (headers / "cuda.h").read_text())
    assert found
    version = int(found[1])
    names = members(struct, version)
    include = [f"-I{path}" for path in {headers, *headers.parent.parent.glob("*/include")}]
    theirs = layout(tmp_path, STRUCTS[struct], struct, names, *include)
    ours = layout(tmp_path, "cuda_abi.h", struct, names, f"-DCUDA_VERSION={version}", f"-I{SOURCES}")
    assert ours == theirs


@pytest.mark.skipif(not nvidia_headers(), reason="no headers of CUDA")
@pytest.mark.parametrize("headers", nvidia_headers(), ids=str)
@pytest.mark.parametrize(("prefix", "header"), [("cudaDevAttr", "driver_types.h"), ("CU_DEVICE_ATTRIBUTE_", "cuda.h")])
def test_attributes_have_nvidias_numbers(headers: Path, prefix: str, header: str) -> None:
    def numbers(text: str) -> dict[str, str]:
        return dict(re.findall(rf"\b({prefix}\w+)\s*=\s*(\d+)", text))

    ours, theirs = numbers((SOURCES / "cuda_abi.h").read_text()), numbers((headers / header).read_text())
    assert ours
    assert {name: theirs.get(name) for name in ours} == ours


def test_members_are_found_in_our_header() -> None:
    assert members("CUmemLocation", 13000) == ["type", "id"]
    assert members("dim3", 13000) == ["x", "y", "z"]
    assert "clockRate" in members("struct cudaDeviceProp", 12040)
    assert "clockRate" not in members("struct cudaDeviceProp", 13000)
