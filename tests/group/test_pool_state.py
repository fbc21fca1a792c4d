"""Which runs the processes of a group may serve, by what has happened in them; without processes."""

from __future__ import annotations

import pytest

from labkit.group.pool_state import Phase, PoolState, Request
from labkit.worker.runtimes.base import Runtime

CALL, CELL = Request(cell=False, starts_rpc=False), Request(cell=True, starts_rpc=False)
RPC_CALL, RPC_CELL = Request(cell=False, starts_rpc=True), Request(cell=True, starts_rpc=True)
ALL = {"call": CALL, "cell": CELL, "rpc call": RPC_CALL, "rpc cell": RPC_CELL}


class Fresh(Runtime):
    """As TensorFlow: each run of a function needs new processes."""

    fresh_each_run = True


def after(*runs: Request, kind: type[Runtime] = Runtime, starts_rpc: bool = False, framework_spent: bool = False) -> set[str]:
    """The runs that processes may serve which have served some already."""
    state = PoolState(kind, starts_rpc=starts_rpc)
    state.set_up()
    for run in runs:
        assert state.may_serve(run)
        state.begin(run)
        assert not any(state.may_serve(request) for request in ALL.values()), "one run at a time"
        state.framework_spent |= framework_spent
        state.end()
        assert state.phase is Phase.IDLE
    return {name for name, request in ALL.items() if state.may_serve(request)}


def test_runs_share_processes() -> None:
    assert after() == {"call", "cell", "rpc cell"}
    assert after(CALL, CELL, CALL) == {"call", "cell", "rpc cell"}


def test_a_function_that_starts_rpc_gets_processes_without_it_and_no_other_function_does() -> None:
    assert after(starts_rpc=True) == {"cell", "rpc call", "rpc cell"}
    assert after(RPC_CALL, starts_rpc=True) == {"cell", "rpc call", "rpc cell"}


def test_where_the_framework_is_spent_only_cells_go_on_after_cells() -> None:
    assert after(CELL, framework_spent=True) == {"cell"}
    assert after(CELL, CELL, framework_spent=True) == {"cell"}
    assert after(CALL, framework_spent=True) == set()
    assert after(RPC_CALL, starts_rpc=True, framework_spent=True) == set()


def test_where_each_run_is_fresh_cells_share_until_a_function_is_called() -> None:
    assert after(kind=Fresh) == {"call", "cell", "rpc cell"}
    assert after(CELL, kind=Fresh) == {"cell", "rpc cell"}
    assert after(CALL, kind=Fresh) == set()


@pytest.mark.parametrize("reached", [Phase.STARTING, Phase.IDLE, Phase.RUNNING])
@pytest.mark.parametrize("end", [Phase.SPENT, Phase.CLOSED])
def test_spent_and_closed_are_final(reached: Phase, end: Phase) -> None:
    state = PoolState(Runtime, starts_rpc=False)
    if reached is not Phase.STARTING:
        state.set_up()
    if reached is Phase.RUNNING:
        state.begin(CALL)
    assert state.phase is reached
    assert not state.spent
    if end is Phase.SPENT:
        state.spend()
    else:
        assert state.close()
    for go_on in (state.set_up, lambda: state.begin(CALL), state.end):
        go_on()
        assert state.phase is end
        assert state.spent
        assert not state.may_serve(CELL)
    state.spend()
    assert state.close() is (end is Phase.SPENT), "the processes are ended once"
    assert state.phase is Phase.CLOSED
