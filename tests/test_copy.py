"""The kernel of csrc/symm/copy.cu, against torch's indexing, bit by bit."""

import pytest
import torch

import torch_gpumode.distributed  # noqa: F401  (tells the extension which exceptions to raise)
from torch_gpumode import _extension

C = _extension.load()
pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and hasattr(C, "copy")),
    reason="needs a GPU and a build that compiled the .cu files",
)
MARGIN = 64  # bytes around the destination that must stay as they are
POISON = 0xFF  # four of them are a NaN


def copy(dst: torch.Tensor, src: torch.Tensor, num_sms: int = 0) -> None:
    stream = torch.cuda.current_stream().cuda_stream
    C.copy(dst.data_ptr(), src.data_ptr(), src.numel(), num_sms, stream)


def check(nbytes: int, dst_offset: int, src_offset: int, num_sms: int = 0) -> None:
    src = torch.randint(0, 255, (src_offset + nbytes,), dtype=torch.uint8, device="cuda")
    dst = torch.full((MARGIN + dst_offset + nbytes + MARGIN,), POISON, dtype=torch.uint8).cuda()
    expected = dst.clone()
    begin = MARGIN + dst_offset
    expected[begin : begin + nbytes] = src[src_offset:]
    copy(dst[begin : begin + nbytes], src[src_offset:], num_sms)
    assert torch.equal(dst, expected), (nbytes, dst_offset, src_offset)


@pytest.mark.parametrize("dst_offset", range(16))
def test_every_alignment_and_small_size(dst_offset):
    """All sizes from 0 to 4100 bytes, each into a row of its own, compared at once."""
    max_nbytes = 4100
    pitch = MARGIN + 16 + max_nbytes + MARGIN
    pitch += -pitch % 16
    begin = MARGIN + dst_offset
    column = torch.arange(pitch, device="cuda") - begin
    size = torch.arange(max_nbytes + 1, device="cuda")[:, None]
    inside = (column >= 0) & (column < size)
    for src_offset in range(16):
        rows = torch.full((max_nbytes + 1, pitch), POISON, dtype=torch.uint8, device="cuda")
        src = torch.randint(0, 255, (16 + max_nbytes,), dtype=torch.uint8, device="cuda")
        for nbytes in range(max_nbytes + 1):
            copy(rows[nbytes, begin : begin + nbytes], src[src_offset : src_offset + nbytes])
        there = src[src_offset:][column.clamp(0, max_nbytes - 1)]
        assert torch.equal(rows, torch.where(inside, there, POISON)), src_offset


@pytest.mark.parametrize("nbytes", [1 << 20, (64 << 20) + 13, (1 << 32) + 5])
@pytest.mark.parametrize(("dst_offset", "src_offset"), [(0, 0), (3, 3), (0, 5), (7, 0), (1, 14)])
def test_large_sizes(nbytes, dst_offset, src_offset):
    check(nbytes, dst_offset, src_offset)


@pytest.mark.parametrize("num_sms", [1, 2, 7, 10_000])
def test_any_number_of_multiprocessors(num_sms):
    check((3 << 20) + 1, 0, 9, num_sms)


@pytest.mark.parametrize("direction", ["put", "get"])
def test_pinned_host_memory(direction):
    host = torch.randint(0, 255, (100_003,), dtype=torch.uint8).pin_memory()
    expected = host.clone()
    device = torch.full_like(host, POISON, device="cuda")
    if direction == "get":
        copy(device, host)
    else:
        device.copy_(host)
        host.fill_(POISON)
        copy(host, device)
    torch.cuda.synchronize()
    assert torch.equal(device.cpu(), expected)
    assert torch.equal(host, expected)


def test_runs_inside_a_graph():
    src = torch.arange(1000, device="cuda").view(torch.uint8)
    dst = torch.zeros_like(src)
    copy(dst, src)  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy(dst, src)
    dst.zero_()
    graph.replay()
    assert torch.equal(dst, src)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((16, 32, -1, 0), "nbytes"),
        ((16, 32, 1, -1), "num_sms"),
        ((0, 32, 1, 0), "dst"),
        ((16, 0, 1, 0), "src"),
    ],
)
def test_a_bad_argument_is_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        C.copy(*arguments, 0)
