"""The benchmark of ranks: the simulator counts what real ranks exchange, and the figures are those of the run."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import bench_rank_counts
import bench_ranks
import nccl_scenarios as nccl
import pytest
import readme_figures
import readme_ranks
import step_scenarios as scenarios
import torch
from bench_ranks import Plan
from rank_pool import RankPool, RanksFailed
from ranks.balance import asked as rows_asked
from ranks.hops import Asked, Hosts, asked_of, expected_asked
from ranks.predicting import CLUSTER, WAYS, Way, Workload, efficiency
from ranks.processes import Processes
from ranks.simulator import Costs, Load, Protocol, Protocols, expected_load, features, load_of, payload
from ranks.trainers import Shape

from speedswap.apps.bench.measure import zipf_batches
from speedswap.collectives import ROOM
from speedswap.tables.owners import Owners

pytestmark = pytest.mark.release

ROOT = Path(__file__).resolve().parents[2]
ROWS = 5000


def zipf(ranks):
    return [zipf_batches(ROWS, 300 + 50 * rank, 1, "cpu", seed=rank)[0].host for rank in range(ranks)]


def uniform(ranks):
    return list(torch.randint(ROWS, (ranks, 200), generator=torch.Generator().manual_seed(1)))


def one_owner(ranks):
    """Return ids of the last rank alone, of which the first rank has none."""
    ids = torch.arange(ROWS)
    theirs = ids[Owners(ROWS, ranks).of(ids) == ranks - 1]
    return [theirs[: 40 * rank] for rank in range(ranks)]


def many(ranks):
    """Return ids that do not fit into a round's messages."""
    ids = torch.arange(ROWS)
    return [ids[rank::2] if rank else ids[:10] for rank in range(ranks)]


@pytest.fixture(scope="module")
def protocols(ranks):
    """The protocols of a step of two ranks, 3 wide: of a lookup of a few ids, and of one of many."""
    found = []
    for ids in (zipf(2), many(2)):
        (sent, *_), _ = ranks.run(scenarios.one_step, 2, ROWS, 3, ids)
        asked_of = torch.bincount(Owners(ROWS, 2).of(ids[0].unique()), minlength=2).tolist()
        found.append(Protocol.of(sent, 3, asked_of))
    return Protocols(*found, ROOM)


@pytest.fixture(scope="module")
def pool():
    with closing(RankPool(6)) as found:
        yield found


@pytest.fixture(scope="module")
def protocol(protocols):
    return protocols.many


def test_a_step_of_few_ids_is_four_rounds_and_a_message(protocols):
    """Ids and weights travel in the lookup's rounds, gradients in theirs, and the step is a vote."""
    apart = [[message.is_apart for part in each.messages for message in part] for each in protocols[:2]]
    assert [each.rounds for each in protocols[:2]] == [(2, 2), (2, 2)]
    assert [sum(each) for each in apart] == [1, 3]


@pytest.mark.parametrize("ids_of", [zipf, uniform, one_owner, many])
@pytest.mark.parametrize("number", [2, 3, 5])
def test_the_simulator_counts_the_rounds_and_bytes_of_real_ranks(ranks: RankPool, protocols, number, ids_of):
    """A protocol recorded on two ranks holds for any number of them, for other ids and another width."""
    dim, ids = 4 + number, ids_of(number)
    real = ranks.run(scenarios.one_step, number, ROWS, dim, ids)
    loads = load_of(Owners(ROWS, number), ids)
    protocol = protocols.of(max(loads, key=lambda load: load.pair))
    messages = [*protocol.messages[0], *protocol.messages[1]]
    assert [(rounds, sent) for _, rounds, sent in real] == [
        (sum(protocol.rounds), payload(messages, load, dim)) for load in loads
    ]


ON_HOSTS = [(number, per_host, ids) for number, per_host in ((4, 2), (5, 2), (6, 3)) for ids in (zipf, one_owner, many)]
FLAT = [(3, 1, many), (5, 1, many)]  # weights of few ids go along with rounds


