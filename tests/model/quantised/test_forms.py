"""Weights in 8 and 4 bits: each is the nearest that its form can say, and written out the same everywhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from palestra.model.loading.packed_files import unpack_mxfp4
from palestra.model.quantised.forms import FORM_NAMES, FORMS, FormName, levels, quantise
from palestra.model.quantised.packed import PackedWeight, Scratch, dense

QLORA = (-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0)
QLORA += (0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def written_out(weight: Tensor, name: FormName, dtype: torch.dtype = torch.float32) -> Tensor:
    return PackedWeight.of(weight, FORMS[name], dtype, Scratch()).dense()


def test_nf4_has_the_levels_that_qlora_published():
    torch.testing.assert_close(levels("nf4"), torch.tensor(QLORA), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", FORM_NAMES)
@pytest.mark.parametrize("shape", [(5, 128), (7, 96), (3, 320), (2, 3, 64)])
def test_each_weight_becomes_the_nearest_that_its_group_can_say(name, shape):
    weight, form = draw(*shape), FORMS[name]
    codes, scales = quantise(weight, form)
    assert scales.shape == (*shape[:-1], shape[-1] // form.group_of(shape[-1]))
    table = levels(name)
    possible = scales.flatten()[:, None] * table[~table.isnan()]
    groups = weight.reshape(len(possible), -1)
    nearest = (groups[:, :, None] - possible[:, None, :]).abs().amin(-1)
    found = written_out(weight, name).reshape(groups.shape)
    torch.testing.assert_close((found - groups).abs(), nearest, rtol=1e-5, atol=1e-6)
    assert codes.nbytes + scales.nbytes == form.size_bytes(codes[..., 0].numel(), shape[-1])


@pytest.mark.parametrize("name", FORM_NAMES)
def test_what_a_form_says_exactly_it_keeps(name):
    if name == "mxfp4":
        generator = torch.Generator().manual_seed(0)
        blocks = torch.randint(0, 256, (4, 2, 16), generator=generator, dtype=torch.uint8)
        weight = unpack_mxfp4(blocks, torch.full((4, 2), 124, dtype=torch.uint8)).float()
    else:
        weight = written_out(draw(4, 128), name)
    torch.testing.assert_close(written_out(weight, name), weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", FORM_NAMES)
def test_zeros_stay_zeros(name):
    assert not written_out(torch.zeros(2, 64), name).any()


@pytest.mark.parametrize("name", FORM_NAMES)
def test_quantised_in_parts_is_quantised_whole(name, monkeypatch):
    weight, form = draw(9, 128), FORMS[name]
    whole = quantise(weight, form)
    monkeypatch.setattr("palestra.model.quantised.forms.CHUNK_NUMBERS", 3 * 128)
    monkeypatch.setattr("palestra.model.quantised.packed.CHUNK_GROUPS", 5)
    for a, b in zip(quantise(weight, form), whole, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(written_out(weight, name), PackedWeight(form, *whole, torch.float32).dense())


@pytest.mark.parametrize("name", FORM_NAMES)
def test_half_types_round_once(name):
    weight = draw(6, 128)
    wide = written_out(weight, name)
    assert torch.equal(written_out(weight, name, torch.bfloat16), wide.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("name", "error"), [("int8", 0.01), ("fp8", 0.04), ("nf4", 0.1), ("int4", 0.11), ("mxfp4", 0.13)]
)
def test_error_on_normal_weights(name, error):
    weight = draw(64, 512)
    assert (written_out(weight, name) - weight).norm() / weight.norm() < error


def test_all_weights_of_a_model_are_written_out_into_the_same_memory():
    scratch = Scratch()
    small, large = (PackedWeight.of(draw(n, 64), FORMS["int8"], torch.float32, scratch) for n in (2, 8))
    first = small.dense()
    assert first.untyped_storage().nbytes() == 8 * 64 * 4
    assert large.dense().data_ptr() == first.data_ptr()
    some = large[2:5].dense().clone()
    assert torch.equal(some, large.dense()[2:5])
    plain = draw(2, 2)
    assert dense(plain) is plain
