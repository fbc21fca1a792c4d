"""`explain`: one paragraph whose numbers are the trace's."""

import dataclasses

import pytest
from replayed import sent_afterwards, tensor_parallel
from synthetic import Book, data_parallel, in_steps, model_parallel

import labkit as lab
from labkit.costs.link import Link
from labkit.errors.units import time_in_words
from labkit.recording.rank_facts import Fact, FactKind
from labkit.tracing import step_times
from labkit.tracing.limits import Limit, limit_of
from labkit.tracing.replaying import explain as module
from labkit.tracing.replaying.explain import explain
from labkit.tracing.trace import Trace


class Run:
    """Something with a trace that was made on this machine."""

    def __init__(self, trace: Trace, *facts: Fact, load: float = 0.0) -> None:
        self.trace, self.facts, self.load = trace, dict.fromkeys(range(len(trace.ranks)), facts), load


def cores_are(cores, monkeypatch):
    for user in (module, step_times):
        monkeypatch.setattr(user, "usable_cores", lambda: cores)


def found_with(**values):
    """What limits data-parallel training, with other values in some places."""
    return dataclasses.replace(limit_of(data_parallel()), **values)


def advice(found, ranks=("rank 0", "rank 1"), *more):
    return module._advice(found, ranks, module._Conditions(), *more)


def test_the_paragraph_has_the_numbers_of_the_trace():
    trace = data_parallel(slow=-1, steps=10)  # no rank is slow
    found = limit_of(trace)
    text = explain(trace).text
    compute, data, exposed = (f"{100 * share:.0f} %" for share in (found.compute, found.data, found.exposed))
    assert f"The ranks computed for {compute} of it, waited for data for {data} and communicated for {exposed}" in text
    assert text.startswith(f"A step took {time_in_words(found.mean_step_ns)} on average. The ranks")
    assert "each rank took part in 3 operations per step with 7.34 MB of data at" in text
    assert f"Communication hidden behind computing took another {100 * found.overlap:.0f} %." in text
    assert str(explain(trace)) == text
    assert text.replace(" %", "&nbsp;%") in explain(trace)._repr_html_()


def test_one_rank_has_nobody_to_wait_for():
    book = Book()
    book.compute(0, "forward", 0, 10)
    assert explain(book.trace(1)).text == (
        "It took 10.0 ms. The rank computed for 100 % of it. Only faster computing makes this run faster. "
        'Predicted by replay: "forward twice as fast" saves 5.00 ms of 10.0 ms.'
    )


@pytest.mark.parametrize("limit", [Limit.LATENCY, Limit.BANDWIDTH, Limit.OVERHEAD])
def test_tensor_parallelism_is_not_advised_to_hide_its_messages(limit):
    """The next layer needs their results at once."""
    found = dataclasses.replace(limit_of(tensor_parallel()), limit=limit)
    text = module._advice(found, ["rank 0", "rank 1"], module._Conditions(), module._sent_better(tensor_parallel()))
    assert module.AT_ONCE in text
    assert "while" not in text
    assert "larger messages" not in text


def test_what_tensor_parallelism_would_save():
    assert limit_of(tensor_parallel()).limit is Limit.BANDWIDTH
    predicted = 'Ideals that no change reaches, by replay, per step: "communication takes no time" saves 9.00 ms of 18.0 ms.'
    assert explain(tensor_parallel()).text.endswith(predicted)


def small_all_reduces(link: Link | None) -> Trace:
    """Four ranks: after 1 ms of computing, 20 all-reduces of 5 ms in a row, whatever the link."""
    trace = in_steps(4, ("forward", 1), *[("all_reduce", 5)] * 20, ranks=4, nbytes=4000, line="line 3")
    return Trace(trace.columns, ranks=trace.ranks, link=link)


