"""Scenarios: every function of torch.distributed that moves tensors or objects."""
import torch
import torch.distributed as dist


def scenario(function):
    function.is_scenario = True
    return function


@scenario
def one_of_each(c):
    """Other types, sizes, operations and memory of the same functions: src/comm/backend_testing.cpp."""
    results = []
    for dtype, op in ((torch.float32, dist.ReduceOp.SUM), (torch.bfloat16, dist.ReduceOp.SUM),
                      (torch.int64, dist.ReduceOp.MAX), (torch.int32, dist.ReduceOp.BXOR)):
        tensor = c.whole(1000, dtype=dtype)
        dist.all_reduce(tensor, op)
        results.append(tensor)
    for root in range(c.size):
        sent, reduced = c.whole(50, slot=root), c.whole(40, slot=root)
        dist.broadcast(sent, root)
        dist.reduce(reduced, root, dist.ReduceOp.MAX)
        results += [sent, *([reduced] if c.rank == root else [])]  # elsewhere it is undefined what remains
    tensor = c.whole(3, 5)
    outputs, whole, stacked = [torch.zeros(3, 5) for _ in range(c.size)], torch.zeros(c.size * 3, 5), torch.zeros(c.size, 3, 5)
    dist.all_gather(outputs, tensor)
    dist.all_gather_into_tensor(whole, tensor)
    # A new first dimension for the ranks: Gloo refuses this form, NCCL has it.
    if c.over_gloo:
        stacked = torch.stack(outputs)
    else:
        dist.all_gather_into_tensor(stacked, tensor)
    inputs, from_list, from_tensor = c.whole(c.size * 13), torch.zeros(13), torch.zeros(13)
    dist.reduce_scatter(from_list, list(inputs.clone().chunk(c.size)))
    dist.reduce_scatter_tensor(from_tensor, inputs)
    return [*results, outputs, whole, stacked, from_list, from_tensor]


@scenario
def average_and_premultiplied_sum(c):
    """FSDP2 asks for these. Computed directly where Gloo lacks them: whole numbers, scaled by a power of two."""
    results = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        every = c.every(17, dtype=dtype)
        for op, factor in ((dist.ReduceOp.AVG, None), (dist._make_nccl_premul_sum(0.25), 0.25)):
            expected = torch.stack(every).double().sum(0)
            expected = (expected / c.size if factor is None else expected * factor).to(dtype)
            if c.over_gloo:
                results += [expected, expected[:1]]
                continue
            tensor = c.whole(17, dtype=dtype)
            dist.all_reduce(tensor, op)
            results.append(tensor)
            # Part `rank` of the inputs, one element each, padded to the group.
            padded = c.whole(c.size, dtype=dtype)
            output = torch.empty(1, dtype=dtype)
            dist.reduce_scatter_tensor(output, padded, op)
            sums = [output.clone() for _ in range(c.size)]
            dist.all_gather(sums, output)
            results.append(sums[0])
    return results


