"""The rules of the code base that a program can check: imports, length of files, names, no paths of a machine."""

from __future__ import annotations

import ast
import graphlib
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

import labkit

ROOT = Path(__file__).resolve().parent.parent
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "labkit").rglob("*.py"))
}
# The judges are beside their lessons, and modules of the package that loads them.
FILES |= {f"labkit.teaching.exercises.{path.stem}": path for path in sorted((ROOT / "notebooks" / "judges").glob("*.py"))}
LIMIT_LINES = 600  # about 400 is usual

# Each package may import only those before it.
LAYERS = (
    "errors", "recording", "costs", "tracing", "ipc", "worker", "launch", "group", "plots", "notebook", "teaching",
)  # fmt: skip
BESIDE = {"__init__", "__init__.pyi", "__main__", "py.typed"}
LAZY = "labkit"  # the package itself names all its parts and imports each on first use

# Words that were used for things with a standard name, or that say nothing about the thing.
METAPHORS = {
    "aside", "blame", "borrow", "borrowed", "buried", "bury", "carried", "crew", "deed", "deeds", "edge", "flight", "hands",
    "ledger", "mend", "mends", "parcel", "parcels", "seat", "sheet", "strike", "told", "what", "wire",
}  # fmt: skip
# Names in which such a word is the standard term (edge: of an axis), and a lesson's title.
STANDARD_TERMS = {"IN_FLIGHT", "_STYLE_SHEET", "edge", "what_helps", "what_it_costs"}


def imports(module: str) -> set[str]:
    """The files of labkit that a file imports, also inside functions and only for types."""
    found = set()
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            name = f"{module.rpartition('.')[0]}.{node.module}" if node.level else node.module
            found |= {name} | {f"{name}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return (found & set(FILES)) - {module, LAZY}


def names_given(tree: ast.AST) -> set[str]:
    """The names that a file defines: classes, functions, arguments, attributes and variables."""
    found: set[str | None] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler | ast.MatchAs):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.add(node.asname)
    return {name for name in found if name}


def parts_of(name: str) -> set[str]:
    """The words of a name in snake_case or CamelCase, in lower case."""
    return {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


GRAPH = {module: imports(module) for module in FILES if module != LAZY}


def layer(module: str) -> int:
    room = module.split(".")[1]
    return LAYERS.index(room) if room in LAYERS else len(LAYERS)


def test_the_package_has_exactly_these_parts() -> None:
    found = {path.name.removesuffix(".py") for path in (ROOT / "labkit").iterdir() if path.name != "__pycache__"}
    assert found == {*LAYERS} | BESIDE


def test_each_public_name_of_the_stub_can_be_imported() -> None:
    assert len(labkit.__all__) > 50
    assert [name for name in labkit.__all__ if not hasattr(labkit, name)] == []


def test_each_file_has_a_name_of_its_own() -> None:
    names = Counter(module.rpartition(".")[2] for module in FILES if not FILES[module].name.startswith("__"))
    assert [name for name, count in names.items() if count > 1] == []


def test_each_class_has_a_name_of_its_own() -> None:
    files = (path for path in FILES.values() if path.is_relative_to(ROOT / "labkit"))  # a judge is read alone
    classes = [node for path in files for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    names = Counter(node.name.lstrip("_") for node in classes)
    assert [name for name, count in names.items() if count > 1] == ["Group"]  # the notebook's, which shows the live picture


def test_no_import_cycles() -> None:
    graphlib.TopologicalSorter(GRAPH).prepare()  # raises CycleError, which names the cycle


def test_imports_run_one_way() -> None:
    upward = [f"{module} imports {used}" for module in GRAPH for used in GRAPH[module] if layer(used) > layer(module)]
    assert upward == []


@pytest.mark.parametrize("module", FILES)
def test_a_file_is_short_and_its_first_line_states_its_idea(module: str) -> None:
    text = FILES[module].read_text()
    first = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    assert re.search(r"[.:`)]$", first), f"the first line is no sentence: {first!r}"
    assert text.count("\n") <= LIMIT_LINES


def test_no_name_is_a_private_metaphor() -> None:
    paths = [path for folder in ("labkit", "bench", "notebooks", "tools") for path in (ROOT / folder).rglob("*.py")]
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in paths
        for name in [*path.relative_to(ROOT).with_suffix("").parts, *names_given(ast.parse(path.read_text()))]
        if METAPHORS & parts_of(name) and name not in STANDARD_TERMS
    ]
    assert found == []


FRAMEWORKS = {"torch", "tensorflow", "keras"}
PRIVATE = re.compile(r"\._|^tensorflow\.(python|core|tsl|compiler)\b|^keras\.src\b")
# Files that recognize classes by the names of their modules, in messages and in what cannot be sent.
BY_NAME = {"labkit.ipc.reductions", "labkit.ipc.tracebacks"}
TABLES = {"labkit.recording.torch_internals", "labkit.worker.runtimes.tensorflow.tensorflow_internals"}


def private_names(source: str) -> list[str]:
    """The private names of frameworks that a file uses: imports, strings, and attributes of what it has imported."""
    tree, imported, found = ast.parse(source), set(), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.name, alias.asname or alias.name.split(".")[0]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [(f"{node.module}.{alias.name}", alias.asname or alias.name) for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not node.value.startswith("torch."):
            names = [(node.value, "")]  # torch's private modules may be waited for by name
        else:
            continue
        theirs = [(path, name) for path, name in names if path.split(".")[0] in FRAMEWORKS]
        imported |= {name for _, name in theirs}
        found += [path for path, _ in theirs if PRIVATE.search(path)]
    for node in private_attributes(tree):
        root: ast.AST = node
        while isinstance(root, ast.Attribute | ast.Call | ast.Subscript):
            root = root.func if isinstance(root, ast.Call) else root.value
        if isinstance(root, ast.Name) and root.id in imported:
            found.append(ast.unparse(node))
    return found


def private_attributes(tree: ast.AST) -> list[ast.Attribute]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr)]


