"""The CPU's version of CUDA does what a GPU does and finds what would fail there; what the memory checker follows runs here."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.cuda_on_cpu import FOLDER_VARIABLE, machine_code, modules, run
from tests.engine.kernels.test_experts import kernels as kernels_of_experts
from tests.gpu import once
from trimtab.engine.formats import int8_head
from trimtab.engine.kernels import attention_and_norms, delta_rule, dequantize, embed_and_logits, experts, gemm4, gemv4

ORDERS = (0, 1, 7)


@pytest.mark.parametrize("order", ORDERS)
def test_a_block_sums_through_warps_and_shared_memory(order):
    source = """
    extern "C" __global__ void total(const float* x, float* out, int n, float scale) {
      extern __shared__ __align__(16) float parts[];
      __shared__ float all;
      float sum = 0.f;
      for (int i = threadIdx.x; i < n; i += blockDim.x) sum += x[blockIdx.x * n + i];
      for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
      if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
      __syncthreads();
      if (threadIdx.x == 0) { all = 0.f; for (int w = 0; w < blockDim.x / 32; w++) all += parts[w]; }
      __syncthreads();
      if (threadIdx.x == blockDim.x - 1) out[blockIdx.x] = all * scale;
    }"""
    kernel = run.compile_for_cpu(source, "total")
    x = np.random.default_rng(0).standard_normal((3, 777)).astype(np.float32)
    out = np.full(3, np.nan, np.float32)
    kernel(3, 96, [x, out, 777, 0.5], shared_bytes=12, order=order)
    np.testing.assert_allclose(out, x.sum(1, dtype=np.float64) / 2, rtol=1e-5)


@pytest.mark.parametrize("order", ORDERS)
def test_warp_operations_move_what_they_move_on_a_gpu(order):
    source = """
    extern "C" __global__ void move(int* out) {
      const int lane = threadIdx.x & 31, v = threadIdx.x;
      int* to = out + threadIdx.x * 6;
      to[0] = __shfl_xor_sync(~0u, v, 5);
      to[1] = __shfl_sync(~0u, v, 3);
      to[2] = __shfl_down_sync(~0u, v, 4);
      to[3] = __shfl_up_sync(~0u, v, 4, 8);
      to[4] = (int)__ballot_sync(~0u, lane % 3 == 0);
      if (lane < 16) to[5] = __shfl_sync(0xffffu, v, 15); else to[5] = __shfl_sync(0xffff0000u, v, 16);
      __syncwarp();
    }"""
    out = np.zeros((64, 6), np.int32)
    run.compile_for_cpu(source, "move")(1, 64, [out], order=order)
    for thread in range(64):
        lane, first = thread % 32, thread // 32 * 32
        ballot = np.array(sum(1 << i for i in range(0, 32, 3)), np.uint32).view(np.int32)
        assert out[thread].tolist() == [
            first + (lane ^ 5), first + 3, thread + 4 if lane < 28 else thread, thread - 4 if lane % 8 >= 4 else thread,
            int(ballot), first + (15 if lane < 16 else 16),
        ]  # fmt: skip


def test_the_last_block_is_known_by_an_atomic_counter():
    source = """
    extern "C" __global__ void last(const float* x, float* parts, unsigned* arrived, float* out) {
      __shared__ bool is_last;
      parts[blockIdx.x] = x[blockIdx.x];
      __threadfence();
      if (threadIdx.x == 0) is_last = atomicAdd(arrived, 1u) == gridDim.x - 1;
      __syncthreads();
      if (!is_last) return;
      if (threadIdx.x == 0) { float s = 0.f; for (int b = 0; b < gridDim.x; b++) s += __ldcg(parts + b); *out = s; *arrived = 0; }
    }"""
    kernel = run.compile_for_cpu(source, "last")
    for order in ORDERS:
        parts, arrived, out = np.full(5, np.nan, np.float32), np.zeros(1, np.uint32), np.zeros(1, np.float32)
        kernel(5, 32, [np.arange(5, dtype=np.float32), parts, arrived, out], order=order)
        assert out[0] == 10 and arrived[0] == 0


def test_half_and_bfloat16_round_as_numpy_and_torch_do():
    torch = pytest.importorskip("torch")
    source = """
    extern "C" __global__ void formats(const float* x, unsigned short* half, unsigned short* bf16, float* back, int n) {
      for (int i = threadIdx.x; i < n; i += blockDim.x) {
        half[i] = to_half(x[i]); bf16[i] = to_bf16(x[i]); back[i] = from_half(half[i]);
      }
    }"""
    bits = np.random.default_rng(1).integers(0, 2**32, 20000, dtype=np.uint32)
    ties = (np.arange(0, 2**16, 7, dtype=np.uint32) << 16) + 0x8000  # between two bf16
    small = np.ldexp(np.arange(-400, 400) / 8, -24).astype(np.float32)  # where fp16's steps are even
    near = np.array([65504, 65519.996, 65520, 1e6, -65520, 2**-14, 2**-14 * (1 - 2**-12), 0.0, -0.0], np.float32)
    half_ties = (np.arange(0x38800000, 0x47800000, 0x1000 * 977, dtype=np.uint32)).view(np.float32)
    x = np.concatenate([bits.view(np.float32), ties.view(np.float32), small, near, half_ties])
    x = np.ascontiguousarray(x[~np.isnan(x)])
    half, bf16, back = np.zeros(len(x), np.uint16), np.zeros(len(x), np.uint16), np.zeros(len(x), np.float32)
    run.compile_for_cpu(source, "formats")(1, 64, [x, half, bf16, back, len(x)])
    with np.errstate(over="ignore"):
        wanted = x.astype(np.float16)
    np.testing.assert_array_equal(half, wanted.view(np.uint16))
    np.testing.assert_array_equal(back, wanted.astype(np.float32))
    np.testing.assert_array_equal(bf16, torch.from_numpy(x).bfloat16().view(torch.int16).numpy().view(np.uint16))


@pytest.mark.parametrize("name", ["mma_m16n8k16", "mma_m16n8k16_bf16"])
def test_a_matrix_product_of_a_warp_has_the_layout_of_ptx(name):
    torch = pytest.importorskip("torch")
    dtype = torch.float16 if name == "mma_m16n8k16" else torch.bfloat16
    # a and b as in memory: a [16, 16] by rows, b [8, 16] by columns; a register holds two neighbours along k.
    source = f"""
    extern "C" __global__ void product(const unsigned* a, const unsigned* b, float* out) {{
      const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
      float c[4] = {{1.f, 1.f, 1.f, 1.f}};
      {name}(c, a[g * 8 + t], a[(g + 8) * 8 + t], a[g * 8 + t + 4], a[(g + 8) * 8 + t + 4], b[g * 8 + t], b[g * 8 + t + 4]);
      out[g * 8 + 2 * t] = c[0]; out[g * 8 + 2 * t + 1] = c[1];
      out[(g + 8) * 8 + 2 * t] = c[2]; out[(g + 8) * 8 + 2 * t + 1] = c[3];
    }}"""
    torch.manual_seed(0)
    a, b = torch.randn(16, 16).to(dtype), torch.randn(8, 16).to(dtype)
    out = np.full((16, 8), np.nan, np.float32)
    words = [x.view(torch.int16).numpy().copy().view(np.uint32) for x in (a, b)]
    run.compile_for_cpu(source, "product")(1, 32, [*words, out])
    np.testing.assert_allclose(out, (a.double() @ b.double().T + 1).numpy(), rtol=1e-6, atol=1e-6)


def test_byte_perm_picks_and_signs():
    source = """
    extern "C" __global__ void perm(unsigned* v) {
      v[2] = __byte_perm(v[0], v[1], 0x5504); v[3] = __byte_perm(v[0], v[1], 0x1f80);
    }"""
    v = np.array([0x80030201, 0x07060504, 0, 0], np.uint32)
    run.compile_for_cpu(source, "perm")(1, 1, [v])
    assert [hex(x) for x in v[2:]] == ["0x5050104", "0x2000001"]


def test_a_barrier_that_not_every_thread_reaches_is_found():
    source = """
    extern "C" __global__ void hang(int* out) {
      if (threadIdx.x < 40) { __syncthreads(); out[0] = 1; } else { __shfl_xor_sync(~0u, 1, 1); }
    }"""
    with pytest.raises(run.LaunchError, match=r"hangs: 40 of 64.*__syncthreads, __shfl_xor_sync"):
        run.compile_for_cpu(source, "hang")(1, 64, [np.zeros(1, np.int32)])


def test_a_missing_barrier_gives_other_numbers_in_another_order():
    source = """
    extern "C" __global__ void race(int* out) {
      __shared__ int v[64];
      v[threadIdx.x] = threadIdx.x + blockIdx.x * 100;
      out[blockIdx.x * 64 + threadIdx.x] = v[63 - threadIdx.x];
    }"""
    found = []
    for order in ORDERS:
        out = np.zeros(128, np.int32)
        run.compile_for_cpu(source, "race")(2, 64, [out], order=order)
        found.append(out.tolist())
    assert found[0] != found[1] != found[2]


def test_writes_beside_an_array_or_the_shared_memory_are_found():
    beside = 'extern "C" __global__ void w(float* x, int at) { x[at] = 1.f; }'
    kernel = run.compile_for_cpu(beside, "w")
    kernel(1, 1, [np.zeros(4, np.float32), 3])
    for at in (4, -1):
        with pytest.raises(run.LaunchError, match="beside array 0"):
            kernel(1, 1, [np.zeros(4, np.float32), at])
    shared = 'extern "C" __global__ void s(int at) { extern __shared__ float x[]; x[at] = 1.f; }'
    kernel = run.compile_for_cpu(shared, "s")
    kernel(1, 1, [3], shared_bytes=16)
    with pytest.raises(run.LaunchError, match="outside of its shared memory"):
        kernel(1, 1, [4], shared_bytes=16)


def test_shared_memory_starts_as_not_a_number_in_every_block():
    source = 'extern "C" __global__ void s(float* out) { extern __shared__ float x[]; out[blockIdx.x] = x[0]; x[0] = 1.f; }'
    out = np.zeros(3, np.float32)
    run.compile_for_cpu(source, "s")(3, 1, [out], shared_bytes=4)
    assert np.isnan(out).all()


def test_arguments_of_another_type_or_number_are_refused():
    source = 'extern "C" __global__ void f(float* x, int n, float s, long long far) {}'
    kernel = run.compile_for_cpu(source, "f")
    x = np.zeros(1, np.float32)
    kernel(1, 1, [x, 1, 1.0, np.int64(2**40)])
    kernel(1, 1, [None, True, 1.0, np.int64(0)])
    for args in ([x, 1.0, 1.0, np.int64(0)], [x, 1, 1.0, 1], [x, 1, 1.0], [x, 1, 1.0, np.int64(0), 1]):
        with pytest.raises(run.LaunchError, match=r"takes \(pifl\)"):
            kernel(1, 1, args)
    for sizes in ((1, 2048), ((1, 70000), 1), (0, 1)):
        with pytest.raises(run.LaunchError):
            kernel(*sizes, [x, 1, 1.0, np.int64(0)])


def test_a_source_that_does_not_compile_says_why():
    with pytest.raises(run.LaunchError, match="nonsense"):
        run.compile_for_cpu("nonsense;", "f")


def test_defines_reach_the_source_and_threads_may_leave_early():
    source = """
    extern "C" __global__ void d(int* out) {
      if (threadIdx.x >= LIVE) return;
      __syncthreads();
      out[threadIdx.x] = __shfl_xor_sync(~0u, (int)threadIdx.x, 1) + EXTRA;
    }"""
    out = np.zeros(4, np.int32)
    run.compile_for_cpu(source, "d", {"LIVE": 4, "EXTRA": 10})(1, 40, [out])
    assert out.tolist() == [11, 10, 13, 12]


def test_a_module_on_the_cpu_takes_tensors_as_the_real_one_does():
    torch = pytest.importorskip("torch")
    from trimtab.engine.cuda.nvrtc import Long

    source = """
    extern "C" __global__ void add(float* x, int n, float s, long long at) {
      if (threadIdx.x < n) x[at + threadIdx.x] += s;
    }"""
    module = run.CpuModule(source, ["add"])
    x = torch.zeros(6)
    module.launch("add", (1,), (32,), [x, 3, 0.5, Long(2)])
    assert x.tolist() == [0, 0, 0.5, 0.5, 0.5, 0] and module.launches == ["add"]


def test_a_source_is_compiled_once_for_all_processes_and_again_only_if_damaged(tmp_path, monkeypatch):
    compiled = []

    def counted(command, **options):
        compiled.append(command[0] == "g++" and "-o" in command)
        return subprocess.run(command, **options)

    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(run, "_folder", run._folder.__wrapped__)
    monkeypatch.setattr(run, "subprocess", SimpleNamespace(run=counted))
    source = 'extern "C" int answer() { return 42; }'
    run._kept(source, ("-DDAMAGED",)).write_bytes(b"not a library")
    # Each takes the file's lock through a handle of its own, as processes do.
    with ThreadPoolExecutor(3) as pool:
        assert [made.answer() for made in pool.map(run._compiled, [source] * 3, [("-DDAMAGED",)] * 3)] == [42] * 3
    assert sum(compiled) == 1
    run._compiled(source, ("-DOTHER",))
    assert sum(compiled) == 2 and len(list(tmp_path.glob("*.so"))) == 2


def test_without_a_compiler_what_compiles_is_skipped(monkeypatch):
    monkeypatch.setattr(run, "why_not", lambda: "there is no g++")
    monkeypatch.setattr(run, "_compiler", run._compiler.__wrapped__)
    with pytest.raises(pytest.skip.Exception, match="there is no g"):
        run.compile_for_cpu("not compiled before", "kernel")


def test_what_nothing_used_for_a_month_is_removed(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(run.time, "time", lambda: 40 * 86400.0)
    for name in ("empty", "some"):
        (tmp_path / name).mkdir()
    for name, day in (("old.so", 9), ("used.so", 11), ("some/old", 9), ("some/used", 11), ("some", 9), ("empty", 9)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (day * 86400.0,) * 2)
    run._folder.__wrapped__()
    assert {path.name for path in tmp_path.rglob("*")} == {"used.so", "some", "used"}


def test_every_kernel_runs_and_is_right(monkeypatch):
    monkeypatch.setattr(once, "PRODUCTS", once.PRODUCTS[1:3])
    monkeypatch.setattr(once, "ATTENTION", once.ATTENTION[3:])
    monkeypatch.setattr(once, "PAGED", ((2, 1, 64),))
    parts = modules.products(), modules.small(), modules.step_ends()
    assert list(once.findings(*parts, rows=(1,), limit=2)) == []
    names = {name for part in parts for name in modules.launches(part)}
    wide = {f"rope_{way}_{v}" for way in attention_and_norms.ROPES for v in (2, 4, 8)} | {
        "attend_combine"
    }  # of heads of 128 to 512: slow here
    wide |= {"in_order"}  # of act-order: tests/engine/kernels/test_packed_kernels.py
    assert {*attention_and_norms.NAMES, *modules.ATTEND_NAMES, *embed_and_logits.NAMES, *gemv4.NAMES, "matvec_held"} - names == wide
    assert any("-DPAGE=64" in options for options in parts[1].attention)


def test_every_width_of_a_rotation_is_among_what_the_memory_checker_follows():
    assert {next(v for v in (1, 2, 4, 8) if v * 64 >= dim) for _, _, dim, *_ in once.ATTENTION} == {1, 2, 4, 8}


def test_a_wrong_kernel_is_named(monkeypatch):
    monkeypatch.setattr(once, "PRODUCTS", once.PRODUCTS[3:])
    monkeypatch.setattr(once.selfcheck, "check", lambda *args, **kwargs: "attention is wrong")
    monkeypatch.setattr(once.selfcheck, "check_pages", lambda *args, **kwargs: "pages are wrong")
    monkeypatch.setattr(once, "wrong_turns", lambda *args: "turns are wrong")
    said = list(once.findings(modules.products(), modules.small(), modules.step_ends(), rows=(1,), limit=1))
    assert said == ["attention is wrong", "pages are wrong", "turns are wrong"]


def test_the_parts_are_together_the_whole_and_nothing_twice(monkeypatch):
    """Only what would be run is looked at: which cut of which product, and who does the rest."""
    monkeypatch.setattr(once, "PRODUCTS", once.PRODUCTS[:2])
    asked, rest = [], []
    monkeypatch.setattr(once.autotune, "check", lambda group, module, **how: asked.append((len(group), how["rows"], how["cut"])))
    monkeypatch.setattr(once.gemv4, "matvec4", lambda x, group, out, **how: (asked.append((len(group), how["cut"])), out.zero_()))
    monkeypatch.setattr(once.selfcheck, "check", lambda *args, **kwargs: rest.append("small"))
    monkeypatch.setattr(once.embed_and_logits, "check", lambda *args, **kwargs: rest.append("ends"))
    monkeypatch.setattr(once.selfcheck, "check_pages", lambda *args: rest.append("pages"))
    monkeypatch.setattr(once, "wrong_turns", lambda *args: rest.append("turns"))
    monkeypatch.setattr(once.routers, "check", lambda *args: rest.append("routers"))
    monkeypatch.setattr(once.device_kernels, "wrong_lora", lambda *args: rest.append("lora"))

    def run(**part):
        asked.clear(), rest.clear()
        assert list(once.findings(modules.products(), None, None, limit=3, **part)) == []
        return list(asked), list(rest)

    whole, everything = run()
    parts = [run(part=number, parts=4) for number in (1, 2, 3, 4)]
    assert sorted(map(str, whole)) == sorted(str(one) for found, _ in parts for one in found)
    assert [found for _, found in parts] == [[], [], [], everything] and everything == [
        "small", "pages", "turns", "routers", "ends", "ends", "lora", "lora",
    ]  # fmt: skip
    assert all(found for found, _ in parts)


def test_kernels_of_many_tokens_run_and_are_right(monkeypatch):
    monkeypatch.setattr(once, "MANY_PRODUCTS", once.MANY_PRODUCTS[1:2])
    monkeypatch.setattr(once, "UNPACKED", once.UNPACKED[:1])
    monkeypatch.setattr(once, "HEADS", ((64, 256),))
    parts = modules.prompts(), modules.rows(), modules.heads()
    found = list(once.findings_of_many(*parts, tokens=(1, 17), rows=(9,)))
    # bitsandbytes 0.49's own product on a CPU has other float16 values there: 17 of 30,720 are a rounding away.
    old = tuple(int(part) for part in version("bitsandbytes").split(".")[:2]) < (0, 50)
    assert [one for one in found if not (old and one.startswith("an unpacked weight") and "float16" in one)] == []
    names = {name for part in parts for name in modules.launches(part)}
    wanted = {*dequantize.NAMES, *gemm4.NAMES, *int8_head.NAMES}
    assert wanted - names == {"rows_product_32", "rows_product_64", "in_order"}  # MANY_ROWS has the two, and they take long here
    roomy = SimpleNamespace(shared_bytes=227 * 1024)
    assert {gemm4._tile(n, roomy, 16) for n in once.MANY_ROWS} == {16, 32, 64}


def test_kernels_of_mixtures_and_recurrent_layers_run_and_are_right(monkeypatch):
    module, shape = kernels_of_experts(), once.DELTAS[0]
    options = delta_rule.options(shape, torch.bfloat16)
    delta = run.CpuModule(delta_rule.source(), delta_rule.NAMES, options=options)
    monkeypatch.setattr(once, "NEAR_TOKENS", [one for one in once.NEAR_TOKENS if one[0] != 64])  # which take long here
    assert list(once.findings_of_mixtures(module)) == [] == list(once.findings_of_deltas([(delta, shape)]))
    assert set(modules.launches(module)) == set(experts.NAMES) and set(delta.launches) == set(delta_rule.NAMES)
    monkeypatch.setattr(once, "MIXTURES", {kind: once.MIXTURES[kind] for kind in ("nf4", "none", "q8_0")})
    monkeypatch.setattr(once.experts, "check", lambda *args, **kwargs: "one is")
    monkeypatch.setattr(once.torch, "equal", lambda *args: False)
    assert [one.split()[-1] for one in once.findings_of_mixtures(module)] == ["is", *["device"] * 4, "is", "is", *["device"] * 4]


def test_a_wrong_kernel_of_many_tokens_is_named(monkeypatch):
    monkeypatch.setattr(once, "HEADS", ())
    monkeypatch.setattr(once.dequantize, "wrong_add", lambda *args, **kwargs: "one is")
    monkeypatch.setattr(once.dequantize, "wrong_unpack", lambda *args, **kwargs: "one value is")
    monkeypatch.setattr(once.adapter_columns, "wrong", lambda *args, **kwargs: "columns are")
    monkeypatch.setattr(once.gemm4, "wrong", lambda *args, **kwargs: None)
    said = list(once.findings_of_many(modules.prompts(), modules.rows(), None, tokens=(1,), rows=(9,)))
    assert "adapters of a prompt, torch.bfloat16: one is" in said
    assert "an unpacked weight, fp4, torch.float16: one value is" in said
    assert "adapters inside products, nf4: columns are" in said


def test_what_nvcc_compiled_is_kept_and_another_target_or_source_is_compiled_for_itself(tmp_path, monkeypatch):
    asked = []

    def nvcc(command, **_):
        if "--version" not in command:
            asked.append(command[2])
            Path(command[-2]).write_bytes(repr(command[2]).encode() + Path(command[-1]).read_bytes())
        return SimpleNamespace(returncode=0, stdout="release 13.0", stderr="")

    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "made"))
    monkeypatch.setattr(machine_code.nvrtc, "find_compiler", lambda: None)
    monkeypatch.setattr(machine_code.shutil, "which", lambda name: "a toolkit's nvcc")
    monkeypatch.setattr(machine_code.subprocess, "run", nvcc)
    codes = [machine_code.machine_code(*one) for one in [("a", "sm_75"), ("a", "sm_75"), ("a", "sm_90"), ("b", "sm_75")]]
    assert codes == [b"'-arch=sm_75'a", b"'-arch=sm_75'a", b"'-arch=sm_90'a", b"'-arch=sm_75'b"]
    assert len(asked) == 3
