"""Reading interactions, every malformed file, and the promise that nothing crosses the split in time."""

import sys

import numpy as np
import pytest
import torch

from benchmarks import data as module
from benchmarks.config import UserError
from benchmarks.data import (
    Columns,
    DataError,
    evaluation_batches,
    make_batch,
    make_dataset,
    make_requests,
    ranges,
    read_interactions,
    shipped_file,
    training_batches,
)
from tests.benchmarks.generated import write_interactions

HEADER = "user_id:token\titem_id:token\trating:float\ttimestamp:float"


def write(tmp_path, *lines, header=HEADER, end="\n"):
    file = tmp_path / "a.inter"
    file.write_bytes(("\n".join([header, *lines]) + end).encode())
    return file


@pytest.fixture(scope="module")
def movielens():
    return read_interactions(shipped_file())


@pytest.fixture(params=["movielens", "generated", "generated, short histories"])
def dataset(request, tmp_path):
    if request.param == "movielens":
        return make_dataset(request.getfixturevalue("movielens"))
    events = read_interactions(write_interactions(tmp_path / "g.inter"))
    return make_dataset(events, max_history=5 if "short" in request.param else None)


def test_the_shipped_file_is_movielens_100k(movielens):
    assert len(movielens) == 100_000 and len(movielens.users) == 943 and len(movielens.items) == 1682
    assert sorted(set(movielens.rating)) == [1, 2, 3, 4, 5]
    assert "recbole" not in sys.modules, "the package is located, not imported"
    order = list(zip(movielens.user.tolist(), movielens.time.tolist(), strict=True))
    assert order == sorted(order)


def test_ties_keep_the_files_order_and_columns_may_stand_anywhere(tmp_path):
    file = write(
        tmp_path, "9\tx y\tb\tp\t3.5", "9\tz\ta\tq\t4", "9\t\ta\tr\t1e0", header="t:float\ttags:token_seq\twho:token\tn:token\tstars:float"
    )
    events = read_interactions(file, Columns(user="who", item="n", rating="stars", time="t"))
    assert [events.users[u] for u in events.user] == ["b", "a", "a"]
    assert [events.items[i] for i in events.item] == ["p", "q", "r"] and events.rating.tolist() == [3.5, 4.0, 1.0]


@pytest.mark.parametrize("end", ["\n", "", "\r\n", "\n\n\r\n"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_line_ends_and_marks_that_editors_leave(tmp_path, end, bom):
    file = tmp_path / "a.inter"
    file.write_bytes(bom + f"{HEADER}\r\nu\ti\t3\t5\r\nu\tj\t4\t6{end}".encode())
    events = read_interactions(file)
    assert events.items == ("i", "j") and events.time.tolist() == [5, 6]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["u\ti\t3\t1", "u\ti\tgood\t1"], r"a.inter:3: column 3 \(rating\): 'good' is not a finite number"),
        (["u\ti\tnan\t1"], r"a.inter:2: column 3 \(rating\): 'nan' is not a finite number"),
        (["u\ti\t3\tinf"], r"a.inter:2: column 4 \(timestamp\): 'inf' is not a finite number"),
        (["u\ti\t3\t1_000"], r"a.inter:2: column 4 \(timestamp\): '1_000' is not a finite number"),
        (["u\ti\t\t1"], r"a.inter:2: column 3 \(rating\): '' is not a finite number"),
        (["u\ti\t3\t1", "u\ti\t3"], r"a.inter:3: column 3: the line has 3 columns, the header 4"),
        (["u\ti\t3\t1\tx"], r"a.inter:2: column 5: the line has 5 columns, the header 4"),
        (["u i 3 1"], r"a.inter:2: column 1: the line has 1 columns, the header 4"),
        (["u\ti\t3\t1", "", "u\ti\t3\t1"], r"a.inter:3: column 1: the line has 1 columns"),
        (["\ti\t3\t1"], r"a.inter:2: column 1 \(user_id\): empty"),
        (["u\t\t3\t1"], r"a.inter:2: column 2 \(item_id\): empty"),
        ([], r"a.inter:1: the file has a header and no events"),
    ],
)
def test_a_malformed_line_is_named_by_line_and_column(tmp_path, lines, words):
    with pytest.raises(DataError, match=words):
        read_interactions(write(tmp_path, *lines))


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("", r"a.inter:1: column 1: header '' is not name:type"),
        ("user_id,item_id", r"a.inter:1: column 1: header 'user_id,item_id' is not name:type"),
        (HEADER.replace("rating:float", "rating"), r"a.inter:1: column 3: header 'rating' is not name:type"),
        (HEADER.replace("rating:float", "rating:int"), r"a.inter:1: column 3: header 'rating:int' is not name:type"),
        (HEADER.replace("rating:float", "rating:token"), r"a.inter:1: column 3 \(rating\): type 'token', expected 'float'"),
        (HEADER.replace("rating", "score"), r"a.inter:1: no column 'rating'; the header has user_id, item_id, score, timestamp"),
        (HEADER + "\trating:float", r"a.inter:1: column 5: 'rating' is also column 3"),
    ],
)
def test_a_malformed_header_is_named(tmp_path, header, words):
    with pytest.raises(DataError, match=words):
        read_interactions(write(tmp_path, "u\ti\t3\t1", header=header))


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match=r"absent.inter: cannot read the data file: No such file"):
        read_interactions(tmp_path / "absent.inter")
    with pytest.raises(DataError, match=r"cannot read the data file: Is a directory"):
        read_interactions(tmp_path)
    (tmp_path / "b.inter").write_bytes(HEADER.encode() + b"\nu\ti\t3\t1\nu\t\xff\t3\t1\n")
    with pytest.raises(DataError, match=r"b.inter:3: column 2: not UTF-8 text \(byte 3 of the line\)"):
        read_interactions(tmp_path / "b.inter")


