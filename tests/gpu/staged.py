"""A backend for ranks that share a GPU, which NCCL may refuse: copy to the host, gloo, copy back.

Call `register()`, then `dist.init_process_group("staged")`. CPU tensors take the same path, so that tests without a GPU
run the same code. Collectives are complete when the call returns; sends and receives complete in `wait`.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "staged"


def register() -> None:
    """Make the backend known to `torch.distributed`. Calling it again changes nothing."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, StagedGroup, devices=["cpu", "cuda"])


class StagedWork(dist.Work):
    """Waits for pending work, and then calls `finish` once."""

    def __init__(self, under_way: Sequence[Any], finish: Callable[[], None], results: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._under_way = list(under_way)
        self._finish: Callable[[], None] | None = finish
        self._results = list(results)
        self._future: Any = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._under_way:
            work.wait()
        self._under_way = []
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True

    def is_completed(self) -> bool:
        return self._finish is None

    def get_future(self) -> Any:
        self.wait()
        if self._future is None:
            devices = sorted({tensor.device for tensor in self._results if tensor.is_cuda}, key=str)
            self._future = torch.futures.Future(devices=devices or None)
            self._future.set_result(self._results)
        return self._future


def _done(results: Sequence[Tensor]) -> StagedWork:
    work = StagedWork([], lambda: None, results)
    work.wait()
    return work


def _host(tensor: Tensor) -> Tensor:
    """Return a contiguous copy on the host."""
    return tensor.detach().to("cpu", copy=True).contiguous()


class StagedGroup(dist.ProcessGroup):
    """A process group whose ranks exchange tensors through the host."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._rank, self._size = rank, size
        self._name = ""

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    # The base class asks the backends of its devices for the name, and it has no backends.
    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> StagedWork:
        operation = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        for tensor in tensors:
            tensor.copy_(self._reduced(tensor, operation))
        return _done(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> StagedWork:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> StagedWork:
        for tensor in tensors:
            reduced = self._reduced(tensor, opts.reduceOp)
            if self._rank == opts.rootRank:
                tensor.copy_(reduced)
        return _done(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> StagedWork:
        for tensor in tensors:
            host = _host(tensor)
            self._gloo.broadcast([host], opts).wait()
            tensor.copy_(host)
        return _done(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> StagedWork:
        for gathered, mine in zip(outputs, inputs, strict=True):
            for target, host in zip(gathered, self._gathered(mine), strict=True):
                target.copy_(host.view(target.shape))
        return _done([target for gathered in outputs for target in gathered])

    def _allgather_base(self, output: Tensor, mine: Tensor, opts: Any = None) -> StagedWork:
        output.copy_(torch.cat([host.flatten() for host in self._gathered(mine)]).view(output.shape))
        return _done([output])

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> StagedWork:
        for output, mine in zip(outputs, inputs, strict=True):
            self._allgather_base(output, mine)
        return _done(outputs)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> StagedWork:
        for output, parts in zip(outputs, inputs, strict=True):
            whole = torch.cat([part.flatten() for part in parts])
            reduced = self._reduced(whole, opts.reduceOp).split([part.numel() for part in parts])
            output.copy_(reduced[self._rank].view(output.shape))
        return _done(outputs)

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, opts: Any) -> StagedWork:
        reduced = self._reduced(whole, opts.reduceOp).flatten()
        output.copy_(reduced.chunk(self._size)[self._rank].view(output.shape))
        return _done([output])

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> StagedWork:
        for output, whole in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, whole, opts)
        return _done(outputs)

    def _start_coalescing(self, device: torch.device) -> None:
        """Begin a group of operations; here each completes on its own."""

    def _end_coalescing(self, device: torch.device) -> StagedWork:
        return _done(())

    # The names of torch 2.13 and later.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def alltoall_base(
        self, output: Tensor, outgoing: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> StagedWork:
        received = torch.empty_like(output, device="cpu", memory_format=torch.contiguous_format)
        self._gloo.alltoall_base(received, _host(outgoing), output_splits, input_splits).wait()
        output.copy_(received)
        return _done([output])

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> StagedWork:
        outgoing = torch.cat([_host(part).flatten() for part in inputs])
        lengths = [part.numel() for part in outputs]
        received = torch.empty(sum(lengths), dtype=outgoing.dtype)
        self._gloo.alltoall_base(received, outgoing, lengths, [part.numel() for part in inputs]).wait()
        for output, part in zip(outputs, received.split(lengths), strict=True):
            output.copy_(part.view(output.shape))
        return _done(outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> StagedWork:
        gathered = self._gathered(inputs[0])
        if self._rank == opts.rootRank:
            for target, host in zip(outputs[0], gathered, strict=True):
                target.copy_(host.view(target.shape))
        return _done(outputs[0] if outputs else ())

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> StagedWork:
        received = _host(outputs[0])
        self._gloo.scatter([received], [[_host(part) for part in parts] for parts in inputs], opts).wait()
        outputs[0].copy_(received)
        return _done(outputs)

    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> StagedWork:
        hosts = [_host(tensor) for tensor in tensors]
        # The sent copy has to live until it has been received.
        return StagedWork([self._gloo.send(hosts, target, tag)], hosts.clear, tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> StagedWork:
        hosts = [_host(tensor) for tensor in tensors]
        return StagedWork([self._gloo.recv(hosts, source, tag)], lambda: _fill(tensors, hosts), tensors)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> StagedWork:
        hosts = [_host(tensor) for tensor in tensors]
        return StagedWork([self._gloo.recv_anysource(hosts, tag)], lambda: _fill(tensors, hosts), tensors)

    def barrier(self, opts: Any = None) -> StagedWork:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._gloo.barrier().wait()
        return _done(())

    def abort(self) -> None:
        self._gloo.abort()

    def shutdown(self) -> None:
        self._gloo.shutdown()

    def _reduced(self, tensor: Tensor, operation: Any) -> Tensor:
        averaged = operation == dist.ReduceOp.AVG
        host = _host(tensor)
        # 16-bit types are added in fp32, as NCCL does internally.
        summed = host.float() if host.dtype in (torch.float16, torch.bfloat16) else host
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if averaged else operation
        self._gloo.allreduce([summed], options).wait()
        return (summed / self._size if averaged else summed).to(host.dtype)

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        host = _host(tensor)
        # As bytes: gloo lacks some types.
        mine = host.flatten().view(torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self._size)]
        self._gloo.allgather([parts], [mine]).wait()
        return [part.view(host.dtype) for part in parts]


def _fill(tensors: list[Tensor], hosts: list[Tensor]) -> None:
    for tensor, host in zip(tensors, hosts, strict=True):
        tensor.copy_(host)
