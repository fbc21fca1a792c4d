"""What ranks show in a run: prints, with labels while the ranks run, bounded, and grouped in rank order at the end.

In a notebook, the thread that runs the cell updates one display, which is replaced by plain text at the end, so that
the output of a checked cell is reproducible. In a terminal, lines appear as they arrive. Rich output (figures, HTML) is
shown at the end, in rank order; each warning once, with the ranks that raised it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TextIO, cast

from labkit.errors.lists import listed, numbers_in_words
from labkit.group.printed_lines import Lines
from labkit.ipc.protocol import Displayed, Warned
from labkit.ipc.ranks_cell import cell_number

MOST: Final = 64  # of all ranks together; each rank bounds its own


class Displays:
    """The displays of all ranks in one run."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._shown: dict[int, list[Displayed]] = {}  # by rank
        self._left_out: dict[int, int] = {}

    def take(self, rank: int, shown: Displayed) -> None:
        """Add a display of a rank, the removal of all, or a count of displays that the rank left out."""
        mine = self._shown.setdefault(rank, [])
        if shown.data is None:
            mine.clear()
        elif shown.left_out:
            self._left_out[rank] = self._left_out.get(rank, 0) + shown.left_out
        else:
            mine.append(shown)

    def finish(self, write: Callable[[str], None]) -> None:
        """Show all displays below the cell; call it on the thread that runs the cell."""
        if not self._shown:
            return
        from IPython.display import display

        room = MOST
        for rank in sorted(self._shown):
            name, mine = self._names[rank], self._shown[rank]
            kept, left_out = mine[:room], self._left_out.get(rank, 0) + len(mine[room:])
            room -= len(kept)
            for number, shown in enumerate(kept):
                if number == 0:
                    write(f"[{name}]\n")
                display(shown.data, raw=True, metadata=shown.metadata)
            if left_out:
                write(f"[{name}] ... {left_out:,} more left out ...\n")


MOST_NAMES: Final = 4  # in a label, where ranks have names of their own


class GroupedWarnings:
    """Collects the warnings of ranks."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._counts: dict[str, dict[int, int]] = {}  # by text and rank, how many times it was raised
        self._order: dict[tuple[int, str], int] = {}  # of arrival, by rank and text

    def __bool__(self) -> bool:
        return bool(self._counts)

    def take(self, rank: int, text: str, count: int) -> None:
        """Add a warning that a rank has raised `count` times."""
        ranks = self._counts.setdefault(text, {})
        ranks[rank] = ranks.get(rank, 0) + count
        self._order.setdefault((rank, text), len(self._order))

    def lines(self) -> list[str]:
        """All warnings with labels, those of the lowest ranks first."""
        ordered = sorted(self._counts.items(), key=lambda item: (min(item[1]), self._order[min(item[1]), item[0]]))
        return [line for text, ranks in ordered for line in self._labelled(text, ranks)]

    def _labelled(self, text: str, ranks: dict[int, int]) -> list[str]:
        first, *more = text.rstrip("\n").split("\n")
        often = max(ranks.values())
        if often > 1:
            first += f" ({'up to ' * (min(ranks.values()) < often)}{often:,} times)"
        label = self._label(sorted(ranks))
        return [f"[{label}] {line}" for line in (first, *more)]

    def _label(self, ranks: list[int]) -> str:
        names = [self._names[rank] for rank in ranks]
        if len(ranks) == 1:
            return names[0]
        if names == [f"rank {rank}" for rank in ranks]:
            return f"ranks {numbers_in_words(ranks)}"
        if len(names) == len(self._names) > MOST_NAMES:
            return f"all {len(names)} ranks"
        return listed(names, most=MOST_NAMES)


LIVE_LINES: Final = 12  # of each rank, during the run
WARNED_AFTER_S: Final = 1.0  # how long a terminal waits for the same warning from other ranks
LIVE_AFTER_S: Final = 0.3  # a shorter run shows its prints once, at the end
LIVE_EVERY_S: Final = 0.15


class Output:
    """The prints of all ranks in one run."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._ranks: dict[int, Lines] = {}  # only of ranks that have printed: most runs print nothing
        self._shell = notebook_shell()
        self._displays, self._warnings = Displays(names), GroupedWarnings(names)
        self._warned: list[str] = []  # the lines of warnings that have been printed
        self._warned_at = 0.0  # when the first unprinted warning arrived
        self._handle: Any = None
        self._start = self._shown_at = self._heard = time.monotonic()
        self._changed = False
        self._notice = ""

    @property
    def silent_s(self) -> float:
        """For how many seconds the ranks have printed nothing."""
        return time.monotonic() - self._heard

    def say(self, notice: str) -> None:
        """Show a notice of labkit's below the prints during the run; "" removes it."""
        if notice and not self._notice and self._shell is None:
            put(f"{notice}\n", sys.stderr)
        self._changed |= notice != self._notice
        self._notice = notice

    def feed(self, rank: int, data: bytes) -> None:
        """Add bytes that a rank printed."""
        if rank not in self._ranks:
            self._ranks[rank] = Lines()
        lines = self._ranks[rank].feed(data)
        self._changed, self._heard = True, time.monotonic()
        if self._shell is None and lines:
            self._print(rank, lines)

    def take(self, rank: int, message: Displayed | Warned) -> None:
        """Add rich output of a rank, which appears at the end, or a warning."""
        self._heard = time.monotonic()
        if isinstance(message, Displayed):
            self._displays.take(rank, message)
        else:
            self._warned_at = self._warned_at if self._warnings else time.monotonic()
            self._warnings.take(rank, message.text, message.count)
            self._changed = True

    def show(self) -> None:
        """Show all prints so far, before and after the student is asked something, which counts as no silence."""
        self._start = self._shown_at = 0.0
        self._heard = time.monotonic()
        self.refresh()

    def refresh(self) -> None:
        """Show new prints if an update is due; call it regularly from the thread that runs the cell."""
        now = time.monotonic()
        if self._shell is None and self._warnings and now - self._warned_at > WARNED_AFTER_S:
            self._put_warnings()
        if self._shell is None or not self._changed or now - self._start < LIVE_AFTER_S or now - self._shown_at < LIVE_EVERY_S:
            return
        lines = [*self._shown(LIVE_LINES), *self._warnings.lines()]
        text = "\n".join([*lines, self._notice] if self._notice else lines)
        if self._handle is None:
            self._handle = _empty_display()
        self._handle.update({"text/plain": text}, raw=True)
        self._shown_at, self._changed = now, False

    def complete(self) -> None:
        """Complete all lines: the ranks will print no more, or are replaced by others."""
        for rank in sorted(self._ranks):
            rest = self._ranks[rank].finish()
            if self._shell is None and rest:
                self._print(rank, rest)

    def finish(self) -> str:
        """Complete all lines, show the final text and return it."""
        self.complete()
        text = "\n".join(self._shown())
        if self._handle is not None:
            self._handle.update({}, raw=True)
            self._handle = None
        if self._shell is not None and text:
            put(f"{text}\n")
        self._put_warnings()
        if self._shell is not None:
            self._displays.finish(put)
        return "\n".join(filter(None, (text, *self._warned)))

    def _shown(self, last: int | None = None) -> list[str]:
        return [f"[{self._names[rank]}] {line}" for rank in sorted(self._ranks) for line in self._ranks[rank].shown(last)]

    def _put_warnings(self) -> None:
        """Print the warnings so far to standard error, as Python does."""
        if not self._warnings:
            return
        lines = self._warnings.lines()
        self._warned += lines
        self._warnings = GroupedWarnings(self._names)
        if lines:
            put("".join(f"{line}\n" for line in lines), sys.stderr)

    def _print(self, rank: int, lines: list[str]) -> None:
        put("".join(f"[{self._names[rank]}] {line}\n" for line in lines))


