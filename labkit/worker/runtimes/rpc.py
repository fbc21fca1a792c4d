"""Sets up and tears down a rank of torch's RPC."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from labkit.errors.exceptions import LabError
from labkit.ipc.protocol import Offer
from labkit.ipc.stdio import quiet_stderr
from labkit.recording.record import Recorder
from labkit.worker.runtimes.torch import Torch, sharing

if TYPE_CHECKING:
    from labkit.worker.comm.rpc_initialization import RpcOptions


class Rpc(Torch):
    """`torch.distributed.rpc` is initialised, each rank with its name, unless the program does so."""

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
        """Join the RPC group, unless the program starts RPC: torch can do so only once in a process."""
        import torch.distributed as dist
        from torch.distributed import rpc

        if not rpc.is_available():
            raise LabError("runtime='rpc': this build of torch has no torch.distributed.rpc (Linux builds have it)")
        _, notes = self._prepare(offers)
        _hide_optimizer_warning()
        if self.rank_config.starts_rpc:
            return notes
        store = self._store if self.rank_config.rank == 0 else self._connect()
        place = dist.PrefixStore("labkit", store), self.rank_config.rank, self.rank_config.size
        dist.register_rendezvous_handler("labkit", lambda *_, **__: iter([place]))
        with quiet_stderr():  # torch calls a constructor that it has deprecated (pytorch/pytorch#149393)
            rpc.init_rpc(
                self.rank_config.name,
                rank=self.rank_config.rank,
                world_size=self.rank_config.size,
                rpc_backend_options=self._rpc_options().for_torch("labkit://"),
            )
        return notes

    def _about_gpus(self, offers: Sequence[Offer]) -> str:
        """Return that ranks share GPUs; "" if none do. Remote calls carry tensors of the CPU in any case."""
        return f"{shared}." if (shared := sharing(offers)) else ""

    def adapt_initialization(self, recorder: Recorder, record_rpc: Callable[[], None]) -> None:
        """As for torch; and record how many threads serve, if RPC runs."""
        super().adapt_initialization(recorder, record_rpc)
        if not self.rank_config.starts_rpc:
            recorder.ring.serving(self._rpc_options().num_worker_threads)

    def _rpc_options(self) -> RpcOptions:
        from labkit.worker.comm.rpc_initialization import RpcOptions

        return RpcOptions(*self.options.rpc_options)

    def _rpc_name(self) -> str:
        return "" if self.rank_config.starts_rpc else self.rank_config.name

    def tear_down(self) -> None:
        """Shut RPC down without waiting for the other ranks, which may have failed."""
        from torch.distributed import rpc

        from labkit.worker.comm.rpc_initialization import is_running

        if is_running():
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