def test_what_small_messages_cost_beside_the_latency_of_the_link(monkeypatch):
    """Six rounds of 50 µs are 0.3 ms of 5: half of them would save nothing, since the operations take longer anyway."""
    monkeypatch.setattr(module, "usable_cores", lambda: 2)
    text = explain(Run(small_all_reduces(Link(gbit_per_s=1, latency_us=50)))).text
    assert "Overhead limits this run" in text
    assert "even a small one takes 5.00 ms (median), of which the link's latency is 300 µs." in text
    assert "Each wakes threads of 4 ranks on 2 cores." in text
    assert '"consecutive messages as one" saves 94.' in text
    alone = explain(small_all_reduces(None)).text
    assert "even a small one takes 5.00 ms (median). Send" in alone
    far = explain(small_all_reduces(Link(gbit_per_s=1, latency_us=800))).text
    assert "Latency limits this run" in far
    assert '"half the latency" saves' in far


def test_a_link_is_not_blamed_if_a_better_one_saves_nothing():
    """The model's latency explains most of the time of each, but not more than gloo takes anyway."""
    trace = small_all_reduces(Link(gbit_per_s=1, latency_us=500))
    trace.columns.data["backend_ns"] = trace.columns.data["end_ns"]
    text = explain(trace).text
    assert "Communication limits this run: each rank took part in 20 operations per step with 80.0 kB of data." in text
    assert '"half the latency" saves nothing' in text
    assert "Latency" not in text


def test_communication_is_not_blamed_if_steps_differ_by_more():
    """Steps of 4 to 24 ms, in which an all-reduce of 2 ms follows 1 ms of computing and a pause."""
    pauses = (1, 1, 21, 1, 21, 1, 21)
    paused = (lambda step: ("pause", pauses[step] / 4), lambda step: ("", pauses[step] * 3 / 4))
    trace = in_steps(len(pauses), ("forward", 1), ("all_reduce", 2), *paused, nbytes=4_000_000)
    found = dataclasses.replace(limit_of(trace), limit=Limit.BANDWIDTH)
    gains = module._gains(trace, found, None)
    assert "steps would be shorter by less than they differ anyway" in module._unproved(trace, found, gains)
    even = dataclasses.replace(gains, gains=tuple(dataclasses.replace(gain, in_spread=False) for gain in gains.gains))
    assert module._unproved(trace, found, even) == ""


@pytest.mark.parametrize(("slower", "limit"), [(1.0, Limit.BANDWIDTH), (7.0, Limit.LATE_RANK)])
def test_a_slow_rank_is_not_blamed_on_the_network(slower, limit):
    """The ranks wait less for the slow one, 3.5 ms on average, than for the all-reduce of 6 ms; it costs 7 ms."""
    found = explain(in_steps(5, ("forward", (2, 2 + slower)), ("all_reduce", 6), nbytes=4_000_000)).finding
    assert found.limit is limit
    assert found.exposed > found.waiting


def test_gradients_sent_after_the_backward_pass_are_advised_to_travel_beside_it():
    """Two all-reduces of 6 follow a backward pass of 5, which can hide 5 of these 12."""
    found, text = limit_of(sent_afterwards()), explain(sent_afterwards()).text
    assert found.limit is Limit.BANDWIDTH
    assert module._sent_better(sent_afterwards()) == module.BESIDE
    assert module.BESIDE in text
    assert '"gradients travel beside backward, at best" saves 5.00 ms of 20.0 ms' in text


def test_of_other_communication_nobody_knows_what_needs_it():
    for trace in (data_parallel(), model_parallel()):
        assert module._sent_better(trace) == module.LESS
        assert "beside backward" not in explain(trace).text


def test_what_a_straggler_and_a_pipeline_s_stages_would_save():
    late = explain(in_steps(4, ("forward", (2, 8)), ("all_reduce", 2), nbytes=8))
    assert late.finding.limit is Limit.LATE_RANK
    assert '"rank 1 as fast as the others" saves 6.00 ms of 10.0 ms' in late.text
    turns = explain(model_parallel())
    assert turns.finding.limit is Limit.TURNS
    assert "While any rank computed, 1.0 of 2 did on average" in turns.text
    assert '"backward twice as fast" saves 10.0 ms of' in turns.text