class Notice:
    """A line of labkit's about something that does not last: below the cell until `clear`, or on standard error.

    It is no part of a notebook cell's output, so that checked outputs do not depend on the speed of the machine.
    """

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: str) -> None:
        """Show the line."""
        if notebook_shell() is None:
            put(f"{text}\n", sys.stderr)
            return
        self._handle = self._handle or _empty_display()
        self._handle.update({"text/plain": text}, raw=True)

    def clear(self) -> None:
        """Remove the line where that is possible: not in a terminal."""
        if self._handle is not None:
            self._handle.update({}, raw=True)


def _empty_display() -> Any:
    """Display nothing at first, since nbval compares only a display's first state; return what updates it."""
    from IPython.display import display

    return display({}, raw=True, display_id=True)


def put(text: str, stream: TextIO | None = None) -> None:
    """Write text to a stream (default: stdout), unless it is closed or missing: `Run.output` has it in any case."""
    stream = stream if stream is not None else sys.stdout
    if stream is not None and not getattr(stream, "closed", False):
        stream.write(encodable(text, stream))
        stream.flush()


def encodable(text: str, stream: TextIO | None = None) -> str:
    """Text that a stream (default: stdout) can write: in a terminal without UTF-8, other characters are escaped."""
    encoding = getattr(stream if stream is not None else sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def cell_label(filename: str) -> str:
    """A file's name for the student: "cell 5" for a cell of this notebook, else the base name."""
    shell, number = _shell(), cell_number(filename)
    if number is None and shell is not None:
        number = _executed_as(filename, shell)
    return f"cell {number}" if number is not None else os.path.basename(filename)


def _executed_as(filename: str, shell: Any) -> int | None:
    """The number of the notebook's cell with this file name; the latest if it has been executed several times."""
    numbers = getattr(shell.compile, "_filename_map", None)
    if numbers is not None:
        return cast("int | None", numbers.get(filename))
    # IPython 7, which Colab and Kaggle have, keeps no table: each cell's name is computed again, from its text.
    if os.path.dirname(filename) != os.path.dirname(shell.compile.get_code_name("", "", 0)):
        return None
    cells = shell.history_manager.input_hist_raw
    for number in range(len(cells) - 1, 0, -1):
        texts = (cells[number], cells[number] + "\n")  # the history has cells without their last line's end
        if filename in (shell.compile.get_code_name(text, text, number) for text in texts):
            return number
    return None


def notebook_shell() -> Any:
    """IPython's shell in a notebook kernel, else None."""
    shell = _shell()
    return shell if shell is not None and hasattr(shell, "kernel") else None


def notebook_path() -> str:
    """Return the path of this kernel's notebook, as Jupyter or VS Code gives it; "" if a program executes it."""
    path = os.environ.get("JPY_SESSION_NAME", "") or getattr(sys.modules.get("__main__"), "__vsc_ipynb_file__", "")
    return str(path) if str(path).endswith(".ipynb") else ""


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