def test_a_missing_package_says_how_to_go_on(monkeypatch):
    def missing(name):
        raise module.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(module.importlib.metadata, "files", missing)
    with pytest.raises(DataError, match=r"data.path: not set, and 'recbole'.*is missing: install it.*data.path=FILE"):
        shipped_file()
    monkeypatch.setattr(module.importlib.metadata, "files", lambda name: [])
    with pytest.raises(DataError, match=r"does not hold recbole/dataset_example/ml-100k/ml-100k.inter"):
        shipped_file()


def test_nothing_crosses_the_split(dataset):
    """The one promise of the split: training knows nothing of its moment or later, by target, by history, by vocabulary."""
    events, split = dataset.events, dataset.split_time
    training_target = ranges(dataset.train.start, dataset.train.stop)
    training_history = ranges(dataset.train.begin, dataset.train.start)
    held_out_target = ranges(dataset.held_out.start, dataset.held_out.stop)
    assert events.time[training_target].max() < split <= events.time[held_out_target].min()
    assert events.time[training_history].max() < split
    assert sorted([*training_target, *held_out_target]) == list(range(len(events))), "every rating is predicted once"
    early = events.time < split
    assert (dataset.item_index[early] > 0).all() and (dataset.rating_index[early] > 0).all()
    new = ~np.isin(events.item, events.item[early])
    assert not dataset.item_index[new].any() and (dataset.item_index[~new] > 0).all()
    assert dataset.item_index.max() < dataset.num_items and dataset.rating_index.max() < dataset.num_ratings


def test_histories_are_strictly_earlier_and_the_users_own(dataset):
    events = dataset.events
    for requests in (dataset.train, dataset.held_out):
        length = requests.start - requests.begin
        history, moment = ranges(requests.begin, requests.start), np.repeat(requests.time, length)
        assert (events.time[history] < moment).all()
        assert (events.user[history] == np.repeat(events.user[requests.start], length)).all()
        count = requests.stop - requests.start
        target = ranges(requests.start, requests.stop)
        assert (count >= 1).all() and (events.time[target] == np.repeat(requests.time, count)).all()
        assert (events.user[target] == np.repeat(events.user[requests.start], count)).all()


def test_histories_are_whole_against_a_loop(tmp_path):
    events = read_interactions(write_interactions(tmp_path / "g.inter", users=12))
    for limit in (None, 1, 5):
        requests = make_requests(events, limit)
        for r in range(len(requests)):
            user, time = events.user[requests.start[r]], requests.time[r]
            earlier = [i for i in range(len(events)) if events.user[i] == user and events.time[i] < time]
            assert list(range(requests.begin[r], requests.start[r])) == (earlier if limit is None else earlier[-limit:])
        assert requests.targets == len(events)


