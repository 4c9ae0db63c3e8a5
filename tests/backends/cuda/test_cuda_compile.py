"""The compile matrix: every kernel for every architecture through NVRTC, which needs no driver."""

from __future__ import annotations

import importlib.util
import re
import struct

import pytest

import hal
from hal.backends.cuda import compile

FILES = {path.name: path for path in compile.sources()}


def need_nvrtc() -> None:
    try:
        compile.nvrtc()
    except hal.BackendUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", compile.ARCHITECTURES)
@pytest.mark.parametrize("name", FILES)
def test_every_kernel_compiles_without_warnings_and_without_spills(name, architecture):
    need_nvrtc()
    result = compile.compile_file(FILES[name], architecture)
    assert {u.kernel for u in result.usage} == set(compile.exports(FILES[name])) == set(result.names)
    spilled = [u for u in result.usage if u.spill_stores or u.spill_loads or u.stack]
    assert not spilled
    # 256 threads of 128 registers: two blocks fit into a multiprocessor's 65,536. Attention's blocks have 128 threads,
    # of which three fit, or two where the accumulators are large. A norm's gradient for rows of four vectors per thread
    # holds two rows and their sums: one block of 256 threads, which on an H100 keeps 89 % of the copy bandwidth.
    two = re.compile(r"attention_(fwd<(f32, 128|b?f16, 256)|dkv<(f32, \d+|b?f16, (128|256)))>|norm_bwd_held<.*, 4>")
    three = re.compile(r"attention_(fwd|dq|dkv)<")
    for u in result.usage:
        most = 255 if two.match(u.kernel) else 168 if three.match(u.kernel) else 128
        assert u.registers <= most, u


STORES_VECTORS = (
    r"activation|cross_entropy_bwd|dropout|philox_uniform|norm|adamw|unscale|softmax|rotary<f32, 4|rotary<b?f16, 8"
    r"|moe_scatter|moe_gather|weighted_swiglu|attention_(fwd|dq|dkv)"
)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_vectors_are_stored_in_16_byte_pieces(monkeypatch, name):
    """NVRTC used to write some of them as one store per element, which shows in the PTX: stores at constant offsets."""
    need_nvrtc()
    library = compile.nvrtc()
    monkeypatch.setattr(library, "getCUBIN", library.getPTX)
    result = compile.compile_file(FILES[name], "sm_90")
    entries = {e.split("(", 1)[0]: e for e in re.split(r"\.entry ", result.cubin.decode())[1:]}
    for kernel, lowered in result.names.items():
        # Pairs, where rows are not aligned; and rows of experts, of which each thread of a warp stores single elements.
        if re.match(r"rotary<\w+, 2, true>|router", kernel):
            continue
        text = entries[lowered]
        assert not re.findall(r"\bst(?!\.local|\.shared|\.param|\.v4)[\w.]*\s+\[%\w+\+\d\d?\]", text), kernel
        assert ("st.v4.b32" in text) == bool(re.match(STORES_VECTORS, kernel)), kernel
        # Products in 16 bits are the tensor cores', and those in float32 are not, as TF32 would lose bits.
        assert ("mma.sync" in text) == bool(re.match(r"attention_(fwd|dq|dkv)<b?f16", kernel)), kernel


@pytest.mark.slow
def test_a_cubin_is_whole():
    need_nvrtc()
    cubin = compile.compile_file(FILES["reduce.cu"], "sm_90").cubin
    (segments,), (size, count) = struct.unpack_from("<Q", cubin, 32), struct.unpack_from("<2H", cubin, 54)
    assert segments + size * count == len(cubin)  # NVRTC's ELF files end with their segment table


@pytest.mark.slow
def test_a_warning_is_an_error_and_the_log_is_shown(tmp_path):
    need_nvrtc()
    source = tmp_path / "warns.cu"
    source.write_text("template <class T> __global__ void k(T *x) { int unused; *x = 0; }\nEXPORT(k<float>)\n")
    source.write_text('#include "common.h"\n' + source.read_text())
    with pytest.raises(hal.HalError, match="unused"):
        compile.compile_file(source, "sm_90")
    # A user's version of NVRTC may emit more warnings than those tested.
    assert compile.compile_file(source, "sm_90", strict=False).cubin


@pytest.mark.slow
def test_spills_show_in_the_report(tmp_path):
    need_nvrtc()
    source = tmp_path / "spills.cu"
    source.write_text(
        '#include "common.h"\n__global__ void __launch_bounds__(1024, 2) k(float *x) {\n    float v[256];\n'
        "#pragma unroll\n    for (int i = 0; i < 256; i++) v[i] = x[i * 7];\n    __syncthreads();\n"
        "#pragma unroll\n    for (int i = 0; i < 256; i++) x[i * 5] = v[255 - i] * v[i];\n}\nEXPORT(k)\n"
    )
    (usage,) = compile.compile_file(source, "sm_80").usage
    assert usage.spill_stores > 0 and usage.spill_loads > 0


@pytest.mark.slow
def test_the_cache_keeps_what_was_compiled(tmp_path, monkeypatch):
    need_nvrtc()
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path))
    first = compile.compiled(FILES["reduce.cu"], "sm_90")
    monkeypatch.setattr(compile, "compile_file", lambda *a: pytest.fail("compiled again"))
    assert compile.compiled(FILES["reduce.cu"], "sm_90") == first
    assert first.cubin.startswith(b"\x7fELF")


SOUND = """ptxas info : Compiling entry function '_Zk' for 'sm_90'
ptxas info : Function properties for _Zk
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info : Used 12 registers, 16 bytes smem
"""
CHANGED = {
    "numbers": SOUND.replace("Used 12 registers", "12 registers used"),
    "names": SOUND.replace("'_Zk'", "'_Zother'"),
    "everything": "ptxas: fine",
}


class Library:
    """cupy.cuda.nvrtc with a log written by the test."""

    def __init__(self, log):
        self.getProgramLog = lambda program: log
        self.createProgram = lambda *a: 1
        self.addNameExpression = self.compileProgram = self.destroyProgram = lambda *a: None
        self.getLoweredName = lambda program, name: "_Zk"
        self.getCUBIN = lambda program: b"cubin"


@pytest.mark.parametrize("log", CHANGED)
def test_a_changed_log_of_ptxas_ends_the_report_and_nothing_else(monkeypatch, tmp_path, log):
    source = tmp_path / "k.cu"
    source.write_text("EXPORT(k)\n")
    monkeypatch.setattr(compile, "nvrtc", lambda: Library(CHANGED[log]))
    with pytest.raises(hal.HalError, match="its log has changed"):
        compile.compile_file(source, "sm_90")
    assert compile.compile_file(source, "sm_90", strict=False) == compile.Compiled(b"cubin\0", {"k": "_Zk"}, ())
    monkeypatch.setattr(compile, "nvrtc", lambda: Library(SOUND))
    assert compile.compile_file(source, "sm_90").usage == (compile.Usage("k", "sm_90", 12, 16, 0, 0, 0),)


def test_without_cupy_the_reason_names_the_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install cupy-cuda13x" in compile.missing()
    with pytest.raises(hal.BackendUnavailable, match="cupy-cuda13x"):
        compile.nvrtc()
