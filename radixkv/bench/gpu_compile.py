"""What the GPU compilers make of the kernels: registers, spills, shared memory, load widths.

Triton compiles for any target on any machine; ptxas, nvdisasm and cuobjdump come with it. So the
machine code is read here without a GPU: in tests, in `fuzz/aot.py` and in `radixkv bench kernel`.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from radixkv.attention import triton as triton_backend
from radixkv.attention.batch import ScoreRule
from radixkv.attention.formats import KVFormat
from radixkv.attention.layout import KVCodec, KVSpec
from radixkv.attention.tiles import Tile, candidates, shipped_tile
from radixkv.config import KV_DTYPES, KVConfig
from radixkv_kernels.gpu.attention import extend_kernel, split_kernel
from radixkv_kernels.gpu.copy import copy_kernel
from radixkv_kernels.gpu.merge import merge_kernel
from radixkv_kernels.gpu.rotate import rotate_kernel
from radixkv_kernels.gpu.write import write_kernel

TARGETS = {
    "cuda 80": GPUTarget("cuda", 80, 32),
    "cuda 90": GPUTarget("cuda", 90, 32),
    "hip gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMITS = {"cuda 80": 163 * 1024, "cuda 90": 227 * 1024, "hip gfx942": 64 * 1024}
"""Bytes of shared memory that one program may have on each target."""

KERNELS = (
    "write", "rotate", "decode", "shared", "extend", "extend parts", "merge", "merge extend", "copy"
)  # fmt: skip
TILED = ("decode", "shared", "extend", "extend parts")

_TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}


@dataclass(frozen=True)
class CompileJob:
    """One kernel to be compiled.

    Attributes:
        kernel: one of `KERNELS`.
        target: one of `TARGETS`.
        kv_dtype: storage format of K and V.
        head_dim, group: elements of a row, query heads a KV head.
        dtype: of the model.
        tile: for the kernels in `TILED`.
        rule: which of "window", "softcap", "sinks" and "slopes" the layer has.
    """

    kernel: str
    target: str
    kv_dtype: str = "int8"
    head_dim: int = 128
    group: int = 4
    dtype: torch.dtype = torch.bfloat16
    tile: Tile | None = None
    rule: frozenset[str] = frozenset()


@dataclass(frozen=True)
class CompileReport:
    """What came out.

    Attributes:
        registers: per thread.
        spill_bytes: per thread, stored to local memory for want of registers.
        shared_bytes: per program.
        load_bytes: width of each load from global memory in the machine code, widest first.
        seconds: what compiling took.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    load_bytes: tuple[int, ...]
    seconds: float

    @property
    def page_load_bytes(self) -> int:
        """Width of the loads that read codes: the widest there are."""
        return self.load_bytes[0] if self.load_bytes else 0


def _codes_type(kv_format: KVFormat, *, written: bool) -> str:
    if kv_format.name == "model":
        return _TYPES[kv_format.code_dtype]
    if kv_format.name == "int4":
        return "*u8"
    return ("*i8" if kv_format.code_dtype == torch.int8 else "*u8") if written else "*i16"


def job_tile(job: CompileJob) -> Tile:
    """The tile of a job: its own or the shipped one."""
    warp_size = TARGETS[job.target].warp_size
    return job.tile or shipped_tile(job.kernel, job.kv_dtype, job.head_dim, warp_size)


def _make_codec(job: CompileJob) -> KVCodec:
    spec = KVSpec(num_layers=1, num_kv_heads=8, head_dim=job.head_dim, dtype=job.dtype)
    return KVCodec(spec, KVConfig(dtype=job.kv_dtype, page_size=16))  # type: ignore[arg-type]


