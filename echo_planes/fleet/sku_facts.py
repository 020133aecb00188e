"""Data sheet figures of GPUs: memory, memory bandwidth and dense bf16 arithmetic.

Peak figures of public data sheets, for estimates only; measurements on the user's own fleet take precedence.
Names are those of the public price lists (`A100-80GB`, `RTX-PRO-6000`).
"""

from __future__ import annotations

from dataclasses import dataclass

AS_OF = "2026-11"  # month of the last review of the table


@dataclass(frozen=True, slots=True)
class SkuFacts:
    """Data sheet figures of one GPU."""

    memory_gib: float  # as sold; "80 GB" of GPU memory are 80 GiB
    bandwidth_gb_s: float  # of its memory, peak, 1e9 bytes/s
    bf16_tflops: float  # dense, peak, 1e12 operations/s; fp16 where there is no bf16
    source: str
    has_bf16: bool = True  # without bf16 arithmetic an engine cannot hold bf16 weights unconverted


SKU_FACTS = {
    "B300": SkuFacts(262, 8000, 2250, "NVIDIA HGX B300; memory as price lists have it"),
    "B200": SkuFacts(180, 8000, 2250, "NVIDIA DGX B200 data sheet, an eighth"),
    "GB200": SkuFacts(186, 8000, 2500, "NVIDIA GB200 NVL72 page, per GPU"),
    "H200": SkuFacts(141, 4800, 989, "NVIDIA H200 data sheet, SXM"),
    "H100": SkuFacts(80, 3350, 989, "NVIDIA H100 data sheet, SXM"),
    "H100-SXM": SkuFacts(80, 3350, 989, "NVIDIA H100 data sheet, SXM"),
    "H100-NVL": SkuFacts(94, 3900, 835, "NVIDIA H100 data sheet, NVL"),
    "H100-PCIe": SkuFacts(80, 2000, 756, "NVIDIA H100 data sheet, PCIe"),
    "A100-80GB": SkuFacts(80, 2039, 312, "NVIDIA A100 data sheet, 80 GB SXM"),
    "A100": SkuFacts(40, 1555, 312, "NVIDIA A100 data sheet, 40 GB"),
    "V100": SkuFacts(16, 900, 125, "NVIDIA V100 data sheet, SXM2 16 GB, fp16", has_bf16=False),
    "V100-32GB": SkuFacts(32, 900, 125, "NVIDIA V100 data sheet, SXM2 32 GB, fp16", has_bf16=False),
    "T4": SkuFacts(16, 320, 65, "NVIDIA T4 data sheet, fp16", has_bf16=False),
    "A10": SkuFacts(24, 600, 125, "NVIDIA A10 data sheet"),
    "A10G": SkuFacts(24, 600, 70, "NVIDIA A10G data sheet"),
    "A40": SkuFacts(48, 696, 150, "NVIDIA A40 data sheet"),
    "L4": SkuFacts(24, 300, 121, "NVIDIA L4 data sheet"),
    "L40": SkuFacts(48, 864, 181, "NVIDIA L40 data sheet"),
    "L40S": SkuFacts(48, 864, 362, "NVIDIA L40S data sheet"),
    "A6000": SkuFacts(48, 768, 155, "NVIDIA RTX A6000 data sheet"),
    "RTX-6000-Ada": SkuFacts(48, 960, 364, "NVIDIA RTX 6000 Ada data sheet"),
    "RTX-PRO-6000": SkuFacts(96, 1597, 504, "NVIDIA RTX PRO 6000 Blackwell Server Edition data sheet"),
    "RTX-3090": SkuFacts(24, 936, 71, "NVIDIA GA102 white paper"),
    "RTX-4090": SkuFacts(24, 1008, 165, "NVIDIA Ada white paper"),
    "RTX-5090": SkuFacts(32, 1792, 210, "NVIDIA RTX Blackwell white paper"),
    "MI300X": SkuFacts(192, 5300, 1307, "AMD Instinct MI300X data sheet"),
}
