"""The reader of compiled programs, on texts written by hand and on programs compiled here."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from deltares_jax.parallel import chips, hlo_cost, hlo_loops
from deltares_jax.parallel.hlo_text import Module

# Whole numbers in the sums below: 1 cycle a second, 1 byte a second over each of two links.
CHIP = dataclasses.replace(
    chips.CHIPS["v5e"], peak_flops=1.0, flops_per_cycle=1, link_bandwidth=1.0, hbm_bandwidth=1.0
)
LINKS = 2

LOOP = """\
HloModule m

%body (p: (s32[], f32[4,8], f32[8,8])) -> (s32[], f32[4,8], f32[8,8]) {
  %p = (s32[], f32[4,8]{1,0}, f32[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4,8]{1,0} get-tuple-element(%p), index=1
  %w = f32[8,8]{1,0} get-tuple-element(%p), index=2
  %step = s32[] constant(STEP)
  %next = s32[] OPERATION(%i, %step)
  %y = f32[4,8]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
backend_config={"estimated_cycles":"100"}
  %c = f32[4,8]{1,0} copy(%y), backend_config={"estimated_cycles":"7"}
  ROOT %t = (s32[], f32[4,8]{1,0}, f32[8,8]{1,0}) tuple(%next, %c, %w)
}

%condition (q: (s32[], f32[4,8], f32[8,8])) -> pred[] {
  %q = (s32[], f32[4,8]{1,0}, f32[8,8]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %bound = s32[] constant(BOUND)
  ROOT %less = pred[] compare(OPERANDS), direction=DIRECTION
}

ENTRY %main (a: f32[4,8], b: f32[8,8]) -> f32[4,8] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[8,8]{1,0} parameter(1)
  %start = s32[] constant(START)
  %init = (s32[], f32[4,8]{1,0}, f32[8,8]{1,0}) tuple(%start, %a, %b)
  %loop = (s32[], f32[4,8]{1,0}, f32[8,8]{1,0}) while(%init), condition=%condition, body=%bodyNOTE
  ROOT %out = f32[4,8]{1,0} get-tuple-element(%loop), index=1
}
"""


def loop(start=0, bound=5, step=1, direction="LT", operands="%j, %bound", operation="add", note=""):
    text = LOOP.replace("DIRECTION", direction).replace("OPERANDS", operands)
    text = text.replace("OPERATION", operation).replace("NOTE", note)
    return text.replace("START", str(start)).replace("BOUND", str(bound)).replace("STEP", str(step))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 5),
        ({"start": 2}, 3),
        ({"step": 2}, 3),
        ({"direction": "LE"}, 6),
        ({"direction": "NE"}, 5),
        ({"operands": "%bound, %j", "direction": "GT"}, 5),
        ({"start": 9, "bound": 0, "operation": "subtract", "direction": "GT"}, 9),
        ({"start": 9, "bound": 0, "operation": "subtract", "direction": "GE", "step": 3}, 4),
        ({"start": 5}, 0),
        ({"note": ', backend_config={"known_trip_count":{"n":"12"}}'}, 12),
        ({"operation": "multiply"}, None),
        ({"direction": "GT"}, None),
    ],
)
def test_trips(changes, expected):
    module = Module(loop(**changes))
    assert hlo_loops.trips(module, "main", module.op("main", "loop")) == expected


def test_a_loop_counts_once_per_trip():
    cost = hlo_cost.program_cost(loop())
    assert cost.flops == 5 * 2 * 4 * 8 * 8
    assert cost.cycles.compute == 5 * 107
    assert cost.by_kind == {"matmul": 500, "copy": 35}


def test_a_loop_of_unknown_length_counts_once_and_is_named():
    cost = hlo_cost.program_cost(loop(operation="multiply"))
    assert (cost.cycles.compute, cost.unknown_loops) == (107, ["loop"])


def program(body: str, more: str = "") -> str:
    return f"HloModule m\n{more}\nENTRY %main (a: f32[8,64]) -> f32[8,64] {{\n{body}}}\n"


PARAMETER = "  %a = f32[8,64]{1,0} parameter(0)\n"  # 2048 bytes
GROUPS = "replica_groups=[2,4]<=[8]"


@pytest.mark.parametrize(
    ("operation", "kind", "received"),
    [
        (f"f32[32,64]{{1,0}} all-gather(%a), {GROUPS}, dimensions={{0}}", "all-gather", 3 * 2048),
        (f"f32[8,64]{{1,0}} all-reduce(%a), {GROUPS}, to_apply=%add", "all-reduce", 2 * 1536),
        (f"f32[2,64]{{1,0}} reduce-scatter(%a), {GROUPS}, to_apply=%add", "reduce-scatter", 1536),
        (f"f32[8,64]{{1,0}} all-to-all(%a), {GROUPS}", "all-to-all", 1536),
        ("f32[8,64]{1,0} all-to-all(%a), replica_groups={{0,1},{2,3}}", "all-to-all", 1024),
        (
            "f32[8,64]{1,0} all-to-all(%a), replica_groups=mesh['x'=4,'y'=2] {'x'}",
            "all-to-all",
            1536,
        ),
        (
            "f32[8,64]{1,0} collective-permute(%a), source_target_pairs={{0,1},{1,0}}",
            "collective-permute",
            2048,
        ),
    ],
)
def test_bytes_that_a_device_receives(operation, kind, received):
    cost = hlo_cost.program_cost(program(f"{PARAMETER}  ROOT %r = {operation}\n"), CHIP, LINKS)
    assert cost.collectives == {kind: hlo_cost.Traffic(1, received)}
    links = 1 if kind == "collective-permute" else LINKS
    assert cost.cycles == hlo_cost.Cycles(0, 0, received / links, received / links)


ASYNC = (
    PARAMETER
    + "  %s = (f32[8,64]{1,0}, f32[32,64]{1,0}) all-gather-start(%a), "
    + GROUPS
    + """, dimensions={0}
  %work = f32[8,64]{1,0} add(%a, %a), backend_config={"estimated_cycles":"CYCLES"}
  %d = f32[32,64]{1,0} all-gather-done(%s)
  ROOT %r = f32[8,64]{1,0} slice(%d), slice={[0:8], [0:64]}
"""
)


@pytest.mark.parametrize(("work", "overlapped"), [(1000, 3072), (5000, 5000)])
def test_a_transfer_runs_beside_the_work_between_its_ends(work, overlapped):
    text = program(ASYNC.replace("CYCLES", str(work)))
    cycles = hlo_cost.program_cost(text, CHIP, LINKS).cycles
    assert cycles == hlo_cost.Cycles(work, 0, overlapped, work + 3072)


def test_a_fused_all_reduce_that_is_sliced_is_a_reduce_scatter():
    more = f"""\
%all-reduce-scatter (p: f32[8,64]) -> f32[2,64] {{
  %p = f32[8,64]{{1,0}} parameter(0)
  %ar = f32[8,64]{{1,0}} all-reduce(%p), {GROUPS}, to_apply=%add
  ROOT %s = f32[2,64]{{1,0}} slice(%ar), slice={{[0:2], [0:64]}}
}}
"""
    body = f"{PARAMETER}  ROOT %r = f32[2,64] fusion(%a), kind=kLoop, calls=%all-reduce-scatter\n"
    cost = hlo_cost.program_cost(program(body, more), CHIP, LINKS)
    assert cost.collectives == {"reduce-scatter": hlo_cost.Traffic(1, 1536)}


def test_a_conditional_counts_as_its_dearest_branch():
    branches = "".join(
        f"""\
%branch{n} (p: f32[8,64]) -> f32[8,64] {{
  %p = f32[8,64]{{1,0}} parameter(0)
  ROOT %x = f32[8,64]{{1,0}} add(%p, %p), backend_config={{"estimated_cycles":"{n}"}}
}}
"""
        for n in (10, 30, 20)
    )
    body = f"""{PARAMETER}  %i = s32[] constant(0)
  ROOT %r = f32[8,64]{{1,0}} conditional(%i, %a, %a, %a), \
branch_computations={{%branch10, %branch30, %branch20}}
"""
    assert hlo_cost.program_cost(program(body, branches)).cycles.compute == 30


KERNELS = """\
  %a = f32[8,64]{1,0} parameter(0)
  %q = bf16[2,4,1024,128]{3,2,1,0} parameter(1)
  %k = bf16[2,2,1024,128]{3,2,1,0} parameter(2)
  %splash_mha_fwd.3 = bf16[2,4,1024,128]{3,2,1,0} custom-call(%q, %k, %k), \
custom_call_target="tpu_custom_call", metadata={op_name="jit(f)
  a second line = of metadata (as kernels have it)
"}
  %routing.7 = f32[8,64]{1,0} custom-call(%a, %a), custom_call_target="tpu_custom_call"
  %other = f32[8,64]{1,0} custom-call(%a), custom_call_target="AllocateBuffer"
  ROOT %after = f32[8,64]{1,0} add(%a, %a), backend_config={"estimated_cycles":"11"}
"""


def test_attention_kernels_have_a_price_and_others_are_named():
    cost = hlo_cost.program_cost(program(KERNELS), CHIP, LINKS)
    assert cost.cycles.compute == 11
    # 8 heads of 1024 × 1024 scores, of which causal tiles of 512 cover three quarters.
    assert cost.cycles.kernels == 8 * 4 * 0.75 * CHIP.splash[128][0]
    assert cost.kernels == {"splash_mha_fwd": 1, "routing": 1}
    assert cost.unpriced_kernels == {"routing"}
    assert cost.unpriced_cycles == 3 * 2048


def test_a_kernel_that_states_its_bytes_costs_these():
    stated = 'backend_config={"custom_call_config":{"body":"TUzv","cost_estimate":{"flops":"9",'
    stated += '"transcendentals":"0","bytes_accessed":"1000","remote_bytes_transferred":"0"}}}'
    line = 'custom-call(%a, %a), custom_call_target="tpu_custom_call"'
    cost = hlo_cost.program_cost(program(KERNELS.replace(line, f"{line}, {stated}")), CHIP, LINKS)
    assert cost.unpriced_kernels == set()
    assert cost.unpriced_cycles == 1000


def test_two_devices_of_a_chip_share_its_links_and_memory():
    shared = dataclasses.replace(CHIP, devices=2)
    text = program(ASYNC.replace("CYCLES", "1"))
    alone, pair = (hlo_cost.program_cost(text, chip, LINKS) for chip in (CHIP, shared))
    assert pair.cycles.overlapped == 2 * alone.cycles.overlapped
    kernels = program(KERNELS)
    assert hlo_cost.program_cost(kernels, shared, LINKS).unpriced_cycles == 2 * 3 * 2048


# Programs compiled here.


def test_flops_of_a_scan_of_matmuls():
    B, D, L = 4, 16, 6

    def loss(w_LDD, x_BD):
        return jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x_BD, w_LDD)[0])

    shapes = jax.ShapeDtypeStruct((L, D, D), jnp.float32), jax.ShapeDtypeStruct((B, D), jnp.float32)
    text = jax.jit(jax.grad(loss)).lower(*shapes).compile().as_text()
    cost = hlo_cost.program_cost(text)
    assert cost.flops == 2 * B * D * D * 3 * L  # forward one product of a layer, backward two
    assert not cost.unknown_loops


def test_collectives_of_a_sharded_matmul():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    cut, whole = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())
    product = jax.jit(lambda a, b: a.T @ b, in_shardings=(cut, cut), out_shardings=whole)
    a = jax.ShapeDtypeStruct((64, 16), jnp.float32)
    cost = hlo_cost.program_cost(product.lower(a, a).compile().as_text())
    assert cost.collectives == {"all-reduce": hlo_cost.Traffic(1, 2 * 16 * 16 * 4 * 7 / 8)}
    assert cost.flops == 2 * 16 * 16 * 8
