"""Lesson 07: a remote call, calls one by one and all at once, a remote reference, a parameter server, a lost update."""

from __future__ import annotations

from tools.diagrams.kit import COMMUNICATION, COMPUTE, GOLD, INK, OLIVE, PINK, VIOLET, Diagram, diagram


@diagram("07_call", 700, 216, "a remote procedure call")
def call(picture: Diagram) -> None:
    """A remote procedure call. The master sends the function's name and the arguments to worker1, which takes the
    latency alpha. Worker1 finds the function by its name, runs it, and sends the result back, which takes alpha again.
    The master waits the whole time."""
    picture.text(20, 50, "master", anchor="start", bold=True)
    picture.text(20, 170, "worker1", anchor="start", bold=True)
    picture.line((100, 50), (184, 50))
    picture.line((580, 50), (690, 50))
    picture.line((100, 170), (690, 170))
    picture.box(112, 34, 72, 32, "calls", fill=COMPUTE)
    picture.box(184, 34, 396, 32, "waits", dashed=True)
    picture.box(580, 34, 96, 32, "goes on", fill=COMPUTE)
    picture.box(304, 154, 156, 32, "runs the function", fill=COMPUTE)
    picture.arrow((184, 66), (304, 154), color=COMMUNICATION)
    picture.arrow((460, 154), (580, 66), color=COMMUNICATION)
    picture.text(270, 98, "name and arguments", anchor="start", color=COMMUNICATION, size=13)
    picture.text(494, 106, "result", anchor="end", color=COMMUNICATION, size=13)
    picture.text(244, 204, "α", size=14)
    picture.text(382, 204, "t", size=14)
    picture.text(520, 204, "α", size=14)
    for x1, x2 in ((184, 304), (304, 460), (460, 580)):
        picture.line((x1, 192), (x2, 192), width=1)
        for x in (x1, x2):
            picture.line((x, 188), (x, 196), width=1)
    picture.text(680, 14, "time →", anchor="end", size=12)


@diagram("07_sync_async", 720, 284, "synchronous and asynchronous calls")
def sync_async(picture: Diagram) -> None:
    """Four calls of the master to worker1. With rpc_sync, each call is sent when the reply to the one before has
    arrived, so there are four round trips. With rpc_async, all four are sent at once, and the round trips overlap."""
    rows = (
        (14, "rpc_sync", [0, 130, 260, 390], "4 · (2α + t)"),
        (160, "rpc_async, then wait_all", [0, 12, 24, 36], "about 2α + t"),
    )
    for top, title, starts, time in rows:
        left = 100.0
        picture.text(left, top, title, anchor="start", bold=True)
        picture.text(20, top + 52, "master", anchor="start", size=13)
        picture.text(20, top + 112, "worker1", anchor="start", size=13)
        picture.line((left, top + 52), (710, top + 52))
        picture.line((left, top + 112), (710, top + 112))
        for start in starts:
            x = left + 10 + start
            picture.arrow((x, top + 52), (x + 55, top + 112), color=COMMUNICATION, width=1.6)
            picture.arrow((x + 65, top + 112), (x + 120, top + 52), color=COMMUNICATION, width=1.6, dashed=True)
        picture.box(left + 10, top + 16, starts[-1] + 120, 24, time, fill=OLIVE, size=13)


@diagram("07_reference", 700, 220, "a remote reference")
def reference(picture: Diagram) -> None:
    """A tensor lives in worker1, its owner. The master and worker2 each hold an RRef, a small card that says where the
    object is. Calling through the reference runs a method on worker1; to_here brings a copy to the caller."""
    for x, name in ((10, "master"), (260, "worker1, the owner"), (510, "worker2")):
        picture.box(x, 40, 180, 170)
        picture.text(x + 90, 24, name, bold=True)
    picture.box(305, 100, 90, 50, "object", fill=OLIVE, bold=True)
    for x in (40, 580):
        picture.box(x, 62, 80, 34, "RRef", fill=PINK)
    picture.arrow((120, 79), (304, 112), color=COMMUNICATION, bend=8)
    picture.arrow((580, 79), (396, 112), color=COMMUNICATION, bend=-8)
    picture.text(224, 70, "call", color=COMMUNICATION, size=13)
    picture.text(476, 70, "call", color=COMMUNICATION, size=13)
    picture.box(40, 150, 80, 40, "copy", outline=OLIVE, dashed=True)
    picture.arrow((304, 138), (122, 170), color=OLIVE)
    picture.text(225, 176, "to_here()", color=OLIVE, size=13)


@diagram("07_server", 720, 250, "a parameter server with batched updates")
def server(picture: Diagram) -> None:
    """A parameter server with batched updates. Each of two trainers computes a gradient on its own data and sends it to
    the server. When both gradients are there, the server takes one step with their mean and answers both calls with the
    new weights."""
    for y, number in ((40, 1), (170, 2)):
        picture.box(10, y, 170, 62, f"worker{number}: its data,\na copy of the weights", fill=VIOLET, size=13)
        picture.arrow((184, y + 18), (330, 104 if number == 1 else 130), color=COMMUNICATION)
        picture.arrow((330, 120 if number == 1 else 146), (184, y + 42), color=OLIVE)
        picture.box(338, 98 if number == 1 else 130, 40, 24, f"g{'₁₂'[number - 1]}", fill=GOLD, size=13)
    picture.text(262, 48, "gradient", color=COMMUNICATION, size=13)
    picture.text(262, 220, "new weights", color=OLIVE, size=13)
    picture.box(326, 60, 384, 130)
    picture.text(518, 44, "master: the parameter server", bold=True)
    picture.arrow((384, 126), (452, 126), color=INK)
    picture.text(418, 108, "both there", size=12)
    picture.box(460, 100, 116, 52, "one step with\n(g₁ + g₂) / 2", fill=GOLD, size=13)
    picture.arrow((578, 126), (612, 126), color=INK)
    picture.box(618, 100, 82, 52, "weights", fill=OLIVE, size=13)


@diagram("07_lost_update", 720, 250, "a lost update")
def lost_update(picture: Diagram) -> None:
    """A lost update. Worker1 and worker2 both read the counter while it is 5. Each adds 1 and writes 6. Two additions
    were made, and the counter is 6 instead of 7."""
    for y, name in ((40, "worker1"), (126, "counter"), (212, "worker2")):
        picture.text(16, y, name, anchor="start", bold=True)
        picture.line((90, y), (710, y))
    picture.text(706, 14, "time →", anchor="end", size=12)
    picture.box(100, 112, 44, 28, "5", fill=OLIVE)
    for y, toward, x in ((40, 124, 0), (212, 128, 40)):
        picture.arrow((160 + x, toward), (220 + x, y + (14 if y < 100 else -14)), "", color=VIOLET)
        picture.box(226 + x, y - 14, 100, 28, "5 + 1 = 6", fill=GOLD, size=13)
        picture.arrow((330 + 3 * x, y + (14 if y < 100 else -14)), (392 + 3 * x, 112 if y < 100 else 140), color=COMMUNICATION)
    picture.text(184, 66, "get()", anchor="end", size=13)
    picture.text(218, 184, "get()", anchor="end", size=13)
    picture.text(372, 66, "set(6)", anchor="start", color=COMMUNICATION, size=13)
    picture.text(490, 184, "set(6)", anchor="start", color=COMMUNICATION, size=13)
    picture.box(396, 112, 44, 28, "6", fill=OLIVE)
    picture.box(516, 112, 44, 28, "6", fill=OLIVE)
    picture.text(640, 112, "should be 7", size=13)