def _source(job: CompileJob) -> tuple[Any, dict[str, Any], dict[str, str]]:
    """The kernel, its compile-time arguments, and the types of those that are not."""
    codec = _make_codec(job)
    rotate = triton_backend.rotation_log2(job.head_dim, codec.rotate_k)
    model = _TYPES[job.dtype]
    types = {
        "k_pages_ptr": _codes_type(codec.k_format, written=job.kernel == "write"),
        "v_pages_ptr": _codes_type(codec.v_format, written=job.kernel == "write"),
        "k_scale_ptr": "*bf16",
        "v_scale_ptr": "*bf16",
        "slots_ptr": "*i64",
        "softmax_scale": "fp32",
        "softcap": "fp32",
    }
    types |= dict.fromkeys(
        ("lse_ptr", "parts_lse_ptr", "parts_out_ptr", "sinks_ptr", "slopes_ptr"), "*fp32"
    )
    types |= dict.fromkeys(("k_ptr", "v_ptr", "rows_ptr"), model)
    types["q_ptr"] = "*fp32" if codec.rotate_k else model
    types["out_ptr"] = model
    rule = ScoreRule(
        1.0,
        sliding_window=64 if "window" in job.rule else None,
        softcap=30.0 if "softcap" in job.rule else None,
        alibi_slopes=torch.zeros(1) if "slopes" in job.rule else None,
    )
    sinks = {"HAS_SINKS": "sinks" in job.rule}
    if job.kernel == "write":
        return write_kernel, triton_backend.write_constants(codec), types
    if job.kernel == "rotate":
        constants = {"HEAD_DIM": job.head_dim, "ROTATE": rotate, "BLOCK_T": 4}
        return rotate_kernel, constants, types | {"out_ptr": "*fp32"}
    if job.kernel == "copy":
        constants = triton_backend.copy_constants(codec)
        return copy_kernel, constants, types | dict.fromkeys(types, "*u8")
    if job.kernel in ("merge", "merge extend"):
        block_q = 8 if job.kernel == "merge extend" else 0
        constants = triton_backend.merge_constants(codec, has_table=False, block_q=block_q)
        if block_q and codec.rotate_v:
            types["out_ptr"] = "*fp32"
        return merge_kernel, constants | sinks, types
    constants = triton_backend.attention_constants(codec, job.dtype, job.group, rule, job_tile(job))
    if job.kernel in ("extend", "extend parts"):
        parts = job.kernel == "extend parts"
        types["out_ptr"] = "*fp32" if codec.rotate_v or parts else model
        constants |= sinks | {"PARTS": parts, "SPLIT": triton_backend.EXTEND_SPLIT}
        return extend_kernel, constants, types
    constants |= {
        "SHARED": job.kernel == "shared",
        "HAS_STARTS": job.kernel == "shared",
        "SPLIT": triton_backend.SPLIT,
    }
    return split_kernel, constants, types | {"out_ptr": "*fp32"}


