"""What a kernel's machine code costs on an MI355X, and a prediction of the time that it takes.

Nothing here was measured on the card. Every rate is a constant below; SOURCES says where it comes from. Not modelled:
latency, stalls, bank conflicts, overlap of the units (VALU and matrix core are added up, as if never in parallel).
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .code_object import CodeObject
from .decoder import Instruction
from .global_memory import WIDTH_BYTES
from .profile import Listing, Path, Profile, hsaco_of, instructions_of

COMPUTE_UNITS = 256
CLOCK_HZ = 2.4e9
HBM_PEAK_BYTES_PER_S = 8.0e12
HBM_ATTAINED_BYTES_PER_S = 5.65e12
SIMDS_PER_CU = 4
WAVE_LANES = 64
VALU_CYCLES = 4
QUARTER_RATE_CYCLES = 16
LDS_BYTES_PER_CYCLE = 128
LDS_CROSSBAR_BYTES = 256
VMEM_LANES_PER_CYCLE = 16
VMEM_BYTES_PER_CYCLE = 64
VGPRS_PER_SIMD = 512
VGPR_GRANULE = 8
MAX_WAVES_PER_SIMD = 8
LDS_BYTES_PER_CU = 160 * 1024
LDS_GRANULE_BYTES = 1280
MAX_GROUPS_PER_CU = 32
LAUNCH_US = 4.0
FURTHER_LAUNCH_US = 2.0
# f8f6f4 runs at the full rate only if both operands are fp6 or fp4 (format codes from 2 up).
F8F6F4_CYCLES_SMALL = 16
F8F6F4_CYCLES_EIGHT_BIT = 32
# Cycles of the other matrix instructions on their SIMD.
MFMA_CYCLES = {
    "F32_16X16X32_BF16": 16,
    "F32_16X16X32_F16": 16,
    "F32_32X32X16_BF16": 32,
    "F32_32X32X16_F16": 32,
    "F32_16X16X16_BF16": 16,
    "F32_16X16X16_F16": 16,
    "F32_32X32X8_BF16": 32,
    "F32_32X32X8_F16": 32,
    "F32_16X16X32_FP8": 16,
    "F32_32X32X16_FP8": 32,
    "I32_16X16X64_I8": 16,
    "I32_32X32X32_I8": 32,
    "F32_16X16X4_F32": 32,
    "F32_32X32X2_F32": 64,
}

# Where each constant comes from.
SOURCES = {
    "COMPUTE_UNITS": "MI355X data sheet",
    "CLOCK_HZ": "MI355X data sheet, peak engine clock",
    "HBM_PEAK_BYTES_PER_S": "MI355X data sheet",
    "HBM_ATTAINED_BYTES_PER_S": "published copy benchmarks on the card: 5.6 to 5.7 TB/s",
    "SIMDS_PER_CU": "CDNA white papers",
    "WAVE_LANES": "CDNA ISA guides: wave64",
    "VALU_CYCLES": "64 lanes on SIMDs of 16, one instruction of a wave at a time",
    "QUARTER_RATE_CYCLES": "transcendentals and 32-bit integer multiplies, quarter rate in LLVM's scheduling model",
    "LDS_BYTES_PER_CYCLE": "CDNA4 white paper, for reads; assumed for writes and asynchronous copies",
    "LDS_CROSSBAR_BYTES": "assumption: permutes and swizzles cost a read of one word per lane",
    "VMEM_LANES_PER_CYCLE": "assumption: 16 addresses per clock, as earlier CDNA",
    "VMEM_BYTES_PER_CYCLE": "CDNA3 white paper: vector L1, 64 bytes per clock",
    "VGPRS_PER_SIMD": "LLVM AMDGPU backend, gfx90a and later",
    "VGPR_GRANULE": "LLVM AMDGPU backend, gfx90a and later",
    "MAX_WAVES_PER_SIMD": "LLVM AMDGPU backend, gfx90a and later",
    "LDS_BYTES_PER_CU": "CDNA4 white paper",
    "LDS_GRANULE_BYTES": "LLVM AMDGPU backend, gfx950",
    "MAX_GROUPS_PER_CU": "LLVM AMDGPU backend",
    "LAUNCH_US": "assumption: a launch as the caller sees it, without the kernel's own work",
    "FURTHER_LAUNCH_US": "assumption: each further launch queued behind the first",
    "F8F6F4_CYCLES_SMALL": "MI355X data sheet: dense fp4 and fp6 peak, 4096 operations per clock and SIMD",
    "F8F6F4_CYCLES_EIGHT_BIT": "MI355X data sheet: dense fp8 peak, 2048; LLVM has the same where one operand is fp8",
    "TOKEN_BYTES": "288 bytes of packed codes and 18 scale bytes",
    "QUERY_BYTES": "bfloat16, 16 heads of 576",
    "OUTPUT_BYTES": "bfloat16, 16 heads of 512",
    "PARTIAL_BYTES": "float32, 16 heads of 512 and a log-sum-exp; to memory and back, as if no cache held them",
    "MFMA_CYCLES": "LLVM's wait states behind each (passes of 4 cycles); for bf16 the data sheet's dense peak as well",
}

_TRANSCENDENTAL = re.compile(r"V_(EXP|LOG|RCP|RCP_IFLAG|RSQ|SQRT|SIN|COS)_F(16|32|64)")
_QUARTER_RATE_INTEGER = re.compile(r"V_(MUL_LO_U32|MUL_HI_[UI]32|MAD_U64_U32|MAD_I64_I32)")
_LDS_WIDTH = re.compile(r"DS_(?:READ|WRITE)(2(?:ST64)?)?_(?:B|U|I)(\d+)")
_VECTOR_FORMATS = ("VOP1", "VOP2", "VOPC", "VOP3", "VOP3SD", "VOP3P")
_VMEM_FORMATS = ("GLOBAL", "FLAT", "MUBUF", "SCRATCH")


def mfma_cycles(instruction: Instruction) -> int:
    """Cycles that a matrix instruction keeps its SIMD's matrix core busy.

    Raises:
        ValueError: no rate is known for it.
    """
    name = re.sub(r"^V_MFMA_(SCALE_)?", "", instruction.name)
    if name.endswith("F8F6F4"):
        small = instruction.fields.cbsz >= 2 and instruction.fields.blgp >= 2
        cycles = F8F6F4_CYCLES_SMALL if small else F8F6F4_CYCLES_EIGHT_BIT
        return cycles * (2 if "32X32" in name else 1)
    # fp8 and bf8 in any pairing run at one rate.
    key = re.sub(r"_(FP8|BF8)_(FP8|BF8)$", "_FP8", name)
    if key not in MFMA_CYCLES:
        raise ValueError(f"price: no rate known for {instruction.opcode}")
    return MFMA_CYCLES[key]


def lds_bytes(instruction: Instruction) -> int:
    """Bytes that an LDS instruction moves for a wave; 0 for any other instruction."""
    if instruction.format != "DS":
        return 0
    match = _LDS_WIDTH.match(re.sub(r"_TR", "", instruction.opcode))
    if match is None:
        return LDS_CROSSBAR_BYTES
    if "_TR_" in instruction.opcode:
        return 8 * WAVE_LANES
    return int(match.group(2)) // 8 * WAVE_LANES * (2 if match.group(1) else 1)


def is_lds_copy(instruction: Instruction) -> bool:
    """Whether it is an asynchronous copy from global memory to LDS."""
    if instruction.format == "MUBUF":
        return bool(instruction.fields.lds)
    return "LOAD_LDS" in instruction.opcode


def lane_bytes(instruction: Instruction) -> int:
    """Bytes per lane of a load or store; 0 for anything else."""
    if instruction.format not in _VMEM_FORMATS:
        return 0
    widths = [part for part in instruction.opcode.split("_") if part in WIDTH_BYTES]
    return WIDTH_BYTES[widths[0]] if widths else 0


@dataclass(frozen=True, slots=True)
class WaveCost:
    """What one wave issues, by unit."""

    valu_cycles: int
    mfma_cycles: int
    lds_bytes: int  # instructions of the wave
    lds_copy_bytes: int  # asynchronous copies into LDS
    vmem_cycles: int
    scalar_instructions: int
    scratch_instructions: int
    instructions: int

    @property
    def issue_cycles(self) -> int:
        """VALU and matrix core one after the other."""
        return self.valu_cycles + self.mfma_cycles


def cost_of(executed: Mapping[Instruction, float] | Iterable[Instruction]) -> WaveCost:
    """Sum up instructions, or instructions with how often each was executed."""
    counts = executed if isinstance(executed, Mapping) else Counter(executed)
    total: defaultdict[str, float] = defaultdict(float)
    for instruction, count in counts.items():
        for unit, amount in _cost_by_unit(instruction).items():
            total[unit] += amount * count
    return WaveCost(**{name: round(total[name]) for name in WaveCost.__slots__})


def is_transcendental(instruction: Instruction) -> bool:
    return _TRANSCENDENTAL.fullmatch(instruction.name) is not None


def _cost_by_unit(instruction: Instruction) -> dict[str, int]:
    cost = {"instructions": 1}
    if "MFMA" in instruction.name:
        cost["mfma_cycles"] = mfma_cycles(instruction)
    elif instruction.format.split("_")[0] in _VECTOR_FORMATS:
        slow = is_transcendental(instruction) or _QUARTER_RATE_INTEGER.fullmatch(instruction.name)
        cost["valu_cycles"] = QUARTER_RATE_CYCLES if slow else VALU_CYCLES
    elif instruction.format == "DS":
        cost["lds_bytes"] = lds_bytes(instruction)
    elif instruction.format in _VMEM_FORMATS:
        width = lane_bytes(instruction)
        transfer = width * WAVE_LANES // VMEM_BYTES_PER_CYCLE
        cost["vmem_cycles"] = max(WAVE_LANES // VMEM_LANES_PER_CYCLE, transfer)
        if is_lds_copy(instruction):
            cost["lds_copy_bytes"] = width * WAVE_LANES
        if instruction.format == "SCRATCH":
            cost["scratch_instructions"] = 1
    else:
        cost["scalar_instructions"] = 1
    return cost


@dataclass(frozen=True, slots=True)
class Resources:
    """Registers and memory of a kernel, and how many of its waves fit on a compute unit."""

    vgprs: int  # vector registers per lane, accumulation registers not included
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    scratch_bytes: int  # per lane
    lds_bytes: int  # per workgroup
    waves_per_simd: int  # as registers allow
    waves_per_cu: int  # as registers and LDS allow
    code_bytes: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def resources(compiled: Any, *, num_warps: int | None = None, shared: int | None = None) -> Resources:
    """Registers, spills, LDS and occupancy of a kernel.

    Args:
        compiled: a compiled kernel, a launch, or the bytes of a code object.
        num_warps: waves of a workgroup, by default as `compiled` says.
        shared: bytes of LDS besides those in the kernel descriptor, by default as `compiled` says.
    """
    code = CodeObject(hsaco_of(compiled))
    metadata = getattr(compiled, "metadata", None)
    if num_warps is None:
        num_warps = compiled.num_warps if metadata is None else metadata.num_warps
    if shared is None:
        shared = compiled.shared_bytes if metadata is None else metadata.shared
    kernel, descriptor = code.kernel, code.descriptor
    # The descriptor holds what is allocated, arch and accumulation registers together.
    allocated = ((descriptor.rsrc1 & 0x3F) + 1) * VGPR_GRANULE
    waves_per_simd = min(MAX_WAVES_PER_SIMD, VGPRS_PER_SIMD // allocated)
    lds = descriptor.static_lds_bytes + shared
    by_registers = SIMDS_PER_CU * waves_per_simd // num_warps
    lds_allocated = -(-lds // LDS_GRANULE_BYTES) * LDS_GRANULE_BYTES
    by_lds = LDS_BYTES_PER_CU // lds_allocated if lds_allocated else MAX_GROUPS_PER_CU
    agprs = kernel.get(".agpr_count", 0)
    return Resources(
        vgprs=kernel[".vgpr_count"] - agprs,
        agprs=agprs,
        sgprs=kernel[".sgpr_count"],
        vgpr_spills=kernel[".vgpr_spill_count"],
        sgpr_spills=kernel[".sgpr_spill_count"],
        scratch_bytes=descriptor.scratch_bytes_per_lane,
        lds_bytes=lds,
        waves_per_simd=waves_per_simd,
        waves_per_cu=min(by_registers, by_lds, MAX_GROUPS_PER_CU) * num_warps,
        code_bytes=code.code_range[1],
    )


@dataclass(frozen=True, slots=True)
class LoopPrice:
    """The hot loop, per token of the workgroup's tile and compute unit with all four SIMDs busy."""

    num_warps: int
    tokens_per_tile: int
    valu_cycles_per_token: float
    mfma_cycles_per_token: float
    lds_cycles_per_token: float  # the wave's own accesses and the asynchronous copies
    lds_copy_cycles_per_token: float  # the copies alone
    vmem_cycles_per_token: float
    loop_scratch_ops: int
    loads_by_width: dict[int, int]  # bytes per lane -> global and buffer loads of a wave in a tile
    mfma: dict[str, int]  # matrix instructions of a wave in a tile
    barriers: int
    wave: WaveCost
    counted_from: str  # "executed" or "code"

    @property
    def issue_cycles_per_token(self) -> float:
        """VALU and matrix core one after the other."""
        return self.valu_cycles_per_token + self.mfma_cycles_per_token

    def as_dict(self) -> dict[str, Any]:
        result = asdict(self)
        result["loads_by_width"] = {str(width): count for width, count in sorted(self.loads_by_width.items())}
        result["issue_cycles_per_token"] = self.issue_cycles_per_token
        return result


