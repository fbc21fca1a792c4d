"""Every lesson keeps the course's form: six parts, short cells, guesses first, pictures with alternative text."""

import ast
import re

import nbformat
import pytest

import labkit.teaching.exercises
from tools.lesson_numbers import NOTEBOOKS, numbers_of

LESSONS = sorted(NOTEBOOKS.glob("*.ipynb"))
PARTS = ["1 · Predict", "2 · Run and watch", "3 · Measure", "4 · Prove", "5 · Break", "6 · Build"]

lesson = pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)


def cells_of(path, kind):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


def parsed(cell):
    """Return the syntax tree of a code cell, without its magic lines."""
    return ast.parse(re.sub(r"^[%!].*$", "", cell.source, flags=re.MULTILINE))


@lesson
def test_six_parts_in_order(path):
    assert [heading for heading in numbers_of(path).headings if re.match(r"\d", heading)] == PARTS


@lesson
def test_a_lesson_is_short_and_begins_soon(path):
    numbers = numbers_of(path)
    assert 1200 <= numbers.words <= 2800, f"{path.stem} has {numbers.words} words: expected 1,200 to 2,800"
    assert numbers.words_per_cell <= 60
    assert numbers.words_to_code <= 300
    assert numbers.words_to_picture <= 500
    assert numbers.kilobytes < 500


@lesson
def test_nothing_is_left_to_write(path):
    """`make lesson` marks with `WRITE:` what a person must write."""
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells]
    rows = [line for line in (NOTEBOOKS.parent / "README.md").read_text().splitlines() if f"/{path.name})" in line]
    left = [line for text in [*cells, *rows] for line in text.splitlines() if "WRITE: " in line]
    assert not left, "\n".join([f"{path.stem}: write these lines", *left])


@lesson
def test_code_cells_are_short(path):
    numbers = numbers_of(path)
    assert numbers.lines_per_cell <= 6
    assert numbers.longest_line <= 100


@lesson
def test_the_student_guesses_and_results_are_checked(path):
    numbers = numbers_of(path)
    assert 2 <= numbers.guesses <= 5
    assert numbers.checked >= 5


