"""The context that a scenario is given, and how the results of two runs are compared."""
import dataclasses

import torch


@dataclasses.dataclass
class Close:
    """A result that may differ by `bound`, element by element: sums of floats in another order."""
    value: torch.Tensor
    bound: torch.Tensor


def sum_bound(magnitudes, terms):
    """How far two sums of `terms` numbers, in any orders, lie apart: each is within (n - 1) u sum |x| of the exact
    sum to first order (Higham, Accuracy and Stability, 4.2). The factor 1.01 covers the higher orders."""
    unit = torch.finfo(magnitudes.dtype).eps / 2
    return 2 * 1.01 * (terms - 1) * unit * magnitudes


class Context:
    def __init__(self, rank, size, backend, seed, faulty):
        self.rank, self.size, self.backend, self.seed = rank, size, backend, seed
        self.over_gloo = backend == "gloo"
        self.faulty = faulty and not self.over_gloo and rank == size - 1
        self.planted = 0

    def plant(self, tensor):
        """Where the fault goes in: the first element changes."""
        if self.faulty and tensor.numel():
            self.planted += 1
            flat = tensor.detach().view(-1)
            flat[0] = ~flat[0] if tensor.dtype == torch.bool else flat[0] + 1
        return tensor

    def whole(self, *shape, dtype=torch.float32, rank=None, slot=0):
        """Small whole numbers that tell rank, slot and place: their sums are exact in any order."""
        rank = self.rank if rank is None else rank
        numel = int(torch.Size(shape).numel())
        values = (torch.arange(numel) * (slot + 1) + 3 * rank + slot) % 7
        tensor = (values % 2 == 0) if dtype == torch.bool else values.to(dtype)
        tensor = tensor.reshape(shape)
        return self.plant(tensor) if rank == self.rank else tensor

    def every(self, *shape, dtype=torch.float32, slot=0):
        """The result of whole() on each rank, without the fault."""
        context = Context(-1, self.size, "gloo", self.seed, False)
        return [context.whole(*shape, dtype=dtype, rank=r, slot=slot) for r in range(self.size)]

    def generator(self, *salt):
        return torch.Generator().manual_seed(hash((self.seed, *salt)) % 2**31)

    def normal(self, *shape, salt=0, rank=None):
        rank = self.rank if rank is None else rank
        tensor = torch.randn(shape, generator=self.generator(rank, salt))
        return self.plant(tensor) if rank == self.rank else tensor

    def refused(self, call, *words):
        """`call` must raise an exception whose text holds `words`."""
        try:
            call()
        except Exception as error:
            missing = [word for word in words if word not in str(error)]
            assert not missing, f"the error lacks {missing}: {error}"
            return
        raise AssertionError("the call was not refused")


def difference(left, right, place="result"):
    """Where two results differ, or None."""
    if type(left) is not type(right):
        return f"{place}: {type(left).__name__} and {type(right).__name__}"
    if isinstance(left, Close):
        distance = (left.value.double() - right.value.double()).abs()
        outside = (distance > torch.maximum(left.bound, right.bound).double()) | distance.isnan()
        if outside.any():
            return f"{place}: {int(outside.sum())} of {outside.numel()} outside the bound, by {distance.max():.3g}"
        return None
    if isinstance(left, torch.Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            return f"{place}: {left.dtype} {tuple(left.shape)} and {right.dtype} {tuple(right.shape)}"
        if torch.equal(left, right):
            return None
        first = int((left != right).flatten().nonzero()[0])
        return (f"{place}: {int((left != right).sum())} of {left.numel()} elements differ, the first is "
                f"{left.flatten()[first].item()} and {right.flatten()[first].item()}")
    if isinstance(left, dict):
        if left.keys() != right.keys():
            return f"{place}: keys {sorted(left)} and {sorted(right)}"
        pairs = [(f"{place}[{key!r}]", left[key], right[key]) for key in left]
    elif isinstance(left, (list, tuple)):
        if len(left) != len(right):
            return f"{place}: {len(left)} and {len(right)} entries"
        pairs = [(f"{place}[{i}]", a, b) for i, (a, b) in enumerate(zip(left, right))]
    else:
        return None if left == right else f"{place}: {left!r} and {right!r}"
    return next((text for where, a, b in pairs if (text := difference(a, b, where))), None)
