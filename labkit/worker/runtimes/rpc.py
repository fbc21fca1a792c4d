"""Sets up and tears down a rank of torch's RPC."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

from labkit.errors.exceptions import LabError
from labkit.ipc.protocol import Offer
from labkit.ipc.stdio import quiet_stderr
from labkit.recording.record import Recorder
from labkit.worker.comm.torch_internals import RPC_START
from labkit.worker.runtimes.torch import Torch, sharing

ALL_GATHER: Final = "_all_gather"  # with which `init_rpc` waits for the other ranks


class Rpc(Torch):
    """`torch.distributed.rpc` is initialised, each rank with its name."""

    serving_threads = 16
    has_rpc = True
    rank_name = "worker{}"
    valid_name = re.compile(r"[A-Za-z0-9_:-]{1,127}")  # what torch.distributed.rpc accepts
    name_error = "{!r} is not a valid RPC name; expected at most 127 letters, digits and _ : - characters"

    def record_operations(self, recorder: Recorder, shared_link: int) -> Callable[[], None]:
        """Record remote calls, and what goes through process groups."""
        from labkit.worker.comm.install import watch_rpc

        return watch_rpc(recorder, self._slow_link(shared_link))

    def set_up(self, offers: Sequence[Offer]) -> list[str]:
        """Join the RPC group."""
        import torch.distributed as dist
        from torch.distributed import rpc

        if not rpc.is_available():
            raise LabError("runtime='rpc': this build of torch has no torch.distributed.rpc (Linux builds have it)")
        _, notes = self._prepare(offers)
        _hide_optimizer_warning()
        name, options = self._rpc_given()
        store = self._store if self.rank_config.rank == 0 else self._connect()
        place = dist.PrefixStore("labkit", store), self.rank_config.rank, self.rank_config.size
        dist.register_rendezvous_handler("labkit", lambda *_, **__: iter([place]))
        first_round = RPC_START[ALL_GATHER] if self.rank_config.starts_rpc and RPC_START.found else None
        if first_round is not None:  # make no call before the program starts RPC itself
            RPC_START.set(ALL_GATHER, lambda *_, **__: None)
        with quiet_stderr():  # torch calls a constructor that it has deprecated (pytorch/pytorch#149393)
            rpc.init_rpc(
                name,
                rank=self.rank_config.rank,
                world_size=self.rank_config.size,
                rpc_backend_options=options.for_torch("labkit://"),
            )
        if first_round is not None:
            RPC_START.set(ALL_GATHER, first_round)
        return notes

    def _about_gpus(self, offers: Sequence[Offer]) -> str:
        """Return that ranks share GPUs; "" if none do. Remote calls carry tensors of the CPU in any case."""
        return f"{shared}." if (shared := sharing(offers)) else ""

    def adapt_initialization(self, recorder: Recorder, record_rpc: Callable[[], None]) -> None:
        """Let a program that starts RPC itself find it initialised."""
        super().adapt_initialization(recorder, record_rpc)
        recorder.ring.serving(self._rpc_given()[1].num_worker_threads)

    def _rpc_given(self) -> tuple[str, Any]:
        from labkit.worker.comm.rpc_initialization import RpcOptions

        return self.rank_config.name, RpcOptions(*self.options.rpc_options)

    def tear_down(self) -> None:
        """Shut RPC down without waiting for the other ranks, which may have failed."""
        from torch.distributed import rpc

        rpc.shutdown(graceful=False)


def _hide_optimizer_warning() -> None:
    """Hide a warning that each DistributedOptimizer issues on each worker and that the student's code cannot avoid.

    torch sets the filter "always" around the warning, so it can only be dropped in `warnings.showwarning`.
    """
    show = warnings.showwarning

    def show_others(message: Warning | str, category: type[Warning], *where: Any, **kwargs: Any) -> None:
        if "`TorchScript` support for functional optimizers" not in str(message):
            show(message, category, *where, **kwargs)

    warnings.showwarning = show_others
