"""Arrays that share memory and are sent together."""

from __future__ import annotations

import itertools
from typing import Any

import cells as in_cells
import numpy as np
import pytest

import labkit as lab
from labkit.ipc import pickling

SIZES = (12, 120_000)  # inside the message, and out of band


def travel(value: Any) -> tuple[Any, int]:
    """A round trip in one process, and its number of bytes."""
    payload = pickling.pack(value)
    nbytes = len(payload.data) + sum(count for _, count in payload.regions)
    return pickling.unpack(payload), nbytes


def views(x: Any) -> dict[str, Any]:
    """An array with views of it, and views alone that overlap."""
    table = x.reshape(3, -1)
    return {
        "whole and part": (x, x[:5]),
        "part and whole": (x[2:8], x),
        "another shape": (table, x),
        "transposed": (table.T, x),
        "backwards": (x[::-1], x),
        "every other": (x[::2], x[1::2], x),
        "overlapping parts": (x[:6], x[4:10]),
        "a column and a row": (table[:, 1], table[1]),
        "other bits": (x.view(np.int64), x),
        "broadcast": (np.broadcast_to(x[:4], (2, 4)), x),
        "in a column-major array": (np.asfortranarray(table), np.asfortranarray(table)),
    }


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", views(np.arange(12.0)))
def test_arrays_keep_sharing_memory(name: str, size: int) -> None:
    given = views(np.arange(float(size)))[name]
    back, _ = travel(given)
    for there, here in zip(back, given, strict=True):
        np.testing.assert_array_equal(there, here)
        assert (there.strides, there.dtype, there.flags.writeable) == (here.strides, here.dtype, here.flags.writeable)
    for one, other in itertools.combinations(range(len(given)), 2):
        assert np.shares_memory(back[one], back[other]) == np.shares_memory(given[one], given[other])


def test_a_view_of_a_column_major_array() -> None:
    x = np.asfortranarray(np.arange(12.0).reshape(3, 4))
    (whole, column), _ = travel((x, x[:, 1]))
    column[0] = 77
    assert whole[0, 1] == 77
    assert whole.flags.f_contiguous


def test_a_view_alone_sends_only_its_own_bytes() -> None:
    x = np.zeros(1_000_000)
    for given in (x[:5], (x[:5], x[10:15]), (x[:400:100], x[1:400:100])):
        back, nbytes = travel(given)
        assert nbytes < 5000
        np.testing.assert_array_equal(back, given)


def test_overlapping_views_send_what_they_cover() -> None:
    x = np.arange(1_000_000.0)
    (one, other, far), nbytes = travel((x[:1000], x[500:1500], x[900_000:900_010]))
    assert nbytes < 15_000
    one[500] = -1
    assert other[0] == -1
    assert far[0] == 900_000


def test_nested_arrays_share_memory_and_repeated_ones_are_sent_once() -> None:
    class Model:
        def __init__(self) -> None:
            self.flat = np.zeros(10)
            self.parts = {"w": self.flat[:6].reshape(2, 3), "b": self.flat[6:]}

    model = Model()
    (back, again), _ = travel((model, model.parts["w"]))
    back.flat[:] = 3
    assert back.parts["w"].tolist() == [[3, 3, 3], [3, 3, 3]]
    assert back.parts["b"].tolist() == [3] * 4
    assert again is back.parts["w"]


def test_arrays_made_during_pickling_are_not_confused() -> None:
    class Made:
        def __init__(self, value: int) -> None:
            self.value = value

        def __reduce__(self) -> Any:
            fresh = np.full(10, self.value)
            return tuple, ([fresh, fresh[:3]],)

    back, _ = travel([Made(i) for i in range(50)])
    assert [(whole[0], part[0]) for whole, part in back] == [(i, i) for i in range(50)]


@pytest.mark.parametrize("size", SIZES)
def test_arrays_and_tensors_keep_sharing_memory(size: int) -> None:
    torch = pytest.importorskip("torch")
    x, parameter = np.arange(float(size)), torch.nn.Parameter(torch.zeros(size))
    given = {
        "array": x, "tensor": torch.from_numpy(x), "again": torch.from_numpy(x), "of a part": torch.from_numpy(x[2:6]),
        "column": torch.from_numpy(x).reshape(4, -1)[:, 1],
        "parameter": parameter, "of it": parameter.detach().numpy()[1:],
        "alone": torch.zeros(size), "array alone": np.zeros(size),
    }  # fmt: skip
    back, _ = travel(given)
    for name, value in given.items():
        assert type(back[name]) is type(value)
        assert back[name].tolist() == value.tolist()
    assert back["parameter"].requires_grad
    back["array"][:] = -1
    back["of it"][:] = -2
    shown = {name: set(value.flatten().tolist()) for name, value in back.items()}
    assert all(shown[name] == {-1} for name in ("tensor", "again", "of a part", "column"))
    assert shown["parameter"] == {0, -2}
    assert shown["alone"] == shown["array alone"] == {0}
    back["tensor"][:] = -3
    assert set(back["array"].tolist()) == {-3}


def test_a_read_only_array_stays_so_beside_its_tensor() -> None:
    torch = pytest.importorskip("torch")
    x = np.arange(12.0)
    tensor, view = torch.from_numpy(x), x[:]
    view.flags.writeable = False
    (there, array), _ = travel((tensor, view))
    there[0] = 5
    assert array[0] == 5
    assert not array.flags.writeable


@pytest.mark.processes
def test_sharing_holds_between_arguments_globals_and_results(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    cells = in_cells.Cells(in_cells.new_main(monkeypatch))
    cells("""
        import numpy as np, torch
        weights = np.zeros(20_000)
        tensor = torch.from_numpy(weights)
        def f(argument):
            weights[0] = 1
            argument[1] = 2
            return tensor[:2].tolist(), weights, tensor
    """)
    with lab.Group(2) as group:
        for seen, weights, tensor in group.run(cells.f, cells.tensor).results:
            assert seen == [1, 2]
            weights[2] = 3
            assert tensor[:4].tolist() == [1, 2, 3, 0]
    assert not cells.weights.any()


def test_object_arrays_and_empty_arrays() -> None:
    things, empty = np.array([{}, "a"], object), np.zeros((0, 3))
    back, _ = travel((things, things[:1], empty, empty[:, :1], np.array(5.0)))
    assert back[0].tolist() == [{}, "a"]
    assert back[3].shape == (0, 1)
    assert back[4] == 5


@pytest.mark.processes
def test_a_by_hand_model_of_views_is_trained_in_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a flat vector and its views were sent as separate copies, the step silently had no effect."""
    cells = in_cells.Cells(in_cells.new_main(monkeypatch))
    cells(
        """
        import numpy as np
        flat = np.ones(6)
        weights, bias = flat[:4].reshape(2, 2), flat[4:]
        def step():
            flat[:] -= 0.5
            return weights.sum(), bias.sum(), np.shares_memory(flat, bias)
        """
    )
    with lab.Group(1, runtime="bare") as group:
        assert group.run(cells.step).results == [(2.0, 1.0, True)]
        assert cells.flat.tolist() == [1.0] * 6