def test_batches_hold_what_the_requests_say(dataset):
    events = dataset.events
    batch = make_batch(dataset, dataset.held_out.take(np.arange(50)))
    assert batch.lengths.sum() == len(batch.item) == len(batch.rating) == len(batch.gap)
    assert batch.candidates.sum() == len(batch.candidate) == len(batch.label)
    at, target = 0, 0
    for r in range(50):
        requests = dataset.held_out
        for i in range(requests.begin[r], requests.start[r]):
            gap = requests.time[r] - events.time[i]
            assert batch.item[at] == dataset.item_index[i] and batch.rating[at] == dataset.rating_index[i]
            assert batch.gap[at] == min(int(np.log2(max(gap, 1))), module.GAP_BUCKETS - 1)
            at += 1
        for i in range(requests.start[r], requests.stop[r]):
            assert batch.candidate[target] == dataset.item_index[i]
            assert batch.label[target] == float(events.rating[i] >= 4)
            target += 1
    assert (at, target) == (len(batch.item), len(batch.label))


def test_the_split_holds_the_asked_share_and_ties_stay_together(movielens):
    for share in (0.1, 0.2, 0.5):
        dataset = make_dataset(movielens, held_out=share)
        assert dataset.held_out.targets == pytest.approx(share * len(movielens), rel=0.01)
        assert dataset.base_rate(dataset.held_out) == np.mean(movielens.rating[movielens.time >= dataset.split_time] >= 4)


def test_order_of_batches_depends_on_the_seed_alone(dataset):
    def first(seed, count=30):
        batches = training_batches(dataset.train, 16, seed)
        return np.concatenate([next(batches).start for _ in range(count)])

    assert np.array_equal(first(3), first(3)) and not np.array_equal(first(3), first(4))
    per_pass = len(dataset.train) // 16
    whole = first(0, per_pass)
    assert len(set(whole)) == len(whole) == per_pass * 16, "one pass meets no request twice"
    every = np.concatenate([chosen.start for chosen in evaluation_batches(dataset.held_out, 7)])
    assert np.array_equal(every, dataset.held_out.start)


def test_a_batch_larger_than_the_data_is_the_data(dataset):
    few = dataset.train.take(np.arange(5))
    assert sorted(next(training_batches(few, 64, 0)).start) == sorted(few.start)


def test_many_rating_levels_become_bins(tmp_path):
    lines = [f"u{i % 7}\ti{i % 5}\t{(i * 37 % 1000) / 100}\t{i}" for i in range(400)]
    dataset = make_dataset(read_interactions(write(tmp_path, *lines)), threshold=5.0)
    assert 2 < dataset.num_ratings <= 66 and dataset.rating_index.min() >= 1 and dataset.rating_index.max() < dataset.num_ratings
    order = np.argsort(dataset.events.rating)
    assert (np.diff(dataset.rating_index[order]) >= 0).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"held_out": 0.0}, r"data.held_out = 0.0: expected a share between 0 and 1"),
        ({"held_out": 1.0}, r"data.held_out = 1.0"),
        ({"held_out": 0.9999}, r"data.held_out = 0.9999: no event is earlier than the split"),
        ({"threshold": 6.0}, r"data.threshold = 6.0: every training rating has label 0"),
        ({"threshold": 0.0}, r"data.threshold = 0.0: every training rating has label 1"),
        ({"max_history": 0}, r"data.max_history = 0: expected at least 1"),
    ],
)
def test_splits_that_leave_nothing_to_learn_are_named(tmp_path, options, words):
    events = read_interactions(write_interactions(tmp_path / "g.inter"))
    with pytest.raises(UserError, match=words):
        make_dataset(events, **options)


def test_ranges():
    assert ranges(np.array([3, 7, 7]), np.array([5, 7, 9])).tolist() == [3, 4, 7, 8]
    assert ranges(np.array([], dtype=int), np.array([], dtype=int)).tolist() == []
    assert torch.from_numpy(ranges(np.array([0]), np.array([2]))).dtype == torch.int64
