"""What a collective moves: bus bandwidth as nccl-tests has it, and the least bytes through memory.

`size` is nccl-tests' size in bytes: the whole result for an all-gather or a gather, the whole
input for a reduce-scatter or a scatter, else what one rank gives.
"""


def busbw_factor(op: str, world_size: int) -> float:
    """busbw / algbw: compared with the hardware's bandwidth, busbw does not depend on ranks.

    Source: doc/PERFORMANCE.md of nccl-tests.
    """
    w = world_size
    if op == "all_reduce":
        return 2 * (w - 1) / w
    if op in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return (w - 1) / w
    assert op in ("broadcast", "reduce", "send_recv"), op
    return 1.0


def floor_nbytes(op: str, world_size: int, size: int, *, in_place: bool) -> float:
    """Bytes that the busiest rank reads and writes at least, if ranks meet in shared memory.

    Tensors are private memory of their ranks, so what another rank needs is copied into shared
    memory by its owner and out of it by its receiver, at a read and a write per byte each. With w
    ranks, every rank's share being size / w:

    all_reduce      copy in the shares that others reduce        2 (w - 1) / w
                    read w inputs of my share, write the result
                    to my tensor and to shared memory            (w + 2) / w
                    copy out the other shares                    2 (w - 1) / w
    reduce_scatter  as above without the copy out, one write     2 (w - 1) / w + (w + 1) / w
    reduce          the root of a scattered one: reads like all_reduce, writes its share once; or
                    it reads all inputs where they are           min((5 w - 3) / w, w + 1)
    all_gather      copy in my share, copy out the others        2
                    and, out of place, my own to its place       2 / w
    all_to_all      copy in and out all but my own, copy that    4 (w - 1) / w + 2 / w
    gather, scatter the root copies every share, in place all but its own
    broadcast       the root copies in while the others copy out 2
    send_recv       each rank copies in and copies out           4

    Divided by the bandwidth of copying (bytes read + written per second, by all ranks at the same
    time), it gives a floor for the time. A pipeline whose shared buffers stay in a cache can beat
    it, where copies of the whole message go to memory.
    """
    w = world_size
    if w == 1:
        return 0.0
    own = 0 if in_place else 2 / w
    factor = {
        "all_reduce": 2 * (w - 1) / w + (w + 2) / w + 2 * (w - 1) / w,
        "reduce_scatter": 2 * (w - 1) / w + (w + 1) / w,
        "reduce": min((5 * w - 3) / w, w + 1),
        "all_gather": 2 + own,
        "all_to_all": 4 * (w - 1) / w + own,
        "gather": 2 * (w - 1) / w + own,
        "scatter": 2 * (w - 1) / w + own,
        "broadcast": 2.0,
        "send_recv": 4.0,
    }[op]
    return factor * size
