"""The diagrams of lesson 12: replicas in two processes, a mesh over them, a chief and its queue, staleness, backups."""

from __future__ import annotations

from tools.diagrams.kit import COMMUNICATION, COMPUTE, EMPTY, GOLD, OLIVE, PINK, SHARES, VIOLET, Diagram, diagram


@diagram("12_hybrid", 720, 250, "four replicas in two processes")
def hybrid(picture: Diagram) -> None:
    """Worker 0 and worker 1 are processes with two devices each. Every device holds a replica, a copy of the whole
    model, and gets a quarter of the batch. One all-reduce joins the four replicas, inside and between the processes."""
    for worker in (0, 1):
        left = 10 + 370 * worker
        picture.box(left, 34, 330, 160)
        picture.text(left + 165, 18, f"worker {worker}: a process", bold=True)
        for device in (0, 1):
            x = left + 15 + 155 * device
            picture.text(x + 72, 54, f"CPU:{device}", size=13)
            picture.box(x, 68, 145, 44, "replica", fill=OLIVE)
            picture.box(x, 118, 145, 32, f"quarter {2 * worker + device} of the batch", fill=SHARES[2 * worker + device], size=12)
            picture.line((x + 72, 152), (x + 72, 220), color=COMMUNICATION, width=2)
    picture.line((97, 220), (622, 220), color=COMMUNICATION, width=2)
    picture.text(360, 236, "all-reduce of the gradients", color=COMMUNICATION, size=13)


@diagram("12_mesh", 720, 280, "a mesh of processes and devices")
def mesh(picture: Diagram) -> None:
    """A 2 by 2 mesh. Its rows, the batch axis, are processes: each gets half of the examples. The columns, the model
    axis, are the devices of a process: each holds half of the weights. Scores are summed along a row, inside a process;
    gradients along a column, between processes."""
    picture.text(350, 16, "model axis: halves of the weights →", size=13)
    for row in (0, 1):
        top = 40 + 130 * row
        picture.box(120, top, 460, 90)
        picture.text(60, top + 34, f"process {row}", bold=True, size=13)
        picture.text(60, top + 54, f"examples {32 * row}–{32 * row + 31}", size=12)
        for column in (0, 1):
            words = f"CPU:{column}\nweights, half {column}"
            picture.box(140 + 240 * column, top + 16, 180, 58, words, fill=(VIOLET, GOLD)[column], size=13)
        picture.arrow((324, top + 38), (376, top + 38), color=PINK)
        picture.arrow((376, top + 54), (324, top + 54), color=PINK)
    for column in (0, 1):
        x = 230 + 240 * column
        picture.arrow((x - 8, 118), (x - 8, 182), color=COMMUNICATION)
        picture.arrow((x + 8, 182), (x + 8, 118), color=COMMUNICATION)
    picture.text(350, 150, "gradients", color=COMMUNICATION, size=13)
    picture.text(650, 78, "scores: summed", color=PINK, size=13)
    picture.text(650, 96, "in each process", color=PINK, size=13)
    picture.text(650, 141, "gradients: summed", color=COMMUNICATION, size=13)
    picture.text(650, 159, "between them", color=COMMUNICATION, size=13)


@diagram("12_server", 720, 250, "TensorFlow's parameter server strategy")
def server(picture: Diagram) -> None:
    """The chief puts functions into a queue with schedule. Two workers take them out, one at a time. Each reads the
    weights from the ps task, computes a gradient and updates the weights there, without waiting for the other."""
    picture.box(10, 90, 110, 66, "chief:\nyour program", fill=PINK, size=13)
    picture.text(185, 74, "queue", size=13)
    for number in range(3):
        picture.box(160 + 18 * number, 90 + 4, 14, 58, fill=GOLD)
    picture.arrow((122, 123), (156, 123))
    picture.text(138, 176, "schedule", size=13)
    for y, number in ((20, 0), (170, 1)):
        picture.box(310, y, 140, 60, f"worker {number}:\na step at a time", fill=VIOLET, size=13)
        picture.arrow((220, 112 if number == 0 else 134), (306, y + 30))
        toward = 108 if number == 0 else 142
        picture.arrow((586, toward - 10), (454, y + 18), color=OLIVE)
        picture.arrow((454, y + 42), (586, toward + 10), color=COMMUNICATION)
    picture.box(590, 84, 120, 80, "ps:\nthe weights", fill=OLIVE, size=14)
    picture.text(560, 46, "weights", color=OLIVE, size=13)
    picture.text(560, 212, "gradients", color=COMMUNICATION, size=13)


@diagram("12_stale", 720, 236, "a stale gradient")
def stale(picture: Diagram) -> None:
    """Three rows over time: worker 0, the weights on the server, worker 1. Worker 0 reads version 3 and computes for a
    long time. Meanwhile worker 1 updates the weights twice, to versions 4 and 5. Then worker 0 updates: its gradient
    belongs to version 3, two updates ago."""
    for name, y in {"worker 0": 40, "the weights": 118, "worker 1": 196}.items():
        picture.text(12, y, name, anchor="start", bold=True, size=13)
        picture.line((110, y), (710, y))
    picture.text(706, 14, "time →", anchor="end", size=12)
    for x, width, version in ((116, 204, 3), (326, 154, 4), (486, 104, 5), (596, 110, 6)):
        picture.box(x, 104, width, 28, f"version {version}", fill=OLIVE, size=13)
    picture.box(150, 24, 406, 32, "computes with version 3", fill=COMPUTE, size=13)
    for x, width, version in ((136, 150, 3), (344, 100, 4)):
        picture.box(x, 180, width, 32, f"with version {version}", fill=COMPUTE, size=13)
        picture.arrow((x + 4, 132), (x + 4, 178), color=OLIVE)
        picture.arrow((x + width, 180), (x + width + 38, 134), color=COMMUNICATION)
    picture.arrow((154, 104), (154, 58), color=OLIVE)
    picture.arrow((556, 58), (594, 102), color=COMMUNICATION)
    picture.text(162, 82, "reads", anchor="start", color=OLIVE, size=13)
    picture.text(148, 158, "reads", anchor="start", color=OLIVE, size=13)
    picture.text(474, 164, "updates", anchor="start", color=COMMUNICATION, size=13)
    picture.text(586, 76, "late by 2 updates", anchor="start", color=COMMUNICATION, size=12)


@diagram("12_resume", 720, 110, "backups, and a death")
def resume(picture: Diagram) -> None:
    """A training of four epochs with eight batches each writes a backup after each epoch. In the middle of epoch 3,
    after 20 batches, worker 1 is killed."""
    for epoch in range(4):
        x = 10 + 176 * epoch
        done = epoch < 2
        words = "" if epoch == 2 else f"epoch {epoch + 1}: 8 batches"
        picture.box(x, 30, 168, 34, words, fill=VIOLET if done else EMPTY, dashed=not done, size=13)
        if done:
            picture.box(x + 172, 74, 60, 26, "backup", fill=OLIVE, size=12)
    picture.box(362, 30, 84, 34, "epoch 3:\n4 batches", fill=GOLD, size=12)
    picture.text(446, 14, "✗ worker 1 is killed", color=COMMUNICATION, size=13)