@pytest.mark.parametrize(("number", "per_host", "ids_of"), [*FLAT, *ON_HOSTS])
def test_the_simulator_counts_what_ranks_on_hosts_send_to_each_other(protocols, pool, number, per_host, ids_of):
    """Each rank's messages and bytes to every other one, by the calls to gloo; flat with one rank per host."""
    dim, ids, hosts = 4 + number, ids_of(number), Hosts(number, per_host, in_levels=per_host > 1)
    real = pool.run(scenarios.traffic_of_a_step, number, per_host, ROWS, dim, ids)
    (rounds, line_bytes) = {each[:2] for each in real}.pop()
    protocol = replace(protocols.many, line_bytes=line_bytes)
    assert rounds == sum(protocol.rounds)
    found = hosts.step(protocol, asked_of(Owners(ROWS, number), ids, per_host), dim)
    for name in ("messages", "bytes"):
        assert torch.stack([getattr(each[2], name) for each in real]).tolist() == getattr(found, name).tolist(), name


@pytest.mark.parametrize(("number", "per_host", "ids_of"), [(4, 2, one_owner), (5, 3, many), (6, 3, many)])
def test_the_simulator_counts_what_ranks_on_hosts_send_if_all_of_them_carry(protocols, pool, number, per_host, ids_of):
    """As with NCCL; the rows go over gloo here."""
    dim, ids, hosts = 4 + number, ids_of(number), Hosts(number, per_host, in_levels=True, spreads=True)
    more = scenarios.traffic_of_a_step, per_host, ROWS, dim, ids
    real = pool.run(nccl.on_hosts, number, per_host, *more)
    protocol = replace(protocols.many, line_bytes=real[0][1])
    assert {each[0] for each in real} == {sum(protocol.rounds)}
    found = hosts.step(protocol, asked_of(Owners(ROWS, number), ids, per_host), dim)
    for name in ("messages", "bytes"):
        assert torch.stack([getattr(each[2], name) for each in real]).tolist() == getattr(found, name).tolist(), name


@pytest.mark.parametrize("count", [1, 6])
def test_gradients_of_any_number_of_tables_take_one_round_and_one_message(ranks: RankPool, count):
    """Tables of other widths and dtypes lie side by side in it; the step is one more round."""
    for counted, tables in ranks.run(scenarios.step_of_tables, 3, count):
        assert counted == (2, 1)
        asked = torch.arange(50).unsqueeze(1)
        for number, rows in enumerate(tables):
            times = sum((asked >= 10 * rank) & (asked < 30) for rank in range(3))
            assert torch.equal(rows, (-(number + 1.0) * times).to(rows.dtype).expand(-1, 2 + number))


def test_one_rank_sends_nothing_and_needs_no_more_rounds(ranks: RankPool, protocol):
    ((sent, rounds, payload_bytes),) = ranks.run(scenarios.one_step, 1, ROWS, 8, zipf(1))
    found = Protocol.of(sent, 8, [len(zipf(1)[0].unique())])
    assert (sum(found.rounds), payload_bytes) == (rounds, 0)
    assert rounds <= sum(protocol.rounds)


def test_the_expected_load_is_that_of_drawn_ids():
    rows, number, lookups = 20_000, 8, 4096
    expected = expected_load(rows, number, lookups, 1.05)
    ids = [batch.host for batch in zipf_batches(rows, lookups, 2 * number, "cpu")]
    # The order of frequency, as the model has it: the benchmark's ids are spread over the table.
    order = torch.cat(ids).bincount(minlength=rows).argsort(descending=True).argsort()
    drawn = load_of(Owners(rows, number), [order[some] for some in ids[:number]])
    busiest = Load(*(max(each) for each in zip(*drawn, strict=True)))
    for name in ("asked", "asked_away", "lent", "lent_away", "union"):
        assert getattr(busiest, name) == pytest.approx(getattr(expected, name), rel=0.08), name
    after = torch.cat([order[some] for some in ids[:number]]).unique()
    again = torch.isin(order[ids[number]].unique(), after).double().mean()
    assert float(again) == pytest.approx(expected.again, rel=0.08)


def test_the_fit_finds_the_constants_that_made_the_times(protocol):
    """Times made by the model itself give back its constants, also where some are 0."""
    true = Costs(step=3e-4, exchange=4e-5, meeting=1e-4, peer=2e-5, sent_byte=3e-10, lookup=2e-8, lent_byte=2e-10)
    rows = [
        features(protocol, expected_load(ROWS, ranks, lookups, 1.05), dim, 8 * dim, max(1, ranks / 2))
        for ranks in (1, 2, 4)
        for lookups in (100, 1000, 5000)
        for dim in (8, 32, 128)
    ]
    nothing = Protocol((0, 0), 0, ([], []))  # a single process
    rows.append(features(nothing, Load(1, 1000, 0, 0, 0, 0, 0), 8, 64, 1))
    found = Costs.fitted(rows, [true.seconds(row) for row in rows])
    assert found.to_json() == pytest.approx(true.to_json(), rel=1e-3, abs=1e-12)


