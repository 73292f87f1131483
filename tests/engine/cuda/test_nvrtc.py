"""Compiling CUDA sources at load: what is cached, what is refused and said. Needs NVRTC, but no GPU."""

import os
import sys

import pytest
import torch

from tests.cuda_on_cpu.machine_code import machine_code
from tests.long_runs import halved
from tests.raised import raised
from trimtab.engine.cuda import launch_config, nvrtc
from trimtab.engine.kernels import dequantize, gemm4, gemv4, layouts
from trimtab.engine.kernels.autotune import RandomWeights
from trimtab.errors import DeviceError
from trimtab.formats.record import stored_format
from trimtab.process import user_cache

SOURCE = 'extern "C" __global__ void fill(float* p, int n) { if (threadIdx.x < n) p[threadIdx.x] = 1.f; }'


@pytest.fixture(scope="module")
def compiler():
    found = nvrtc.find_compiler()
    if found is None:
        pytest.skip(f"NVRTC is not installed (its library may be named in {nvrtc.LIBRARY_VARIABLE})")
    return found


class Counting:
    """Stands for a compiler: counts, and gives back what it was asked for."""

    version = (13, 0)

    def __init__(self):
        self.asked = []

    def compile(self, source, target, options=(), *, name=""):
        self.asked.append((source, target, tuple(options)))
        return f"{source} {target} {options}".encode()


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Return the folder in which compiled kernels are kept."""
    monkeypatch.setattr(user_cache, "user_cache_path", lambda name: tmp_path / name)
    return tmp_path / "trimtab" / nvrtc.FOLDER


def test_what_is_compiled_ahead_is_given_back_and_kept_but_for_what_does_not_compile(kept, monkeypatch):
    class Some(Counting):
        def target(self, capability):
            return "sm_{}{}".format(*capability)

        def compile(self, source, target, options=(), *, name=""):
            if source == "b":
                raise DeviceError("no", device="cuda")
            return super().compile(source, target, options, name=name)

    compiler = Some()
    monkeypatch.setattr(nvrtc, "find_compiler", lambda: compiler)
    monkeypatch.setattr(nvrtc, "driver_version", lambda: 0)
    jobs = [nvrtc.Job(source, ("-DX",), source) for source in "aba"]
    assert nvrtc.compile_all(jobs, (9, 0)) == {jobs[0]: b"a sm_90 ('-DX',)"}
    assert nvrtc.compiled(compiler, "a", "sm_90", ("-DX",)) and len(compiler.asked) == 1


def test_what_was_compiled_once_is_read_from_the_cache(kept):
    compiler = Counting()
    first = nvrtc.compiled(compiler, "a", "sm_90")
    assert nvrtc.compiled(compiler, "a", "sm_90") == first and len(compiler.asked) == 1
    assert len(list(kept.iterdir())) == 1


@pytest.mark.parametrize("other", [("b", "sm_90", ()), ("a", "sm_80", ()), ("a", "sm_90", ("-DX",))])
def test_another_source_card_or_option_is_compiled_for_itself(kept, other):
    compiler = Counting()
    nvrtc.compiled(compiler, "a", "sm_90")
    source, target, options = other
    assert nvrtc.compiled(compiler, source, target, options) == f"{source} {target} {options}".encode()
    assert len(compiler.asked) == 2


def test_another_release_of_the_compiler_or_the_driver_does_not_take_the_old_code(kept):
    compiler, newer = Counting(), Counting()
    newer.version = (13, 1)
    nvrtc.compiled(compiler, "a", "sm_90", driver=13000)
    nvrtc.compiled(newer, "a", "sm_90", driver=13000)
    nvrtc.compiled(compiler, "a", "sm_90", driver=13010)
    assert (len(compiler.asked), len(newer.asked)) == (2, 1)


@pytest.mark.parametrize("damage", ["changed", "cut off", "empty", "another kernel's"])
def test_a_damaged_cache_file_is_compiled_anew(kept, damage):
    compiler = Counting()
    right = nvrtc.compiled(compiler, "a", "sm_90")
    (path,) = kept.iterdir()
    whole = path.read_bytes()
    other = b""
    if damage == "another kernel's":
        nvrtc.compiled(Counting(), "b", "sm_90")
        (other,) = (file.read_bytes() for file in kept.iterdir() if file != path)
    path.write_bytes({"changed": whole[:-1] + b"?", "cut off": whole[:-3], "empty": b"", "another kernel's": other}[damage])
    assert nvrtc.compiled(compiler, "a", "sm_90") == right and len(compiler.asked) == 2
    assert path.read_bytes() == whole and whole.endswith(right)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has access lists instead")
@pytest.mark.parametrize("way", ["writable by others", "another user's", "a link"])
def test_compiled_code_in_a_folder_that_others_can_change_is_never_loaded(kept, way, monkeypatch):
    compiler = Counting()
    right = nvrtc.compiled(compiler, "a", "sm_90")
    if way == "writable by others":
        kept.chmod(0o777)
    elif way == "another user's":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    else:
        kept.rename(kept.with_name("elsewhere"))
        kept.symlink_to(kept.with_name("elsewhere"))
    assert nvrtc.compiled(compiler, "a", "sm_90") == right and len(compiler.asked) == 2


def test_a_cache_that_cannot_be_written_costs_only_time(kept):
    kept.parent.write_text("in the way")
    assert nvrtc.compiled(Counting(), "a", "sm_90") == b"a sm_90 ()"


def test_nothing_half_written_stays_in_the_cache(kept, monkeypatch):
    def refuse(*_):
        raise OSError("no rename")

    monkeypatch.setattr(os, "replace", refuse)
    nvrtc.compiled(Counting(), "a", "sm_90")
    assert list(kept.iterdir()) == []


def test_the_kernels_used_longest_ago_are_given_up_first(kept, monkeypatch):
    monkeypatch.setattr(nvrtc, "MOST_FILES", 2)
    compiler = Counting()
    for at, source in enumerate("abc"):
        nvrtc.compiled(compiler, source, "sm_90")
        for file in kept.iterdir():
            if file.read_bytes().endswith(f"{source} sm_90 ()".encode()):
                os.utime(file, (1000 + at, 1000 + at))
    nvrtc.compiled(compiler, "b", "sm_90")
    nvrtc.compiled(compiler, "c", "sm_90")
    assert len(compiler.asked) == 3
    nvrtc.compiled(compiler, "a", "sm_90")
    assert len(compiler.asked) == 4


def test_the_cpu_says_why_it_runs_no_kernels():
    assert nvrtc.why_not("cpu") == "cpu is not a CUDA device"
    if not torch.cuda.is_available():
        assert nvrtc.why_not("cuda:0") == "torch has no CUDA here"
    assert raised(DeviceError, nvrtc.Module, SOURCE, device="cpu").device == "cpu"


def test_every_kind_of_argument_has_its_c_type():
    tensor = torch.zeros(3)
    values = [nvrtc._c_argument(value) for value in (tensor, None, -7, nvrtc.Long(2**40), 0.5)]
    assert [type(value).__name__ for value in values] == ["c_void_p", "c_void_p", "c_int", "c_long", "c_float"] or (
        type(values[3]).__name__ == "c_longlong"
    )
    assert [values[0].value, values[2].value, values[3].value, values[4].value] == [tensor.data_ptr(), -7, 2**40, 0.5]
    assert values[1].value is None


def test_structures_of_the_driver_have_their_documented_sizes():
    # cuda.h: CUlaunchConfig is 7 unsigned, a stream, attributes and their count; CUlaunchAttribute 8 + 64 bytes.
    import ctypes

    assert ctypes.sizeof(nvrtc._Config) == 56 and ctypes.sizeof(nvrtc._Attribute) == 72
    assert nvrtc._Attribute.value.offset == 8


def test_a_source_becomes_machine_code(compiler, kept):
    code = nvrtc.compiled(compiler, SOURCE, "sm_90")
    assert code.startswith(b"\x7fELF") and b"fill" in code
    assert b"fill" in compiler.compile(f"#if N != 1\n#error\n#endif\n{SOURCE}", "sm_90", ("-DN=1",))
    ptx = compiler.compile(SOURCE, "compute_80")
    assert b".target sm_80" in ptx and b".entry fill" in ptx


def test_a_source_that_does_not_compile_gives_the_compilers_words(compiler):
    error = raised(DeviceError, compiler.compile, "void f() { undeclared(); }", "sm_90", name="broken.cu")
    assert "broken.cu does not compile for sm_90" in str(error) and "undeclared" in str(error)


def test_a_card_newer_than_the_compiler_gets_portable_code(compiler):
    assert compiler.target((9, 0)) == "sm_90" and compiler.target((99, 0)) == f"compute_{compiler.archs[-1]}"


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_products_compile_with_what_a_weight_needs(target):
    for options in (
        ("-DHALF=0", "-DNESTED=1", "-DWHOLE=1", "-DSHARED_BASE=1024"),
        ("-DHALF=1", "-DNESTED=0", "-DWHOLE=0", "-DSHARED_BASE=1024"),
    ):
        code = machine_code(gemv4.source(), target, options)
        assert b"matvec_4" in code and b"matvec_8" in code


@pytest.mark.parametrize(("target", "form"), halved(["sm_80", "sm_90"], [(1, False), (1, True), (8, False)]))
def test_a_product_compiled_for_its_shape_keeps_what_it_asked_for_in_registers(target, form):
    n, normed = form
    cut = next(
        one for one in launch_config.cuts((10240, 10240), 2560, n, multiprocessors=132, shared_bytes=232448, pair=True)
        if one.held and (one.may_be_normed or not normed)
    )  # fmt: skip
    options = ("-DHALF=0", "-DNESTED=1", "-DWHOLE=1", "-DSHARED_BASE=1024", *cut.options(40, 2, pair=True, normed=normed))
    code = machine_code(gemv4.source(), target, options)
    assert b"matvec_held" in code and b"matvec_8" not in code


FORMS = [
    *("nf4", "int4-g32", "int4-g128-zp", "fp8-128x128", "fp8-row", "q4_0", "q4_1", "q8_0", "q4_k", "q5_k", "q6_k"),
    *("mobile2-row-a8", "mobile4-row-a8", "mobile8-row-a8", "nvfp4-g16"),
]
QUICK = {"int4-g32", "fp8-128x128", "q4_k", "mobile4-row-a8", "nvfp4-g16"}


@pytest.mark.parametrize("form", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in FORMS])
def test_the_product_of_few_rows_compiles_for_every_form_of_a_weight(form):
    weight = RandomWeights(torch.device("cpu"), quant=form).make(64, 512)
    cut = next(
        one for one in launch_config.cuts(
            (4096, 4096), 4096, 1, multiprocessors=132, shared_bytes=232448, pair=True, layout=layouts.layout(weight)
        ) if one.held
    )  # fmt: skip
    own = *layouts.options(weight), *cut.options(64, 2, pair=True, normed=False)
    code = machine_code(gemv4.source(), "sm_90", ("-DHALF=0", "-DSHARED_BASE=1024", "-DWHOLE=1", *own))
    assert b"matvec_held" in code


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_the_products_of_many_rows_compile_for_every_form_of_a_weight(form):
    weight = RandomWeights(torch.device("cpu"), quant=form).make(64, 512)
    assert layouts.layout(weight)
    for module in (gemm4, dequantize):
        assert machine_code(module.source(), "sm_90", layouts.options(weight) if stored_format(form).number else ())
