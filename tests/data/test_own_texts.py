"""Your own texts: every form gives the same rows, labels keep their names, bad rows are named."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch

import sets
from fadamgc.data.own_texts import number_labels, read
from fadamgc.data.split import hold_out
from fadamgc.errors import InputError
from fadamgc.tasks.text_data import own_texts

ROWS = [
    {"text": "a lovely film", "other": "yes", "label": "positive", "user": 3},
    {"text": "dull,\nand long", "other": "no", "label": "negative", "user": 10},
    {"text": "3", "other": "2020-01-01", "label": "positive", "user": 3},
]
COLUMNS = {name: [row[name] for row in ROWS] for name in ROWS[0]}


class Dataset:
    """What ``read`` uses of a Dataset of Hugging Face."""

    def __init__(self, columns, names=None):
        self.columns, self.column_names = columns, list(columns)
        self.features = {name: type("Feature", (), {"names": names} if names else {}) for name in columns}

    def with_format(self, _):
        return self

    def __getitem__(self, name):
        return iter(self.columns[name])


def lines(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def written(form, folder):
    path = folder / f"reviews.{form}"
    match form:
        case "csv":
            pd.DataFrame(ROWS).to_csv(path, index=False)
        case "parquet":
            sets.write_rows(path, **COLUMNS)
        case "jsonl":
            lines(path)
        case "json":
            path.write_text(json.dumps(ROWS, indent=1))
    return path


FORMS = {
    **{form: lambda folder, form=form: written(form, folder) for form in ("csv", "parquet", "jsonl", "json")},
    "lines in .json": lambda folder: lines(folder / "reviews.json"),
    "dicts": lambda _: ROWS,
    "columns": lambda _: COLUMNS,
    "frame": lambda _: pd.DataFrame(ROWS, index=[7, 7, 9]),
    "like a Dataset": lambda _: Dataset(COLUMNS),
}


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_give_the_same_rows(tmp_path, form):
    data = FORMS[form](tmp_path)
    found = read(data, ("text", "other"), "label", "user")
    assert found.first == COLUMNS["text"]
    assert found.second == COLUMNS["other"]
    assert found.labels == COLUMNS["label"]
    assert found.owner == COLUMNS["user"]


@pytest.mark.parametrize(
    "labels", [["b", "a"], np.array(["b", "a"]), pd.Series(["b", "a"]), ("b", "a"), np.array([1, 0])]
)
def test_texts_and_labels_in_lists(labels):
    found = own_texts((["good", "bad"], labels), None, None, None, None, None)
    assert found.train.first == ["good", "bad"]
    assert found.train.y.tolist() == [1, 0]
    assert found.columns == ("text",)


@pytest.mark.parametrize("kind", [list, np.array, iter])
def test_pairs_in_lists(kind):
    data = kind([("a", "b"), ("c", "d")]), torch.tensor([0, 1])
    found = own_texts(data, None, ("q", "a") if kind is iter else None, None, None, None)
    assert (found.train.first, found.train.second) == (["a", "c"], ["b", "d"])
    assert found.train.y.tolist() == [0, 1]


def test_a_dataset_of_hugging_face():
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos", "other"])}
    )
    made = datasets.Dataset.from_dict({"text": ["good", "bad"], "label": [1, 0]}, features=features)
    for data in (made, made.with_format("torch")):
        found = own_texts(data, None, None, None, None, None)
        assert found.train.first == ["good", "bad"]
        assert found.train.y.tolist() == [1, 0]
        assert found.labels == ("neg", "pos", "other")
    with pytest.raises(InputError, match=r"data has the parts train; give .* data=dataset\['train'\]"):
        own_texts(datasets.DatasetDict({"train": made}), None, None, None, None, None)


# Labels.


@pytest.mark.parametrize(
    ("labels", "classes", "known", "y"),
    [
        (["b", "c", "a"], None, ("a", "b", "c"), [1, 2, 0]),
        ([1, 0, 1], None, (0, 1), [1, 0, 1]),
        ([5, -1, 10], None, (-1, 5, 10), [1, 0, 2]),
        ([10**30, 0, 0], None, (0, 10**30), [1, 0, 0]),
        ([1, 0, 1], 3, (0, 1, 2), [1, 0, 1]),
        ([1, 0, 1], ["neg", "pos"], ("neg", "pos"), [1, 0, 1]),
        (["low", "high", "low"], ("low", "middle", "high"), ("low", "middle", "high"), [0, 2, 0]),
        (["b", "a", "b"], 2, ("a", "b"), [1, 0, 1]),
    ],
)
def test_labels_are_numbered_in_sorted_order(labels, classes, known, y):
    part = read((["x", "y", "z"], labels), ("text",), "label")
    (found,), keys = number_labels([part], "label", classes)
    assert keys == known
    assert found.y.tolist() == y


def test_labels_of_a_csv_file_are_numbers_if_all_are(tmp_path):
    path = tmp_path / "stars.csv"
    path.write_text("text,label,user\ngood,5,007\nbad,1,x\n")
    found = read(path, ("text",), "label", "user")
    assert found.labels == [5, 1]
    assert found.owner == ["007", "x"]
    path.write_text("text,label\ngood,true\nbad,false\n")
    assert read(path, ("text",), "label").labels == ["true", "false"]


def test_test_data_have_the_labels_of_the_train_data():
    train, test = (["x", "y"], ["b", "a"]), (["z"], ["b"])
    found = own_texts(train, test, None, None, None, None)
    assert found.test.y.tolist() == [1]
    with pytest.raises(InputError, match=r"test: row 0 has label='c'; there are 2 classes, a, b: give clas"):
        own_texts(train, (["z"], ["c"]), None, None, None, None)


# Bad data.


def many(**changed):
    return [ROWS[0], ROWS[1] | changed]


def without(name):
    return [ROWS[0], {k: v for k, v in ROWS[1].items() if k != name}]


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (many(text=""), {}, "data: row 1 has an empty text in 'text'; fill it in, or remove the row"),
        (
            many(text=None),
            {},
            "row 1 has text=None, which is not a text; write a text there, or remove",
        ),
        (many(text="\ud800"), {}, "data: row 1 has a text in 'text' that is not UTF-8"),
        (many(label=None), {}, "row 1 has label=None; it must be a text or a whole number: fill it in, or"),
        (many(label=0.5), {}, "row 1 has label=0.5; it must be a text or a whole number"),
        (many(label=True), {}, "row 1 has label=True; it must be a text or a whole number"),
        (many(label=1), {}, "row 1 has label=1 and row 0 has label='positive'; write all of them as texts"),
        (many(user=None), {"client": "user"}, "row 1 has user=None; it must be a text or a whole number"),
        (without("label"), {}, "row 1 has no 'label'; it has text, other, user"),
        ([*ROWS, "good"], {}, "row 3 is 'good'; it must be an object with the columns text, label"),
        (ROWS[:1], {}, "data: all rows have label='positive'; there must be at least two labels"),
        ([], {}, "data: there are no rows in it"),
        (({}, []), {}, "row 0 has no 'text'"),
        ((["a"], ["b", "c"]), {}, "data has 1 texts and 2 labels; give one label per text"),
        (("a", "b"), {}, "data=(texts, labels): texts is not a list"),
        ((["a"], 3), {}, "data=(texts, labels): labels is not a list"),
        (([("a", "b"), ("c",)], [0, 1]), {}, "row 1 has ('c',); it must be a pair of texts"),
        ((["a", "b"], [0, 1]), {"client": "user"}, "data=(texts, labels) has no column 'user'; give a list"),
        (COLUMNS | {"label": ["a"]}, {}, "different numbers of rows (text: 3, label: 1)"),
        (COLUMNS | {"label": 3}, {}, "'label' is not a list"),
        (pd.DataFrame(ROWS), {"label": "labels"}, "no column 'labels'; it has text, other, label, user; did"),
        (pd.DataFrame(ROWS, columns=["text", "label"]).iloc[:0], {}, "there are no rows in it"),
        (ROWS, {"label": "text"}, "label='text' is a column of texts, too; give the name of the column of"),
        (3, {}, "data of type int is not accepted; give a .csv, .parquet, .jsonl or .json file, a pair"),
        (ROWS, {"test": 1.5}, "test=1.5 is not accepted; it must be a share > 0 and < 1, test data, or None"),
        (ROWS, {"test": 0}, "test=0 is not accepted"),
        (ROWS, {"client": 3}, "client=3 is not accepted; it must be the name of a column"),
        (ROWS, {"classes": ["a", "a"]}, "classes=['a', 'a'] is not accepted"),
        (ROWS, {"classes": ["a"]}, "the number of classes=1 is not accepted"),
        (ROWS, {"classes": 5}, "classes=5, but data has the labels negative, positive; give the names"),
        (
            ROWS,
            {"classes": ["x", "y"]},
            "row 0 has label='positive'; there are 2 classes, x, y: give classes=",
        ),
        (ROWS[:2], {"test": 0.2}, "test=None trains without an evaluation"),
        ((list("abcdefghijkl"), list("abcdefghijkl")), {}, "all 12 rows have different values of 'label'"),
    ],
)
def test_bad_data_are_refused(data, options, message):
    arguments = {"test": None, "columns": None, "label": None, "client": None, "classes": None} | options
    with pytest.raises(InputError) as error:
        own_texts(data, **arguments)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a", "label": 0}\n\n{"text": \n', "line 3 is not JSON"),
        (b'{"text": "a", "label": 0}\n[1]\n', "row 1 is [1]; it must be an object"),
        (b"[" * 100_000, "the file is not JSON"),
        (b"\n", "there are no rows in it"),
        (b"\xff", "save it as UTF-8"),
        (b'{"review": "a", "label": 0}\n', "row 0 has no 'text'; it has review, label"),
    ],
)
def test_bad_json_is_refused(tmp_path, content, message):
    path = tmp_path / "reviews.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        read(path, ("text",), "label")
    assert message in str(error.value)


# Test data that are held out.


def test_a_share_of_each_label_is_held_out():
    labels = ["a"] * 50 + ["b"] * 30 + ["c"] * 2
    found = own_texts(([f"text {i}" for i in range(82)], labels), 0.2, None, None, None, None)
    assert np.bincount(found.train.y).tolist() == [40, 24, 2]
    assert np.bincount(found.test.y).tolist() == [10, 6]
    assert sorted(found.train.first + found.test.first) == sorted(f"text {i}" for i in range(82))


def test_a_share_of_each_client_is_held_out():
    rows = [{"text": f"{i}", "label": i % 2, "user": "ab"[i < 10]} for i in range(50)]
    found = own_texts(rows, 0.2, None, None, "user", None)
    assert {user: found.train.owner.tolist().count(user) for user in "ab"} == {"a": 32, "b": 8}
    assert found.test.owner.tolist().count("b") == 2
    for part in (found.train, found.test):
        assert part.owner.tolist() == ["ab"[int(text) < 10] for text in part.first]


def test_clients_with_two_texts_each_give_test_data_together():
    owner = np.repeat(np.arange(50), 2)
    rows, held_out = hold_out(torch.zeros(100), owner, 0.2, seed=0)
    assert len(held_out) == 20
    assert len(np.unique(owner[rows])) == 50
    assert sorted([*rows, *held_out]) == list(range(100))