def price_loop(compiled: Any, *, num_warps: int, tokens_per_tile: int, profile: Profile | None = None) -> LoopPrice:
    """Price a trip round the hot loop that handles a typical tile, one without the masks of the last.

    Args:
        compiled: a compiled kernel, a launch, or the bytes of a code object.
        num_warps: waves of a workgroup.
        tokens_per_tile: tokens that the workgroup handles in one trip.
        profile: of a run of this kernel; the trip taken most often is priced. Without it the trip is read off the
            code, taking every branch that skips a block of the loop.

    Raises:
        ValueError: no loop with matrix instructions, or the profiled run never went round it.
    """
    listing = profile.listing if profile is not None else Listing(compiled)
    loop = listing.hot_loop
    if loop is None:
        raise ValueError(f"price: {listing.code_object.name} has no loop with matrix instructions")
    trip: Path | None = listing.typical_path(loop) if profile is None else profile.typical_trip
    if trip is None:
        raise ValueError(f"price: the profiled run of {listing.code_object.name} never went round its loop")
    instructions = instructions_of(listing, trip)
    cost = cost_of(instructions)
    simd_share = num_warps / SIMDS_PER_CU / tokens_per_tile
    cu_share = num_warps / tokens_per_tile
    copy_cycles = cost.lds_copy_bytes / LDS_BYTES_PER_CYCLE * cu_share
    loads = [i for i in instructions if i.format in ("GLOBAL", "FLAT", "MUBUF") and "LOAD" in i.opcode]
    return LoopPrice(
        num_warps=num_warps,
        tokens_per_tile=tokens_per_tile,
        valu_cycles_per_token=cost.valu_cycles * simd_share,
        mfma_cycles_per_token=cost.mfma_cycles * simd_share,
        lds_cycles_per_token=cost.lds_bytes / LDS_BYTES_PER_CYCLE * cu_share + copy_cycles,
        lds_copy_cycles_per_token=copy_cycles,
        vmem_cycles_per_token=cost.vmem_cycles * cu_share,
        loop_scratch_ops=cost.scratch_instructions,
        loads_by_width=dict(Counter(lane_bytes(i) for i in loads)),
        mfma=dict(Counter(i.name for i in instructions if "MFMA" in i.name)),
        barriers=sum(i.opcode == "S_BARRIER" for i in instructions),
        wave=cost,
        counted_from="code" if profile is None else "executed",
    )