@lesson
def test_each_guess_is_sealed_before_it_is_revealed(path):
    """In source order, `guess(x=...)` comes before `reveal(x=...)`, each has its reveal, and none is filled in."""
    seen = []
    for cell in cells_of(path, "code"):
        for node in ast.walk(parsed(cell)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("guess", "reveal"):
                names = [keyword.arg for keyword in node.keywords if keyword.arg not in ("predicted", "ax")]
                seen += [(node.func.attr, name) for name in names]
                if node.func.attr == "guess":
                    assert all(ast.unparse(keyword.value) == "..." for keyword in node.keywords), ast.unparse(node)
    guessed = [name for function, name in seen if function == "guess"]
    assert len(set(guessed)) == len(guessed)
    for name in guessed:
        assert ("reveal", name) in seen, f"{name} is never revealed"
        assert seen.index(("guess", name)) < seen.index(("reveal", name)), f"{name} is revealed before the guess"


@lesson
def test_a_cell_can_be_run_again_although_it_closes_groups(path):
    """It closes no group of another cell, which would have to run again first. The last cell may: it tidies up."""
    nodes = [list(ast.walk(parsed(cell))) for cell in cells_of(path, "code")]
    made = [
        {target.id for node in of_cell if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("lab.Group(")
         for target in node.targets if isinstance(target, ast.Name)}
        for of_cell in nodes
    ]  # fmt: skip
    for number, of_cell in enumerate(nodes[:-1]):
        if any(isinstance(node, ast.Attribute) and node.attr == "close" for node in of_cell):
            used = {node.id for node in of_cell if isinstance(node, ast.Name)}
            assert not used & (set().union(*made) - made[number])


@lesson
def test_pictures_exist_and_have_alternative_text(path):
    pictures = numbers_of(path).pictures
    assert pictures, "a lesson draws its concepts"
    for text, file in pictures:
        assert len(text.split()) >= 5, f"{file} has no alternative text"
        assert (NOTEBOOKS / file).is_file(), file


@lesson
def test_no_test_marker_is_in_the_code(path):
    assert not [cell.source for cell in cells_of(path, "code") if "NBVAL" in cell.source]


@lesson
def test_links_lead_to_files_that_exist(path):
    for cell in cells_of(path, "markdown"):
        for target in re.findall(r"(?<!!)\[[^\]]*\]\(([^)#\s]+)", cell.source):
            if not target.startswith("http"):
                assert (NOTEBOOKS / target).is_file(), f"{target} does not exist"


@lesson
def test_folded_answers_are_rendered(path):
    """Markdown within `<details>` needs an empty line after the summary, and each is closed."""
    for cell in cells_of(path, "markdown"):
        assert cell.source.count("<details>") == cell.source.count("</details>")
        assert all(rest.startswith("\n\n") for rest in cell.source.split("</summary>")[1:])


def test_every_lesson_has_solutions():
    assert {path.name for path in NOTEBOOKS.glob("*.ipynb")} == {path.name for path in NOTEBOOKS.glob("solutions/*.ipynb")}


def test_no_two_exercises_have_the_same_name():
    names = [name for of_file in labkit.teaching.exercises.exercise_names().values() for name in of_file]
    assert sorted(names) == sorted(set(names))


# What the course was asked for, with the code or words by which each is found in a code cell of its lesson.
ASKED = [
    ("02_data_parallel", "nn.DataParallel"),
    ("02_data_parallel", "DistributedDataParallel"),
    ("01_messages_and_collectives", "dist.send("),
    ("01_messages_and_collectives", "dist.all_reduce("),
    ("08_rpc_hybrid", "class NetShard1("),
    ("08_rpc_hybrid", "class NetShard2("),
    ("08_rpc_hybrid", "TextClassifier"),
    ("08_rpc_hybrid", "dist_autograd"),
    ("09b_several_machines", "lab.EmulatedMachines("),
    ("09b_several_machines", "lab.measure_link("),
    ("10_tf_data_parallel", "MirroredStrategy("),
    ("10_tf_data_parallel", "keras_cnn"),
    ("10_tf_data_parallel", "AutoShardPolicy"),
    ("12_tf_hybrid", "MultiWorkerMirroredStrategy("),
    ("12_tf_hybrid", "devices_per_rank=2"),
    ("13_find_the_bottleneck", "critical_path=True"),
    ("13_find_the_bottleneck", "lab.what_helps("),
    ("13_find_the_bottleneck", "lab.memory("),
    ("14_choose_a_strategy", "lab.plan("),
    ("14_choose_a_strategy", "memory_gb="),
    ("14_choose_a_strategy", "lab.simulate("),
    ("14_choose_a_strategy", "lab.scaling("),
    ("15_find_the_fault", "lab.fault("),
    ("15_find_the_fault", "lab.same_as_serial("),
    ("02b_what_it_costs", "lab.explore("),
    ("05_pipeline_parallel", "lab.explore("),
    ("16_long_sequences_and_experts", "class Ring("),
    ("16_long_sequences_and_experts", "all_to_all_single("),
    ("16_long_sequences_and_experts", "context_parallel("),
    ("16_long_sequences_and_experts", '"pp", "dp", "ep", "cp", "tp"'),
    ("17_when_machines_fail", "restarts=20"),
    ("17_when_machines_fail", "dcp.async_save"),
    ("17_when_machines_fail", "torch.distributed.run"),
    ("17_when_machines_fail", "fully_shard("),
    ("18_communicate_less", "fp16_compress_hook"),
    ("18_communicate_less", "powerSGD_hook"),
    ("18_communicate_less", "class DiLoCo("),
    ("18_communicate_less", "class Streaming("),
    ("18_communicate_less", "no_sync()"),
    ("18_communicate_less", "set_modules_to_forward_prefetch("),
    ("18_communicate_less", "lab.critical_path("),
    ("18_communicate_less", "lab.what_helps("),
    ("13_find_the_bottleneck", "lab.explore("),
    ("14_choose_a_strategy", "lab.explore("),
]


@pytest.mark.parametrize(("stem", "code"), ASKED, ids=lambda value: value)
def test_what_the_course_was_asked_for_is_run_in_a_lesson(stem, code):
    assert any(code in cell.source for cell in cells_of(NOTEBOOKS / f"{stem}.ipynb", "code"))


@lesson
def test_no_checked_output_depends_on_a_time(path):
    """`make test` compares these outputs; which run is faster, a busy machine decides."""
    measured = {"step_ms", "best_of", "perf_counter", "winner", "seconds_of"}
    checked = [cell for cell in cells_of(path, "code") if "nbval-check-output" in cell.metadata.get("tags", [])]
    used = {
        name.id if isinstance(name, ast.Name) else name.attr
        for cell in checked
        for name in ast.walk(parsed(cell))
        if isinstance(name, ast.Name | ast.Attribute)
    }
    assert not used & measured