def test_without_a_replay_there_is_no_prediction():
    trace = data_parallel()
    assert "by replay" in explain(trace).text
    assert "by replay" not in explain(Trace(trace.spans, ranks=trace.ranks, dropped=[1, 0, 0, 0])).text


def test_waiting_in_a_call_and_doing_nothing_are_two_numbers_as_in_the_breakdown():
    found = found_with(compute=0.6, data=0.0, exposed=0.0, waiting=0.07, standing=0.19)
    assert module._sentences(found, ["rank 0", "rank 1"], "")[1] == (
        "The ranks computed for 60 % of it, waited for each other for 7 % and did nothing for 19 % while others computed."
    )


@pytest.mark.parametrize("limit", Limit)
def test_every_limit_has_a_sentence(limit):
    text = advice(found_with(limit=limit), [f"rank {i}" for i in range(4)])
    assert text.endswith(".")
    assert "nan" not in text


@pytest.mark.parametrize(("nbytes", "words"), [(40, "A call took 9.00 ms"), (4e6, "A call with 4.00 MB took 9.00 ms")])
def test_the_size_of_large_calls_is_given(nbytes, words):
    text = advice(found_with(limit=Limit.CALLS, call_ns=9e6, call_bytes=nbytes))
    assert words in text
    assert ("send less with each" in text) == (nbytes > 40)


@pytest.mark.parametrize(
    ("cores", "load", "words"),
    [
        (8, 0.5, ""),
        (2, 0.5, "4 ranks share 2 cores, which may make all times longer."),
        (2, 9.2, "Other programs keep this machine busy (load 9 on 2 cores), so all times are longer than usual."),
        (1, 0.5, "4 ranks share 1 core,"),
    ],
)
def test_a_busy_machine_is_named_for_a_run_but_not_for_a_trace(monkeypatch, cores, load, words):
    cores_are(cores, monkeypatch)
    trace = data_parallel()
    alone = explain(trace).text
    text = explain(Run(trace, load=load)).text
    assert text.startswith(words) if load > 9 else text[len(alone) :].strip().startswith(words)
    assert bool(words) == (text != alone)
    simulated = Trace(trace.columns, trace.scalars, **trace.info | {"simulated": 8})
    assert explain(Run(simulated, load=load)).text == explain(simulated).text
    emulated = Trace(trace.columns, trace.scalars, **trace.info | {"cores": 64})  # those of all its machines
    busy = explain(Run(emulated, load=load)).text.startswith("Other programs")
    assert busy == words.startswith("Other programs"), "the load is this machine's"


@pytest.mark.parametrize(
    ("lacked_ms", "words"), [(0.01, ""), (10, "4 ranks share 2 cores: they waited for one for 15 % of the time.")]
)
def test_ranks_that_sleep_do_not_share_cores(monkeypatch, lacked_ms, words):
    """What the ranks waited for cores is recorded, between their first operation and their last."""
    monkeypatch.setattr(module, "usable_cores", lambda: 2)
    trace = data_parallel()
    own = trace.columns.data
    first, last = own["start_ns"].min(), own["start_ns"].max()
    own["issue_delay_ns"] = 1 + lacked_ms * 1e6 * (own["start_ns"] - first) / (last - first)
    assert explain(Run(trace)).text.endswith(words or explain(trace).text)