def price_outside(profile: Profile) -> WaveCost:
    """What a wave issues outside the hot loop (prologue, epilogue, and a merge within the kernel), on average."""
    instructions = profile.listing.instructions
    per_wave: defaultdict[Instruction, float] = defaultdict(float)
    for site, count in profile.outside.items():
        per_wave[instructions[site]] += count / profile.waves
    return cost_of(per_wave)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted time of one call, never measured on the card."""

    predicted_us: float  # at the attained HBM bandwidth
    predicted_us_at_peak: float  # at the data sheet's bandwidth
    hbm_us: float
    hbm_us_at_peak: float
    issue_us: float
    lds_us: float
    merge_us: float
    launch_us: float
    groups_per_cu: int  # on the busiest compute unit
    waves_per_simd: int  # on its busiest SIMD
    bound: str  # "hbm", "issue" or "lds", at the attained bandwidth

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel launch: what its waves issue and what it moves.

    `tiles_per_group` trips round the loop of `loop`, plus `outside` once per wave.
    """

    groups: int
    num_warps: int
    outside: WaveCost
    hbm_bytes: float
    loop: LoopPrice | None = None
    tiles_per_group: int = 0


def _seconds(work: Work) -> tuple[float, float]:
    """Issue time of the busiest SIMD and LDS time of the busiest compute unit."""
    loop = work.loop.wave if work.loop is not None else None
    cycles = work.outside.issue_cycles + (work.tiles_per_group * loop.issue_cycles if loop is not None else 0)
    lds = work.outside.lds_bytes + work.outside.lds_copy_bytes
    if loop is not None:
        lds += work.tiles_per_group * (loop.lds_bytes + loop.lds_copy_bytes)
    groups, waves = _busiest(work)
    return waves * cycles / CLOCK_HZ, groups * work.num_warps * lds / LDS_BYTES_PER_CYCLE / CLOCK_HZ


