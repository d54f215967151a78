"""Compile every GPU kernel for every target, format and tile, and check the machine code.

    python -m fuzz.aot                          # all of it: hours on two cores
    python -m fuzz.aot --shipped                # the shipped tiles: 615 compilations
    python -m fuzz.aot --kernels decode --targets "cuda 90" --head-dims 64 128

No GPU is needed. A line a kernel; exits with 1 if one does not compile, spills with the shipped
tile, takes more shared memory than its target has, or reads pages in loads narrower than 16 bytes.
"""

from __future__ import annotations

import argparse
import sys

from radixkv.bench.gpu_compile import FORMATS, KERNELS, TARGETS, compile_kernel, faults_of, jobs


def main() -> int:
    """Compile the product; how many jobs had a fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS)
    parser.add_argument("--targets", nargs="+", choices=tuple(TARGETS), default=tuple(TARGETS))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 80, 96, 128, 256])
    parser.add_argument("--shipped", action="store_true", help="only the shipped tiles")
    options = parser.parse_args()
    failed = 0
    for job in jobs(
        targets=options.targets,
        kernels=options.kernels,
        formats=options.formats,
        head_dims=options.head_dims,
        tuned=not options.shipped,
    ):
        name = f"{job.kernel:12} {job.target:10} {job.kv_dtype:9} {job.head_dim:4} {job.tile or ''}"
        try:
            report = compile_kernel(job)
        except Exception as error:
            failed += 1
            print(f"{name} FAILED: {error}", flush=True)
            continue
        faults = faults_of(job, report)
        failed += bool(faults)
        print(
            f"{name} {report.registers} registers, {report.spill_bytes} B spilled, "
            f"{report.shared_bytes} B shared, {report.page_load_bytes} B loads, "
            f"{report.seconds:.1f} s {'; '.join(faults)}",
            flush=True,
        )
    return failed


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
