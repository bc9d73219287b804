"""The affine primitives against torchao's own, bit for bit."""

import pytest
import torch

from nc.torchao import MappingType, choose_qparams_affine, dequantize_affine, quantize_affine

theirs = pytest.importorskip(
    "torchao.quantization.quant_primitives", reason="torchao is in requirements/judges.txt"
)

#: dtype of the codes, lowest and highest code.
SIGNED = [(torch.int8, None, None), (torch.int8, -8, 7), (torch.int8, -127, 127), (torch.int32, -128, 127)]
UNSIGNED = [(torch.uint8, None, None), (torch.uint8, 0, 15)]
#: SYMMETRIC_NO_CLIPPING_ERR divides by the lowest code, which is 0 of unsigned codes.
CASES = [
    (m, c)
    for m in MappingType
    for c in (*SIGNED, *(() if m is MappingType.SYMMETRIC_NO_CLIPPING_ERR else UNSIGNED))
]
BLOCKS = {
    (16, 64): [(16, 64), (1, 64), (1, 32), (4, 16), (16, 1)],
    (8, 4, 3, 3): [(1, 4, 3, 3), (8, 4, 3, 3), (1, 2, 3, 3)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("mapping", "codes"), CASES, ids=str)
def test_all_three_are_torchaos_bit_for_bit(codes, mapping, dtype):
    target, lowest, highest = codes
    other = theirs.MappingType[mapping.name]
    for shape, blocks in BLOCKS.items():
        for block in blocks:
            for keepdim in (False, True):
                x = (torch.randn(shape) * torch.logspace(-3, 3, shape[-1])).to(dtype)
                x.view(-1)[:4] = torch.tensor([0.0, -0.0, 1.0, -1.0], dtype=dtype)
                options = (block, target, lowest, highest, None, torch.float32, torch.int32, keepdim)
                scale, zero = choose_qparams_affine(x, mapping, *options)
                their_scale, their_zero = theirs.choose_qparams_affine(x, other, *options)
                assert scale.shape == their_scale.shape
                assert torch.equal(scale, their_scale)
                assert torch.equal(zero, their_zero)
                assert zero.dtype == their_zero.dtype
                ours = quantize_affine(x, block, scale, zero, target, lowest, highest)
                assert torch.equal(
                    ours, theirs.quantize_affine(x, block, scale, zero, target, lowest, highest)
                )
                values = dequantize_affine(
                    ours, block, scale, zero, target, lowest, highest, output_dtype=dtype
                )
                expected = theirs.dequantize_affine(
                    ours, block, scale, zero, target, lowest, highest, output_dtype=dtype
                )
                assert values.dtype == expected.dtype
                assert torch.equal(values, expected)


def test_their_mapping_type_is_accepted():
    x = torch.randn(4, 8)
    mine, other = (
        choose_qparams_affine(x, m, (1, 8), torch.int8)
        for m in (MappingType.ASYMMETRIC, theirs.MappingType.ASYMMETRIC)
    )
    assert torch.equal(mine[0], other[0])


def test_without_a_zero_point():
    x = torch.randn(4, 8)
    scale, _ = choose_qparams_affine(x, "SYMMETRIC", (1, 8), torch.int8)
    ours = quantize_affine(x, (1, 8), scale, None, torch.int8)
    assert torch.equal(ours, quantize_affine(x, (1, 8), scale, torch.zeros(4, dtype=torch.int32), torch.int8))
    assert torch.equal(
        dequantize_affine(ours, (1, 8), scale, None, torch.int8),
        theirs.dequantize_affine(ours, (1, 8), scale, None, torch.int8),
    )


def test_blocks_of_one_element_differ():
    """torchao reduces over no dimensions there, which torch reads as all of them: it gives one scale.

    Ours gives one per element.
    """
    x = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    ours, _ = choose_qparams_affine(x, "SYMMETRIC", (1, 1), torch.int8)
    assert torch.equal(ours, x / 127.5)
    assert theirs.choose_qparams_affine(x, theirs.MappingType.SYMMETRIC, (1, 1), torch.int8)[0].shape == ()