def _busiest(work: Work) -> tuple[int, int]:
    """Workgroups on the busiest compute unit and waves on its busiest SIMD."""
    groups = -(-work.groups // COMPUTE_UNITS)
    return groups, -(-groups * work.num_warps // SIMDS_PER_CU)


def predict_us(work: Work, *, merge: Work | None = None, further_launches: int = 0) -> Prediction:
    """Predict a call: the larger of HBM time and issue time of the busiest unit, plus launch and merge.

    Args:
        work: the attention kernel.
        merge: a second kernel that reduces partial results, if there is one; a merge inside the kernel belongs to
            `work.outside`.
        further_launches: launches beyond the first, the merge included.
    """
    issue, lds = _seconds(work)
    busy = max(issue, lds)
    attained, peak = work.hbm_bytes / HBM_ATTAINED_BYTES_PER_S, work.hbm_bytes / HBM_PEAK_BYTES_PER_S
    merge_attained = merge_peak = 0.0
    if merge is not None:
        merge_busy = max(_seconds(merge))
        merge_attained = max(merge_busy, merge.hbm_bytes / HBM_ATTAINED_BYTES_PER_S)
        merge_peak = max(merge_busy, merge.hbm_bytes / HBM_PEAK_BYTES_PER_S)
    launch = LAUNCH_US + further_launches * FURTHER_LAUNCH_US
    groups, waves = _busiest(work)
    return Prediction(
        predicted_us=max(attained, busy) * 1e6 + merge_attained * 1e6 + launch,
        predicted_us_at_peak=max(peak, busy) * 1e6 + merge_peak * 1e6 + launch,
        hbm_us=attained * 1e6,
        hbm_us_at_peak=peak * 1e6,
        issue_us=issue * 1e6,
        lds_us=lds * 1e6,
        merge_us=merge_attained * 1e6,
        launch_us=launch,
        groups_per_cu=groups,
        waves_per_simd=waves,
        bound="hbm" if attained >= busy else "issue" if issue >= lds else "lds",
    )


# Bytes of MLA decode: packed codes and scales of a token; queries and output of a sequence with 16 heads.
TOKEN_BYTES = 288 + 18
QUERY_BYTES = 16 * 576 * 2
OUTPUT_BYTES = 16 * 512 * 2
# One partial result: 16 heads of 512 float32 and their log-sum-exp.
PARTIAL_BYTES = 16 * (512 + 1) * 4


def decode_work(
    *, batch: int, kv_len: int, num_splits: int, loop: LoopPrice, outside: WaveCost, partials_per_split: int = 1
) -> Work:
    """The attention kernel of a call: one workgroup per sequence and split, each byte of the cache read once.

    Args:
        batch: sequences.
        kv_len: tokens of each.
        num_splits: workgroups per sequence.
        loop: price of its loop.
        outside: what a wave issues besides.
        partials_per_split: partial results that a workgroup writes when sequences are split.
    """
    tokens = -(-kv_len // num_splits)
    hbm = batch * (kv_len * TOKEN_BYTES + QUERY_BYTES)
    hbm += batch * (num_splits * partials_per_split * PARTIAL_BYTES if num_splits > 1 else OUTPUT_BYTES)
    return Work(
        groups=batch * num_splits,
        num_warps=loop.num_warps,
        outside=outside,
        hbm_bytes=hbm,
        loop=loop,
        tiles_per_group=-(-tokens // loop.tokens_per_tile),
    )


def merge_work(
    *, batch: int, num_splits: int, groups: int, num_warps: int, outside: WaveCost, partials_per_split: int = 1
) -> Work:
    """A second kernel that reduces the partial results of `decode_work`."""
    partials = batch * num_splits * partials_per_split * PARTIAL_BYTES
    return Work(groups=groups, num_warps=num_warps, outside=outside, hbm_bytes=partials + batch * OUTPUT_BYTES)


def plan_entry(
    *, batch: int, kv_len: int, loop: LoopPrice, kernel: Resources, prediction: Prediction
) -> dict[str, Any]:
    """One plan as the inspection report lists it, JSON-ready."""
    return {
        "batch": batch,
        "kv": kv_len,
        "valu_cycles_per_token": loop.valu_cycles_per_token,
        "mfma_cycles_per_token": loop.mfma_cycles_per_token,
        "lds_cycles_per_token": loop.lds_cycles_per_token,
        "loop_scratch_ops": loop.loop_scratch_ops,
        "vgpr_spills": kernel.vgpr_spills,
        "sgpr_spills": kernel.sgpr_spills,
        "scratch_bytes": kernel.scratch_bytes,
        "waves_per_cu": kernel.waves_per_cu,
        "lds_bytes": kernel.lds_bytes,
        "hbm_bytes_per_token": TOKEN_BYTES,
        "predicted_us": prediction.predicted_us,
        "loop": loop.as_dict(),
        "resources": kernel.as_dict(),
        "prediction": prediction.as_dict(),
    }


def geometric_mean(values: Iterable[float]) -> float:
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


def assumptions() -> dict[str, dict[str, Any]]:
    """The rates that prices and predictions rest on: name -> value and source, for printing beside them."""
    return {name: {"value": globals()[name], "source": source} for name, source in SOURCES.items()}