def compile_kernel(job: CompileJob) -> CompileReport:
    """Compile one kernel and read its machine code.

    Raises:
        ValueError: a kernel or target that there is not.
        subprocess.CalledProcessError: a tool of Triton's package failed.
    """
    if job.kernel not in KERNELS or job.target not in TARGETS:
        raise ValueError(
            f"CompileJob: expected a kernel of {KERNELS} and a target of {tuple(TARGETS)}, got "
            f"{job.kernel!r}, {job.target!r}; use those"
        )
    kernel, constants, types = _source(job)
    function = kernel if isinstance(kernel, triton.runtime.JITFunction) else None
    if function is None:
        raise ValueError(
            "TRITON_INTERPRET: expected it to be unset for compiling, got 1; start Python anew"
        )
    signature, attrs = {}, {}
    for i, name in enumerate(function.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = types.get(name, "*i32" if name.endswith("_ptr") else "i32")
        # Torch's memory and the strides of heads and tokens are multiples of 16 elements.
        if name.endswith("_ptr") or name in ("stride_q_token", "stride_q_head"):
            attrs[(i,)] = [["tt.divisibility", 16]]
    options: dict[str, Any] = {"enable_fp_fusion": job.kernel != "write"}
    if job.kernel in TILED:
        tile = job_tile(job)
        options |= {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        if job.kernel in ("extend", "extend parts") and job.target.startswith("cuda"):
            options["maxnreg"] = triton_backend.EXTEND_REGISTERS
    begin = time.perf_counter()
    source = ASTSource(function, signature, constexprs=constants, attrs=attrs)
    compiled = triton.compile(source, target=TARGETS[job.target], options=options)
    seconds = time.perf_counter() - begin
    if "amdgcn" in compiled.asm:
        return _read_amdgcn(compiled.asm["amdgcn"], compiled.metadata.shared, seconds)
    return _read_cubin(compiled.asm["cubin"], compiled.metadata.shared, seconds)


def _read_amdgcn(text: str, shared_bytes: int, seconds: float) -> CompileReport:
    def number(key: str) -> int:
        return int(re.findall(rf"\.{key}:\s+(\d+)", text)[0])

    widths = {"ubyte": 1, "sbyte": 1, "ushort": 2, "sshort": 2, "short": 2, "dword": 4}
    kinds = "|".join(widths)
    loads = [
        widths[kind] * int(many or 1)
        for kind, many in re.findall(rf"(?:global|buffer)_load_({kinds})(?:x(\d))?\b", text)
    ]
    return CompileReport(
        number("vgpr_count"),
        4 * number("vgpr_spill_count"),
        shared_bytes,
        tuple(sorted(loads, reverse=True)),
        seconds,
    )


def _tool(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _read_cubin(cubin: bytes, shared_bytes: int, seconds: float) -> CompileReport:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()

        def ask(tool: str, option: str) -> str:
            done = subprocess.run(
                [_tool(tool), option, file.name], capture_output=True, text=True, check=True
            )
            return done.stdout

        usage = ask("cuobjdump", "-res-usage")
        code = ask("nvdisasm", "-c")
    registers, stack = (int(re.findall(rf"{key}:(\d+)", usage)[0]) for key in ("REG", "STACK"))
    # Spills are what the code stores in local memory; the stack holds nothing else here.
    spills = stack if re.search(r"\b(STL|LDL)\b", code) else 0
    loads = []
    for line in re.findall(r"\b(?:LDG|LDGSTS)\.([\w.]+)", code):
        width = re.search(r"\b(128|64|U8|S8|U16|S16)\b", line)
        bits = {"U8": 8, "S8": 8, "U16": 16, "S16": 16}
        loads.append((bits.get(width[1]) or int(width[1]) if width else 32) // 8)
    return CompileReport(
        registers, spills, shared_bytes, tuple(sorted(loads, reverse=True)), seconds
    )


def _wide_loads(job: CompileJob) -> int:
    """How many loads of 16 bytes a thread needs for one tile of K and V (and its queries)."""
    if job.kernel not in TILED:
        return 0
    codec, tile = _make_codec(job), job_tile(job)
    row_bytes = codec.k_format.code_width * codec.k_format.code_dtype.itemsize
    if row_bytes % 16:
        return 0  # such rows (int4 of head_dim 80) cannot be read so
    thread_bytes: int = 16 * tile.num_warps * TARGETS[job.target].warp_size
    count = 2 * (tile.block_n * row_bytes // thread_bytes)
    if job.kv_dtype == "int4":  # whose queries are float32 rows read in halves
        queries = 2 * (tile.block_m * job.head_dim * 2 // thread_bytes)
        # Of rows of 256, ptxas makes one load of two (PTX has all of them).
        merged = job.target.startswith("cuda") and job.head_dim == 256
        count += queries // 2 if merged else queries
    return count


def faults_of(job: CompileJob, report: CompileReport) -> list[str]:
    """What is wrong with a compiled kernel; empty if nothing is.

    Tiles that only the tuner may choose may spill: it measures them.
    """
    faults = []
    if report.spill_bytes and job.tile in (None, job_tile(replace(job, tile=None))):
        faults.append(f"{report.spill_bytes} bytes a thread spilled")
    if report.shared_bytes > SHARED_LIMITS[job.target]:
        faults.append(f"{report.shared_bytes} bytes shared, limit {SHARED_LIMITS[job.target]}")
    wide = sum(width == 16 for width in report.load_bytes)
    if wide < _wide_loads(job):
        faults.append(f"{wide} loads of 16 bytes, expected {_wide_loads(job)} or more")
    return faults


def jobs(
    *,
    targets: Sequence[str] = tuple(TARGETS),
    kernels: Sequence[str] = KERNELS,
    formats: Sequence[str] = KV_DTYPES,
    head_dims: Sequence[int] = (128,),
    tuned: bool = False,
) -> Iterator[CompileJob]:
    """The product of what is given; ``tuned``: with every tile that the tuner may choose."""
    for target in targets:
        for kernel in kernels:
            for kv_dtype in formats:
                for head_dim in head_dims:
                    if kernel == "rotate" and kv_dtype != "int8":
                        continue  # rows are rotated alike for every format
                    tiles: Sequence[Tile | None] = (None,)
                    if tuned and kernel in TILED:
                        warp_size = TARGETS[target].warp_size
                        tiles = candidates(kernel, kv_dtype, head_dim, warp_size)
                    for tile in tiles:
                        yield CompileJob(kernel, target, kv_dtype, head_dim, tile=tile)