@scenario
def asynchronous_with_futures(c):
    """Callbacks of futures run, in order, with the result; works may be waited for in any order."""
    tensors = [c.whole(100 + i, slot=i) for i in range(6)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    doubled = [work.get_future().then(lambda future: future.value()[0] * 2) for work in works]
    for work in reversed(works):
        work.wait()
    results = [future.wait() for future in doubled]
    assert all(work.is_completed() for work in works)
    future = dist.all_reduce(c.whole(5), async_op=True).get_future()
    return [*results, *tensors, future.wait()[0], torch.futures.collect_all(doubled).wait()[0].value()]


@scenario
def all_gather_of_different_sizes(c):
    """Gloo refuses them; NCCL's binding and ours take them."""
    every = [c.whole(2 * r + 1, rank=r) if c.over_gloo else None for r in range(c.size)]
    if c.over_gloo:
        return every
    outputs = [torch.zeros(2 * r + 1) for r in range(c.size)]
    dist.all_gather(outputs, c.whole(2 * c.rank + 1))
    return outputs


@scenario
def gather_and_scatter(c):
    results = []
    for root in range(c.size):
        tensor = c.whole(6, 2, slot=root)
        outputs = [torch.zeros(6, 2) for _ in range(c.size)] if c.rank == root else None
        dist.gather(tensor, outputs, dst=root)
        inputs = [c.whole(5, slot=r) for r in range(c.size)] if c.rank == root else None
        part = torch.zeros(5)
        dist.scatter(part, inputs, src=root)
        results += [outputs, part]
    return results


@scenario
def all_to_all(c):
    results = []
    for dtype in (torch.float32, torch.int64, torch.bfloat16):
        whole = c.whole(c.size * 3, 2, dtype=dtype)
        output = torch.zeros_like(whole)
        dist.all_to_all_single(output, whole)
        # Rank r sends s + 1 rows to rank s: r-dependent sizes on one side; none at all from rank 0 to rank 0.
        input_rows = [0 if c.rank == r == 0 else r + 1 for r in range(c.size)]
        output_rows = [0 if c.rank == r == 0 else c.rank + 1 for r in range(c.size)]
        uneven = torch.zeros(sum(output_rows), 2, dtype=dtype)
        dist.all_to_all_single(uneven, c.whole(sum(input_rows), 2, dtype=dtype), output_rows, input_rows)
        results += [output, uneven]
    return results


@scenario
def all_to_all_of_lists(c):
    """Gloo lacks the list form: computed directly."""
    if c.over_gloo:
        return [c.whole(r + c.rank + 1, rank=r, slot=c.rank) for r in range(c.size)]
    inputs = [c.whole(c.rank + r + 1, slot=r) for r in range(c.size)]
    outputs = [torch.zeros(r + c.rank + 1) for r in range(c.size)]
    dist.all_to_all(outputs, inputs)
    return outputs


@scenario
def messages(c):
    """send and recv, tags out of order, from any source, both ways at once."""
    left, right = (c.rank - 1) % c.size, (c.rank + 1) % c.size
    results = []
    outputs = {tag: torch.zeros(4 + tag) for tag in (1, 2, 3)}
    sends = [dist.isend(c.whole(4 + tag, slot=tag), right, tag=tag) for tag in (1, 2, 3)]
    receives = [dist.irecv(outputs[tag], left, tag=tag) for tag in (3, 1, 2)]
    for work in sends + receives:
        work.wait()
    results.append(outputs)
    if c.rank == 0:
        received = {}
        for _ in range(c.size - 1):
            tensor = torch.zeros(3)
            source = dist.recv(tensor, tag=9)
            received[source] = tensor
        results.append(dict(sorted(received.items())))
    else:
        dist.send(c.whole(3), 0, tag=9)
    incoming = torch.zeros(10)
    operations = [dist.P2POp(dist.isend, c.whole(10), right), dist.P2POp(dist.irecv, incoming, left)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    # A large message: longer than any staging buffer.
    large = torch.zeros(1_000_003)
    operations = [dist.P2POp(dist.irecv, large, left), dist.P2POp(dist.isend, c.whole(1_000_003), right)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    empty = torch.zeros(0)
    works = [dist.isend(torch.zeros(0), right), dist.irecv(empty, left)]
    for work in works:
        work.wait()
    return [*results, incoming, large]


@scenario
def coalesced(c):
    results = []
    tensors = [c.whole(5, slot=1), c.whole(3, 4, slot=2)]
    dist.all_reduce_coalesced(tensors)
    results += tensors
    managed = [c.whole(5 + i, slot=i) for i in range(3)]
    with dist._coalescing_manager():
        for tensor in managed:
            dist.all_reduce(tensor)
    results += managed
    inputs = [c.whole(4 + i, slot=i) for i in range(3)]
    outputs = [torch.zeros(c.size * tensor.numel()) for tensor in inputs]
    with dist._coalescing_manager():
        for output, tensor in zip(outputs, inputs):
            dist.all_gather_into_tensor(output, tensor)
    results += outputs
    parts = [torch.zeros(4 + i) for i in range(3)]
    wholes = [c.whole(c.size * (4 + i), slot=i) for i in range(3)]
    with dist._coalescing_manager():
        for part, whole in zip(parts, wholes):
            dist.reduce_scatter_tensor(part, whole)
    return results + parts


@scenario
def functional(c):
    """The functional collectives, which DTensor and compiled code use."""
    import torch.distributed._functional_collectives as functional
    group = dist.group.WORLD
    tensor = c.whole(c.size * 2, 3)
    results = [functional.all_reduce(tensor, "sum", group), functional.all_gather_tensor(tensor, 0, group),
               functional.reduce_scatter_tensor(tensor, "sum", 0, group),
               functional.all_to_all_single(tensor, None, None, group)]
    results += functional.all_reduce_coalesced([tensor, tensor + 1], "sum", group)
    return [functional.wait_tensor(result) for result in results]


@scenario
def subgroups(c):
    """Every rank makes every group; overlapping groups are used at once, a group of one among them."""
    sets = [list(range(c.size))[::-1], [0, c.size - 1], list(range(1, c.size)), [c.rank]]
    results = []
    groups = [(ranks, dist.new_group(ranks)) for ranks in sets[:3]]
    for r in range(c.size):
        group = dist.new_group([r])
        if r == c.rank:
            groups.append(([r], group))
    works = []
    for i, (ranks, group) in enumerate(groups):
        if c.rank in ranks:
            tensor = c.whole(20, slot=i)
            results.append(tensor)
            works.append(dist.all_reduce(tensor, group=group, async_op=True))
    for work in reversed(works):
        work.wait()
    for ranks, group in groups:
        if c.rank in ranks and len(ranks) > 1:
            tensor = c.whole(4)
            dist.broadcast(tensor, src=ranks[0], group=group)
            objects = [None] * len(ranks)
            dist.all_gather_object(objects, {"rank": c.rank}, group=group)
            results += [tensor, objects]
    dist.barrier()
    return results


@scenario
def objects(c):
    mine = {"rank": c.rank, "tensor": c.whole(3 + c.rank), "text": "x" * (100 * c.rank)}
    results = []
    everyone = [None] * c.size
    dist.all_gather_object(everyone, mine)
    results.append(everyone)
    for root in range(c.size):
        listed = [mine, c.rank, None] if c.rank == root else [None] * 3
        dist.broadcast_object_list(listed, src=root)
        gathered = [None] * c.size if c.rank == root else None
        dist.gather_object(mine, gathered, dst=root)
        own = [None]
        dist.scatter_object_list(own, [(r, mine) for r in range(c.size)] if c.rank == root else None, src=root)
        results += [listed, gathered, own]
    if c.rank == 0:
        dist.send_object_list([mine], dst=1)
    elif c.rank == 1:
        received = [None]
        dist.recv_object_list(received, src=0)
        results.append(received)
    return results


@scenario
def refusals(c):
    """A call that is refused over isograd gets a reason, and the group stays usable."""
    if c.over_gloo:
        return sum(c.every(3))
    c.refused(lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.BXOR), "; expected ")
    c.refused(lambda: dist.all_reduce(torch.ones(6)[::2]), "contiguous")
    c.refused(lambda: dist.all_reduce(torch.ones(3, dtype=torch.complex64), dist.ReduceOp.MAX), "complex")
    c.refused(lambda: dist.monitored_barrier(), "GLOO")
    c.refused(lambda: dist.broadcast(torch.ones(3), src=c.size), "")
    c.refused(lambda: dist.all_gather_into_tensor(torch.ones(c.size * 3 + 1), torch.ones(3)), "")
    c.refused(lambda: dist.all_reduce(torch.ones(3).to_sparse()), "contiguous")
    tensor = c.whole(3)
    dist.all_reduce(tensor)
    return tensor