@pytest.mark.parametrize(
    ("threads", "cores", "load", "words"),
    [
        (2, 2, 0.5, "The ranks compute with 8 threads on 2 cores"),
        (2, 2, 40.0, "The ranks compute with 8 threads on 2 cores"),
        (1, 2, 0.5, "faster cores, or less to compute, make this run faster"),  # a thread for each rank cannot be less
        (2, 8, 0.5, "faster cores, or less to compute, make this run faster"),
        (2, 8, 40.0, "cannot be told from these times"),
    ],
)
def test_threads_are_compared_with_cores_before_more_cores_are_advised(monkeypatch, threads, cores, load, words):
    cores_are(cores, monkeypatch)
    trace = data_parallel()
    monkeypatch.setattr(module, "limit_of", lambda _: dataclasses.replace(limit_of(trace), limit=Limit.COMPUTE))
    text = explain(Run(trace, Fact(FactKind.RUN, 0, "", values={"threads": threads}), load=load)).text
    assert words in text
    assert text.startswith("Other programs keep this machine busy") == (load > 1)


@pytest.mark.parametrize(
    ("workers", "cores", "words"),
    [
        (None, 8, "`dataset.prefetch`"),
        (0, 8, "The DataLoader (cell 3, line 7) has num_workers=0: each rank makes its own batches"),
        (4, 2, "num_workers=4, which makes 20 processes for 2 cores. Compare with fewer workers"),
        (1, 8, "num_workers=1, which do not keep up"),
    ],
)
def test_what_is_advised_about_a_data_loader(monkeypatch, workers, cores, words):
    monkeypatch.setattr(module, "usable_cores", lambda: cores)
    trace = data_parallel()
    monkeypatch.setattr(module, "limit_of", lambda _: dataclasses.replace(limit_of(trace), limit=Limit.DATA))
    facts = [] if workers is None else [Fact(FactKind.LOADER, 0, "cell 3, line 7", values={"workers": workers})]
    text = explain(Run(trace, *facts)).text
    assert words in text
    assert ("tf.data" in text) == (workers is None)


def test_nothing_to_explain():
    with pytest.raises(lab.LabError, match="explain"):
        explain(Trace([], ranks=["rank 0"]))
    with pytest.raises(TypeError, match=r"explain\(3\): expected a run"):
        explain(3)


@pytest.mark.parametrize("busy", [False, True])
def test_on_a_busy_machine_a_late_rank_may_have_lost_its_core(monkeypatch, busy):
    found = found_with(limit=Limit.LATE_RANK, late_rank=1)
    monkeypatch.setattr(module, "limit_of", lambda _: found)
    text = explain(Run(data_parallel(), load=40.0 if busy else 0.5)).text
    assert ("other programs may have taken its core" in text) == busy
    assert ("Find out what it does more, or more slowly, than the others do." in text) == (not busy)


@pytest.mark.parametrize(("median", "shown"), [(1.02, False), (0.7, True)])
def test_the_median_step_is_given_where_it_differs_from_the_mean(monkeypatch, median, shown):
    found = limit_of(data_parallel(steps=10))
    other = dataclasses.replace(found, step_ns=median * found.mean_step_ns)
    monkeypatch.setattr(module, "limit_of", lambda _: other)
    assert (f"on average, {time_in_words(other.step_ns)} in the median." in explain(data_parallel()).text) == shown


@pytest.mark.parametrize(("late_data", "named"), [(0.5, True), (0.3, False)])
def test_a_late_rank_may_have_waited_for_data(late_data, named):
    found = found_with(limit=Limit.LATE_RANK, late_rank=1, waiting=0.3, data=0.25, late_data=late_data)
    assert ("It waited for data for 50 % of the time." in advice(found)) is named


@pytest.mark.parametrize(("absent", "advised"), [(0.3, True), (0.1, False)])
def test_a_late_rank_that_recorded_nothing_is_advised_to_use_spans(absent, advised):
    found = found_with(limit=Limit.LATE_RANK, late_rank=1, waiting=0.3, absent=absent)
    text = " ".join(module._sentences(found, ("rank 0", "rank 1"), advice(found)))
    assert f"recorded nothing for {100 * absent:.0f} % while others communicated or waited" in text
    assert ("It recorded nothing meanwhile: put `with lab.span(...)`" in text) is advised