@pytest.mark.parametrize("way", ["flat, rows between GPUs", "two levels, rows between GPUs"])
def test_a_cluster_without_delays_is_as_fast_as_one_process_or_faster(protocol, way):
    """Without communication, an owner of rows that several ranks request has less work than a single process."""
    free = dict.fromkeys(("round_seconds", "round_peer_seconds", "rows_seconds", "rows_peer_seconds"), 0.0)
    cluster = type(CLUSTER)(**free, link_bandwidth=1e30, net_bandwidth=1e30)
    work = Workload(rows=100_000, lookups=4096)
    speeds = efficiency(cluster, protocol, work, WAYS[way], ahead=False, ranks=(1, 2, 64))
    assert 1 <= speeds[1] <= speeds[2] <= speeds[64]
    slow = type(CLUSTER)(round_peer_seconds=1e-3)
    assert efficiency(slow, protocol, work, WAYS[way], ahead=True, ranks=(64,))[64] < 0.2


def test_bytes_between_hosts_take_as_long_as_their_bandwidth_says():
    """16 ranks on two hosts, each asking every owner for 100 rows of 512 bytes, of which the host has 150 of each."""
    asked = Asked(torch.full((16, 16), 100), torch.full((2, 16), 150))
    fixed, message = CLUSTER.rows_seconds, CLUSTER.rows_peer_seconds
    flat, levels = (Hosts(16, 8, in_levels=each).hops(asked, 512) for each in (False, True))
    assert CLUSTER.rows(flat, Way()) == pytest.approx(fixed + 15 * message + 800 * 512 / 20e9)
    # To the carrier, the first rank, from 7 others for 8 owners each, and for itself; to the other host; to its ranks.
    first, second, third = (7 * 900 * 512 / 120e9, 8 * 150 * 512 / 20e9, 7 * 150 * 512 / 120e9)
    assert CLUSTER.rows(levels, Way()) == pytest.approx(3 * fixed + 15 * message + first + second + third)
    # Each rank carries for the two owners in its place, of which that of the other host receives the rows itself.
    levels = Hosts(16, 8, in_levels=True, spreads=True).hops(asked, 512)
    first, second = 7 * 200 * 512 / 120e9, 150 * 512 / 20e9
    assert CLUSTER.rows(levels, Way()) == pytest.approx(3 * fixed + 15 * message + first + second)


def test_one_host_is_flat_and_two_with_rows_through_host_memory_are_slower(protocol):
    work = Workload(rows=100_000, lookups=4096)
    flat, built, *_ = (efficiency(CLUSTER, protocol, work, way, ahead=False, ranks=(8, 16)) for way in WAYS.values())
    assert built[8] == flat[8]
    assert built[16] < flat[16]


def test_expected_rows_of_a_host_are_those_of_drawn_ids():
    rows, number, lookups = 20_000, 8, 4096
    owners, chance = Owners(rows, number), rows_asked(rows, lookups, 1.05)
    draw = torch.Generator().manual_seed(0)
    found = (torch.rand(number, rows, generator=draw, dtype=torch.float64) < chance).unbind()
    ids = [each.nonzero().squeeze(1) for each in found]
    every = expected_asked(owners.of(torch.arange(rows)), number, chance, 4), asked_of(owners, ids, 4)
    for expected, counted in zip(*every, strict=True):
        assert float(expected.sum()) == pytest.approx(float(counted.sum()), rel=0.02)


def test_stages_are_those_of_the_step(ranks: RankPool):
    for seconds in ranks.run(scenarios.stages_of_a_step, 2, ROWS, 8, torch.arange(100)):
        assert set(seconds) == {"rounds", "payload", "ids", "gather", "sums", "scatter", "dense"}
        assert min(seconds.values()) > 0


class Job(Processes):
    """The ranks that these tests already have."""

    def __init__(self, ranks):
        self._ranks = ranks

    def ask(self, number, work, *args):
        return self._ranks.run(scenarios.work, number, work, args)

    def __exit__(self, *_):
        pass


