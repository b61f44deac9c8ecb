"""What works on a machine, and what is said where it does not."""

from __future__ import annotations

import pytest

from palestra.machine.facts import Extra, Gpu, Package, Torch
from palestra.machine.report import judge


@pytest.mark.parametrize(
    ("torch", "installed", "why"),
    [
        (None, None, "pip install 'palestra[engine]'"),
        ("libgomp.so.1: cannot open", "2.13.0", "torch is installed but does not load: libgomp.so.1: cannot open"),
        (Torch("2.1.0", "cpu", 1, "AVX2"), "2.1.0", "pip install 'palestra[engine]'"),
    ],
)
def test_doctor_says_what_to_do_without_a_working_torch(torch, installed, why):
    cpu, gpu = judge(torch, [Extra("engine", [Package("torch", ">=2.11", installed)])], has_nvidia_driver=False)
    assert (cpu.works, cpu.why) == (False, why)
    assert not gpu.works


def test_doctor_notices_a_gpu_that_torch_cannot_use():
    engine = Extra("engine", [Package("torch", ">=2.11", "2.13.0")])
    _, gpu = judge(Torch("2.13.0", "cpu", 2, "AVX2"), [engine], has_nvidia_driver=True)
    assert not gpu.works
    assert "install a CUDA build of torch" in gpu.why
    found = Torch("2.13.0", "cuda 13.0", 2, "AVX2", [Gpu("H200", 2**37, "9.0")])
    _, gpu = judge(found, [engine], has_nvidia_driver=True)
    assert gpu.works
    assert gpu.why.startswith("H200, 128.0 GiB, capability 9.0; without Triton")


@pytest.mark.parametrize(
    ("can_keep", "says"), [(True, "compiled kernels are kept in /cache"), (False, "set TRITON_CACHE_DIR")]
)
def test_doctor_says_where_a_gpus_kernels_are_kept(can_keep, says):
    engine = Extra("engine", [Package("torch", ">=2.11", "2.13.0")])
    gpus = [Gpu("H200", 2**37, "9.0")]
    found = Torch("2.13.0", "cuda 13.0", 2, "AVX2", gpus, False, "3.6.0", "/cache", can_keep)
    _, gpu = judge(found, [engine], has_nvidia_driver=True)
    assert says in gpu.why
