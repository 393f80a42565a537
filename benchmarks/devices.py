"""Which device a benchmark runs on and how fast it could compute: the peak that model FLOPs utilisation (MFU) is of.

MFU = FLOPs that the model needs / (seconds · peak FLOP/s)
"""

import re
import sys
import time

import torch

from condensegrpo.learner.devices import DTYPES

# Dense bfloat16 TFLOP/s with fp32 accumulation, without sparsity, from the vendors' data sheets (NVIDIA's of each card
# and its whitepaper of RTX Ada; AMD's of MI300X). A longer name stands before the name that it begins with.
PEAK_TFLOPS = {
    "B200": 2250.0,
    "GH200": 989.4,
    "H200 NVL": 835.5,
    "H200": 989.4,
    "H100 NVL": 835.5,
    "H100 PCIe": 756.0,
    "H100": 989.4,
    "H20": 148.0,
    "A100": 312.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L4": 121.0,
    "RTX 4090": 165.2,
    "MI300X": 1307.4,
}


def check_device(device: str) -> None:
    """Exit with an error that says what to do where the device is not there, or another one would be used."""
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            f"running on --device cuda: torch {torch.__version__} finds no GPU, wanted one. Run on a machine with a "
            f"GPU and a CUDA build of torch, or with --device cpu."
        )
    if device == "cpu" and torch.cuda.is_available():
        sys.exit(
            "running on --device cpu: there is a GPU, which DeepSpeed and the samplers would use. Hide it "
            "(CUDA_VISIBLE_DEVICES= python …), or run with --device cuda."
        )


def peak_flops(name: str) -> float | None:
    """Dense bfloat16 FLOP/s of a GPU by the name that torch reports; None: not in the table."""
    for known, tflops in PEAK_TFLOPS.items():
        if re.search(rf"\b{known}\b", name):
            return tflops * 1e12
    return None


def peak_of(device: str, *, dtype: str, tflops: float | None) -> float | None:
    """FLOP/s that MFU is measured against: ``tflops`` if given, the table's on a GPU, on a CPU those of a product."""
    if tflops is not None:
        return tflops * 1e12
    return measured_peak(DTYPES[dtype]) if device == "cpu" else peak_flops(torch.cuda.get_device_name())


def measured_peak(dtype: torch.dtype, *, size: int = 768, products: int = 5) -> float:
    """FLOP/s of the fastest of some matrix products on the CPU, with as many threads as torch has."""
    left, right = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    now = time.process_time if torch.get_num_threads() == 1 else time.perf_counter  # as the benchmarks' clocks
    seconds = []
    for _ in range(products + 1):  # the first warms up
        began = now()
        torch.mm(left, right)
        seconds.append(now() - began)
    return 2.0 * size**3 / min(seconds[1:])


def mfu(flops: float, seconds: float, peak: float | None) -> str:
    """Model FLOPs utilisation as a table shows it; a dash where the peak is not known."""
    return "–" if peak is None else f"{utilisation(flops, seconds, peak):.1%}"


def utilisation(flops: float, seconds: float, peak: float) -> float:
    """Example: 3e12 FLOPs in 2 s on a device of 5e12 FLOP/s are 0.3."""
    return flops / (seconds * peak)