def test_the_benchmark_of_ranks_says_what_was_run(ranks: RankPool, monkeypatch, tmp_path, capsys):
    small = Shape(400, 8, 32)
    shapes, fitted, held_out = {"small": (small, 0.1)}, [Shape(400, 16, 64)], [Shape(400, 16, 32)]
    plan = Plan((1, 2), shapes, fitted, held_out, 4, 1, (5000, 512, (64,)))
    monkeypatch.setattr(Plan, "of", lambda quick: plan)
    monkeypatch.setattr(bench_ranks, "Processes", lambda numbers: Job(ranks))
    path = tmp_path / "ranks.json"
    assert bench_ranks.main(["--json", str(path)]) == 0
    document = json.loads(path.read_text())
    found = document["results"]
    assert document["benchmark"] == "ranks-cpu"
    ours = [line for line in found["verified"] if line["trainer"] == "speedswap"]
    assert {(line["ranks"], line["lookahead"]) for line in ours} == {(1, False), (1, True), (2, False), (2, True)}
    entry = found["shapes"]["small"]
    for what in ("embedding alone", "and 0.1 ms of matrix products", "and 0.1 ms on another device"):
        one = entry[what]["independent"]["1"]["seconds"]
        for kind in ("ranks", "independent"):
            for ranks_of, line in entry[what][kind].items():
                assert line["over_one_process"] == pytest.approx(one / line["seconds"])
                same = entry[what]["independent"][ranks_of]["seconds"]
                assert line["over_independent"] == pytest.approx(same / line["seconds"])
    assert entry["bytes"]["1"]["payload"] == 0 < entry["bytes"]["2"]["payload"]
    assert [line["ranks"] for line in found["model"]["held_out"]] == [None, 1, 2]
    assert [line["goal"] for line in found["acceptance"]] == [0.15, 1.05]
    assert len([*readme_figures.ranks(found)]) == 6  # of 2 ranks, by work and lookahead
    assert_on_page(readme_ranks.blocks(found, results("rank_counts-cpu.json")))
    assert "a step: " in capsys.readouterr().out


def results(name):
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())["results"]


def assert_on_page(blocks):
    for name, said in blocks.items():
        assert len({line.count("|") for line in said.splitlines()}) == 1, name
        assert f"<!-- {name}: " in (ROOT / readme_ranks.PAGE).read_text()


def test_the_benchmark_of_counts_says_what_was_counted(ranks: RankPool):
    """Four rounds, or three and three ahead; two hosts of two ranks have one carrier each."""

    def job(number):
        ranks.run(scenarios.forget, number)
        return Job(ranks)

    sent = [{"host": 1, "lookups": 8, "counted": 10.0, "on_card": 12.0}]
    models = ("1 embedding", "a collection of 10")
    plan = bench_rank_counts.Plan({4: models}, (2,), Workload(2000, 256), (1, 4, 16))
    found = bench_rank_counts.measure(plan, job, lambda: sent)
    assert {(line["lookahead"], line["rounds"], line["rounds_ahead"]) for line in found["counts"]} == {
        (False, 4, 0), (True, 3, 3),
    }  # fmt: skip
    flat, two = ([line["hosts"]["2"] for line in found["counts"] if line["per_host"] == host] for host in (1, 2))
    for before, after in zip(flat, two, strict=True):
        assert after["messages_away"] < before["messages_away"]
        assert after["bytes_away"] < before["bytes_away"]
        assert after["busiest_bytes_away"] == pytest.approx(2 * after["bytes_away"], rel=0.05)  # one of two carries all
    assert all(line["processor_seconds"] > 0 for line in found["counts"])
    assert_on_page(readme_ranks.blocks(results("ranks-cpu.json"), found))
    ElementTree.fromstring(readme_ranks.picture(found))


def test_the_picture_shows_what_was_predicted():
    found = results("rank_counts-cpu.json")
    assert (ROOT / readme_ranks.PICTURE).read_text() == readme_ranks.picture(found)


def test_a_trainer_that_differs_from_one_process_ends_the_benchmark(ranks: RankPool):
    with pytest.raises(RanksFailed, match=r"WrongResultError: .* on 2 ranks differs from one process by"):
        ranks.run(scenarios.verify_broken, 2, Shape(400, 8, 32))