def test_private_names_of_frameworks_stand_in_one_file_each() -> None:
    assert private_names("from torch import nn as n\nimport torch._C\nn.Linear._x().y; torch.f()._z") == [
        "torch._C", "torch.f()._z", "n.Linear._x",
    ]  # fmt: skip
    assert private_names(
        "import tensorflow as tf\nfrom tensorflow.python.eager import context\nfrom tensorflow.errors import OpError\n"
        "import keras.src.trainers\ntf.function(f)._x; context.context()._y; 'keras.src.models'; 'keras.models'"
    ) == [
        "tensorflow.python.eager.context", "keras.src.trainers", "keras.src.models", "tf.function(f)._x", "context.context()._y",
    ]  # fmt: skip
    others = {module: path.read_text() for module, path in FILES.items() if module not in BY_NAME | TABLES}
    assert {module: found for module, text in others.items() if (found := private_names(text))} == {}


def test_a_private_attribute_is_labkits_own() -> None:
    """Attributes of objects of others, of which `private_names` does not know the framework."""
    known = {"sys", "os"}  # such as os._exit
    trees = {module: ast.parse(path.read_text()) for module, path in FILES.items()}
    given = {"_replace"}.union(*map(names_given, trees.values()))  # a public method of named tuples
    foreign = {
        module: {ast.unparse(node) for node in private_attributes(tree) if node.attr not in given}
        for module, tree in trees.items()
    }
    assert {name for names in foreign.values() for name in names if name.partition(".")[0] not in known} == set()


def test_only_the_floor_that_launches_ranks_knows_that_they_are_processes_of_this_machine() -> None:
    here = re.compile(r"import psutil|['\"]/proc/|\.pid\b|os\.kill\((?!os\.getpid\(\))|pidfd_open")
    assert here.search("os.kill(process.pid, 9)")
    rooms = ("labkit.group.", "labkit.plots.", "labkit.teaching.exercises.")
    above = [module for module in FILES if module.startswith(rooms)]
    assert len(above) > 60
    assert [module for module in above if here.search(FILES[module].read_text())] == []


@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="not a git checkout")
@pytest.mark.processes
def test_no_committed_file_contains_a_path_of_a_machine() -> None:
    """Paths of the machine that a notebook ran on easily get into a traceback or a file name."""
    machine = re.compile(rf"{re.escape(str(ROOT))}\b|/(home|Users|root)/(?!ada/)\w+")  # ada is an example in the tests
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=200, check=True)
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        try:
            text = (ROOT / name).read_text()
        except (UnicodeDecodeError, FileNotFoundError):  # a picture; or removed and not yet committed
            continue
        found += [f"{name}: {match.group()}" for match in machine.finditer(text)]
    assert found == []
